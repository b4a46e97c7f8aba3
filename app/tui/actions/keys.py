"""Keys themselves: Ctrl+C, the leader and its menu, changing keys, undo, back to the shell; and the choice of a theme."""

import os
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ... import INTERRUPTED
from ...chat import commands
from ...chat.actions import LEADER
from ...chat.commands import RefusedError
from ...sanitise import sanitise_line
from ..theme import AUTOMATIC
from ..widgets.prompt_input import Prompt

if TYPE_CHECKING:
    from ..screens.chat import ChatScreen

QUITS_WITHIN_S = 3.0
"""How soon the second press must come; the notice that asks for it is shown as long."""


def copy(chat: "ChatScreen", _: str) -> None:
    """Copy the selected text; else stop a shell command or the reply; else ask once, and quit when asked again."""
    text = chat.get_selected_text() or chat.query_one(Prompt).selected_text
    now = time.monotonic()
    if text:
        chat.tell(chat.copy(text))
    elif chat.shell is not None:
        chat.shell.stop()
    elif chat.session.engine.replying or chat.session.queued:
        chat.perform(chat.session.stop())
    elif now < chat.quits_until:
        chat.app.exit(INTERRUPTED)
    else:
        chat.quits_until = now + QUITS_WITHIN_S
        key = chat.session.keymap.key("copy")
        kept = " Your draft is kept." if chat.composer.unsent.whole and chat.recording is not None else ""
        chat.notify(f"Press {key} again to quit.{kept}", timeout=QUITS_WITHIN_S, markup=False)


def leader(chat: "ChatScreen", _: str) -> None:
    """Cut the text that is selected in the prompt; else take the next key as the end of a chord."""
    from ..screens.keys import LeaderScreen

    prompt = chat.query_one(Prompt)
    if prompt.has_focus and prompt.selected_text:
        prompt.action_cut()
        return
    known = chat.preferences.keymap
    chords = [action for action in known.actions if action.chord]
    chat.app.push_screen(LeaderScreen(known.key(LEADER), chords), lambda action: chat.do(action) if action else None)


def keys(chat: "ChatScreen", written: str) -> None:
    """Open the list of actions and their keys, or change those of one."""
    from ..screens.keys import KeysScreen

    if written:
        commands.keys(chat, written)
    else:
        chat.app.push_screen(KeysScreen(chat))


def undo(chat: "ChatScreen", _: str) -> None:
    """Undo the last change to the prompt."""
    prompt = chat.query_one(Prompt)
    prompt.undo()
    prompt.focus()


def redo(chat: "ChatScreen", _: str) -> None:
    """Redo what was undone in the prompt."""
    prompt = chat.query_one(Prompt)
    prompt.redo()
    prompt.focus()


def suspend(chat: "ChatScreen", _: str) -> None:
    """Stop this process until the shell continues it."""
    driver = chat.app._driver
    if driver is None or not driver.can_suspend or os.getpgrp() == os.getsid(0):
        # Who leads the session has no shell above: nobody could continue it.
        raise RefusedError(f"There is no shell here to go back to. {chat.session.keymap.key('undo')} undoes.")
    with chat.app.suspend():  # the terminal is the shell's before the job stops
        os.killpg(os.getpgrp(), signal.SIGSTOP)  # the whole job: a make or uv that waits for this process must stop too


def theme(chat: "ChatScreen", name: str) -> None:
    """Choose a theme, or take the one called ``name``."""
    from ..screens.keys import ThemeScreen

    if not name:
        chosen = chat.preferences.settings.theme
        screen = ThemeScreen(chosen, chat.automatic_theme)
        chat.app.push_screen(screen, lambda theme: _keep_theme(chat, theme) if theme else None)
    elif name == AUTOMATIC:
        _keep_theme(chat, AUTOMATIC)
        chat.app.theme = chat.automatic_theme
    elif name in chat.app.available_themes:
        chat.app.theme = name
    else:
        known = ", ".join([AUTOMATIC, *sorted(chat.app.available_themes)])
        raise RefusedError(f"There is no theme {sanitise_line(name):.40}. There are: {known}.")


def _keep_theme(chat: "ChatScreen", theme: str) -> None:
    """Write the chosen theme into the settings. Its preview was not."""
    chosen = "" if theme == AUTOMATIC else theme
    if chosen != chat.preferences.settings.theme:
        commands.save_settings(chat, replace(chat.preferences.settings, theme=chosen))
