"""Rows, targets, verdicts, their statistics, and their Markdown."""

import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

# Medians, ranges, and ratios taken in pairs.

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Series:
    """What several runs gave, in their order; never empty."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle."""
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """The smallest."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The largest."""
        return max(self.values)


def series(values: Sequence[float | None]) -> Series:
    """Return the values as a series. Raises ValueError where one is unknown or there is none."""
    known = tuple(value for value in values if value is not None)
    if not known or len(known) != len(values):
        raise ValueError("a run gave no figure")
    return Series(known)


def ratios(above: Series, below: Series) -> Series:
    """Return the quotients run by run: what slows the machine for a while slows both of a pair."""
    return Series(tuple(a / b for a, b in zip(above.values, below.values, strict=True)))


def alternate(rounds: int, *measures: Callable[[int], T], budget_s: float | None = None) -> list[list[T]]:
    """Call the measures in turn (A B A B …) with the number of the round, from 1; return what each of them gave.

    Ends after ``rounds``, or before a further round that would probably go over ``budget_s`` seconds in all.
    """
    results: list[list[T]] = [[] for _ in measures]
    began = time.monotonic()
    for number in range(1, rounds + 1):
        for result, measure in zip(results, measures, strict=True):
            result.append(measure(number))
        spent = time.monotonic() - began
        if budget_s is not None and spent * (number + 1) / number > budget_s:
            break
    return results


def number(value: float) -> str:
    """Return a value with three significant digits, or all that stand before the point."""
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}"


# Rows, targets, verdicts, and their Markdown.


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


# What the page begins with: a row of a section, as it was measured, under words that need no section around them.
SHORT = (
    ("first paint of the chat", "Start", "first paint of the chat"),
    ("decode of the engine ÷ a bare loop of MLX", "Decode: the engine over a bare loop", "engine ÷ bare loop"),
    ("decode ÷ mlx-lm's, same checkpoint, on this CPU", "The same checkpoint through mlx-lm", "decode: engine ÷ mlx-lm"),
    ("prefill of 512 tokens ÷ mlx-lm's", "The same checkpoint through mlx-lm", "prefill of 512 tokens: engine ÷ mlx-lm"),
    ("first token, 2,000 tokens cached in memory ÷ cold", "Prompt cache", "TTFT warm ÷ cold, in memory"),
    ("the same, from disk after a restart", "Prompt cache", "TTFT warm ÷ cold, from disk after a restart"),
    ("8 branches of 2,000 tokens: bytes ÷ each token once", "Prompt cache",
     "8 branches of 64 off 2,000 tokens: bytes held ÷ bytes of 2,512 tokens"),
    ("bytes of 8-bit keys, 4-bit values ÷ 16-bit", "Keys and values", "bytes per token: 8,4 over 16-bit"),
    ("decode with the chat's screen on ÷ off", "Decode with the chat's screen on", "decode, on ÷ off"),
    ("88 M weights, 8 replies in parallel ÷ one", "Together: several replies at once", "88 M weights: 8 at once ÷ one"),
    ("error of the search ÷ rounding's, 4 bits", "Search: packing with less error", "error ÷ rounding's, 4 bits, groups of 64"),
    ("peak memory of a conversion ÷ its source", "Conversion", "peak memory of search ÷ the source"),
)  # fmt: skip


def short(blocks: Sequence[str]) -> list[str]:
    """Return the table that the page begins with, of the sections that are there."""
    found: dict[tuple[str, str], str] = {}
    for each in blocks:
        title, *lines = each.splitlines()
        for name, value, *_ in (line[2:].split(" | ") for line in lines if line.startswith("| ")):
            found[title.removeprefix("## "), name] = value
    rows = [(words, found[place]) for words, *rest in SHORT if (place := (rest[0], rest[1])) in found]
    return ["", *_table(("in short", "median"), rows)] if rows else []


def page(blocks: Sequence[str], facts: Sequence[tuple[str, str]]) -> str:
    """Return the whole page: the figures in short, the machine, and the sections."""
    cells = [cell.strip() for block in blocks for line in block.splitlines() for cell in line.split("|")[4:5]]
    met, missed = cells.count("met"), cells.count("**missed**")
    head = [
        "# Benchmarks",
        "",
        "Written by `make bench` (`tests/bench`); do not edit by hand. A figure is a median (smallest–largest) of n",
        "runs. Ratios are taken in pairs: both sides run in turn, A B A B …, in one session, and the median is that of the",
        "pairs' ratios. A section that was measured on another machine, or with other versions, says so at its end.",
        f"Targets met: {met} of {met + missed}.",
        *short(blocks),
        "",
        *_table(FACTS, facts),
    ]
    return "\n\n".join(["\n".join(head), *blocks]) + "\n"


FACTS = ("measured on", "")
ELSEWHERE = "*Measured where this differs: "
Facts = Sequence[tuple[str, str]]  # name and value of what the figures were measured on


def merged(old: str, blocks: Sequence[str], facts: Facts) -> str:
    """Return the page ``old`` with these sections in place of those of the same titles, or after them.

    What stays and was measured on another machine, or with other versions, says which from now on. Raises ValueError where
    ``old`` says what it was measured on in a way that can't be read.
    """
    head, *sections = old.rstrip("\n").split("\n\n## ")
    before = _facts_in(head)
    kept = {section.splitlines()[0]: _noted(f"## {section}", before, facts) for section in sections}
    kept |= {block.splitlines()[0].removeprefix("## "): block for block in blocks}
    return page(list(kept.values()), facts)


def _noted(section: str, before: Facts, now: Facts) -> str:
    """Return ``section``, of a page whose head said ``before``, with a note of where it was measured that goes with ``now``."""
    body, noted, said = section.partition(f"\n\n{ELSEWHERE}")
    own = {**dict(before), **(_facts_of(said, [name for name, _ in (*before, *now)]) if noted else {})}
    other = [f"{name} {value}" for name, value in own.items() if (name, value) not in now]
    return f"{body}\n\n{ELSEWHERE}{'; '.join(other)}.*" if other else body


def _facts_of(said: str, names: Sequence[str]) -> dict[str, str]:
    """Return the facts that a note lists after its first words; ``names``: all that there can be."""
    known = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    unread, *pieces = re.split(rf"(?:^|; )({known}) ", said.removesuffix(".*"))
    if unread or not pieces:
        raise ValueError(f"not a note of where a section was measured: {said!r}")
    return dict(zip(pieces[::2], pieces[1::2], strict=True))


def _facts_in(head: str) -> list[tuple[str, str]]:
    """Return name and value of each row of the head's table."""
    _, _, table = head.partition(_line(FACTS))
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [_fact_in(line) for line in lines[1:]]


def _fact_in(line: str) -> tuple[str, str]:
    cells = line.removeprefix("| ").removesuffix(" |").split(" | ")
    if len(cells) != 2:
        raise ValueError(f"not the name and the value of a fact: {line!r}")
    return cells[0], cells[1]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_line(head), _line(["---"] * len(head)), *(_line(row) for row in rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '∣') for cell in cells)} |"
