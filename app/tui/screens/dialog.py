"""What all dialogs share: a box in the middle, a title, Esc to leave."""

from typing import TypeVar

from textual.binding import Binding
from textual.screen import ModalScreen

Result = TypeVar("Result")


class Dialog(ModalScreen[Result | None]):
    """A screen over the chat; its result is None when it is left."""

    BINDINGS = [Binding("escape", "leave", "Close", id="dialog.leave")]  # noqa: RUF012 (Textual's way)

    def action_leave(self) -> None:
        """Close without a result."""
        self.dismiss(None)
