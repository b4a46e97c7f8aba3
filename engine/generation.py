"""Prefill: a prompt is computed in chunks; where others wait, by layers or tokens. Knows tokens and caches, not text."""

import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any

import mlx.core as mx

from .chunking import Chunking
from .events import PrefillProgress
from .kv.attention import forcing_fused
from .kv.attention_kernel import AttentionDevice
from .kv.rewind import BeforeChunk
from .metrics import Recorder
from .schedule.policy import Pace


class Generation:
    """One sequence whose prompt is computed: a model, its caches, and the ids that the caches hold.

    Invariant: whenever control returns to the caller, ``cached_ids`` are exactly the tokens in the caches.

    Args:
        model: called with (1, T) ids and the caches.
        caches: one a layer.
        cached_ids: the tokens that the caches hold; extended in place.
        force_fused: write no attention scores down where MLX has a kernel for that on this device; None asks for none.

    Attributes:
        chunk: tokens that are being computed at once.
    """

    def __init__(
        self,
        model: Any,
        caches: list[Any],
        cached_ids: list[int],
        *,
        force_fused: AttentionDevice | None = None,
    ) -> None:
        self._model = model
        self.caches = caches
        self._force_fused = force_fused
        self.chunk = 0
        self.cached_ids = cached_ids

    def prefill(self, ids: list[int], chunk: int) -> Iterator[int]:
        """Compute ``ids`` after the cached ones in chunks; yield after each how many are done. Stop iterating to cancel."""
        done, self.chunk = 0, min(chunk, len(ids))
        while done < len(ids):
            part = ids[done : done + chunk]
            with forcing_fused(self._force_fused):
                self._model(mx.array([part]), cache=self.caches)
            mx.eval(
                [cache.state for cache in self.caches]
            )  # the logits are not asked for, so the head is never computed
            mx.clear_cache()  # a chunk's temporaries are large and of no use to decoding
            self.cached_ids.extend(part)
            done += len(part)
            yield done

    def prefill_in_stages(
        self, ids: list[int], stages: int, stopped: Callable[[], bool]
    ) -> Generator[None, None, bool]:
        """Compute ``ids`` at once, yielding after every few layers; return whether all were computed.

        The result is the same, bit by bit. Where ``stopped`` said so in between, or the generator was closed, all is as it was
        before.
        """
        before, self.chunk = BeforeChunk(self.caches, stages), len(ids)
        with forcing_fused(self._force_fused):
            self._model(mx.array([ids]), cache=self.caches)
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
        """Compute ``ids`` in pieces of ``size``, yielding between them; return whether all were computed.

        For a model whose tokens have the same bits in pieces of any size. What was computed when ``stopped`` said so stays.
        """
        for done in self.prefill(ids, size):
            if done == len(ids):
                break
            yield
            if stopped():
                return False
        return True


UNKNOWN_STAGES = 16
"""Of a chunk while others wait for their tokens and its speed is not known."""

STAGE_S = 1.0
"""Of computing, after which a prefill asks whether to stop."""


class PrefillChunker:
    """Computes prompts in chunks, cut at multiples of the chunk size, counted from the first token (chunking.py).

    Where a chunk takes long, it is computed a few layers at a time, so that a cancellation is heard in between: then what was
    begun of it is dropped. Time decides that alone, never where a prompt is cut; but where a token's bits are the same in a piece
    of any size (``Chunking.piece``), it is cut by time, and what was computed stays.

    Args:
        chunking: how large a chunk is at which depth.
        most: tokens of a chunk at most, a power of two: what there is memory for.
        cached: tokens in the caches at the beginning.
        pace: how soon others may have a turn; None: after whole chunks.

    Attributes:
        largest: tokens of the first chunk, which no later one exceeds.
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
    ) -> None:
        self._chunking, self._most = chunking, most
        self._stopped, self._clock = stopped, clock
        self._pace = pace
        self.largest = self._size(cached)
        self._token_s = chunking.token_s(cached)

    def compute(self, generation: Generation, ids: list[int]) -> Generator[bool, None, None]:
        """Compute ``ids`` after the cached ones; yield True after each chunk, False within one. Close it to cancel."""
        at = 0
        while at < len(ids):
            cached = len(generation.cached_ids)
            size = self._size(cached)
            chunk = ids[at : at + size - cached % size]
            began, aside_s = self._clock(), 0.0
            if (stages := self._stages(len(chunk))) > 1:
                if (piece := self._chunking.piece) is None:
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
        """Return in how many stages to compute a chunk: so that each takes as long as it may, as far as the speed is known."""
        if self._chunking.whole:
            return 1
        within_s = math.inf if self._pace is None else self._pace.within_s
        if self._token_s is None:
            return 1 if within_s >= STAGE_S else UNKNOWN_STAGES
        return math.ceil(tokens * self._token_s / min(STAGE_S, within_s))

    def _size(self, cached: int) -> int:
        return min(self._most, self._chunking.at(cached))


def read_prompt(
    chunker: PrefillChunker,
    generation: Generation,
    ids: list[int],
    recorder: Recorder,
    *,
    total: int,
    cancelled: Callable[[], bool],
) -> Generator[PrefillProgress | None, None, None]:
    """Compute ``ids``, of a prompt of ``total`` tokens, until ``cancelled``; yield progress after each chunk, None within one.

    recorder: has begun the prompt; notes each chunk.
    """
    with closing(chunker.compute(generation, ids)) as chunks:
        for whole in chunks:
            if not whole:
                yield None
                continue
            recorder.computed(len(generation.cached_ids) - recorder.cached_tokens)
            if cancelled():
                return
            yield PrefillProgress(len(generation.cached_ids), total, recorder.cached_tokens)
