"""What an empty chat shows."""

from textual.content import Content

from tokamac.app.tui.prose.page import BLANK, PLAIN, Frame, PageRow
from tokamac.app.tui.prose.rows import Row

WORDMARK = "▀█▀ █▀█ █▄▀ █▀█ █▀▄▀█ █▀█ █▀▀\n █  █▄█ █ █ █▀█ █ ▀ █ █▀█ █▄▄"
HINTS = (
    ("Enter", "sends"),
    ("Ctrl+J", "starts a new line"),
    ("Ctrl+O", "chooses a model"),
    ("F1", "shows every key"),
)


class Welcome:
    """The name, and the first keys to know, in the middle of ``height`` rows."""

    def __init__(self, height: int) -> None:
        self._height = height

    def rows(self, width: int) -> list[PageRow]:
        """Return the rows at ``width`` cells."""
        lines = _lines()
        indent = max(0, (width - max(line.cell_length for line in lines)) // 2)
        above = max(0, (self._height - len(lines)) // 2)
        frame = Frame(Content(" " * indent), PLAIN.style)
        return [BLANK] * above + [PageRow(Row(line), frame) for line in lines]


def _lines() -> list[Content]:
    keys = [
        Content.styled(key.rjust(7), "$primary") + "  " + Content.styled(does, "$foreground 70%") for key, does in HINTS
    ]
    text = Content.styled("A model on this machine. Nothing leaves it.", "$foreground 70%")
    return [*Content.styled(WORDMARK, "$primary").split("\n"), Content(""), text, Content(""), *keys]
