"""Time the parts that a step of a model is made of, on the device it would run on: its own products, its own attention, the rest.

Each part is timed as the engine runs it: the same modules, the same caches, the same types. Weights are constants, but as many
copies of a matrix are read in turn as the model has bytes, so that a cache holds no more of them than it would in a real step.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from tokamac.engine.cpu import DenseLinear, stays_lazy
from tokamac.engine.device import device_kind
from tokamac.engine.limits.measured import A_LAYER
from tokamac.engine.limits.products import Product

if TYPE_CHECKING:
    from tokamac.engine.kv.cache import Cache
    from tokamac.engine.kv.plan import LayerPlan

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
        """Whether a row is multiplied by NumPy, which needs its input evaluated (engine/cpu.py)."""
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
class Attending:
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
class Sampling:
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
