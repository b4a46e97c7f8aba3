"""The gain of speculative decoding on a chip at a given acceptance rate; arithmetic only."""

# tokens a pass  = 1 + a + a² + … + aᵏ          a: acceptance rate of a token; k: draft tokens
# gain           = tokens a pass ÷ (plain steps of a pass over k + 1 rows, plus drafting)

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..errors import OptionError, TokamacError
from ..perf.hardware import generation_of
from ..perf.memory import MemoryFit
from .ledger import TUNING, DraftingCosts, RowCosts, draft_step, pass_steps, read_steps, row_costs

if TYPE_CHECKING:
    from ..perf.inspection import ModelRef
    from ..perf.roofline import Workload
    from ..perf.what_if import Machine, Suggestion, WeighedModel, WhatIfCase

ACCEPTANCE = TUNING.computed["draft"]  # how likely a guess is taken to be where nobody says it

Guesser = Literal["lookup", "draft", "heads"]


@dataclass(frozen=True, slots=True)
class GuessWidth:
    """One draft width. tokens: per pass; steps: plain steps, drafting included; None is unknown."""

    width: int
    tokens: float
    steps: float | None
    gain: float | None


@dataclass(frozen=True, slots=True)
class GuesserGain:
    """The gain of one kind of drafter.

    name: of the draft model; "" else. step: plain steps per draft token. best: the best width; 0 where plain
    steps
    are as good, None is unknown. gain: tokens per plain step then. memory_bytes: beside the model.
    """

    source: Guesser
    name: str
    step: float
    widths: tuple[GuessWidth, ...]
    best: int | None
    gain: float | None
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SpeculationGain:
    """Speculation's gain for one model in one case on one machine."""

    chip: str
    context: int
    acceptance: float
    plain_tps: float | None
    guessers: tuple[GuesserGain, ...]
    timed_on: str
    timed_source: str
    notes: tuple[str, ...] = ()

    def expected_tps(self, guesser: GuesserGain) -> float | None:
        return None if self.plain_tps is None or guesser.gain is None else self.plain_tps * guesser.gain


@dataclass(frozen=True, slots=True)
class DraftOffer:
    """A catalogue draft model for one of its models, at a machine. Bytes; None is unknown."""

    id: str
    download_bytes: int | None
    memory: MemoryFit | None
    acceptance: float
    gain: float | None
    expected_tps: float | None


def draft_offer(found: "Suggestion", place: "Machine") -> DraftOffer | None:
    from ..perf.catalogue import draft_for, find  # the chat's wire doesn't wait for the table
    from ..perf.inspection import model_ref_of_entry

    entry, draft = find(found.id), draft_for(found.id)
    other = None if draft is None else find(draft.id)
    if entry is None or other is None or draft is None:
        return None
    own = model_ref_of_entry(entry, entry.repository(found.id))
    try:
        gained = gain_of(own, found.outcome.case, place, ACCEPTANCE, model_ref_of_entry(other, draft))
    except TokamacError:
        return None
    with_it, alone = next(each for each in gained.guessers if each.source == "draft"), found.outcome.memory
    both = None
    if alone is not None:
        both = place.fit(weights=alone.weights + with_it.memory_bytes, kv=alone.kv, working=alone.working)
    speed = gained.expected_tps(with_it)
    return DraftOffer(draft.id, draft.published_bytes, both, ACCEPTANCE, with_it.gain, speed)


def tokens_a_pass(acceptance: float, width: int) -> float:
    return sum(acceptance**place for place in range(width + 1))


def gain_of(
    ref: "ModelRef",
    case: "WhatIfCase",
    place: "Machine",
    acceptance: float = ACCEPTANCE,
    draft: "ModelRef | None" = None,
) -> SpeculationGain:
    """Return the gain with a model, and with ``draft``. Raises OptionError where either can't be weighed."""
    from ..options import KVSpec
    from ..perf.what_if import WhatIfCase

    beside = KVSpec(case.kv.key_bits, case.kv.value_bits, case.kv.group_size)
    with_it = None
    if draft is not None:
        with_it = draft.name, _loaded(draft, WhatIfCase(kv=beside, context=case.context, prompt=case.prompt), place)
    return speculation_gain(_loaded(ref, case, place), case.context, acceptance, with_it)


def speculation_gain(
    model: "WeighedModel", context: int, acceptance: float, draft: "tuple[str, WeighedModel] | None" = None
) -> SpeculationGain:
    if not 0 <= acceptance <= 1:
        raise OptionError(f"a share of {acceptance:g} can't come true", "Give one from 0 to 1.")
    place, limits = model.place, model.limits(context)
    costs = row_costs(place.device, place.chip, model.work)
    passes = _passes(model, costs, context)
    found = [_guesser("lookup", "", _widths(acceptance, passes, lambda _: 0.0), 0.0)]
    if draft is not None:
        name, other = draft
        drafting = DraftingCosts(read_steps(other.work, other.latency, place.chip, device=place.device))
        both = (other.work, other.latency), (model.work, model.latency)
        drafting.step = draft_step(*both, place.chip, context)
        memory = other.weighed.held.weight_bytes + other.plan.bytes_at(context)
        widths = _widths(acceptance, passes[: len(TUNING.short)], drafting.drafting)
        found.append(_guesser("draft", name, widths, drafting.step, memory))
    if (head := head_step(model.work, context)) is not None:
        widths = _widths(acceptance, passes[: len(TUNING.short)], lambda width: width * head)
        found.append(_guesser("heads", "", widths, head))
    return SpeculationGain(
        chip=place.chip.name,
        context=context,
        acceptance=acceptance,
        plain_tps=None if limits is None else limits.expected_tps,
        guessers=tuple(found),
        timed_on=costs.timed_on,
        timed_source=costs.source,
        notes=tuple(_notes(place, costs)),
    )


def head_step(work: "Workload", context: int) -> float | None:
    weights, whole = work.weight_bytes(), work.step_bytes(context)
    heads = [product for product in work.products if product.head]
    if weights is None or not whole or not heads:
        return None
    output = min(weights, sum(product.count * product.nbytes(2) for product in heads))
    return ((weights - output) / max(work.layers, 1) + output) / whole


def _passes(model: "WeighedModel", costs: RowCosts, context: int) -> list[tuple[int, float | None]]:
    place = model.place
    work, latency, device = model.work, model.latency, place.device
    return [
        (width, None if device == "cuda" else pass_steps(work, latency, place.chip, context, width + 1, device=device))
        for width in (*TUNING.short, TUNING.half, TUNING.long)
        if width < costs.most
    ]


def _widths(
    acceptance: float, passes: Sequence[tuple[int, float | None]], drafting: Callable[[int], float]
) -> Iterator[GuessWidth]:
    for width, verifying in passes:
        tokens, steps = tokens_a_pass(acceptance, width), None if verifying is None else verifying + drafting(width)
        yield GuessWidth(width, tokens, steps, None if steps is None else tokens / steps)


def _guesser(source: Guesser, name: str, found: Iterable[GuessWidth], step: float, memory: int = 0) -> GuesserGain:
    widths = tuple(found)
    known = [each for each in widths if each.gain is not None]
    best = max(known, key=lambda each: each.gain or 0.0, default=None)
    if best is None:
        return GuesserGain(source, name, step, widths, None, None, memory)
    pays = (best.gain or 0.0) > TUNING.worth
    return GuesserGain(source, name, step, widths, best.width if pays else 0, best.gain if pays else 1.0, memory)


def _loaded(ref: "ModelRef", case: "WhatIfCase", place: "Machine") -> "WeighedModel":
    from ..perf.footprint import weigh
    from ..perf.what_if import load

    weighed = weigh(ref.config, place.device, packing=case.packing(ref.packing), folder=ref.folder)
    if isinstance(weighed, str):
        raise OptionError(f"{ref.name} can't be weighed: {weighed}", "Choose another model.")
    return load(weighed, case.kv, place)


def _notes(place: "Machine", costs: RowCosts) -> Iterator[str]:
    chip = place.chip.name
    if place.device == "cuda":
        yield f"unknown: what a pass over several tokens takes on {chip} was not published"
    elif place.device == "metal" and generation_of(chip) not in costs.generations:
        yield f"of {chip} no timings of passes over several tokens are known: those of {costs.timed_on} are taken"
    if costs.most <= TUNING.long and place.device != "cuda":
        yield f"passes were timed for up to {costs.most} tokens"
