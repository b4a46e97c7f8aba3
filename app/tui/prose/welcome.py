"""What an empty chat shows: the first keys to know; at the very first start a tour of five lines."""

from textual.content import Content

from tokamac.app.tui.actions import ACTIONS
from tokamac.app.tui.prose.page import BLANK, PLAIN, Frame, PageRow
from tokamac.app.tui.prose.rows import Row

WORDMARK = "▀█▀ █▀█ █▄▀ █▀█ █▀▄▀█ █▀█ █▀▀\n █  █▄█ █ █ █▀█ █ ▀ █ █▀█ █▄▄"
PROMISE = "A model on this machine. Nothing leaves it."
HINTS = (
    ("Enter", "sends"),
    ("Ctrl+J", "starts a new line"),
    ("Ctrl+O", "chooses a model"),
    ("F1", "shows every key"),
)
TOUR = (
    ("help", "all keys; {ask_guide} asks the guide"),
    ("choose_model", "choose or get a model"),
    ("chats", "earlier chats, and search"),
    ("toggle_panel", "how fast it is, and why"),
    ("settings", "sampling, memory, keys"),
)
"""Actions of the registry, and what to say of each: at most 27 characters, so that the smallest window shows it whole."""


class Welcome:
    """The name, and the first keys to know, in the middle of ``height`` rows. tour: it is the very first start."""

    def __init__(self, height: int, *, tour: bool = False) -> None:
        self._height = height
        self._lines = _lines(tour_lines() if tour else HINTS)

    def rows(self, width: int) -> list[PageRow]:
        """Return the rows at ``width`` cells."""
        indent = max(0, (width - max(line.cell_length for line in self._lines)) // 2)
        above = max(0, (self._height - len(self._lines)) // 2)
        frame = Frame(Content(" " * indent), PLAIN.style)
        return [BLANK] * above + [PageRow(Row(line), frame) for line in self._lines]


def tour_lines() -> tuple[tuple[str, str], ...]:
    """Return the tour as keys and what they lead to."""
    keys = {action.id: action.key_names.partition(",")[0] for action in ACTIONS}
    return tuple((keys[action], text.format(**keys)) for action, text in TOUR)


def _lines(hints: tuple[tuple[str, str], ...]) -> list[Content]:
    keys = [
        Content.styled(key.rjust(7), "$primary") + "  " + Content.styled(does, "$foreground 70%") for key, does in hints
    ]
    text = Content.styled(PROMISE, "$foreground 70%")
    return [*Content.styled(WORDMARK, "$primary").split("\n"), Content(""), text, Content(""), *keys]
