"""Caches of the engine's and of mlx-lm's, on the same loaded model, measured on the engine's thread."""

import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from tests.benchmarks.servers import EngineServer, decode_times
from tokamac.engine.options import KVSpec

T = TypeVar("T")
Side = Literal["engine", "mlx-lm"]
Bits = tuple[int, int]
PLAIN: Bits = (16, 16)
GROUP = 64
FILL_TOKENS = 2048
PEER_CHUNK = 2048
"""What mlx-lm prefills at once unless told otherwise."""


class KVLab:
    """A loaded model, and caches filled with random keys and values: how fast a step is does not depend on what they are."""

    def __init__(self, model: str) -> None:
        self._server = EngineServer(model)
        self._run(self._look)
        self._kept: dict[tuple[Side, Bits], list[Any]] = {}

    def prompt(self, length: int, number: int) -> list[int]:
        """Return token ids of prose."""
        return self._server.prompt(length, number)

    def close(self) -> None:
        """Free everything."""
        self._kept.clear()
        self._server.close()

    def token_bytes(self, bits: Bits) -> int:
        """Return the bytes of arrays that 256 tokens of one layer take, in a model whose own type has 16 bits."""
        return self._run(lambda: self._token_bytes(bits))

    def reported_and_held(self, bits: Bits, depth: int) -> tuple[int, int]:
        """Return the bytes that caches of this depth report, and by how many bytes MLX's active memory grew with them."""
        return self._run(lambda: self._reported_and_held(bits, depth))

    def append_us(self, bits: Bits, depth: int, count: int) -> float:
        """Return the microseconds that one of ``count`` appends to one layer's cache takes, from this depth on."""
        return self._run(lambda: self._append_us(bits, depth, count))

    def decode_tps(self, side: Side, bits: Bits, depth: int, new: int) -> float:
        """Return the decode rate at this depth. The caches are kept and taken back, for the next call."""
        return self._run(lambda: self._decode_tps(side, bits, depth, new))

    def prefill_peak(self, side: Side, bits: Bits, tokens: int) -> tuple[int, int]:
        """Prefill a prompt; return the peak bytes in all, and those without what was there before (the weights)."""
        ids = self._server.prompt(tokens, 1)
        return self._run(lambda: self._prefill_peak(side, bits, ids))

    def forget(self) -> None:
        """Drop the caches that ``decode_tps`` keeps."""
        self._kept.clear()

    # On the engine's thread ---------------------------------------------------------------------------------------------

    def _run(self, work: Callable[[], T]) -> T:
        return self._server.engine._worker.call(work)

    def _look(self) -> None:
        """Find the shapes of keys and values, and their type, as the model makes them."""
        import mlx.core as mx
        from mlx_lm.models.cache import KVCache, make_prompt_cache

        self._runtime = self._server.engine._runner.runtime
        caches = make_prompt_cache(self._runtime.model)
        if not all(type(cache) is KVCache for cache in caches):
            raise ValueError("these measurements need a model whose layers all keep plain, growing keys and values")
        self._runtime.model(mx.array([[1]]), cache=caches)
        mx.eval([cache.state for cache in caches])
        self._shapes = [(cache.keys.shape[1], cache.keys.shape[3], cache.values.shape[3]) for cache in caches]
        self._dtype = caches[0].keys.dtype

    def _make(self, side: Side, bits: Bits) -> list[Any]:
        from mlx_lm.models.cache import KVCache, QuantizedKVCache

        from tokamac.engine.kv import plan_caches

        if side == "engine":
            spec = KVSpec(key_bits=bits[0], value_bits=bits[1], group_size=GROUP)
            return plan_caches(self._runtime.model, {}, spec).make()
        if bits == PLAIN:
            return [KVCache() for _ in self._shapes]
        return [QuantizedKVCache(group_size=GROUP, bits=bits[0]) for _ in self._shapes]

    def _fill(self, caches: list[Any], depth: int) -> None:
        import mlx.core as mx

        mx.random.seed(0)
        for begin in range(0, depth, FILL_TOKENS):
            count = min(FILL_TOKENS, depth - begin)
            for cache, (heads, keys, values) in zip(caches, self._shapes, strict=False):
                new = [mx.random.normal((1, heads, count, size)).astype(self._dtype) for size in (keys, values)]
                cache.update_and_fetch(*new)
                del new
                mx.eval(cache.state)
        mx.clear_cache()

    def _token_bytes(self, bits: Bits) -> int:
        import mlx.core as mx

        own, self._dtype = self._dtype, mx.bfloat16
        try:
            (cache, *_) = self._make("engine", bits)
            self._fill([cache], 256)
        finally:
            self._dtype = own
        keys, values, *_ = cache.state
        return sum(array.nbytes for array in (*keys, *values))

    def _reported_and_held(self, bits: Bits, depth: int) -> tuple[int, int]:
        import mlx.core as mx

        from tokamac.engine import kv

        caches = self._make("engine", bits)
        mx.clear_cache()
        before = mx.get_active_memory()
        self._fill(caches, depth)
        return kv.nbytes(caches), mx.get_active_memory() - before

    def _append_us(self, bits: Bits, depth: int, count: int) -> float:
        import mlx.core as mx

        (cache, *_) = self._make("engine", bits)
        self._fill([cache], depth)
        heads, keys, values = self._shapes[0]
        new = [mx.random.normal((1, heads, 1, size)).astype(self._dtype) for size in (keys, values)]
        mx.eval(new)
        began = time.perf_counter()
        for _ in range(count):
            cache.update_and_fetch(*new)
            mx.eval(cache.state)
        return (time.perf_counter() - began) / count * 1e6

    def _decode_tps(self, side: Side, bits: Bits, depth: int, new: int) -> float:
        if (side, bits) not in self._kept:
            self._kept[side, bits] = self._make(side, bits)
            self._fill(self._kept[side, bits], depth)
            decode_times(self._runtime.model, self._kept[side, bits], 1, 4, ahead=self._runtime.ahead)
        caches = self._kept[side, bits]
        for cache in caches:
            cache.trim(cache.offset - depth)
        times = decode_times(self._runtime.model, caches, 1, new, ahead=self._runtime.ahead)
        return (new - 1) / (times[-1] - times[0])

    def _prefill_peak(self, side: Side, bits: Bits, ids: list[int]) -> tuple[int, int]:
        import mlx.core as mx

        mx.clear_cache()
        before = mx.get_active_memory()
        if side == "engine":
            self._prefill(bits, ids)
        else:
            self._prefill_end(bits, ids)
        peak = mx.get_peak_memory()
        return peak, peak - before

    def _prefill(self, bits: Bits, ids: list[int]) -> None:
        """Prefill as the engine does."""
        import mlx.core as mx

        from tokamac.engine.generation import Generation

        mx.reset_peak_memory()
        run = Generation(self._runtime.model, self._make("engine", bits), [], ahead=False)
        for _ in run.prefill(ids, self._runtime.prefill_chunk):
            pass

    def _prefill_end(self, bits: Bits, ids: list[int]) -> None:
        """Prefill the last PEER_CHUNK tokens as mlx-lm does, after random ones: there its peak is, and all would take minutes."""
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        caches = self._make("mlx-lm", bits)
        self._fill(caches, max(0, len(ids) - PEER_CHUNK))
        mx.reset_peak_memory()
        packed = {} if bits == PLAIN else {"kv_bits": bits[0], "kv_group_size": GROUP, "quantized_kv_start": 0}
        last = mx.array([*ids[-PEER_CHUNK:], 1])  # one more than a chunk: the last token is the first step's
        for _ in generate_step(last, self._runtime.model, max_tokens=1, prompt_cache=caches, **packed):
            pass
