"""The whole of a diagnosis in words: each part of the time, each number with its formula and the numbers put in, each remedy.

For ``ask -vv`` as lines; the chat's Explain screen takes the same pieces apart.
"""

import re
from collections.abc import Iterator, Sequence

from tokamac.app.tui import units
from tokamac.app.verdict import BOUND, HOW, RELIEF, THROTTLED, reached_text, remedy_text
from tokamac.engine.limits.diagnosis import Diagnosis, Part, PartName
from tokamac.engine.limits.terms import Term, Unit

PLACE = re.compile(r"\{(\w+)\}")
WAITED = "before the prompt was read: its turn, tokenizing, restoring the prompt cache"
DOING: dict[PartName, str] = {"wait": WAITED, "prefill": "reading the prompt", "decode": "writing the reply"}


def value_text(value: float | None, unit: Unit) -> str:
    """Return a number with its unit; None is unknown."""
    if value is None:
        return units.UNKNOWN
    match unit:
        case "GB/s":
            return units.bandwidth(value)
        case "bytes":
            return units.size(round(value))
        case "s":
            return units.milliseconds(value * 1e3) if value < 1 else f"{value:,.2f} s"
        case "tok/s":
            return units.rate(value)
        case "TFLOP/s":
            return f"{_scaled(value * 1e12)}/s"
        case "FLOP":
            return _scaled(value)
        case "FLOP/byte":
            return f"{value:,.1f} FLOP/byte"


def words(term: Term, terms: Sequence[Term]) -> str:
    """Return a term's formula with the names of the others in it."""
    names = {each.key: each.name for each in terms}
    return PLACE.sub(lambda found: names.get(found[1], found[0]), term.formula)


def numbers(term: Term, terms: Sequence[Term]) -> str:
    """Return a term's formula with the others' values put in; empty where it names none, or one of them is unknown."""
    if term.value is None:
        return ""
    values = {each.key: value_text(each.value, each.unit) for each in terms}
    return PLACE.sub(lambda found: values.get(found[1], found[0]), term.formula) if PLACE.search(term.formula) else ""


def part_text(part: Part) -> str:
    """Return what a part of the time was, what it waited for, and how near it came to what is possible."""
    said = [DOING[part.name], "" if part.bound is None else BOUND[part.bound], reached_text(part)]
    return "; ".join(each for each in said if each)


def lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the whole, line by line."""
    for part in diagnosis.parts:
        yield f"{part.name:<9} {units.seconds(part.seconds)}: {part_text(part)}"
    for term in diagnosis.terms:
        yield f"{term.concern:<9} {_equation(term, diagnosis.terms)}"
    for throttle in diagnosis.throttles:
        yield f"machine   {THROTTLED[throttle]} ({HOW[RELIEF[throttle]]})"
    for remedy in diagnosis.remedies:
        yield f"remedy    {remedy_text(remedy)} ({HOW[remedy.name]})"


def _equation(term: Term, terms: Sequence[Term]) -> str:
    value = value_text(term.value, term.unit)
    if not PLACE.search(term.formula):
        return f"{term.name} = {value} ({term.formula})"
    return " = ".join(each for each in (term.name, words(term, terms), numbers(term, terms), value) if each)


def _scaled(operations: float) -> str:
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if operations >= size:
            return f"{operations / size:,.3g} {prefix}FLOP"
    return f"{operations:,.0f} FLOP"
