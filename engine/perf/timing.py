"""Expected speed without a published measurement: the sum of a step's parts, timed on this machine."""

# Times are kept by machine, MLX version and a label of all that a part depends on. No whole step is timed.

# As many copies of a matrix as the model has bytes are read in turn: chip caches hold no more than in a step.
# Handover: a part timed alone has warm caches and idle cores. Where MLX alternates with CPU kernels it has not,
# so a layer's parts are also timed in turn, and the difference is added. CPU steps are timed by halves.

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..device import DeviceKind, device_kind
from . import hardware
from .bandwidth import LARGEST, bucket, is_busy, measure_tflops
from .roofline import Product, Workload

if TYPE_CHECKING:
    from ..cpu.stepping import Steps
    from ..events import Event
    from ..kv.cache import Cache
    from ..kv.plan import CachePlan, LayerPlan
    from ..schedule.schedule import ReplyEvents
    from ..text.tokenizer import Tokenizer

FILE = "parts.json"

# Count up when what a part runs changes, here or in the engine: what was kept before is then measured again.
RECIPE = 11

ROWS = 256  # rows of a chunk that is timed; fewer and more are taken in proportion

# How often each part is timed, in passes over all of them, of which the best counts. What slows a machine (other
# programs, the clock, a virtual machine's neighbours) lasts seconds: it spoils timings made in a row, seldom three that
# lie apart.
PASSES = 3

# Repetitions in one timing, after a warm-up: as many as fit the budget, within bounds.
LEAST_TRIALS, MOST_TRIALS, BUDGET_S = 5, 25, 0.1

# How much longer a whole layer is tried than other parts: a step of a model that takes turns is little else.
LAYER_PATIENCE = 2.0

# Bytes of weights up to which a decode step by a CPU's kernels is timed at once: it takes a tenth of a second at most.
TIMED_WHOLE = 1 << 30

LAYER_KERNELS = 7  # a layer's small kernels: two norms, two rotations, two sums, a gated product

KERNEL_LAYERS = 4  # how often a layer's small kernels run in a row: enough that starting the row does not show

# Of a layer's kernels, those that timing its attention covers beside the attention: keys and values are written to its
# cache.
CACHE_WRITES = 2

MOST_COPIES = 256
HEAD_SIZES = (128, 64, 32, 16)

Points = tuple[tuple[int, float], ...]


def interpolate(points: Points, depth: int) -> float:
    upper = next((i for i, (at, _) in enumerate(points) if at >= depth), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(upper - 1, 0)], points[max(upper, 1)]
    return max(y0 + (y1 - y0) * (depth - x0) / (x1 - x0), 0.0)


def attention_depths(limit: int | None) -> tuple[int, ...]:
    most = 4096 if limit is None else min(limit, 4096)
    return tuple(sorted({min(64, most), min(1024, most), most})) if most > 64 else (0, most)


@dataclass(frozen=True, slots=True)
class PartLatency:
    """Seconds of one part for one row (decode), and for ROWS rows."""

    row_s: float
    rows_s: float

    def seconds(self, rows: int) -> float:
        return self.row_s + (self.rows_s - self.row_s) * (rows - 1) / (ROWS - 1)


@dataclass(frozen=True, slots=True)
class AttentionLatency:
    """``layers`` alike: ascending (depth, seconds of one) for one row and for ROWS. limit: most tokens held."""

    layers: int
    limit: int | None
    row: Points
    rows: Points

    def seconds(self, rows: int, depth: int) -> float:
        held = depth if self.limit is None else min(depth, self.limit)
        return self.layers * PartLatency(interpolate(self.row, held), interpolate(self.rows, held)).seconds(rows)


@dataclass(frozen=True, slots=True)
class HandoverLatency:
    """``layers`` alike: (depth, seconds that a layer's parts take longer in turn than apart)."""

    layers: int
    limit: int | None
    points: Points

    def seconds(self, depth: int) -> float:
        """Seconds of all these layers after ``depth`` tokens."""
        # Constant below the first point, so that a step never gets faster with depth.
        held = depth if self.limit is None else min(depth, self.limit)
        return self.layers * interpolate(self.points, max(held, self.points[0][0]))


@dataclass(frozen=True, slots=True)
class StepLatency:
    """A decode step by CPU kernels: ascending (depth, seconds). limit: most tokens any layer attends to."""

    points: Points
    limit: int | None

    def seconds(self, depth: int) -> float:
        held = depth if self.limit is None else min(depth, self.limit)
        return interpolate(self.points, held) if len(self.points) > 1 else self.points[0][1]


@dataclass(frozen=True, slots=True)
class PieceLatency:
    """Prefill by CPU kernels: seconds of a piece of ``rows`` tokens, by depth."""

    rows: int
    piece: StepLatency

    def seconds(self, start: int, stop: int, least_s: float) -> float:
        rest = (stop - start) % self.rows
        whole = sum(self.piece.seconds(at) for at in range(start, stop - rest, self.rows))
        return whole + (max(rest / self.rows * self.piece.seconds(stop - rest), least_s) if rest else 0.0)


@dataclass(frozen=True, slots=True)
class MeasuredLatency:
    """A ``LatencyModel`` of timed parts.

    other_kernels: neither products nor attention. sampling_s: all work between passes. step, pieces: set where
    CPU kernels compute both; no other parts then.
    """

    products: tuple[tuple[Product, PartLatency], ...]
    attention: tuple[AttentionLatency, ...]
    kernel: PartLatency
    other_kernels: int
    sampling_s: float
    handover: tuple[HandoverLatency, ...] = ()
    step: StepLatency | None = None
    pieces: PieceLatency | None = None

    def decode_s(self, work: Workload, context: int, batch: int = 1) -> float | None:  # noqa: ARG002
        if batch != 1:
            return None
        if self.step is not None:
            return self.step.seconds(context) + self.sampling_s
        products = sum(product.count * latency.row_s for product, latency in self.products)
        handover = sum(layers.seconds(context) for layers in self.handover)
        return products + self._attention_and_kernels(1, context) + handover + self.sampling_s

    def prefill_s(self, work: Workload, tokens: int, cached: int, chunk: int) -> float | None:
        first = self.decode_s(work, cached + tokens)
        if tokens <= 1 or first is None:
            return first
        end = cached + tokens - 1  # the last token is the first step's
        if self.pieces is not None:
            return first + self.pieces.seconds(cached, end, first)
        whole, rest = divmod(end - cached, chunk)
        total = first + whole * self._products(chunk) + self._whole_chunks(cached, whole, chunk)
        return total + (self._products(rest) + self._attention_and_kernels(rest, end - rest) if rest else 0.0)

    def _products(self, rows: int) -> float:
        return sum(product.count * latency.seconds(rows) for product, latency in self.products if not product.head)

    def _attention_and_kernels(self, rows: int, depth: int) -> float:
        return sum(layers.seconds(rows, depth) for layers in self.attention) + self.other_kernels * self.kernel.seconds(
            rows
        )

    def _whole_chunks(self, start: int, chunks: int, chunk: int) -> float:
        bends = {depth for layers in self.attention for depth, _ in (*layers.row, *layers.rows)}
        bends |= {layers.limit for layers in self.attention if layers.limit is not None}
        total, done = 0.0, 0
        for bend in (*sorted(bends), None):
            stop = chunks if bend is None else min(chunks, max(done, -(-(bend - start) // chunk)))
            if stop > done:
                ends = (self._attention_and_kernels(chunk, start + at * chunk) for at in (done, stop - 1))
                total += (stop - done) * sum(ends) / 2
            done = stop
        return total


def waits(kind: Product, *, by_kernels: bool) -> bool:
    if not by_kernels:
        return False
    from ..cpu import stays_lazy

    return kind.bits is not None or (kind.stack == 1 and not stays_lazy(kind.rows * kind.columns))


def time_product(kind: Product, rows: int, weight_bytes: int, *, by_kernels: bool, rounded: bool = False) -> float:
    """Time ``rows`` rows times a matrix, in copies of ``weight_bytes`` in all, and the kernel before it."""
    copies = (
        max(1, min(weight_bytes // max(_row_bytes(kind, by_kernels=by_kernels), 1), MOST_COPIES)) if rows == 1 else 1
    )
    products = [_multiplier(kind, by_kernels=by_kernels, rounded=rounded) for _ in range(copies)]
    x = _ones(1, rows, kind.columns)
    return typical_s(lambda: mx.eval([multiply(x * 0.5) for multiply in products])) / copies


def time_attention(layer: "LayerPlan", heads: int, depth: int, rows: int, count: int) -> float:
    caches, attend = filled_caches(layer, depth, count), _attention(layer, heads, rows)

    def step() -> None:
        mx.eval([attend(cache) for cache in caches])
        for cache in caches:
            cache.trim(min(rows, cache.rewindable))

    return typical_s(step) / count


def time_kernel(hidden: int, rows: int) -> float:
    """Time one of a layer's small kernels, the mean over a chain of them."""
    # On a CPU a rotary embedding is a dozen kernels, so it weighs most.
    layer, x = _small_kernels(hidden, rows), _ones(1, rows, hidden)

    def chain() -> None:
        y = x
        for _ in range(KERNEL_LAYERS):
            y = layer(y)
        mx.eval(y)

    return typical_s(chain) / (KERNEL_LAYERS * LAYER_KERNELS)


def time_sampling(vocabulary: int) -> float:
    logits = _ones(1, vocabulary)
    return typical_s(lambda: mx.argmax(logits + 1.0, axis=-1).tolist())


def time_token(vocabulary: int, tokenizer: "Tokenizer | None") -> float:
    from ..schedule.decoding import Decoder
    from ..schedule.schedule import Schedule, Seat
    from ..schedule.stream import EventStream

    (*_, letter) = (0,) if tokenizer is None else tokenizer.encode("a") or (0,)
    logits = (mx.arange(vocabulary) == letter).astype(_float_type()).reshape(1, 1, vocabulary)
    mx.eval(logits)
    schedule, stream = Schedule(lambda _: None), EventStream()
    schedule.decode = Decoder(lambda *_, **__: logits, ahead=False).step
    schedule.add(Seat(lambda _: _TimedReply(tokenizer), stream, background=False))
    reader = threading.Thread(target=lambda: [*stream.read()], name="tokamac-timed-reader", daemon=True)
    reader.start()
    try:
        return typical_s(schedule.turn)
    finally:
        stream.abandon()
        while schedule.turn() is not None:
            pass
        reader.join()


class _TimedReply:
    """An endless reply of one repeated letter, with ReplyTask's work for each token."""

    def __init__(self, tokenizer: "Tokenizer | None") -> None:
        from ..metrics import ProcessWatch, Recorder
        from ..options import Sampling
        from ..sampling import Sampler
        from ..schedule.decoding import Lane
        from ..schedule.schedule import Pace
        from ..text.stream import ReplyText

        self.pace = Pace()
        self._recorder = Recorder()
        self._watch = ProcessWatch(self._recorder.mark, computes=True)
        self._lane = Lane([], [], 0, Sampler(Sampling(temperature=0), [0]), None, counts=self._recorder)
        self._text = None if tokenizer is None else ReplyText(tokenizer)

    def events(self) -> "ReplyEvents":
        while True:
            yield self._lane

    def feed(self, token: int, put: "Callable[[Event], None]") -> bool:
        self._watch.look()
        self._recorder.token()
        self._recorder.ids.append(token)
        for part in () if self._text is None else self._text.add(token):
            put(part)
        return False

    def rest(self) -> None:
        """Do nothing: there are no caches."""

    def drop(self) -> None:
        """Do nothing."""

    def live(self) -> None:
        """Return None: nothing is measured."""


def time_layer(model: "TimedModel", layer: "LayerPlan", depth: int, count: int) -> float:
    """Time a layer's kernels, attention and products in turn, the mean over ``count`` distinct layers."""
    # Products with equal columns follow one another, as in a step with MLX attention and NumPy products. Where
    # all are NumPy's, a real step waits twice more than is timed here.
    caches = filled_caches(layer, depth, count)
    layers = [_whole_layer(model, layer) for _ in caches]

    def step() -> None:
        for run, cache in zip(layers, caches, strict=True):
            run(cache)
        for cache in caches:
            cache.trim(min(1, cache.rewindable))

    return typical_s(step, patience=LAYER_PATIENCE) / count


def time_step(  # noqa: PLR0917
    steps: "Steps | None", layers: "Sequence[LayerPlan]", first: int, last: int, depth: int, rows: int = 1
) -> float:
    assert steps is not None, "who only reads what was kept times nothing"
    part, tokens = steps.of_layers(first, last), mx.zeros((1, rows), mx.int32)
    caches = [filled_caches(layer, depth, 1)[0] for layer in layers[first:last]]

    def step() -> None:
        compute = part.logits if rows == 1 else part.read
        found = compute(tokens, caches, own=_no_own_forward)
        assert found is not None, "these caches don't take a step"
        mx.eval(found)
        for cache in caches:
            cache.trim(min(rows, cache.rewindable))

    return typical_s(step, patience=LAYER_PATIENCE)


def _no_own_forward(*_: Any) -> mx.array:
    raise AssertionError("one sequence goes to the kernels or nowhere")


def typical_s(run: Callable[[], Any], *, patience: float = 1.0) -> float:
    # Other load only ever adds time, and the minimum is luck.
    run()
    times: list[float] = []
    end = time.perf_counter() + BUDGET_S * patience
    while len(times) < LEAST_TRIALS or (len(times) < MOST_TRIALS and time.perf_counter() <= end):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 4]


def filled_caches(layer: "LayerPlan", depth: int, count: int) -> "list[Cache]":
    assert layer.ours is not None
    caches = [layer.make(layer.ours, 0) for _ in range(count)]
    for cache in caches if depth else ():
        mx.eval(cache.update_and_fetch(*_keys_and_values(layer, depth)))
    return caches


def _keys_and_values(layer: "LayerPlan", tokens: int) -> tuple[mx.array, mx.array]:
    assert layer.ours is not None
    seen = layer.ours.seen
    dtype = _float_type() if seen.scale_bytes == 4 else mx.bfloat16
    keys, values = (_ones(1, seen.heads, tokens, dim, dtype=dtype) for dim in (seen.key_dim, seen.value_dim))
    return keys, values


def _attention(layer: "LayerPlan", heads: int, rows: int) -> "Callable[[Cache], mx.array]":
    """Return a function that appends ``rows`` tokens and attends: (1, query heads, rows, D), lazy."""
    from mlx_lm.models import base

    new = _keys_and_values(layer, rows)
    queries = _ones(1, heads, rows, new[0].shape[-1], dtype=new[0].dtype)

    def attend(cache: "Cache") -> mx.array:
        mask = cache.make_mask(rows)
        keys, values = cache.update_and_fetch(*new)
        fused: Callable[..., mx.array] = base.scaled_dot_product_attention
        return fused(queries, keys, values, cache=cache, scale=0.1, mask=mask)

    return attend


def _small_kernels(hidden: int, rows: int) -> Callable[[mx.array], mx.array]:
    from mlx import nn

    head = next((size for size in HEAD_SIZES if hidden % size == 0), hidden)
    weight = _ones(hidden)

    def layer(y: mx.array) -> mx.array:
        rotated = mx.fast.rms_norm(y, weight, 1e-5).reshape(1, rows, -1, head).transpose(0, 2, 1, 3)
        for _ in range(2):
            rotated = mx.fast.rope(rotated, head, traditional=False, base=1e4, scale=1.0, offset=rows)
        y = y + rotated.transpose(0, 2, 1, 3).reshape(y.shape)
        summed: mx.array = y + nn.silu(y) * mx.fast.rms_norm(y, weight, 1e-5)
        return summed

    return layer


def _whole_layer(model: "TimedModel", layer: "LayerPlan") -> "Callable[[Cache], None]":
    hidden, kinds = model.work.hidden or 0, model.layer_products
    kernels, attend = _small_kernels(hidden, 1), _attention(layer, model.work.query_heads or 0, 1)
    inputs = {columns: _ones(1, 1, columns) for columns in {hidden, *(kind.columns for kind in kinds)}}
    made = [(kind, _multiplier(kind, by_kernels=model.by_kernels, rounded=model.rounded)) for kind in kinds]
    lazy = [(kind.columns, run) for kind, run in made if not waits(kind, by_kernels=model.by_kernels)]
    eager = [(kind.columns, run) for kind, run in made if waits(kind, by_kernels=model.by_kernels)]
    # Products with the same columns share their input, which is evaluated once: gate and up, queries, keys and values.
    shared = [(columns, [run for _, run in group]) for columns, group in groupby(eager, lambda pair: pair[0])]

    def run_layer(cache: "Cache") -> None:
        y = kernels(inputs[hidden])
        products = [multiply(y if columns == hidden else inputs[columns]) for columns, multiply in lazy]
        mx.eval(attend(cache), products, y)
        for columns, group in shared:
            x = y if columns == hidden else inputs[columns] * 0.5
            for multiply in group:
                multiply(x)

    return run_layer


def _multiplier(kind: Product, *, by_kernels: bool, rounded: bool) -> Callable[[mx.array], mx.array]:
    if by_kernels and (kind.stack == 1 or kind.bits is not None):
        return _kernel(kind, rounded=rounded)
    operands: list[mx.array | None] = []
    options: dict[str, Any] = {}
    plain: Callable[..., mx.array] = mx.matmul if kind.bits is None else mx.quantized_matmul
    gather: Callable[..., mx.array] = mx.gather_mm if kind.bits is None else mx.gather_qmm
    if kind.bits is None:
        operands = [_ones(kind.stack, kind.columns, kind.rows)]
    else:
        options = {"group_size": kind.group_size, "bits": kind.bits, "mode": kind.mode, "transpose": True}
        affine, shape = kind.mode == "affine", (kind.stack, kind.rows)
        weight = _ones(*shape, kind.columns * kind.bits // 32, dtype=mx.uint32)
        # Microscaled formats keep one byte a group and no bias.
        scales = _ones(*shape, kind.columns // kind.group_size, dtype=_float_type() if affine else mx.uint8)
        operands = [weight, scales, scales if affine else None]
    if kind.stack == 1:
        matrix = [None if array is None else array[0] for array in operands]
        return lambda x: plain(x, *matrix, **options)

    return _routed(kind, lambda x, chosen: gather(x, *operands, rhs_indices=chosen, **options))


def _routed(kind: Product, gather: Callable[[mx.array, mx.array], mx.array]) -> Callable[[mx.array], mx.array]:
    def multiply(x: mx.array) -> mx.array:
        chosen = (mx.arange(x.shape[1] * kind.active) % kind.stack).astype(mx.uint32).reshape(1, -1, kind.active)
        return gather(mx.expand_dims(x, (-2, -3)), chosen)

    return multiply


def _kernel(kind: Product, *, rounded: bool) -> Callable[[mx.array], mx.array]:
    from mlx import nn
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear

    from ..cpu.layers import DenseLinear

    if kind.bits is None:
        return DenseLinear(_ones(kind.columns, kind.rows, dtype=mx.float32).T, None).__call__
    from ..cpu.layers import round_rows, use_kernels

    packing: dict[str, Any] = {"group_size": kind.group_size, "bits": kind.bits, "mode": kind.mode}
    layer: Any
    shape: tuple[int, ...]
    if kind.stack == 1:
        layer, shape = nn.QuantizedLinear(kind.group_size, 1, bias=False, **packing), (kind.rows,)
    else:
        layer, shape = QuantizedSwitchLinear(kind.group_size, 1, 1, bias=False, **packing), (kind.stack, kind.rows)
    groups = kind.columns // kind.group_size
    layer.weight = _ones(*shape, kind.columns * kind.bits // 32, dtype=mx.uint32)
    for name in ("scales", "biases"):
        if layer.get(name) is not None:
            dtype = mx.bfloat16 if kind.mode == "affine" else mx.uint8
            layer[name] = _ones(*shape, groups, dtype=dtype)
    holder = nn.Sequential(layer)
    use_kernels(holder, logits=None)
    round_rows(holder, rounds=rounded)
    return layer.__call__ if kind.stack == 1 else _routed(kind, layer.__call__)


def _row_bytes(kind: Product, *, by_kernels: bool) -> int:
    stored = by_kernels and kind.bits is not None
    return kind.nbytes(2 if stored else _float_type().size)


def _ones(*shape: int, dtype: mx.Dtype | None = None) -> mx.array:
    array = mx.ones(shape, dtype=dtype or _float_type())
    mx.eval(array)
    return array


def _float_type() -> mx.Dtype:
    return mx.float32 if device_kind() == "cpu" else mx.bfloat16


# Returns a part's seconds, given a label that names all it depends on beside the machine, and what times it.
PartTimer = Callable[[str, Callable[[], float]], float]


@dataclass(frozen=True, slots=True)
class TimedModel:
    """A model as the parts of its steps.

    by_kernels: CPU kernels multiply; stepped: they compute whole decode steps. steps: None uses kept timings only.
    machine: its ``hardware.machine_key``. tokenizer: None times tokens without detokenizing.
    """

    work: Workload
    plan: "CachePlan"
    by_kernels: bool
    device: DeviceKind
    machine: str
    rounded: bool = False
    stepped: bool = False
    steps: "Steps | None" = None
    tokenizer: "Tokenizer | None" = None

    @property
    def layer_products(self) -> tuple[Product, ...]:
        counts = ((kind, round(kind.count / self.work.layers)) for kind in self.work.products if not kind.head)
        return tuple(kind for kind, count in counts for _ in range(count))

    def layers_in_turn(self, layers: "list[LayerPlan]", depth: int) -> int:
        weights = sum(_row_bytes(kind, by_kernels=self.by_kernels) for kind in self.layer_products)
        return _count_within(LARGEST, layers, weights + layers[0].bytes_at(depth))

    def latency(self, part_s: PartTimer) -> MeasuredLatency | None:
        work, weight_bytes = self.work, self.work.weight_bytes()
        heads, hidden, vocabulary = work.query_heads, work.hidden, work.vocabulary
        if heads is None or hidden is None or vocabulary is None or weight_bytes is None:
            return None
        if work.prefill_parameters is None or not can_measure(self.plan):
            return None
        if self.stepped:
            sampling_s, none = self._sampling(part_s, vocabulary), PartLatency(0.0, 0.0)
            return MeasuredLatency((), (), none, 0, sampling_s, step=self._step(part_s), pieces=self._pieces(part_s))
        products = {kind: self._product(part_s, kind, bucket(weight_bytes)) for kind in work.products}
        row_s, rows_s = (
            part_s(f"kernel of {hidden} x {rows}", partial(time_kernel, hidden, rows)) for rows in (1, ROWS)
        )
        kernel = PartLatency(row_s, max(row_s, rows_s))
        alike = [list(group) for _, group in groupby(sorted(self.plan.layers, key=_cache_shape), key=_cache_shape)]
        attention = tuple(self._attention(part_s, layers, heads) for layers in alike)
        handover: tuple[HandoverLatency, ...] = ()
        if any(waits(kind, by_kernels=self.by_kernels) for kind in self.layer_products):
            rest_s = sum(products[kind].row_s for kind in self.layer_products) + LAYER_KERNELS * kernel.row_s
            pairs = zip(alike, attention, strict=True)
            handover = tuple(self._handover(part_s, layers, alone, rest_s) for layers, alone in pairs)
        timed = sum(kind.count for kind in products) + len(work.attention) + CACHE_WRITES * len(self.plan.layers)
        return MeasuredLatency(
            products=tuple(products.items()),
            attention=attention,
            kernel=kernel,
            other_kernels=max(work.launches - timed, 0),
            sampling_s=self._sampling(part_s, vocabulary),
            handover=handover,
        )

    def _sampling(self, part_s: PartTimer, vocabulary: int) -> float:
        if self.device == "cpu":
            return part_s(f"token of {vocabulary}", partial(time_token, vocabulary, self.tokenizer))
        return part_s(f"sampling of {vocabulary}", partial(time_sampling, vocabulary))

    def _step(self, part_s: PartTimer) -> StepLatency:
        count = len(self.plan.layers)
        sums, one_s = self._halves(part_s, 1)
        twice_s = 0.0 if one_s is None else min(max((count * one_s - sums[0][1]) / (count - 2), 0.0), one_s)
        return StepLatency(tuple((depth, each - twice_s) for depth, each in sums), self._limit)

    def _pieces(self, part_s: PartTimer) -> PieceLatency:
        from ..cpu import PIECE

        count = len(self.plan.layers)
        sums, one_s = self._halves(part_s, PIECE)
        if one_s is not None:  # of one layer, there are only keys and values
            sums = [(depth, each + max((each - 2 * one_s) / (count - 2) - one_s, 0.0)) for depth, each in sums]
        return PieceLatency(PIECE, StepLatency(tuple(sums), self._limit))

    @property
    def _limit(self) -> int | None:
        limits = [layer.limit for layer in self.plan.layers]
        return max((each for each in limits if each is not None), default=None) if None not in limits else None

    def _halves(self, part_s: PartTimer, rows: int) -> tuple[list[tuple[int, float]], float | None]:
        """Return (depth, seconds) of all layers and None; or of both halves, and of the first layer."""
        # Long steps are timed by halves, as a prompt may come meanwhile; in short ones the ends weigh too much.
        layers, weight_bytes = self.plan.layers, self.work.weight_bytes() or 0
        count = len(layers)
        products = ", ".join(kind.key for kind in self.work.products)
        shapes = "; ".join(dict.fromkeys(map(_cache_shape, layers)))

        def seconds(first: int, last: int, depth: int) -> float:
            label = f"step of layers {first} to {last} of {count}: {products}, {self.work.query_heads} on {shapes} at {depth}"
            label += f" x {rows}"
            return part_s(label, partial(time_step, self.steps, layers, first, last, depth, rows))

        depths = [max(depth, 1) for depth in attention_depths(self._limit)]
        held = [depth for depth in depths if sum(each.bytes_at(depth) for each in layers) <= LARGEST] or depths[:1]
        whole = count <= 2 or weight_bytes <= TIMED_WHOLE
        halves = [(0, count)] if whole else [(0, count // 2), (count // 2, count)]
        sums = [sum(seconds(first, last, depth) for first, last in halves) for depth in held]
        found = list(zip(held, accumulate(sums, max), strict=True))
        return found, None if whole else seconds(0, 1, held[0])

    def _product(self, part_s: PartTimer, kind: Product, nbytes: int) -> PartLatency:
        def seconds(rows: int) -> float:
            label = f"product {kind.key} x {rows} of {nbytes} bytes"
            time_it = partial(time_product, kind, rows, nbytes, by_kernels=self.by_kernels, rounded=self.rounded)
            return part_s(label, time_it)

        row_s = seconds(1)
        return PartLatency(row_s, row_s if kind.head else max(row_s, seconds(ROWS)))

    def _attention(self, part_s: PartTimer, layers: "list[LayerPlan]", heads: int) -> AttentionLatency:
        first, depths = layers[0], attention_depths(layers[0].limit)

        def seconds(depth: int, rows: int) -> float:
            # As many caches as a step has; a chunk is bound by arithmetic, so one will do.
            count = 1 if rows > 1 else _count_within(LARGEST, layers, first.bytes_at(depth))
            label = f"attention {heads} on {_cache_shape(first)} at {depth} x {rows}, {count} caches"
            return part_s(label, partial(time_attention, first, heads, depth, rows, count))

        def points(rows: int) -> Points:
            found = (seconds(depth, rows) for depth in depths)
            return tuple(
                zip(depths, accumulate(found, max), strict=True)
            )  # more to read is never faster: that was noise

        indices = {layer.index for layer in layers}  # layers that reuse another's keys attend to them as well
        count = sum(attention.layer in indices for attention in self.work.attention)
        return AttentionLatency(count, first.limit, points(1), points(ROWS))

    def _handover(
        self, part_s: PartTimer, layers: "list[LayerPlan]", attention: AttentionLatency, rest_s: float
    ) -> HandoverLatency:
        shape = f"attention {self.work.query_heads} on {_cache_shape(layers[0])}"
        products = ", ".join(kind.key for kind in self.layer_products)
        points, longest_s = [], 0.0
        for depth, attention_s in attention.row:
            count = self.layers_in_turn(layers, depth)
            label = f"in turn: {count} layers of {self.work.hidden}, products {products}, {shape} at {depth}"
            layer_s = part_s(label, partial(time_layer, self, layers[0], depth, count))
            longest_s = max(
                longest_s, layer_s, rest_s + attention_s
            )  # more to read makes no layer faster: that was noise
            points.append((depth, longest_s - (rest_s + attention_s)))
        return HandoverLatency(attention.layers, attention.limit, tuple(points))


def can_measure(plan: "CachePlan") -> bool:
    return bool(plan.layers) and all(layer.ours is not None for layer in plan.layers)


def _count_within(most_bytes: int, layers: "list[LayerPlan]", nbytes: int) -> int:
    return min(len(layers), max(1, most_bytes // max(nbytes, 1)))


def _cache_shape(layer: "LayerPlan") -> str:
    assert layer.ours is not None
    seen = layer.ours.seen
    bits = f"{layer.key_bits},{layer.value_bits} bits in {layer.group_size}{' rotated' if layer.rotated else ''}"
    return f"{seen.heads} heads of {seen.key_dim},{seen.value_dim} {bits} window {layer.window} type {seen.scale_bytes}"


class LatencyProfiler:
    """Times a model's unknown parts, one a step, so that a request can come in between."""

    def __init__(self, model: TimedModel, file: Path | None = None) -> None:
        self._model = model
        self._file = file or hardware.store_file(FILE)
        self._parts: dict[str, Callable[[], float]] = {}
        self._peak_key = _peak_key(model.machine)
        if model.latency(self._add_part) is not None:
            self._parts[self._peak_key] = partial(measure_tflops, model.device)
        self._best: dict[str, float] = {}
        self._open: list[tuple[int, str]] = []
        on_file = hardware.read_all(self._file)
        for number, key in product(range(1, PASSES + 1), self._parts):
            if (found := on_file.get(_pass_key(key, number))) is None:
                self._open.append((number, key))
            else:
                self._keep_better(key, found)

    @property
    def missing(self) -> int:
        return len(self._parts) - len(self._best)

    @property
    def remaining(self) -> int:
        return len(self._open)

    @property
    def peak_tflops(self) -> float | None:
        """10^12 operations/s of a large matrix product, prefill's ceiling; None until timed."""
        return self._best.get(self._peak_key)

    def steps(self) -> Iterator[None]:
        began = time.process_time()
        while self._open:
            number, key = self._open.pop(0)
            busy = is_busy(time.process_time() - began)
            found = self._parts[key]()
            busy = busy or is_busy(time.process_time() - began)
            mx.clear_cache()  # the copies of a matrix take as much memory as the model may
            self._keep_better(key, found)
            if not busy:
                hardware.keep(self._file, {_pass_key(key, number): found})
            yield

    def latency(self) -> MeasuredLatency | None:
        if not self._parts or self.missing:
            return None
        return self._model.latency(lambda label, _: self._best[self._key(label)])

    def _add_part(self, label: str, time_it: Callable[[], float]) -> float:
        self._parts[self._key(label)] = time_it
        return 0.0

    def _keep_better(self, key: str, found: float) -> None:
        better = max if key == self._peak_key else min
        self._best[key] = better(found, self._best.get(key, found))

    def _key(self, label: str) -> str:
        form = "by kernels" if self._model.by_kernels else "as stored"
        form = f"{form}, rounded" if self._model.rounded else form
        form = f"{form}, in steps" if self._model.stepped else form
        return f"{self._model.machine} | recipe {RECIPE} | {form} | {label}"


def kept_tflops(machine: str) -> float | None:
    on_file = hardware.read_all(hardware.store_file(FILE))
    keys = (_pass_key(_peak_key(machine), number) for number in range(1, PASSES + 1))
    return max((on_file[key] for key in keys if key in on_file), default=None)


def _peak_key(machine: str) -> str:
    return f"{machine} | large matrix product, 10^12 operations a second"


def _pass_key(key: str, number: int) -> str:
    return f"{key} | pass {number}"
