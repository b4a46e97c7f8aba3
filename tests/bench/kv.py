"""Section kv: what keys and values cost, packed and not, beside mlx-lm's caches."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar

from tests.bench.plan import EngineServer, Plan, Remote, decode_times
from tests.bench.report import Row, Section, Series, alternate, at_least, at_most, holds, plain, ratios, series
from tests.engine.inside import runner_of, worker_of
from tokamac.engine.options import KVSpec

# Caches of the engine's and of mlx-lm's, on the same loaded model, measured on the engine's thread.

T = TypeVar("T")
Side = Literal["engine", "mlx-lm"]
Bits = tuple[int, int]
PLAIN: Bits = (16, 16)
GROUP = 64
FILL_TOKENS = 2048
PEER_CHUNK = 2048  # what mlx-lm prefills at once unless told otherwise


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
        return worker_of(self._server.engine).call(work)

    def _look(self) -> None:
        """Find the shapes of keys and values, and their type, as the model makes them."""
        import mlx.core as mx
        from mlx_lm.models.cache import KVCache, make_prompt_cache

        self._runtime = runner_of(self._server.engine).runtime
        caches = make_prompt_cache(self._runtime.model)
        if not all(type(cache) is KVCache for cache in caches):
            raise ValueError("these measurements need a model whose layers all keep plain, growing keys and values")
        self._runtime.model(mx.array([[1]]), cache=caches)
        mx.eval([cache.state for cache in caches])
        self._shapes = [(cache.keys.shape[1], cache.keys.shape[3], cache.values.shape[3]) for cache in caches]
        self._dtype = caches[0].keys.dtype

    def _make(self, side: Side, bits: Bits) -> list[Any]:
        from mlx_lm.models.cache import KVCache, QuantizedKVCache

        from tokamac.engine.kv.plan import plan_caches

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

        from tokamac.engine.kv.cache import nbytes

        caches = self._make("engine", bits)
        mx.clear_cache()
        before = mx.get_active_memory()
        self._fill(caches, depth)
        return nbytes(caches), mx.get_active_memory() - before

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
        run = Generation(self._runtime.model, self._make("engine", bits), [])
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


# Section: what keys and values cost, packed and not, beside mlx-lm's caches.

SHARES: tuple[tuple[str, Bits, float], ...] = (("8-bit", (8, 8), 0.54), ("8,4", (8, 4), 0.41), ("4-bit", (4, 4), 0.29))
PACKED: tuple[tuple[str, Bits], ...] = (("8-bit", (8, 8)), ("4-bit", (4, 4)))
SHALLOW, DEEP = 100, 30_000
# A copy of the whole cache at every append would cost a hundred times more at the greater depth, not a quarter.
SAME = 1.25


def measure_kv(plan: Plan) -> Section:
    """Measure bytes, appends, decode at depth, and the peak of prefill."""
    with Remote(KVLab, plan.model) as lab:
        rows = [*_bytes(plan, lab), *_appends(plan, lab), *_decode(plan, lab), *_peaks(plan, lab)]
    how = (
        f"Groups of {GROUP}. Bytes per token: of the arrays that hold 256 tokens in a model whose own type has 16 bits. Appends: "
        "one layer's cache, each append evaluated before the next, with the growth that falls into the run. Decode at depth: "
        "the same loaded model and the same loop for both sides, caches filled with random numbers, mlx-lm's "
        "`QuantizedKVCache` beside ours. Peak of prefill: MLX's peak while a prompt goes into an empty cache as the engine does "
        f"it; for mlx-lm that of `generate_step` on its last chunk, of {PEER_CHUNK:,} tokens, the earlier ones being random. It "
        "is a count of bytes, so one run; ratios leave the weights out."
    )
    return Section("Keys and values", rows, how)


def _bytes(plan: Plan, lab: Remote) -> list[Row]:
    whole = lab.call("token_bytes", PLAIN)
    rows = [
        at_most(f"bytes per token: {name} over 16-bit", Series((lab.call("token_bytes", bits) / whole,)), bound)
        for name, bits, bound in SHARES
    ]
    depth = plan.count(4096, 512)
    reported, held = lab.call("reported_and_held", (8, 4), depth)
    same = abs(held - reported) <= 0.01 * reported
    shown = f"{reported / 1e6:.3f} MB reported, {held / 1e6:.3f} MB held"
    return [*rows, holds(f"bytes reported at {depth:,} tokens, 8,4", shown, "equal within 1 %", met=same)]


def _appends(plan: Plan, lab: Remote) -> list[Row]:
    rows, count = [], plan.count(2000, 64)
    for name, bits in (("16-bit", PLAIN), *PACKED):
        shallow, deep = alternate(
            plan.rounds, *(partial(_run, lab, "append_us", bits, depth, count) for depth in (SHALLOW, DEEP))
        )
        at_shallow, at_deep = series(shallow), series(deep)
        rows += [
            plain(f"append at depth {SHALLOW}, {name}", at_shallow, "µs"),
            plain(f"append at depth {DEEP:,}, {name}", at_deep, "µs"),
            at_most(f"append at {DEEP:,} over {SHALLOW}, {name}", ratios(at_deep, at_shallow), SAME),
        ]
    return rows


def _decode(plan: Plan, lab: Remote) -> list[Row]:
    depth, new = plan.count(4096, 256), plan.count(48, 6)
    rows = []
    for name, bits in PACKED:
        ours, theirs = alternate(
            plan.many_rounds,
            *(partial(_run, lab, "decode_tps", side, bits, depth, new) for side in ("engine", "mlx-lm")),
        )
        engine, mlx_lm = series(ours), series(theirs)
        rows += [
            plain(f"decode at depth {depth:,}, {name}: engine's cache", engine, "tok/s"),
            plain(f"decode at depth {depth:,}, {name}: mlx-lm's cache", mlx_lm, "tok/s"),
            at_least(f"decode at depth {depth:,}, {name}: engine's ÷ mlx-lm's", ratios(engine, mlx_lm), 1.0),
        ]
    lab.call("forget")
    return rows


def _run(lab: Remote, method: str, *arguments: object) -> float:
    *arguments_of_method, _ = arguments  # the last is the number of the round
    figure: float = lab.call(method, *arguments_of_method)
    return figure


def _peaks(plan: Plan, lab: Remote) -> list[Row]:
    tokens = plan.count(8192, 512)
    rows = []
    for side in ("engine", "mlx-lm"):
        whole, without = lab.call("prefill_peak", side, PLAIN, tokens)
        rows.append(Row(f"peak of prefilling {tokens:,} tokens, 16-bit: {side}", _peak(whole, without)))
        for name, bits in PACKED if side == "engine" else PACKED[:1]:  # mlx-lm takes half a minute for each
            packed, packed_without = lab.call("prefill_peak", side, bits, tokens)
            rows.append(Row(f"peak of prefilling {tokens:,} tokens, {name}: {side}", _peak(packed, packed_without)))
            ratio = Series((packed_without / without,))
            what = f"peak, {name} over 16-bit: {side}"
            rows.append(at_most(what, ratio, 1.05) if side == "engine" else plain(what, ratio))
    return rows


def _peak(whole: int, without: int) -> str:
    return f"{whole / 1e6:.1f} MB, without the weights {without / 1e6:.1f} MB"
