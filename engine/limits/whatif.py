"""What if: a model that need not be here, in other precisions, with other caches and contexts, on this machine or another one.

    place = here()  or  elsewhere("Apple M4 Max", gpu_cores=40, memory_gb=64)
    outcome(config, Case(bits=4, context=32768, prompt=2048), place)
    table(config, Case(), place)                    the same model with one thing changed at a time
    curve(config, Case(), place, (1024, 4096))      decoding over contexts, for a plot
    suggestions(place, context=8192)                which models of the catalogue would run well there, best first

Arithmetic over shapes: nothing is downloaded and no weight is read. Only ``here`` looks at this machine.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from tokamac.engine.context_length import context_length
from tokamac.engine.limits.config_cost import Packing
from tokamac.engine.limits.cost import Form
from tokamac.engine.limits.outcomes import (
    Case,
    Outcome,
    Point,
    curve,
    load,
    outcome,
    outcome_at,
    outcome_of,
    outcomes_of,
)
from tokamac.engine.limits.places import Place, elsewhere, everywhere, here
from tokamac.engine.limits.suggest import Suggestion, suggestions
from tokamac.engine.limits.weighing import weigh
from tokamac.engine.options import KVSpec

__all__ = [
    "Case",
    "Outcome",
    "Place",
    "Point",
    "Suggestion",
    "contexts_up_to",
    "curve",
    "elsewhere",
    "everywhere",
    "here",
    "notes",
    "on_chips",
    "outcome",
    "suggestions",
    "table",
]

SAME_BITS = "this CPU unpacks weights to 32 bits: fewer bits make a smaller file, no faster reply"
"""Said of a table whose model is held unpacked (weighing.form_on): its rows of other bits are alike."""

PRECISIONS = (16, 8, 6, 5, 4, 3)

KV_BITS = ((16, 16), (8, 8), (8, 4), (4, 4))

FIRST_CONTEXT = 1024

UNBOUNDED_CONTEXT = 131_072
"""How far contexts go where a config does not say what the model was made for."""


def table(config: Mapping[str, Any], base: Case, place: Place, *, own: Packing | None = None) -> tuple[Outcome, ...]:
    """Return the base case, then it with one thing changed at a time: precision of weights, bits of keys and values, context.

    Cases that the model can't take are there, with the reason. A prompt that fills the context does so in every one of them; any
    other stays as it is, unless the context is shorter. own: how the model is packed, where its config does not say.
    """
    found: list[Outcome] = []
    for packing, alike in groupby(_distinct(_cases(config, base), own), key=lambda case: case.packing(own)):
        weighed = weigh(config, place.device, place.memory_bytes, packing=packing)
        found += outcomes_of(weighed, alike, place)
    return tuple(found)


def notes(found: Sequence[Outcome], form: Form) -> tuple[str, ...]:
    """Return what is to be known of a whole table, in clauses: why its rows are alike, and why speeds are unknown.

    form: how the model's weights are held at the place.
    """
    unknown = dict.fromkeys(each.reason for each in found if each.reason and each.expected_tps is None)
    said = [SAME_BITS] if form == "unpacked" else []
    return (*said, *(f"unknown: {reason}" for reason in unknown))


def on_chips(
    config: Mapping[str, Any], case: Case, places: Sequence[Place], *, own: Packing | None = None
) -> tuple[Outcome, ...]:
    """Return the same case at several places, none of which is a plain CPU: those hold a model alike.

    Raises OptionError for KV flags that the model can't take.
    """
    weighed = weigh(config, "metal", None, packing=case.packing(own))
    if isinstance(weighed, str) or not places:
        return tuple(outcome_of(weighed, case, place) for place in places)
    first = load(weighed, case.kv, places[0])
    return tuple(outcome_at(first.at(place), case) for place in places)


def contexts_up_to(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return contexts in fourfold steps from 1,024 tokens, the last one what the model was made for."""
    longest = context_length(config) or UNBOUNDED_CONTEXT
    steps = []
    step = FIRST_CONTEXT
    while step < longest:
        steps.append(step)
        step *= 4
    return (*steps, longest)


def _cases(config: Mapping[str, Any], base: Case) -> Iterator[Case]:
    yield base
    for bits in PRECISIONS:
        yield replace(base, bits=bits)
    for key_bits, value_bits in KV_BITS:
        yield replace(base, kv=_with_bits(base.kv, key_bits, value_bits))
    for context in contexts_up_to(config):
        fills = base.prompt == base.context
        yield replace(base, context=context, prompt=context if fills else min(base.prompt, context))


def _distinct(cases: Iterable[Case], own: Packing | None) -> Iterator[Case]:
    """Yield each case once, by what it comes to: asking for the bits that a model has anyway changes nothing."""
    seen = set()
    for case in cases:
        comes_to = (case.packing(own), case.kv, case.context, case.prompt)
        if comes_to not in seen:
            seen.add(comes_to)
            yield case


def _with_bits(kv: KVSpec, key_bits: int, value_bits: int) -> KVSpec:
    return replace(kv, key_bits=key_bits, value_bits=value_bits)
