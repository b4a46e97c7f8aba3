"""A reply's diagnosis laid out for reading: where the time went, how near that came to what is possible, and what would help."""

from collections.abc import Iterator, Sequence

from textual.content import Content

from tokamac.app.sanitise import sanitise_line
from tokamac.app.tui import measures, units
from tokamac.app.tui.conversation import Reply
from tokamac.app.tui.prose.rows import wrapped
from tokamac.app.tui.theme import FAINT
from tokamac.app.tui.widgets.charts import bar
from tokamac.app.verdict import HOW, RELIEF, THROTTLED, remedy_text, sentence
from tokamac.app.verdict_full import numbers, part_text, value_text, words
from tokamac.engine.limits import metrics as rates
from tokamac.engine.limits.diagnosis import Diagnosis, Part, PartName
from tokamac.engine.limits.gaps import Outlier, Throttle
from tokamac.engine.limits.remedies import Remedy
from tokamac.engine.limits.terms import Concern, Term

COLOURS: dict[PartName, str] = {"wait": "$foreground 40%", "prefill": "$secondary", "decode": "$primary"}
SPEEDS = ("ceiling", "expected", "rate")
"""Terms of decode that are shown as bars: what physics allows, what is expected, what was measured."""
TIMES = ("least", "wanted", "reading")
"""Terms of prefill that are shown so, in seconds."""
LABEL = 10  # cells
VALUE = 14
TITLES: dict[Concern, str] = {"machine": "this machine", "decode": "decode", "prefill": "prefill"}


def explanation(reply: Reply, width: int) -> Content:
    """Return the whole at ``width`` cells."""
    assert reply.metrics is not None
    rows = [*_wrapped(Content(sentence(reply.metrics, reply.diagnosis)), width)]
    if reply.diagnosis is not None:
        for section in _sections(reply.diagnosis, reply.outliers, width):
            rows.extend((Content(""), *section))
    return Content("\n").join(rows)


def _sections(diagnosis: Diagnosis, outliers: Sequence[Outlier], width: int) -> Iterator[list[Content]]:
    yield [_title("where the time went"), *_time(diagnosis, width)]
    if diagnosis.throttles:
        yield [_title("what slowed the machine down"), *_throttled(diagnosis.throttles, width)]
    yield [_title("what would help"), *_help(diagnosis.remedies, width)]
    yield [_title("decode"), *_part(diagnosis.part("decode"), width), *_bars(diagnosis.terms, SPEEDS, width)]
    yield [_title("prefill"), *_part(diagnosis.part("prefill"), width), *_bars(diagnosis.terms, TIMES, width)]
    if outliers:
        lines = (Content(measures.gap_and_cause(outlier)) for outlier in outliers)
        yield [_title("gaps that stand out"), *(row for line in lines for row in _wrapped(line, width, indent=2))]
    for concern, name in TITLES.items():
        terms = [term for term in diagnosis.terms if term.concern == concern]
        yield [_title(f"the numbers: {name}"), *(row for term in terms for row in _term(term, diagnosis.terms, width))]


def _title(text: str) -> Content:
    return Content.styled(text.upper(), f"bold {FAINT}")


def _wrapped(text: Content, width: int, *, indent: int = 0) -> Iterator[Content]:
    for row in wrapped(text, max(width - indent, 1)):
        yield Content(" " * indent) + row.content


def _time(diagnosis: Diagnosis, width: int) -> Iterator[Content]:
    """Yield all the time as one bar, and what its parts are."""
    whole = sum(part.seconds for part in diagnosis.parts)
    cells = shares([part.seconds for part in diagnosis.parts], width)
    drawn = zip(diagnosis.parts, cells, strict=True)
    yield Content("").join(Content.styled("█" * count, COLOURS[part.name]) for part, count in drawn)
    legend = []
    for part in diagnosis.parts:
        share = rates.share(part.seconds, whole)
        told = "" if share is None else f" {units.percent(share)}"
        legend.append(Content.styled("■ ", COLOURS[part.name]) + f"{part.name} {units.seconds(part.seconds)}{told}")
    yield from _wrapped(Content("   ").join(legend), width)


def shares(values: Sequence[float], cells: int) -> list[int]:
    """Divide ``cells`` in proportion to ``values``; what is more than nothing gets one at least, where there is room."""
    total = sum(values)
    if total <= 0:
        return [0] * len(values)
    counts = [max(round(cells * value / total), 1 if value > 0 else 0) for value in values]
    counts[counts.index(max(counts))] += cells - sum(counts)
    return counts


def _throttled(throttles: Sequence[Throttle], width: int) -> Iterator[Content]:
    for each in throttles:
        yield from _wrapped(Content.styled(f"{THROTTLED[each]}.", "$text-warning"), width)
        yield from _wrapped(Content.styled(HOW[RELIEF[each]], FAINT), width, indent=2)


def _help(found: Sequence[Remedy], width: int) -> Iterator[Content]:
    if not found:
        yield Content.styled("nothing that was predicted for a reply like this one", FAINT)
    for index, remedy in enumerate(found, 1):
        number = Content.styled(f"{index} ", "bold $text-success")
        first, *rest = wrapped(Content(remedy_text(remedy)), width - 2)
        yield number + first.content
        yield from (Content("  ") + row.content for row in rest)
        yield from _wrapped(Content.styled(HOW[remedy.name], FAINT), width, indent=2)


def _part(part: Part, width: int) -> Iterator[Content]:
    style = "$text-warning" if part.behind else ""
    yield from _wrapped(Content.styled(f"{units.seconds(part.seconds)}: {part_text(part)}", style), width)


def _bars(terms: Sequence[Term], keys: Sequence[str], width: int) -> Iterator[Content]:
    """Yield some terms as bars beside each other; nothing where all but one are unknown."""
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
    """Yield one number: its name and value, below them how it is computed, and with which numbers."""
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
            yield from _wrapped(Content.styled(sanitise_line(line), FAINT), width, indent=2)
