"""What is in the context, as a bar and a list of its parts in tokens. Enter leaves a file or a turn out, and sends it again.

Nothing is deleted: what is left out stays in the chat and in the store, and is only not sent.
"""

from collections.abc import Callable

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.events import Resize
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from ... import units
from ...chat.context import ContextRow, ContextUse
from ..theme import FAINT
from . import Dialog

LOOK_S = 0.2
"""How often the counts that came are looked at."""
STYLES = {
    "system": ("█", "$text-accent"),
    "tools": ("▐", "$text-muted"),
    "files": ("▓", "$text-warning"),
    "prompts": ("▒", "$text-primary"),
    "replies": ("░", "$text-secondary"),
    "results": ("▞", "$foreground"),
    "draft": ("▚", "$text-success"),
}
"""Of the parts of the bar: told apart without colour too."""
NAMES = {
    "system": "system",
    "tools": "tools",
    "file": "file",
    "prompt": "you",
    "reply": "reply",
    "result": "tool",
    "draft": "draft",
}


def bar(use: ContextUse, width: int) -> Content:
    """Return how the context is filled, in ``width`` cells; what holds anything has a cell at least."""
    whole = max(use.capacity or use.used, use.used, 1)
    shown, cells = Content(""), 0
    for name, tokens in use.by_kind().items():
        mark, style = STYLES[name]
        part = min(max(1, round(width * tokens / whole)), width - cells) if tokens else 0
        shown += Content.styled(mark * part, style)
        cells += part
    return shown + Content.styled("·" * (width - cells), FAINT)


def legend(use: ContextUse) -> Content:
    """Return what the parts of the bar are, with their tokens."""
    parts = [
        Content.styled(f"{STYLES[name][0]} ", STYLES[name][1]) + Content(f"{name} {units.short(tokens)}")
        for name, tokens in use.by_kind().items()
        if tokens
    ]
    parts.append(Content.styled(f"· free {units.short(use.free)} of {units.short(use.capacity)} tokens", FAINT))
    return Content("  ").join(parts)


def part_row(row: ContextRow, width: int) -> Content:
    """Return a part's row of ``width`` cells: its tokens, what it is, how it begins."""
    tokens = "…" if row.tokens is None else units.count(row.tokens)
    lead = f"{tokens:>9}  {NAMES[row.kind]:<7} "
    note = "  left out" if row.left_out else ""
    name = Content(row.name).truncate(max(1, width - len(lead) - len(note)), ellipsis=True)
    shown = name.stylize(f"strike {FAINT}") if row.left_out else name
    return Content.styled(lead, FAINT) + shown + Content.styled(note, "$text-warning")


class ContextScreen(Dialog[None]):
    """Shows what is in the context, and prunes it.

    use: returns it as it is known now, and has counted what is not. prune: leaves a turn or a file out, or sends it again.
    key: of the prompt whose row is selected at first; None is the first row.
    """

    def __init__(
        self, use: Callable[[], ContextUse], prune: Callable[[int, str], None], key: int | None = None
    ) -> None:
        super().__init__()
        self._key = key
        self._use = use
        self._prune = prune
        self._shown: ContextUse | None = None

    def compose(self) -> ComposeResult:
        """Yield the bar, its legend, the list and what the selected row would do."""
        with Vertical(classes="box") as box:
            box.border_title = "Context, in tokens"
            yield Static("", id="bar", markup=False)
            yield Static("", id="legend", markup=False)
            yield OptionList(markup=False, compact=True)
            yield Static("", id="state", classes="note", markup=False)

    def on_mount(self) -> None:
        """Show it, and again as counts come."""
        self.say_keys("Enter leaves out, or sends again", "Esc closes")
        self.query_one(OptionList).focus()
        self.call_after_refresh(self._look)
        self.set_interval(LOOK_S, self._look)

    @on(Resize)
    def resized(self) -> None:
        """Write it anew for the room there is now."""
        self._shown = None
        self.call_after_refresh(self._look)

    def _look(self) -> None:
        use = self._use()
        if use == self._shown or not self.query(OptionList):
            return
        self._shown = use
        listed = self.query_one(OptionList)
        width = max(20, listed.content_region.width - listed.styles.scrollbar_size_vertical)
        at = listed.highlighted
        listed.clear_options()
        listed.add_options([Option(part_row(row, width)) for row in use.rows])
        if at is None:
            at = next((at for at, row in enumerate(use.rows) if row.key == self._key and not row.file), 0)
        listed.highlighted = min(at, len(use.rows) - 1) if use.rows else None
        self.query_one("#bar", Static).update(bar(use, width))
        self.query_one("#legend", Static).update(legend(use))
        self._say()

    @on(OptionList.OptionHighlighted)
    def pointed(self) -> None:
        """Say what the row would do."""
        self._say()

    def _say(self) -> None:
        index = self.query_one(OptionList).highlighted
        empty = "The context is empty."
        told = empty if self._shown is None or index is None else self._shown.consequence(index)
        self.query_one("#state", Static).update(told)

    @on(OptionList.OptionSelected)
    def chosen(self, event: OptionList.OptionSelected) -> None:
        """Leave the row out, or send it again."""
        row = None if self._shown is None else self._shown.rows[event.option_index]
        if row is not None and row.key:
            self._prune(row.key, row.file)
            self._look()
