"""One figure of the side panel, explained: formula, inputs, source, meaning."""

from collections.abc import Iterator, Sequence

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.content import Content
from textual.events import Resize
from textual.widgets import Static

from tokamac.app.tui.explained import Explained, Input
from tokamac.app.tui.prose.rows import wrapped
from tokamac.app.tui.screens.dialog import Dialog
from tokamac.app.tui.theme import FAINT

NAME = 18  # cells
VALUE = 14


class FigureScreen(Dialog[int]):
    """The figure ``index`` of ``explained``; the result is the index of the one that was read last."""

    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("escape,enter,space", "close", "Close", id="figure.close", priority=True),
        Binding("left,up", "move(-1)", "Figure before", id="figure.before", priority=True),
        Binding("right,down", "move(1)", "Figure after", id="figure.after", priority=True),
    ]

    def __init__(self, explained: Sequence[Explained], index: int) -> None:
        super().__init__()
        self._explained = explained
        self._index = index

    def compose(self) -> ComposeResult:
        """Yield the box."""
        with VerticalScroll(classes="box", id="figure"):
            yield Static(id="figure-text", markup=False)

    def on_mount(self) -> None:
        """Take the keys."""
        self.query_one("#figure").focus()

    def on_resize(self, event: Resize) -> None:
        """Lay out for the room there is now."""
        del event
        self.call_after_refresh(self._show)

    def action_move(self, by: int) -> None:
        """Explain the figure before or after."""
        self._index = max(0, min(len(self._explained) - 1, self._index + by))
        self._show()
        self.query_one("#figure").scroll_home(animate=False)

    def action_close(self) -> None:
        """Close."""
        self.dismiss(self._index)

    def _show(self) -> None:
        box = self.query_one("#figure")
        box.border_title = self._explained[self._index].name
        self.say_keys(f"{self._index + 1} of {len(self._explained)}", "↑ ↓ others", "Esc closes")
        width = max(box.content_size.width - 1, 1)
        self.query_one("#figure-text", Static).update(figure_text(self._explained[self._index], width))


def figure_text(figure: Explained, width: int) -> Content:
    """Return the explanation at ``width`` cells."""
    value = f"{figure.value}: {figure.why}" if figure.why else figure.value
    rows = [*_wrapped(Content.styled(value, "bold $text-primary" if not figure.why else FAINT), width), Content("")]
    rows += [*_wrapped(Content(figure.meaning), width), Content("")]
    rows += [Content.styled("HOW", f"bold {FAINT}"), *_wrapped(Content(f"{figure.name} = {figure.formula}"), width)]
    if figure.inputs:
        rows += [Content(""), Content.styled("FROM", f"bold {FAINT}")]
        rows += [row for each in figure.inputs for row in _input(each, width)]
    rows += [Content(""), Content.styled("SOURCE", f"bold {FAINT}"), *_wrapped(Content(figure.source), width)]
    return Content("\n").join(rows)


def _wrapped(text: Content, width: int) -> Iterator[Content]:
    return (row.content for row in wrapped(text, width))


def _input(given: Input, width: int) -> Iterator[Content]:
    """Yield a number: its name, its value, and beside it, or below where there is no room, where it comes from."""
    value = Content.styled(given.value.rjust(VALUE), "$foreground")
    first = Content(given.name.ljust(NAME)) + value
    beside = width - first.cell_length - 2
    if beside >= NAME:
        source, *more = _wrapped(Content.styled(given.source, FAINT), beside)
        yield first + "  " + source
        yield from (Content(" " * (first.cell_length + 2)) + row for row in more)
    else:
        yield first
        yield from (Content("  ") + row for row in _wrapped(Content.styled(given.source, FAINT), max(width - 2, 1)))
