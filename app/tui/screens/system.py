"""Ctrl+S: the system prompt."""

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.widgets import Button, Static, TextArea

from tokamac.app.tui.screens.dialog import Dialog


class SystemScreen(Dialog[str]):
    """Edits the system prompt; the result is the new one."""

    BINDINGS = [Binding("ctrl+s", "save", "Save", id="system.save", priority=True)]  # noqa: RUF012 (Textual's way)

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """Yield the box."""
        with Vertical(classes="box") as box:
            box.border_title = "System prompt"
            box.border_subtitle = "Ctrl+S saves · Esc closes"
            yield Static("Said to the model before every conversation. Empty means none.", classes="note", markup=False)
            yield TextArea(self._text, compact=True, tab_behavior="focus", id="system")
            with Horizontal(classes="buttons"):
                yield Button("Save", variant="primary", id="save", compact=True)
                yield Button("Cancel", id="cancel", compact=True)

    @on(Button.Pressed, "#save")
    def action_save(self) -> None:
        """Close with what is written."""
        self.dismiss(self.query_one("#system", TextArea).text.strip())

    @on(Button.Pressed, "#cancel")
    def cancel(self) -> None:
        """Close without a result."""
        self.dismiss(None)
