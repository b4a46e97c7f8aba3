"""Explanations: one figure of the side panel, and (F2) why a reply took as long as it did.

A figure has its formula, inputs, source and meaning. A reply has its diagnosis: where the time went, how close that came to the
limits, and what would help.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.content import Content
from textual.events import Resize
from textual.widgets import Static

from tokamac.engine import metrics as rates
from tokamac.engine.metrics import Outlier, Throttle
from tokamac.engine.perf.diagnosis import Concern, Diagnosis, PartName, Remedy, Term

from ... import units
from ...chat import figures
from ...chat.conversation import Reply
from ...chat.figures import Explained, Input
from ...sanitise import sanitise_line
from ...verdict import HOW, RELIEF, THROTTLED, is_held_up, numbers, part_text, remedy_text, sentence, value_text, words
from ..markdown.rows import wrapped
from ..theme import FAINT, bar
from . import Dialog

NAME, VALUE = 18, 14  # cells


class FigureScreen(Dialog[int]):
    """The figure ``index`` of ``explained``; the result is the index of the one shown last."""

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
        """Lay out again."""
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
    """Yield a number: its name, its value, and its source beside it, or below where there is no room."""
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


COLOURS: dict[PartName, str] = {"wait": "$foreground 40%", "prefill": "$secondary", "decode": "$primary"}
SPEEDS = ("ceiling", "expected", "rate")
"""Terms of decode that are shown as bars: the limit, the expectation, the measurement."""
TIMES = ("least", "wanted", "reading")
"""Terms of prefill that are shown as bars, in seconds."""
LABEL = 10  # cells
TITLES: dict[Concern, str] = {"machine": "this machine", "decode": "decode", "prefill": "prefill"}


def explanation(reply: Reply, width: int) -> Content:
    """Return the whole at ``width`` cells."""
    assert reply.metrics is not None
    rows = [*_indented(Content(sentence(reply.metrics, reply.diagnosis)), width)]
    if reply.diagnosis is not None:
        for section in _sections(reply.diagnosis, reply.outliers, width):
            rows.extend((Content(""), *section))
    return Content("\n").join(rows)


def _sections(diagnosis: Diagnosis, outliers: Sequence[Outlier], width: int) -> Iterator[list[Content]]:
    yield [_title("where the time went"), *_time(diagnosis, width)]
    if diagnosis.throttles:
        yield [_title("what slowed the machine down"), *_throttled(diagnosis.throttles, width)]
    yield [_title("what would help"), *_help(diagnosis.remedies, width)]
    yield [_title("decode"), *_part(diagnosis, "decode", width), *_bars(diagnosis.terms, SPEEDS, width)]
    yield [_title("prefill"), *_part(diagnosis, "prefill", width), *_bars(diagnosis.terms, TIMES, width)]
    if outliers:
        lines = (Content(figures.gap_and_cause(outlier)) for outlier in outliers)
        yield [_title("outliers among the gaps"), *(row for line in lines for row in _indented(line, width, indent=2))]
    for concern, name in TITLES.items():
        terms = [term for term in diagnosis.terms if term.concern == concern]
        yield [_title(f"the numbers: {name}"), *(row for term in terms for row in _term(term, diagnosis.terms, width))]


def _title(text: str) -> Content:
    return Content.styled(text.upper(), f"bold {FAINT}")


def _indented(text: Content, width: int, *, indent: int = 0) -> Iterator[Content]:
    for row in wrapped(text, max(width - indent, 1)):
        yield Content(" " * indent) + row.content


def _time(diagnosis: Diagnosis, width: int) -> Iterator[Content]:
    """Yield the whole time as one bar, and its parts."""
    whole = sum(part.seconds for part in diagnosis.parts)
    cells = shares([part.seconds for part in diagnosis.parts], width)
    drawn = zip(diagnosis.parts, cells, strict=True)
    yield Content("").join(Content.styled("█" * count, COLOURS[part.name]) for part, count in drawn)
    legend = []
    for part in diagnosis.parts:
        share = rates.share(part.seconds, whole)
        told = "" if share is None else f" ({units.percent(share)})"
        legend.append(Content.styled("■ ", COLOURS[part.name]) + f"{part.name} {units.seconds(part.seconds)}{told}")
    yield from _spread(legend, width)


def _spread(parts: Sequence[Content], width: int) -> Iterator[Content]:
    """Yield rows of ``parts``, each of which stays whole."""
    row = Content("")
    for part in parts:
        longer = row + "   " + part if row.plain else part
        if row.plain and longer.cell_length > width:
            yield row
            longer = part
        row = longer
    yield row


def shares(values: Sequence[float], cells: int) -> list[int]:
    """Divide ``cells`` in proportion to ``values``; what is above zero gets at least one, where there is room."""
    total = sum(values)
    if total <= 0:
        return [0] * len(values)
    counts = [max(round(cells * value / total), 1 if value > 0 else 0) for value in values]
    counts[counts.index(max(counts))] += cells - sum(counts)
    return counts


def _throttled(throttles: Sequence[Throttle], width: int) -> Iterator[Content]:
    for each in throttles:
        yield from _indented(Content.styled(f"{THROTTLED[each]}.", "$text-warning"), width)
        yield from _indented(Content.styled(HOW[RELIEF[each]], FAINT), width, indent=2)


def _help(found: Sequence[Remedy], width: int) -> Iterator[Content]:
    if not found:
        yield Content.styled("No setting would make this noticeably faster.", FAINT)
    for index, remedy in enumerate(found, 1):
        number = Content.styled(f"{index} ", "bold $text-success")
        first, *rest = wrapped(Content(remedy_text(remedy)), width - 2)
        yield number + first.content
        yield from (Content("  ") + row.content for row in rest)
        yield from _indented(Content.styled(HOW[remedy.name], FAINT), width, indent=2)


def _part(diagnosis: Diagnosis, name: PartName, width: int) -> Iterator[Content]:
    part = diagnosis.part(name)
    style = "$text-warning" if is_held_up(part, sum(each.seconds for each in diagnosis.parts)) else ""
    yield from _indented(Content.styled(f"{units.seconds(part.seconds)}: {part_text(part)}", style), width)


def _bars(terms: Sequence[Term], keys: Sequence[str], width: int) -> Iterator[Content]:
    """Yield some terms as bars to compare; nothing where all but one are unknown."""
    shown = [term for key in keys for term in terms if term.key == key and term.value is not None]
    longest = max((term.value or 0.0 for term in shown), default=0.0)
    room = width - LABEL - VALUE - 1
    if len(shown) < 2 or room < 8:
        return
    for term in shown:
        style = "$text-primary" if term.name == "measured" else FAINT
        drawn = bar(rates.share(term.value, longest), room, style)
        yield Content(term.name.ljust(LABEL)) + drawn + Content(value_text(term.value, term.unit).rjust(VALUE + 1))


def _term(term: Term, terms: Sequence[Term], width: int) -> Iterator[Content]:
    """Yield one number: its name and value, below them its formula, in words and in numbers."""
    value = value_text(term.value, term.unit)
    gap = max(width - len(term.name) - len(value), 2)
    style = "$foreground" if term.value is not None else FAINT
    yield (
        Content(term.name)
        + Content.styled(" " + "·" * (gap - 2) + " ", "$foreground 25%")
        + Content.styled(value, style)
    )
    for line in (words(term, terms), numbers(term, terms)):
        if line:
            yield from _indented(Content.styled(sanitise_line(line), FAINT), width, indent=2)


class ExplainScreen(Dialog[Literal["what_if", "steps"]]):
    """The diagnosis of one of ``replies``, first of the one at ``index``. The result is the action to go on with."""

    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("f2", "leave", "Close", id="explain.leave", show=False),
        Binding("left", "move(-1)", "Earlier reply", id="explain.earlier", priority=True),
        Binding("right", "move(1)", "Later reply", id="explain.later", priority=True),
        Binding("f3", "what_if", "What if", id="explain.what_if"),
        Binding("f10,s", "steps", "Steps", id="explain.steps"),
    ]

    def __init__(self, replies: Sequence[Reply], index: int = -1) -> None:
        super().__init__()
        self._replies = replies
        self._index = index % len(replies)

    def compose(self) -> ComposeResult:
        """Yield the box."""
        with VerticalScroll(classes="box", id="explain"):
            yield Static(id="explanation", markup=False)

    def on_mount(self) -> None:
        """Take the keys."""
        self.query_one("#explain").focus()

    def on_resize(self, event: Resize) -> None:
        """Lay out again."""
        del event
        self.call_after_refresh(self._show)

    def _show(self) -> None:
        box, many = self.query_one("#explain"), len(self._replies) > 1
        box.border_title = f"Explain · reply {self._index + 1} of {len(self._replies)}"
        self.say_keys(*(["← → other replies"] if many else []), "F3 what if", "S steps", "Esc closes")
        width = max(box.content_size.width - 1, 1)  # beside the scroll bar
        self.query_one("#explanation", Static).update(explanation(self._replies[self._index], width))

    def action_move(self, by: int) -> None:
        """Show the reply before or after."""
        index = self._index + by
        if 0 <= index < len(self._replies):
            self._index = index
            self._show()
            self.query_one("#explain").scroll_home(animate=False)

    def action_what_if(self) -> None:
        """Close, and ask what if."""
        self.dismiss("what_if")

    def action_steps(self) -> None:
        """Close, and walk through the steps."""
        self.dismiss("steps")
