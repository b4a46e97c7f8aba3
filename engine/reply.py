"""One reply, from token ids to events: make room, prefill, decode, text. Runs on the MLX thread."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from . import kv
from .errors import FAILURES, ContextError, DeviceError, MemoryLimitError, computing_error
from .events import Finished, FinishReason, Live, PrefillProgress, Truncated
from .generation import Generation, PrefillChunker, read_prompt
from .metrics import Metrics, Outlier, ProcessWatch, Recorder, achieved_gbs, gaps_ms, recent_rate, whole_width
from .options import Sampling
from .passes.cost import cost_of
from .passes.log import PassLog, log_of
from .perf import macos
from .perf.diagnosis import Diagnosis, diagnose
from .perf.macos import ThrottleWatch
from .perf.mitigation import LEAST_CHUNK
from .prompt_cache.memory import CacheLease, CacheStore
from .runtime import Runtime
from .sampling import Sampler, Score, TokenSets
from .schedule.admission import GrowthBudget, PrefillBudget, RoomTakenError, admitted, make_room
from .schedule.decoding import Lane
from .schedule.policy import Pace
from .schedule.schedule import WAITS, ReplyEvents, SharedFailureError
from .speculation.shared import SharedSpeculation
from .text.continuation import PartialReply
from .text.grammar import GrammarConstraint
from .text.stream import ReplyText, ThinkingBudget, TokenSources
from .text.tokenizer import Tokenizer
from .text.tools import CallReader

LIVE_GAPS = 64
_LETS_GO = 'roll or truncate-middle for --on-full (in Python on_full; in the chat "When full" under /settings)'
_LETS_THE_MIDDLE_GO = _LETS_GO.removeprefix("roll or ")


@dataclass(slots=True)
class Request:
    """What is asked: ``ids`` to continue with ``sampling``; ``keep`` tokens are pinned in a rotating cache.

    partial: the reply at the end of ``ids``, where one is continued.
    checkpoints: positions in ``ids`` to which later requests may want to go back, ascending.
    thinking_budget: tokens after which thinking is ended.
    calls: reads the calls of tools in the reply; None where it may call none. background: gives way to others.
    constraint: holds the reply to a form; None where it may be anything.
    """

    ids: list[int]
    sampling: Sampling
    keep: int | None
    in_thinking: bool = False
    partial: PartialReply | None = None
    left_out: Truncated | None = None
    checkpoints: tuple[int, ...] = ()
    recorder: Recorder = field(default_factory=Recorder)
    thinking_budget: int | None = None
    calls: CallReader | None = None
    background: bool = False
    constraint: GrammarConstraint | None = None

    @property
    def earlier_thinking(self) -> str:
        """The thinking so far of a reply that is continued while it thinks."""
        return "" if self.partial is None or not self.in_thinking else self.partial.message.thinking


class ReplyTask:
    """A request being answered. pace: how long a piece of its prompt may take. speculation: of all replies; None drafts nothing."""

    def __init__(
        self,
        runtime: Runtime,
        store: CacheStore,
        request: Request,
        cancelled: Callable[[], bool],
        speculation: SharedSpeculation | None = None,
    ) -> None:
        self._runtime = runtime
        self._speculation = speculation
        self._store = store
        self._request = request
        self._cancelled = cancelled
        self._lease: CacheLease | None = None
        self._budget: PrefillBudget | None = None
        self._chunker: PrefillChunker | None = None
        self._generation: Generation | None = None
        self._may_force = True
        self.pace = Pace()
        self._suspended_ids: list[int] | None = None  # what the caches held when they were released
        self._suspended_bytes = self._earlier_peak = 0
        self._cut_off = self._ended_by_memory = self._decoding = False
        self._throttled = ThrottleWatch(macos.system())

    def events(self) -> ReplyEvents:
        """Prefill, decode and finish. What was computed goes back to the prompt cache, however this ends.

        Where MLX has no memory for a piece of the prompt, the prompt is computed again in pieces of half that size. Raises
        ContextError after the end, where the context cut the reply off and that is to be an error; MemoryLimitError or DeviceError
        where MLX fails and there is nothing left to try.
        """
        self._request.recorder.begin()
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
        size = 0 if self._generation is None or self._decoding else self._generation.chunk
        if isinstance(known, DeviceError) and self._budget is not None and self._budget.force_fused:
            self._may_force = False  # MLX says so where this GPU has too few registers for such a kernel
        if size <= LEAST_CHUNK:
            raise known from error
        whole = 1 << (size - 1).bit_length()  # the last piece may be a part of one
        return max(LEAST_CHUNK, whole // 2)

    def _attempt(self, most: int | None) -> ReplyEvents:
        """Prefill in pieces of ``most`` tokens at most, then decode. most: given after a failure, whose caches are gone."""
        if most is not None:
            self._lease = self._budget = self._chunker = self._generation = None
            mx.clear_cache()
        runtime, ids, keep = self._runtime, self._request.ids, self._request.keep
        found = yield from admitted(
            runtime,
            self._store,
            ids,
            keep,
            len(ids),
            pace=self.pace,
            cancelled=self._cancelled,
            background=self._request.background,
            most=most,
            may_force=self._may_force,
        )
        lease, budget = self._lease, self._budget = found
        with lease:
            self._request.recorder.begin_prefill(len(ids), len(lease.ids))
            force = runtime.shape.device if budget.force_fused else None
            generation = self._generation = Generation(runtime.model, lease.caches, lease.ids, force_fused=force)
            if budget.pressure is not None:
                yield budget.pressure
            self._chunker = self._new_chunker(budget, lease)
            # Nobody waits for what gives way itself.
            lease.coming = () if self._request.background else self._request.ids
            yield from self._request.recorder.reading(self._prefill(generation, lease, self._chunker))
            lease.coming = ()
            yield from self._decode(generation, lease)

    def _new_chunker(self, budget: PrefillBudget, lease: CacheLease) -> PrefillChunker:
        chunking = self._runtime.chunking
        return PrefillChunker(chunking, budget.chunk, len(lease.ids), pace=self.pace, stopped=self._cancelled)

    def rest(self) -> None:
        """Release the caches for others to use, between two events of decoding; the next event acquires them again."""
        if self._suspended_ids is None and self._lease is not None:
            self._suspended_ids = list(self._lease.ids)
            self._suspended_bytes = kv.nbytes(self._lease.caches)
            self._earlier_peak = max(self._earlier_peak, mx.get_peak_memory())
            self._store.suspend(self._lease)

    def drop(self) -> None:
        """Drop the caches: a pass failed. What is thrown into the reply then says whether it goes on, with others."""
        if self._lease is not None:
            self._store.drop(self._lease)

    def _give_way(self, generation: Generation, lane: Lane, growth: GrowthBudget) -> Iterator[Any]:
        """Release the caches, which can't grow beside others, or which one of those needs, until one has left; ask then again."""
        growth.waits = False
        self.rest()
        yield WAITS
        if self._cancelled():
            return
        try:
            yield from self._resume(generation, lane)
        except MemoryLimitError:  # there was room for them, not for computing them again: it ends with what it has
            return
        lane.ended = not lane.goes_on(lane.count)

    def _resume(self, generation: Generation, lane: Lane) -> Iterator[Any]:
        """Acquire the caches again after a rest; what was evicted meanwhile is computed again."""
        cached_ids, lease = self._suspended_ids, self._lease
        if cached_ids is None or lease is None:
            return
        self._store.resume(lease, cached_ids)
        self._suspended_ids = None
        mx.reset_peak_memory()
        yield from self._compute_again(generation, lease, cached_ids)
        lane.resumed()

    def _compute_again(self, generation: Generation, lease: CacheLease, ids: list[int]) -> Iterator[Any]:
        """Read from the disk or compute what a lease lacks of ``ids``, which its caches held before."""
        while True:
            yield from self._store.restore(lease, [*ids, 0], lambda: self.pace.within_s)  # any last id will do
            if not (missing := ids[len(lease.ids) :]):
                return
            try:
                budget = make_room(self._runtime, self._store, lease, len(ids) + 1, may_force=self._may_force)
            except RoomTakenError:
                self._store.start_over(lease, [])  # what waits holds nothing: else two could wait for each other
                yield WAITS
                if self._cancelled():
                    return
                self._store.start_over(lease, ids)
                continue
            if budget.pressure is not None:
                yield budget.pressure
            self._chunker = self._new_chunker(budget, lease)
            with closing(self._chunker.compute(generation, missing)) as chunks:
                for _ in chunks:
                    if self._cancelled():
                        return
                    yield None

    def live(self) -> Live:
        """Return what is known so far. Callable from any thread."""
        recorder = self._request.recorder
        metrics, context = self.metrics(), recorder.context_tokens
        gaps = gaps_ms(recorder.token_times[-LIVE_GAPS - 1 :])
        step = self._runtime.step_cost(context, metrics.replies_at_once).bytes_per_step
        return Live(metrics, context, gaps, step, self._achieved_now(step, gaps, metrics), self._outliers())

    def _achieved_now(self, step: int | None, gaps: Sequence[float], metrics: Metrics) -> float | None:
        """Return the bandwidth of the last gaps; of the whole reply where passes made several tokens."""
        return metrics.achieved_gbs if metrics.accepted_tokens else achieved_gbs(step, recent_rate(gaps))

    def metrics(self) -> Metrics:
        """Return the reply's metrics so far."""
        metrics, machine = self._measured(), self._runtime.machine
        # What others beside it had in their caches is not known: only of a reply alone it is known what its steps read.
        alone = metrics.batch_width is None or metrics.batch_width == 1
        return machine.bounded(self._measured() if alone and machine.observe(metrics) else metrics)

    def _measured(self) -> Metrics:
        recorder = self._request.recorder
        # The cost of the middle step stands for all: the context grows by one token a step.
        context = recorder.prompt_tokens + len(recorder.token_times) // 2
        return recorder.metrics(
            self._runtime.step_cost(context, whole_width(recorder.batch_width)),
            kv_bytes=self._kv_bytes(),
            peak_memory_bytes=max(self._earlier_peak, mx.get_peak_memory()) or None,
        )

    def _kv_bytes(self) -> int | None:
        if self._lease is None:
            return None
        return kv.nbytes(self._lease.caches) if self._suspended_ids is None else self._suspended_bytes

    def _outliers(self) -> tuple[Outlier, ...]:
        return self._request.recorder.outliers(ahead=self._runtime.ahead, throttled=self._throttled.explains_gaps)

    def _predicted_peak(self) -> int | None:
        """Return the peak that was to be expected of the whole prompt and the tokens of this reply; None if it has none."""
        generated = len(self._request.recorder.token_times)
        return self._budget.peak_with(generated).total if self._budget is not None and generated else None

    def _prefill(self, generation: Generation, lease: CacheLease, chunker: PrefillChunker) -> ReplyEvents:
        ids, cached = self._request.ids, len(generation.cached_ids)
        yield PrefillProgress(cached, len(ids), cached)
        if self._cancelled():
            return
        last = len(ids) - 1  # the last token is the first decode step's
        for stop in (*(each for each in self._request.checkpoints if cached < each < last), last):
            missing = ids[len(generation.cached_ids) : stop]
            yield from read_prompt(
                chunker, generation, missing, self._request.recorder, total=len(ids), cancelled=self._cancelled
            )
            if self._cancelled():
                return
            self._store.checkpoint(lease)

    def _decode(self, generation: Generation, lease: CacheLease) -> ReplyEvents:
        request = self._request
        self._decoding = True
        tokenizer, sampling = self._runtime.tokenizer, request.sampling
        text = ReplyText(
            tokenizer,
            sampling.stop,
            in_thinking=request.in_thinking,
            partial=request.partial,
            unstopped=sampling.min_tokens,
            calls=request.calls,
        )
        came_from = TokenSources(tokenizer)
        ended_by: tuple[int, Score | None] | None = None
        thinking = ThinkingBudget(
            request.thinking_budget, text, tokenizer, len(tokenizer.encode(request.earlier_thinking))
        )
        sets, growth = token_sets(tokenizer, sampling), GrowthBudget(self._runtime, self._store, lease)
        lane = self._lane(lease, sets, growth, thinking)
        watch = ProcessWatch(request.recorder.mark, computes=self._runtime.device == "cpu")
        reason: FinishReason = "cancelled" if self._cancelled() else "length"
        lane.ended = reason == "cancelled" or self._token_limit() == 0
        lane.force(thinking.ending())
        while not lane.ended:
            try:
                token = yield lane
            except SharedFailureError:
                forced, made = lane.forced, [*request.ids, *request.recorder.ids]
                self._store.start_over(lease, made[:-1])  # the last is the first step's
                mx.clear_cache()
                yield from self._compute_again(generation, lease, made[:-1])
                lane = self._lane(lease, sets, growth, thinking)
                lane.force(forced)
                token = None
            if self._cancelled():
                reason = "cancelled"
            if token is None:
                if reason == "cancelled":
                    break
                continue
            watch.look()
            request.recorder.token(several=lane.came_with_others)
            request.recorder.ids.append(token)
            self._throttled.look()
            score = lane.sampler.take_score()
            if token in sets.ends:
                reason, ended_by = "stop", (token, score)
                break
            if request.constraint is not None:
                request.constraint.take(token)
            came_from.add(token, score, guessed=lane.guessed)
            yield from watch.handed(came_from.mark(text.add(token)))
            if text.stopped or (request.constraint is not None and request.constraint.is_over):
                reason = "stop"
                break
            lane.force(thinking.ending())
            yield from growth.tell()
            if not self._cancelled():
                yield from self._resume(generation, lane)
            if self.pace.is_in_the_way and not lane.ended:
                yield from self._give_way(generation, lane, growth)
            while lane.ended and growth.waits and not self._cancelled():
                yield from self._give_way(generation, lane, growth)
                yield from growth.tell()
            if self._cancelled():
                reason = "cancelled"
                break
        self._ended_by_memory = reason == "length" and lane.ended_by_memory
        self._cut_off = reason == "length" and request.sampling.max_tokens != len(request.recorder.token_times)
        yield from came_from.mark(text.finish())
        if reason == "stop" and any(not call.problem for call in text.calls):
            reason = "tool_calls"
        if ended_by is not None:
            came_from.add(*ended_by)
        stopped_by = text.stopped_by if ended_by is None else ended_by[0]
        yield self._finished(reason, text, came_from, stopped_by=stopped_by, thinking_ended_at=thinking.ended_at)

    def _finished(
        self,
        reason: FinishReason,
        text: ReplyText,
        came_from: TokenSources,
        *,
        stopped_by: int | str | None,
        thinking_ended_at: int | None,
    ) -> Finished:
        """Return the last event, once the last token came: what was said, and what was measured of it."""
        request = self._request
        request.recorder.end()
        if self._speculation is not None and not request.background:
            self._speculation.ended([*request.ids, *request.recorder.ids])
        self._throttled.look(now=True)
        metrics = self.metrics()
        self._runtime.machine.keep()
        ids, logprobs = came_from.take()
        self._store.rates.saw_prefill(metrics.prefill_tokens, metrics.prefill_s or 0.0)
        return Finished(
            reason,
            text.answer,
            metrics,
            text.thinking,
            self._outliers(),
            self._predicted_peak(),
            self._diagnosis(metrics),
            doubts=self._runtime.doubts,
            stopped_by=stopped_by,
            ids=ids,
            logprobs=logprobs,
            thinking_ended_at=thinking_ended_at,
            tool_calls=tuple(text.calls),
            passes=self._passes(),
        )

    def _lane(self, lease: CacheLease, sets: TokenSets, growth: GrowthBudget, thinking: ThinkingBudget) -> Lane:
        """Return the lane of the tokens that are still to come, in the lease's caches."""
        request, limit = self._request, self._token_limit()
        made, speculator = request.recorder.ids, None
        sampler = Sampler(request.sampling, request.ids, sets, made)
        if self._speculation is not None:
            speculator = self._speculation.begin(
                self._runtime, request.ids, made, sampler, background=request.background
            )
        lane = Lane(
            lease.caches,
            lease.ids,
            (made or request.ids)[-1],
            sampler,
            None if limit is None else limit - len(made),
            note=request.recorder.mark,
            may_grow=growth.fits,
            launched=request.recorder.launched,
            speculator=speculator,
            unforced=lambda: thinking.unforced,
            constraint=request.constraint,
        )
        if lane.speculator is not None:
            request.recorder.speculated.append(lane.speculator.done)
        return lane

    def _diagnosis(self, metrics: Metrics) -> Diagnosis | None:
        runtime, machine = self._runtime, self._runtime.machine
        chunk = runtime.prefill_chunk if self._chunker is None else self._chunker.largest
        situation = runtime.situation(keeps_prompts=self._store.keeps, chunk=chunk)
        throttled = replace(situation, throttles=self._throttled.seen)
        return diagnose(metrics, runtime.work, machine.chip, machine.latency, throttled)

    def _passes(self) -> PassLog | None:
        runtime = self._runtime
        cost, throttled = cost_of(runtime.work, runtime.machine.chip), self._throttled.explains_gaps
        return log_of(self._request.recorder, cost, ahead=runtime.ahead, throttled=throttled)

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


def check_context(runtime: Runtime, prompt_tokens: int) -> None:
    """Raise ContextError unless the context has room for the prompt and one token of reply."""
    room = runtime.room(prompt_tokens)
    if room is not None and room < 1:
        lets_go = _LETS_GO if runtime.positions is None else _LETS_THE_MIDDLE_GO
        raise ContextError(
            f"the prompt has {prompt_tokens:,} tokens, but {runtime.what_bounds()} {runtime.longest:,}",
            f"Shorten it, start a new chat, or let some of it go: {lets_go}.",
        )
