"""The Textual application: themes, palette, chat screen, and terminal workarounds."""

# ``OutputFilter`` sees every row last, whatever widget drew it. Textual 8.2.8 skips one query in Terminal.app
# (DECRQM, ``CSI ? 2026 $ p``), but not in-band resizing (2048), whose last letter that terminal prints. It also
# misses legacy Alt+Enter, and reads Escape and letters right after it as one key.

import asyncio
import os
import re
import signal
import threading
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from dataclasses import replace
from functools import cache
from string import printable
from types import SimpleNamespace
from typing import Any, cast

from rich.cells import cell_len
from rich.segment import Segment
from textual import on
from textual._ansi_sequences import ANSI_SEQUENCES_KEYS
from textual.app import App, SystemCommand
from textual.binding import Binding, Keymap
from textual.color import Color
from textual.command import CommandPalette
from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver
from textual.filter import LineFilter
from textual.notifications import SeverityLevel
from textual.screen import Screen
from textual.style import Style
from textual.widget import Widget

from ..chat.actions import one_name
from ..chat.controller import Bridge
from ..chat.external_programs import through_tmux
from ..chat.listing import excerpt
from ..chat.preferences import Preferences
from ..chat.session import Session
from ..chat.steps import Notice
from ..text.sanitise import bare, safe_link, sanitise
from .screens.chat import ChatScreen, OpenStore
from .screens.chats import DeleteOpen
from .screens.help import KeyPress, ThemeScreen
from .theme import DARK, LIGHT, TERMINAL, text_colours
from .widgets.prompt_input import Chips

# What is written to the terminal, last of all: emoji of several characters keep their place.

_SUSPECT = re.compile("[\u200d\ufe0f\U0001f1e6-\U0001f1ff\U0001f3fb-\U0001f3ff]")
_BASE = "[^\x00-\x20\x7f-\x9f\u200d\ufe0f\U0001f3fb-\U0001f3ff]"
_CHANGED = "(?:\ufe0f\u20e3?|[\U0001f3fb-\U0001f3ff])"
_CLUSTER = re.compile(f"[\U0001f1e6-\U0001f1ff]{{2}}|{_BASE}{_CHANGED}?(?:\u200d{_BASE}{_CHANGED}?)+|{_BASE}{_CHANGED}")
TITLE = "\x1b]2;"  # begins the terminal's title, which is no row


def anchored(data: str) -> str:
    return data if _SUSPECT.search(data) is None or TITLE in data else _CLUSTER.sub(_in_place, data)


def _in_place(found: re.Match[str]) -> str:
    width = cell_len(found[0])
    return f"\x1b7{' ' * width}\x1b8{found[0]}\x1b8\x1b[{width}C" if width else found[0]


class AnchoringDriver(LinuxDriver):
    """Keeps every row's cells in their columns."""

    def write(self, data: str) -> None:
        super().write(anchored(data))


class AppleTerminalDriver(AnchoringDriver):
    """Doesn't query in-band resizing: the signal is enough."""

    def _query_in_band_window_resize(self) -> None:
        """Query nothing."""


def is_apple_terminal() -> bool:
    """Whether Terminal.app is the direct terminal; tmux and others identify themselves."""
    return os.environ.get("TERM_PROGRAM") == "Apple_Terminal"


class OutputFilter(LineFilter):
    """Removes control characters and non-web, non-mail links: the last gate after sanitising.

    Textual writes its own escape sequences later, from the rows' styles.
    """

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        del background  # Textual's signature
        return [_safe(segment) for segment in segments]


def _safe(segment: Segment) -> Segment:
    text, style = bare(segment.text), segment.style
    if style is not None and style.link is not None and not safe_link(style.link):
        style = style.update_link(None)
    return segment if text == segment.text and style is segment.style else Segment(text, style)


NAME = "tokamac"
SAVE = "\x1b[22;2t"  # has the terminal save its title
RESTORE = "\x1b]2;\a\x1b[23;2t"  # removes our title, and has the terminal restore its own, if it saved it


def terminal_title(chat: str) -> str:
    """Return the OSC 2 sequence for a chat's title, "" for the app's."""
    # A model may have written the title: one short sanitised line, so that nothing can end the sequence.
    title = f"{excerpt(chat)} · {NAME}" if chat else NAME
    return f"\x1b]2;{bare(title)}\a"


HUNG_UP_S = 2.0  # how long leaving may take once the terminal is gone


class TokamacApp(App[int]):
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
        self.view = ChatScreen(session, bridge, preferences, open_store)
        self.chat = self.view.chat
        self._preferences = preferences
        self._filter = OutputFilter()
        self._names_terminal = False
        self._warnings = (*warnings, *preferences.keymap.warnings)
        for theme in (TERMINAL, DARK, LIGHT):
            self.register_theme(theme)
        chosen = preferences.settings.theme
        # Without colours, the styles of the terminal's own theme say by attributes what others say by colours.
        usual = TERMINAL if self.no_color else DARK if dark else LIGHT
        self.view.dialogs.automatic_theme = usual.name
        self.theme = chosen if chosen in self.available_themes and not self.no_color else usual.name
        self._parsed_for = self.get_css_variables()
        self.stylesheet.set_variables(self._parsed_for)
        if chosen and chosen not in self.available_themes:
            self._warnings += (f"There is no theme {chosen!r}.",)

    def get_driver_class(self) -> type[Driver]:
        chosen = super().get_driver_class()
        if chosen is not LinuxDriver:
            return chosen
        return AppleTerminalDriver if is_apple_terminal() else AnchoringDriver

    @property
    def _background_screens(self) -> list[Screen[object]]:
        # Textual 8.2.8 redraws the whole top screen when one of them changes, and treats none as opaque.
        stack = self._screen_stack
        return super()._background_screens if stack and stack[-1].is_modal else []

    def get_default_screen(self) -> Screen[None]:
        return self.view

    def on_mount(self) -> None:
        self._names_terminal = self._driver is not None
        if self._driver is not None:
            self._driver.write(SAVE + terminal_title(self.sub_title))
        self.set_keymap(self._preferences.keymap.changed)
        self.theme_changed_signal.subscribe(self, self._theme_chosen)
        self.app_resume_signal.subscribe(self, self._resumed)
        for warning in self._warnings:
            self.call_after_refresh(self.notify, warning, severity="warning", timeout=12)  # once there are lines for it
        if threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._hung_up)

    def _hung_up(self) -> None:
        """Quit soon after the window was closed: Textual 8.2.8 reads or writes a lost terminal forever."""
        ending = threading.Timer(HUNG_UP_S, os._exit, (128 + signal.SIGHUP,))
        ending.daemon = True
        ending.start()
        self.view.do("leave")

    def _resumed(self, _: object) -> None:
        """Redraw everything after the shell had the terminal; Textual draws only changes."""
        if self._driver is not None:
            self._driver.write(terminal_title(self.sub_title))
        self.refresh(layout=True)

    def on_unmount(self) -> None:
        if self._names_terminal and self._driver is not None:
            self._driver.write(RESTORE)

    async def action_quit(self) -> None:
        """Quit like the chat, also from dialogs: Textual's own Ctrl+Q binding comes first."""
        if any(action.id == "leave" and "ctrl+q" in action.keys for action in self.chat.session.keymap.actions):
            self.view.do("leave")

    def watch_sub_title(self, chat: str) -> None:
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
        chips = self.view.query(Chips)  # none in an app that starts or ends
        if chips and self.screen is self.view:
            chips.first().tell(Notice(sanitise(message), severity), timeout or self.NOTIFICATION_TIMEOUT)
        else:
            super().notify(sanitise(message), title=sanitise(title), severity=severity, timeout=timeout, markup=markup)

    def clear_notifications(self) -> None:
        super().clear_notifications()
        for chips in self.view.query(Chips):
            chips.forget()

    def copy_to_clipboard(self, text: str) -> None:
        super().copy_to_clipboard(text)
        if "TMUX" in os.environ and self._driver is not None:
            self._driver.write(through_tmux(text))

    def set_keymap(self, keymap: Keymap) -> None:
        super().set_keymap(keymap)
        teach_escape({key for keys in keymap.values() for key in keys.split(",")})

    def get_line_filters(self) -> Sequence[LineFilter]:
        return [*super().get_line_filters(), self._filter]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Pass the app's keys to a dialog that asks for a key; Ctrl+C is the app's only over the palette."""
        if action == "close_palette":
            return isinstance(self.screen, CommandPalette)
        return not isinstance(self.screen, KeyPress) and super().check_action(action, parameters)

    def action_close_palette(self) -> None:
        self.screen.dismiss()

    def action_help_quit(self) -> None:
        """Do nothing: Textual would explain quitting, but Ctrl+C has another meaning here."""

    def get_css_variables(self) -> dict[str, str]:
        known = super().get_css_variables()
        self.theme_variables = {**known, **text_colours(self.current_theme, known)}
        return self.theme_variables

    def refresh_css(self, animate: bool = True) -> None:
        """Apply the style sheets; parse them only for new colours."""
        # Textual 8.2.8 also parses them at the start, which takes 20 ms.
        variables = self.get_css_variables()
        if variables == self._parsed_for:
            self.stylesheet.update(self, animate=animate)
        else:
            self._parsed_for = variables
            super().refresh_css(animate)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        del screen  # the same everywhere: actions of the chat
        for action in self._preferences.keymap.actions:
            if action.palette:
                yield SystemCommand(f"{action.label}  ({action.key_name})", action.help, self._runner(action.id))

    def _runner(self, action: str) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            self.view.do(action)

        return run

    @on(DeleteOpen)
    def delete_open(self, message: DeleteOpen) -> None:
        if self.view.dialogs.delete_open(message.chat):
            message.gone()

    def _theme_chosen(self, _: object) -> None:
        if not isinstance(self.screen, ThemeScreen) and self.theme != (
            self._preferences.settings.theme or self.view.dialogs.automatic_theme
        ):
            problem = self._preferences.keep(replace(self._preferences.settings, theme=self.theme))
            if problem:
                self.notify(problem, severity="warning", markup=False)


@cache
def keep_reverse() -> None:
    """Patch Textual 8.2.8 to draw ``text-style: reverse`` of parts, such as a list's selected row."""
    drawn = Widget.get_visual_style

    def get_visual_style(widget: Widget, *component_classes: str, partial: bool = False) -> Style:
        style = drawn(widget, *component_classes, partial=partial)
        turned = any(widget.get_component_styles(name).text_style.reverse for name in component_classes if name)
        return style + REVERSE if turned else style

    setattr(Widget, "get_visual_style", get_visual_style)  # noqa: B010 (mypy knows no method that is replaced)


REVERSE = Style(reverse=True)


STARTS = "[OP]X^_\\"  # after ESC they begin, or end, what a terminal sends by itself


def teach_escape(bound: Container[str]) -> None:
    """Map ``ESC CR`` to ``alt+enter``; ESC and a letter to Alt and letter where ``bound``, else two keys."""
    # Textual drops Enter's Alt, and waits for more letters after ESC: it would give ``^`` and the letters.
    known = cast(dict[str, Any], ANSI_SEQUENCES_KEYS)
    known["\x1b\r"] = (SimpleNamespace(value="alt+enter"),)
    for letter in printable.strip():
        alt = one_name(f"alt+{'shift+' * letter.isupper()}{letter.lower()}")
        if letter not in STARTS and f"\x1b{letter}" not in _OTHER_KEYS:
            keys = (alt,) if alt in bound else ("escape", letter)
            known[f"\x1b{letter}"] = tuple(SimpleNamespace(value=key) for key in keys)


_OTHER_KEYS = frozenset(ANSI_SEQUENCES_KEYS)
