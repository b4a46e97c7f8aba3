"""What a place makes of a model in one case: whether it fits, the ceiling, the speed to expect, the wait for the first token."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tokamac.engine.errors import OptionError
from tokamac.engine.limits.config_cost import Packing
from tokamac.engine.limits.host import MATTERS_S, Host, HostLimited, measure_host
from tokamac.engine.limits.limits import Limits, limits_of
from tokamac.engine.limits.memory import Fit
from tokamac.engine.limits.places import Place
from tokamac.engine.limits.prediction import Pace, Prediction, predict
from tokamac.engine.limits.weighing import Weighed, weigh
from tokamac.engine.options import GROUP_SIZES, KVSpec

if TYPE_CHECKING:
    from tokamac.engine.kv.plan import CachePlan
    from tokamac.engine.limits.kv_table import KVTable
    from tokamac.engine.limits.prefill_chunk import Chunking
    from tokamac.engine.limits.work import Work

BITS = (16, 8, 6, 5, 4, 3, 2)
"""Bits per weight that a model can be packed with; 16 is not packed."""

KV_UNKNOWN = "what its layers keep for each token is not known"

UNMEASURED = "this machine was not measured with a model like this one"
UNMEASURED_KV = "packed keys and values were not timed here (a chat that uses them does it, once idle)"


@dataclass(frozen=True, slots=True)
class Case:
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
                f"a prompt of {self.prompt} tokens does not go into a context of {self.context}",
                "Use 1 token or more, up to the context.",
            )

    def packing(self, own: Packing | None = None) -> Packing | None:
        """Return how weights are packed; ``own`` is the model's, where its config does not say (None: it does)."""
        if self.bits is None:
            return own
        return Packing(None if self.bits == 16 else self.bits, self.group_size)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer. Bytes, tokens a second, seconds; None is unknown, and ``reason`` then says why.

    weight_bytes, bits_per_weight: as stored. kv_bytes: held of keys and values at the context. memory: at the highest moment
    on the way there. prefill_tps, ttft_s: of the prompt. prediction: both phases on the roofline.
    """

    case: Case
    place: Place
    weight_bytes: int | None = None
    bits_per_weight: float | None = None
    kv_bytes: int | None = None
    memory: Fit | None = None
    ceiling_tps: float | None = None
    expected_tps: float | None = None
    prefill_tps: float | None = None
    ttft_s: float | None = None
    reason: str | None = None
    prediction: Prediction | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """Decoding at one context, in tokens a second; None is unknown."""

    context: int
    ceiling_tps: float | None
    expected_tps: float | None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A weighed model with the caches of one KV spec, at one place: what every context has in common.

    pace: how fast kernels are there, with this model; None is unknown. Made by ``load``.
    """

    weighed: Weighed
    plan: "CachePlan"
    work: "Work"
    place: Place
    pace: Pace | None

    def at(self, place: Place) -> "Loaded":
        """Return the same at another place that holds a model in the same form, with that place's bandwidth for this model."""
        place = place.reading(self.work.weight_bytes() or self.weighed.held.weight_bytes)
        pace = place.pace_of(self.work, self.plan, unpacked=self.weighed.form == "unpacked")
        if place.local and isinstance(pace, HostLimited):
            pace = replace(pace, host=self._host(pace))
        return replace(self, place=place, pace=pace)

    def _host(self, pace: HostLimited) -> Host | None:
        """Return what building a step takes here; None where that can't matter. Milliseconds."""
        from tokamac.engine.kv import install_seam

        device_s = pace.device.decode_s(self.work, 1)
        if device_s is None or device_s > MATTERS_S:
            return None
        install_seam()
        return measure_host(self.weighed.module, lambda: self.plan.make(None))

    @property
    def chunking(self) -> "Chunking":
        """How prompts are cut there."""
        from tokamac.engine.limits.prefill_chunk import Chunking

        return Chunking(self.work, self.place.device, self.place.pace)

    def kv_table(self, context: int) -> "KVTable":
        """Return what each layer keeps at a context of so many tokens."""
        from tokamac.engine.limits.kv_table import table_of_plan

        return table_of_plan(self.plan, context)

    def limits(self, context: int) -> Limits | None:
        """Return the bounds of decoding at a context; None where it is not known what the layers keep."""
        if self.kv_table(context).bytes_at_context is None:
            return None
        return limits_of(context, self.work, self.place.chip, self.pace)

    def fit(self, case: Case) -> Fit:
        """Return whether the case fits at the highest moment of computing its prompt and then tokens until the context is reached.

        Room that the caches have for growing counts with the temporaries.
        """
        from tokamac.engine.limits.prefill_chunk import prompt_peak

        shape = self.weighed.shape(self.plan, self.place.device, self.place.chip)
        peak = prompt_peak(shape, self.chunking, held=0, new=case.prompt, reply=case.context - case.prompt)
        kv = self.plan.bytes_at(case.context)
        return self.place.fit(weights=peak.weights, kv=kv, working=max(peak.total - peak.weights - kv, 0))


def outcome(config: Mapping[str, Any], case: Case, place: Place, *, own: Packing | None = None) -> Outcome:
    """Return what ``place`` makes of the model of a normalised config (engine/config.py). Flags that it can't take are a reason.

    own: how the model is packed, where its config does not say.
    """
    return outcome_of(weigh(config, place.device, place.memory_bytes, packing=case.packing(own)), case, place)


def curve(
    config: Mapping[str, Any], case: Case, place: Place, contexts: Iterable[int], *, own: Packing | None = None
) -> tuple[Point, ...]:
    """Return decoding over contexts; empty where the model can't be weighed. Raises OptionError for KV flags that it can't take."""
    weighed = weigh(config, place.device, place.memory_bytes, packing=case.packing(own))
    return () if isinstance(weighed, str) else points_of(load(weighed, case.kv, place), contexts)


def points_of(loaded: Loaded, contexts: Iterable[int]) -> tuple[Point, ...]:
    """Return decoding over contexts, of a model that was weighed."""
    bounds = ((context, loaded.limits(context)) for context in contexts)
    return tuple(
        Point(context, None, None) if at is None else Point(context, at.ceiling_tps, at.expected_tps)
        for context, at in bounds
    )


def load(weighed: Weighed, kv: KVSpec, place: Place) -> Loaded:
    """Return the model with its caches planned. Raises OptionError for flags that they can't take."""
    return Loaded(weighed, *weighed.planned(kv), place, None).at(place)


def outcome_of(weighed: Weighed | str, case: Case, place: Place) -> Outcome:
    """Return the outcome of a model that was weighed for this place, or of one that could not be."""
    return next(outcomes_of(weighed, (case,), place))


def outcomes_of(weighed: Weighed | str, cases: Iterable[Case], place: Place) -> Iterator[Outcome]:
    """Yield the outcomes of cases that pack the weights alike; caches are planned once for neighbours of one KV spec."""
    for kv, alike in groupby(cases, key=lambda case: case.kv):
        try:
            loaded = weighed if isinstance(weighed, str) else load(weighed, kv, place)
        except OptionError as error:
            loaded = error.message
        for case in alike:
            yield _without(weighed, case, place, loaded) if isinstance(loaded, str) else outcome_at(loaded, case)


def outcome_at(loaded: Loaded, case: Case) -> Outcome:
    """Return the outcome of a model whose caches are planned by the case's KV spec."""
    place, stored = loaded.place, loaded.weighed.stored
    limits = loaded.limits(case.context)
    if limits is None:
        return _without(loaded.weighed, case, place, KV_UNKNOWN)
    chunk = loaded.chunking.at(case.prompt // 2)
    predicted = predict(loaded.work, place.chip, loaded.pace, case.prompt, case.context, chunk=chunk)
    return Outcome(
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


def _without(weighed: Weighed | str, case: Case, place: Place, reason: str) -> Outcome:
    """Return the outcome where no more than the weights is known, if that."""
    if isinstance(weighed, str):
        return Outcome(case, place, reason=reason)
    return Outcome(case, place, weighed.stored.weight_bytes, weighed.stored.bits_per_weight, reason=reason)


def _unknown(loaded: Loaded, predicted: Prediction, kv: KVSpec) -> str | None:
    """Return why something is not known, what matters most first."""
    place = loaded.place
    if loaded.work.weight_bytes() is None:
        return "its config does not say how many experts a token uses"
    if place.chip.bandwidth_gbs is None:
        return f"the memory bandwidth of {place.chip.name} is not known"
    if loaded.pace is None:
        if place.local:
            return UNMEASURED_KV if kv.quantized else UNMEASURED
        return f"no published measurement says what MLX reaches on {place.chip.name}"
    if predicted.expected_tps is None:
        return f"so small a model waits for the processor, and how fast that builds a step on {place.chip.name} was not measured"
    if predicted.ttft_s is None:
        return f"the peak arithmetic of {place.chip.name} is not known without its number of GPU cores"
    return None
