"""A checkpoint's own heads for further tokens: loaded, and their drafts."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .. import files
from ..device import DeviceKind
from ..errors import ModelError, OptionError
from ..events import ModelNote
from ..kv.plan import CachePlan, plan_caches
from ..kv.snapshot import BeforePass, most_taken_back
from ..model.extra_heads import ModelEnds, PredictionHead, build_heads, plain_config
from ..model.head import open_door
from ..model.loader import LoadedModel, fill
from ..model.weights import StoredHeads
from ..options import KVSpec
from ..perf.cost import cost_of_model
from ..perf.memory import MemoryLimit
from .ledger import TUNING, DraftingCosts

if TYPE_CHECKING:
    from ..model.extra_heads import MedusaHeads
    from ..sampling import Sampler
    from .drafters import ComputingDrafter

# An MTP layer's caches hold certain pairs only: drafted ones are rolled back, as the model's own hidden states
# are better. They begin with the hidden states, and restart when long.


KEPT = 64  # hidden states of a reply that are kept
LONGEST = 1024  # pairs that the caches of a layer hold at most

NO_MEMORY = "there is no memory for the keys and values of its heads"


class HiddenStates:
    def __init__(self) -> None:
        self._parts: deque[tuple[int, mx.array]] = deque()  # the place of the first, and (1, N, D)
        self.end = 0

    @property
    def start(self) -> int:
        return self._parts[0][0] if self._parts else self.end

    def passed(self, place: int, hidden: mx.array) -> None:
        """Keep a pass's hidden (1, N, D) for tokens from ``place`` on."""
        parts = self._parts
        if place > self.end:
            parts.clear()  # what lies between was computed elsewhere
        while parts and parts[-1][0] >= place:
            parts.pop()
        if parts and place < self.end:
            first, before = parts[-1]
            parts[-1] = first, before[:, : place - first]
        parts.append((place, hidden))
        self.end = place + hidden.shape[1]
        while len(parts) > 1 and self.end - parts[1][0] >= KEPT:
            parts.popleft()

    def between(self, start: int, end: int) -> mx.array:
        """Return positions [start, end): (1, end − start, D)."""
        found = [
            hidden[:, max(0, start - place) : max(0, end - place)]
            for place, hidden in self._parts
            if place < end and start < place + hidden.shape[1]
        ]
        return found[0] if len(found) == 1 else mx.concatenate(found, axis=1)


@dataclass(frozen=True, slots=True)
class LoadedHeads:
    """A model's extra heads, and their costs in bytes."""

    named: str
    weight_bytes: int
    kv_bytes: int
    step_bytes: int
    costs: DraftingCosts
    drafter: "Callable[[HiddenStates, Sampler], ComputingDrafter]"
    forget: Callable[[], None] = lambda: None


class LayerDrafts:
    """A prediction layer, and its caches of the last reply that asked."""

    def __init__(
        self, head: "PredictionHead", plan: CachePlan, *, fits: Callable[[int], bool] = lambda _: True
    ) -> None:
        self.head, self.plan, self._fits = head, plan, fits
        self.forget()

    def forget(self) -> None:
        self.caches: list[Any] = []
        self.start = self.held = 0
        self.state: object = object()

    def begin(self, start: int) -> bool:
        self.forget()
        if not self._fits(self.plan.bytes_at(LONGEST)):
            return False
        self.caches, self.start = self.plan.make(), start
        return True

    def draft(self, tokens: Sequence[int], hidden: mx.array, k: int, sampler: "Sampler") -> tuple[int, ...]:
        """Read tokens and the hidden states (1, N, D) before them; return ``k`` draft tokens."""
        ids, chosen = mx.array([tokens], mx.uint32), list[mx.array]()
        with sampler.supposing():
            hidden = self.head(ids, hidden, self.caches)
            self.held += len(tokens)
            before = BeforePass(self.caches)
            while True:
                chosen.append(sampler(self.head.logits(hidden)))
                if len(chosen) == k:
                    break
                hidden = self.head(chosen[-1][None], hidden[:, -1:], self.caches)
            found: list[int] = mx.concatenate(chosen).tolist()  # type: ignore[assignment]
        before.take_back(k - 1, k - 1)
        return tuple(found)


class LayerDrafter:
    source = "mtp"

    def __init__(self, layer: LayerDrafts, costs: DraftingCosts, hidden: HiddenStates, sampler: "Sampler") -> None:
        self._layer, self._costs, self._hidden, self._sampler = layer, costs, hidden, sampler
        self._state: object = None
        self._start = self._read = 0  # place of the first hidden state of the next draft; pairs that the last one read
        self.rests = ""

    @property
    def most(self) -> int:
        return 0 if self.rests else TUNING.short[-1]

    def drafting(self, width: int) -> float:
        return self._costs.drafting(width)

    def reading(self, ids: Sequence[int], most: float) -> float | None:
        layer, hidden, last = self._layer, self._hidden, len(ids) - 1
        if hidden.end < last or hidden.start >= last:
            return None
        self._start = hidden.start
        reached = layer.start + layer.held
        goes_on = layer.state is self._state and layer.held and hidden.start <= reached < last
        if goes_on and last - layer.start + TUNING.short[-1] <= LONGEST:
            self._start = reached
        if (steps := self._costs.reading(last - self._start)) > most:
            self._start = max(hidden.start, last - TUNING.usually_read)
            steps = self._costs.reading(last - self._start)
        return steps

    def draft(self, ids: Sequence[int], k: int) -> tuple[int, ...]:
        layer, last = self._layer, len(ids) - 1
        goes_on = layer.state is self._state and layer.held and self._start == layer.start + layer.held
        if not goes_on and not layer.begin(self._start):
            self.rests = NO_MEMORY
            return ()
        self._read = last - self._start
        found = layer.draft(ids[self._start + 1 :], self._hidden.between(self._start, last), k, self._sampler)
        layer.state = self._state = object()
        return found

    def took(self, width: int, steps: float) -> None:
        self._costs.observe(self._read, width, steps)

    def rested(self) -> None:
        self._costs.rested()


class MedusaDrafter:
    """Drafts of Medusa heads for one reply: the sampler's choice of each head in turn."""

    source = "medusa"
    rests = ""

    def __init__(self, heads: "MedusaHeads", costs: DraftingCosts, hidden: HiddenStates, sampler: "Sampler") -> None:
        self._heads, self._costs, self._hidden, self._sampler = heads, costs, hidden, sampler

    @property
    def most(self) -> int:
        return min(len(self._heads.heads), TUNING.short[-1])

    def drafting(self, width: int) -> float:
        return self._costs.drafting(width)

    def reading(self, ids: Sequence[int], most: float) -> float | None:  # noqa: ARG002  # it reads nothing but what is there
        return 0.0 if self._hidden.start < len(ids) - 1 <= self._hidden.end else None

    def draft(self, ids: Sequence[int], k: int) -> tuple[int, ...]:
        hidden = self._hidden.between(len(ids) - 2, len(ids) - 1)
        with self._sampler.supposing():
            chosen = [self._sampler(self._heads(hidden, index)) for index in range(k)]
            found: list[int] = mx.concatenate(chosen).tolist()  # type: ignore[assignment]
        return tuple(found)

    def took(self, width: int, steps: float) -> None:
        self._costs.observe(1, width, steps)

    def rested(self) -> None:
        self._costs.rested()


NOT_USED = "its own heads for further tokens ({}) are not used: {}"


def load_heads(
    found: Sequence[StoredHeads],
    model: LoadedModel,
    kv: KVSpec,
    *,
    dtype: str | None,
    device: DeviceKind,
    reading: Callable[[int], float],
    limit: MemoryLimit,
    progress: Callable[[int, int], None],
) -> tuple[tuple[LoadedHeads, ...], tuple[ModelNote, ...]]:
    """Return the usable heads, and notes on each; enables hidden states of the model."""
    loaded: list[LoadedHeads] = []
    notes = [NOT_USED.format(stored.named, stored.trouble) for stored in found if stored.trouble]
    for stored in found:
        if stored.trouble:
            continue
        try:
            heads = _load(stored, model, kv, dtype, device, reading, limit, progress)
        except (ModelError, OptionError) as error:
            notes.append(NOT_USED.format(stored.named, error.message))
            continue
        loaded.append(heads)
        notes.append(f"its own heads guess ahead: {stored.named}, {files.size(heads.weight_bytes + heads.kv_bytes)}")
    if loaded:
        open_door(model.module)
    return tuple(loaded), tuple(ModelNote(note, "heads") for note in notes)


def _load(  # noqa: PLR0917
    stored: StoredHeads,
    model: LoadedModel,
    kv: KVSpec,
    dtype: str | None,
    device: DeviceKind,
    reading: Callable[[int], float],
    limit: MemoryLimit,
    progress: Callable[[int, int], None],
) -> LoadedHeads:
    ends = ModelEnds(model.module, model.config)
    module: Any = build_heads(stored, model.config, ends)
    plan = None if stored.kind == "medusa" else _plan(module, plain_config(model.config), kv)
    fill(module, model.folder, dtype=dtype, device=device, progress=progress)
    if plan is None:
        return _medusa(stored, module)
    cost = cost_of_model(module, plain_config(model.config))

    layer = LayerDrafts(PredictionHead(module, ends), plan, fits=limit.fits)
    if device != "cpu":
        _warm_up(layer)
    costs = DraftingCosts(reading)
    return LoadedHeads(
        stored.named,
        cost.weight_bytes,
        plan.bytes_at(LONGEST),
        (cost.weight_bytes_per_token or cost.weight_bytes) + ends.head_bytes,
        costs,
        partial(LayerDrafter, layer, costs),
        layer.forget,
    )


def _medusa(stored: StoredHeads, heads: "MedusaHeads") -> LoadedHeads:
    held = sum(each.nbytes for each in _arrays(heads))
    costs = DraftingCosts(lambda _: 1.0)
    return LoadedHeads(stored.named, held, 0, held // stored.count, costs, partial(MedusaDrafter, heads, costs))


def _arrays(module: Any) -> list[mx.array]:
    from mlx.utils import tree_flatten

    return [array for _, array in tree_flatten(module.parameters())]


def _plan(module: Any, config: dict[str, Any], kv: KVSpec) -> CachePlan:
    """Return the plan of a layer's caches. Raises OptionError."""
    try:
        plan = plan_caches(module, config, KVSpec(kv.key_bits, kv.value_bits, kv.group_size))
    except OptionError:
        plan = plan_caches(module, config, KVSpec())
    if most_taken_back(plan.make()) < TUNING.short[-1]:
        raise OptionError("its caches can't take back what was guessed", "Use it without its heads.")
    return plan


def _warm_up(layer: LayerDrafts) -> None:
    caches = layer.plan.make()
    for rows in (8, 2, 1):
        hidden = layer.head(mx.zeros((1, rows), mx.uint32), None, caches)
        mx.eval(layer.head.logits(hidden))
    mx.clear_cache()
