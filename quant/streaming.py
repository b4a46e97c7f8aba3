"""A calibration text, and a model run over it with one layer's weights in memory; its linear inputs observed."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from tokamac.engine.device import DeviceKind, device_kind
from tokamac.engine.errors import OptionError, access_hint
from tokamac.engine.files import TooLargeError, read_bytes
from tokamac.engine.kv.attention import attending_uncached, install_seam
from tokamac.engine.model.config import read_config
from tokamac.engine.model.loader import build_model
from tokamac.engine.model.safetensors import find_shards
from tokamac.engine.text.tokenizer import Tokenizer, opening

from .source import Method, Source, clone, fresh, override

# Nothing is random: the same text and tokenizer give the same tokens.


LENGTH = 512  # tokens of a sequence, unless said otherwise

LEAST_CHARACTERS = 1_000
MOST_BYTES = 16 << 20  # a larger file is taken for a mistake: of 16 MiB, calibration reads less than a hundredth

STRETCHES, EVERY = 40, 5

LONG_TOKEN = 64  # characters


def calibration_text(file: Path | None) -> str:
    """Return the text of a UTF-8 file, or the shipped one. Raises OptionError if unreadable or unfit."""
    if file is None:
        from tokamac.assets import asset_path

        return asset_path("calibration.txt").read_text(encoding="utf-8")
    content = _read(file)
    try:
        found = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OptionError(f"{file} is not UTF-8 text", "Only text can be read: convert it first.") from error
    if "\0" in found:
        raise OptionError(f"{file} is not text", "Only text can be read: convert it first.")
    if len(found.strip()) < LEAST_CHARACTERS:
        raise OptionError(
            f"{file} holds {len(found.strip()):,} characters of text",
            f"Give at least {LEAST_CHARACTERS:,}, or better some pages, of the kind that the model will read.",
        )
    return found


def calibration_sequences(tokenizer: Tokenizer, text: str, count: int, length: int = LENGTH) -> list[list[int]]:
    """Return ``count`` sequences of ``length`` tokens, evenly spread, disjoint, without held-back text.

    Each begins with the tokenizer's opening ids. A shorter text gives fewer, or one short sequence.
    """
    begins = opening(tokenizer)
    ids = tokenizer.encode("".join(_stretches(text, held_back=False)))
    piece = max(1, length - len(begins))
    fitting = min(count, len(ids) // piece)
    return [begins + part for part in _spread(ids, [piece] * fitting)] if fitting else [begins + ids]


def verification_ids(tokenizer: Tokenizer, text: str, length: int = LENGTH) -> list[int]:
    begins, pieces = opening(tokenizer), STRETCHES // EVERY
    ids = tokenizer.encode("".join(_stretches(text, held_back=True)))
    most = min(max(1, length - len(begins)), len(ids))
    sizes = [most // pieces + (number < most % pieces) for number in range(pieces)]
    return begins + [token for part in _spread(ids, sizes) for token in part]


def first_ids(tokenizer: Tokenizer, text: str, length: int) -> list[int]:
    begins = opening(tokenizer)
    # A long text need not be encoded whole: few tokens are longer than this.
    ids = tokenizer.encode(text[: LONG_TOKEN * length])
    return begins + ids[: max(1, length - len(begins))]


def _read(file: Path) -> bytes:
    try:
        return read_bytes(file, MOST_BYTES)
    except TooLargeError as error:
        raise OptionError(
            f"{file} is larger than {MOST_BYTES >> 20} MiB", "Give a part of it: some hundred pages are plenty."
        ) from error
    except OSError as error:
        raise OptionError(
            f"{file} can't be read: {error.strerror or error}", access_hint(error, "Check the path of the text.")
        ) from error


def _stretches(text: str, *, held_back: bool) -> list[str]:
    size = len(text)
    cuts = [0]
    for number in range(1, STRETCHES):
        start, end = number * size // STRETCHES, (number + 1) * size // STRETCHES
        line = text.find("\n", start, end)
        cuts.append(start if line < 0 else line + 1)
    whole = [text[start:end] for start, end in pairwise([*cuts, size])]
    return [stretch for number, stretch in enumerate(whole, start=1) if (number % EVERY == 0) is held_back]


def _spread(ids: list[int], sizes: list[int]) -> list[list[int]]:
    spare, count = len(ids) - sum(sizes), len(sizes)
    starts = [done + spare * number // count for number, done in enumerate(accumulate(sizes[:-1], initial=0))]
    return [ids[start : start + size] for start, size in zip(starts, sizes, strict=True)]


#     ids ─▶ embedding ─▶ layer ─▶ layer ─▶ … ─▶ norm ─▶ head ─▶ log-probabilities
#
# mlx-lm's own model is called as a whole; in a copy, layers, embedding and head are replaced by stand-ins that read
# their weights, compute, evaluate and free. On a CPU layers run in float32 by NumPy; elsewhere in the checkpoint's
# types. No cache: the text is one piece.

# While a display is on, macOS kills a command that keeps the GPU too long (ml-explore/mlx#3267), so rows are multiplied
# in pieces: 16,384 rows by a large matrix take about 1 s on an M1. Derived from the peak, not yet run on a Mac.


LONGEST_S = 0.25  # what one product may take, about: a display is then redrawn some times a second

REACHED = 0.5  # the share of a chip's half-precision peak that large products reach at least, in float32 too

SLOWEST_TFLOPS = 2.32  # of an M1 with seven GPU cores: assumed of an Apple GPU that the table of chips does not know

STEP = 256  # rows of a piece are a multiple of it, so that kernels' tiles are full

# Outputs of a linear layer at an end that are unpacked at once on a CPU: 134 MB of float32 where a layer is 4,096 wide.
ROWS = 1 << 13

LINEAR = (nn.Linear, nn.QuantizedLinear)
EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
ENDS = (*EMBEDDINGS, nn.Linear, nn.QuantizedLinear)  # kinds of modules outside the layers that may be as big as a layer

Watch = Callable[[int, mx.array], None]  # is given a layer's number and its output (1, n, dims), evaluated

LayersDone = Callable[[int, int], None]  # is told the layers computed so far, and all

# Opens a checkpoint again: fresh lazy arrays by name. Evaluating one reads it, letting go of it frees it.
Read = Callable[[], dict[str, mx.array]]


@dataclass(frozen=True, slots=True)
class Inputs:
    """One call's inputs to a linear layer: rows (n, in), in token order, maybe lazy."""

    path: str
    rows: mx.array
    experts: mx.array | None = None
    stack: int | None = None


Observer = Callable[[Inputs], None]


@dataclass(frozen=True, slots=True)
class Streamable:
    """A model whose weights can be read repeatedly."""

    module: nn.Module
    read: Read


def streamable_folder(folder: Path, *, unchecked: bool = False) -> Streamable:
    """Return the model in ``folder`` as the engine builds it. Raises ModelError."""
    find_shards(folder)

    def opened() -> nn.Module:
        return build_model(folder, read_config(folder), unchecked=unchecked)[0]

    return Streamable(opened(), lambda: dict(tree_flatten(opened().parameters())))


def streamable_source(source: Source) -> Streamable:
    return Streamable(source.module, lambda: fresh(source))


class Streamed:
    """A model that runs layer by layer, repeatedly. progress: called after every layer, on this thread."""

    def __init__(
        self, model: Streamable, *, device: DeviceKind | None = None, progress: LayersDone | None = None
    ) -> None:
        self._model = model
        self._on_cpu = (device or device_kind()) == "cpu"
        self._progress = progress

    @property
    def layers(self) -> int:
        module: Any = self._model.module
        return len(module.layers)

    def run(self, ids: Sequence[int], *, observer: Observer | None = None, watch: Watch | None = None) -> mx.array:
        """Return (n, vocabulary) float32, evaluated: log-probabilities after each of ``ids``."""
        model = self._open(observer, watch, lazy_ends=False)
        with attending_uncached():
            logits = model(mx.array([list(ids)]))[0].astype(mx.float32)
        found: mx.array = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(found)
        return found

    def observe(self, batch: Sequence[Sequence[int]], observer: Observer) -> None:
        """Run equal-length sequences in parallel for ``observer``, without logits."""
        # Memory beside a layer: some 4 × tokens × widest layer × 4 bytes; 1 GB for 4,096 tokens of an 8B model.
        model = self._open(observer, None, lazy_ends=True)
        with attending_uncached():
            model(mx.array([list(ids) for ids in batch]))

    def _open(self, observer: Observer | None, watch: Watch | None, *, lazy_ends: bool) -> Any:
        model = clone(self._model.module).eval()
        model.update(tree_unflatten(list(self._model.read().items())))
        if self._on_cpu:
            install_seam()
            model.set_dtype(mx.float32)
        numbers = {id(layer): number for number, layer in enumerate(model.layers)}
        reader = _Reader(self._model.read, self._on_cpu, observer)
        finished = partial(_finished, len(numbers), watch, self._progress)
        for path, module in _streamed_modules(model, numbers):
            # The copy comes first: it must not have the override.
            if id(module) in numbers:
                layer = _Layer(path, clone(module), reader, partial(finished, numbers[id(module)]))
                override(module, __call__=layer.call)
            elif isinstance(module, EMBEDDINGS):
                end = _End(path, clone(module), reader, lazy_ends)
                override(module, __call__=end.look_up, as_linear=end.multiply)
            elif isinstance(module, ENDS):
                override(module, __call__=_End(path, clone(module), reader, lazy_ends).multiply)
        return model


def _finished(total: int, watch: Watch | None, progress: LayersDone | None, number: int, output: mx.array) -> None:
    mx.clear_cache()  # the pool would keep what the layer's weights took
    if watch is not None:
        watch(number, output)
    if progress is not None:
        progress(number + 1, total)


def _streamed_modules(model: nn.Module, layers: dict[int, int]) -> Iterator[tuple[str, nn.Module]]:
    modules = list(model.named_modules())
    seen = {
        id(part) for _, module in modules if id(module) in layers for part in module.modules() if part is not module
    }
    for path, module in modules:
        if id(module) not in seen:
            seen.add(id(module))
            yield path, module


@dataclass(slots=True)
class _Reader:
    """Fills module copies with weights, each array handed out once, so that nothing keeps it."""

    read: Read
    on_cpu: bool  # in float32, and multiplied by NumPy, as the engine does on a plain CPU
    observer: Observer | None
    left: dict[str, mx.array] = field(default_factory=dict)

    def fill(self, path: str, template: nn.Module) -> Any:
        names = [name for name, _ in tree_flatten(template.parameters())]
        if any(f"{path}.{name}" not in self.left for name in names):
            self.left = self.read()  # the first call, or a module that is called again
        filled = clone(template)
        filled.update(tree_unflatten([(name, self.left.pop(f"{path}.{name}")) for name in names]))
        return filled


@dataclass(frozen=True, slots=True)
class _Layer:
    path: str
    template: nn.Module
    reader: _Reader
    finished: Callable[[mx.array], None]

    def call(self, _: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Computed in a function of its own, so that the weights are gone before the next.
        output = self._compute(*args, **kwargs)
        self.finished(output if isinstance(output, mx.array) else output[0])
        return output

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        filled = self.reader.fill(self.path, self.template)
        if self.reader.on_cpu:
            from tokamac.engine.cpu.layers import unpack

            filled.set_dtype(mx.float32)
            unpack(filled)
        if self.reader.observer is not None:
            observe(filled, self.path, self.reader.observer)
        output = filled(*args, **kwargs)
        mx.eval(output)
        return output


@dataclass(frozen=True, slots=True)
class _End:
    path: str
    template: nn.Module
    reader: _Reader
    lazy: bool  # products are computed when somebody asks for them, which for the output head may be never

    def look_up(self, _: nn.Module, ids: mx.array) -> mx.array:
        table = self.reader.fill(self.path, self.template)
        if bool(mx.any((ids < 0) | (ids >= len(table.weight))).item()):  # MLX would read past the end
            raise OptionError("the text has tokens that the model does not know", "Use the model's own tokenizer.")
        if self.reader.on_cpu:
            table, ids = _rows_of(table, ids.reshape(-1)), mx.arange(ids.size).reshape(ids.shape)
        rows: mx.array = table(ids)
        mx.eval(rows)
        return rows

    def multiply(self, _: nn.Module, x: mx.array) -> mx.array:
        filled = self.reader.fill(self.path, self.template)
        if self.reader.observer is not None:  # of an embedding too: packed, its errors come out as a head's
            self.reader.observer(Inputs(self.path, x.reshape(-1, x.shape[-1])))
        in_float32 = self.reader.on_cpu and not self.lazy
        y = _multiplied(filled, x) if in_float32 else _product(filled, x)
        if not self.lazy:
            mx.eval(y)
        return y


def _rows_of(module: nn.Module, rows: mx.array | slice) -> Any:
    part = clone(module)
    size = len(part.weight)
    whole = {name: array for name, array in part.parameters().items() if array.ndim and len(array) == size}
    part.update({name: array[rows] for name, array in whole.items()})
    part.set_dtype(mx.float32)
    return part


def _multiplied(module: Any, x: mx.array) -> mx.array:
    # An embedding leaves products of many rows to MLX, as prefill never needs them.
    from tokamac.engine.cpu.layers import DenseEmbedding, DenseLinear, unpack

    pieces = []  # unpacked one by one: in float32, the whole of W would be larger than any layer
    for begin in range(0, len(module.weight), ROWS):
        holder = nn.Module()
        holder.piece = _rows_of(module, slice(begin, begin + ROWS))
        unpack(holder)
        piece = holder.piece
        pieces.append(_product(DenseLinear(piece.weight, None) if isinstance(piece, DenseEmbedding) else piece, x))
    return mx.concatenate(pieces, axis=-1)


def _product(module: Any, x: mx.array) -> mx.array:
    y: mx.array = module.as_linear(x) if isinstance(module, EMBEDDINGS) else module(x)
    return y


def observe(module: nn.Module, path: str, observer: Observer) -> None:
    """Call ``observer`` for each linear layer or SwitchLinear call in ``module``, packed or not."""
    # Not for convolutions, embeddings (even as the output head), or per-head products.
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    first = {
        id(layer): (name, layer) for name, layer in reversed(module.named_modules())
    }  # one may stand at two places
    for name, layer in first.values():
        own, whole = type(layer).__call__, ".".join(filter(None, (path, name)))
        if isinstance(layer, LINEAR):
            override(layer, __call__=_observed_linear(own, whole, observer))
        elif isinstance(layer, SwitchLinear | QuantizedSwitchLinear):
            override(layer, __call__=_observed_stack(own, whole, observer))


def _observed_linear(own: Method, path: str, observer: Observer) -> Method:
    def call(layer: Any, x: mx.array) -> Any:
        observer(Inputs(path, x.reshape(-1, x.shape[-1])))
        return in_pieces(partial(own, layer), x, outputs=layer.weight.shape[0])

    return call


def _observed_stack(own: Method, path: str, observer: Observer) -> Method:
    def call(layer: Any, x: mx.array, indices: mx.array, **kwargs: Any) -> Any:
        # x (..., m, in) and indices (...) are matched by broadcasting: one row of a token for each expert it is sent to.
        batch = mx.broadcast_shapes(x.shape[:-2], indices.shape)
        rows = mx.broadcast_to(x, (*batch, *x.shape[-2:])).reshape(-1, x.shape[-1])
        experts = mx.broadcast_to(mx.expand_dims(indices, -1), (*batch, x.shape[-2])).reshape(-1)
        observer(Inputs(path, rows, experts, layer.num_experts))
        return own(layer, x, indices, **kwargs)

    return call


def activation_statistics(model: Streamed, sequences: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """Return each linear layer's mean squared input per channel, by module path.

    float32 (in,), or (experts, in) for stacks; experts without tokens get the stack's mean. Unobserved layers and
    non-finite inputs have no entry. Raises OptionError for unknown tokens, ModelError.
    """
    # Weights of the least-squares search: E‖(Ŵ − W) x‖² = Σ (ŵ − w)² E[x²] for uncorrelated channels.
    sums: dict[str, _SquareSum] = {}

    def add(inputs: Inputs) -> None:
        if inputs.path not in sums:
            sums[inputs.path] = _SquareSum(inputs)
        sums[inputs.path].add(inputs)

    model.observe(sequences, add)
    means = {path: each.mean() for path, each in sums.items()}
    return {path: mean for path, mean in means.items() if math.isfinite(float(mean.sum(dtype="float64")))}


class _SquareSum:
    """Sums squares in float64 on the host; a plain layer counts as one expert."""

    def __init__(self, first: Inputs) -> None:
        experts, self._stacked = first.stack or 1, first.stack is not None
        self._squares = np.zeros((experts, first.rows.shape[-1]))
        self._rows = np.zeros(experts, np.int64)

    def add(self, inputs: Inputs) -> None:
        squares = mx.square(inputs.rows.astype(mx.float32))
        if inputs.experts is None:
            self._squares += np.asarray(mx.sum(squares, axis=0))
            self._rows += len(squares)
        else:
            self._squares += np.asarray(mx.zeros(self._squares.shape).at[inputs.experts].add(squares))
            self._rows += np.bincount(np.asarray(inputs.experts), minlength=len(self._rows))

    def mean(self) -> np.ndarray:
        overall = self._squares.sum(axis=0) / self._rows.sum()
        own = self._squares / np.maximum(self._rows, 1)[:, None]
        means = np.where(self._rows[:, None] > 0, own, overall).astype(np.float32)
        return means if self._stacked else means.reshape(-1)


def in_pieces(product: Callable[[mx.array], mx.array], x: mx.array, outputs: int) -> mx.array:
    rows, inputs = x.size // x.shape[-1], x.shape[-1]
    most = rows_here(2 * inputs * outputs)
    if most is None or rows <= most:
        return product(x)
    flat, pieces = x.reshape(rows, inputs), []
    for begin in range(0, rows, most):
        pieces.append(product(flat[begin : begin + most]))
        mx.eval(pieces[-1])
    return mx.concatenate(pieces).reshape(*x.shape[:-1], -1)


def rows_here(row_operations: int) -> int | None:
    kind = device_kind()
    return rows_at_once(kind, _peak_tflops() if kind == "metal" else None, row_operations)


def rows_at_once(kind: DeviceKind, peak_tflops: float | None, row_operations: int) -> int | None:
    """Return the most rows per product; None on CPUs and CUDA.

    peak_tflops: half precision, 10^12 operations/s, or None. row_operations: twice the matrix's size.
    """
    if kind != "metal":
        return None
    operations = (peak_tflops or SLOWEST_TFLOPS) * 1e12 * REACHED * LONGEST_S
    return max(int(operations / row_operations) // STEP * STEP, STEP)


@cache
def _peak_tflops() -> float | None:
    from tokamac.engine.perf.hardware import detect

    return detect().fp16_tflops
