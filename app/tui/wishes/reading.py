"""Looking: scrolling, copying, the gauges, the help."""

from dataclasses import replace
from typing import TYPE_CHECKING

from tokamac.app.sanitise import sanitise
from tokamac.app.tui.clipboard import copy_text
from tokamac.app.tui.prose.code import code_blocks
from tokamac.app.tui.widgets.prompt import Prompt
from tokamac.app.tui.widgets.transcript import Transcript

if TYPE_CHECKING:
    from tokamac.app.tui.screens.chat import ChatScreen


def explain(chat: "ChatScreen", _: str) -> None:
    """Explain the last reply that was measured."""
    from tokamac.app.tui.screens.explain import ExplainScreen

    replies = [turn.reply for turn in chat.session.turns if turn.reply is not None and turn.reply.metrics is not None]
    if replies:
        chat.app.push_screen(ExplainScreen(replies), lambda wonders: chat.do("what_if") if wonders else None)
    else:
        chat.notify("There is no reply to explain yet.", markup=False, timeout=3)


def toggle_panel(chat: "ChatScreen", _: str) -> None:
    """Show or hide the gauges; say so where the window has no room for them."""
    from tokamac.app.tui.screens.chat import NARROW

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
    path = [] if node is None else chat.session.talk.tree.path_to(node.key)
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
