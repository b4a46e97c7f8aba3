"""A machine, this or a named one, and what if: any model at other precisions, caches and contexts on it."""

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby, takewhile
from typing import TYPE_CHECKING, Any, Literal

from .. import files
from ..chunking import Chunking, prompt_peak, slots_after
from ..device import DeviceKind
from ..errors import OptionError
from ..model.config import context_length
from ..options import GROUP_SIZES, KVSpec
from . import hardware, memory
from .bandwidth import LARGEST, with_bandwidth
from .catalogue import READABLE_TPS, CatalogueEntry, Group, Nominal, Repository, files_bytes, standings
from .config_cost import Packing, traits_of
from .footprint import Footprint, KVTable, table_of_plan, weigh
from .hardware import Chip, detect, known_chips, lookup, machine_key, plain_name, units_of
from .memory import MemoryFit, giving_way
from .peak_memory import ModelShape, Peak, predict_peak
from .roofline import (
    MATTERS_S,
    Fitted,
    Host,
    HostLimited,
    LatencyModel,
    Limits,
    Prediction,
    Trait,
    Workload,
    expected_range,
    fitted,
    limits_of,
    measure_host,
    predict,
)

if TYPE_CHECKING:
    from ..kv.plan import CachePlan

# macOS's GPU limit varies, so only the local machine is asked; a named Mac gets two thirds, the least reported.


GIB = 1 << 30  # memory is sold in GiB, whatever its maker writes

KNOWN_CHIPS = "It has Apple M1 to M6 with Pro, Max and Ultra, and a few NVIDIA cards."

# Of a Mac's memory, what its GPU may surely use. Reported by default: 10.67 of 16 GB (exo-explore/exo#1672), 11.84 of
# 16 GB (AlexsJones/llmfit#754), 107.5 of 128 GiB (antirez/ds4#893); "usually 0.75" (ml-explore/mlx#64).
SURE_SHARE = 2 / 3


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine; bytes, None is unknown.

    budget_bytes: read here, else certain. by_size: bandwidth measured per model size (``reading``).
    """

    chip: Chip
    memory_bytes: int | None
    budget_bytes: int | None
    latency: LatencyModel | None
    device: DeviceKind
    local: bool = False
    by_size: bool = False
    available_bytes: int | None = None

    def reading(self, bytes_read: int) -> "Machine":
        """Set the bandwidth for a working set, measuring if needed (≤ 1.5 s)."""
        if not self.by_size:
            return self
        unmeasured = replace(self.chip, bandwidth_gbs=None, source="unknown")
        return replace(self, chip=with_bandwidth(unmeasured, bytes_read))

    def latency_of(self, work: "Workload", plan: "CachePlan", *, by_kernels: bool) -> LatencyModel | None:
        from .timing import LatencyProfiler, TimedModel

        if isinstance(self.latency, Fitted):
            return HostLimited(self.latency)
        if self.latency is not None or not self.local:
            return self.latency
        exact = TimedModel(work, plan, by_kernels, self.device, machine_key(self.chip, self.device))
        choices = ((True, True), (True, False), (False, True), (False, False)) if by_kernels else ((False, False),)
        forms = (replace(exact, stepped=stepped, rounded=rounded) for stepped, rounded in choices)
        return next(filter(None, (LatencyProfiler(each).latency() for each in forms)), None)

    def fit(self, *, weights: int, kv: int, working: int) -> MemoryFit:
        """Whether it fits; unknown between the certain budget and all memory."""
        budget, available = self.budget_bytes, self.available_bytes
        fit = memory.fit(weights=weights, kv=kv, working=working, budget=budget, available=available)
        unsure = self.memory_bytes is not None and fit.total <= self.memory_bytes and not self.local
        return replace(fit, fits=None) if fit.fits is False and unsure else fit

    @property
    def budget_rule(self) -> str | None:
        if self.local or self.budget_bytes is None or self.memory_bytes is None:
            return None
        if self.device == "cuda":
            return "all of the card's memory"
        total, sure = files.memory_size(self.memory_bytes), files.size(self.budget_bytes)
        return f"macOS lets a GPU use two thirds of {total} ({sure}) or more; only that Mac knows how much"


def here(bytes_read: int = LARGEST, *, limit: int | None = None) -> Machine:
    from ..device import device_kind

    device = device_kind()
    found = detect()
    chip = _with_peak(with_bandwidth(found, bytes_read), device)
    latency, by_size = fitted(chip), found.bandwidth_gbs is None
    return Machine(
        chip,
        memory.device_total(),
        memory.array_budget() if limit is None else limit,
        latency,
        device,
        local=True,
        by_size=by_size,
        available_bytes=memory.available(),
    )


# GB/s that a CPU of no known make is taken to read weights with: what two channels of memory give, less what is lost.
CPU_GBS = 20.0


def nominal(place: Machine | None = None, *, limit: int | None = None) -> Nominal:
    if place is not None and not place.local:
        bandwidth = place.chip.bandwidth_gbs or CPU_GBS
        return Nominal(place.budget_bytes, place.memory_bytes, bandwidth, *_peaks(place.chip))
    mac, total = hardware.system(), memory.machine_total()
    chip = None if mac is None else lookup(hardware.chip_name(mac) or "", hardware.gpu_cores(mac))
    gbs = None if chip is None else chip.bandwidth_gbs
    sure = None if total is None else round(SURE_SHARE * total)
    return Nominal(limit or sure, limit or total, gbs or CPU_GBS, *((None, None) if chip is None else _peaks(chip)))


def _peaks(chip: Chip) -> tuple[float | None, float | None]:
    return chip.nax_fp16_tflops if units_of(chip) == "neural" else chip.fp16_tflops, chip.fp16_tflops


def elsewhere(chip_name: str, gpu_cores: int | None = None, memory_gb: float | None = None) -> Machine:
    """Return a machine by chip. memory_gb: GiB. Raises OptionError if unknown or ambiguous."""
    name = _named(chip_name)
    rows = (row for row in known_chips() if plain_name(row["chip"]) == name)
    bins = [row["gpu_cores"] for row in rows if row["gpu_cores"] is not None]
    if gpu_cores is not None and not bins:
        raise OptionError(f"--gpu-cores does not apply to {name}", "Leave it out.")
    if gpu_cores is not None and gpu_cores not in bins:
        known = ", ".join(map(str, bins))
        raise OptionError(f"no {name} in the table has {gpu_cores} GPU cores", f"Known: {known}.")
    chip = lookup(name, gpu_cores)
    if chip.bandwidth_gbs is None:
        cores = " or ".join(map(str, bins))
        raise OptionError(f"{name} has several memory bandwidths", f"Say how many GPU cores it has: {cores}.")
    return _machine(chip, memory_gb)


def everywhere(memory_gb: float | None = None) -> tuple[Machine, ...]:
    chips = [lookup(row["chip"], row["gpu_cores"]) for row in known_chips()]
    return tuple(_machine(chip, memory_gb if _is_apple(chip) else None) for chip in chips)


def _with_peak(chip: Chip, device: DeviceKind) -> Chip:
    from .timing import kept_tflops

    if chip.fp16_tflops is not None or (tflops := kept_tflops(machine_key(chip, device))) is None:
        return chip
    return replace(chip, fp16_tflops=tflops, peak_source="measured")


def _machine(chip: Chip, memory_gb: float | None) -> Machine:
    apple = _is_apple(chip)
    gb = memory_gb if memory_gb is not None or apple else _card_memory_gb(chip.name)
    total = None if gb is None else round(gb * GIB)
    budget = total if total is None or not apple else round(SURE_SHARE * total)
    return Machine(chip, total, budget, fitted(chip), "metal" if apple else "cuda")


def _is_apple(chip: Chip) -> bool:
    return chip.name.startswith("Apple")


def _named(asked: str) -> str:
    """Complete a chip name, ignoring case. Raises OptionError."""
    names = dict.fromkeys(plain_name(row["chip"]) for row in known_chips())
    wanted = " ".join(asked.split()).casefold()
    for name in names:
        if wanted in (name.casefold(), name.partition(" ")[2].casefold()):
            return name
    short = {name.partition(" ")[2].casefold(): name for name in names}
    close = difflib.get_close_matches(wanted.removeprefix("apple ").removeprefix("nvidia "), short, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(short[each] for each in close)}?" if close else KNOWN_CHIPS
    raise OptionError(f"no chip {asked!r} is in the table", hint)


def _card_memory_gb(name: str) -> float | None:
    sizes = {row["memory_gb"] for row in known_chips() if plain_name(row["chip"]) == name}
    size = str(sizes.pop()) if len(sizes) == 1 else ""
    return float(size) if size.isdecimal() else None


#     place = here()  or  elsewhere("Apple M4 Max", gpu_cores=40, memory_gb=64)
#     outcome(config, WhatIfCase(bits=4, context=32768, prompt=2048), place)
#
# Arithmetic over shapes: nothing is downloaded and no weight is read.


BITS = (16, 8, 6, 5, 4, 3, 2)  # bits per weight that a model can be packed with; 16 is not packed

PRECISIONS = (16, 8, 6, 5, 4, 3)

KV_BITS = ((16, 16), (8, 8), (8, 4), (4, 4))

FIRST_CONTEXT = 1024

UNBOUNDED_CONTEXT = 131_072  # how far contexts go where a config does not say what the model was made for

MARGIN = 0.9  # share of the budget that leaves room for the system, a longer context and other programs

MOST_FITTING = (
    8.6  # bits per weight of 8 bits in groups of 64, and what is not packed: more is hardly nearer to the source
)

Verdict = Literal["runs well", "fits, speed unknown", "tight", "slow", "unknown whether it fits", "does not fit"]
# Best first. tight: it fits, with less than a tenth to spare, or other programs have to give way for it now. slow:
# slower than twice reading.
VERDICTS: tuple[Verdict, ...] = (
    "runs well", "fits, speed unknown", "tight", "slow", "unknown whether it fits", "does not fit",
)  # fmt: skip

KV_UNKNOWN = "what its layers keep for each token is not known"

UNMEASURED = "this machine was not measured with a model like this one"
UNMEASURED_KV = "packed keys and values were not timed here (a chat that uses them does it, once idle)"


@dataclass(frozen=True, slots=True)
class WhatIfCase:
    """The question. Raises OptionError for impossible values."""

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
        if self.bits is None:
            return own
        return Packing(None if self.bits == 16 else self.bits, self.group_size)


@dataclass(frozen=True, slots=True)
class WhatIfOutcome:
    """The answer in bytes, tokens/s and seconds; None is unknown, and ``reason`` then says why.

    kv_bytes: held at the context. memory: at the peak on the way there. prediction: both phases on the roofline.
    """

    case: WhatIfCase
    place: Machine
    weight_bytes: int | None = None
    bits_per_weight: float | None = None
    kv_bytes: int | None = None
    memory: MemoryFit | None = None
    ceiling_tps: float | None = None
    expected_tps: float | None = None
    expected_range: tuple[float, float] | None = None
    prefill_tps: float | None = None
    ttft_s: float | None = None
    reason: str | None = None
    prediction: Prediction | None = None


@dataclass(frozen=True, slots=True)
class DecodePoint:
    context: int
    ceiling_tps: float | None
    expected_tps: float | None


_HOSTS: dict[Workload, Host | None] = {}  # by work: equal shapes get one speed, however busy the machine is meanwhile


@dataclass(frozen=True, slots=True)
class WeighedModel:
    """A weighed model with the caches of one KV spec, at one place; made by ``load``."""

    weighed: Footprint
    plan: "CachePlan"
    work: Workload
    place: Machine
    latency: LatencyModel | None

    def on(self, place: Machine) -> "WeighedModel":
        place = place.reading(self.work.weight_bytes() or self.weighed.held.weight_bytes)
        latency = place.latency_of(self.work, self.plan, by_kernels=self.weighed.form == "float32")
        if place.local and isinstance(latency, HostLimited):
            latency = replace(latency, host=self._host(latency))
        return replace(self, place=place, latency=latency)

    def _host(self, latency: HostLimited) -> Host | None:
        from ..kv.attention import install_seam

        device_s = latency.device.decode_s(self.work, 1)
        if device_s is None or device_s > MATTERS_S:
            return None
        install_seam()
        if self.work not in _HOSTS:
            _HOSTS[self.work] = measure_host(self.weighed.module, lambda: self.plan.make(None))
        return _HOSTS[self.work]

    @property
    def chunking(self) -> Chunking:
        return Chunking(self.work, self.place.device, self.place.latency)

    def kv_table(self, context: int) -> KVTable:
        return table_of_plan(self.plan, context)

    def limits(self, context: int) -> Limits | None:
        if self.kv_table(context).bytes_at_context is None:
            return None
        return limits_of(context, self.work, self.place.chip, self.latency)

    def fit(self, case: WhatIfCase, replies: int = 1) -> MemoryFit:
        """Return whether the case fits at its peak: prefill, then decode up to the context."""
        # Growth room of caches counts as temporaries. Beside one of ``replies``, the others hold the full context.
        peak = prompt_peak(self._shape, self.chunking, held=0, new=case.prompt, reply=case.context - case.prompt)
        kv = self.plan.bytes_at(case.context)
        working = self._beyond(peak, kv) + (replies - 1) * self._beyond(self._written(case), kv)
        return self.place.fit(weights=peak.weights, kv=replies * kv, working=working)

    def most_at_once(self, case: WhatIfCase) -> int | None:
        one, two = self.fit(case), self.fit(case, 2)
        if one.budget is None:
            return None
        return 0 if one.total > one.budget else 1 + (one.budget - one.total) // max(two.total - one.total, 1)

    @property
    def _shape(self) -> ModelShape:
        return self.weighed.shape(self.plan, self.place.device, self.place.chip)

    def _written(self, case: WhatIfCase) -> Peak:
        slots = slots_after(self.chunking, case.prompt, case.context - case.prompt)
        return predict_peak(self._shape, held=case.context - 1, new=0, chunk=1, slots=slots, reply=1)

    @staticmethod
    def _beyond(peak: Peak, kv: int) -> int:
        return max(peak.total - peak.weights - kv, 0)


def outcome(
    config: Mapping[str, Any], case: WhatIfCase, place: Machine, *, own: Packing | None = None
) -> WhatIfOutcome:
    """Return the outcome for a normalised config; impossible flags become its reason."""
    return outcome_of(weigh(config, place.device, packing=case.packing(own)), case, place)


def bits_that_fit(config: Mapping[str, Any], context: int, place: Machine) -> float:
    """Return the bits per weight that leave room for ``context`` tokens and a tenth of the memory, 8.6 at most.

    Raises OptionError where 2 bits don't fit, or nothing is known.
    """
    found = outcome(config, WhatIfCase(4, context=context, prompt=context), place)
    fit, bits = found.memory, found.bits_per_weight
    if fit is None or fit.budget is None or bits is None:
        raise OptionError(f"how many bits fit is unknown: {found.reason or KV_UNKNOWN}", "Use --target-bpw.")
    room = MARGIN * fit.budget - (fit.total - fit.weights)
    if (most := math.floor(100 * bits * room / fit.weights) / 100) <= BITS[-1]:
        used, budget = files.sizes(fit.total - fit.weights, fit.budget)
        raise OptionError(
            f"no weights fit beside {context:,} tokens, which take {used} of {budget}",
            "Use a shorter context, or a smaller model.",
        )
    return min(most, MOST_FITTING)


def curve(
    config: Mapping[str, Any], case: WhatIfCase, place: Machine, contexts: Iterable[int], *, own: Packing | None = None
) -> tuple[DecodePoint, ...]:
    """Return decode speed over contexts; empty if it can't be weighed. Raises OptionError for KV flags."""
    weighed = weigh(config, place.device, packing=case.packing(own))
    return () if isinstance(weighed, str) else points_of(load(weighed, case.kv, place), contexts)


def points_of(loaded: WeighedModel, contexts: Iterable[int]) -> tuple[DecodePoint, ...]:
    bounds = ((context, loaded.limits(context)) for context in contexts)
    return tuple(
        DecodePoint(context, None, None) if at is None else DecodePoint(context, at.ceiling_tps, at.expected_tps)
        for context, at in bounds
    )


def load(weighed: Footprint, kv: KVSpec, place: Machine) -> WeighedModel:
    """Return the model with planned caches. Raises OptionError for KV flags that it can't have."""
    return WeighedModel(weighed, *weighed.planned(kv), place, None).on(place)


def outcome_of(weighed: Footprint | str, case: WhatIfCase, place: Machine) -> WhatIfOutcome:
    return next(outcomes_of(weighed, (case,), place))


def outcomes_of(weighed: Footprint | str, cases: Iterable[WhatIfCase], place: Machine) -> Iterator[WhatIfOutcome]:
    for kv, alike in groupby(cases, key=lambda case: case.kv):
        try:
            loaded = weighed if isinstance(weighed, str) else load(weighed, kv, place)
        except OptionError as error:
            loaded = error.message
        for case in alike:
            yield _without(weighed, case, place, loaded) if isinstance(loaded, str) else outcome_at(loaded, case)


def outcome_at(loaded: WeighedModel, case: WhatIfCase) -> WhatIfOutcome:
    place, stored = loaded.place, loaded.weighed.stored
    limits = loaded.limits(case.context)
    if limits is None:
        return _without(loaded.weighed, case, place, KV_UNKNOWN)
    chunk = loaded.chunking.tokens_at(case.prompt // 2)
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
        expected_range=None
        if limits.expected_tps is None or not isinstance(loaded.latency, Fitted | HostLimited)
        else expected_range(limits.expected_tps, loaded.work, limits.ceiling_tps),
        prefill_tps=predicted.prefill.expected_tps,
        ttft_s=predicted.ttft_s,
        reason=_unknown(loaded, predicted, case.kv),
        prediction=predicted,
    )


def _without(weighed: Footprint | str, case: WhatIfCase, place: Machine, reason: str) -> WhatIfOutcome:
    if isinstance(weighed, str):
        return WhatIfOutcome(case, place, reason=reason)
    return WhatIfOutcome(case, place, weighed.stored.weight_bytes, weighed.stored.bits_per_weight, reason=reason)


def _unknown(loaded: WeighedModel, predicted: Prediction, kv: KVSpec) -> str | None:
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
    """One catalogue repository at a place, in bytes; None is unknown."""

    id: str
    name: str
    download_bytes: int | None
    parameters: int | None
    active_parameters: int | None
    traits: tuple[Trait, ...]
    outcome: WhatIfOutcome
    verdict: Verdict
    reason: str
    group: Group = "fit unknown"


def suggestions(
    place: Machine, make: Nominal, context: int = 8192, *, progress: Callable[[int, int], None] | None = None
) -> tuple[Suggestion, ...]:
    """Return the whole catalogue, best first, with a prompt that fills ``context``.

    Takes 0.1–0.2 s each. make: the place by its make. progress: called with (done, total).
    """
    case, asked = WhatIfCase(None, 64, KVSpec(), context, context), standings(make)
    found: list[Suggestion] = []
    for each in asked:
        found.append(replace(suggestion(each.entry, each.repository, case, place), group=each.group))
        if progress is not None:
            progress(len(found), len(asked))
    return tuple(found)


def suggestion(entry: CatalogueEntry, repository: Repository, case: WhatIfCase, place: Machine) -> Suggestion:
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
    alone, memory = verdict_alone(found), found.memory
    gives_way = memory is not None and memory.from_others > 0
    return "tight" if gives_way and alone in ("runs well", "fits, speed unknown") else alone


def verdict_alone(found: WhatIfOutcome) -> Verdict:
    memory = found.memory
    if memory is None or memory.fits is None or memory.budget is None:
        return "unknown whether it fits"
    if not memory.fits:
        return "does not fit"
    fastest = found.ceiling_tps if found.expected_tps is None else found.expected_tps
    if fastest is not None and fastest < READABLE_TPS:
        return "slow"
    if memory.total > MARGIN * memory.budget:
        return "tight"
    return "fits, speed unknown" if found.expected_tps is None else "runs well"


def reason_of(found: WhatIfOutcome, verdict: Verdict) -> str:
    memory = found.memory
    if memory is None:
        return found.reason or "its memory is not known"
    need = f"needs {files.size(memory.total)}"
    if memory.budget is None:
        return f"{need}; how much may be used is not known"
    of = f"{need} of {files.size(memory.budget)}"
    most = f"{need}; the machine has {files.memory_size(found.place.memory_bytes or memory.budget)} in all"
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
    """Return the base case, then with one change at a time: weight bits, KV bits, context."""
    found: list[WhatIfOutcome] = []
    for packing, alike in groupby(_distinct(_cases(config, base), own), key=lambda case: case.packing(own)):
        weighed = weigh(config, place.device, packing=packing)
        found += outcomes_of(weighed, alike, place)
    return tuple(found)


def notes(found: Sequence[WhatIfOutcome]) -> tuple[str, ...]:
    unknown = dict.fromkeys(each.reason for each in found if each.reason and each.expected_tps is None)
    return tuple(f"unknown: {reason}" for reason in unknown)


def on_chips(
    config: Mapping[str, Any], case: WhatIfCase, places: Sequence[Machine], *, own: Packing | None = None
) -> tuple[WhatIfOutcome, ...]:
    """Return one case at several places, none a plain CPU. Raises OptionError for impossible KV flags."""
    weighed = weigh(config, "metal", packing=case.packing(own))
    if isinstance(weighed, str) or not places:
        return tuple(outcome_of(weighed, case, place) for place in places)
    first = load(weighed, case.kv, places[0])
    return tuple(outcome_at(first.on(place), case) for place in places)


def contexts_up_to(config: Mapping[str, Any]) -> tuple[int, ...]:
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
    seen = set()
    for case in cases:
        comes_to = (case.packing(own), case.kv, case.context, case.prompt)
        if comes_to not in seen:
            seen.add(comes_to)
            yield case
