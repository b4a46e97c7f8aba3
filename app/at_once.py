"""How many replies at once, in words and as a table: for What if on the screen, and for ``inspect --parallel``."""

import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from tokamac.engine.metrics import share
from tokamac.engine.options import PARALLEL
from tokamac.engine.perf.diagnosis import Waits
from tokamac.engine.perf.machine import GIB
from tokamac.engine.schedule.capacity import Capacity, WidthOutcome

from . import units
from .output import table
from .sanitise import sanitise_line

LIMIT: dict[Waits, str] = {
    "memory": "memory",
    "compute": "arithmetic",
    "host": "processor",
    "overhead": "overhead",
    "not memory": units.UNKNOWN,
}
"""What a step waits for, in a word."""

TOLD = """\
expected, ceiling  tokens a second of all replies together, each at {context} tokens
each               of one of them, to expect
limit              what a step waits for
TTFT               of the last to come, its prompt of {prompt} tokens read while the others are written"""


def sentence(found: Capacity) -> str:
    """Return the answer: how many fit, what some of them give, and from where arithmetic is the limit."""
    return sanitise_line(" ".join(part for part in (_fitting(found), _rates(found), _limit(found)) if part))


def _fitting(found: Capacity) -> str:
    tokens = f"of {units.count(found.context)} tokens"
    if found.fitting is None:
        return f"How many replies {tokens} fit at once is unknown without the machine's memory."
    memory = "" if found.memory_bytes is None else f" with {found.memory_bytes / GIB:.4g} GB"
    on = "on this machine" if found.here else f"on {found.chip}{memory}"
    if not found.fitting:
        unsure = f"Whether even one reply {tokens} fits {on} is unknown."
        return unsure if found.or_more else f"Not even one reply {tokens} fits {on}."
    least = "At least " if found.or_more else ""
    if found.fitting == 1:
        return f"{least}1 reply {tokens} fits {on}."
    return f"{least}{units.count(found.fitting)} replies {tokens} fit at once {on}."


def _rates(found: Capacity) -> str:
    """Return what as many give as are made at once by default, or fewer where no more fit."""
    most = PARALLEL if found.fitting is None else min(PARALLEL, found.fitting)
    shown = max((each for each in found.widths if each.replies <= most), key=lambda each: each.replies, default=None)
    if shown is None:
        return ""
    most_tps = shown.ceiling_tps if shown.expected_tps is None else shown.expected_tps
    if most_tps is None:
        return "How fast they are is unknown."
    said = "at most " if shown.expected_tps is None else ""
    if shown.replies == 1:
        return f"One alone gives {said}{units.rate(most_tps)}."
    return f"{shown.replies} give {said}{units.rate(most_tps)} together, {units.rate(share(most_tps, shown.replies))} each."


def _limit(found: Capacity) -> str:
    """Return where more at once stops paying."""
    arithmetic, caches = (_within(found, first) for first in (found.arithmetic_from, found.caches_from))
    if found.ridge is None or found.fitting == 0 or all(each.waits is None for each in found.widths):
        return ""
    if arithmetic is not None:
        return (
            "Arithmetic is the limit even of one."
            if arithmetic == 1
            else f"Beyond {arithmetic - 1}, arithmetic is the limit."
        )
    if caches is None:
        return "Memory is the limit of all of them, not arithmetic."
    begins = "Even of one" if caches == 1 else f"Beyond {caches - 1}"
    return f"{begins}, keys and values are more to read than the weights: each more adds less."


def _within(found: Capacity, first: int | None) -> int | None:
    """Return a width, unless fewer fit."""
    return first if first is None or found.fitting is None or first <= found.fitting else None


def at_once_text(found: Capacity, width: int) -> str:
    """Return the whole at ``width`` columns: the sentence, a row for each number of replies, what its columns are, and notes."""
    head = ["at once", "expected", "each", "ceiling", "limit", "memory", "fits", "TTFT"]
    rows = [
        [
            units.count(each.replies),
            units.rate(each.expected_tps),
            units.rate(each.each_tps),
            units.rate(each.ceiling_tps),
            limit_text(each),
            units.size(each.memory.total),
            fits_text(each),
            units.seconds(each.newcomer_ttft_s),
        ]
        for each in found.widths
    ]
    told = TOLD.format(context=units.count(found.context), prompt=units.count(found.prompt))
    shown = table([head, *rows], right=(0, 1, 2, 3, 5, 7))
    notes = (textwrap.fill(sanitise_line(note), width) for note in found.notes)
    return "\n\n".join([textwrap.fill(sentence(found), width), shown, "\n".join([told, *notes])])


def limit_text(each: WidthOutcome) -> str:
    """Return what a step of so many replies waits for, in a word."""
    return units.UNKNOWN if each.waits is None else LIMIT[each.waits]


def fits_text(each: WidthOutcome) -> str:
    """Return whether so many replies fit, in a word."""
    if each.memory.fits and each.memory.from_others:
        return "tight"
    return {True: "yes", False: "no", None: units.UNKNOWN}[each.memory.fits]


def at_once_json(found: Capacity) -> dict[str, Any]:
    """Return the same as plain values."""
    return {**asdict(found), "widths": list(_widths(found))}


def _widths(found: Capacity) -> Iterator[dict[str, Any]]:
    return ({**asdict(each), "each_tps": each.each_tps} for each in found.widths)
