"""What every request of an engine shares: the model, its tokenizer, its cache plan, and what a step of it costs."""

from dataclasses import dataclass
from typing import Any

from tokamac.engine.device import DeviceKind
from tokamac.engine.kv import CachePlan
from tokamac.engine.limits.bandwidth import believed
from tokamac.engine.limits.hardware import Chip
from tokamac.engine.limits.metrics import Metrics
from tokamac.engine.options import KVSpec
from tokamac.engine.recorder import StepCost
from tokamac.engine.tokens import Tokenizer

PREFILL_CHUNK: dict[DeviceKind, int] = {"metal": 512, "cuda": 2048, "cpu": 256}
"""Prompt tokens computed at once, and so how long a cancellation can wait. Meant to keep a GPU busy; not tuned on one here."""


SETTLED_TOKENS = 16
"""Tokens after which a decode rate says something of the machine."""


@dataclass(slots=True)
class Machine:
    """The chip, as far as it is known. A bandwidth that a reply proves too low is not believed."""

    chip: Chip

    def observe(self, metrics: Metrics) -> bool:
        """Learn from a reply's metrics; return whether its ceiling must be computed again."""
        if metrics.generated_tokens < SETTLED_TOKENS:
            return False
        before, self.chip = self.chip, believed(self.chip, metrics.achieved_gbs)
        return self.chip is not before and self.chip != before


@dataclass(frozen=True, slots=True)
class Runtime:
    """Immutable parts of a loaded engine. ``context_length`` is the model's, in tokens; None is unknown."""

    model: Any
    tokenizer: Tokenizer
    plan: CachePlan
    kv: KVSpec
    device: DeviceKind
    ahead: bool
    context_length: int | None
    weight_bytes_per_token: int | None
    machine: Machine

    @property
    def prefill_chunk(self) -> int:
        """Prompt tokens computed at once."""
        return PREFILL_CHUNK[self.device]

    def new_caches(self, keep: int | None) -> list[Any]:
        """Return empty caches, one a layer; ``keep`` tokens are pinned where they rotate."""
        return self.plan.make(keep)

    @property
    def capacity(self) -> int | None:
        """Tokens that the context holds at once: the window's, or those the model was made for; None is unbounded."""
        return self.kv.capacity(self.context_length)

    def room(self, prompt_tokens: int) -> int | None:
        """Return how many tokens fit the context after the prompt; None where nothing bounds them."""
        capacity = self.capacity
        return None if capacity is None or self.kv.rolls else capacity - prompt_tokens

    def step_cost(self, context: int) -> StepCost:
        """Return what decoding one token reads at a context of so many tokens."""
        return StepCost(self.weight_bytes_per_token, self.plan.bytes_at(context), self.machine.chip.bandwidth_gbs)
