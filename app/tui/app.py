"""The Textual application: themes, palette and the chat screen. Everything else is elsewhere."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

from textual.app import App, SystemCommand
from textual.screen import Screen

from tokamac.app.tui.actions import ACTIONS
from tokamac.app.tui.bridge import Bridge
from tokamac.app.tui.memory import Memory
from tokamac.app.tui.screens.chat import ChatScreen
from tokamac.app.tui.session import Session
from tokamac.app.tui.theme import DARK, FALLBACKS, LIGHT, first_theme


class TokamacApp(App[int]):
    """The chat."""

    TITLE = "tokamac"
    COMMAND_PALETTE_BINDING = "ctrl+p"
    CSS_PATH = [  # noqa: RUF012 (Textual's way)
        "screens/chat.tcss",
        "screens/dialog.tcss",
        "screens/explain.tcss",
        "screens/whatif.tcss",
    ]

    def __init__(self, session: Session, bridge: Bridge, memory: Memory, warnings: Iterable[str] = ()) -> None:
        super().__init__()
        self.chat = ChatScreen(session, bridge, memory)
        self._memory = memory
        self._warnings = tuple(warnings)
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        chosen = memory.settings.theme
        self.theme = chosen if chosen in self.available_themes else first_theme()
        if chosen and chosen not in self.available_themes:
            self._warnings += (f"There is no theme {chosen!r}.",)

    def get_default_screen(self) -> Screen[None]:
        """Return the chat."""
        return self.chat

    def on_mount(self) -> None:
        """Say what was wrong with the settings; from here on a change of theme is a choice."""
        self.theme_changed_signal.subscribe(self, self._theme_chosen)
        for warning in self._warnings:
            self.notify(warning, severity="warning", markup=False, timeout=12)

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Give every theme the colours of prose, from what it has."""
        variables = self.current_theme.to_color_system().generate()
        return {name: variables.get(source, "") for name, source in FALLBACKS.items()}

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Yield the palette's entries: the registry's actions, and the themes."""
        del screen  # the same everywhere: actions of the chat
        for action in ACTIONS:
            if action.palette:
                yield SystemCommand(
                    f"{action.label}  ({action.key_names.split(',', 1)[0]})", action.help, self._runner(action.id)
                )
        yield SystemCommand("Theme", "Choose the colours.", self.search_themes)

    def _runner(self, action: str) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            await self.chat.run_action(action)

        return run

    def _theme_chosen(self, _: object) -> None:
        if self.theme != (self._memory.settings.theme or first_theme()):
            problem = self._memory.keep(replace(self._memory.settings, theme=self.theme))
            if problem:
                self.notify(problem, severity="warning", markup=False)
