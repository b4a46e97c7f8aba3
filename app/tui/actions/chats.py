"""Conversations deleted, and brought back: the one that is open, too.

The reply that runs while its chat is left for another: it is stopped, and the user is told what became of it.

What it would take to go on along each path of the tree that is looked at: asked for as paths come into view, then kept.

Moving in the conversation, and between conversations.

What happens once, when the screen is there: the engine starts, the conversations are opened, the tour was shown.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tokamac.app.chat import recording
from tokamac.app.chat.attachments import Draft, apart, joined
from tokamac.app.chat.background import PATH, PriceQuestion
from tokamac.app.chat.listing import ChatNotice, delete, excerpt, restore
from tokamac.app.chat.preferences import ChatOverrides
from tokamac.app.chat.recording import LEFT, Ledger, Recording
from tokamac.app.chat.session import Session
from tokamac.app.chat.steps import EnginePhase, Step, TurnBegun
from tokamac.app.store.store import Store
from tokamac.app.store.values import StoredChat, StoreError
from tokamac.app.tui.widgets.prompt_input import Prompt
from tokamac.app.tui.widgets.status import StatusLine
from tokamac.app.tui.widgets.transcript import Transcript
from tokamac.engine.events import Price

if TYPE_CHECKING:
    from tokamac.app.chat.recording import Recording
    from tokamac.app.tui.screens.chat import ChatScreen
    from tokamac.app.tui.screens.chats import Pick


KEPT = "The reply was stopped; what was written of it stays in its chat."
EMPTY = "The reply was stopped before its first word; the prompt stays in its chat."
STOPPED = "The reply was stopped, and nothing keeps what was written of it."
Fate = Callable[[], str]
"""Says what became of a reply, once its chat has been left."""


def running(chat: "ChatScreen") -> Fate | None:
    """Return what says the fate of the reply that runs; None where none does."""
    if not chat.session.engine.replying:
        return None
    recording = chat.recording
    if recording is None:
        return lambda: STOPPED
    return partial(_fate, recording.store, recording.ledger, chat.session.turns[-1].reply_key)


def _fate(store: Store, ledger: Ledger, reply: int) -> str:
    """Return what became of the reply of that key. It may be stored at its end only, so that its id is looked up here."""
    if (message := ledger.stored(reply)) is None:
        return STOPPED
    try:
        kept = store.message(message)
    except StoreError:
        return STOPPED
    if kept.state != "stopped":  # how much of it is there was written some time before
        return STOPPED
    return KEPT if kept.text or kept.thinking else EMPTY


def tell(chat: "ChatScreen", stopped: Fate | None) -> None:
    """Say what became of the reply that ran, if one did."""
    if stopped is not None:
        told = stopped()
        chat.notify(told, severity="warning" if told == STOPPED else "information", markup=False, timeout=6)


class PathPrices:
    """The prices of one look at the tree. perform: has the session's steps done."""

    def __init__(self, session: Session, perform: Callable[[list[Step]], None]) -> None:
        self._session = session
        self._perform = perform
        self._asked: set[int] = set()
        self._known: dict[int, Price] = {}
        self._unpriced: set[int] = set()  # there is no price of these: they are not asked about again

    def of(self, keys: Sequence[int]) -> Mapping[int, Price]:
        """Return what is known so far, by message, and have the engine asked, aside, for what is not known of ``keys``.

        While it is at work it is not asked: no other path can be read then either. Nor again for what it was asked already, unless
        that was given up for another question.
        """
        prices = self._session.prices
        self._known |= {key: each.price for each in prices.known for key in self._own([each.question])}
        self._unpriced.update(self._own(prices.unpriced))
        lacking = [key for key in keys if key not in self._known and key not in self._unpriced]
        if self._session.engine.phase is EnginePhase.IDLE and not set(self._own(prices.waiting)).issuperset(lacking):
            self._asked.update(lacking)
            self._perform(self._session.price_paths(lacking))
        return self._known

    def _own(self, questions: Sequence[PriceQuestion]) -> Iterator[int]:
        """Yield the messages that this look asked ``questions`` for."""
        return (each.key for each in questions if each.id == PATH and each.key is not None and each.key in self._asked)


NOT_OPENED = "Chats are not kept, so there is nothing to open; the reason was said at the start."


def new_chat(chat: "ChatScreen", _: str) -> None:
    """Begin another conversation; this one is kept."""
    if chat.session.turns:
        chat.notify("New chat. The model stays loaded.", markup=False, timeout=3)
    if begin_new(chat):
        _tell_left(chat)


def begin_new(chat: "ChatScreen") -> bool:
    """Leave the conversation for a new one, and say what became of a reply that ran. Return whether a draft stays with it."""
    stopped = running(chat)
    stays, unkept = _leave(chat)
    chat.memory.hold(ChatOverrides(), chat.session)
    chat.perform(chat.session.new_chat())
    chat.composer.hold(unkept)
    tell(chat, stopped)
    chat.query_one(Prompt).focus()
    return stays


def chats(chat: "ChatScreen", _: str) -> None:
    """List and search the conversations."""
    from tokamac.app.chat.listing import Library
    from tokamac.app.tui.screens.chats import ChatsScreen

    recording = chat.recording
    if recording is None:
        chat.notify(NOT_OPENED, severity="warning", markup=False)
        return

    def closed(pick: "Pick | None") -> None:
        recording.look_up_title()  # the list can change it
        chat.show()
        if pick is not None:
            open_chat(chat, pick)

    chat.app.push_screen(ChatsScreen(Library(recording.store.file), recording.chat, chat.session.keymap), closed)


def open_(chat: "ChatScreen", name: str) -> None:
    """Open the stored conversation whose id is, or begins with, ``name``; without one, list them."""
    from tokamac.app.tui.screens.chats import Pick

    if not name or chat.recording is None:
        chats(chat, "")
        return
    try:
        found = chat.recording.store.chat(name)
    except StoreError as error:
        chat.notify(error.one_line(), severity="error", markup=False)
        return
    open_chat(chat, Pick(found.id))


def _leave(chat: "ChatScreen") -> tuple[bool, Draft]:
    """Have what is not sent stay with the chat that is left, and return whether there is any, and what nothing keeps.

    An edit ends.
    """
    unsent, recording = chat.composer.unsent, chat.recording
    kept = recording is not None and recording.drafted(unsent.whole)
    chat.composer.hold(Draft())
    return (bool(unsent.whole), Draft()) if kept else (False, unsent)


def _tell_left(chat: "ChatScreen") -> None:
    chat.notify(LEFT, markup=False, timeout=4)


def open_chat(chat: "ChatScreen", pick: "Pick", *, leaving: bool = True) -> None:
    """Open a stored conversation, at a message of it if one was found.

    leaving: what is not sent stays with the chat before; else there was none, and it goes into this one.
    """
    recording = chat.recording
    if recording is None:
        return
    try:
        again, held = recording.chat == pick.chat, recording.holds(pick.chat)
        tree, draft = (chat.session.conversation.tree, "") if held else recording.read(pick.chat)
        own = recording.own(pick.chat)
    except StoreError as error:
        chat.notify(error.one_line(), severity="error", markup=False)
        return
    if not held:
        stopped = running(chat)
        stays, unkept = _leave(chat) if leaving and not again else (False, chat.composer.unsent)
        if stays:
            _tell_left(chat)
        chat.memory.hold(own, chat.session)
        chat.perform(chat.session.open(tree))
        recording.hold(pick.chat, tree, draft)
        chat.composer.hold(unkept if again else joined([apart(draft), unkept]))
        tell(chat, stopped)
        chat.show()  # its title
    if pick.message is None:
        chat.query_one(Prompt).focus()
    else:
        jump(chat, pick.message if not held else recording.held(pick.message))


def jump(chat: "ChatScreen", key: int | None) -> None:
    """Bring the message ``key`` into view, on whatever path it is."""
    tree = chat.session.conversation.tree
    if key is None or key not in tree.nodes:
        chat.notify("That message is of another window; open the chat again.", markup=False)
        return
    if key not in {node.key for node in tree.path_to(tree.head)}:
        chat.perform(chat.session.show_path(key))
    transcript = chat.query_one(Transcript)
    transcript.focus()
    transcript.choose(key)


def branches(chat: "ChatScreen", _: str) -> None:
    """Show the conversation as a tree, and go to what is chosen in it."""
    from tokamac.app.tui.screens.chats import BranchesScreen

    tree = chat.session.conversation.tree
    if not tree.nodes:
        chat.notify("There is nothing to see yet.", markup=False, timeout=3)
        return

    def chosen(key: int | None) -> None:
        if key is not None:
            jump(chat, key)
        else:  # what is pointed at has prices again
            chat.perform(chat.session.select(chat.query_one(Transcript).chosen))

    chat.app.push_screen(BranchesScreen(tree, PathPrices(chat.session, chat.perform).of), chosen)


def title(chat: "ChatScreen", text: str) -> None:
    """Give the conversation the title that was written."""
    recording = chat.recording
    if recording is None or recording.chat is None:
        chat.notify("There is nothing to give a title to yet.", markup=False)
    elif not text:
        chat.notify("Write the title after the command: /title Keys and values", markup=False)
    elif recording.retitle(text):
        chat.show()
        chat.notify("The chat has another title.", markup=False, timeout=3)


def regenerate(chat: "ChatScreen", _: str) -> None:
    """Make the last reply again."""
    _answer(chat, chat.session.regenerate())


def again(chat: "ChatScreen", _: str) -> None:
    """Make the reply again that is pointed at."""
    node = chat.pointed()
    _answer(chat, chat.session.regenerate(None if node is None else node.key))


def continue_(chat: "ChatScreen", _: str) -> None:
    """Go on with the reply that is pointed at, or else the last one."""
    _answer(chat, chat.session.continue_reply(chat.query_one(Transcript).chosen))


def _answer(chat: "ChatScreen", steps: list[Step]) -> None:
    """Do ``steps``; where a reply begins by them, one goes on in the box, as after sending."""
    chat.perform(steps)
    if any(isinstance(step, TurnBegun) for step in steps):
        chat.query_one(Prompt).focus()


def edit(chat: "ChatScreen", _: str) -> None:
    """Put the prompt that is pointed at, or else the last one, into the box; sent from there, it stands beside the old one."""
    node = chat.pointed()
    if node is None:
        chat.notify("There is no message to edit yet.", markup=False, timeout=3)
        return
    prompt = chat.session.conversation.prompt_of(node.key)
    if prompt is None:
        chat.notify("There is no prompt to edit here.", markup=False, timeout=3)
        return
    chat.begin_edit(prompt.key, Draft(prompt.prompt or "", prompt.attachments))


def older(chat: "ChatScreen", _: str) -> None:
    """Read the version before this one."""
    _step(chat, -1)


def newer(chat: "ChatScreen", _: str) -> None:
    """Read the version after this one."""
    _step(chat, 1)


def _step(chat: "ChatScreen", by: int) -> None:
    """Go to a sibling of the message that is pointed at, or of the last one that has any."""
    node = chat.pointed()
    other = None if node is None else chat.session.conversation.tree.beside(node.key, by)
    if other is None:
        edits, makes = (chat.session.keymap.key(action) for action in ("edit", "again"))
        text = f"There is one version only: edit ({edits}) or make again ({makes}) to have another."
        chat.notify(text, markup=False, timeout=4)
        return
    chat.perform(chat.session.show_path(other))
    transcript = chat.query_one(Transcript)
    if transcript.has_focus:
        transcript.choose(other)


def fork(chat: "ChatScreen", _: str) -> None:
    """Go on from the message that is pointed at in a new chat; this one stays as it is."""
    from tokamac.app.tui.screens.chats import Pick

    node, recording = chat.pointed(), chat.recording
    stored = None if node is None or recording is None else recording.stored(node.key)
    if recording is None or recording.chat is None or stored is None:
        chat.notify("There is nothing to go on from yet.", markup=False, timeout=3)
        return
    try:
        copy = recording.store.fork(recording.chat, stored)
    except StoreError as error:
        chat.notify(error.one_line(), severity="error", markup=False)
        return
    open_chat(chat, Pick(copy.id))
    chat.notify("This is a copy: the chat it comes from stays as it is.", markup=False, timeout=4)


NOT_DELETED = "Chats are not kept, so none is deleted or brought back; the reason was said at the start."


def delete_chat(chat: "ChatScreen", name: str) -> None:
    """Delete the stored conversation whose id is, or begins with, ``name``; without one, the open one, and begin another."""
    if (recording := chat.recording) is None:
        chat.notify(NOT_DELETED, severity="warning", markup=False)
    elif (wanted := name or recording.chat) is None:
        chat.notify("There is nothing to delete yet.", markup=False, timeout=3)
    else:
        _delete(chat, recording, wanted, back=_restores(chat))


def delete_open(chat: "ChatScreen", held: str) -> bool:
    """Delete the conversation ``held`` for the list of chats, if it is still the open one; return whether that was done."""
    recording = chat.recording
    if recording is None or recording.chat != held:
        return False
    return _delete(chat, recording, held, back=f"Ctrl+Z, or {_restores(chat)} once the list is closed,")


def _delete(chat: "ChatScreen", recording: "Recording", wanted: str, *, back: str) -> bool:
    """Delete what is ``wanted``, unless a reply is being written to it; say what came of that, and return whether it was done."""
    try:
        found = recording.store.chat(wanted)
        if found.id == recording.chat and chat.session.engine.replying:
            stop = chat.session.keymap.key("stop")
            said = ChatNotice(f"A reply is being written: wait, or stop it with {stop}, then delete.", refused=True)
        else:
            said = delete(recording, found, partial(begin_new, chat), title=_titled(found), back=back)
    except StoreError as error:
        chat.notify(error.one_line(), severity="error", markup=False)
        return False
    _tell(chat, said)
    return not said.refused


def restore_chat(chat: "ChatScreen", name: str) -> None:
    """Bring back the deleted conversation whose id is, or begins with, ``name``, or the one deleted last; and open it."""
    from tokamac.app.tui.screens.chats import Pick

    if (recording := chat.recording) is None:
        chat.notify(NOT_DELETED, severity="warning", markup=False)
        return
    try:
        found = recording.store.chat(name) if name else recording.store.last_deleted()
        _tell(chat, restore(recording.store, found, lambda found: open_chat(chat, Pick(found)), title=_titled))
    except StoreError as error:
        chat.notify(error.one_line(), severity="error", markup=False)


def _restores(chat: "ChatScreen") -> str:
    return chat.session.keymap.key("restore_chat")


def _tell(chat: "ChatScreen", said: ChatNotice) -> None:
    chat.notify(said.text, severity="warning" if said.refused else "information", markup=False, timeout=6)


def _titled(chat: StoredChat) -> str:
    return excerpt(chat.title or chat.draft) or "untitled"


def begin(chat: "ChatScreen") -> None:
    """Start the engine, and open the conversations while it loads."""
    chat.perform(chat.session.start())
    chat.watch(chat.query_one(Transcript), "chosen", lambda key: chat.perform(chat.session.select(key)), init=False)
    if not chat.memory.settings.toured:  # the tour is on the screen
        chat.keep(replace(chat.memory.settings, toured=True))
    _open_store(chat)
    chat.begun()


def _open_store(chat: "ChatScreen") -> None:
    status = chat.query_one(StatusLine)

    def told(what: str) -> None:
        chat.notify(what, severity="warning", markup=False, timeout=20)

    try:
        opened = chat.open_store()
    except StoreError as error:
        chat.notify(f"Chats are not kept: {error.one_line()}", severity="error", markup=False, timeout=20)
        status.unsaved = lambda: True
        return
    if opened is not None:
        store, pick = opened
        chat.recording = recording = Recording(chat.session, store, chat.memory, told, time.monotonic)
        status.unsaved = lambda: recording.unsaved
        _purge_later(chat, store.file)
        if pick is not None:
            open_chat(chat, pick, leaving=False)


def _purge_later(chat: "ChatScreen", file: Path) -> None:
    """Remove what was deleted long ago, once nobody uses the chat."""

    def look() -> None:
        if recording.is_time(chat.session):
            timer.stop()
            chat.run_worker(purge, thread=True, group="files")

    def purge() -> None:
        if problem := recording.purge(file):
            chat.app.call_from_thread(chat.notify, problem, severity="warning", markup=False)

    timer = chat.set_interval(recording.LOOK_S, look)
