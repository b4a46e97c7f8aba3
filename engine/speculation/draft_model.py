"""A draft model: found, loaded and weighed, and its drafts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .. import files
from ..device import DeviceKind
from ..errors import MemoryLimitError, OptionError
from ..events import ModelNote
from ..kv.cache import GrowthWatcher, rewindable
from ..kv.plan import CachePlan, plan_caches
from ..kv.snapshot import UNBOUNDED, BeforePass, most_taken_back
from ..model.config import context_length, read_config
from ..model.head import asking_for_logits
from ..model.loader import load_model, position_rows
from ..model.weights import text_config
from ..options import KVSpec
from ..perf.config_cost import work_of
from ..perf.cost import cost_of_model
from ..perf.footprint import check_fits, value_bytes, weigh
from ..perf.hardware import Chip
from ..perf.memory import MemoryLimit
from ..perf.peak_memory import ModelShape, cache_layers
from ..perf.roofline import HostLimited, fitted, measure_host
from ..text.tokenizer import Tokenizer, load_tokenizer
from .ledger import TUNING, DraftingCosts, read_steps

if TYPE_CHECKING:
    from ..perf.roofline import LatencyModel, Workload
    from ..sampling import Sampler

# Of a long prompt it reads only the end: worse drafts, never worse text.
# The reply's own sampler, with the random numbers of each position, chooses draft tokens: so models that
# agree choose alike at any temperature.


LEAST_READ = 32  # tokens of a conversation that it must know of to be worth asking; the whole of a shorter one
CHUNK = 512  # tokens that it reads at once
ROWS = 8  # tokens that are read in the pass whose last logits are used: more are read before, without the head

NO_MEMORY = "there is no memory for the keys and values of its draft model"


class DraftModel:
    """A loaded draft model, and its caches of one sequence.

    Args:
        model: Called with (1, N) ids and the caches.
        longest: Tokens of its context; None is unbounded.
        fits: Asked before its caches grow by bytes.

    Attributes:
        most: Most draft tokens: all but the last are read, and may be rolled back.
        start: Position of the first held token.
        state: Another object whenever other tokens are held.
    """

    def __init__(
        self,
        model: Any,
        plan: CachePlan,
        *,
        vocabulary: int,
        longest: int | None,
        costs: DraftingCosts,
        fits: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self.costs = costs
        self._model, self.plan, self.fits = model, plan, fits
        self._vocabulary, self._longest = vocabulary, longest
        self._new()
        self.most = min(TUNING.short[-1], most_taken_back(self._caches) + 1)

    def _new(self) -> None:
        self._caches = self.plan.make()
        self._growth = GrowthWatcher(self._caches)
        self._held: list[int] = []
        self._sure = 0  # of those, before the last draft
        self._before: BeforePass | None = None  # it
        self.start, self.state = 0, object()

    def forget(self) -> None:
        self._new()

    @property
    def caches(self) -> list[Any]:
        return self._caches

    @property
    def sure(self) -> int:
        return self._sure

    @property
    def held(self) -> Sequence[int]:
        return self._held

    def alike(self, ids: Sequence[int], known: int) -> int:
        held, start = self._held, self.start
        at, end = min(known, len(held)), min(len(held), len(ids) - 1 - start)
        while at < end and held[at] == ids[start + at]:
            at += 1
        return max(0, min(at, end))

    def fitting(self, tokens: int) -> bool:
        return self._longest is None or tokens <= self._longest

    @property
    def longest_read(self) -> int:
        return UNBOUNDED if self._longest is None else self._longest // 2

    def follow(self, ids: Sequence[int], alike: int, start: int) -> bool:
        """Advance the caches to near the end of ``ids``; return whether memory allows it."""
        if start != self.start or not self._take_back(len(self._held) - alike):
            self._new()
            self.start = start
        missing = ids[self.start + len(self._held) :]
        if not self._may_hold(len(missing) + self.most):
            self.forget()
            return False
        while len(missing) > ROWS:
            part = [*missing[: min(CHUNK, len(missing) - 1)]]
            self._model(self._given(part), cache=self._caches)
            mx.eval([cache.state for cache in self._caches])
            mx.clear_cache()
            self._held += part
            missing = missing[len(part) :]
        return True

    def draft(self, ids: Sequence[int], k: int, sampler: "Sampler") -> tuple[int, ...]:
        missing = list(ids[self.start + len(self._held) :])
        chosen: list[mx.array] = []
        with sampler.supposing():
            with asking_for_logits():
                logits = self._model(self._given(missing), cache=self._caches)[:, -1]  # (1, V)
            self._held += missing
            self._sure, self._before = len(self._held), BeforePass(self._caches)
            while True:
                chosen.append(sampler(self._as_wide(logits, sampler)))
                if len(chosen) == k:
                    break
                known = mx.minimum(chosen[-1], self._vocabulary - 1)[None]
                logits = self._model(known, cache=self._caches)[:, -1]
            found: list[int] = mx.concatenate(chosen).tolist()  # type: ignore[assignment]
        self._held += found[:-1]
        return tuple(found)

    def _take_back(self, count: int) -> bool:
        drafted = len(self._held) - self._sure
        if self._before is not None and drafted:
            wrong = min(count, drafted)
            left = self._before.take_back(wrong, drafted)
            self._held = self._held[: self._sure + left]
            count -= wrong
        self._before = None
        self._sure = len(self._held)
        if count <= 0:
            return True
        if count > rewindable(self._caches):  # less than before, by what was guessed
            return False
        BeforePass(self._caches).take_back(count, count)
        self._held = self._held[:-count]
        self._sure = len(self._held)
        return True

    def _may_hold(self, more: int) -> bool:
        fitting = self._growth.fitting(len(self._held))
        return fitting is None or more <= fitting or self.fits(self.plan.bytes_at(len(self._held) + more))

    def _given(self, ids: Sequence[int]) -> mx.array:
        """Return ids (1, N), replacing those that only the larger model has."""
        # An embedding lookup has no bounds check.
        return mx.minimum(mx.array([ids], mx.uint32), self._vocabulary - 1)

    def _as_wide(self, logits: mx.array, sampler: "Sampler") -> mx.array:
        wanted, have = sampler.vocabulary, logits.shape[-1]
        if have > wanted:
            return logits[:, :wanted]
        if have < wanted:
            return mx.pad(logits, [(0, 0), (0, wanted - have)], constant_values=mx.array(-mx.inf, logits.dtype))
        return logits


class ModelDrafter:
    """A draft model's drafts for one reply; the shared model follows the last caller.

    rests: why it drafts no more; "" while it does.
    """

    source = "draft"

    def __init__(self, model: DraftModel, sampler: "Sampler") -> None:
        self._model, self._sampler = model, sampler
        self._known = 0  # held tokens that are the reply's, while the model is in that state:
        self._state: object = None
        self._start = self._read = 0  # where the next draft begins to read; tokens that the last one read
        self.rests = ""

    @property
    def most(self) -> int:
        return 0 if self.rests else self._model.most

    def drafting(self, width: int) -> float:
        return self._model.costs.drafting(width)

    def reading(self, ids: Sequence[int], most: float) -> float | None:
        model, costs = self._model, self._model.costs
        alike = self._alike(ids)
        missing = len(ids) - model.start - alike
        self._start = model.start
        whole = model.fitting(len(ids) - model.start + model.most) and (alike > 0 or model.start == 0)
        if whole and (steps := costs.reading(missing)) <= most:
            return steps
        size, longest = 0, min(len(ids), model.longest_read)
        tried = longest
        while tried >= min(LEAST_READ, len(ids)):
            if (steps := costs.reading(tried)) <= most:
                size = tried
                break
            tried //= 2
        if not size:
            return None
        self._start = len(ids) - size
        return steps

    def draft(self, ids: Sequence[int], k: int) -> tuple[int, ...]:
        model = self._model
        alike = self._alike(ids)
        read_before = alike if self._start == model.start else 0
        try:
            if not model.follow(ids, alike, self._start):
                self.rests = NO_MEMORY
                return ()
            self._read = len(ids) - model.start - read_before
            found = model.draft(ids, k, self._sampler)
        except BaseException:
            model.forget()  # nobody knows what its caches hold
            raise
        model.state = self._state = object()
        self._known = len(ids) - model.start
        return found

    def took(self, width: int, steps: float) -> None:
        self._model.costs.observe(self._read, width, steps)

    def rested(self) -> None:
        self._model.costs.rested()

    def _alike(self, ids: Sequence[int]) -> int:
        model = self._model
        self._known = model.alike(ids, self._known if self._state is model.state else 0)
        self._state = model.state
        return self._known


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model and its costs. latency: None where unknown, as the other model's."""

    name: str
    model: DraftModel
    work: "Workload"
    latency: "LatencyModel | None"
    weight_bytes: int
    kv_bytes_per_token: int


WARM_UP_TOKENS = 32  # read before anybody waits: a GPU makes its kernels at their first use


@dataclass(frozen=True, slots=True)
class FoundDraft:
    """A matching draft model before loading. weight_bytes: as held; 0 is unknown."""

    folder: Path
    name: str
    config: dict[str, Any]
    weight_bytes: int
    vocabulary: int


def find_draft(folder: Path, name: str, of: Path, of_name: str, device: DeviceKind) -> FoundDraft:
    """Return the draft model in ``folder``. Raises OptionError for another tokenizer, and ModelError."""
    config = read_config(folder)
    own = check_same_tokens(folder, name, of, of_name)
    weighed = weigh(config, device, folder=folder)
    weight_bytes = 0 if isinstance(weighed, str) else weighed.held.weight_bytes
    vocabulary = text_config(config).get("vocab_size") or own.vocabulary_size
    return FoundDraft(folder, name, config, weight_bytes, vocabulary)


def check_same_tokens(folder: Path, name: str, of: Path, of_name: str) -> Tokenizer:
    """Return the draft model's tokenizer. Raises OptionError where tokens differ, and ModelError."""
    own, other = load_tokenizer(folder, read_config(folder), name), load_tokenizer(of, read_config(of), of_name)
    if own.fingerprint != other.fingerprint:
        raise OptionError(
            f"{name} can't draft for {of_name}, whose tokenizer is another: {own.difference(other)}",
            "Take a smaller model of the same family, or none.",
        )
    return own


def check_both_fit(
    folder: Path, kv: KVSpec, device: DeviceKind, asked: int | None, *, more: int, draft: FoundDraft | None
) -> tuple[str, ...]:
    """``check_fits`` with ``more`` bytes beside the model, a draft model's included."""
    if draft is None:
        return check_fits(folder, kv, device, asked, more=more)
    try:
        return check_fits(folder, kv, device, asked, more=more + draft.weight_bytes)
    except MemoryLimitError as error:
        check_fits(folder, kv, device, asked, more=more)
        raise MemoryLimitError(
            f"this model fits into memory, but not beside the {files.size(draft.weight_bytes)} of its draft model {draft.name}",
            "Take a smaller draft model, or none.",
        ) from error


def load_draft(
    found: FoundDraft,
    kv: KVSpec,
    device: DeviceKind,
    chip: Chip,
    *,
    limit: MemoryLimit,
    progress: Callable[[int, int], None],
    compiling: Callable[[], None],
) -> tuple[LoadedDraft, tuple[ModelNote, ...]]:
    """Return the draft model, and notes for the user. Raises ModelError."""
    # No window: its caches restart when its context is full. Unchecked config parts do no harm to mere drafts.
    loaded = load_model(found.folder, dtype=None, device=device, progress=progress, unchecked=True, rounded=True)
    module, config = loaded.module, loaded.config
    plan, kept = _plan(module, config, kv)
    if loaded.by_kernels:
        _by_steps(module, config, plan, compiling)
    cost = cost_of_model(module, config)
    work = work_of(module, config, cost, plan)
    bounds = [length for length in (context_length(config), position_rows(module)) if length is not None]

    if device != "cpu":
        _warm_up(module, plan)
    kernels = fitted(chip)
    latency = None if kernels is None else HostLimited(kernels, measure_host(module, plan.make))
    model = DraftModel(
        module,
        plan,
        vocabulary=found.vocabulary,
        longest=min(bounds, default=None),
        costs=DraftingCosts(read_steps(work, latency, chip, device=device)),
        fits=limit.fits,
    )
    draft = LoadedDraft(found.name, model, work, latency, cost.weight_bytes, plan.bytes_per_token)
    size = f"{files.size(cost.weight_bytes)}, {files.size(plan.bytes_per_token)} a token"
    return draft, (ModelNote(f"draft model {found.name}: {size}", "draft"), *map(ModelNote, kept))


def with_draft(shape: ModelShape, draft: LoadedDraft, config: dict[str, Any], device: DeviceKind) -> ModelShape:
    layers = cache_layers(config, draft.model.plan, value_bytes(config, device, None))
    return replace(shape, weights=shape.weights + draft.weight_bytes, layers=(*shape.layers, *layers))


def _plan(module: Any, config: dict[str, Any], kv: KVSpec) -> tuple[CachePlan, tuple[str, ...]]:
    alike = KVSpec(kv.key_bits, kv.value_bits, kv.group_size)
    try:
        return plan_caches(module, config, alike), ()
    except OptionError as error:
        return plan_caches(module, config, KVSpec()), (
            f"the draft model's keys and values stay unpacked: {error.message}",
        )


def _by_steps(module: Any, config: dict[str, Any], plan: CachePlan, compiling: Callable[[], None]) -> None:
    from ..cpu.layers import is_packed, round_rows
    from ..cpu.stepping import take_steps

    if is_packed(module):
        round_rows(module, rounds=True)
        take_steps(module, plan, plan_caches(module, config, KVSpec()).make, compiling)


def _warm_up(module: Any, plan: CachePlan) -> None:
    caches = plan.make()
    for rows in (WARM_UP_TOKENS, ROWS, 2, 1, 1):
        mx.eval(module(mx.zeros((1, rows), mx.uint32), cache=caches)[:, -1])
    mx.clear_cache()
