"""Rows, targets, verdicts, and their Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.benchmarks.stats import Series, number


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. ``met`` is None where there is no target, or nothing to judge."""

    what: str
    value: str
    target: str = ""
    met: bool | None = None

    @property
    def verdict(self) -> str:
        """Met, missed, or nothing."""
        return {True: "met", False: "**missed**", None: ""}[self.met]


@dataclass(frozen=True, slots=True)
class Section:
    """The rows of one question, and how they were measured."""

    title: str
    rows: Sequence[Row]
    how: str


def spread(values: Series, unit: str = "") -> str:
    """Return ``median (low–high) unit``, and from how many runs."""
    tail = f" {unit}" if unit else ""
    if len(values.values) == 1:
        return f"{number(values.median)}{tail}, n = 1"
    return f"{number(values.median)} ({number(values.low)}–{number(values.high)}){tail}, n = {len(values.values)}"


def plain(what: str, values: Series, unit: str = "") -> Row:
    """Return a figure that has no target."""
    return Row(what, spread(values, unit))


def at_least(what: str, values: Series, bound: float, unit: str = "") -> Row:
    """Return a figure whose median must reach ``bound``."""
    return Row(what, spread(values, unit), f"≥ {bound:g} {unit}".rstrip(), values.median >= bound)


def at_most(what: str, values: Series, bound: float, unit: str = "") -> Row:
    """Return a figure whose median must not pass ``bound``."""
    return Row(what, spread(values, unit), f"≤ {bound:g} {unit}".rstrip(), values.median <= bound)


def within(what: str, errors: Series, bound: float) -> Row:
    """Return a relative error whose median must lie within ``bound`` of zero on either side."""
    low, high = f"{errors.low:+.1%}", f"{errors.high:+.1%}"
    value = low if low == high else f"{errors.median:+.1%} ({low}–{high}), n = {len(errors.values)}"
    return Row(what, value, f"within {bound:.0%}", abs(errors.median) <= bound)


def holds(what: str, value: str, target: str, *, met: bool) -> Row:
    """Return a fact that is so or is not."""
    return Row(what, value, target, met)


def block(section: Section, measured: str) -> str:
    """Return a section's Markdown. measured: when, and how long it took."""
    rows = [(row.what, row.value, row.target, row.verdict) for row in section.rows]
    lines = [f"## {section.title}", "", *_table(("", "measured", "target", ""), rows), "", section.how, "", measured]
    return "\n".join(lines)


def page(blocks: Sequence[str], facts: Sequence[tuple[str, str]]) -> str:
    """Return the whole page: the head, which names the machine, and the sections."""
    cells = [cell.strip() for block in blocks for line in block.splitlines() for cell in line.split("|")[4:5]]
    met, missed = cells.count("met"), cells.count("**missed**")
    head = [
        "# Benchmarks",
        "",
        "Written by `make bench` (`tests/benchmarks`); do not edit by hand. A figure is a median (smallest–largest) of n",
        "runs. Ratios are taken in pairs: both sides run in turn, A B A B …, in one session, and the median is that of the",
        "pairs' ratios. A section that was measured on another machine, or with other versions, says so at its end.",
        f"Targets met: {met} of {met + missed}.",
        "",
        *_table(("measured on", ""), facts),
    ]
    return "\n\n".join(["\n".join(head), *blocks]) + "\n"


ELSEWHERE = "*Measured where this differs: "


def merged(old: str, blocks: Sequence[str], facts: Sequence[tuple[str, str]]) -> str:
    """Return the page ``old`` with these sections in place of those of the same titles, or after them.

    What stays and was measured on another machine, or with other versions, says which from now on.
    """
    head, *sections = old.rstrip("\n").split("\n\n## ")
    other = [(name, value) for name, value in _facts_in(head) if (name, value) not in facts]
    note = f"\n\n{ELSEWHERE}{'; '.join(f'{name} {value}' for name, value in other)}.*" if other else ""
    kept = {section.splitlines()[0]: f"## {section}" for section in sections}
    kept = {title: section if ELSEWHERE in section else f"{section}{note}" for title, section in kept.items()}
    kept |= {block.splitlines()[0].removeprefix("## "): block for block in blocks}
    return page(list(kept.values()), facts)


def _facts_in(head: str) -> list[tuple[str, str]]:
    """Return name and value of each row of the head's table."""
    rows = [
        [cell.strip() for cell in line.strip("| ").split(" | ")] for line in head.splitlines() if line.startswith("| ")
    ]
    return [(row[0], row[1]) for row in rows[2:] if len(row) == 2]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_line(head), _line(["---"] * len(head)), *(_line(row) for row in rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '∣') for cell in cells)} |"
