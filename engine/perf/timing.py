"""Time a layer's parts in turn, as a decode step does them, where MLX and NumPy take turns (engine/model/cpu.py).

Timed in a row of its own kind, a part finds its thread awake, its code and small arrays in the caches, and a core of its own. In
a step it doesn't: MLX's thread slept while NumPy multiplied, the weights went through the caches meanwhile, and NumPy's threads
look for more work for a while, on cores that MLX's thread and the host's want. So the parts of a layer take longer in turn than
apart. The difference is the price of handing over; it depends on what goes through the caches, so on the depth.

Products of as many columns are multiplied one after the other, as if they had one input. That is a step's order where attention's
are MLX's and the rest NumPy's; where all are NumPy's, a step waits twice more than is timed here, and once for each product in
the parts timed apart, so that the handing over comes out as little or nothing.

The expected speed where no published measurement knows it: the sum of a step's parts, timed on this machine.

    decode   t = Σ products of one row + Σ layers' attention at this depth + the other kernels + sampling
                 + Σ layers' handing over at this depth, where MLX and NumPy take turns (turns.py)
    prefill  t = Σ over chunks of the same for a chunk's rows, without sampling, and the first token's step

Parts are timed once a machine and MLX version, and kept; models share those that they have alike. Nothing here has seen a whole
step of the model, so a prediction can be wrong, and is tested as one.

What the parts of a step take here: timed in passes, of which the quickest counts, and kept, so that a later start goes on.

Find out a machine's pace with a model: which parts of a step are not known yet, time them, and put the pace together.

A part has a name that says all it depends on, so models share the parts that they have alike, and what was kept is found again.

Time the parts that a step of a model is made of, on the device it would run on: its own products, its own attention, the rest.

Each part is timed as the engine runs it: the same modules, the same caches, the same types. Weights are constants, but as many
copies of a matrix are read in turn as the model has bytes, so that a cache holds no more of them than it would in a real step.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, groupby, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from tokamac.engine.device import DeviceKind, device_kind
from tokamac.engine.model.cpu import DenseLinear, stays_lazy
from tokamac.engine.perf import measurement_store
from tokamac.engine.perf.bandwidth import LARGEST, bucket, is_busy, measure_tflops
from tokamac.engine.perf.workload import Product, Workload

if TYPE_CHECKING:
    from tokamac.engine.kv.cache import Cache
    from tokamac.engine.kv.plan import CachePlan, LayerPlan


ROWS = 256
"""Rows of a chunk that is timed; fewer and more are taken in proportion."""

A_LAYER = 7
"""A layer's small kernels: two norms, two rotations, two sums, a gated product."""

Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of one part: of a decode step's single row, and of ROWS rows, which take no less."""

    row_s: float
    rows_s: float

    def of(self, rows: int) -> float:
        """Seconds for so many rows, in proportion."""
        return self.row_s + (self.rows_s - self.row_s) * (rows - 1) / (ROWS - 1)


@dataclass(frozen=True, slots=True)
class TimedAttention:
    """``layers`` alike: (depth, seconds of one of them), both ascending, for one row and for ROWS. limit: tokens held at most."""

    layers: int
    limit: int | None
    row: Points
    rows: Points

    def of(self, rows: int, depth: int) -> float:
        """Seconds of all these layers for so many rows after ``depth`` tokens."""
        held = depth if self.limit is None else min(depth, self.limit)
        timed = Timed(between(self.row, held), between(self.rows, held))
        return self.layers * timed.of(rows)


@dataclass(frozen=True, slots=True)
class HandingOver:
    """``layers`` alike: (depth, seconds that the parts of one take longer in turn than apart). limit: tokens held at most."""

    layers: int
    limit: int | None
    points: Points

    def of(self, depth: int) -> float:
        """Seconds of all these layers in a step after ``depth`` tokens. Below the first depth as there, so that what a step takes
        does not fall with depth where this does."""
        held = depth if self.limit is None else min(depth, self.limit)
        return self.layers * between(self.points, max(held, self.points[0][0]))


@dataclass(frozen=True, slots=True)
class MeasuredLatency:
    """A machine's pace with one model, made of its timed parts.

    others: kernels that are neither products nor attention. handing: empty where MLX does all of a layer.
    """

    products: tuple[tuple[Product, Timed], ...]
    attention: tuple[TimedAttention, ...]
    launch: Timed
    others: int
    sampling_s: float
    handing: tuple[HandingOver, ...] = ()

    def decode_s(self, work: Workload, context: int, batch: int = 1) -> float | None:  # noqa: ARG002
        """Seconds of a step; None for several sequences, which were not timed."""
        if batch != 1:
            return None
        multiplying = sum(product.count * timed.row_s for product, timed in self.products)
        handing = sum(layer.of(context) for layer in self.handing)
        return multiplying + self._around(1, context) + handing + self.sampling_s

    def prefill_s(self, work: Workload, tokens: int, cached: int, chunk: int) -> float | None:
        """Seconds of reading ``tokens`` after ``cached`` and of the first token."""
        first = self.decode_s(work, cached + tokens)
        if tokens <= 1 or first is None:
            return first
        end = cached + tokens - 1  # the last token is the first step's
        whole, rest = divmod(end - cached, chunk)
        total = first + whole * self._multiplying(chunk) + self._attending(cached, whole, chunk)
        return total + (self._multiplying(rest) + self._around(rest, end - rest) if rest else 0.0)

    def _multiplying(self, rows: int) -> float:
        return sum(product.count * timed.of(rows) for product, timed in self.products if not product.head)

    def _attending(self, start: int, chunks: int, chunk: int) -> float:
        """Seconds of so many whole chunks' attention and other kernels: sums of the straight stretches between timed depths."""
        bends = {depth for layer in self.attention for depth, _ in (*layer.row, *layer.rows)}
        bends |= {layer.limit for layer in self.attention if layer.limit is not None}
        total, done = 0.0, 0
        for bend in (*sorted(bends), None):
            stop = chunks if bend is None else min(chunks, max(done, -(-(bend - start) // chunk)))
            if stop > done:
                ends = (self._around(chunk, start + at * chunk) for at in (done, stop - 1))
                total += (stop - done) * sum(ends) / 2
            done = stop
        return total

    def _around(self, rows: int, depth: int) -> float:
        attending = sum(layer.of(rows, depth) for layer in self.attention)
        return attending + self.others * self.launch.of(rows)


def between(points: Points, depth: int) -> float:
    """Return the value at ``depth`` on the line through the two nearest of ascending (depth, value) points; beyond them too."""
    upper = next((i for i, (at, _) in enumerate(points) if at >= depth), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(upper - 1, 0)], points[max(upper, 1)]
    return max(y0 + (y1 - y0) * (depth - x0) / (x1 - x0), 0.0)


def depths_up_to(limit: int | None) -> tuple[int, ...]:
    """Return the depths that attention is timed at: few, since it grows evenly between them; within a window, its own."""
    most = 4096 if limit is None else min(limit, 4096)
    return tuple(sorted({min(64, most), min(1024, most), most})) if most > 64 else (0, most)


PASSES = 3
"""How often each part is timed, in passes over all of them. What slows a machine comes and goes in seconds (others' work, the
clock, a virtual machine's neighbours): it meets all of one time of a part, and seldom three that lie apart."""


@dataclass(frozen=True, slots=True)
class TimedPart:
    """key: names all it depends on. time_it: times it once. better: of two such times (or of two rates), the less disturbed."""

    key: str
    time_it: Callable[[], float]
    better: Callable[[float, float], float] = min


class Timings:
    """The times of some parts: those that a file holds, and those that ``steps`` adds to it."""

    def __init__(self, file: Path, parts: tuple[TimedPart, ...]) -> None:
        self._file = file
        self._parts = parts
        self._best: dict[str, float] = {}
        on_file = measurement_store.read_all(file)
        self._open: list[tuple[int, TimedPart]] = []
        for number, part in product(range(1, PASSES + 1), parts):
            if (found := on_file.get(name(part.key, number))) is None:
                self._open.append((number, part))
            else:
                self._add(part, found)

    @property
    def best(self) -> Mapping[str, float]:
        """The best time so far of each part that was timed, by its key."""
        return self._best

    @property
    def missing(self) -> int:
        """Parts that were not timed yet."""
        return sum(part.key not in self._best for part in self._parts)

    @property
    def remaining(self) -> int:
        """Timings still to be made: PASSES of each part."""
        return len(self._open)

    def steps(self) -> Iterator[None]:
        """Make what remains, a timing a step. What is timed on a busy machine takes too long: it is used, but not kept."""
        import mlx.core as mx

        began = time.process_time()
        while self._open:
            number, part = self._open.pop(0)
            busy = is_busy(time.process_time() - began)
            found = part.time_it()
            busy = busy or is_busy(time.process_time() - began)
            mx.clear_cache()  # the copies of a matrix take as much memory as the model may
            self._add(part, found)
            if not busy:
                measurement_store.keep(self._file, {name(part.key, number): found})
            yield

    def _add(self, part: TimedPart, found: float) -> None:
        self._best[part.key] = part.better(found, self._best.get(part.key, found))


def name(key: str, number: int) -> str:
    """Return what a part's time in a pass, 1 to PASSES, is kept as."""
    return f"{key} | pass {number}"


FILE = "parts.json"

RECIPE = 5
"""Count up when what a part runs changes, here or in the engine: what was kept before is then measured again."""


@dataclass(frozen=True, slots=True)
class TimedModel:
    """A model as its parts see it. unpacked: weights are dense float32, multiplied by NumPy. machine: kept.machine_key of it."""

    work: Workload
    plan: "CachePlan"
    unpacked: bool
    device: DeviceKind
    machine: str

    @property
    def weight_bytes(self) -> int | None:
        """Bytes that a step reads, rounded as measurements are: what is read in turn while a product is timed. None is unknown."""
        read = self.work.weight_bytes()
        return None if read is None else bucket(read)


def kept_tflops(machine: str) -> float | None:
    """Return what a large matrix product reached on this machine, in 10^12 operations a second; None where it was never timed."""
    found = measurement_store.read_all(measurement_store.store_file(FILE))
    timed = (found.get(name(_peak_key(machine), number)) for number in range(1, PASSES + 1))
    return max((each for each in timed if each is not None), default=None)


def can_measure(plan: "CachePlan") -> bool:
    """Whether every layer can be timed alone: not those whose caches stay as the model made them."""
    return bool(plan.layers) and all(layer.ours is not None for layer in plan.layers)


class Measuring:
    """Times what is not known yet, a part at a time, so that it can wait for a request between two."""

    def __init__(self, subject: TimedModel, file: Path | None = None) -> None:
        self._subject = subject
        self._parts = tuple(_parts(subject)) if can_measure(subject.plan) else ()
        self._timings = Timings(file or measurement_store.store_file(FILE), self._parts)

    @property
    def missing(self) -> int:
        """Parts that were not timed yet."""
        return self._timings.missing

    @property
    def remaining(self) -> int:
        """Steps that remain: each part is timed several times."""
        return self._timings.remaining

    def steps(self) -> Iterator[None]:
        """Time what remains, a part a step. What is timed on a busy machine takes too long: it is used, but not kept."""
        return self._timings.steps()

    @property
    def peak_tflops(self) -> float | None:
        """10^12 operations a second of a large matrix product, once it was timed: prefill's ceiling."""
        return self._timings.best.get(_peak_key(self._subject.machine))

    def pace(self) -> MeasuredLatency | None:
        """Return the pace once every part was timed, else None. Further passes make it truer."""
        if not self._parts or self.missing:
            return None
        return _pace(self._subject, self._timings.best)


def _parts(subject: TimedModel) -> Iterator[TimedPart]:
    """Yield the machine's peak, and every part of the subject's steps. Nothing where a size is unknown."""

    work = subject.work
    if work.query_heads is None or work.hidden is None or work.vocabulary is None:
        return
    if subject.weight_bytes is None or work.prefill_parameters is None:
        return
    yield TimedPart(_peak_key(subject.machine), lambda: measure_tflops(subject.device), better=max)
    for matrix in work.products:
        for rows in (1,) if matrix.head else (1, ROWS):
            yield TimedPart(_product_key(subject, matrix, rows), _multiplying(subject, matrix, rows).seconds)
    for layers in _alike(subject.plan):
        for depth in depths_up_to(layers[0].limit):
            for rows in (1, ROWS):
                caches = _in_turn(layers, depth, rows)
                attending = AttentionTimer(layers[0], work.query_heads, depth, rows, caches)
                yield TimedPart(_attention_key(subject, layers, depth, rows), attending.seconds)
            if _takes_turns(subject):
                yield TimedPart(_turn_key(subject, layers, depth), _turning(subject, layers, depth).seconds)
    for rows in (1, ROWS):
        yield TimedPart(_key(subject, f"kernel of {work.hidden} x {rows}"), Launching(work.hidden, rows).seconds)
    yield TimedPart(_key(subject, f"sampling of {work.vocabulary}"), SamplingTimer(work.vocabulary).seconds)


def _pace(subject: TimedModel, known: Mapping[str, float]) -> MeasuredLatency:
    work = subject.work

    def timed(name: Callable[[int], str], *, head: bool = False) -> Timed:
        row = known[name(1)]
        return Timed(row, row if head else max(row, known[name(ROWS)]))

    products = tuple(
        (product, timed(lambda rows, each=product: _product_key(subject, each, rows), head=product.head))  # type: ignore[misc]
        for product in work.products
    )
    attention = tuple(_attention(subject, layers, known) for layers in _alike(subject.plan))
    covered = sum(product.count for product in work.products) + len(work.attention) + WRITES * len(subject.plan.layers)
    return MeasuredLatency(
        products=products,
        attention=attention,
        launch=timed(lambda rows: _key(subject, f"kernel of {work.hidden} x {rows}")),
        others=max(work.launches - covered, 0),
        sampling_s=known[_key(subject, f"sampling of {work.vocabulary}")],
        handing=tuple(_handing(subject, layers, known) for layers in _alike(subject.plan) if _takes_turns(subject)),
    )


WRITES = 2
"""Of a layer's kernels, those that timing its attention covers beside the attention: keys and values are written to its cache."""


def _attention(subject: TimedModel, layers: "list[LayerPlan]", known: Mapping[str, float]) -> TimedAttention:
    first, indices = layers[0], {layer.index for layer in layers}

    def points(rows: int) -> tuple[tuple[int, float], ...]:
        depths = depths_up_to(first.limit)
        seconds = (known[_attention_key(subject, layers, depth, rows)] for depth in depths)
        return tuple(zip(depths, accumulate(seconds, max), strict=True))  # more to read is never faster: that was noise

    # Layers that reuse another's keys attend to them as well.
    attending = sum(attention.layer in indices for attention in subject.work.attention)
    return TimedAttention(attending, first.limit, points(1), points(ROWS))


def _takes_turns(subject: TimedModel) -> bool:
    """Whether a layer's products are partly NumPy's, so that a step hands over to it and back layer by layer."""
    return any(_multiplying(subject, product).at_once for product in _of_a_layer(subject))


def _of_a_layer(subject: TimedModel) -> tuple[Product, ...]:
    """Return the products of a layer, each as often as most layers have it."""
    counts = ((product, round(product.count / subject.work.layers)) for product in subject.work.products)
    return tuple(product for product, count in counts if not product.head for _ in range(count))


def _turning(subject: TimedModel, layers: "list[LayerPlan]", depth: int) -> "Turning":

    hidden, heads = subject.work.hidden, subject.work.query_heads
    assert hidden is not None
    assert heads is not None
    attending = AttentionTimer(layers[0], heads, depth, 1, _layers_in_turn(subject, layers, depth))
    products = tuple(_multiplying(subject, product) for product in _of_a_layer(subject))
    return Turning(Launching(hidden, 1), attending, products)


def _handing(subject: TimedModel, layers: "list[LayerPlan]", known: Mapping[str, float]) -> HandingOver:
    """Return what a layer's parts take longer in turn than apart. More to read makes no layer faster: that was noise."""
    attention = _attention(subject, layers, known)
    others = sum(known[_product_key(subject, product, 1)] for product in _of_a_layer(subject))
    others += A_LAYER * known[_key(subject, f"kernel of {subject.work.hidden} x 1")]
    apart = [others + seconds for _, seconds in attention.row]
    depths = [depth for depth, _ in attention.row]
    in_turn = (known[_turn_key(subject, layers, depth)] for depth in depths)
    longest = accumulate((max(each) for each in zip(in_turn, apart, strict=True)), max)
    points = tuple((depth, whole - alone) for depth, whole, alone in zip(depths, longest, apart, strict=True))
    return HandingOver(attention.layers, attention.limit, points)


def _alike(plan: "CachePlan") -> "list[list[LayerPlan]]":
    """Return the layers in groups whose caches are alike."""
    return [list(group) for _, group in groupby(sorted(plan.layers, key=_shape), key=_shape)]


def _shape(layer: "LayerPlan") -> str:
    """Return what names a layer's attention: heads, dims, bits, and what it holds at most."""
    assert layer.ours is not None
    seen = layer.ours.seen
    bits = f"{layer.key_bits},{layer.value_bits} bits in {layer.group_size}{' rotated' if layer.rotated else ''}"
    return f"{seen.heads} heads of {seen.key_dim},{seen.value_dim} {bits} window {layer.window} type {seen.scale_bytes}"


def _in_turn(layers: "list[LayerPlan]", depth: int, rows: int) -> int:
    """Return how many caches attend in turn: a step's, up to LARGEST bytes; a chunk is bound by arithmetic, so one will do."""
    one = layers[0].bytes_at(depth)
    return 1 if rows > 1 else min(len(layers), max(1, LARGEST // max(one, 1)))


def _layers_in_turn(subject: TimedModel, layers: "list[LayerPlan]", depth: int) -> int:
    """Return how many layers run in turn: a step's, up to LARGEST bytes of weights, keys and values."""
    weights = sum(_multiplying(subject, product).nbytes for product in _of_a_layer(subject))
    return min(len(layers), max(1, LARGEST // max(weights + layers[0].bytes_at(depth), 1)))


def _turn_key(subject: TimedModel, layers: "list[LayerPlan]", depth: int) -> str:
    products = ", ".join(product.key for product in _of_a_layer(subject))
    turns = f"{_layers_in_turn(subject, layers, depth)} layers of {subject.work.hidden}, products {products}"
    return _key(subject, f"in turn: {turns}, attention {subject.work.query_heads} on {_shape(layers[0])} at {depth}")


def _multiplying(subject: TimedModel, product: Product, rows: int = 1) -> "Multiplying":

    assert subject.weight_bytes is not None
    return Multiplying(product, rows, subject.weight_bytes, unpacked=subject.unpacked)


def _attention_key(subject: TimedModel, layers: "list[LayerPlan]", depth: int, rows: int) -> str:
    turns = f"{_in_turn(layers, depth, rows)} caches"
    return _key(subject, f"attention {subject.work.query_heads} on {_shape(layers[0])} at {depth} x {rows}, {turns}")


def _peak_key(machine: str) -> str:
    return f"{machine} | large matrix product, 10^12 operations a second"


def _product_key(subject: TimedModel, product: Product, rows: int) -> str:
    return _key(subject, f"product {product.key} x {rows} of {subject.weight_bytes} bytes")


def _key(subject: TimedModel, part: str) -> str:
    return f"{subject.machine} | recipe {RECIPE} | {'unpacked' if subject.unpacked else 'as stored'} | {part}"


MOST_COPIES = 256

LEAST_TRIALS, MOST_TRIALS, BUDGET_S = 5, 25, 0.1
"""Repetitions of a part after its warm-up: as many as fit the budget, within bounds."""

HEAD_SIZES = (128, 64, 32, 16)

LAYERS = 4
"""How often a layer's A_LAYER small kernels are run in a row: enough that starting the row does not show."""


@dataclass(frozen=True, slots=True)
class Multiplying:
    """``rows`` rows (1: a decode step) times a matrix of this kind; copies of it come to ``weight_bytes``."""

    product: Product
    rows: int
    weight_bytes: int
    unpacked: bool

    @property
    def at_once(self) -> bool:
        """Whether a row is multiplied by NumPy, which needs its input evaluated (engine/model/cpu.py)."""
        return self._dense and not stays_lazy(self.product.rows * self.product.columns)

    @property
    def nbytes(self) -> int:
        """Bytes that a row reads of one matrix, as it lies here."""
        if self._dense:
            return 4 * self.product.rows * self.product.columns
        return self.product.nbytes(_float_type().size)

    def matrix(self) -> Callable[[mx.array], mx.array]:
        """Return what multiplies rows (1, N, columns) with a matrix of this kind, which has memory of its own."""
        return _multiplier(self.product, unpacked=self.unpacked)

    @property
    def _dense(self) -> bool:
        return self.unpacked and self.product.stack == 1

    def seconds(self) -> float:
        """Return the seconds of one product, and of the kernel before it: where a product waits for its input, that is part of
        it."""
        copies = 1
        if self.rows == 1:
            copies = max(1, min(self.weight_bytes // max(self.nbytes, 1), MOST_COPIES))
        multiply = [self.matrix() for _ in range(copies)]
        x = ones(self.rows, self.product.columns)
        return usual_s(lambda: mx.eval([each(x * 0.5) for each in multiply])) / copies


@dataclass(frozen=True, slots=True)
class AttentionTimer:
    """``caches`` caches of this plan in turn, each of which holds ``depth`` tokens: ``rows`` queries are appended and attend."""

    layer: "LayerPlan"
    query_heads: int
    depth: int
    rows: int
    caches: int

    def seconds(self) -> float:
        """Return the seconds of appending to one and attending, the mean over all: as many as a model has layers alike, so that
        a chip's caches hold no more of them than in a step."""
        caches, attended = self.filled(), self.attend()

        def step() -> None:
            mx.eval([attended(cache) for cache in caches])
            self.rewind(caches)

        return usual_s(step) / self.caches

    def filled(self) -> "list[Cache]":
        """Return the caches, each with ``depth`` tokens in it."""
        assert self.layer.ours is not None
        caches = [self.layer.make(self.layer.ours, 0) for _ in range(self.caches)]
        for cache in caches if self.depth else ():
            mx.eval(cache.update_and_fetch(*_pair(self.layer.ours.seen, self.depth, self._dtype)))
        return caches

    def attend(self) -> "Callable[[Cache], mx.array]":
        """Return what appends ``rows`` tokens to a cache and attends: (1, query heads, rows, D), not evaluated."""
        from mlx_lm.models import base

        assert self.layer.ours is not None
        seen = self.layer.ours.seen
        queries = mx.ones((1, self.query_heads, self.rows, seen.key_dim), dtype=self._dtype)
        new = _pair(seen, self.rows, self._dtype)
        mx.eval(queries)

        def attended(cache: "Cache") -> mx.array:
            mask = cache.make_mask(self.rows)
            keys, values = cache.update_and_fetch(*new)
            attend: Callable[..., mx.array] = base.scaled_dot_product_attention
            return attend(queries, keys, values, cache=cache, scale=0.1, mask=mask)

        return attended

    def rewind(self, caches: "list[Cache]") -> None:
        """Take back what was appended."""
        for cache in caches:
            cache.trim(min(self.rows, cache.rewindable))

    @property
    def _dtype(self) -> mx.Dtype:
        assert self.layer.ours is not None
        return _float_type() if self.layer.ours.seen.scale_bytes == 4 else mx.bfloat16


@dataclass(frozen=True, slots=True)
class Launching:
    """The small kernels of a layer over ``rows`` rows of the residual: two norms, two rotations, two sums, a gated product."""

    hidden: int
    rows: int

    def seconds(self) -> float:
        """Return the seconds of one, the mean over a row of them. On a CPU a rotation is a dozen kernels, so it weighs most."""
        layer, x = self.layer(), ones(self.rows, self.hidden)

        def chain() -> None:
            y = x
            for _ in range(LAYERS):
                y = layer(y)
            mx.eval(y)

        return usual_s(chain) / (LAYERS * A_LAYER)

    def layer(self) -> Callable[[mx.array], mx.array]:
        """Return a layer's kernels over rows (1, rows, hidden) → the same shape, not evaluated."""
        from mlx import nn

        head = next((size for size in HEAD_SIZES if self.hidden % size == 0), self.hidden)
        weight = mx.ones((self.hidden,), dtype=_float_type())
        mx.eval(weight)

        def layer(y: mx.array) -> mx.array:
            turned = mx.fast.rms_norm(y, weight, 1e-5).reshape(1, self.rows, -1, head).transpose(0, 2, 1, 3)
            for _ in range(2):
                turned = mx.fast.rope(turned, head, traditional=False, base=1e4, scale=1.0, offset=self.rows)
            y = y + turned.transpose(0, 2, 1, 3).reshape(y.shape)
            summed: mx.array = y + nn.silu(y) * mx.fast.rms_norm(y, weight, 1e-5)
            return summed

        return layer


@dataclass(frozen=True, slots=True)
class SamplingTimer:
    """The likeliest of a vocabulary's logits, brought to the host."""

    vocabulary: int

    def seconds(self) -> float:
        """Return the seconds of choosing."""
        logits = mx.zeros((1, self.vocabulary), dtype=_float_type())
        mx.eval(logits)
        return usual_s(lambda: mx.argmax(logits + 1.0, axis=-1).tolist())


def ones(rows: int, columns: int) -> mx.array:
    """Return the input of a layer, evaluated: (1, rows, columns)."""
    x = mx.ones((1, rows, columns), dtype=_float_type())
    mx.eval(x)
    return x


def _pair(seen: Any, tokens: int, dtype: mx.Dtype) -> list[mx.array]:
    """Return keys and values (1, H, tokens, D), all a tenth."""
    pair = [mx.full((1, seen.heads, tokens, dim), 0.1, dtype=dtype) for dim in (seen.key_dim, seen.value_dim)]
    mx.eval(pair)
    return pair


def _multiplier(product: Product, *, unpacked: bool) -> Callable[[mx.array], mx.array]:
    """Return what multiplies rows (1, N, columns) with a matrix of this kind."""
    if unpacked and product.stack == 1:
        return DenseLinear(_constant((product.columns, product.rows), mx.float32).T, None).__call__
    if product.bits is not None:
        return _packed(product)
    matrix = _constant((product.stack, product.columns, product.rows), _float_type())
    if product.stack == 1:
        return lambda x: x @ matrix[0]
    return lambda x: mx.gather_mm(_one_row(x), matrix, rhs_indices=_chosen(product, x.shape[1]))


def _packed(product: Product) -> Callable[[mx.array], mx.array]:
    assert product.bits is not None
    affine = product.mode == "affine"
    shape = (product.stack, product.rows)
    weight = _constant((*shape, product.columns * product.bits // 32), mx.uint32)
    # Microscaled formats keep one byte a group and no bias.
    scales = _constant((*shape, product.columns // product.group_size), _float_type() if affine else mx.uint8)
    biases = scales if affine else None
    kwargs: Any = {"group_size": product.group_size, "bits": product.bits, "mode": product.mode, "transpose": True}
    if product.stack == 1:
        bias = None if biases is None else biases[0]
        return lambda x: mx.quantized_matmul(x, weight[0], scales[0], bias, **kwargs)
    return lambda x: mx.gather_qmm(
        _one_row(x), weight, scales, biases, rhs_indices=_chosen(product, x.shape[1]), **kwargs
    )


def _chosen(product: Product, tokens: int) -> mx.array:
    """Return experts (1, N, active) spread over the stack, as a router would choose."""
    chosen = mx.arange(tokens * product.active) % product.stack
    return chosen.astype(mx.uint32).reshape(1, tokens, product.active)


def _one_row(x: mx.array) -> mx.array:
    """x (1, N, C) → (1, N, 1, 1, C), as mlx-lm's switch layers do."""
    return mx.expand_dims(x, (-2, -3))


def _constant(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    value = mx.full(shape, 1, dtype=dtype)
    mx.eval(value)
    return value


def _float_type() -> mx.Dtype:
    """Return what the engine computes in: float32 on a CPU, a half on a GPU."""
    return mx.float32 if device_kind() == "cpu" else mx.bfloat16


def usual_s(run: Callable[[], Any], *, patience: float = 1.0) -> float:
    """Return the lower quartile of a part's times: what others do on the machine only ever adds to them, and the best is luck.

    patience: how much longer than other parts it is tried.
    """
    run()
    times = sorted(_times(run, BUDGET_S * patience))
    return times[len(times) // 4]


def _times(run: Callable[[], Any], budget_s: float) -> Iterator[float]:
    end = time.perf_counter() + budget_s
    for count in range(MOST_TRIALS):
        began = time.perf_counter()
        if count >= LEAST_TRIALS and began > end:
            return
        run()
        yield time.perf_counter() - began


PATIENCE = 2.0
"""A step of a model with such layers is little else than these: worth a closer look."""

Step = Callable[["Cache"], None]


@dataclass(frozen=True, slots=True)
class Turning:
    """A layer's small kernels, attention and products, these each as often as the layer has it; as many layers as ``attending``
    has caches, with weights of their own."""

    launching: Launching
    attending: AttentionTimer
    multiplying: tuple[Multiplying, ...]

    def seconds(self) -> float:
        """Return the seconds of one layer, all its parts in turn."""
        caches = self.attending.filled()
        layers = [self._layer() for _ in caches]

        def step() -> None:
            for layer, cache in zip(layers, caches, strict=True):
                layer(cache)
            self.attending.rewind(caches)

        return usual_s(step, patience=PATIENCE) / len(caches)

    def _layer(self) -> Step:
        """Return what runs a layer: what MLX computes is evaluated together, as NumPy's first product asks for it."""
        hidden = self.launching.hidden
        kernels, attend = self.launching.layer(), self.attending.attend()
        given = {
            columns: ones(1, columns) for columns in {hidden, *(each.product.columns for each in self.multiplying)}
        }
        lazy = [(each.product.columns, each.matrix()) for each in self.multiplying if not each.at_once]
        numpy = [(each.product.columns, each.matrix()) for each in self.multiplying if each.at_once]
        # Products of as many columns share their input, which is evaluated once: gate and up, queries, keys and values.
        together = [
            (columns, [matrix for _, matrix in group]) for columns, group in groupby(numpy, lambda pair: pair[0])
        ]

        def layer(cache: "Cache") -> None:
            y = kernels(given[hidden])
            products = [multiply(y if columns == hidden else given[columns]) for columns, multiply in lazy]
            mx.eval(attend(cache), products, y)
            for columns, group in together:
                x = y if columns == hidden else given[columns] * 0.5
                for multiply in group:
                    multiply(x)

        return layer
