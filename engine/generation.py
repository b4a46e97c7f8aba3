"""The two phases on the device: prefill in chunks, decode one step ahead. Knows tokens and caches, nothing of text.

Prompts on their way through the model: cut at multiples of the chunk, counted from the first token (perf/mitigation.py).

Where a piece takes long, it is computed a few layers at a time, so that a cancellation is heard in between: then what was begun of
it is dropped. Time decides that alone, never where a prompt is cut.

Make room for a prefill before it begins: predict its peak, take the ladder's steps, or refuse. Runs on the engine's thread.

Refused is only what goes beyond the limit (perf/memory.py). Where macOS is at critical pressure the steps are taken for what it
has left, as far as they go, and the prompt is computed all the same: what it needs is small beside a model that is loaded already.

One reply, from token ids to events: prefix, prefill, decode, text. Runs on the engine's thread.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from tokamac.engine import kv
from tokamac.engine.errors import FAILURES, ContextError, DeviceError, ModelDamagedError, computing_error
from tokamac.engine.events import Event, Finished, FinishReason, Live, MemoryPressure, PrefillProgress, Truncated
from tokamac.engine.kv.attention import forcing_fused
from tokamac.engine.kv.attention_kernel import AttentionDevice
from tokamac.engine.kv.cache import Cache, GrowthWatcher
from tokamac.engine.kv.cache import nbytes as kv_bytes
from tokamac.engine.kv.plan import spare_slots
from tokamac.engine.kv.probe import leaves
from tokamac.engine.kv.snapshot import freeze, grows, thaw
from tokamac.engine.metrics import Cause, Metrics, Outlier, ProcessWatch, Recorder, achieved_gbs, gaps_ms, recent_rate
from tokamac.engine.options import Sampling
from tokamac.engine.perf import macos, memory
from tokamac.engine.perf.diagnosis import Diagnosis, diagnose
from tokamac.engine.perf.macos import ThrottleWatch
from tokamac.engine.perf.mitigation import (
    LEAST_CHUNK,
    Chunking,
    Mitigation,
    offers,
    prompt_peak,
    refusal,
    relieving,
    steps,
)
from tokamac.engine.perf.peak_memory import ModelShape, Peak, predict_peak
from tokamac.engine.prompt_cache.cache import CacheStore
from tokamac.engine.prompt_cache.memory import CacheLease
from tokamac.engine.runtime import Runtime
from tokamac.engine.sampling import Sampler, Score, TokenSets
from tokamac.engine.text.continuation import PartialReply
from tokamac.engine.text.stream import ReplyText, ThinkingBudget, TokenSources
from tokamac.engine.text.tokenizer import Tokenizer

CHECK_STEPS = 16
"""Decoded tokens between looks at whether logits are numbers still: what spoils one step stays in the caches."""
NO_NUMBER = (1 << 32) - 1
"""In place of a token: no vocabulary has so many."""

POOL_CLEAR_STEPS = 256
"""Decoded tokens between returns of MLX's unused buffers to the system."""


class Generation:
    """One sequence being computed: a model, its caches, and the ids that the caches hold.

    Number line: ``held`` are the tokens whose keys and values are in the caches, always, whenever the caller regains control.
    ``mark`` is told, while decoding, of what may hold the next token up. force_fused: prefill writes no attention scores down
    where MLX has a kernel for that on this device; None asks for none. may_grow: asked, while decoding, before the caches are made
    larger; where it says no, decoding ends, and ``ended_by_memory`` is true. piece: tokens that prefill computes at once just now.
    """

    def __init__(
        self,
        model: Any,
        caches: list[Any],
        held: list[int],
        *,
        ahead: bool,
        mark: Callable[[Cause], None] = lambda _: None,
        force_fused: AttentionDevice | None = None,
        may_grow: Callable[[], bool] = lambda: True,
    ) -> None:
        self._model = model
        self._caches = caches
        self._ahead = ahead
        self._mark = mark
        self._force_fused = force_fused
        self._may_grow = may_grow
        self._room = GrowthWatcher([])
        self.ended_by_memory = False
        self.piece = 0
        self.held = held
        self._forced: deque[int] = deque()

    def force(self, ids: Iterable[int]) -> None:
        """Let these tokens come next, whatever the sampler chooses. To be called before a token is asked for, or after one came."""
        self._forced.extend(ids)

    def resumed(self) -> None:
        """The caches were given away and taken again: other objects, which hold the same tokens."""
        self._room = GrowthWatcher(self._caches)

    def prefill(self, ids: list[int], chunk: int) -> Iterator[int]:
        """Compute ``ids`` (after those held) in chunks; yield after each how many are done. Stop iterating to cancel."""
        done = 0
        while done < len(ids):
            part = ids[done : done + chunk]
            self.piece = len(part)
            with forcing_fused(self._force_fused):
                self._model(mx.array([part]), cache=self._caches)
            mx.eval(
                [cache.state for cache in self._caches]
            )  # the logits are not asked for, so the head is never computed
            mx.clear_cache()  # a chunk's temporaries are large and of no use to decoding
            self.held.extend(part)
            done += len(part)
            yield done

    def prefill_in_stages(self, ids: list[int], stages: int, stopped: Callable[[], bool]) -> bool:
        """Compute ``ids`` at once, a few layers at a time; return whether all were. False: ``stopped``, and all is as it was.

        What is computed is the same, bit by bit: stages only say when the device is waited for.
        """
        parts = _in_stages(self._caches, stages)
        before = [
            [cache.copy() for cache in part] for part in parts
        ]  # shared: until a layer is computed nothing is copied
        frozen, self.piece = freeze(self._caches), len(ids)
        with forcing_fused(self._force_fused):
            self._model(mx.array([ids]), cache=self._caches)
        for done, part in enumerate(parts, 1):
            before[done - 1] = []  # or the layer's keys would be copied, not written in place
            mx.eval([cache.state for cache in part])
            if done < len(parts) and stopped():
                for cache in (cache for computed in parts[:done] for cache in computed):
                    cache.trim(len(ids))
                for waiting, held in zip(parts[done:], before[done:], strict=True):
                    for cache, old in zip(waiting, held, strict=True):
                        cache.state = old.state
                thaw(self._caches, frozen)
                mx.clear_cache()
                return False
        mx.eval([cache.state for cache in self._caches])  # of caches that do not grow
        mx.clear_cache()
        self.held.extend(ids)
        return True

    def decode(self, last: int, sampler: Sampler, limit: int | None) -> Iterator[int]:
        """Yield up to ``limit`` tokens (None: without end) that follow ``last``, the one prompt token not yet held.

        Stop iterating to cancel. With ``ahead`` the next step is launched before a token is read, so the device works while the
        host does.
        """
        pending = self._or_forced(self._step(mx.array([last]), sampler, checked=True), sampler)
        self.held.append(last)
        self._room = GrowthWatcher(self._caches)
        for count in itertools.count(1):
            self.ended_by_memory = count != limit and self._room.will_grow(len(self.held)) and not self._may_grow()
            last_one = count == limit or self.ended_by_memory
            checked = count % CHECK_STEPS == 0
            following = (
                self._step(_some_token(pending), sampler, checked=checked) if self._ahead and not last_one else None
            )
            if self._room.grew():
                self._mark("kv growth")
            token = int(pending.tolist()[0])  # type: ignore[index,arg-type]
            if token == NO_NUMBER:
                raise ModelDamagedError(
                    "the model computed values that are not numbers",
                    "Load it with dtype float32, or download it again.",
                )
            if following is not None:
                self.held.append(token)
            yield token
            if last_one:
                return
            if count % POOL_CLEAR_STEPS == 0:
                mx.clear_cache()
                self._mark("pool cleared")
            if following is None:
                following = self._step(pending, sampler, checked=checked)
                self.held.append(token)
            pending = self._or_forced(following, sampler)

    def _or_forced(self, chosen: mx.array, sampler: Sampler) -> mx.array:
        """Return what the sampler chose (1,), or the forced token in its place: what was computed of it so far is not used."""
        if not self._forced:
            return chosen
        forced = mx.array([self._forced.popleft()], mx.uint32)
        sampler.replace_last(forced)
        return forced

    def _step(self, token: mx.array, sampler: Sampler, *, checked: bool) -> mx.array:
        """token (1,) → the next (1,), not evaluated. checked: it is NO_NUMBER where the logits are not numbers."""
        logits = self._model(token[None], cache=self._caches)[:, -1, :]  # (1, 1) ids → (1, V)
        chosen = sampler(logits)
        if checked:
            chosen = mx.where(mx.isfinite(mx.max(logits)), chosen, mx.array(NO_NUMBER, mx.uint32))
        mx.async_eval(chosen, *sampler.newest_score())  # type: ignore[no-untyped-call]
        return chosen


def _some_token(chosen: mx.array) -> mx.array:
    """Return ``chosen`` (1,) or, in place of NO_NUMBER, a token that there is: a lookup has no bounds, and reads foreign memory."""
    return mx.where(chosen == NO_NUMBER, 0, chosen)


def _in_stages(caches: list[Any], stages: int) -> list[list[Cache]]:
    """Return the caches that grow, in so many parts or fewer, in the order of their layers; none where one is the model's own."""
    growing = [cache for _, cache in leaves(caches) if grows(cache)]
    ours = [cache for cache in growing if isinstance(cache, Cache)]
    if len(ours) < len(growing) or not ours:
        return []
    size = -(-len(ours) // stages)
    return [ours[at : at + size] for at in range(0, len(ours), size)]


STAGE_S = 1.0
"""What is computed of a piece before it is asked whether to stop."""


class PrefillChunker:
    """Computes prompts piece by piece.

    most: tokens that a piece has at most, a power of two: what there is room for. largest: that of the first, which no later one
    exceeds. stage_s: seconds after which ``stopped`` is asked again, as far as the pace is known.
    """

    def __init__(
        self,
        chunking: Chunking,
        most: int,
        held: int,
        *,
        stage_s: float = STAGE_S,
        stopped: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._chunking, self._most = chunking, most
        self._stage_s, self._stopped, self._clock = stage_s, stopped, clock
        self.largest = self._size(held)
        self._token_s = chunking.token_s(held)

    def compute(self, run: Generation, ids: list[int]) -> Iterator[None]:
        """Compute ``ids`` after those that ``run`` holds; yield after each piece. Stop iterating to cancel."""
        at = 0
        while at < len(ids):
            size = self._size(len(run.held))
            part = ids[at : at + size - len(run.held) % size]
            stages = 1 if self._token_s is None else math.ceil(len(part) * self._token_s / self._stage_s)
            began = self._clock()
            whole = (
                run.prefill_in_stages(part, stages, self._stopped) if stages > 1 else all(run.prefill(part, len(part)))
            )
            if whole:
                self._token_s = (self._clock() - began) / len(part)
                at += len(part)
            yield
            if not whole:
                return

    def _size(self, held: int) -> int:
        return min(self._most, self._chunking.at(held))


@dataclass(frozen=True, slots=True)
class PrefillBudget:
    """Room for a prefill. chunk: tokens to compute at once. squeezed: what was done for it, or what it costs other programs; None
    where nothing had to be and it costs them nothing.

    force_fused: whether to ask for fused attention wherever there is a kernel. peak_with: the peak that is expected with a reply
    of so many tokens.
    """

    chunk: int
    squeezed: MemoryPressure | None
    peak_with: Callable[[int], Peak]
    force_fused: bool = False


class ReplyGrowth:
    """Asked while decoding, before the caches of a reply are made larger: makes room, and says whether there is any.

    told: what was done and is still to be said.
    """

    def __init__(self, runtime: Runtime, store: CacheStore, slot: CacheLease) -> None:
        self._runtime, self._store, self._slot = runtime, store, slot
        self.told: list[MemoryPressure] = []

    def fits(self) -> bool:
        """Clear the pool and shrink the prompt cache as far as the larger caches need it; return whether they fit then."""
        shape, store, budget = self._runtime.shape, self._store, self._budget()
        if budget is None:
            return True
        held, slots, aside = len(self._slot.ids), slots_of(self._slot.caches), store.aside

        def peak(_: int) -> Peak:
            return predict_peak(shape, held=held, new=0, chunk=1, slots=slots, reply=1, prompt_cache=aside)

        found = steps(peak, budget, chunk=1, pool=mx.get_cache_memory())
        done = _take(found, store, budget, from_others=0, critical=False) if found.rungs else None
        if found.missing:
            pool, freed = (done.pool_bytes, done.cache_bytes) if done else (0, 0)
            self.told.append(MemoryPressure(pool, None, freed, found.peak.total, budget, ended=True))
        elif done is not None and done.cache_bytes:  # a pool that was cleared is nothing to tell
            self.told.append(done)
        return not found.missing

    def _budget(self) -> int | None:
        whole = self._runtime.memory_budget
        if whole is None:
            return None
        ours = self._runtime.shape.weights + kv_bytes(self._slot.caches) + self._store.aside
        return whole - max(0, mx.get_active_memory() - ours)


def make_room(
    runtime: Runtime,
    store: CacheStore,
    slot: CacheLease,
    tokens: int,
    *,
    most: int | None = None,
    may_force: bool = True,
) -> PrefillBudget:
    """Make room to compute a prompt of so many ``tokens``, of which ``slot`` holds the first, and one token of reply.

    most: tokens to compute at once at most, after MLX had no memory for more. may_force: whether fused attention may be asked for.
    Raises MemoryLimitError where there can be none, with what would fit; nothing was given up for it then.
    """
    shape, held, slots, aside = runtime.shape, len(slot.ids), slots_of(slot.caches), store.aside

    def peak(of: ModelShape, chunk: int, reply: int = 1, beside: int = aside) -> Peak:
        new = max(0, tokens - 1 - held)
        return prompt_peak(
            of, runtime.chunking, held=held, new=new, most=chunk, slots=slots, reply=reply, prompt_cache=beside
        )

    def afresh(of: ModelShape) -> Peak:
        return prompt_peak(of, runtime.chunking, held=0, new=tokens - 1, reply=1)

    others = _others(shape, store)
    budget = None if (whole := runtime.memory_budget) is None else whole - others
    spare = None if (left := memory.available()) is None else left - others
    pool, largest = mx.get_cache_memory(), runtime.chunking.at(held)
    largest = largest if most is None else min(most, largest)
    fused = replace(shape, force_fused=True)

    def plain_at(chunk: int) -> Peak:
        return peak(shape, chunk)

    def fused_at(chunk: int) -> Peak:
        return peak(fused, chunk)

    found = steps(plain_at, budget, chunk=largest, pool=pool, fused_at=fused_at if may_force else None)
    if budget is not None and found.missing:
        offered = list(offers(fused, afresh, budget, spare=spare_slots, longest=tokens))
        raise refusal(f"this prompt of {tokens:,} tokens", found.peak, budget, offered, there_is=memory.device_total())
    critical = memory.is_critical()
    if critical and budget is not None and spare is not None and spare < budget:
        found = relieving(plain_at, spare, chunk=largest, pool=pool, fused_at=fused_at if may_force else None)
    given = memory.taken_from_others(found.peak.total, spare)
    squeezed = _take(found, store, budget, given, critical) if found.rungs or given or critical else None
    if most is not None:
        done = squeezed or MemoryPressure(0, None, 0, found.peak.total, budget)
        squeezed = replace(done, chunk=found.chunk, failed=True)
    taken, beside = fused if found.fused else shape, found.peak.prompt_cache
    return PrefillBudget(found.chunk, squeezed, lambda reply: peak(taken, found.chunk, reply, beside), found.fused)


def slots_of(caches: list[Any]) -> int:
    """Return the most tokens that one of our caches has room for."""
    return max((cache.slots for _, cache in leaves(caches) if isinstance(cache, Cache)), default=0)


def _others(shape: ModelShape, store: CacheStore) -> int:
    """Return what other engines of the process hold: their arrays count in the same budget."""
    return max(0, mx.get_active_memory() - shape.weights - store.nbytes)


def _take(found: Mitigation, store: CacheStore, budget: int | None, from_others: int, critical: bool) -> MemoryPressure:
    """Take the steps, in their order."""
    pool, chunk, freed, spared = 0, None, 0, 0
    for rung in found.rungs:
        match rung.name:
            case "pool":
                pool = rung.amount
                mx.clear_cache()
            case "fused":
                spared = rung.amount
            case "chunk":
                chunk = rung.amount
            case "prompt cache":
                freed = store.shrink(rung.amount)
                mx.clear_cache()
    return MemoryPressure(pool, chunk, freed, found.peak.total, budget, from_others, critical, spared)


LIVE_GAPS = 64
_LETS_GO = 'roll or truncate-middle for --on-full (in Python on_full; in the chat "When full" under /settings)'
_LETS_THE_MIDDLE_GO = _LETS_GO.removeprefix("roll or ")


@dataclass(slots=True)
class Request:
    """What is asked: ``ids`` to continue with ``sampling``; ``keep`` tokens are pinned in a rotating cache.

    begun: the reply at the end of ``ids``, where one is continued.
    checkpoints: positions in ``ids`` to which later requests may want to go back, ascending.
    thinking_budget: tokens after which thinking is ended.
    """

    ids: list[int]
    sampling: Sampling
    keep: int | None
    in_thinking: bool = False
    begun: PartialReply | None = None
    left_out: Truncated | None = None
    checkpoints: tuple[int, ...] = ()
    recorder: Recorder = field(default_factory=Recorder)
    thinking_budget: int | None = None

    @property
    def thought(self) -> str:
        """What was thought already by a reply that is continued while it thinks."""
        return "" if self.begun is None or not self.in_thinking else self.begun.said.thinking


class ReplyTask:
    """A request being answered."""

    def __init__(self, runtime: Runtime, store: CacheStore, request: Request, cancelled: Callable[[], bool]) -> None:
        self._runtime = runtime
        self._store = store
        self._request = request
        self._cancelled = cancelled
        self._slot: CacheLease | None = None
        self._room: PrefillBudget | None = None
        self._pieces: PrefillChunker | None = None
        self._run: Generation | None = None
        self._may_force = True
        self._rested: list[int] | None = None  # what the caches held when they were given away
        self._rested_bytes = self._rested_peak = 0
        self._cut_off = self._ended_by_memory = self._decoding = False
        self._throttled = ThrottleWatch(macos.system())

    def events(self) -> Generator[Event, None, None]:
        """Prefill, decode and finish. What was computed goes back to the prompt cache, however this ends.

        Where MLX has no memory for a piece of the prompt, the prompt is computed again in pieces of half that size. Raises
        ContextError after the end, where the context cut the reply off and that is to be an error; MemoryLimitError or DeviceError
        where MLX fails and there is nothing left to try.
        """
        if self._request.left_out is not None:
            yield self._request.left_out
        mx.reset_peak_memory()
        most: int | None = None
        while True:
            try:
                yield from self._attempt(most)
                break
            except FAILURES as error:
                most = self._smaller(error)  # the caches went with the failure, and what they held may not be believed
        if self._cut_off and not self._ended_by_memory and self._runtime.kv.when_full == "error":
            raise ContextError(
                f"the context of {self._runtime.capacity:,} tokens is full, and the reply was cut off",
                f"Start a new chat, or let the oldest go: {_LETS_GO}.",
            )

    def _smaller(self, error: BaseException) -> int:
        """Return how many tokens to compute at once after MLX failed with this: half of what failed.

        Raises the engine's error for it where that is not to be tried: while decoding, or where pieces are small already.
        """
        known = computing_error(error)
        if known is None:
            raise error
        size = 0 if self._run is None or self._decoding else self._run.piece
        if isinstance(known, DeviceError) and self._room is not None and self._room.force_fused:
            self._may_force = False  # MLX says so where this GPU has too few registers for such a kernel
        if size <= LEAST_CHUNK:
            raise known from error
        whole = 1 << (size - 1).bit_length()  # the last piece may be a part of one
        return max(LEAST_CHUNK, whole // 2)

    def _attempt(self, most: int | None) -> Iterator[Event]:
        """Prefill in pieces of ``most`` tokens at most, then decode. most: given after a failure, whose caches are gone."""
        if most is not None:
            self._slot = self._room = self._pieces = self._run = None
            mx.clear_cache()
        slot = self._slot = self._store.acquire(self._request.ids, self._request.keep)
        room = self._room = make_room(
            self._runtime, self._store, slot, len(self._request.ids), most=most, may_force=self._may_force
        )
        if room.squeezed is not None:
            yield room.squeezed
        self._request.recorder.begin_prefill(len(self._request.ids), len(slot.ids))
        runtime = self._runtime
        growth = ReplyGrowth(runtime, self._store, slot)
        run = self._run = Generation(
            runtime.model,
            slot.caches,
            slot.ids,
            ahead=runtime.ahead,
            mark=self._request.recorder.mark,
            force_fused=runtime.shape.device if room.force_fused else None,
            may_grow=growth.fits,
        )
        with slot:
            self._pieces = PrefillChunker(runtime.chunking, room.chunk, len(slot.ids), stopped=self._cancelled)
            yield from self._prefill(run, slot, self._pieces)
            yield from self._decode(run, growth)

    def rest(self) -> None:
        """Give the caches back for others to use, between two events of decoding; the next event takes them again."""
        if self._rested is None and self._slot is not None:
            self._rested = list(self._slot.ids)
            self._rested_bytes = kv.nbytes(self._slot.caches)
            self._rested_peak = max(self._rested_peak, mx.get_peak_memory())
            self._store.suspend(self._slot)

    def _take_again(self, run: Generation) -> Iterator[Event]:
        """Take the caches again after a rest; what had to go meanwhile is computed again."""
        held, slot = self._rested, self._slot
        if held is None or slot is None:
            return
        self._store.resume(slot, held)
        self._rested = None
        mx.reset_peak_memory()
        if missing := held[len(slot.ids) :]:
            room = make_room(self._runtime, self._store, slot, len(held) + 1, may_force=self._may_force)
            if room.squeezed is not None:
                yield room.squeezed
            pieces = PrefillChunker(self._runtime.chunking, room.chunk, len(slot.ids), stopped=self._cancelled)
            for _ in pieces.compute(run, missing):
                if self._cancelled():
                    return
        run.resumed()

    def live(self) -> Live:
        """Return what is known so far. Callable from any thread."""
        recorder = self._request.recorder
        metrics, context = self.metrics(), recorder.context_tokens
        gaps = gaps_ms(recorder.token_times[-LIVE_GAPS - 1 :])
        step = self._runtime.step_cost(context).bytes_per_step
        return Live(metrics, context, gaps, step, achieved_gbs(step, recent_rate(gaps)), self._outliers())

    def metrics(self) -> Metrics:
        """Return the reply's metrics so far."""
        metrics = self._measured()
        return self._measured() if self._runtime.machine.observe(metrics) else metrics

    def _measured(self) -> Metrics:
        recorder = self._request.recorder
        # The cost of the middle step stands for all: the context grows by one token a step.
        context = recorder.prompt_tokens + len(recorder.token_times) // 2
        return recorder.metrics(
            self._runtime.step_cost(context),
            kv_bytes=self._kv_bytes(),
            peak_memory_bytes=max(self._rested_peak, mx.get_peak_memory()) or None,
        )

    def _kv_bytes(self) -> int | None:
        if self._slot is None:
            return None
        return kv.nbytes(self._slot.caches) if self._rested is None else self._rested_bytes

    def _outliers(self) -> tuple[Outlier, ...]:
        return self._request.recorder.outliers(ahead=self._runtime.ahead, throttled=self._throttled.explains_gaps)

    def _predicted_peak(self) -> int | None:
        """Return the peak that was to be expected of the whole prompt and the tokens of this reply; None if it has none."""
        generated = len(self._request.recorder.token_times)
        return self._room.peak_with(generated).total if self._room is not None and generated else None

    def _prefill(self, run: Generation, slot: CacheLease, pieces: PrefillChunker) -> Iterator[Event]:
        ids, cached = self._request.ids, len(run.held)
        yield PrefillProgress(cached, len(ids), cached)
        last = len(ids) - 1  # the last token is the first decode step's
        for stop in (*(each for each in self._request.checkpoints if cached < each < last), last):
            for _ in pieces.compute(run, ids[len(run.held) : stop]):
                self._request.recorder.prefilled = len(run.held) - cached
                if self._cancelled():
                    return
                yield PrefillProgress(len(run.held), len(ids), cached)
            self._store.checkpoint(slot)

    def _decode(self, run: Generation, growth: ReplyGrowth) -> Iterator[Event]:
        request = self._request
        self._decoding = True
        tokenizer, sampling = self._runtime.tokenizer, request.sampling
        text = ReplyText(
            tokenizer,
            sampling.stop,
            in_thinking=request.in_thinking,
            begun=request.begun,
            unstopped=sampling.min_tokens,
        )
        came_from = TokenSources(tokenizer)
        ended_by: tuple[int, Score | None] | None = None
        budget = ThinkingBudget(request.thinking_budget, text, tokenizer, len(tokenizer.encode(request.thought)))
        reason: FinishReason = "cancelled" if self._cancelled() else "length"
        if reason == "length":
            run.force(budget.ending())
            sets = token_sets(tokenizer, sampling)
            sampler = Sampler(sampling, request.ids, sets)
            watch = ProcessWatch(request.recorder.mark, computes=self._runtime.device == "cpu")
            for token in run.decode(request.ids[-1], sampler, self._token_limit()):
                watch.look()
                request.recorder.token()
                self._throttled.look()
                score = sampler.take_score()
                if token in sets.ends:
                    reason, ended_by = "stop", (token, score)
                    break
                came_from.add(token, score)
                yield from watch.handed(came_from.mark(text.add(token)))
                if text.stopped:
                    reason = "stop"
                    break
                run.force(budget.ending())
                if growth.told:
                    yield growth.told.pop()
                if not self._cancelled():
                    yield from self._take_again(run)
                if self._cancelled():
                    reason = "cancelled"
                    break
        self._ended_by_memory = reason == "length" and run.ended_by_memory
        self._cut_off = reason == "length" and request.sampling.max_tokens != len(request.recorder.token_times)
        yield from came_from.mark(text.finish())
        if ended_by is not None:
            came_from.add(*ended_by)
        request.recorder.end()
        self._throttled.look(now=True)
        metrics = self.metrics()
        ids, logprobs = came_from.take()
        self._store.rates.saw_prefill(metrics.prefill_tokens, metrics.prefill_s or 0.0)
        measured = (self._outliers(), self._predicted_peak(), self._diagnosis(metrics))
        yield Finished(
            reason,
            text.answer,
            metrics,
            text.thinking,
            *measured,
            doubts=self._runtime.doubts,
            stopped_by=text.stopped_by if ended_by is None else ended_by[0],
            ids=ids,
            logprobs=logprobs,
            thinking_ended_at=budget.ended_at,
        )

    def _diagnosis(self, metrics: Metrics) -> Diagnosis | None:
        runtime, machine = self._runtime, self._runtime.machine
        chunk = runtime.prefill_chunk if self._pieces is None else self._pieces.largest
        situation = runtime.situation(keeps_prompts=self._store.keeps, chunk=chunk)
        throttled = replace(situation, throttles=self._throttled.seen)
        return diagnose(metrics, runtime.work, machine.chip, machine.pace, throttled)

    def _token_limit(self) -> int | None:
        """Return how many tokens may be written at most; None where nothing bounds them (a rotating cache)."""
        asked = self._request.sampling.max_tokens
        room = self._runtime.room(len(self._request.ids))
        return min((value for value in (asked, room) if value is not None), default=None)


def token_sets(tokenizer: Tokenizer, sampling: Sampling) -> TokenSets:
    """Return which tokens are drawn by rules of their own."""
    ends = tokenizer.eos_ids | set(sampling.stop_token_ids)
    kept = ends | set(tokenizer.encode("\n")) if sampling.xtc_probability else ends
    if not sampling.dry_multiplier:
        return TokenSets(ends, kept)
    return TokenSets(ends, kept, tokenizer.breakers(sampling.dry_sequence_breakers))


def check_room(runtime: Runtime, prompt_tokens: int) -> None:
    """Raise ContextError unless the context has room for the prompt and one token of reply."""
    room = runtime.room(prompt_tokens)
    if room is not None and room < 1:
        lets_go = _LETS_GO if runtime.positions is None else _LETS_THE_MIDDLE_GO
        raise ContextError(
            f"the prompt has {prompt_tokens:,} tokens, but {runtime.what_bounds()} {runtime.longest:,}",
            f"Shorten it, start a new chat, or let some of it go: {lets_go}.",
        )
