"""The first row: which chat this is."""

from textual.content import Content
from textual.widgets import Static

from tokamac.app.sanitise import sanitise_line
from tokamac.app.tui.theme import FAINT


class Heading(Static):
    """The title of the chat, on one line; blank while it has none."""

    def __init__(self) -> None:
        super().__init__(markup=False)
        self._shown = ""

    def show(self, title: str) -> None:
        """Show ``title``, which may be anybody's: it is made safe here."""
        line = sanitise_line(title)
        if line != self._shown:
            self._shown = line
            self.update(Content.styled(line, FAINT), layout=False)  # it is one line high
