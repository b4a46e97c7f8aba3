"""State shared by an engine's requests: model, tokenizer, cache plan, step costs."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .chunking import Chunking, prompt_peak
from .device import DeviceKind
from .kv.costs import GROWTH, STEP
from .kv.plan import CachePlan, plan_caches
from .kv.snapshot import LOCAL, CacheOperations
from .metrics import Metrics, StepCost, rate
from .options import KVSpec
from .perf.bandwidth import BandwidthRecord, believed, is_busy, learn
from .perf.config_cost import work_of
from .perf.cost import cost_of_model
from .perf.diagnosis import Situation, packed_layers
from .perf.hardware import Chip
from .perf.memory import MemoryLimit
from .perf.peak_memory import ModelShape, cache_layers
from .perf.roofline import (
    KVUse,
    LatencyModel,
    Limits,
    Prediction,
    Workload,
    bandwidth_for,
    decode_phase,
    limits_of,
    predict,
)
from .perf.timing import LatencyProfiler
from .text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from .vision.eyes import Eyes

SETTLED_TOKENS = 16  # tokens after which a decode rate says something of the machine


@dataclass(slots=True)
class MachineSpeed:
    """The chip and its latency with this model; replies that are faster correct the bandwidth."""

    chip: Chip
    latency: LatencyModel | None = None
    bytes_read: int | None = None
    _reached_gbs: float | None = None

    @property
    def wants_timing(self) -> bool:
        return self.is_measured and self._record.wants_timing

    def time_bandwidth(self) -> Iterator[None]:
        yield from self._record.time()
        self.refresh()

    def refresh(self) -> None:
        if self._reached_gbs is not None:  # of a reply that nobody read to its end
            self.keep()
        elif self.is_measured:
            self.chip = self._record.describe(self.chip)

    def observe(self, metrics: Metrics) -> bool:
        achieved = metrics.achieved_gbs
        if metrics.generated_tokens < SETTLED_TOKENS or achieved is None:
            return False
        self._reached_gbs = max(achieved, self._reached_gbs or 0.0)
        before, self.chip = self.chip, believed(self.chip, achieved)
        return self.chip != before

    def bounded(self, metrics: Metrics) -> Metrics:
        too_low = metrics.ceiling_tps is not None and (metrics.steps_tps or 0.0) > metrics.ceiling_tps
        return replace(metrics, ceiling_tps=None) if too_low and self.chip.source == "measured" else metrics

    def keep(self) -> None:
        if self.is_measured and self._reached_gbs is not None:
            self.chip = learn(self.chip, self.bytes_read or 0, self._reached_gbs)
            self._reached_gbs = None

    @property
    def is_measured(self) -> bool:
        return self.bytes_read is not None and self.chip.source != "table"

    @property
    def _record(self) -> BandwidthRecord:
        return BandwidthRecord.measured(self.chip, self.bytes_read or 0)


@dataclass(frozen=True, slots=True)
class Runtime:
    """Immutable parts of a loaded engine.

    ahead: launch the next decode step before a token is read. packed_kv, bits_per_weight: see ``Situation``.
    memory_limit: shared, mutable. eyes: what sees pictures, or why nothing does.
    positions: count of learned position embeddings, which no token may exceed;
    None where positions are computed.
    """

    model: Any
    config: dict[str, Any]
    tokenizer: Tokenizer
    plan: CachePlan
    kv: KVSpec
    device: DeviceKind
    ahead: bool
    context_length: int | None
    work: Workload
    machine: MachineSpeed
    shape: ModelShape
    chunking: Chunking
    packed_kv: tuple[KVUse, ...] | None = None
    bits_per_weight: float | None = None
    memory_limit: MemoryLimit = field(default_factory=MemoryLimit)
    doubts: tuple[str, ...] = ()
    positions: int | None = None
    operations: CacheOperations = LOCAL
    eyes: "Eyes | str" = "it was made to read text alone"
    _peaks: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def peak_within(self, tokens: int, slots: int) -> tuple[int, int]:
        """Return (peak bytes, cache bytes) of any ``tokens``-token prompt in caches of ``slots``; memoised."""
        most = -(-(tokens + tokens // GROWTH) // STEP) * STEP  # caches that have fewer slots grow to no more
        key = most, slots if slots > most else 0
        if (known := self._peaks.get(key)) is None:
            peak = prompt_peak(self.shape, self.chunking, held=0, new=most, slots=key[1], reply=1)
            known = self._peaks[key] = peak.total, peak.kv
        return known

    def with_kv_bits(self, key_bits: int, value_bits: int) -> "Runtime":
        """Return the same with other KV bits on the same weights. Raises OptionError."""
        kv = replace(self.kv, key_bits=key_bits, value_bits=value_bits)
        plan = plan_caches(self.model, self.config, kv)
        work = work_of(self.model, self.config, cost_of_model(self.model, self.config), plan)
        return replace(
            self,
            plan=plan,
            kv=kv,
            work=work,
            shape=replace(self.shape, layers=cache_layers(self.config, plan, self.shape.value_bytes)),
            chunking=replace(self.chunking, work=work),
            packed_kv=packed_layers(plan.layers, kv.group_size, work.kv),
            _peaks={},
        )

    @property
    def memory_budget(self) -> int | None:
        return self.memory_limit.budget()

    @property
    def prefill_chunk(self) -> int:
        return self.chunking.tokens_at(0)

    def forget_pictures(self) -> int:
        return 0 if isinstance(self.eyes, str) else self.eyes.forget()

    def new_caches(self, keep: int | None) -> list[Any]:
        return self.plan.make(keep)

    @property
    def capacity(self) -> int | None:
        return self.kv.capacity(self.context_length)

    def room(self, prompt_tokens: int) -> int | None:
        longest = self.longest
        return None if longest is None else longest - prompt_tokens

    @property
    def longest(self) -> int | None:
        return self.positions if self.kv.rolls else self.capacity

    def what_bounds(self) -> str:
        if self.kv.rolls:
            return "the model's learned positions are"
        return "the model's context is" if self.kv.window is None else "the KV window holds"

    def situation(self, *, keeps_prompts: bool, chunk: int) -> Situation:
        return Situation(self.packed_kv, self.bits_per_weight, keeps_prompts, chunk)

    def step_cost(self, context: int, batch: int = 1) -> StepCost:
        work, machine = self.work, self.machine
        expected_s = decode_phase(work, machine.chip, machine.latency, context, batch).expected_s
        bandwidth = bandwidth_for(machine.chip, work.weight_bytes())
        return StepCost(work.weight_bytes(batch), work.kv_bytes(context, batch), bandwidth, rate(1, expected_s))

    def limits(self, context: int) -> Limits:
        return limits_of(context, self.work, self.machine.chip, self.machine.latency)

    def predict(self, prompt: int, context: int, cached: int, batch: int = 1) -> Prediction:
        machine, chunk = self.machine, self.chunking.tokens_at(prompt // 2)
        return predict(
            self.work, machine.chip, machine.latency, prompt, context, cached=cached, batch=batch, chunk=chunk
        )


QUIET_S = 3.0  # seconds without a request before measuring begins, so that the next prompt does not wait for it


AGAIN_S = 20.0  # seconds until a busy machine is looked at again


# The same at most, where timing the bandwidth came to nothing and it is tried more and more rarely.
MOST_AGAIN_S = 1800.0


class IdleProfiler:
    """Times an untrusted bandwidth, then one part per call; hands over the latency once complete."""

    def __init__(
        self, machine: MachineSpeed, measuring: LatencyProfiler | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._machine = machine
        self._measuring = measuring
        self._steps: Iterator[None] | None = None
        self._clock = clock
        self._quiet_since: float | None = None
        self._ended = False
        self.when_measured: Callable[[], None] = lambda: None
        self._resting_until, self._again_s = 0.0, AGAIN_S
        self._take()
        if measuring is not None and not measuring.remaining:
            self._measuring = None

    def later(self) -> None:
        self._quiet_since = None

    def idle(self) -> float | None:
        now = self._clock()
        if self._quiet_since is None:
            self._quiet_since = now  # idle again
        begins = max(self._quiet_since + QUIET_S, self._resting_until)
        if now < begins:
            return begins - now if self._may_want else None
        self._machine.refresh()
        if self._steps is None and not self._wanted:
            return None
        if self._steps is None:
            if is_busy():
                return AGAIN_S
            self._steps = self._work()
        try:
            self._step(self._steps)
        except (RuntimeError, ValueError):  # a product that MLX has no kernel for here: the latency stays unknown
            self._measuring = self._steps = None
        if self._steps is None and self._wanted:  # others came in between
            wait_s, self._again_s = self._again_s, min(2 * self._again_s, MOST_AGAIN_S)
            self._resting_until = now + wait_s
            return wait_s
        return None if self._steps is None else 0.0

    def finish(self) -> None:
        steps = self._steps or (self._work() if self._wanted else None)
        if steps is not None:
            self._steps = steps
            while self._steps is not None:
                self._step(steps)

    def end(self) -> None:
        self._measuring = self._steps = None
        self._ended = True

    @property
    def _may_want(self) -> bool:
        return not self._ended and (self._measuring is not None or self._machine.is_measured)

    @property
    def _wanted(self) -> bool:
        return not self._ended and (self._measuring is not None or self._machine.wants_timing)

    def _work(self) -> Iterator[None]:
        if self._machine.wants_timing:
            yield from self._machine.time_bandwidth()
            self.when_measured()
        if self._measuring is not None:
            yield from self._measuring.steps()

    def _step(self, steps: Iterator[None]) -> None:
        for _ in steps:
            self._take()  # known after the first pass, and truer after each further part
            return
        self._measuring = self._steps = None  # known, or it can't be

    def _take(self) -> None:
        if self._measuring is not None and (latency := self._measuring.latency()) is not None:
            self._machine.latency = latency
            chip = self._machine.chip
            if chip.fp16_tflops is None or chip.peak_source == "measured":
                self._machine.chip = replace(chip, fp16_tflops=self._measuring.peak_tflops, peak_source="measured")
