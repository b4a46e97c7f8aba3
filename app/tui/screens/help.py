"""F1: every action with its keys, from the registry."""

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from tokamac.app.tui.actions import ACTIONS, Action
from tokamac.app.tui.screens.dialog import Dialog

KEY_COLUMN = 12
NOTES = (
    "Following: scrolling up stops it, Ctrl+End takes it up again. Your place in the text is never moved.",
    "Gauges: TTFT is the wait for the first token; prefill is the prompt being read, bound by arithmetic; decode is the reply "
    "being written, bound by memory bandwidth. The ceiling is what the bandwidth allows: no program can be faster.",
    "The engine runs in a process of its own. If it dies, the chat stays, and it is started again.",
)


class HelpScreen(Dialog[None]):
    """The help."""

    BINDINGS = [Binding("f1", "leave", "Close", id="help.leave", show=False)]  # noqa: RUF012 (Textual's way)

    def compose(self) -> ComposeResult:
        """Yield the table and the notes."""
        with VerticalScroll(classes="box") as box:
            box.border_title = "Help"
            box.border_subtitle = "Esc closes"
            yield Static(help_text(), markup=False)


def help_text() -> Content:
    """Return the whole help."""
    rows = [_row(action) for action in ACTIONS]
    notes = [Content.styled(note, "$foreground 70%") for note in NOTES]
    return Content("\n").join([*rows, Content(""), *(part for note in notes for part in (note, Content("")))])


def _row(action: Action) -> Content:
    keys = action.key_names
    if len(keys) < KEY_COLUMN:
        return Content.styled(keys.ljust(KEY_COLUMN), "bold $primary") + action.help
    return Content.styled(keys, "bold $primary") + Content(f"\n{' ' * KEY_COLUMN}{action.help}")
