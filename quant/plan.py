"""What a conversion will do, exactly, before it does any of it: every tensor's bits, every file's bytes, its memory and its time.

The peak of memory is foreseen from shapes: what MLX holds at once in its most expensive moment. Bytes a weight were measured on
MLX's CPU backend, where each stage was run alone on one large tensor; a GPU takes no more. For the time, a small piece of the
conversion is done for real, and the rest is taken to go at that rate. Only reading, packing and writing are foreseen: what else a
conversion does (reading a text, measuring sensitivity, verifying) takes as long as the model's own arithmetic, which nothing here
has timed.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx

from tokamac.engine import units
from tokamac.engine.files import TOKENIZER_FILES
from tokamac.engine.metrics import rate
from tokamac.engine.perf.config_cost import Packing
from tokamac.engine.perf.cost import Tensor, text_config

from . import sensitivity
from .calibration import LENGTH
from .choices import Choices, choose_for_heads, left_out
from .evaluation import CHECKED_TOKENS
from .methods import BLOCK_WEIGHTS, Quantizer, Round, Search, awq, gptq
from .modules import layer_paths
from .options import SEARCHED, Method, Options
from .report import in_vain
from .search import implementation, on_mlx
from .shards import FLOATS, Shard, index_json, lay_out, type_bytes, type_name
from .source import HeadSource, Source, open_source

CALIBRATED_METHODS: Mapping[str, ModuleType] = {"gptq": gptq, "awq": awq}
"""Methods that pack by what goes through the model; each module has ``check``, ``pack``, ``peak_bytes`` and ``SEQUENCES``."""

SEQUENCES = 8
"""Of ``calibration.LENGTH`` tokens: what search looks at. Second moments of 4,000 tokens are known to a few per cent."""

COPIED = (
    "tokenizer*.json", "*.model", "*.tiktoken", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "*.jinja", "chat_template.json", "generation_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
"""Files that go along. Never code, never pickles."""

TOKENIZERS = (*TOKENIZER_FILES, "vocab.txt", "*.tiktoken")

ROUNDING = {"affine": 8, "mxfp4": 41, "nvfp4": 77, "mxfp8": 8}
"""Bytes a weight beside the weight itself, while a block is rounded."""

SEARCHING = 3
"""Bytes a weight beside the weight itself, while a tensor is searched by numba, which holds few arrays."""

UNPACKING = 18
"""Bytes a weight while a packed one is unpacked, at 3 bits; other bits take less."""

LAYER_WEIGHT = 12
"""Bytes a weight of the layer that is computed: in float32, as it is unpacked, and of the layer before it, not yet let go."""

POSITION_WORD = 16
"""Bytes for each word of the vocabulary at each position of a text: logits of two models, and what is computed of them."""

SAMPLE_S = 0.3
"""Packing is timed for no longer than this, once it has been set up."""

FIRST_VALUES, GROWTH = 1 << 16, 4
"""The first piece that is timed, and how much larger each is than the one before: small ones cost more a value."""

ENOUGH_VALUES = 1 << 18
"""A tensor of this many weights is packed at the rate of large ones, and read in a moment."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor: its shape and type in the source, and what becomes of it.

    packing: None where it stays unpacked. kept: it is packed so already, and is taken over as it is. outputs: the arrays written.
    """

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
class HeadsPlan:
    """Heads for further tokens: their tensors, and the file that gets them."""

    named: str
    tensors: tuple[TensorPlan, ...]
    shard: Shard


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole conversion. Bytes throughout.

    weight_bytes: the arrays written; output_bytes: the finished folder, exactly, but for the card and the record, whose figures are
    not known yet. peak_memory_bytes: an upper estimate of what MLX holds at once.
    config: of the converted model. heads: beside it; none of their bytes is among the weights. notes: what a user should know.
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
    heads: tuple[HeadsPlan, ...] = ()

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
        beside = sum(heads.shard.file_bytes for heads in self.heads)
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
        return index_json(self.shards, parameters=self.parameters)


def make_plan(source: Source, options: Options, chosen: Choices) -> Plan:
    """Return what converting ``source`` will do with the packings that were chosen. Reads no weight."""
    tensors = tuple(_tensor(source, options, name, array, chosen) for name, array in source.weights.items())
    heads = tuple(_heads(each, options) for each in source.heads)
    copies = sorted({file for pattern in COPIED for file in source.folder.glob(pattern) if file.is_file()})
    plan = Plan(
        source=source.folder,
        options=options,
        tensors=tensors,
        shards=lay_out([tensor.outputs for tensor in tensors]),
        config=_config(source.config, options, chosen),
        copies=tuple(copies),
        source_bytes=source.source_bytes,
        peak_memory_bytes=max(_stage_bytes(source, options, chosen, tensors, heads)),
        notes=(*_notes(source, chosen), *(_note_on(each) for each in heads)),
        heads=heads,
    )
    useless = in_vain(plan)
    return replace(plan, notes=(useless, *plan.notes)) if useless else plan


def _heads(heads: HeadSource, options: Options) -> HeadsPlan:
    chosen, own = choose_for_heads(heads, options), heads.source
    tensors = tuple(_tensor(own, options, name, array, chosen) for name, array in own.weights.items())
    return HeadsPlan(
        heads.named, tensors, Shard(heads.file, tuple(output for tensor in tensors for output in tensor.outputs))
    )


def _note_on(heads: HeadsPlan) -> str:
    nbytes = sum(tensor.nbytes for tensor in heads.tensors)
    bits = 8 * nbytes / sum(tensor.parameters for tensor in heads.tensors)
    size = f"{units.size(nbytes)}, {bits:.2f} bits per weight"
    return f"its own heads for further tokens ({heads.named}) are kept in {heads.shard.name}: {size}"


def _notes(source: Source, chosen: Choices) -> Iterator[str]:
    yield from source.notes
    yield from left_out(source, chosen)
    if not any(any(source.folder.glob(name)) for name in TOKENIZERS):
        yield "the source has no tokenizer files"
    again = [path for path, packed in source.packed.items() if chosen.get(path) not in (None, packed.packing)]
    if again:
        yield f"{len(again)} layers were packed before and are packed again, so their errors add up: convert the original instead"


def _tensor(source: Source, options: Options, name: str, array: mx.array, chosen: Choices) -> TensorPlan:
    path, _, leaf = name.rpartition(".")
    packing, shape, own = chosen.get(path) if leaf == "weight" else None, tuple(array.shape), type_name(array.dtype)
    # Some models name tensors that must keep their types (mlx-lm's ``cast_predicate``).
    allowed = getattr(source.module, "cast_predicate", None) or (lambda _: True)
    casts = options.dtype is not None and mx.issubdtype(array.dtype, mx.floating) and allowed(name)
    dtype = type_name(getattr(mx, options.dtype)) if casts and options.dtype else own
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


def _config(config: dict[str, Any], options: Options, chosen: Choices) -> dict[str, Any]:
    """Return the converted model's config, in the form mlx-lm reads: one default, and an entry for every module that differs."""
    made = {key: value for key, value in config.items() if key not in ("_name_or_path", "auto_map", "model_file")}
    if options.dtype:
        made |= {"dtype": options.dtype, "torch_dtype": options.dtype}
    used = [packing for packing in chosen.values() if packing]
    if not used:
        return made
    # The packing of the options, or else the most frequent.
    usual = Packing(options.packed_bits, options.group, options.mode)
    default = usual if usual in used else max(used, key=used.count)
    own = {path: asdict(each) if each else False for path, each in chosen.items() if each != default}
    quantization = {**asdict(default), **own}
    return {**made, "quantization": quantization, "quantization_config": quantization}


def _tagged(value: Any) -> Any:
    """Return ``value`` with non-finite floats as transformers writes them, so that the file stays JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, dict):
        return {key: _tagged(entry) for key, entry in value.items()}
    return [_tagged(entry) for entry in value] if isinstance(value, list | tuple) else value


def _stage_bytes(
    source: Source, options: Options, chosen: Choices, tensors: tuple[TensorPlan, ...], heads: tuple[HeadsPlan, ...]
) -> Iterator[int]:
    """Yield the most bytes that MLX holds at once in each stage, from above."""
    yield max(_tensor_bytes(tensor, source, options) for tensor in tensors)
    for plan, each in zip(heads, source.heads, strict=True):
        yield max(_tensor_bytes(tensor, each.source, options) for tensor in plan.tensors)
    if options.how in CALIBRATED_METHODS:
        yield CALIBRATED_METHODS[options.how].peak_bytes(source, options, chosen)
    if options.target_bpw is not None and sensitivity.fits(source, sensitivity.TOKENS):
        yield sensitivity.peak_bytes(source, sensitivity.TOKENS)
    if options.target_bpw is not None or (options.how == "search" and options.calibration is not None):
        yield _run_bytes(source, tensors, SEQUENCES, LENGTH, logits=False)
    if options.verify:
        yield _run_bytes(source, tensors, 1, CHECKED_TOKENS, logits=True)


def _tensor_bytes(tensor: TensorPlan, source: Source, options: Options) -> int:
    """Return the bytes for one tensor: as read and put together by mlx-lm, as cast, while it is packed, and packed."""
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
    """Return the bytes for sequences of ``length`` tokens, run side by side with one layer's weights in memory."""
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
    """Return which of the layers at ``paths`` a tensor is part of."""
    parts = name.split(".")
    return next((path for end in range(1, len(parts)) if (path := ".".join(parts[:end])) in paths), None)


def conversion_s(plan: Plan) -> float | None:
    """Return about how many seconds reading, packing and writing will take; None where a sample can't tell.

    Reads one tensor of the source and packs a piece of it. Writing is taken to be as fast as reading. Raises ModelError.
    """
    quantizers: Mapping[Method, Callable[[], Quantizer]] = {
        "round": Round,
        "search": Search,
    }  # the others run the model
    if plan.options.how not in quantizers or plan.options.target_bpw is not None:
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
    """Return the tensor to try: the smallest that is large enough, else the largest."""
    by_size = sorted(tensors, key=lambda tensor: tensor.parameters)
    return next((tensor for tensor in by_size if tensor.parameters >= ENOUGH_VALUES), by_size[-1])


def _packing_vps(weight: mx.array, tensor: TensorPlan, quantizer: Quantizer) -> float | None:
    """Return the values packed a second, of the largest piece there was time for."""
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
