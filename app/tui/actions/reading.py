"""The guide to the app itself, one key away.

Looking: scrolling, copying, the gauges, the help.

The gauges' figures, by the keyboard.

Conversations out into files, and in again. Files are read and written aside: the screen goes on meanwhile.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from textual.notifications import SeverityLevel

from tokamac.app.chat.external_programs import copy_text
from tokamac.app.sanitise import sanitise, sanitise_line
from tokamac.app.store.store import Store
from tokamac.app.store.values import StoreError
from tokamac.app.tui.actions.chats import NOT_OPENED, open_chat
from tokamac.app.tui.markdown.parse import code_blocks
from tokamac.app.tui.widgets.gauges import Gauges
from tokamac.app.tui.widgets.prompt_input import Prompt
from tokamac.app.tui.widgets.transcript import Transcript

if TYPE_CHECKING:
    from tokamac.app.tui.screens.chat import ChatScreen


def explain(chat: "ChatScreen", _: str) -> None:
    """Explain the last reply that was measured."""
    from tokamac.app.tui.screens.figure import ExplainScreen

    replies = [turn.reply for turn in chat.session.turns if turn.reply is not None and turn.reply.metrics is not None]
    if replies:
        chat.app.push_screen(ExplainScreen(replies), lambda wonders: chat.do("what_if") if wonders else None)
    else:
        chat.notify("There is no reply to explain yet.", markup=False, timeout=3)


def toggle_panel(chat: "ChatScreen", _: str) -> None:
    """Show or hide the gauges; say so where the window has no room for them."""
    from tokamac.app.tui.widgets.gauges import NARROW

    chat.keep(replace(chat.memory.settings, panel=not chat.memory.settings.panel))
    chat.show_panel()
    chat.show()
    if chat.memory.settings.panel and chat.size.width < NARROW:
        chat.notify(f"The side panel needs {NARROW} columns; this window has {chat.size.width}.", markup=False)


def palette(chat: "ChatScreen", _: str) -> None:
    """Open the command palette."""
    chat.app.action_command_palette()


def help_(chat: "ChatScreen", _: str) -> None:
    """Show keys and actions."""
    from tokamac.app.tui.screens.help import HelpScreen

    chat.app.push_screen(HelpScreen(chat.memory.keymap.actions), lambda asks: chat.do("ask_guide") if asks else None)


def messages(chat: "ChatScreen", _: str) -> None:
    """Point at the last message."""
    chat.query_one(Transcript).focus()


def scroll_end(chat: "ChatScreen", _: str) -> None:
    """Jump to the end and follow."""
    chat.query_one(Transcript).follow()
    chat.show()


def page_up(chat: "ChatScreen", _: str) -> None:
    """Scroll up a page."""
    chat.query_one(Transcript).page(-1)
    chat.call_after_refresh(chat.show)


def page_down(chat: "ChatScreen", _: str) -> None:
    """Scroll down a page."""
    chat.query_one(Transcript).page(1)
    chat.call_after_refresh(chat.show)


def copy(chat: "ChatScreen", _: str) -> None:
    """Copy the selection, and say how."""
    text = chat.get_selected_text() or chat.query_one(Prompt).selected_text
    if text:
        _copy(chat, text)
    else:
        quits, stops = (chat.session.keymap.key(action) for action in ("leave", "stop"))
        text = f"Nothing is selected: drag with the mouse. {quits} quits, {stops} stops a reply."
        chat.notify(text, markup=False, timeout=4)


def copy_message(chat: "ChatScreen", _: str) -> None:
    """Copy the message that is pointed at, or the last reply, as it was written but for control characters."""
    node = chat.pointed()
    text = "" if node is None else node.prompt or (node.reply.text if node.reply is not None else "")
    if text:
        _copy(chat, sanitise(text))
    else:
        chat.notify("There is no message to copy yet.", markup=False, timeout=3)


def copy_code(chat: "ChatScreen", _: str) -> None:
    """Copy the last code block up to the message that is pointed at; asked again, the one before it."""
    node = chat.pointed()
    path = [] if node is None else chat.session.conversation.tree.path_to(node.key)
    blocks = [block for each in path if each.reply is not None for block in code_blocks(each.reply.text)]
    if not blocks:
        chat.notify("There is no code block here.", markup=False, timeout=3)
        return
    back = chat.code_back.again(node.key if node is not None else 0, len(blocks))
    which = "the last code block" if back == 1 else f"code block {len(blocks) - back + 1} of {len(blocks)}"
    _copy(chat, sanitise(blocks[-back]), which)


def _copy(chat: "ChatScreen", text: str, what: str = "") -> None:
    said = copy_text(chat.app, text, chat.memory.home)
    chat.notify(f"{what[:1].upper()}{what[1:]}. {said}" if what else said, markup=False, timeout=5)


def leave(chat: "ChatScreen", _: str) -> None:
    """Leave the app."""
    chat.app.exit(0)


def gauges(chat: "ChatScreen", _: str) -> None:
    """Point at a figure of the side panel, which is shown for that."""
    panel = chat.query_one("#panel")
    if not panel.display and not chat.memory.settings.panel:
        toggle_panel(chat, "")
    if panel.display:
        chat.query_one(Gauges).focus()
    else:
        text = f"The window is too narrow for the gauges: {chat.session.keymap.key('explain')} explains the last reply."
        chat.notify(text, markup=False, timeout=5)


def ask_guide(chat: "ChatScreen", question: str) -> None:
    """Ask the embedded guide, in a process of its own: the chat and its model go on as they are."""
    from tokamac.app.tui.screens.help import GuideScreen

    chat.app.push_screen(GuideScreen(chat.bridge.another(), question))


def export(chat: "ChatScreen", written: str) -> None:
    """Write the conversation into a new file: the one that is named, or one named after the title."""
    recording = chat.recording
    if recording is None:
        chat.notify(NOT_OPENED, severity="warning", markup=False)
    elif not chat.session.turns:
        chat.notify("There is nothing to export yet.", markup=False, timeout=3)
    elif chat.session.engine.replying:
        stops = chat.session.keymap.key("stop")
        chat.notify(f"A reply is being written: wait, or stop it with {stops}, then export.", markup=False, timeout=4)
    else:
        file, lacking, name = recording.store.file, recording.lacking(), recording.chat
        path = Path(written).expanduser() if written else None
        if name is None:
            chat.notify(
                "Nothing of this chat is saved, so there is nothing to export.", severity="warning", markup=False
            )
        else:
            chat.run_worker(lambda: _write(chat, file, name, path, lacking), thread=True, group="files")


def _write(chat: "ChatScreen", file: Path, name: str, path: Path | None, lacking: str) -> None:
    """Export what is stored. lacking: what to say of that which is not; or nothing."""
    from tokamac.app.export import formats

    try:
        with Store.open(file) as store:
            archive = store.archive(name)
        path = path or Path.cwd() / formats.free_name(archive.chat.title, Path.cwd()).name
        formats.check_suffix(path)
        if path.exists():
            chat.app.call_from_thread(_ask_again, chat, path)
            return
        formats.export_chat(archive, path)
    except StoreError as error:
        chat.app.call_from_thread(_refuse, chat, error)
    else:
        said = f"Exported to {sanitise_line(str(path))}. {lacking}".strip()
        grave: SeverityLevel = "warning" if lacking else "information"
        chat.app.call_from_thread(chat.notify, said, severity=grave, markup=False, timeout=8)


def _ask_again(chat: "ChatScreen", path: Path) -> None:
    """Put a name that is free into the prompt."""
    from tokamac.app.export.formats import free_name

    free = free_name(path.stem, path.parent, path.suffix)
    chat.query_one(Prompt).give_back(f"/export {sanitise_line(str(free))}")
    said = f"{sanitise_line(path.name)} exists and is not replaced: Enter takes the name in the box, or another."
    chat.notify(said, severity="warning", markup=False, timeout=8)


def import_(chat: "ChatScreen", written: str) -> None:
    """Make a new chat of a file, and open it."""
    recording = chat.recording
    if recording is None:
        chat.notify(NOT_OPENED, severity="warning", markup=False)
    elif not written:
        chat.notify("Write the file after the command: /import chat.md (or .json)", markup=False, timeout=5)
    else:
        file, path = recording.store.file, Path(written).expanduser()
        chat.run_worker(lambda: _read(chat, file, path), thread=True, group="files")


def _read(chat: "ChatScreen", file: Path, path: Path) -> None:
    from tokamac.app.export.formats import bring
    from tokamac.app.tui.screens.chats import Pick

    try:
        archive = bring(path, now=time.time())
        with Store.open(file) as store:
            made = store.adopt(archive)
    except StoreError as error:
        chat.app.call_from_thread(_refuse, chat, error)
    else:
        chat.app.call_from_thread(open_chat, chat, Pick(made.id))


def _refuse(chat: "ChatScreen", error: StoreError) -> None:
    chat.notify(error.one_line(), severity="error", markup=False, timeout=10)
