"""What one pass of a model reads and computes, as a function of how deep in the context it is; and the passes of a reply.

    weights + keys and values ÷ bandwidth = the least time of reading        operations ÷ peak = the least time of the arithmetic

Of both, the longer one is the least time that a pass can take: its ceiling. Bytes and operations are counted from the model
(perf/workload.py), with layers that are alike counted together, so that the whole is a few numbers and can be stored.
"""

from collections import Counter
from dataclasses import dataclass, replace

from ..perf.hardware import Chip
from ..perf.roofline import peak_tflops
from ..perf.workload import Attention, KVUse, Workload


@dataclass(frozen=True, slots=True)
class PassCost:
    """What every pass of one model on one chip has in common; None is unknown.

    shared_bytes: weights that each pass reads; expert_bytes: all experts' weights, of which a token uses the share ``active``.
    linear_parameters: that each token is multiplied with; head_parameters: those of the output head, once a step.
    kv, attention: how many layers are alike, and what one of them keeps, or attends to.
    """

    shared_bytes: int
    expert_bytes: int
    active: float | None
    linear_parameters: int | None
    head_parameters: int
    kv: tuple[tuple[int, KVUse], ...]
    attention: tuple[tuple[int, Attention], ...]
    bandwidth_gbs: float | None
    peak_tflops: float | None

    def weight_bytes(self, tokens: int = 1) -> int | None:
        """Bytes of weights that a pass over ``tokens`` tokens reads: each of them, and each expert that any token chose, once."""
        if not self.expert_bytes:
            return self.shared_bytes
        if self.active is None:
            return None
        return self.shared_bytes + round(self.expert_bytes * (1 - (1 - self.active) ** tokens))

    def kv_bytes(self, context: int) -> int:
        """Bytes of keys and values that a pass reads which ends at ``context`` tokens."""
        return sum(layers * each.bytes_at(context) for layers, each in self.kv)

    def operations(self, tokens: int, cached: int, *, head: bool) -> int | None:
        """Operations of a pass over ``tokens`` tokens after ``cached``. head: it also chooses the next token."""
        if self.linear_parameters is None:
            return None
        linear = 2 * (self.linear_parameters * tokens + self.head_parameters * head)
        return linear + sum(layers * each.operations(tokens, cached) for layers, each in self.attention)

    def of(self, tokens: int, cached: int, *, head: bool) -> "PassWork":
        """Return the work of a pass over ``tokens`` tokens after ``cached``."""
        weights, kv = self.weight_bytes(tokens), self.kv_bytes(cached + tokens)
        operations = self.operations(tokens, cached, head=head)
        computing = None
        if operations is not None and self.peak_tflops:
            computing = operations / (self.peak_tflops * 1e9)
        return PassWork(weights, kv, operations, self._ms(weights), self._ms(kv), computing)

    def _ms(self, nbytes: int | None) -> float | None:
        return nbytes / (self.bandwidth_gbs * 1e6) if nbytes is not None and self.bandwidth_gbs else None


@dataclass(frozen=True, slots=True)
class PassWork:
    """What a pass reads (bytes) and computes (operations), and the least milliseconds of each here; None is unknown."""

    weight_bytes: int | None
    kv_bytes: int
    operations: int | None
    weights_ms: float | None
    kv_ms: float | None
    computing_ms: float | None

    @property
    def reading_ms(self) -> float | None:
        """The least time of reading."""
        return None if self.weights_ms is None or self.kv_ms is None else self.weights_ms + self.kv_ms

    @property
    def least_ms(self) -> float | None:
        """The least time that the pass can take: reading or arithmetic, whichever is longer; None where neither is known."""
        return max((ms for ms in (self.reading_ms, self.computing_ms) if ms is not None), default=None)

    def share_of_ceiling(self, ms: float | None) -> float | None:
        """Return the least time ÷ ``ms``."""
        least = self.least_ms
        return None if least is None or not ms else least / ms


def cost_of(work: Workload, chip: Chip) -> PassCost:
    """Return the cost of a pass of a model on a chip; layers that are alike are counted together."""
    kv = Counter(replace(each, heads=None) for each in work.kv)
    attention = Counter(replace(each, layer=0) for each in work.attention)
    return PassCost(
        shared_bytes=work.shared_bytes,
        expert_bytes=work.expert_bytes,
        active=work.active,
        linear_parameters=work.prefill_parameters,
        head_parameters=work.head_parameters,
        kv=tuple((count, each) for each, count in kv.items()),
        attention=tuple((count, each) for each, count in attention.items()),
        bandwidth_gbs=chip.bandwidth_gbs,
        peak_tflops=peak_tflops(chip),
    )
