"""What the replies of a loaded model share to be drafted: what passes take, and the conversations that other replies may repeat."""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..prompt_cache.radix_tree import common_prefix
from .draft_model import DraftModel, ModelDrafter
from .drafters import ComputingDrafter, Drafter
from .head_drafters import HiddenStates, LoadedHeads
from .ledger import PassCosts
from .lookup import Branches, Lookup
from .small_batches import LEAST_STEP, draft_step, pass_steps
from .speculator import Speculator

if TYPE_CHECKING:
    from ..options import Speculation
    from ..perf.roofline import LatencyModel
    from ..perf.workload import Workload
    from ..runtime import Runtime
    from ..sampling import Sampler

KEPT_TOKENS = 1 << 18
"""Of conversations that are kept, 4 bytes each."""
TEXTS = 4
"""Other versions that a reply is compared with."""
LONGEST = 1 << 14
"""Tokens of each."""
BEFORE = 32
"""Tokens before the place where a version goes its own way that are kept to find the place by."""
LEAST = 8
"""Tokens that a version must have beyond that."""


class Conversations:
    """Token ids of conversations that ended lately, in memory alone."""

    def __init__(self) -> None:
        self._kept: deque[array[int]] = deque()

    def keep(self, ids: Sequence[int]) -> None:
        """Keep one that ended; what it continues, and the oldest, make room."""
        new = array("i", ids)
        self._kept = deque(each for each in self._kept if common_prefix(each, new) < len(each))
        self._kept.append(new)
        while sum(map(len, self._kept)) > KEPT_TOKENS:
            self._kept.popleft()

    def versions(self, ids: Sequence[int]) -> list[Sequence[int]]:
        """Return what stands in others in place of what follows ``ids``, from a little before; what has most in common last."""
        new = array("i", ids)
        found = [(common_prefix(each, new), each) for each in self._kept]
        found = [(shared, each) for shared, each in found if len(each) - shared >= LEAST]
        found.sort(key=lambda pair: pair[0])  # of two alike, the latest is last
        return [each[max(0, shared - BEFORE) :][:LONGEST] for shared, each in found[-TEXTS:]]


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model, and what it costs.

    Attributes:
        name: as it was asked for.
        work: of a step of it. latency: how fast it should be, where that is not known as the other model's is.
        weight_bytes: of its weights, as they are held.
        kv_bytes_per_token: of its keys and values.
    """

    name: str
    model: DraftModel
    work: "Workload"
    latency: "LatencyModel | None"
    weight_bytes: int
    kv_bytes_per_token: int


class SharedSpeculation:
    """Begins the speculation of each reply.

    Args:
        options: What guesses.
        remembers: Whether conversations may be kept after their replies.
        draft: The draft model, where there is one.
        heads: The model's own heads for further tokens.
    """

    def __init__(
        self,
        options: "Speculation",
        *,
        remembers: bool,
        draft: "LoadedDraft | None" = None,
        heads: Sequence[LoadedHeads] = (),
    ) -> None:
        self._options = options
        self._draft, self._remembers = draft, remembers
        self._heads = heads
        self._costs: dict[tuple[int, int], PassCosts] = {}
        self._conversations = Conversations() if options.branches and remembers else None
        self.more: Callable[[], Sequence[Drafter]] = tuple

    def begin(
        self,
        runtime: "Runtime",
        ids: Sequence[int],
        made: Sequence[int],
        sampler: "Sampler",
        *,
        background: bool = False,
    ) -> Speculator | None:
        """Return the speculation of a reply to ``ids`` of which ``made`` is written; None where nothing guesses.

        sampler: the reply's. background: it gives way: the draft model and the heads follow others.
        """
        drafters: list[Drafter] = [*self.more()]
        if self._options.lookup:
            drafters.append(Lookup())
        if self._conversations is not None and (versions := self._conversations.versions(ids)):
            drafters.append(Branches(versions))
        draft, heads = (None, ()) if background else (self._draft, self._heads)
        if not drafters and draft is None and not heads:
            return None
        machine, bits = runtime.machine, (runtime.kv.key_bits, runtime.kv.value_bits)
        if bits not in self._costs:
            self._costs[bits] = PassCosts(
                lambda rows, context: pass_steps(
                    runtime.work, machine.latency, machine.chip, context, rows, device=runtime.device
                )
            )
        computing: list[ComputingDrafter] = []
        hidden = HiddenStates() if heads else None
        for each in heads:
            assert hidden is not None
            each.costs.step = max(LEAST_STEP, each.step_bytes / (runtime.work.step_bytes(len(ids)) or each.step_bytes))
            computing.append(each.drafter(hidden, sampler))
        if draft is not None:
            both = (draft.work, draft.latency or machine.latency), (runtime.work, machine.latency)
            draft.model.costs.step = draft_step(*both, machine.chip, len(ids))
            computing.append(ModelDrafter(draft.model, sampler))
        return Speculator(drafters, self._costs[bits], [*ids, *made], computing=computing, hidden=hidden)

    def forget(self) -> None:
        """Keep no conversation any more."""
        self._forget_computed()
        if self._conversations is not None:
            self._conversations = Conversations()

    def ended(self, ids: Sequence[int]) -> None:
        """Keep a conversation whose reply has ended."""
        if not self._remembers:
            self._forget_computed()
        if self._conversations is not None:
            self._conversations.keep(ids)

    def _forget_computed(self) -> None:
        """Hold no keys and values of a draft model or of heads."""
        if self._draft is not None:
            self._draft.model.forget()
        for each in self._heads:
            each.forget()
