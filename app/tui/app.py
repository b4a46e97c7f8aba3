"""The Textual application: themes, palette, the chat screen, and what it takes to get along with terminals.

Every row passes ``OutputFilter`` last, whatever widget drew it. Textual 8.2.8 leaves out one question in Terminal.app (DECRQM,
``CSI ? 2026 $ p``), but not the one about in-band resizing (2048), whose last letter that terminal would print. And it does not
know Alt+Enter as terminals without extended keys send it.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from enum import Enum
from functools import cache
from typing import Any, cast

from rich.segment import Segment
from textual import on
from textual._ansi_sequences import ANSI_SEQUENCES_KEYS
from textual.app import App, SystemCommand
from textual.binding import Binding
from textual.color import Color
from textual.command import CommandPalette
from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver
from textual.filter import LineFilter
from textual.notifications import SeverityLevel
from textual.screen import Screen
from textual.style import Style
from textual.widget import Widget

from ..chat.external_programs import through_tmux
from ..chat.listing import excerpt
from ..chat.preferences import Preferences
from ..chat.session import Session
from ..sanitise import bare, safe_link, sanitise
from .actions.chats import delete_open
from .bridge import Bridge
from .driver import AnchoringDriver, AppleTerminalDriver
from .screens.chat import ChatScreen, OpenStore
from .screens.chats import DeleteOpen
from .screens.keys import KeyPress, ThemeScreen
from .theme import DARK, LIGHT, TERMINAL, text_colours


def is_apple_terminal() -> bool:
    """Whether this runs directly in Terminal.app: tmux and others in it answer for themselves, under another name."""
    return os.environ.get("TERM_PROGRAM") == "Apple_Terminal"


class OutputFilter(LineFilter):
    """Removes control characters, and links but those of the web and of mail. Foreign text was made safe before; this catches
    what was forgotten.

    Textual writes its own escape sequences later, from the rows' styles.
    """

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Return the segments of a row, the same objects where there is nothing to remove."""
        del background  # Textual's signature
        return [_safe(segment) for segment in segments]


def _safe(segment: Segment) -> Segment:
    text, style = bare(segment.text), segment.style
    if style is not None and style.link is not None and not safe_link(style.link):
        style = style.update_link(None)
    return segment if text == segment.text and style is segment.style else Segment(text, style)


NAME = "tokamac"
SAVE = "\x1b[22;2t"
"""Has the terminal save its title."""
RESTORE = "\x1b]2;\a\x1b[23;2t"
"""Removes our title, and has the terminal restore its own, if it saved it."""


def terminal_title(chat: str) -> str:
    """Return the sequence (OSC 2) that sets the title to that of ``chat`` and the app; "": to the app alone.

    A title may be a model's: it is made safe and cut to one short line, so that nothing in it can end the sequence.
    """
    title = f"{excerpt(chat)} · {NAME}" if chat else NAME
    return f"\x1b]2;{bare(title)}\a"


HUNG_UP_S = 2.0
"""How long leaving may take once the terminal is gone."""


class TokamacApp(App[int]):
    """The chat."""

    TITLE = "tokamac"
    COMMAND_PALETTE_BINDING = "ctrl+p"
    BINDINGS = [Binding("ctrl+c", "close_palette", show=False, priority=True)]  # noqa: RUF012 (Textual's way)
    CSS_PATH = [  # noqa: RUF012 (Textual's way)
        "screens/chat.tcss",
        "screens/dialog.tcss",
        "screens/explain.tcss",
        "screens/steps.tcss",
        "screens/versions.tcss",
        "screens/whatif.tcss",
        "screens/convert.tcss",
        "screens/model.tcss",
        "screens/native.tcss",
    ]

    def __init__(
        self,
        session: Session,
        bridge: Bridge,
        preferences: Preferences,
        open_store: OpenStore = lambda: None,
        warnings: Iterable[str] = (),
        *,
        dark: bool = True,
    ) -> None:
        # Without colours, the terminal's own must not be converted: they would become black on black.
        super().__init__(ansi_color=True if "NO_COLOR" in os.environ else None)
        self.chat = ChatScreen(session, bridge, preferences, open_store)
        self._preferences = preferences
        self._filter = OutputFilter()
        self._names_terminal = False
        self._warnings = (*warnings, *preferences.keymap.warnings)
        for theme in (TERMINAL, DARK, LIGHT):
            self.register_theme(theme)
        chosen = preferences.settings.theme
        # Without colours, the styles of the terminal's own theme say by attributes what others say by colours.
        usual = TERMINAL if self.no_color else DARK if dark else LIGHT
        self.chat.automatic_theme = usual.name
        self.theme = chosen if chosen in self.available_themes and not self.no_color else usual.name
        self._parsed_for = self.get_css_variables()
        self.stylesheet.set_variables(self._parsed_for)
        if chosen and chosen not in self.available_themes:
            self._warnings += (f"There is no theme {chosen!r}.",)

    def get_driver_class(self) -> type[Driver]:
        """Return the driver for this terminal."""
        chosen = super().get_driver_class()
        if chosen is not LinuxDriver:
            return chosen
        return AppleTerminalDriver if is_apple_terminal() else AnchoringDriver

    @property
    def _background_screens(self) -> list[Screen[object]]:
        """The screens that are seen beneath the top one. Textual 8.2.8 draws that as a whole whenever one of them changes, and
        takes no screen for opaque."""
        stack = self._screen_stack
        return super()._background_screens if stack and stack[-1].is_modal else []

    def get_default_screen(self) -> Screen[None]:
        """Return the chat."""
        return self.chat

    def on_mount(self) -> None:
        """Tell what is wrong with the settings; from here on, a change of theme is the user's, and the terminal's title ours."""
        self._names_terminal = self._driver is not None
        if self._driver is not None:
            self._driver.write(SAVE + terminal_title(self.sub_title))
        self.set_keymap(self._preferences.keymap.changed)
        self.theme_changed_signal.subscribe(self, self._theme_chosen)
        self.app_resume_signal.subscribe(self, self._resumed)
        for warning in self._warnings:
            self.notify(warning, severity="warning", markup=False, timeout=12)
        if threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._hung_up)

    def _hung_up(self) -> None:
        """The window was closed: leave, in a while at most. Textual 8.2.8 reads a terminal that is gone, or writes, for ever."""
        ending = threading.Timer(HUNG_UP_S, os._exit, (128 + signal.SIGHUP,))
        ending.daemon = True
        ending.start()
        self.chat.do("leave")

    def _resumed(self, _: object) -> None:
        """Draw all of the screen after the shell had it; Textual would draw only what changes next."""
        if self._driver is not None:
            self._driver.write(terminal_title(self.sub_title))
        self.refresh(layout=True)

    def on_unmount(self) -> None:
        """Restore the terminal's title."""
        if self._names_terminal and self._driver is not None:
            self._driver.write(RESTORE)

    async def action_quit(self) -> None:
        """Quit as the chat does, also from a dialog, if that is the key: Textual's own binding of Ctrl+Q comes first."""
        if any(action.id == "leave" and "ctrl+q" in action.keys for action in self.chat.session.keymap.actions):
            self.chat.do("leave")

    def watch_sub_title(self, chat: str) -> None:
        """Show the chat's title as the terminal's."""
        if self._names_terminal and self._driver is not None:
            self._driver.write(terminal_title(chat))

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
        markup: bool = False,
    ) -> None:
        """Show a notice, made safe: it may quote a path, a name or an error."""
        super().notify(sanitise(message), title=sanitise(title), severity=severity, timeout=timeout, markup=markup)

    def copy_to_clipboard(self, text: str) -> None:
        """Ask the terminal to copy (OSC 52); in tmux, also the terminal around it."""
        super().copy_to_clipboard(text)
        if "TMUX" in os.environ and self._driver is not None:
            self._driver.write(through_tmux(text))

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Return the filters of every row: Textual's, and ours last."""
        return [*super().get_line_filters(), self._filter]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Let keys of the app through to the dialog that asks for a key; Ctrl+C is the app's only over the palette."""
        if action == "close_palette":
            return isinstance(self.screen, CommandPalette)
        return not isinstance(self.screen, KeyPress) and super().check_action(action, parameters)

    def action_close_palette(self) -> None:
        """Close the command palette."""
        self.screen.dismiss()

    def action_help_quit(self) -> None:
        """Do nothing: Textual would explain how to quit, where the user gave Ctrl+C another meaning."""

    def get_css_variables(self) -> dict[str, str]:
        """Return the colours of the theme, those of text made readable."""
        known = super().get_css_variables()
        self.theme_variables = {**known, **text_colours(self.current_theme, known)}
        return self.theme_variables

    def refresh_css(self, animate: bool = True) -> None:
        """Apply the sheets; parse them again only for other colours. Textual 8.2.8 does so at the start, too, which takes 20 ms."""
        variables = self.get_css_variables()
        if variables == self._parsed_for:
            self.stylesheet.update(self, animate=animate)
        else:
            self._parsed_for = variables
            super().refresh_css(animate)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Yield the palette's entries: the registry's actions."""
        del screen  # the same everywhere: actions of the chat
        for action in self._preferences.keymap.actions:
            if action.palette:
                yield SystemCommand(f"{action.label}  ({action.key_name})", action.help, self._runner(action.id))

    def _runner(self, action: str) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            self.chat.do(action)

        return run

    @on(DeleteOpen)
    def delete_open(self, message: DeleteOpen) -> None:
        """Delete the chat, for the list of chats above it."""
        if delete_open(self.chat, message.chat):
            message.gone()

    def _theme_chosen(self, _: object) -> None:
        if not isinstance(self.screen, ThemeScreen) and self.theme != (
            self._preferences.settings.theme or self.chat.automatic_theme
        ):
            problem = self._preferences.keep(replace(self._preferences.settings, theme=self.theme))
            if problem:
                self.notify(problem, severity="warning", markup=False)


@cache
def keep_reverse() -> None:
    """Have widgets draw ``text-style: reverse`` of a part, such as a list's chosen row; Textual 8.2.8 forgets it there."""
    drawn = Widget.get_visual_style

    def get_visual_style(widget: Widget, *component_classes: str, partial: bool = False) -> Style:
        style = drawn(widget, *component_classes, partial=partial)
        turned = any(widget.get_component_styles(name).text_style.reverse for name in component_classes if name)
        return style + REVERSE if turned else style

    setattr(Widget, "get_visual_style", get_visual_style)  # noqa: B010 (mypy knows no method that is replaced)


REVERSE = Style(reverse=True)


class _Keys(Enum):
    ALT_ENTER = "alt+enter"


def teach_alt_enter() -> None:
    """Make ``ESC CR`` the key ``alt+enter``; Textual drops the Alt and would send the prompt. Terminal.app is such a terminal."""
    cast(dict[str, Any], ANSI_SEQUENCES_KEYS)["\x1b\r"] = (_Keys.ALT_ENTER,)
