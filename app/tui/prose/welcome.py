"""What an empty chat shows: the first keys to know; at the very first start a tour of five lines."""

from textual.content import Content

from tokamac.app.tui.keymap import Keymap
from tokamac.app.tui.prose.page import BLANK, PLAIN, Frame, PageRow
from tokamac.app.tui.prose.rows import Row, wrapped
from tokamac.app.tui.theme import FAINT

Hints = tuple[tuple[str, str], ...]
WORDMARK = "▀█▀ █▀█ █▄▀ █▀█ █▀▄▀█ █▀█ █▀▀\n █  █▄█ █ █ █▀█ █ ▀ █ █▀█ █▄▄"
PROMISE = "A model on this machine. Nothing leaves it."
ALONE = "guide answers about this app alone."
"""Where the embedded model is the one that is asked."""
ELSE = {"chooses a model": "a model for more than help", "choose or get a model": "a model for more than help"}
"""What is then said of one of the keys, which the smallest window shows too."""
HINTS = (
    ("Enter", "sends"),
    ("Ctrl+J", "starts a new line"),
    ("{messages}", "points at a message"),
    ("{choose_model}", "chooses a model"),
    ("{help}", "shows every key"),
)
"""Keys, those that the user may change by the action's id, and what they do."""
TOUR = (
    ("{help}", "all keys; {ask_guide} asks the guide"),
    ("{choose_model}", "choose or get a model"),
    ("{chats}", "earlier chats, and search"),
    ("{explain}", "how fast it was, and why"),
    ("{settings}", "sampling, memory, idle time"),
)
"""As ``HINTS``. What is said of each has at most 27 characters, so that the smallest window shows it on one row."""
GAP = 2  # cells between keys and what they do


class Welcome:
    """The name, and the first keys to know, in the middle of ``height`` rows.

    tour: it is the very first start. guide: the model is the embedded one, which declines what is not about the app.
    """

    def __init__(self, height: int, *, tour: bool = False, keymap: Keymap | None = None, guide: bool = False) -> None:
        self._height, self._guide = height, guide
        hints = TOUR if tour else HINTS
        known = tuple((key, ELSE.get(text, text)) for key, text in hints) if guide else hints
        self._hints = told(known, keymap or Keymap())

    def rows(self, width: int) -> list[PageRow]:
        """Return the rows at ``width`` cells. Where they have no room for all of it the keys stay, and the name goes first."""
        lines = _fitting(_parts(self._hints, width, guide=self._guide), self._height)
        indent = max(0, (width - max(line.cell_length for line in lines)) // 2)
        above = max(0, (self._height - len(lines)) // 2)
        frame = Frame(Content(" " * indent), PLAIN.style)
        return [BLANK] * above + [PageRow(Row(line), frame) for line in lines]


def told(hints: Hints, keymap: Keymap) -> Hints:
    """Return ``hints`` with the keys that hold."""
    keys = {action.id: action.key_name for action in keymap.actions}
    return tuple((key.format(**keys), text.format(**keys)) for key, text in hints)


def _parts(hints: Hints, width: int, *, guide: bool) -> list[list[Content]]:
    """Return the name, the promise, what the guide is for where it is the model, and the keys, as lines of ``width`` cells."""
    said = (PROMISE, ALONE) if guide else (PROMISE,)
    texts = [[row.content for row in wrapped(Content.styled(text, FAINT), width)] for text in said]
    column = max(len(key) for key, _ in hints)
    keys = []
    for key, does in hints:
        for index, row in enumerate(wrapped(Content.styled(does, FAINT), max(1, width - column - GAP))):
            lead = "" if index else key
            keys.append(Content.styled(lead.rjust(column), "$text-primary") + " " * GAP + row.content)
    return [Content.styled(WORDMARK, "$primary").split("\n"), *texts, keys]


def _fitting(parts: list[list[Content]], height: int) -> list[Content]:
    """Return the last of ``parts`` that have room in ``height`` rows, a blank row between two, or none between the last two."""
    airy = [line for part in parts for line in [Content(""), *part]][1:]
    if len(airy) <= height or len(parts) == 1:
        return airy
    tight = [line for part in parts for line in part]
    return tight if len(parts) == 2 and len(tight) <= height else _fitting(parts[1:], height)
