"""One reply, from token ids to events: admission, prefill, decode, text. Runs on the MLX thread."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .errors import FAILURES, ContextError, DeviceError, MemoryLimitError, computing_error
from .events import (
    CacheUse,
    CutBy,
    Event,
    Finished,
    FinishReason,
    Live,
    Message,
    PartialReply,
    PrefillProgress,
    Truncated,
)
from .generation import Generation, PrefillChunker, read_prompt
from .kv.cache import nbytes as kv_bytes
from .lab.passes import PassLog, cost_of, log_of
from .metrics import Metrics, Outlier, ProcessWatch, Recorder, Slowing, achieved_gbs, gaps_ms, recent_rate, whole_width
from .options import Sampling, ToolSpec
from .perf import hardware
from .perf.diagnosis import Diagnosis, diagnose
from .perf.footprint import LEAST_CHUNK
from .perf.hardware import UNTOLD, ThrottleWatch
from .prompt_cache.memory import CacheLease, CacheStore
from .prompt_cache.misses import ReadPrompt, explain, remember
from .runtime import Runtime
from .sampling import Sampler, Score, TokenSets
from .schedule.admission import GrowthBudget, PrefillBudget, RoomTakenError, admitted, make_room
from .schedule.decoding import Lane
from .schedule.schedule import WAITS, Pace, ReplyEvents, SharedFailureError
from .speculation.speculator import SharedSpeculation
from .text.calls import CallReader
from .text.grammar import GrammarConstraint
from .text.stream import LoopWatch, ReplyText, ThinkingBudget
from .text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from .vision.eyes import Sight

LIVE_GAPS = 64
NEXT_TURN, MOST_NEXT_TURN = 512, 4096  # tokens kept free: a question and an answer; enough for a file of code
_LETS_GO = 'roll or truncate-middle for --on-full (in Python on_full; in the chat "When full" under /settings)'
_LETS_THE_MIDDLE_GO = _LETS_GO.removeprefix("roll or ")


@dataclass(slots=True)
class Request:
    """A request to continue ``ids``; ``keep`` tokens are pinned in a rotating cache.

    checkpoints: ascending positions that later requests may branch from. thinking_budget: tokens.
    own_caches: makes private caches of other KV bits. messages, tools: what was rendered, none for token ids.
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
    own_caches: Callable[[int | None], list[Any]] | None = None
    messages: Sequence[Message] = ()
    tools: tuple[ToolSpec, ...] = ()
    sight: "Sight | None" = None

    @property
    def words(self) -> list[int]:
        """``ids`` without pictures."""
        return self.ids if self.sight is None else [each for each in self.ids if each >= 0]

    @property
    def earlier_thinking(self) -> str:
        return "" if self.partial is None or not self.in_thinking else self.partial.message.thinking


Watches = tuple[ProcessWatch, ThrottleWatch | None]  # of the process, and of the chip where a system tells how it is


class Writing:
    """Turns a reply's tokens into events."""

    def __init__(  # noqa: PLR0917
        self,
        request: Request,
        lane: Lane,
        text: ReplyText,
        thinking: ThinkingBudget,
        growth: GrowthBudget,
        ends: frozenset[int],
        watches: Watches,
        loops: LoopWatch | None,
    ) -> None:
        self.lane: Lane = lane
        self.reason: FinishReason | None = None
        self.ended_by: tuple[int, Score | None] | None = None
        self._recorder, self._constraint = request.recorder, request.constraint
        self._text, self._ends, self._growth = text, ends, growth
        self._thinking = None if request.thinking_budget is None else thinking
        self._scored = request.sampling.logprobs is not None
        self._watch, self._throttled = watches
        self._loops = loops

    def feed(self, token: int, put: Callable[[Event], None]) -> bool:
        recorder, lane = self._recorder, self.lane
        self._watch.look()
        recorder.token_times.append(recorder.clock())
        if lane.came_with_others:
            recorder.several.add(len(recorder.token_times))
        recorder.ids.append(token)
        if self._throttled is not None:
            self._throttled.look()
        score = lane.sampler.take_score() if self._scored else None
        if token in self._ends:
            self.reason, self.ended_by = "stop", (token, score)
            return True
        if self._constraint is not None:
            self._constraint.accept(token)
        if parts := self._text.add(token, score, guessed=lane.guessed):
            began_s = recorder.clock()
            for part in parts:
                put(part)
            self._watch.waited_s += recorder.clock() - began_s
        if self._text.stopped or (self._constraint is not None and self._constraint.is_over):
            self.reason = "stop"
            return True
        if self._loops is not None:
            if (loop := self._loops.add(token)) is not None:
                put(loop)
            if self._loops.ends_reply:
                self.reason = "loop"
                return True
        if self._thinking is not None:
            lane.force(self._thinking.ending())
        return lane.ended or bool(self._growth.pressure)

    def waited(self, seconds: float) -> None:
        self._watch.waited_s += seconds


class ReplyTask:
    """A request being answered. speculation: shared by all replies; None drafts nothing."""

    def __init__(
        self,
        runtime: Runtime,
        store: CacheStore,
        request: Request,
        cancelled: Callable[[], bool],
        speculation: SharedSpeculation | None = None,
        *,
        keeps_going: Callable[[], bool] = lambda: False,
    ) -> None:
        self._runtime = runtime
        self._speculation = speculation
        self._keeps_going = keeps_going
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
        self._decoding = False
        self._cut_by: CutBy | None = None
        self._throttled = UNTOLD if (mac := hardware.system()) is None else ThrottleWatch(mac)
        self._writing: Writing | None = None
        self._rested_s: float | None = None
        self._guesses_later = False
        self._earlier: tuple[ReadPrompt, ...] = ()  # read when this one began

    def events(self) -> ReplyEvents:
        """Prefill, decode and finish; computed prefixes always go back to the prompt cache.

        Raises ContextError at the end where the context cut the reply and that is an error, MemoryLimitError or
        DeviceError where MLX fails and nothing is left to try.
        """
        # Out of memory in prefill: retried in pieces of half the size.
        self._request.recorder.begin()
        self._earlier = tuple(self._store.recent)
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
        if self._cut_by == "context" and self._runtime.kv.when_full == "error":
            raise ContextError(
                f"the context of {self._runtime.capacity:,} tokens is full, and the reply was cut off",
                f"Start a new chat, or let the oldest go: {_LETS_GO}.",
            )

    def _smaller(self, error: BaseException) -> int:
        """Return half the failed prefill chunk; raises the engine's error while decoding or if it is small."""
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
            own=self._request.own_caches,
            sight=self._request.sight,
        )
        lease, budget = self._lease, self._budget = found
        with lease:
            self._request.recorder.begin_prefill(len(ids), len(lease.ids))
            force = runtime.shape.device if budget.force_fused else None
            generation = self._generation = Generation(
                runtime.model, lease.caches, lease.ids, force_fused=force, sight=self._request.sight
            )
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
        return PrefillChunker(
            chunking,
            budget.chunk,
            len(lease.ids),
            pace=self.pace,
            stopped=self._cancelled,
            sight=self._request.sight,
        )

    def rest(self) -> None:
        if self._suspended_ids is None and self._lease is not None:
            self._suspended_ids = list(self._lease.ids)
            self._suspended_bytes = kv_bytes(self._lease.caches)
            self._earlier_peak = max(self._earlier_peak, mx.get_peak_memory())
            self._store.suspend(self._lease)
            self._rested_s = self._request.recorder.clock()

    def drop(self) -> None:
        """Drop the caches after a failed pass; the exception thrown in next decides how it goes on."""
        if self._lease is not None:
            self._store.drop(self._lease)

    def _give_way(self, generation: Generation, lane: Lane, growth: GrowthBudget) -> Iterator[Any]:
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
        cached_ids, lease = self._suspended_ids, self._lease
        if cached_ids is None or lease is None:
            return
        if self._writing is not None and self._rested_s is not None:
            self._writing.waited(self._request.recorder.clock() - self._rested_s)
        self._store.resume(lease, cached_ids)
        self._suspended_ids = None
        mx.reset_peak_memory()
        yield from self._compute_again(generation, lease, cached_ids)
        lane.resumed()

    def _compute_again(self, generation: Generation, lease: CacheLease, ids: list[int]) -> Iterator[Any]:
        while True:
            yield from self._store.restore(lease, [*ids, 0], lambda: self.pace.within_s)  # any last id will do
            if not (missing := ids[len(lease.ids) :]):
                return
            try:
                budget = make_room(
                    self._runtime,
                    self._store,
                    lease,
                    len(ids) + 1,
                    may_force=self._may_force,
                    sight=self._request.sight,
                )
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
        recorder = self._request.recorder
        metrics, context = self.metrics(), recorder.context_tokens
        gaps = gaps_ms(recorder.token_times[-LIVE_GAPS - 1 :])
        step = self._runtime.step_cost(context, metrics.replies_at_once).bytes_per_step
        now_tps = recent_rate(list(recorder.token_times))
        # Of the whole reply where passes made several tokens.
        achieved = metrics.achieved_gbs if metrics.accepted_tokens else achieved_gbs(step, now_tps)
        return Live(metrics, context, gaps, step, achieved, self._outliers(), now_tps)

    def metrics(self) -> Metrics:
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
            kv_bytes=self._held_bytes(),
            peak_memory_bytes=max(self._earlier_peak, mx.get_peak_memory()) or None,
        )

    def _held_bytes(self) -> int | None:
        if self._lease is None:
            return None
        return kv_bytes(self._lease.caches) if self._suspended_ids is None else self._suspended_bytes

    def _outliers(self) -> tuple[Outlier, ...]:
        return self._request.recorder.outliers(ahead=self._runtime.ahead, throttled=self._throttled.explains_gaps)

    def _predicted_peak(self) -> int | None:
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
        thinking = ThinkingBudget(
            request.thinking_budget, text, tokenizer, len(tokenizer.encode(request.earlier_thinking))
        )
        sets, growth = token_sets(tokenizer, sampling), GrowthBudget(self._runtime, self._store, lease)
        loops = None
        if sampling.loop_check:
            loops = LoopWatch(grace=sampling.loop_grace, least=sampling.min_tokens, keeps_going=self._keeps_going)
        lane = self._lane(lease, sets, growth, thinking)
        writing = self._writing = Writing(request, lane, text, thinking, growth, sets.ends, self._watches(), loops)
        lane.ended = self._cancelled() or self._token_limit() == 0
        lane.force(thinking.ending())
        while not lane.ended and not self._cancelled():
            try:
                yield lane
            except SharedFailureError:
                forced, made = lane.forced, [*request.ids, *request.recorder.ids]
                self._store.start_over(lease, made[:-1])  # the last is the first step's
                mx.clear_cache()
                yield from self._compute_again(generation, lease, made[:-1])
                lane = writing.lane = self._lane(lease, sets, growth, thinking)
                lane.force(forced)
            if writing.reason is not None or self._cancelled():
                break
            if self._guesses_later:
                self._guess(lane)
            yield from growth.tell()
            yield from self._resume(generation, lane)
            if self.pace.is_in_the_way and not lane.ended:
                yield from self._give_way(generation, lane, growth)
            while lane.ended and growth.waits and not self._cancelled():
                yield from self._give_way(generation, lane, growth)
                yield from growth.tell()
        reason = writing.reason or ("cancelled" if self._cancelled() else "length")
        if reason == "length":
            whole = request.sampling.max_tokens == len(request.recorder.token_times)
            self._cut_by = "memory" if lane.ended_by_memory else "max_tokens" if whole else "context"
        yield from text.finish(cut=reason != "stop")
        if reason == "stop" and any(not call.problem for call in text.calls):
            reason = "tool_calls"
        if writing.ended_by is not None:
            text.add_last(*writing.ended_by)
        stopped_by = text.stopped_by if writing.ended_by is None else writing.ended_by[0]
        yield self._finished(reason, text, stopped_by=stopped_by, thinking_ended_at=thinking.ended_at)

    def feed(self, token: int, put: Callable[[Event], None]) -> bool:
        assert self._writing is not None
        return self._writing.feed(token, put) or self._guesses_later or self.pace.is_in_the_way

    def _watches(self) -> Watches:
        watch = ProcessWatch(self._request.recorder.mark, computes=self._runtime.device == "cpu")
        return watch, None if self._throttled is UNTOLD else self._throttled

    def _finished(
        self,
        reason: FinishReason,
        text: ReplyText,
        *,
        stopped_by: int | str | None,
        thinking_ended_at: int | None,
    ) -> Finished:
        request = self._request
        request.recorder.end()
        if self._speculation is not None and not request.background:
            self._speculation.ended([*request.words, *request.recorder.ids])
        self._throttled.look(now=True)
        metrics = self.metrics()
        self._runtime.machine.keep()
        ids, logprobs = text.take_tokens()
        if request.own_caches is None:
            self._store.rates.observe_prefill(metrics.prefill_tokens, metrics.prefill_s or 0.0)
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
            cut_by=self._cut_by,
            cache=self._cache_use(metrics, thought=bool(text.thinking)),
        )

    def _cache_use(self, metrics: Metrics, *, thought: bool) -> CacheUse | None:
        request, lease = self._request, self._lease
        if request.background or lease is None:
            return None
        if not self._store.keeps or request.own_caches is not None:
            return CacheUse("off" if request.own_caches is None else "settings")
        ids = lease.ids if self._suspended_ids is None else self._suspended_ids
        read = ReadPrompt.of(request, ids, thought=thought)
        remember(self._store.recent, read)
        return explain(request, metrics, self._earlier, self._store, self._runtime.tokenizer)

    def _lane(self, lease: CacheLease, sets: TokenSets, growth: GrowthBudget, thinking: ThinkingBudget) -> Lane:
        request, limit = self._request, self._token_limit()
        made = request.recorder.ids
        sampler = Sampler(request.sampling, request.words, sets, made)
        lane = Lane(
            lease.caches,
            lease.ids,
            (made or request.ids)[-1],
            sampler,
            None if limit is None else limit - len(made),
            note=request.recorder.mark,
            may_grow=growth.fits,
            counts=request.recorder,
            shift=0 if request.sight is None else request.sight.shift,
            unforced=lambda: thinking.unforced,
            constraint=request.constraint,
        )
        # What looks for repeats needs no pass: it begins once the first token was handed over.
        self._guesses_later = self._speculation is not None and not self._speculation.computes and not made
        if not self._guesses_later:
            self._guess(lane)
        return lane

    def _guess(self, lane: Lane) -> None:
        self._guesses_later = False
        if self._speculation is None:
            return
        request = self._request
        speculator = self._speculation.begin(
            self._runtime, request.words, request.recorder.ids, lane.sampler, background=request.background
        )
        if speculator is not None:
            lane.speculate(speculator)
        if lane.speculator is not None:
            request.recorder.speculated.append(lane.speculator.done)

    def _diagnosis(self, metrics: Metrics) -> Diagnosis | None:
        runtime, machine = self._runtime, self._runtime.machine
        chunk = runtime.prefill_chunk if self._chunker is None else self._chunker.largest
        situation = runtime.situation(keeps_prompts=self._store.keeps, chunk=chunk)
        own: tuple[Slowing, ...] = ("pace",) if self.pace.rests else ()
        operations = 0 if self._generation is None else self._generation.tower_operations
        throttled = replace(situation, throttles=(*self._throttled.seen, *own), tower_operations=operations)
        return diagnose(metrics, runtime.work, machine.chip, machine.latency, throttled)

    def _passes(self) -> PassLog | None:
        runtime = self._runtime
        cost, throttled = cost_of(runtime.work, runtime.machine.chip), self._throttled.explains_gaps
        return log_of(self._request.recorder, cost, ahead=runtime.ahead, throttled=throttled)

    def _token_limit(self) -> int | None:
        """Return the most tokens to write; None for a rotating cache."""
        # Without a user limit, room for the next turn is kept.
        asked, prompt = self._request.sampling.max_tokens, len(self._request.ids)
        room = self._runtime.room(prompt)
        if asked is None:
            return None if room is None else room_of_reply(room, prompt + room)
        return asked if room is None else min(asked, room)


def room_of_reply(room: int, context: int) -> int:
    kept = min(max(NEXT_TURN, context // 8), MOST_NEXT_TURN, context // 2)
    return max(room - kept, (room + 1) // 2)


def token_sets(tokenizer: Tokenizer, sampling: Sampling) -> TokenSets:
    ends = tokenizer.eos_ids | set(sampling.stop_token_ids)
    kept = ends | set(tokenizer.encode("\n")) if sampling.xtc_probability else ends
    if not sampling.dry_multiplier:
        return TokenSets(ends, kept)
    return TokenSets(ends, kept, tokenizer.breakers(sampling.dry_sequence_breakers))


def check_context(runtime: Runtime, prompt_tokens: int, at_least: str = "") -> None:
    """Raise ContextError for a prompt that leaves no room. at_least: words before a number that is a lower bound."""
    room = runtime.room(prompt_tokens)
    if room is not None and room < 1:
        lets_go = _LETS_GO if runtime.positions is None else _LETS_THE_MIDDLE_GO
        raise ContextError(
            f"the prompt has {at_least}{prompt_tokens:,} tokens, but {runtime.what_bounds()} {runtime.longest:,}",
            f"Shorten it, start a new chat, or let some of it go: {lets_go}.",
        )
