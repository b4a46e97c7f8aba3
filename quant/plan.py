"""The plan of a conversion: every tensor's bits, also from a budget, every file's bytes, memory and time."""

import itertools
import json
import math
import os
import re
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import mlx.core as mx
import numpy as np
import xxhash

from tokamac.engine import files
from tokamac.engine.errors import ConversionError, OptionError
from tokamac.engine.files import TOKENIZER_FILES
from tokamac.engine.metrics import rate
from tokamac.engine.model.weights import VISION_FILE, text_config
from tokamac.engine.perf.config_cost import Packing
from tokamac.engine.perf.cost import Tensor

from . import awq, gptq, sensitivity
from .evaluation import CHECKED_TOKENS
from .options import BITS, GROUP_SIZES, SEARCHED, UNQUANTIZED, Method, Options
from .packing import (
    BLOCK_WEIGHTS,
    Choices,
    Quantizer,
    Round,
    Search,
    choose_beside,
    left_out,
    model_rule,
    out_of_groups,
    packable,
    part,
)
from .report import StageDone, StageProgress, in_vain
from .resume import append
from .search import implementation, on_mlx
from .sensitivity import AlphaBasis, Errors, ErrorTrial, alpha_basis, find_alphas, packed_type, relative_errors, sample
from .source import Beside, Source, fresh, layer_paths, open_source
from .streaming import LENGTH, Streamed, activation_statistics, streamable_source

if TYPE_CHECKING:
    import numpy as np

# Peak memory follows from shapes, with bytes per weight measured on MLX's CPU backend. Time extrapolates a small real
# sample of reading, packing and writing; calibration and verification are not included.


# Safetensors files written one array at a time.

SHARD_BYTES = 1_000_000_000
INDEX = "model.safetensors.index.json"

_TYPES: dict[Any, tuple[str, int]] = {
    mx.float32: ("F32", 4), mx.float16: ("F16", 2), mx.bfloat16: ("BF16", 2), mx.uint32: ("U32", 4), mx.int32: ("I32", 4),
    mx.uint8: ("U8", 1), mx.int8: ("I8", 1), mx.uint16: ("U16", 2), mx.int16: ("I16", 2), mx.int64: ("I64", 8),
    mx.uint64: ("U64", 8), mx.bool_: ("BOOL", 1),
}  # fmt: skip
_BYTES = dict(_TYPES.values())

# MLX types that weights are cast to, by safetensors name.
FLOATS = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}


def type_name(dtype: Any) -> str:
    if dtype not in _TYPES:
        raise ConversionError(
            f"weights of type {dtype} can't be written", "Use a checkpoint in float32, float16 or bfloat16."
        )
    return _TYPES[dtype][0]


def type_bytes(name: str) -> int:
    return _BYTES[name]


@dataclass(frozen=True, slots=True)
class Shard:
    name: str
    tensors: tuple[Tensor, ...]

    @property
    def header(self) -> bytes:
        entries: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
        end = 0
        for tensor in self.tensors:
            offsets = [end, end := end + tensor.nbytes]
            entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    @property
    def ends(self) -> dict[str, int]:
        sizes = itertools.accumulate((tensor.nbytes for tensor in self.tensors), initial=len(self.header))
        next(sizes)
        return dict(zip((tensor.name for tensor in self.tensors), sizes, strict=True))

    @property
    def file_bytes(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


def lay_out(groups: Sequence[tuple[Tensor, ...]], limit: int = SHARD_BYTES) -> tuple[Shard, ...]:
    """Return files of at most ``limit`` array bytes; groups stay whole, a larger one gets its own file."""
    shards: list[list[Tensor]] = [[]]
    filled = 0
    for group in groups:
        size = sum(tensor.nbytes for tensor in group)
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].extend(group)
        filled += size
    parts = [f"model-{number:05d}-of-{len(shards):05d}" for number in range(1, len(shards) + 1)]
    names = parts if len(shards) > 1 else ["model"]
    return tuple(Shard(f"{name}.safetensors", tuple(tensors)) for name, tensors in zip(names, shards, strict=True))


def index_json(shards: Sequence[Shard], *, parameters: int) -> bytes:
    where = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
    total = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    metadata = {"total_size": total, "total_parameters": parameters}
    index = {"metadata": metadata, "weight_map": dict(sorted(where.items()))}
    return (json.dumps(index, indent=4) + "\n").encode()


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes appended to a shard up to ``end``. checksum: XXH3, 128 bits. complete: shard synced to disk."""

    shard: str
    end: int
    checksum: str
    complete: bool


class ShardWriter:
    """Appends arrays to shards in layout order. written: how many are there already."""

    def __init__(self, folder: Path, shards: Sequence[Shard], written: int = 0) -> None:
        self._folder = folder
        self._pending = [(shard, tensor) for shard in shards for tensor in shard.tensors][written:][::-1]
        self._shard: Shard | None = None
        self._file: int | None = None
        self._hash = xxhash.xxh3_128()

    def append(self, name: str, array: mx.array) -> None:
        """Write the next array, with the layout's type and shape. Raises OSError."""
        shard, tensor = self._pending.pop()
        if (name, type_name(array.dtype), tuple(array.shape)) != (tensor.name, tensor.dtype, tensor.shape):
            raise ConversionError(
                f"{name} came out as {array.dtype} {array.shape} where {tensor} was planned",
                "This is a bug: please report it.",
            )
        # Bytes, because NumPy has no bfloat16; a view of the array, not a copy.
        append(self._opened(shard), np.asarray(mx.contiguous(array).reshape(-1).view(mx.uint8)).data, self._hash.update)

    def mark(self) -> Extent:
        """Return the extent appended since the last call, within one shard; a finished shard is synced."""
        if self._file is None or self._shard is None:
            raise ValueError("nothing was appended")
        complete = not self._pending or self._pending[-1][0] is not self._shard
        extent = Extent(self._shard.name, os.fstat(self._file).st_size, self._hash.hexdigest(), complete)
        self._hash.reset()
        if complete:
            os.fsync(self._file)
            self._close()
        return extent

    def _opened(self, shard: Shard) -> int:
        if self._file is None:
            self._shard = shard
            self._file = os.open(self._folder / shard.name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            if not os.fstat(self._file).st_size:
                append(self._file, shard.header, self._hash.update)
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()


# Methods that pack by what goes through the model; each module has `check`, `pack`, `peak_bytes` and `SEQUENCES`.
CALIBRATED_METHODS: Mapping[str, ModuleType] = {"gptq": gptq, "awq": awq}

# Of `streaming.LENGTH` tokens: what search looks at. With 2,048 and with 4,096 SmolLM2 came as near to its source, the
# difference far within the error of its KL divergence; of experts, each sees few of them.
SEQUENCES, EXPERTS_SEQUENCES = 4, 8

# Files that go along. Never code, never pickles.
COPIED = (
    "tokenizer*.json", "*.model", "*.tiktoken", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "*.jinja", "chat_template.json", "generation_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*",
    "modules.json", "config_sentence_transformers.json", "[0-9]_*/config.json", "[0-9]_*/model.safetensors",
)  # fmt: skip

SETTINGS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")  # of towers

TOKENIZERS = (*TOKENIZER_FILES, "vocab.txt", "*.tiktoken")

# Bytes a weight beside the weight itself, while a block is rounded.
ROUNDING = {"affine": 8, "mxfp4": 41, "nvfp4": 77, "mxfp8": 8}

SEARCHING = 3  # bytes a weight beside the weight itself, while a tensor is searched by numba, which holds few arrays

UNPACKING = 18  # bytes a weight while a packed one is unpacked, at 3 bits; other bits take less

# Bytes a weight of the layer that is computed: in float32, as it is unpacked, and of the layer before it, not yet let
# go.
LAYER_WEIGHT = 12

# Bytes for each word of the vocabulary at each position of a text: logits of two models, and what is computed of them.
POSITION_WORD = 16

SAMPLE_S = 0.3  # packing is timed for no longer than this, once it has been set up

# The first piece that is timed, and how much larger each is than the one before: small ones cost more a value.
FIRST_VALUES, GROWTH = 1 << 16, 4

ENOUGH_VALUES = 1 << 18  # a tensor of this many weights is packed at the rate of large ones, and read in a moment


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor's source shape and type, and its target. kept: packed already, taken over as is."""

    name: str
    shape: tuple[int, ...]
    source_dtype: str
    source_bytes: int
    dtype: str
    packing: Packing | None
    kept: bool
    outputs: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return sum(output.nbytes for output in self.outputs)

    @property
    def parameters(self) -> int:
        """Weights in it."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class BesidePlan:
    named: str
    tensors: tuple[TensorPlan, ...]
    shard: Shard


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole conversion, in bytes.

    peak_memory_bytes: an upper estimate of MLX's. beside: the model, not counted in its weights. carried: of a
    GGUF file.
    """

    source: Path
    options: Options
    tensors: tuple[TensorPlan, ...]
    shards: tuple[Shard, ...]
    config: dict[str, Any]
    copies: tuple[Path, ...]
    source_bytes: int
    peak_memory_bytes: int
    notes: tuple[str, ...]
    beside: tuple[BesidePlan, ...] = ()
    carried: tuple[str, ...] = ()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all arrays written."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def parameters(self) -> int:
        """Weights of the model."""
        return sum(tensor.parameters for tensor in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits ÷ weights, scales and biases included."""
        return 8 * self.weight_bytes / self.parameters

    @property
    def output_bytes(self) -> int:
        """Bytes of the files of the finished folder, but for the card and the record."""
        copied = sum(file.stat().st_size for file in self.copies)
        beside = sum(each.shard.file_bytes for each in self.beside)
        shards = sum(shard.file_bytes for shard in self.shards)
        return shards + beside + len(self.config_json) + len(self.index_json) + copied

    @property
    def needed_bytes(self) -> int:
        """Bytes that those files may come to: a budget may spend more than a plan that was made before anything was measured."""
        if self.options.target_bpw is None:
            return self.output_bytes
        return self.output_bytes + max(0, int(self.options.target_bpw * self.parameters / 8) - self.weight_bytes)

    @property
    def config_json(self) -> bytes:
        """config.json as it will be written."""
        return (json.dumps(_tagged(self.config), indent=4, sort_keys=True) + "\n").encode()

    @property
    def index_json(self) -> bytes:
        """model.safetensors.index.json as it will be written."""
        towers = [each.shard for each in self.beside if each.shard.name == VISION_FILE]
        return index_json([*self.shards, *towers], parameters=self.parameters)


def make_plan(source: Source, options: Options, chosen: Choices) -> Plan:
    tensors = tuple(_tensor(source, options, name, array, chosen) for name, array in source.weights.items())
    beside, carried = tuple(_beside(each, options) for each in source.beside), tuple(_carried(source, tensors))
    copied = (*COPIED, *SETTINGS) if any(each.file == VISION_FILE for each in source.beside) else COPIED
    copies = sorted({file for pattern in copied for file in source.folder.glob(pattern) if file.is_file()})
    plan = Plan(
        source=source.folder,
        options=options,
        tensors=tensors,
        shards=lay_out([tensor.outputs for tensor in tensors]),
        config=_config(source.config, options, chosen, _packings_beside(beside)),
        copies=tuple(copies),
        source_bytes=source.source_bytes,
        peak_memory_bytes=max(_stage_bytes(source, options, chosen, tensors, beside)),
        notes=(*carried, *_notes(source, chosen), *(_note_on(each) for each in beside)),
        beside=beside,
        carried=carried,
    )
    useless = in_vain(plan)
    return replace(plan, notes=(useless, *plan.notes)) if useless else plan


def _beside(beside: Beside, options: Options) -> BesidePlan:
    chosen, own = choose_beside(beside, options), beside.source
    tensors = tuple(_tensor(own, options, name, array, chosen) for name, array in own.weights.items())
    return BesidePlan(
        beside.named, tensors, Shard(beside.file, tuple(output for tensor in tensors for output in tensor.outputs))
    )


def searched_sequences(source: Source) -> int:
    stacked = any(array.ndim > 2 for array in source.weights.values())
    return EXPERTS_SEQUENCES if stacked else SEQUENCES


def _packings_beside(beside: Iterable[BesidePlan]) -> Choices:
    """Return the packings of towers: mlx-vlm looks them up by path."""
    towers = (tensor for each in beside if each.shard.name == VISION_FILE for tensor in each.tensors)
    return {each.name.removesuffix(".weight"): each.packing for each in towers if each.packing is not None}


def _note_on(beside: BesidePlan) -> str:
    nbytes = sum(tensor.nbytes for tensor in beside.tensors)
    bits = 8 * nbytes / sum(tensor.parameters for tensor in beside.tensors)
    size = f"{files.size(nbytes)}, {bits:.2f} bits per weight"
    return f"{beside.named} are kept in {beside.shard.name}: {size}"


def _notes(source: Source, chosen: Choices) -> Iterator[str]:
    yield from source.notes
    yield from left_out(source, chosen)
    if not any(any(source.folder.glob(name)) for name in TOKENIZERS):
        yield "the source has no tokenizer files"
    before = {path: form for path, (_, form) in source.carried.items()}
    before |= {path: packed.packing for path, packed in source.packed.items()}
    again = [path for path, packing in before.items() if chosen.get(path) not in (None, packing)]
    if again:
        yield f"{len(again)} layers were packed before and are packed again, so their errors add up: convert the original instead"


def _carried(source: Source, tensors: tuple[TensorPlan, ...]) -> Iterator[str]:
    kinds: dict[bool, set[str]] = {True: set(), False: set()}
    for tensor in tensors:
        if tensor.packing is not None and (found := source.carried.get(tensor.name.removesuffix(".weight"))):
            kinds[tensor.kept].add(found[0])
    if kinds[True]:
        yield f"Carried over from the GGUF file bit for bit as it runs: {', '.join(sorted(kinds[True]))}."
    if kinds[False]:
        yield f"Packed anew, from the numbers that the GGUF file stands for: {', '.join(sorted(kinds[False]))}."


def _tensor(source: Source, options: Options, name: str, array: mx.array, chosen: Choices) -> TensorPlan:
    path, _, leaf = name.rpartition(".")
    packing, shape, own = chosen.get(path) if leaf == "weight" else None, tuple(array.shape), type_name(array.dtype)
    # Some models name tensors that must keep their types (mlx-lm's ``cast_predicate``).
    allowed = getattr(source.module, "cast_predicate", None) or (lambda _: True)
    wanted = options.dtype or (source.narrow if own == "F32" else None)
    casts = wanted is not None and mx.issubdtype(array.dtype, mx.floating) and allowed(name)
    dtype = type_name(getattr(mx, wanted)) if casts and wanted else own
    kept = packing is not None and path in source.packed and source.packed[path].packing == packing
    if packing is None:
        outputs: tuple[Tensor, ...] = (_described(name, dtype, shape),)
    else:  # MLX itself says what ``mx.quantize`` makes of the weight, and computes nothing for that
        arrays = mx.quantize(mx.broadcast_to(mx.zeros((), FLOATS[dtype]), shape), **asdict(packing))
        named = zip(("weight", "scales", "biases"), arrays, strict=False)  # microscaling modes have no biases
        outputs = tuple(_described(f"{path}.{leaf}", type_name(made.dtype), tuple(made.shape)) for leaf, made in named)
    source_bytes = sum(each.nbytes for each in source.packed[path].arrays) if kept else array.nbytes
    return TensorPlan(name, shape, own, source_bytes, dtype, packing, kept, outputs)


def _described(name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    return Tensor(name, dtype, shape, math.prod(shape) * type_bytes(dtype))


def _config(config: dict[str, Any], options: Options, chosen: Choices, beside: Choices) -> dict[str, Any]:
    made = {key: value for key, value in config.items() if key not in ("_name_or_path", "auto_map", "model_file")}
    if options.dtype:
        made |= {"dtype": options.dtype, "torch_dtype": options.dtype}
    used = [packing for packing in chosen.values() if packing]
    if not used:
        return made
    # The packing of the options, or else the most frequent.
    usual = Packing(options.packed_bits, options.group, options.mode)
    default = usual if usual in used else max(used, key=used.count)
    every = {**chosen, **beside}
    own = {path: asdict(each) if each else False for path, each in every.items() if each != default}
    quantization = {**asdict(default), **own}
    return {**made, "quantization": quantization, "quantization_config": quantization}


def _tagged(value: Any) -> Any:
    """Return ``value`` with non-finite floats as transformers writes them, to stay valid JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, dict):
        return {key: _tagged(entry) for key, entry in value.items()}
    return [_tagged(entry) for entry in value] if isinstance(value, list | tuple) else value


def _stage_bytes(
    source: Source, options: Options, chosen: Choices, tensors: tuple[TensorPlan, ...], beside: tuple[BesidePlan, ...]
) -> Iterator[int]:
    yield max(_tensor_bytes(tensor, source, options) for tensor in tensors)
    for plan, each in zip(beside, source.beside, strict=True):
        yield max(_tensor_bytes(tensor, each.source, options) for tensor in plan.tensors)
    if options.how in CALIBRATED_METHODS:
        yield CALIBRATED_METHODS[options.how].peak_bytes(source, options, chosen)
    if options.measures and sensitivity.fits(source, sensitivity.TOKENS):
        yield sensitivity.peak_bytes(source, sensitivity.TOKENS)
    if options.measures or (options.how == "search" and options.text is not None):
        yield _run_bytes(source, tensors, searched_sequences(source), LENGTH, logits=False)
    if options.verify:
        yield _run_bytes(source, tensors, 1, CHECKED_TOKENS, logits=True)


def _tensor_bytes(tensor: TensorPlan, source: Source, options: Options) -> int:
    packed_before = tensor.name.rpartition(".")[0] in source.packed
    read = UNPACKING * tensor.parameters if packed_before else 2 * tensor.source_bytes
    cast = tensor.parameters * type_bytes(tensor.dtype) if tensor.dtype != tensor.source_dtype else 0
    return read + cast + _packing_bytes(tensor.packing, tensor.parameters, options) + 2 * tensor.nbytes


def _packing_bytes(packing: Packing | None, weights: int, options: Options) -> int:
    if packing is None:
        return weights
    if options.how == "round" or packing.mode not in SEARCHED:
        return ROUNDING[packing.mode] * min(weights, BLOCK_WEIGHTS)
    if packing.mode == "affine" and implementation().name != "mlx":
        return SEARCHING * weights
    each = on_mlx.SEARCHING if packing.mode == "affine" else on_mlx.SEARCHING_SCALES
    return each * min(weights, on_mlx.block_here(each))


def _run_bytes(source: Source, tensors: tuple[TensorPlan, ...], sequences: int, length: int, *, logits: bool) -> int:
    heads = text_config(source.config).get("num_attention_heads")
    paths, layers = frozenset(layer_paths(source.module)), dict[str, int]()
    ends, widest, words = 0, 0, 0
    for tensor in tensors:
        layer = layer_of(paths, tensor.name)
        if layer is not None:
            layers[layer] = layers.get(layer, 0) + tensor.parameters
            widest = max((widest, *tensor.shape[-2:]))
        else:
            ends += tensor.source_bytes + tensor.nbytes
            words = max(words, tensor.shape[0])
    tokens = sequences * length
    # Attention's scores are counted as they are where no kernel fuses them.
    activations = 4 * 4 * tokens * widest + 2 * 4 * (heads if isinstance(heads, int) else 1) * tokens * length
    largest = LAYER_WEIGHT * max(layers.values(), default=0)
    return largest + 2 * ends + activations + (POSITION_WORD * tokens * words if logits else 0)


def layer_of(paths: frozenset[str], name: str) -> str | None:
    parts = name.split(".")
    return next((path for end in range(1, len(parts)) if (path := ".".join(parts[:end])) in paths), None)


def conversion_s(plan: Plan) -> float | None:
    """Estimate seconds from one sampled tensor; writing counts like reading. Raises ModelError."""
    quantizers: Mapping[Method, Callable[[], Quantizer]] = {
        "round": Round,
        "search": Search,
    }  # the others run the model
    if plan.options.how not in quantizers or plan.options.measures:
        return None
    packed = [tensor for tensor in plan.tensors if tensor.packing is not None and not tensor.kept]
    tensor = _sample(packed or plan.tensors)
    weight = open_source(plan.source).weights[tensor.name]
    began_s = time.perf_counter()
    mx.eval(weight)
    moved_bps = rate(tensor.source_bytes, time.perf_counter() - began_s)
    if moved_bps is None:
        return None
    moving_s = sum(each.source_bytes + each.nbytes for each in plan.tensors) / moved_bps
    if not packed:
        return moving_s
    packed_vps = _packing_vps(weight, tensor, quantizers[plan.options.how]())
    return None if packed_vps is None else moving_s + sum(each.parameters for each in packed) / packed_vps


def _sample(tensors: Sequence[TensorPlan]) -> TensorPlan:
    by_size = sorted(tensors, key=lambda tensor: tensor.parameters)
    return next((tensor for tensor in by_size if tensor.parameters >= ENOUGH_VALUES), by_size[-1])


def _packing_vps(weight: mx.array, tensor: TensorPlan, quantizer: Quantizer) -> float | None:
    assert tensor.packing is not None
    rows, path = weight.reshape(-1, weight.shape[-1]), tensor.name.rpartition(".")[0]
    # What is compiled at the first call is not the tensor's doing.
    mx.eval(*quantizer.pack(path, rows[:1], tensor.packing))
    count, left_s = max(1, FIRST_VALUES // rows.shape[1]), SAMPLE_S
    while True:
        began_s = time.perf_counter()
        piece = rows[:count]
        mx.eval(*quantizer.pack(path, piece, tensor.packing))
        elapsed_s = time.perf_counter() - began_s
        left_s -= elapsed_s
        if count >= rows.shape[0] or left_s < GROWTH * elapsed_s:
            return rate(piece.size, elapsed_s)
        count *= GROWTH


#     error of a packing = α · its relative squared error, in nats a token
#
# For small errors the divergence is the sum of such terms (Malinovskii et al. 2024, "Pushing the Limits of Large
# Language Model Quantization via the Linearity Theorem", arXiv 2411.17525). Spending the byte budget is then a
# multiple-choice knapsack: greedy over the steps of all lower convex hulls, steepest first, and an exact search of
# choices whose regrets stay below the gap between greedy and relaxation (Sinha and Zoltners 1979, "The Multiple-Choice
# Knapsack Problem").


Alternatives = dict[str, tuple[Packing | None, ...]]  # by module path, the packings a tensor may get; None is unpacked

# Modules that choose experts, by their names in model classes.
ROUTER = re.compile(r"(^|\.)(router|gate|shared_expert_gate)(\.(gate|proj|layer|classifier|gate_proj|wg))?$")

# The least for a router, as in mlx-lm's rules: a token sent to another expert is no small error, and the tensor is
# small.
ROUTER_BITS = 8

# The least bits where α is only guessed: two bits for the wrong tensor would cost more than they save.
CAUTIOUS_BITS = 3

DIGITS = 4  # of an error, so that the last bits of floating-point sums don't decide between two packings

# Partial choices that the exact search keeps in view. More, and the greedy choice stands: it is then very near the
# best.
MAX_FRONTIER = 4096

TIE = 1e-9  # relative error allowed to sums of errors, so that a tie is not lost to rounding

NOTES: Mapping[AlphaBasis, str] = {
    "measured": "bits were allocated by the divergence that packing each tensor causes, measured on a text",
    "guessed": "bits were allocated by how much each layer changes its input: the model is too large to measure "
    "what packing each tensor causes",
    "by kind": "bits were allocated by each tensor's error and kind alone: there was no text to measure on",
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of every alternative, by module path and packing. fixed: never packed."""

    of: Mapping[str, Mapping[Packing | None, int]]
    fixed: int
    parameters: int

    @property
    def smallest(self) -> int:
        return self.fixed + sum(min(sizes.values()) for sizes in self.of.values())


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tensor's packing (None: unpacked), its bytes, and its error in any one unit."""

    packing: Packing | None
    nbytes: int
    error: float


@dataclass(frozen=True, slots=True)
class _Step:
    name: str
    to: Candidate
    nbytes: int
    slope: float


@dataclass(frozen=True, slots=True)
class _Partial:
    nbytes: int
    error: float
    regret: float
    last: Candidate | None
    before: "_Partial | None"


Chosen = dict[str, Candidate]
Sized = TypeVar("Sized", Candidate, _Partial)


def plan_budget(
    source: Source, options: Options, quantizer: Quantizer, ids: Sequence[int] | None, progress: StageProgress
) -> tuple[Choices, tuple[str, ...]]:
    """Return packings within ``options.target_bpw``, or the smallest within ``target_kl``, and notes.

    Scales, biases and unpacked tensors count. ids: some hundred tokens of a text, or None.
    Raises OptionError for a target out of reach, ConversionError for non-finite weights.
    """
    trial = ErrorTrial(source, options, quantizer, ids or (), progress)
    basis = alpha_basis(source, trial.ids)
    if options.target_kl is not None and basis != "measured":
        why = (
            "there is no text that its tokenizer reads"
            if basis == "by kind"
            else "it is too large to be run whole here"
        )
        raise OptionError(f"what packing costs this model can't be measured: {why}", "Use --target-bpw.")
    among, cost = _affordable(source, options, basis)
    errors = _errors(trial, among)
    alphas = find_alphas(basis, trial, errors)
    candidates = {
        path: [
            Candidate(
                packing, cost.of[path][packing], _rounded(alphas[path].loss(packing.bits if packing else None) * error)
            )
            for packing, error in errors[path].items()
        ]
        for path in among
    }
    most = options.target_kl
    spent = spend(candidates, _budget_bytes(options, cost)) if most is None else spare(candidates, most)
    chosen = {path: each.packing for path, each in spent.items()}
    groups = GROUP_SIZES if options.group_size is None else (options.group_size,)
    expected = f"expected KL divergence: {total_error(spent):.2g} nats a token" if basis == "measured" else ""
    return chosen, tuple(filter(None, (NOTES[basis], expected, *out_of_groups(source, chosen, groups))))


def _rounded(error: float) -> float:
    return float(f"{error:.{DIGITS}g}")


def _affordable(source: Source, options: Options, basis: AlphaBasis) -> tuple[Alternatives, Sizes]:
    if options.target_bpw is None:
        among = alternatives(source, options)
        return among, sizes(source, options, among)
    for least_bits in (BITS[0],) if basis == "measured" else (CAUTIOUS_BITS, BITS[0]):
        among = alternatives(source, options, least_bits)
        cost = sizes(source, options, among)
        if cost.smallest - cost.fixed <= _budget_bytes(options, cost):
            return among, cost
    least = math.ceil(100 * 8 * cost.smallest / cost.parameters) / 100
    raise OptionError(
        f"{options.target_bpw:g} bits per weight can't be reached: the smallest packing of this model has {least:g}",
        f"Use --target-bpw {least:g} or more.",
    )


def _budget_bytes(options: Options, cost: Sizes) -> int:
    assert options.target_bpw is not None
    return int(options.target_bpw * cost.parameters / 8) - cost.fixed


def _errors(trial: ErrorTrial, among: Alternatives) -> Errors:
    def reading(done: int, total: int) -> None:
        trial.progress(StageDone("reading a text", done, total))

    source, importance = trial.source, dict[str, "np.ndarray"]()
    if trial.ids:
        importance = activation_statistics(Streamed(streamable_source(source), progress=reading), [trial.ids])
    weights, found = fresh(source), dict[str, dict[Packing | None, float]]()
    for done, (path, packings) in enumerate(among.items(), start=1):
        rows = sample(weights.pop(f"{path}.weight")).astype(packed_type(source, trial.options, path))
        exact = (None, source.packed[path].packing if path in source.packed else None)
        packed = [packing for packing in packings if packing and packing not in exact]
        measured = relative_errors(path, rows, packed, trial.quantizer, importance.get(path))
        found[path] = {packing: measured.get(packing, 0.0) if packing else 0.0 for packing in packings}
        trial.progress(StageDone("measuring errors", done, len(among)))
    return found


def sizes(source: Source, options: Options, among: Alternatives) -> Sizes:
    of: dict[str, dict[Packing | None, int]] = {path: {} for path in among}
    for packing in dict.fromkeys(packing for each in among.values() for packing in each):
        chosen: Choices = {path: packing for path, each in among.items() if packing in each}
        written = {tensor.name: tensor.nbytes for tensor in make_plan(source, options, chosen).tensors}
        for path in chosen:
            of[path][packing] = written[f"{path}.weight"]
    unpacked = make_plan(source, options, {})
    fixed = sum(tensor.nbytes for tensor in unpacked.tensors if tensor.name.removesuffix(".weight") not in among)
    return Sizes(of, fixed, unpacked.parameters)


def alternatives(source: Source, options: Options, least_bits: int = BITS[0]) -> Alternatives:
    """Return every allowed packing with at least ``least_bits``."""
    # mlx-lm's rules hold where they forbid packing; more bits only for routers, as other layers are measured.
    return {
        path: tuple(dict.fromkeys(_packings(source, options, path, module, least_bits))) or (None,)
        for path, module in packable(source)
    }


def _packings(source: Source, options: Options, path: str, module: Any, least_bits: int) -> Iterator[Packing | None]:
    rule, shape = model_rule(source, path, module), source.weights[f"{path}.weight"].shape
    given = options.embed_bits if part(source, path) in ("embedding", "head") else None
    if not rule or len(shape) < 2 or given == UNQUANTIZED:
        yield None
        return
    if given is not None:
        bits_allowed: Sequence[int] = (given,)
    else:
        router = max(ROUTER_BITS, rule.get("bits", 0) if isinstance(rule, dict) else 0)
        least = router if ROUTER.search(path) else least_bits
        bits_allowed = [bits for bits in BITS if bits >= least]
    for bits in bits_allowed:
        for group in GROUP_SIZES if options.group_size is None else (options.group_size,):
            if shape[-1] % group == 0:
                yield Packing(bits, group)
    if given is None:
        yield None
        own = source.packed[path].packing if path in source.packed else None
        if own is not None and options.group_size in (None, own.group_size):
            yield own


def spare(candidates: Mapping[str, Sequence[Candidate]], most_error: float) -> Chosen:
    """Return the fewest bytes, to a thousandth, of a total error within ``most_error``. Raises OptionError."""
    low, high = smallest_bytes(candidates), sum(max(each.nbytes for each in among) for among in candidates.values())
    best = spend(candidates, high)
    if (least := total_error(best)) > most_error:
        raise OptionError(f"{most_error:g} nats a token can't be reached: the least is {least:.2g}", "Allow more.")
    while high - low > high // 1000:
        middle = (low + high) // 2
        found = spend(candidates, middle)
        if total_error(found) <= most_error:
            best, high = found, middle
        else:
            low = middle
    return best


def spend(candidates: Mapping[str, Sequence[Candidate]], budget_bytes: int) -> Chosen:
    """Return the least total error within ``budget_bytes``, deterministically. Raises OptionError."""
    needed = smallest_bytes(candidates)
    if needed > budget_bytes:
        raise OptionError(
            f"{budget_bytes} bytes are too few: the smallest packing takes {needed}", "Allow more bits per weight."
        )
    useful = {name: _undominated(options) for name, options in candidates.items()}
    greedy, price = _buy(useful, budget_bytes)
    return _search(useful, budget_bytes, greedy, price) or greedy


def smallest_bytes(candidates: Mapping[str, Sequence[Candidate]]) -> int:
    return sum(min(each.nbytes for each in options) for options in candidates.values())


def total_bytes(chosen: Mapping[str, Candidate]) -> int:
    return sum(each.nbytes for each in chosen.values())


def total_error(chosen: Mapping[str, Candidate]) -> float:
    return sum(each.error for each in chosen.values())


def _undominated(options: Iterable[Sized]) -> list[Sized]:
    kept: list[Sized] = []
    for each in sorted(options, key=lambda option: (option.nbytes, option.error)):
        if not kept or each.error < kept[-1].error:
            kept.append(each)
    return kept


def _steps(useful: Mapping[str, Sequence[Candidate]]) -> Iterator[_Step]:
    for name, options in useful.items():
        hull: list[Candidate] = []
        for each in options:
            while len(hull) > 1 and _above(hull[-2], hull[-1], each):
                hull.pop()
            hull.append(each)
        for small, large in pairwise(hull):
            nbytes = large.nbytes - small.nbytes
            yield _Step(name, large, nbytes, (small.error - large.error) / nbytes)


def _above(left: Candidate, middle: Candidate, right: Candidate) -> bool:
    first = (left.error - middle.error) * (right.nbytes - middle.nbytes)
    second = (middle.error - right.error) * (middle.nbytes - left.nbytes)
    return first <= second


def _buy(useful: Mapping[str, Sequence[Candidate]], budget_bytes: int) -> tuple[Chosen, float]:
    chosen = {name: options[0] for name, options in useful.items()}
    left, price, stopped = budget_bytes - total_bytes(chosen), 0.0, set[str]()
    for step in sorted(_steps(useful), key=lambda step: -step.slope):
        # A step starts where the one before it ended, so a tensor that missed one takes no later one.
        if step.name in stopped or step.nbytes > left:
            stopped.add(step.name)
            price = price or step.slope
            continue
        chosen[step.name] = step.to
        left -= step.nbytes
    while better := [  # spend what is left on the best single changes that fit, off the hull too
        (chosen[name].error - each.error, name, each)
        for name, options in useful.items()
        for each in options
        if each.error < chosen[name].error and each.nbytes - chosen[name].nbytes <= left
    ]:
        _, name, best = max(better, key=lambda entry: entry[0])
        left -= best.nbytes - chosen[name].nbytes
        chosen[name] = best
    return chosen, price


def _search(
    useful: Mapping[str, Sequence[Candidate]], budget_bytes: int, greedy: Chosen, price: float
) -> Chosen | None:
    least = {name: min(each.error + price * each.nbytes for each in options) for name, options in useful.items()}
    scale = sum(least.values())
    gap = total_error(greedy) - (scale - price * budget_bytes) + TIE * scale
    rest_bytes = smallest_bytes(useful)
    frontier = [_Partial(0, 0.0, 0.0, None, None)]
    for name, options in useful.items():
        rest_bytes -= options[0].nbytes
        frontier = _undominated(
            _Partial(part.nbytes + each.nbytes, part.error + each.error, regret, each, part)
            for part in frontier
            for each in options
            if (regret := part.regret + each.error + price * each.nbytes - least[name]) <= gap
            and part.nbytes + each.nbytes + rest_bytes <= budget_bytes
        )
        if len(frontier) > MAX_FRONTIER:
            return None
    chosen, node = Chosen(), min(frontier, key=lambda part: (part.error, part.nbytes))
    for name in reversed(list(useful)):
        assert node.last is not None
        assert node.before is not None
        chosen[name], node = node.last, node.before
    return {name: chosen[name] for name in useful}
