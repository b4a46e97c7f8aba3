"""What guessing ahead would gain, in words and as tables: for What if on the screen, and for ``inspect --acceptance``."""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tokamac.engine.speculation.gain import Guesser, GuesserGain, SpeculationGain

from . import units
from .output import table
from .sanitise import sanitise_line

NAMES: dict[Guesser, str] = {"lookup": "looked up", "draft": "draft model", "heads": "extra heads"}

FORMULA = """\
tokens a pass  1 + a + a² + … + aᵏ: k tokens guessed, each true with likelihood a
plain steps    of the pass that verifies them, and of guessing: looked up, none;
               a draft model, a step of its own for each token; extra heads,
               each as large as a layer and the output head
gain           tokens a pass / plain steps"""


def sentence(found: SpeculationGain) -> str:
    """Return the answer: what each kind of guesses gains at its best width."""
    told = "; ".join(_told(found, each) for each in found.guessers)
    plain, true = units.rate(found.plain_tps), units.percent(found.acceptance)
    return sanitise_line(f"With {true} of guesses true: {told}. Plain: {plain}.")


def _told(found: SpeculationGain, each: GuesserGain) -> str:
    name = NAMES[each.source]
    if each.name:
        name = f"{each.name.rpartition('/')[2]} as draft model ({units.size(each.memory_bytes)})"
    if each.gain is None or not each.best:
        return f"{name}, {units.UNKNOWN if each.gain is None else 'no gain'}"
    expected = found.expected_tps(each)
    fast = "" if expected is None else f" ({units.rate(expected)})"
    return f"{name}, {each.best} at once, {times(each.gain)}{fast}"


def times(gain: float | None) -> str:
    """Return how many times as fast as plain decoding."""
    return units.UNKNOWN if gain is None else f"{gain:.2f}×"


def gains_text(found: Sequence[SpeculationGain], width: int) -> str:
    """Return the whole at ``width`` columns: a row for each share and kind of guesses, gains by width, formula, and notes."""
    first = found[0]
    plain = f"guessing ahead; plain: {units.rate(first.plain_tps)} at {units.count(first.context)} tokens of context"
    head = ["guesses", "come true", "at once", "tokens a pass", "plain steps", "gain", "expected"]
    pairs = [(each, guesser) for each in found for guesser in each.guessers]
    best = table([head, *(_row(*pair) for pair in pairs)], right=(1, 2, 3, 4, 5, 6))
    sizes = sorted({each.width for _, guesser in pairs for each in guesser.widths})
    head = ["gain by tokens at once", "come true", *map(str, sizes)]
    by_width = table([head, *(_by_width(*pair, sizes) for pair in pairs)], right=range(1, len(head)))
    drafts = [f"draft model: {each.name}, {units.size(each.memory_bytes)}" for each in first.guessers if each.name]
    notes = [*drafts, f"passes over several tokens: {first.timed_on} ({first.timed_source})", *first.notes]
    told = "\n".join(textwrap.fill(sanitise_line(each), width) for each in notes)
    return "\n\n".join([plain, best, by_width, FORMULA, told])


def _row(found: SpeculationGain, guesser: GuesserGain) -> list[str]:
    best = next((each for each in guesser.widths if each.width == guesser.best), None)
    cells = ["", "", ""] if best is None else [str(best.width), f"{best.tokens:.2f}", f"{best.steps:.2f}"]
    gained = "none" if guesser.best == 0 else times(guesser.gain)
    expected = units.rate(found.expected_tps(guesser))
    return [NAMES[guesser.source], units.percent(found.acceptance), *cells, gained, expected]


def _by_width(found: SpeculationGain, guesser: GuesserGain, sizes: Sequence[int]) -> list[str]:
    known = {each.width: times(each.gain).rstrip("×") for each in guesser.widths}
    return [NAMES[guesser.source], units.percent(found.acceptance), *(known.get(size, "") for size in sizes)]


def gains_json(found: Sequence[SpeculationGain]) -> list[dict[str, Any]]:
    """Return the same as plain values."""
    return [{**asdict(each), "guessers": [_plain(each, guesser) for guesser in each.guessers]} for each in found]


def _plain(found: SpeculationGain, guesser: GuesserGain) -> dict[str, Any]:
    return {**asdict(guesser), "expected_tps": found.expected_tps(guesser)}
