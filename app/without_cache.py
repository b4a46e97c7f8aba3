"""What a KV cache is worth, in words and tables: for What if on the screen, and for ``inspect --no-cache``."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from tokamac.engine.passes.without_cache import CacheWorth, KnownFigure, KVSize, known_figures

from . import units
from .output import table

ROOMY = 100
"""Columns from which every context and the arithmetic of the known figures are shown."""


def worth_text(worth: CacheWorth, width: int = ROOMY) -> str:
    """Return the whole at ``width`` columns: one sentence, the steps, the sizes, and the figures that are often quoted."""
    roomy = width >= ROOMY
    blocks = [
        textwrap.fill(sentence(worth), width),
        f"STEP BY STEP{_times_are(worth)}\n{_steps(worth)}",
        f"KEYS AND VALUES, AND HOW MANY REQUESTS OF {units.count(worth.context)} TOKENS FIT AT ONCE\n{_sizes(worth, roomy=roomy)}",
        f"WELL-KNOWN FIGURES\n{_known(known_figures(), roomy=roomy)}",
    ]
    return "\n\n".join(blocks)


def sentence(worth: CacheWorth) -> str:
    """Return what a cache saves, in two sentences."""
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
    """Return a time, of a small model's step too."""
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
    """Return the same as plain values."""
    return {**asdict(worth), "known_figures": list(_figures())}


def _figures() -> Iterator[dict[str, Any]]:
    return (asdict(each) for each in known_figures())
