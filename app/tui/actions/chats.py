"""The chats on the screen: starting, leaving, opening and listing them, and moving within one.

A reply that runs while its chat is left goes on, and the user is told when it is done. Prices of branches are asked for as they
come into view.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tokamac.engine.errors import TokamacError
from tokamac.engine.events import Price

from ... import units
from ...chat import commands, recording
from ...chat.attachments import Draft, apart, joined
from ...chat.background import PATH, PriceQuestion
from ...chat.commands import RefusedError, recording_of
from ...chat.context import ContextUse
from ...chat.conversation import Reply
from ...chat.listing import ChatSearch, ending_text, excerpt
from ...chat.preferences import ChatOverrides
from ...chat.recording import LEFT, Recording
from ...chat.session import Session
from ...chat.steps import (
    Elsewhere,
    EnginePhase,
    PromptRefused,
    ReplyEnded,
    Step,
    ToolAnswered,
)
from ...chat.versions import Versions
from ...sanitise import sanitise_line
from ...store.values import StoreError
from ..widgets.prompt_input import Prompt
from ..widgets.status import StatusLine
from ..widgets.transcript import Transcript
from .writing import still_attaching

if TYPE_CHECKING:
    from ..screens.chat import ChatScreen
    from ..screens.chats import Pick

GOES_ON = "The reply goes on in the background; {} shows it."
GIVEN_UP = "The reply was stopped: this chat can't be saved, so it would be lost."


def title_elsewhere(chat: "ChatScreen") -> str:
    """Return the title of the chat whose reply runs, where another one is on screen; else ""."""
    elsewhere = chat.session.elsewhere
    if elsewhere is None or chat.recording is None:
        return ""
    return sanitise_line(chat.recording.title_of(elsewhere)) or "untitled"


def tell_elsewhere(chat: "ChatScreen", elsewhere: Elsewhere) -> None:
    """Tell what became of a reply in a chat that is not on screen."""
    if (recording := chat.recording) is None:
        return
    title = excerpt(recording.title_of(elsewhere.conversation)) or "untitled"
    match elsewhere.step:
        case ReplyEnded(reply) if reply.ending != "tool_calls":
            _tell_ended(chat, title, reply)
        case ToolAnswered(result=result):
            chat.close_consent(result.call)
        case PromptRefused(why):
            chat.tell(f"“{title}”: the queued prompt was not sent. {why}", "warning")


def _tell_ended(chat: "ChatScreen", title: str, reply: Reply) -> None:
    shows = f"{chat.session.keymap.key('chats')} opens it."
    match reply.ending:
        case "cancelled":
            chat.tell(f"“{title}”: the reply was stopped. The text so far is saved.")
        case "lost" | "failed":
            chat.tell(f"“{title}”: the reply {ending_text(reply.ending, reply.reason)}", "error")
        case _:
            tokens = "" if reply.metrics is None else f", {units.count(reply.metrics.generated_tokens)} tokens"
            chat.tell(f"“{title}”: the reply is done{tokens}. {shows}")


def tell_versions_ended(chat: "ChatScreen", versions: Versions) -> None:
    """Tell that the last of several versions has ended in a chat that is not on screen."""
    if versions.conversation is not chat.session.conversation and not versions.running and chat.recording is not None:
        title = excerpt(chat.recording.title_of(versions.conversation)) or "untitled"
        opens = f"{chat.session.keymap.key('chats')} opens it."
        chat.tell(f"“{title}”: {len(versions.all)} versions of a reply are done. {opens}")


class PathPrices:
    """The prices of one view of the tree. perform: has the session's steps done."""

    def __init__(self, session: Session, perform: Callable[[list[Step]], None]) -> None:
        self._session = session
        self._perform = perform
        self._asked: set[int] = set()
        self._known: dict[int, Price] = {}
        self._unpriced: set[int] = set()  # there is no price of these: they are not asked about again

    def of(self, keys: Sequence[int]) -> Mapping[int, Price]:
        """Return the prices known so far, by message, and ask the engine for those of ``keys`` that are not.

        A busy engine is not asked: no other path can be read then either. Nor is it asked again for what it was asked already,
        unless that gave way to another question.
        """
        prices = self._session.prices
        self._known |= {key: each.price for each in prices.known for key in self._own([each.question])}
        self._unpriced.update(self._own(prices.unpriced))
        missing = [key for key in keys if key not in self._known and key not in self._unpriced]
        if self._session.engine.phase is EnginePhase.IDLE and not set(self._own(prices.waiting)).issuperset(missing):
            self._asked.update(missing)
            self._perform(self._session.price_paths(missing))
        return self._known

    def _own(self, questions: Sequence[PriceQuestion]) -> Iterator[int]:
        """Yield the messages for which this view asked ``questions``."""
        return (each.key for each in questions if each.id == PATH and each.key is not None and each.key in self._asked)


def begin_new(chat: "ChatScreen") -> bool:
    """Leave the conversation, whose reply goes on, for a new one. Return whether a draft stays with it."""
    stays, unsaved = _switch(chat, chat.preferences.for_new_chat, chat.session.new_chat)
    chat.composer.hold(unsaved)
    chat.query_one(Prompt).focus()
    return stays


def _leave(chat: "ChatScreen") -> tuple[bool, Draft]:
    """End an edit, and save the unsent prompt with the chat; return whether there is one, and what could not be saved.

    What waits for a reply goes on waiting; it is saved as a draft until it is sent.
    """
    box, unsent, recording = chat.composer.box, chat.composer.unsent, chat.recording
    saved = recording is not None and recording.drafted(unsent.whole)
    chat.composer.hold(Draft())
    if recording is not None:
        recording.leaving(box)
    return (bool(box.whole), Draft()) if saved else (False, unsent)


def _switch(
    chat: "ChatScreen", own: ChatOverrides, show: Callable[[], list[Step]], *, leaving: bool = True
) -> tuple[bool, Draft]:
    """Show another chat, whose own settings are ``own``; a reply that runs in the one before goes on if that one is saved.

    Returns whether an unsent prompt stays there, and what could not be saved. leaving: False where nothing is left. Raises
    RefusedError while something is on its way to the prompt.
    """
    if leaving and (why := still_attaching(chat)):
        raise RefusedError(why)
    stays, unsaved = _leave(chat) if leaving else (False, chat.composer.unsent)
    running = chat.session.replying
    goes_on = chat.recording is not None and chat.recording.can_go_on()
    if not goes_on:
        chat.perform(chat.session.give_up())
    chat.preferences.hold(own, chat.session)
    chat.perform(show())
    if running:
        text = GOES_ON.format(chat.session.keymap.key("chats")) if goes_on else GIVEN_UP
        chat.tell(text, "information" if goes_on else "warning")
    return stays, unsaved


def chats(chat: "ChatScreen", _: str) -> None:
    """List and search the conversations."""
    from ..screens.chats import Background, ChatsScreen

    recording = recording_of(chat)

    def closed(pick: "Pick | None") -> None:
        recording.look_up_title()  # the list can change it
        chat.show()
        if pick is not None:
            chat.run_command(lambda: open_chat(chat, pick.chat, pick.message))

    search = ChatSearch(recording.store.file)
    listed = ChatsScreen(
        search,
        recording.chat,
        chat.session.keymap,
        background=lambda: Background(recording.running, recording.waiting),
        folded=chat.folded,
    )
    chat.app.push_screen(listed, closed)


def open_(chat: "ChatScreen", name: str) -> None:
    """Open the stored conversation whose ID is, or begins with, ``name``; without one, list them."""
    if name:
        recording_of(chat)
        open_chat(chat, chat.find_chat(name).id)
    else:
        chats(chat, "")


def open_chat(chat: "ChatScreen", wanted: str, message: int | None = None, *, leaving: bool = True) -> None:
    """Open the stored conversation of this ID. Raises StoreError.

    Args:
        chat: the screen.
        wanted: the conversation's ID.
        message: the ID of a message to jump to.
        leaving: the unsent prompt stays with the chat before; else there was none, and it goes into this one.
    """
    if (recording := chat.recording) is None:
        return
    kept, again = recording.kept(wanted), recording.chat == wanted
    is_open = kept is not None or recording.holds(wanted)
    if kept is not None:
        conversation, rest = kept
        stays, unsaved = _switch(chat, recording.own(wanted), lambda: chat.session.show(conversation))
        chat.composer.hold(joined([rest, unsaved]))
    elif not is_open:
        tree, draft = recording.read(wanted)
        own, pruned = recording.own(wanted), recording.pruned_of(wanted)
        stays, unsaved = _switch(chat, own, lambda: chat.session.open(tree, pruned), leaving=leaving and not again)
        recording.hold(wanted, tree, draft)
        chat.composer.hold(unsaved if again else joined([apart(draft), unsaved]))
    if kept is not None or not is_open:
        if stays:
            chat.tell(LEFT)
        chat.show()  # its title
    if message is None:
        chat.query_one(Prompt).focus()
    else:
        jump(chat, recording.key_of(message) if is_open else message)


def jump(chat: "ChatScreen", key: int | None) -> None:
    """Bring the message ``key`` into view, on whatever path it is."""
    tree = chat.session.conversation.tree
    if key is None or key not in tree.nodes:
        chat.tell("This message was added in another window. Open the chat again.")
        return
    if key not in {node.key for node in tree.path_to(tree.head)}:
        chat.perform(chat.session.show_path(key))
    transcript = chat.query_one(Transcript)
    transcript.focus()
    transcript.select_message(key)


def branches(chat: "ChatScreen", _: str) -> None:
    """Show the conversation as a tree, and go to the message chosen in it."""
    from ..screens.chats import BranchesScreen

    tree = chat.session.conversation.tree
    if not tree.nodes:
        chat.tell("There are no messages yet.")
        return

    def chosen(key: int | None) -> None:
        if key is not None:
            jump(chat, key)
        else:  # the selected message has prices again
            chat.perform(chat.session.select(chat.query_one(Transcript).selected))

    chat.app.push_screen(BranchesScreen(tree, PathPrices(chat.session, chat.perform).of), chosen)


def delete_open(chat: "ChatScreen", open_: str) -> bool:
    """Delete the conversation ``open_``, on screen or in the background, for the list of chats; return whether that was done."""
    if chat.recording is None:
        return False
    try:
        restores = chat.session.keymap.key("restore_chat")
        found = chat.recording.store.chat(open_)
        commands.delete(chat, found, back=f"Ctrl+Z, or {restores} once the list is closed,")
    except TokamacError as error:
        chat.tell(error.one_line(), "warning")
        return False
    return True


def begin(chat: "ChatScreen") -> None:
    """Start the engine, and open the conversations while it loads."""
    chat.perform(chat.session.start())
    chat.watch(chat.query_one(Transcript), "selected", lambda key: chat.perform(chat.session.select(key)), init=False)
    if not chat.preferences.settings.toured:  # the tour is on the screen
        commands.save_settings(chat, replace(chat.preferences.settings, toured=True))
    _open_store(chat)
    chat.begun()


def _open_store(chat: "ChatScreen") -> None:
    status = chat.query_one(StatusLine)
    try:
        opened = chat.open_store()
        if opened is None:
            return
        store, wanted = opened
        chat.recording = recording = Recording(
            chat.session, store, chat.preferences, lambda text: chat.tell(text, "warning"), time.monotonic
        )
        status.unsaved = lambda: recording.unsaved
        _purge_later(chat, store.file)
        if wanted is not None:
            open_chat(chat, wanted, leaving=False)
            commands.use_asked_profile(chat)
    except StoreError as error:
        if chat.recording is None:
            status.unsaved = lambda: True
            chat.tell(f"Chats are not saved: {error.one_line()}", "error")
        else:
            chat.tell(error.one_line(), "error")


def _purge_later(chat: "ChatScreen", file: Path) -> None:
    """Remove what was deleted long ago, once nobody uses the chat."""

    def look() -> None:
        if recording.is_time(chat.session):
            timer.stop()
            chat.run_worker(purge, thread=True, group="files")

    def purge() -> None:
        if problem := recording.purge(file):
            chat.app.call_from_thread(chat.tell, problem, "warning")

    timer = chat.set_interval(recording.LOOK_S, look)


def context(chat: "ChatScreen", _: str) -> None:
    """Show what is in the context, the selected message first, and leave parts of it out, or send them again."""
    from ..screens.context import ContextScreen

    draft, selected = chat.query_one(Prompt).draft, chat.query_one(Transcript).selected
    prompt = None if selected is None else chat.session.conversation.prompt_of(selected)

    def use() -> ContextUse:
        if steps := chat.session.count_context(draft):
            chat.perform(steps)
        return chat.session.context_use(draft)

    chat.app.push_screen(
        ContextScreen(
            use, lambda key, file: chat.perform(chat.session.prune(key, file)), None if prompt is None else prompt.key
        ),
        lambda _: chat.show(),
    )
