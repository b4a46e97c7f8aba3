"""Reports for what-if and inspect: a KV cache's value, parallel replies, speculation gains."""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tokamac.engine.lab.without_cache import CacheWorth, KnownFigure, KVSize, known_figures
from tokamac.engine.metrics import share
from tokamac.engine.options import PARALLEL
from tokamac.engine.perf.diagnosis import Waits
from tokamac.engine.perf.what_if import GIB
from tokamac.engine.schedule.capacity import Capacity, WidthOutcome
from tokamac.engine.speculation.gain import Guesser, GuesserGain, SpeculationGain

from ..text import units
from ..text.sanitise import sanitise_line
from ..text.terminal import table

ROOMY = 100  # columns from which every context and the arithmetic of the known figures are shown


def worth_text(worth: CacheWorth, width: int = ROOMY) -> str:
    """Return the full report at ``width`` columns."""
    roomy = width >= ROOMY
    blocks = [
        textwrap.fill(cache_sentence(worth), width),
        f"STEP BY STEP{_times_are(worth)}\n{_steps(worth)}",
        f"KEYS AND VALUES, AND HOW MANY REQUESTS OF {units.count(worth.context)} TOKENS FIT AT ONCE\n{_sizes(worth, roomy=roomy)}",
        f"WELL-KNOWN FIGURES\n{_known(known_figures(), roomy=roomy)}",
    ]
    return "\n\n".join(blocks)


def cache_sentence(worth: CacheWorth) -> str:
    total = worth.total
    times = total.units_without / total.units_with
    kept, again = _time(total.seconds_with), _time(total.seconds_without)
    return (
        f"With a KV cache, a prompt of {units.count(worth.prompt)} tokens and a reply of {units.count(worth.reply)} put "
        f"{units.count(total.units_with)} tokens through the model{kept}. Without one, every step starts again: "
        f"{units.count(total.units_without)} tokens{again}, {times:,.0f} times the work."
    )


def _times_are(worth: CacheWorth) -> str:
    if worth.expected:
        return " (times to expect here)"
    if worth.total.seconds_without is None:
        return " (times unknown: this machine's arithmetic is not measured yet; that happens when it is idle)"
    return " (times at the least that memory and arithmetic allow here)"


def _duration(seconds: float | None) -> str:
    return units.milliseconds(seconds * 1e3) if seconds is not None and seconds < 0.0995 else units.seconds(seconds)


def _time(seconds: float | None) -> str:
    return "" if seconds is None else f" in {units.seconds(seconds)}"


def _steps(worth: CacheWorth) -> str:
    head = ["step", "tokens with", "without", "time with", "without"]
    pairs = [*worth.steps, worth.total]
    names = [*(units.count(pair.step) for pair in worth.steps), "all"]
    rows = [
        [
            name,
            units.count(pair.units_with),
            units.count(pair.units_without),
            _duration(pair.seconds_with),
            _duration(pair.seconds_without),
        ]
        for name, pair in zip(names, pairs, strict=True)
    ]
    return table([head, *rows], right=range(5))


def _sizes(worth: CacheWorth, *, roomy: bool) -> str:
    places = range(len(worth.contexts))
    shown = places if roomy else [*places[:1], *places[-1:]]
    head = ["layout", "bits", *(units.short(worth.contexts[at]) for at in shown), "requests"]
    rows, refused = [], dict.fromkeys(each.refused for each in worth.sizes if each.refused)
    for each in worth.sizes:
        sizes = [units.UNKNOWN if each.refused else units.size(each.nbytes[at]) for at in shown]
        rows.append([_layout(each), _bits(each), *sizes, units.count(each.requests)])
    return "\n".join([table([head, *rows], right=range(2, len(head))), *refused])


def _layout(size: KVSize) -> str:
    if size.window is None:
        return "growing"
    return f"window {units.count(size.window)}{f', {size.sinks} sinks' if size.sinks else ''}"


def _bits(size: KVSize) -> str:
    return str(size.key_bits) if size.key_bits == size.value_bits else f"{size.key_bits}/{size.value_bits}"


def _known(figures: Sequence[KnownFigure], *, roomy: bool) -> str:
    head = ["", "here", "quoted", *(["from"] if roomy else [])]
    rows = [[each.label, _value(each), each.said, *([each.how] if roomy else [])] for each in figures]
    return table([head, *rows], right=(1, 2))


def _value(figure: KnownFigure) -> str:
    digits = 0 if figure.value >= 100 or not figure.unit or figure.unit == "units" else 1 if figure.value >= 10 else 2
    return f"{figure.value:,.{digits}f} {figure.unit}".rstrip()


def worth_json(worth: CacheWorth) -> dict[str, Any]:
    return {**asdict(worth), "known_figures": [asdict(each) for each in known_figures()]}


# What a step waits for, in a word.
LIMIT: dict[Waits, str] = {
    "memory": "memory",
    "compute": "arithmetic",
    "host": "processor",
    "overhead": "overhead",
    "not memory": units.UNKNOWN,
}

TOLD = """\
expected, ceiling  tokens a second of all replies together, each at {context} tokens
each               of one of them, to expect
limit              what a step waits for
TTFT               of the last to come, its prompt of {prompt} tokens read while the others are written"""


def capacity_sentence(found: Capacity) -> str:
    """Summarize: how many fit, their speed, and where compute becomes the limit."""
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
    return first if first is None or found.fitting is None or first <= found.fitting else None


def at_once_text(found: Capacity, width: int) -> str:
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
    return "\n\n".join([textwrap.fill(capacity_sentence(found), width), shown, "\n".join([told, *notes])])


def limit_text(each: WidthOutcome) -> str:
    return units.UNKNOWN if each.waits is None else LIMIT[each.waits]


def fits_text(each: WidthOutcome) -> str:
    if each.memory.fits and each.memory.from_others:
        return "tight"
    return {True: "yes", False: "no", None: units.UNKNOWN}[each.memory.fits]


def at_once_json(found: Capacity) -> dict[str, Any]:
    return {**asdict(found), "widths": [{**asdict(each), "each_tps": each.each_tps} for each in found.widths]}


NAMES: dict[Guesser, str] = {"lookup": "looked up", "draft": "draft model", "heads": "extra heads"}

FORMULA = """\
tokens a pass  1 + a + a² + … + aᵏ: k tokens guessed, each true with likelihood a
plain steps    of the pass that verifies them, and of guessing: looked up, none;
               a draft model, a step of its own for each token; extra heads,
               each as large as a layer and the output head
gain           tokens a pass / plain steps"""


def gain_sentence(found: SpeculationGain) -> str:
    told = "; ".join(_guesser_text(found, each) for each in found.guessers)
    plain, true = units.rate(found.plain_tps), units.percent(found.acceptance)
    return sanitise_line(f"With {true} of guesses true: {told}. Plain: {plain}.")


def _guesser_text(found: SpeculationGain, each: GuesserGain) -> str:
    name = NAMES[each.source]
    if each.name:
        name = f"{each.name.rpartition('/')[2]} as draft model ({units.size(each.memory_bytes)})"
    if each.gain is None or not each.best:
        return f"{name}, {units.UNKNOWN if each.gain is None else 'no gain'}"
    expected = found.expected_tps(each)
    fast = "" if expected is None else f" ({units.rate(expected)})"
    return f"{name}, {each.best} at once, {times(each.gain)}{fast}"


def times(gain: float | None) -> str:
    return units.UNKNOWN if gain is None else f"{gain:.2f}×"


def gains_text(found: Sequence[SpeculationGain], width: int) -> str:
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
    return [
        {
            **asdict(each),
            "guessers": [{**asdict(one), "expected_tps": each.expected_tps(one)} for one in each.guessers],
        }
        for each in found
    ]
