"""Prefill in chunks; where others wait, split by layers or tokens. Handles tokens and caches, not text."""

import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .chunking import SHALLOW, Chunking
from .events import PrefillProgress
from .kv.attention import forcing_fused
from .kv.costs import AttentionDevice
from .kv.snapshot import BeforeChunk
from .metrics import Recorder
from .schedule.schedule import Pace

if TYPE_CHECKING:
    from .vision.eyes import Sight


class Generation:
    """One sequence in prefill: a model, its caches, and the ids they hold.

    Invariant: whenever control returns to the caller, ``cached_ids`` are exactly the tokens in the caches.

    Args:
        model: Called with (1, T) ids and the caches.
        caches: One per layer.
        cached_ids: Extended in place.
        force_fused: Use a fused attention kernel wherever MLX has one for this device; None: MLX decides.
    """

    def __init__(
        self,
        model: Any,
        caches: list[Any],
        cached_ids: list[int],
        *,
        force_fused: AttentionDevice | None = None,
        sight: "Sight | None" = None,
    ) -> None:
        self._model, self._sight = model, sight
        self.caches = caches
        self._force_fused = force_fused
        self.chunk = 0
        self.cached_ids = cached_ids
        self.image_s, self.tower_operations = 0.0, 0

    def prefill(self, ids: list[int], chunk: int) -> Iterator[int]:
        """Compute ``ids`` after the cached ones in chunks; yield the count done. Stop iterating to cancel."""
        done, self.chunk = 0, min(chunk, len(ids))
        while done < len(ids):
            part = ids[done : done + chunk]
            self._call(part)
            mx.eval(
                [cache.state for cache in self.caches]
            )  # the logits are not asked for, so the head is never computed
            mx.clear_cache()  # a chunk's temporaries are large and of no use to decoding
            self.cached_ids.extend(part)
            done += len(part)
            yield done

    def see(self, tokens: int) -> Iterator[None]:
        """Encode the pictures among the next ``tokens``; yield after each."""
        if (sight := self._sight) is None:
            return
        begin = len(self.cached_ids)
        for picture in sight.unseen(begin, begin + tokens):
            began_s = time.perf_counter()
            sight.eyes.features(picture)
            self.image_s += time.perf_counter() - began_s
            self.tower_operations += sight.eyes.cost(picture.plan).operations
            yield

    def _call(self, part: list[int]) -> None:
        with forcing_fused(self._force_fused):
            if self._sight is None:
                self._model(mx.array([part]), cache=self.caches)
            else:
                self._sight.call(self._model, part, self.caches, len(self.cached_ids))

    def prefill_in_stages(
        self, ids: list[int], stages: int, stopped: Callable[[], bool]
    ) -> Generator[None, None, bool]:
        """Compute ``ids`` in one chunk, yielding every few layers; return whether it completed."""
        # Bit-identical to one call. If stopped or closed in between, the caches are as before.
        before, self.chunk = BeforeChunk(self.caches, stages), len(ids)
        self._call(ids)
        for number, part in enumerate(before.parts):
            if number:
                try:
                    yield
                except GeneratorExit:  # the prompt cache takes the caches back as they then are
                    before.take_back(len(ids))
                    raise
                if stopped():
                    before.take_back(len(ids))
                    return False
            before.computes(part)
            mx.eval([cache.state for cache in part])
        mx.clear_cache()
        self.cached_ids.extend(ids)
        return True

    def prefill_in_pieces(self, ids: list[int], size: int, stopped: Callable[[], bool]) -> Generator[None, None, bool]:
        """Compute ``ids`` in pieces of ``size``, yielding between them; return whether all were computed."""
        # For models whose bits don't depend on the piece size; the pieces computed before a stop stay.
        for done in self.prefill(ids, size):
            if done == len(ids):
                break
            yield
            if stopped():
                return False
        return True


UNKNOWN_STAGES = 16  # of a chunk while others wait for their tokens and its speed is not known

STAGE_S = 1.0  # of computing, after which a prefill asks whether to stop


class PrefillChunker:
    """Prefills prompts in chunks cut at multiples of the chunk size, counted from the first token below.

    A slow chunk is computed a few layers at a time, so that it can be cancelled; its partial work is dropped.
    Time never decides where a prompt is cut, except where the bits don't depend on piece size
    (``Chunking.piece``).

    Args:
        most: Tokens per chunk at most, a power of two that fits memory.
        cached: Tokens in the caches at the beginning.
        pace: How soon others get a turn; None: after whole chunks.
    """

    def __init__(
        self,
        chunking: Chunking,
        most: int,
        cached: int,
        *,
        pace: Pace | None = None,
        stopped: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
        sight: "Sight | None" = None,
    ) -> None:
        self._sight = sight
        self._chunking, self._most = chunking, most
        self._stopped, self._clock = stopped, clock
        self._pace = pace
        self.largest = self._size(cached)
        self._token_s = chunking.first_token_s if cached < SHALLOW else chunking.token_s(cached)

    def compute(self, generation: Generation, ids: list[int]) -> Generator[bool, None, None]:
        """Compute ``ids``; yield True after each chunk, False within one. Close it to cancel."""
        at = 0
        while at < len(ids):
            cached = len(generation.cached_ids)
            size, sight = self._size(cached), self._sight
            end = at + size - cached % size
            chunk = ids[at : end if sight is None else sight.end_of_part(cached, cached + end - at) - cached + at]
            for _ in generation.see(len(chunk)):
                yield False
                if self._stopped():
                    yield True
                    return
            began, aside_s = self._clock(), 0.0
            if (stages := self._stages(len(chunk))) > 1:
                if (piece := self._chunking.piece) is None or (sight is not None and sight.whole):
                    computing = generation.prefill_in_stages(chunk, stages, self._stopped)
                else:
                    rounded = math.ceil(len(chunk) / (stages * piece)) * piece
                    computing = generation.prefill_in_pieces(chunk, rounded, self._stopped)
                with closing(computing):
                    while True:
                        try:
                            next(computing)
                        except StopIteration as end:
                            whole = bool(end.value)
                            break
                        left = self._clock()
                        yield False
                        aside_s += self._clock() - left
            else:
                whole = all(generation.prefill(chunk, len(chunk)))
            if whole:
                self._token_s = (self._clock() - began - aside_s) / len(chunk)
                at += len(chunk)
            yield True
            if not whole:
                return

    def _stages(self, tokens: int) -> int:
        if self._chunking.whole:
            return 1
        within_s = math.inf if self._pace is None else self._pace.within_s
        if self._token_s is None:
            return 1 if within_s >= STAGE_S else UNKNOWN_STAGES
        return math.ceil(tokens * self._token_s / min(STAGE_S, within_s))

    def _size(self, cached: int) -> int:
        return min(self._most, self._chunking.first if cached < SHALLOW else self._chunking.tokens_at(cached))


def read_prompt(
    chunker: PrefillChunker,
    generation: Generation,
    ids: list[int],
    recorder: Recorder,
    *,
    total: int,
    cancelled: Callable[[], bool],
) -> Generator[PrefillProgress | None, None, None]:
    """Prefill ``ids`` until ``cancelled``; yield progress after each chunk, None within one."""
    with closing(chunker.compute(generation, ids)) as chunks:
        for whole in chunks:
            recorder.image_s = generation.image_s
            if not whole:
                yield None
                continue
            recorder.computed(len(generation.cached_ids) - recorder.cached_tokens)
            if cancelled():
                return
            yield PrefillProgress(len(generation.cached_ids), total, recorder.cached_tokens)
