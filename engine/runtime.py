"""What every request of an engine shares: the model, its tokenizer, its cache plan, and what a step of it costs."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from .chunking import Chunking
from .device import DeviceKind
from .kv import CachePlan, plan_caches
from .kv.operations import LOCAL, CacheOperations
from .metrics import Metrics, StepCost, rate
from .options import KVSpec
from .perf.bandwidth import BandwidthRecord, believed, learn
from .perf.cost import cost_of_model
from .perf.diagnosis import Situation, packed_layers
from .perf.hardware import Chip
from .perf.memory import MemoryLimit
from .perf.model_work import work_of
from .perf.peak_memory import ModelShape, cache_layers
from .perf.roofline import LatencyModel, Limits, Prediction, decode_phase, limits_of, predict
from .perf.workload import KVUse, Workload
from .text.tokenizer import Tokenizer

SETTLED_TOKENS = 16
"""Tokens after which a decode rate says something of the machine."""


@dataclass(slots=True)
class MachineSpeed:
    """The chip, and its latency with this model, as far as they are known. A bandwidth that a reply proves too low is not believed.

    bytes_read: of a decode step's weights: the size for which the bandwidth is kept. None: nothing is measured or kept.
    """

    chip: Chip
    latency: LatencyModel | None = None
    bytes_read: int | None = None
    _reached_gbs: float | None = None

    @property
    def wants_timing(self) -> bool:
        """Whether the bandwidth is to be timed once the machine is idle."""
        return self._is_measured and self._record.wants_timing

    def time_bandwidth(self) -> Iterator[None]:
        """Time the bandwidth, a part of a second a step."""
        yield from self._record.time()
        self.refresh()

    def refresh(self) -> None:
        """Take over what is kept by now: other programs of this kind measure, too."""
        if self._reached_gbs is not None:  # of a reply that nobody read to its end
            self.keep()
        elif self._is_measured:
            self.chip = self._record.describe(self.chip)

    def observe(self, metrics: Metrics) -> bool:
        """Learn from a reply's metrics so far; return whether its ceiling must be computed again. Keeps nothing: see ``keep``."""
        achieved = metrics.achieved_gbs
        if metrics.generated_tokens < SETTLED_TOKENS or achieved is None:
            return False
        self._reached_gbs = max(achieved, self._reached_gbs or 0.0)
        before, self.chip = self.chip, believed(self.chip, achieved)
        return self.chip != before

    def bounded(self, metrics: Metrics) -> Metrics:
        """Return metrics whose ceiling is not below what a reply did that is too short to learn from: unknown then."""
        too_low = metrics.ceiling_tps is not None and (metrics.steps_tps or 0.0) > metrics.ceiling_tps
        return replace(metrics, ceiling_tps=None) if too_low and self.chip.source == "measured" else metrics

    def keep(self) -> None:
        """Keep what replies have reached, at the end of one: every other reckoning of this model says the same then."""
        if self._is_measured and self._reached_gbs is not None:
            self.chip = learn(self.chip, self.bytes_read or 0, self._reached_gbs)
            self._reached_gbs = None

    @property
    def _is_measured(self) -> bool:
        return self.bytes_read is not None and self.chip.source != "table"

    @property
    def _record(self) -> BandwidthRecord:
        return BandwidthRecord.of(self.chip, self.bytes_read or 0)


@dataclass(frozen=True, slots=True)
class Runtime:
    """Immutable parts of a loaded engine.

    Attributes:
        config: the model's, normalised.
        ahead: whether the next decode step is launched before a token is read.
        context_length: the model's, in tokens; None is unknown.
        chunking: how its prompts are cut.
        packed_kv, bits_per_weight: see ``Situation`` (perf/diagnosis.py).
        memory_limit: what the user lets arrays take; shared with all that asks for it.
        doubts: see ``ModelSpec``.
        positions: how many positions the model has learned one by one: no token is ever beyond them. None where they are computed.
        operations: what is done to the model and to caches.
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

    def with_kv_bits(self, key_bits: int, value_bits: int) -> "Runtime":
        """Return the same with caches of other bits, on the same weights. Raises OptionError where the model can't have them."""
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
        )

    @property
    def memory_budget(self) -> int | None:
        """Bytes that MLX's arrays of this process may take in all, as it is now; None is unknown."""
        return self.memory_limit.budget()

    @property
    def prefill_chunk(self) -> int:
        """Prompt tokens computed at once, at most."""
        return self.chunking.at(0)

    def new_caches(self, keep: int | None) -> list[Any]:
        """Return empty caches, one a layer; ``keep`` tokens are pinned where they rotate."""
        return self.plan.make(keep)

    @property
    def capacity(self) -> int | None:
        """Tokens that the context holds at once: the window's, or those the model was made for; None is unbounded."""
        return self.kv.capacity(self.context_length)

    def room(self, prompt_tokens: int) -> int | None:
        """Return how many tokens fit after the prompt: into the context, unless it rolls; None where nothing bounds them."""
        longest = self.longest
        return None if longest is None else longest - prompt_tokens

    @property
    def longest(self) -> int | None:
        """Tokens that a prompt and its reply may have together; None where nothing bounds them."""
        return self.positions if self.kv.rolls else self.capacity

    def what_bounds(self) -> str:
        """Return what ``longest`` is the length of, as the words that go before it."""
        if self.kv.rolls:
            return "the model's learned positions are"
        return "the model's context is" if self.kv.window is None else "the KV window holds"

    def situation(self, *, keeps_prompts: bool, chunk: int) -> Situation:
        """Return what could be changed about a reply whose prompt was computed ``chunk`` tokens at a time."""
        return Situation(self.packed_kv, self.bits_per_weight, keeps_prompts, chunk)

    def step_cost(self, context: int, batch: int = 1) -> StepCost:
        """Return what a step reads that makes a token of each of ``batch`` replies, and how fast each should be.

        context: of each of them, in tokens.
        """
        work, machine = self.work, self.machine
        expected_s = decode_phase(work, machine.chip, machine.latency, context, batch).expected_s
        bandwidth = machine.chip.bandwidth_gbs
        return StepCost(work.weight_bytes(batch), work.kv_bytes(context, batch), bandwidth, rate(1, expected_s))

    def limits(self, context: int) -> Limits:
        """Return what the machine allows at a context of so many tokens."""
        return limits_of(context, self.work, self.machine.chip, self.machine.latency)

    def predict(self, prompt: int, context: int, cached: int, batch: int = 1) -> Prediction:
        """Return what the machine will make of a prompt of so many tokens, and of decoding ``batch`` replies at ``context``."""
        machine, chunk = self.machine, self.chunking.at(prompt // 2)
        return predict(
            self.work, machine.chip, machine.latency, prompt, context, cached=cached, batch=batch, chunk=chunk
        )
