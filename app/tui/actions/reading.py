"""Looking at the chat: scrolling, selecting, copying, the gauges, the help; and chats out into files and in again.

Files are read and written on another thread, so that the screen stays responsive.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tokamac.engine.files import exists, expanded

from ...backend.client import Died
from ...backend.protocol import LookedAt, StopLooking
from ...backend.shell import ShellError, working_folder
from ...chat.commands import RefusedError, exported, imported, links_of, recording_of, save_settings
from ...sanitise import sanitise_line
from ...store.store import Store
from ...store.values import StoreError
from ..widgets.gauges import NARROW, Gauges
from ..widgets.prompt_input import Prompt
from ..widgets.transcript import Transcript

if TYPE_CHECKING:
    from ...backend.client import BackendEvent
    from ...chat.conversation import Reply
    from ..screens.chat import ChatScreen


def explain(chat: "ChatScreen", _: str) -> None:
    """Explain the selected reply, or else the last one that was measured."""
    explain_reply(chat, chat.query_one(Transcript).selected)


def explain_reply(chat: "ChatScreen", key: int | None) -> None:
    """Explain the reply ``key``, or the one to the prompt ``key``; where nothing of it was measured, the last one."""
    from ..screens.figure import ExplainScreen

    session = chat.session
    known = {
        turn.reply_key: turn.reply
        for turn in session.turns
        if turn.reply is not None and turn.reply.metrics is not None
    }
    if not known:
        raise RefusedError("There is no reply to explain yet.")
    node = session.conversation.reply_at(key)
    index = [*known].index(node.key) if node is not None and node.key in known else len(known) - 1
    replies = [session.engine.with_ceiling(reply) for reply in known.values()]
    chat.app.push_screen(ExplainScreen(replies, index), lambda wonders: chat.do(wonders) if wonders else None)


def all_figures(chat: "ChatScreen", _: str) -> None:
    """Show every figure in the side panel, or the few; and the panel, where it is hidden."""
    settings = chat.preferences.settings
    save_settings(chat, replace(settings, panel=True, all_figures=not settings.panel or not settings.all_figures))
    chat.show_panel()
    chat.show()
    _tell_narrow(chat)


def _tell_narrow(chat: "ChatScreen") -> None:
    if chat.size.width < NARROW:
        chat.tell(
            f"The side panel needs {NARROW} columns; this window has {chat.size.width}. /explain shows all figures."
        )


def steps(chat: "ChatScreen", _: str) -> None:
    """Walk through the steps of the selected reply, or the last one."""
    from ...reply_steps import ReplySteps, why_not
    from ..screens.steps import StepsScreen

    session, node = chat.session, chat.selected()
    found = None if node is None else session.conversation.reply_at(node.key) or session.conversation.reply_at(None)
    if found is None:
        raise RefusedError("There is no reply to walk through yet.")
    if found.reply is None:
        raise RefusedError("The reply is still being written. Its steps are there when it ends.")
    key, shown = found.key, ReplySteps(found.reply)

    def ask() -> None:
        shown.begin()
        if why := why_not(session, found.reply):
            shown.take(LookedAt(key, ended=True, error=why))
        else:
            chat.bridge.ask(shown.question(key, session.prompt_before(key), session.template))

    def closed(begun: "Reply | None") -> None:
        chat.bridge.ask(StopLooking())
        if begun is not None:
            chat.reply(lambda: session.branch_from(key, begun))

    chat.app.push_screen(StepsScreen(shown, ask, lambda: chat.bridge.ask(StopLooking()), number=key), closed)


def told_of_steps(chat: "ChatScreen", event: "BackendEvent") -> None:
    """Hand what the engine tells of a reply's tokens, or its death, to the screen that shows the reply's steps."""
    if isinstance(event, LookedAt | Died):
        from ..screens.steps import StepsScreen

        for screen in chat.app.screen_stack:
            if isinstance(screen, StepsScreen):
                screen.take(event) if isinstance(event, LookedAt) else screen.lost()


def toggle_panel(chat: "ChatScreen", _: str) -> None:
    """Show or hide the side panel; say so where the window is too narrow."""
    panel = not chat.preferences.settings.panel
    save_settings(chat, replace(chat.preferences.settings, panel=panel))
    chat.show_panel()
    chat.show()
    if panel:
        _tell_narrow(chat)


def palette(chat: "ChatScreen", _: str) -> None:
    """Open the command palette."""
    chat.app.action_command_palette()


def help_(chat: "ChatScreen", _: str) -> None:
    """Show keys and actions."""
    from ..screens.help import HelpScreen

    screen = HelpScreen(chat.preferences.keymap.actions)
    chat.app.push_screen(screen, lambda asks: chat.do("ask_guide") if asks else None)


def messages(chat: "ChatScreen", _: str) -> None:
    """Select the last message."""
    chat.query_one(Transcript).focus()


def links(chat: "ChatScreen", _: str) -> None:
    """Show the links of the selected message."""
    from ..screens.links import show_links

    show_links(chat, links_of(chat))


def scroll_top(chat: "ChatScreen", _: str) -> None:
    """Jump to the start of the chat."""
    chat.query_one(Transcript).scroll_home(animate=False)
    chat.call_after_refresh(chat.show)


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


def leave(chat: "ChatScreen", _: str) -> None:
    """Quit the app; while models are downloaded or converted, once the user has asked twice."""
    if asks := chat.library.before_quitting():
        chat.tell(asks, "warning")
    else:
        chat.app.exit(0)


def gauges(chat: "ChatScreen", _: str) -> None:
    """Select a figure of the side panel, and show the panel for that."""
    panel = chat.query_one("#panel")
    if not panel.display and not chat.preferences.settings.panel:
        toggle_panel(chat, "")
    if panel.display:
        chat.query_one(Gauges).focus()
    else:
        explains = chat.session.keymap.key("explain")
        chat.tell(f"The window is too narrow for the gauges. {explains} explains the last reply.")


def ask_guide(chat: "ChatScreen", question: str) -> None:
    """Ask the embedded guide, in a process of its own: the chat and its model stay as they are."""
    from ..screens.help import GuideScreen

    chat.app.push_screen(GuideScreen(chat.bridge.another(), question))


def export(chat: "ChatScreen", written: str) -> None:
    """Export the conversation to a new file: the one that is named, or one named after the title."""
    (name, missing), file = exported(chat), recording_of(chat).store.file
    path = expanded(written) if written else None
    chat.run_worker(lambda: _write(chat, file, name, path, missing), thread=True, group="files")


def _write(chat: "ChatScreen", file: Path, name: str, path: Path | None, missing: str) -> None:
    """Export the chat ``name`` of the store ``file``. missing: a sentence on what is not stored, or nothing."""
    from ...export import check_suffix, export_chat, free_name

    try:
        with Store.open(file) as store:
            archive = store.archive(name)
        if path is None:
            folder = working_folder()
            path = folder / free_name(archive.chat.title, folder).name
        check_suffix(path)
        if exists(path):
            chat.app.call_from_thread(_offer_free_name, chat, path)
            return
        export_chat(archive, path)
    except (StoreError, ShellError) as error:
        chat.app.call_from_thread(chat.tell, error.one_line(), "error")
    else:
        text = f"Exported to {sanitise_line(str(path))}. {missing}".strip()
        chat.app.call_from_thread(chat.tell, text, "warning" if missing else "information")


def _offer_free_name(chat: "ChatScreen", path: Path) -> None:
    from ...export import free_name

    free = free_name(path.stem, path.parent, path.suffix)
    chat.query_one(Prompt).give_back(f"/export {sanitise_line(str(free))}")
    name = sanitise_line(path.name)
    chat.tell(
        f"{name} already exists and was not overwritten. Press Enter to use the name in the input box.", "warning"
    )


def import_(chat: "ChatScreen", written: str) -> None:
    """Create a chat from a file, and open it."""
    file = recording_of(chat).store.file
    if not written:
        raise RefusedError("Write the file after the command: /import chat.md (or .json)")
    chat.run_worker(lambda: _read(chat, file, written), thread=True, group="files")


def _read(chat: "ChatScreen", file: Path, written: str) -> None:
    try:
        made = imported(file, written)
    except StoreError as error:
        chat.app.call_from_thread(chat.tell, error.one_line(), "error")
    else:
        chat.app.call_from_thread(chat.run_command, lambda: chat.open_chat(made))
