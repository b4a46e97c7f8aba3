"""What an empty chat shows: the first keys to know; at the very first start a tour of five lines."""

from textual.content import Content

from tokamac.app.tui.keymap import Keymap
from tokamac.app.tui.prose.page import BLANK, PLAIN, Frame, PageRow
from tokamac.app.tui.prose.rows import Row

Hints = tuple[tuple[str, str], ...]
WORDMARK = "▀█▀ █▀█ █▄▀ █▀█ █▀▄▀█ █▀█ █▀▀\n █  █▄█ █ █ █▀█ █ ▀ █ █▀█ █▄▄"
PROMISE = "A model on this machine. Nothing leaves it."
HINTS = (
    ("Enter", "sends"),
    ("Ctrl+J", "starts a new line"),
    ("{choose_model}", "chooses a model"),
    ("{help}", "shows every key"),
)
"""Keys, those that the user may change by the action's id, and what they do."""
TOUR = (
    ("{help}", "all keys; {ask_guide} asks the guide"),
    ("{choose_model}", "choose or get a model"),
    ("{chats}", "earlier chats, and search"),
    ("{toggle_panel}", "how fast it is, and why"),
    ("{settings}", "sampling, memory, idle time"),
)
"""As ``HINTS``. What is said of each has at most 27 characters, so that the smallest window shows it whole."""


class Welcome:
    """The name, and the first keys to know, in the middle of ``height`` rows. tour: it is the very first start."""

    def __init__(self, height: int, *, tour: bool = False, keymap: Keymap | None = None) -> None:
        self._height = height
        self._lines = _lines(told(TOUR if tour else HINTS, keymap or Keymap()))

    def rows(self, width: int) -> list[PageRow]:
        """Return the rows at ``width`` cells."""
        indent = max(0, (width - max(line.cell_length for line in self._lines)) // 2)
        above = max(0, (self._height - len(self._lines)) // 2)
        frame = Frame(Content(" " * indent), PLAIN.style)
        return [BLANK] * above + [PageRow(Row(line), frame) for line in self._lines]


def told(hints: Hints, keymap: Keymap) -> Hints:
    """Return ``hints`` with the keys that hold."""
    keys = {action.id: action.key_name for action in keymap.actions}
    return tuple((key.format(**keys), text.format(**keys)) for key, text in hints)


def _lines(hints: Hints) -> list[Content]:
    keys = [
        Content.styled(key.rjust(7), "$primary") + "  " + Content.styled(does, "$foreground 70%") for key, does in hints
    ]
    text = Content.styled(PROMISE, "$foreground 70%")
    return [*Content.styled(WORDMARK, "$primary").split("\n"), Content(""), text, Content(""), *keys]
