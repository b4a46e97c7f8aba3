"""What if: a model that need not be here, in other precisions, with other caches and contexts, on this machine or another one.

    place = here()  or  elsewhere("Apple M4 Max", gpu_cores=40, memory_gb=64)
    outcome(config, WhatIfCase(bits=4, context=32768, prompt=2048), place)
    table(config, WhatIfCase(), place)                  the same model with one thing changed at a time
    curve(config, WhatIfCase(), place, (1024, 4096))    decoding over contexts, for a plot
    suggestions(place, context=8192)                    which models of the catalogue would run well there, best first

Arithmetic over shapes: nothing is downloaded and no weight is read. Only ``here`` looks at this machine.

The best suggestion is the most capable model that fits with room to spare and is quicker than reading. How capable a model is, its
weights tell only roughly: the square root of all weights times those that a token uses, which is a dense model's weights, and for a
mixture lies between the two. Where the speed is not known, what fits is sorted by that size alone.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby, takewhile
from typing import TYPE_CHECKING, Any, Literal, get_args

from .. import units
from ..chunking import Chunking, prompt_peak, slots_after
from ..errors import OptionError
from ..model.config import context_length
from ..options import GROUP_SIZES, KVSpec
from .catalogue import CatalogueEntry, Repository, catalogue, files_bytes
from .config_cost import Packing
from .footprint import Footprint, KVTable, table_of_plan, weigh
from .machine import Machine
from .memory import MemoryFit, giving_way
from .model_work import traits_of
from .peak_memory import ModelShape, Peak, predict_peak
from .roofline import (
    MATTERS_S,
    Host,
    HostLimited,
    LatencyModel,
    Limits,
    Prediction,
    limits_of,
    measure_host,
    predict,
)
from .workload import Trait, Workload

if TYPE_CHECKING:
    from ..kv.plan import CachePlan


BITS = (16, 8, 6, 5, 4, 3, 2)
"""Bits per weight that a model can be packed with; 16 is not packed."""

PRECISIONS = (16, 8, 6, 5, 4, 3)

KV_BITS = ((16, 16), (8, 8), (8, 4), (4, 4))

FIRST_CONTEXT = 1024

UNBOUNDED_CONTEXT = 131_072
"""How far contexts go where a config does not say what the model was made for."""

MARGIN = 0.9
"""Share of the budget that leaves room for the system, a longer context and other programs."""

READABLE_TPS = 10.0
"""Tokens a second that keep up with a reader: adults read some 238 words a minute silently (Brysbaert 2019,
doi:10.1016/j.jml.2019.104047), about 5 tokens a second; twice that leaves room for skimming."""

Verdict = Literal["runs well", "fits, speed unknown", "tight", "slow", "unknown whether it fits", "does not fit"]
VERDICTS: tuple[Verdict, ...] = (
    "runs well", "fits, speed unknown", "tight", "slow", "unknown whether it fits", "does not fit",
)  # fmt: skip
"""Best first. tight: it fits, with less than a tenth to spare, or other programs have to give way for it now. slow: slower than
twice reading."""

Group = Literal["recommended", "speed unknown", "fit unknown", "slow", "does not fit"]
GROUPS: tuple[Group, ...] = get_args(Group)
"""What a suggestion is listed under, best first. recommended: it fits, and is expected to be quicker than twice reading."""

KV_UNKNOWN = "what its layers keep for each token is not known"

UNMEASURED = "this machine was not measured with a model like this one"
UNMEASURED_KV = "packed keys and values were not timed here (a chat that uses them does it, once idle)"


@dataclass(frozen=True, slots=True)
class WhatIfCase:
    """What is asked. Raises OptionError for what can't be.

    bits: of weights, in groups of ``group_size``; None is as the model is packed. context: tokens held while decoding.
    prompt: tokens computed at once, from nothing, before the first of the reply.
    """

    bits: int | None = None
    group_size: int = 64
    kv: KVSpec = KVSpec()  # noqa: RUF009  # frozen
    context: int = 4096
    prompt: int = 4096

    def __post_init__(self) -> None:
        if self.bits is not None and self.bits not in BITS:
            raise OptionError(f"weights of {self.bits} bits are not supported", f"Use one of {BITS}.")
        if self.group_size not in GROUP_SIZES:
            raise OptionError(f"group size {self.group_size} is not supported", f"Use one of {GROUP_SIZES}.")
        if not 1 <= self.prompt <= self.context:
            raise OptionError(
                f"a prompt of {self.prompt} tokens does not fit into a context of {self.context}",
                "Use 1 token or more, up to the context.",
            )

    def packing(self, own: Packing | None = None) -> Packing | None:
        """Return how weights are packed; ``own`` is the model's, where its config does not say (None: it does)."""
        if self.bits is None:
            return own
        return Packing(None if self.bits == 16 else self.bits, self.group_size)


@dataclass(frozen=True, slots=True)
class WhatIfOutcome:
    """The answer. Bytes, tokens a second, seconds; None is unknown, and ``reason`` then says why.

    weight_bytes, bits_per_weight: as stored. kv_bytes: held of keys and values at the context. memory: at the highest point
    on the way there. prefill_tps, ttft_s: of the prompt. prediction: both phases on the roofline.
    """

    case: WhatIfCase
    place: Machine
    weight_bytes: int | None = None
    bits_per_weight: float | None = None
    kv_bytes: int | None = None
    memory: MemoryFit | None = None
    ceiling_tps: float | None = None
    expected_tps: float | None = None
    prefill_tps: float | None = None
    ttft_s: float | None = None
    reason: str | None = None
    prediction: Prediction | None = None


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """Decoding at one context, in tokens a second; None is unknown."""

    context: int
    ceiling_tps: float | None
    expected_tps: float | None


@dataclass(frozen=True, slots=True)
class WeighedModel:
    """A weighed model with the caches of one KV spec, at one place: what every context has in common.

    latency: how fast kernels are there, with this model; None is unknown. Made by ``load``.
    """

    weighed: Footprint
    plan: "CachePlan"
    work: Workload
    place: Machine
    latency: LatencyModel | None

    def at(self, place: Machine) -> "WeighedModel":
        """Return the same at another place that holds a model in the same form, with that place's bandwidth for this model."""
        place = place.reading(self.work.weight_bytes() or self.weighed.held.weight_bytes)
        latency = place.latency_of(self.work, self.plan, by_kernels=self.weighed.form == "float32")
        if place.local and isinstance(latency, HostLimited):
            latency = replace(latency, host=self._host(latency))
        return replace(self, place=place, latency=latency)

    def _host(self, latency: HostLimited) -> Host | None:
        """Return what building a step takes here; None where that can't matter. Milliseconds."""
        from ..kv import install_seam

        device_s = latency.device.decode_s(self.work, 1)
        if device_s is None or device_s > MATTERS_S:
            return None
        install_seam()
        return measure_host(self.weighed.module, lambda: self.plan.make(None))

    @property
    def chunking(self) -> Chunking:
        """How prompts are cut there."""
        return Chunking(self.work, self.place.device, self.place.latency)

    def kv_table(self, context: int) -> KVTable:
        """Return what each layer keeps at ``context`` tokens."""
        return table_of_plan(self.plan, context)

    def limits(self, context: int) -> Limits | None:
        """Return the bounds of decoding at a context; None where it is not known what the layers keep."""
        if self.kv_table(context).bytes_at_context is None:
            return None
        return limits_of(context, self.work, self.place.chip, self.latency)

    def fit(self, case: WhatIfCase, replies: int = 1) -> MemoryFit:
        """Return whether the case fits at the highest point of computing its prompt and then tokens until the context is reached.

        Room that the caches have for growing counts with the temporaries. replies: of such cases at once: beside one, the others
        hold the whole context and are written.
        """
        peak = prompt_peak(self._shape, self.chunking, held=0, new=case.prompt, reply=case.context - case.prompt)
        kv = self.plan.bytes_at(case.context)
        working = self._beyond(peak, kv) + (replies - 1) * self._beyond(self._written(case), kv)
        return self.place.fit(weights=peak.weights, kv=replies * kv, working=working)

    def most_at_once(self, case: WhatIfCase) -> int | None:
        """Return how many such cases fit at once: one more does not. None where it is not known how much memory there is."""
        one, two = self.fit(case), self.fit(case, 2)
        if one.budget is None:
            return None
        return 0 if one.total > one.budget else 1 + (one.budget - one.total) // max(two.total - one.total, 1)

    @property
    def _shape(self) -> ModelShape:
        return self.weighed.shape(self.plan, self.place.device, self.place.chip)

    def _written(self, case: WhatIfCase) -> Peak:
        """The peak of writing a reply's last token, in caches with the room that they made on the way there."""
        slots = slots_after(self.chunking, case.prompt, case.context - case.prompt)
        return predict_peak(self._shape, held=case.context - 1, new=0, chunk=1, slots=slots, reply=1)

    @staticmethod
    def _beyond(peak: Peak, kv: int) -> int:
        return max(peak.total - peak.weights - kv, 0)


def outcome(
    config: Mapping[str, Any], case: WhatIfCase, place: Machine, *, own: Packing | None = None
) -> WhatIfOutcome:
    """Return what ``place`` makes of the model of a normalised config (model/config.py). Flags that it can't take are a reason.

    own: how the model is packed, where its config does not say.
    """
    return outcome_of(weigh(config, place.device, packing=case.packing(own)), case, place)


def curve(
    config: Mapping[str, Any], case: WhatIfCase, place: Machine, contexts: Iterable[int], *, own: Packing | None = None
) -> tuple[DecodePoint, ...]:
    """Return decoding over contexts; empty where the model can't be weighed. Raises OptionError for KV flags that it can't take."""
    weighed = weigh(config, place.device, packing=case.packing(own))
    return () if isinstance(weighed, str) else points_of(load(weighed, case.kv, place), contexts)


def points_of(loaded: WeighedModel, contexts: Iterable[int]) -> tuple[DecodePoint, ...]:
    """Return decoding over contexts, of a model that was weighed."""
    bounds = ((context, loaded.limits(context)) for context in contexts)
    return tuple(
        DecodePoint(context, None, None) if at is None else DecodePoint(context, at.ceiling_tps, at.expected_tps)
        for context, at in bounds
    )


def load(weighed: Footprint, kv: KVSpec, place: Machine) -> WeighedModel:
    """Return the model with its caches planned. Raises OptionError for flags that they can't take."""
    return WeighedModel(weighed, *weighed.planned(kv), place, None).at(place)


def outcome_of(weighed: Footprint | str, case: WhatIfCase, place: Machine) -> WhatIfOutcome:
    """Return the outcome of a model that was weighed for this place, or of one that could not be."""
    return next(outcomes_of(weighed, (case,), place))


def outcomes_of(weighed: Footprint | str, cases: Iterable[WhatIfCase], place: Machine) -> Iterator[WhatIfOutcome]:
    """Yield the outcomes of cases that pack the weights alike; caches are planned once for neighbours of one KV spec."""
    for kv, alike in groupby(cases, key=lambda case: case.kv):
        try:
            loaded = weighed if isinstance(weighed, str) else load(weighed, kv, place)
        except OptionError as error:
            loaded = error.message
        for case in alike:
            yield _without(weighed, case, place, loaded) if isinstance(loaded, str) else outcome_at(loaded, case)


def outcome_at(loaded: WeighedModel, case: WhatIfCase) -> WhatIfOutcome:
    """Return the outcome of a model whose caches are planned by the case's KV spec."""
    place, stored = loaded.place, loaded.weighed.stored
    limits = loaded.limits(case.context)
    if limits is None:
        return _without(loaded.weighed, case, place, KV_UNKNOWN)
    chunk = loaded.chunking.at(case.prompt // 2)
    predicted = predict(loaded.work, place.chip, loaded.latency, case.prompt, case.context, chunk=chunk)
    return WhatIfOutcome(
        case=case,
        place=place,
        weight_bytes=stored.weight_bytes,
        bits_per_weight=stored.bits_per_weight,
        kv_bytes=loaded.plan.bytes_at(case.context),
        memory=loaded.fit(case),
        ceiling_tps=limits.ceiling_tps,
        expected_tps=limits.expected_tps,
        prefill_tps=predicted.prefill.expected_tps,
        ttft_s=predicted.ttft_s,
        reason=_unknown(loaded, predicted, case.kv),
        prediction=predicted,
    )


def _without(weighed: Footprint | str, case: WhatIfCase, place: Machine, reason: str) -> WhatIfOutcome:
    """The outcome where no more than the weights is known, if that."""
    if isinstance(weighed, str):
        return WhatIfOutcome(case, place, reason=reason)
    return WhatIfOutcome(case, place, weighed.stored.weight_bytes, weighed.stored.bits_per_weight, reason=reason)


def _unknown(loaded: WeighedModel, predicted: Prediction, kv: KVSpec) -> str | None:
    """Why something is not known, what matters most first."""
    place = loaded.place
    if loaded.work.weight_bytes() is None:
        return "its config does not say how many experts a token uses"
    if place.chip.bandwidth_gbs is None:
        return f"the memory bandwidth of {place.chip.name} is {place.chip.condition or 'not known'}"
    if loaded.latency is None:
        if place.local:
            return UNMEASURED_KV if kv.quantized else UNMEASURED
        return f"no published measurement says what MLX reaches on {place.chip.name}"
    if predicted.expected_tps is None:
        return f"a model this small waits for the processor, and how fast that builds a step on {place.chip.name} was not measured"
    if predicted.ttft_s is None:
        return f"the peak arithmetic of {place.chip.name} is not known without its number of GPU cores"
    return None


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One repository of the catalogue at a place. Bytes; None is unknown. traits: what kind of model it is.

    download_bytes: of all its files. parameters: all weights; active_parameters: those that a token uses. reason: one sentence.
    """

    id: str
    name: str
    download_bytes: int | None
    parameters: int | None
    active_parameters: int | None
    traits: tuple[Trait, ...]
    outcome: WhatIfOutcome
    verdict: Verdict
    reason: str

    @property
    def group(self) -> Group:
        """What it is listed under."""
        return group_of(self.outcome)

    @property
    def size(self) -> float:
        """Roughly how capable it is, in weights of a dense model; 0 where they are not known."""
        return math.sqrt((self.parameters or 0) * (self.active_parameters or 0))


def suggestions(
    place: Machine, context: int = 8192, *, progress: Callable[[int, int], None] | None = None
) -> tuple[Suggestion, ...]:
    """Return every repository of the catalogue, best first, as it would run with a prompt that fills ``context``.

    Takes a tenth or two of a second for each. progress: called with how many are done, and of how many.
    """
    case, asked = WhatIfCase(None, 64, KVSpec(), context, context), list(repositories())
    found: list[Suggestion] = []
    for entry, repository in asked:
        found.append(suggestion(entry, repository, case, place))
        if progress is not None:
            progress(len(found), len(asked))
    return tuple(sorted(found, key=rank))


def suggestion(entry: CatalogueEntry, repository: Repository, case: WhatIfCase, place: Machine) -> Suggestion:
    """Return one repository at a place."""
    weighed: Footprint | str = f"the config of {entry.name} is not known here"
    if (config := entry.config_of(repository)) is not None:
        weighed = weigh(config, place.device, packing=repository.packing)
    known = weighed.stored if isinstance(weighed, Footprint) else None
    download_bytes = repository.published_bytes
    if download_bytes is None and known is not None:
        download_bytes = files_bytes(entry, repository, known.weight_bytes)
    found = outcome_of(weighed, case, place)
    verdict = verdict_of(found)
    return Suggestion(
        id=repository.id,
        name=entry.name,
        download_bytes=download_bytes,
        parameters=None if known is None else known.parameters,
        active_parameters=None if known is None else known.active_parameters,
        traits=() if entry.config is None else traits_of(entry.config),
        outcome=found,
        verdict=verdict,
        reason=reason_of(found, verdict),
    )


def verdict_of(found: WhatIfOutcome) -> Verdict:
    """Return how well it would run, beside the other programs that run now."""
    alone, memory = verdict_alone(found), found.memory
    gives_way = memory is not None and memory.from_others > 0
    return "tight" if gives_way and alone in ("runs well", "fits, speed unknown") else alone


def verdict_alone(found: WhatIfOutcome) -> Verdict:
    """Return how well it would run whatever else does."""
    memory = found.memory
    if memory is None or memory.fits is None or memory.budget is None:
        return "unknown whether it fits"
    if not memory.fits:
        return "does not fit"
    fastest = _fastest_tps(found)
    if fastest is not None and fastest < READABLE_TPS:
        return "slow"
    if memory.total > MARGIN * memory.budget:
        return "tight"
    return "fits, speed unknown" if found.expected_tps is None else "runs well"


def group_of(found: WhatIfOutcome) -> Group:
    """Return what a model is listed under. What other programs take at the moment changes nothing here."""
    memory, fastest = found.memory, _fastest_tps(found)
    fits = None if memory is None or memory.budget is None else memory.fits
    if fits is False:
        return "does not fit"
    if fastest is not None and fastest < READABLE_TPS:
        return "slow"
    if fits is None:
        return "fit unknown"
    return "speed unknown" if found.expected_tps is None else "recommended"


def repositories() -> Iterator[tuple[CatalogueEntry, Repository]]:
    """Yield every repository of the catalogue, with the model it holds."""
    for entry in catalogue():
        for repository in entry.repositories:
            yield entry, repository


def rank(each: Suggestion) -> tuple[int, bool, float, float, str]:
    """Return what sorts best first: the group, then what leaves room, then the size and more bits of the same model.

    Slow ones sort by their speed. Where not even a limit of the speed is known, the smallest comes first: it is quick anywhere.
    What other programs take at the moment changes a word, and not the order.
    """
    outcome, weights = each.outcome, float(each.outcome.weight_bytes or 0)
    place, fastest = GROUPS.index(each.group), _fastest_tps(outcome)
    match each.group:
        case "does not fit":  # the one that lacks least comes first
            return place, False, float(outcome.memory.total) if outcome.memory else math.inf, 0.0, each.id
        case "slow":
            return place, False, -(fastest or 0.0), 0.0, each.id
        case _ if fastest is None:
            return place, True, weights or math.inf, 0.0, each.id
        case _:
            return place, verdict_alone(outcome) == "tight", -each.size, -weights, each.id


def _fastest_tps(found: WhatIfOutcome) -> float | None:
    """Return the speed to expect, else the most that the hardware allows."""
    return found.ceiling_tps if found.expected_tps is None else found.expected_tps


def reason_of(found: WhatIfOutcome, verdict: Verdict) -> str:
    """Return why, in one sentence."""
    memory = found.memory
    if memory is None:
        return found.reason or "its memory is not known"
    need = f"needs {units.size(memory.total)}"
    if memory.budget is None:
        return f"{need}; how much may be used is not known"
    of = f"{need} of {units.size(memory.budget)}"
    most = f"{need}; the machine has {units.size(found.place.memory_bytes or memory.budget)} in all"
    spoken: dict[Verdict, str] = {
        "runs well": of,
        "fits, speed unknown": f"{of}; {found.reason or 'its speed is not known'}",
        "tight": f"{of}: {giving_way(memory.from_others)}"
        if memory.from_others
        else f"{of}: little is left for a longer context",
        "slow": f"{of}, but stays below {READABLE_TPS:.0f} tok/s",
        "unknown whether it fits": f"{need}; {found.place.budget_rule or 'how much may be used is not known'}",
        "does not fit": of if found.place.local else most,
    }
    return spoken[verdict]


def table(
    config: Mapping[str, Any], base: WhatIfCase, place: Machine, *, own: Packing | None = None
) -> tuple[WhatIfOutcome, ...]:
    """Return the base case, then it with one thing changed at a time: precision of weights, bits of keys and values, context.

    Cases that the model can't take are listed with the reason. A prompt that fills the context does so in every one of them; any
    other stays as it is, unless the context is shorter. own: how the model is packed, where its config does not say.
    """
    found: list[WhatIfOutcome] = []
    for packing, alike in groupby(_distinct(_cases(config, base), own), key=lambda case: case.packing(own)):
        weighed = weigh(config, place.device, packing=packing)
        found += outcomes_of(weighed, alike, place)
    return tuple(found)


def notes(found: Sequence[WhatIfOutcome]) -> tuple[str, ...]:
    """Return notes on a whole table, in clauses: why speeds are unknown."""
    unknown = dict.fromkeys(each.reason for each in found if each.reason and each.expected_tps is None)
    return tuple(f"unknown: {reason}" for reason in unknown)


def on_chips(
    config: Mapping[str, Any], case: WhatIfCase, places: Sequence[Machine], *, own: Packing | None = None
) -> tuple[WhatIfOutcome, ...]:
    """Return the same case at several places, none of which is a plain CPU: those hold a model alike.

    Raises OptionError for KV flags that the model can't take.
    """
    weighed = weigh(config, "metal", packing=case.packing(own))
    if isinstance(weighed, str) or not places:
        return tuple(outcome_of(weighed, case, place) for place in places)
    first = load(weighed, case.kv, places[0])
    return tuple(outcome_at(first.at(place), case) for place in places)


def contexts_up_to(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return contexts in fourfold steps from 1,024 tokens, the last one what the model was made for."""
    longest = context_length(config) or UNBOUNDED_CONTEXT
    steps = takewhile(lambda step: step < longest, (FIRST_CONTEXT * 4**power for power in count()))
    return (*steps, longest)


def _cases(config: Mapping[str, Any], base: WhatIfCase) -> Iterator[WhatIfCase]:
    yield base
    for bits in PRECISIONS:
        yield replace(base, bits=bits)
    for key_bits, value_bits in KV_BITS:
        yield replace(base, kv=replace(base.kv, key_bits=key_bits, value_bits=value_bits))
    for context in contexts_up_to(config):
        fills = base.prompt == base.context
        yield replace(base, context=context, prompt=context if fills else min(base.prompt, context))


def _distinct(cases: Iterable[WhatIfCase], own: Packing | None) -> Iterator[WhatIfCase]:
    """Yield each case once, by what it comes to: asking for the bits that a model has anyway changes nothing."""
    seen = set()
    for case in cases:
        comes_to = (case.packing(own), case.kv, case.context, case.prompt)
        if comes_to not in seen:
            seen.add(comes_to)
            yield case
