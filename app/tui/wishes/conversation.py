"""Moving in the conversation, and between conversations."""

from typing import TYPE_CHECKING

from tokamac.app.store.errors import StoreError
from tokamac.app.tui.attachments import Draft, apart, joined
from tokamac.app.tui.own import Own
from tokamac.app.tui.path_prices import PathPrices
from tokamac.app.tui.recording import LEFT
from tokamac.app.tui.steps import Step, TurnBegun
from tokamac.app.tui.widgets.prompt import Prompt
from tokamac.app.tui.widgets.transcript import Transcript
from tokamac.app.tui.wishes.leaving import running, tell

if TYPE_CHECKING:
    from tokamac.app.tui.screens.chat import ChatScreen
    from tokamac.app.tui.screens.chats import Pick

NOT_KEPT = "Chats are not kept, so there is nothing to open; the reason was said at the start."


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
    chat.memory.hold(Own(), chat.session)
    chat.perform(chat.session.new_chat())
    chat.composer.hold(unkept)
    tell(chat, stopped)
    chat.query_one(Prompt).focus()
    return stays


def chats(chat: "ChatScreen", _: str) -> None:
    """List and search the conversations."""
    from tokamac.app.tui.listing import Library
    from tokamac.app.tui.screens.chats import ChatsScreen

    recording = chat.recording
    if recording is None:
        chat.notify(NOT_KEPT, severity="warning", markup=False)
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
        tree, draft = (chat.session.talk.tree, "") if held else recording.read(pick.chat)
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
    tree = chat.session.talk.tree
    if key is None or key not in tree.nodes:
        chat.notify("That message is of another window; open the chat again.", markup=False)
        return
    if key not in {node.key for node in tree.path_to(tree.head)}:
        chat.perform(chat.session.go(key))
    transcript = chat.query_one(Transcript)
    transcript.focus()
    transcript.choose(key)


def branches(chat: "ChatScreen", _: str) -> None:
    """Show the conversation as a tree, and go to what is chosen in it."""
    from tokamac.app.tui.screens.branches import BranchesScreen

    tree = chat.session.talk.tree
    if not tree.nodes:
        chat.notify("There is nothing to see yet.", markup=False, timeout=3)
        return

    def chosen(key: int | None) -> None:
        if key is not None:
            jump(chat, key)
        else:  # what is pointed at has prices again
            chat.perform(chat.session.point(chat.query_one(Transcript).chosen))

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
    prompt = chat.session.talk.prompt_of(node.key)
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
    other = None if node is None else chat.session.talk.tree.beside(node.key, by)
    if other is None:
        edits, makes = (chat.session.keymap.key(action) for action in ("edit", "again"))
        text = f"There is one version only: edit ({edits}) or make again ({makes}) to have another."
        chat.notify(text, markup=False, timeout=4)
        return
    chat.perform(chat.session.go(other))
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
