"""A box to tick. Textual's own shows by colour alone whether it is ticked."""

from textual.content import Content
from textual.widgets import Checkbox


class Tick(Checkbox):
    """A compact box with its label; its messages are a Checkbox's."""

    def __init__(self, label: str, *, value: bool, id: str) -> None:
        super().__init__(label, value, compact=True, id=id)

    def render(self) -> Content:
        """Show a mark where it is ticked, and nothing where it is not."""
        self.BUTTON_INNER = "✓" if self.value else " "
        return super().render()
