"""One reply, from token ids to events: prefix, prefill, decode, text. Runs on the engine's thread."""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace

import mlx.core as mx

from tokamac.engine import kv
from tokamac.engine.compute_errors import FAILURES, computing_error
from tokamac.engine.continuation import Begun
from tokamac.engine.errors import ContextError, DeviceError
from tokamac.engine.events import Event, Finished, FinishReason, Live, PrefillProgress, Truncated
from tokamac.engine.generation import Run
from tokamac.engine.limits import macos
from tokamac.engine.limits.diagnosis import Diagnosis, diagnose
from tokamac.engine.limits.gaps import Outlier
from tokamac.engine.limits.ladder import LEAST_CHUNK
from tokamac.engine.limits.metrics import Metrics, achieved_gbs, gaps_ms, recent_rate
from tokamac.engine.limits.process import ProcessWatch
from tokamac.engine.limits.thermal import ThrottleWatch
from tokamac.engine.options import Sampling
from tokamac.engine.pieces import Pieces
from tokamac.engine.prompt_cache.kept import Slot
from tokamac.engine.prompt_cache.seam import Store
from tokamac.engine.recorder import Recorder
from tokamac.engine.runtime import Runtime
from tokamac.engine.sampling import Sampler, Score, TokenSets
from tokamac.engine.squeeze import ReplyGrowth, Room, make_room
from tokamac.engine.stream import Provenance, ReplyText
from tokamac.engine.tokens import Tokenizer

LIVE_GAPS = 64
_LETS_GO = 'roll or truncate-middle for --on-full (in Python on_full; in the chat "When full" under /settings)'
_LETS_THE_MIDDLE_GO = _LETS_GO.removeprefix("roll or ")


@dataclass(slots=True)
class Request:
    """What is asked: ``ids`` to continue with ``sampling``; ``keep`` tokens are pinned in a rotating cache.

    begun: the reply at the end of ``ids``, where one is continued.
    marks: positions in ``ids`` to which later requests may want to go back, ascending.
    """

    ids: list[int]
    sampling: Sampling
    keep: int | None
    in_thinking: bool = False
    begun: Begun | None = None
    left_out: Truncated | None = None
    marks: tuple[int, ...] = ()
    recorder: Recorder = field(default_factory=Recorder)


class Reply:
    """A request being answered."""

    def __init__(self, runtime: Runtime, store: Store, request: Request, cancelled: Callable[[], bool]) -> None:
        self._runtime = runtime
        self._store = store
        self._request = request
        self._cancelled = cancelled
        self._slot: Slot | None = None
        self._room: Room | None = None
        self._pieces: Pieces | None = None
        self._run: Run | None = None
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
        slot = self._slot = self._store.take(self._request.ids, self._request.keep)
        room = self._room = make_room(
            self._runtime, self._store, slot, len(self._request.ids), most=most, may_force=self._may_force
        )
        if room.squeezed is not None:
            yield room.squeezed
        self._request.recorder.begin_prefill(len(self._request.ids), len(slot.ids))
        runtime = self._runtime
        growth = ReplyGrowth(runtime, self._store, slot)
        run = self._run = Run(
            runtime.model,
            slot.caches,
            slot.ids,
            ahead=runtime.ahead,
            mark=self._request.recorder.mark,
            force_fused=runtime.shape.device if room.force_fused else None,
            may_grow=growth.fits,
        )
        with self._store.lending(slot):
            self._pieces = Pieces(runtime.chunking, room.chunk, len(slot.ids), stopped=self._cancelled)
            yield from self._prefill(run, slot, self._pieces)
            yield from self._decode(run, growth)

    def rest(self) -> None:
        """Give the caches back for others to use, between two events of decoding; the next event takes them again."""
        if self._rested is None and self._slot is not None:
            self._rested = list(self._slot.ids)
            self._rested_bytes = kv.nbytes(self._slot.caches)
            self._rested_peak = max(self._rested_peak, mx.get_peak_memory())
            self._store.rest(self._slot)

    def _take_again(self, run: Run) -> Iterator[Event]:
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
            pieces = Pieces(self._runtime.chunking, room.chunk, len(slot.ids), stopped=self._cancelled)
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

    def _prefill(self, run: Run, slot: Slot, pieces: Pieces) -> Iterator[Event]:
        ids, cached = self._request.ids, len(run.held)
        yield PrefillProgress(cached, len(ids), cached)
        last = len(ids) - 1  # the last token is the first decode step's
        for stop in (*(mark for mark in self._request.marks if cached < mark < last), last):
            for _ in pieces.compute(run, ids[len(run.held) : stop]):
                self._request.recorder.prefilled = len(run.held) - cached
                if self._cancelled():
                    return
                yield PrefillProgress(len(run.held), len(ids), cached)
            self._store.mark(slot)

    def _decode(self, run: Run, growth: ReplyGrowth) -> Iterator[Event]:
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
        came_from = Provenance(tokenizer)
        ended_by: tuple[int, Score | None] | None = None
        reason: FinishReason = "cancelled" if self._cancelled() else "length"
        if reason == "length":
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
