"""What a conversion will do, exactly, before it does any of it: every tensor's bits, every file's bytes.

About how long a conversion will take: a small piece of it is done for real, and the rest is taken to go at that rate.

Only reading, packing and writing are foreseen. What else a conversion does (looking at a text, measuring sensitivity, verifying)
takes as long as the model's own arithmetic, which nothing here has timed.

The memory that a conversion takes at most, foreseen from shapes: what MLX holds at once in its most expensive moment.

Bytes a weight were measured on MLX's CPU backend, where each stage was run alone on one large tensor; a GPU takes no more.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx

from tokamac.engine.metrics import rate
from tokamac.engine.perf.config_cost import Packing
from tokamac.engine.perf.cost import Tensor, text_config
from tokamac.engine.text.tokenizer import TOKENIZER_FILES
from tokamac.quant import sensitivity
from tokamac.quant.calibration import LENGTH
from tokamac.quant.choices import Choices, left_out
from tokamac.quant.evaluation import CHECKED_TOKENS
from tokamac.quant.methods import BLOCK_WEIGHTS, Quantizer, Round, Search, awq, gptq
from tokamac.quant.modules import layer_paths
from tokamac.quant.options import SEARCHED, Method, Options
from tokamac.quant.report import in_vain
from tokamac.quant.search import implementation, on_mlx
from tokamac.quant.shards import FLOATS, Shard, index_json, lay_out, type_bytes, type_name
from tokamac.quant.source import Source, open_source

CALIBRATED_METHODS: dict[str, ModuleType] = {"gptq": gptq, "awq": awq}
"""Methods that pack by what goes through the model; each module has ``check``, ``pack`` and ``peak_bytes``."""

SEQUENCES = 8
"""Of ``calibration.LENGTH`` tokens: what search looks at. Second moments of 4,000 tokens are known to a few per cent."""

ROUNDING = {"affine": 8, "mxfp4": 41, "nvfp4": 77, "mxfp8": 8}
"""Bytes a weight beside the weight itself, while a block is rounded."""

SEARCHING = 3
"""Bytes a weight beside the weight itself, while a tensor is searched by numba, which holds few arrays."""

UNPACKING = 18
"""Bytes a weight while a packed one is unpacked, at 3 bits; other bits take less."""

LAYER_WEIGHT = 12
"""Bytes a weight of the layer that is computed: in float32, as it is unpacked, and of the layer before it, not yet let go."""

PLACE_WORD = 16
"""Bytes for each word of the vocabulary at each place of a text: logits of two models, and what is computed of them."""


def peak_bytes(source: Source, options: Options, chosen: Choices, tensors: "tuple[TensorPlan, ...]") -> int:
    """Return an upper estimate, in bytes, of what MLX will hold at once."""
    return max(_stages(source, options, chosen, tensors))


def _stages(source: Source, options: Options, chosen: Choices, tensors: "tuple[TensorPlan, ...]") -> Iterator[int]:
    yield max(_of_tensor(tensor, source, options) for tensor in tensors)
    if options.how in CALIBRATED_METHODS:
        yield CALIBRATED_METHODS[options.how].peak_bytes(source, options, chosen)
    if options.target_bpw is not None and sensitivity.fits(source, sensitivity.TOKENS):
        yield sensitivity.peak_bytes(source, sensitivity.TOKENS)
    runs_text = options.target_bpw is not None or (options.how == "search" and options.calibration is not None)
    heads = text_config(source.config).get("num_attention_heads")
    known, paths = heads if isinstance(heads, int) else 1, frozenset(layer_paths(source.module))
    if runs_text:
        yield _of_run(paths, tensors, known, SEQUENCES, LENGTH, logits=False)
    if options.verify:
        yield _of_run(paths, tensors, known, 1, CHECKED_TOKENS, logits=True)


def _of_tensor(tensor: "TensorPlan", source: Source, options: Options) -> int:
    """Return the bytes for one tensor: as read and put together by mlx-lm, as cast, while it is packed, and packed."""
    packed_before = tensor.name.rpartition(".")[0] in source.packed
    read = UNPACKING * tensor.parameters if packed_before else 2 * tensor.source_bytes
    cast = tensor.parameters * type_bytes(tensor.dtype) if tensor.dtype != tensor.source_dtype else 0
    return read + cast + _packing(tensor.packing, tensor.parameters, options) + 2 * tensor.nbytes


def _packing(packing: Packing | None, weights: int, options: Options) -> int:
    if packing is None:
        return weights
    if options.how == "round" or packing.mode not in SEARCHED:
        return ROUNDING[packing.mode] * min(weights, BLOCK_WEIGHTS)
    if packing.mode != "affine":
        return on_mlx.SEARCHING_SCALES * min(weights, on_mlx.block_here(on_mlx.SEARCHING_SCALES))
    if implementation().name == "mlx":
        return on_mlx.SEARCHING * min(weights, on_mlx.block_here(on_mlx.SEARCHING))
    return SEARCHING * weights


def _of_run(
    paths: frozenset[str], tensors: "tuple[TensorPlan, ...]", heads: int, sequences: int, length: int, *, logits: bool
) -> int:
    """Return the bytes for sequences of so many tokens, run side by side with one layer's weights in memory.

    paths: of the layers. Attention's scores are counted as they are where no kernel fuses them.
    """
    layers: dict[str, int] = {}
    ends, widest, words = 0, 0, 0
    for tensor in tensors:
        layer = _layer(paths, tensor.name)
        if layer is not None:
            layers[layer] = layers.get(layer, 0) + tensor.parameters
            widest = max((widest, *tensor.shape[-2:]))
        else:
            ends += tensor.source_bytes + tensor.nbytes
            words = max(words, tensor.shape[0])
    tokens = sequences * length
    activations = 4 * 4 * tokens * widest + 2 * 4 * heads * tokens * length
    largest = LAYER_WEIGHT * max(layers.values(), default=0)
    return largest + 2 * ends + activations + (PLACE_WORD * tokens * words if logits else 0)


def _layer(paths: frozenset[str], name: str) -> str | None:
    """Return which of the layers a tensor is part of."""
    parts = name.split(".")
    return next((path for end in range(1, len(parts)) if (path := ".".join(parts[:end])) in paths), None)


COPIED = (
    "tokenizer*.json", "*.model", "*.tiktoken", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "*.jinja", "chat_template.json", "generation_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
"""Files that go along. Never code, never pickles."""

TOKENIZERS = (*TOKENIZER_FILES, "vocab.txt", "*.tiktoken")


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
        """Weights it stands for."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole conversion. Bytes throughout.

    weight_bytes: the arrays written; output_bytes: the finished folder, exactly, but for the card and the record, whose figures are
    not known yet. peak_memory_bytes: an upper estimate of what MLX holds at once (peak.py).
    config: of the converted model. notes: what a user should know.
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
        return sum(shard.file_bytes for shard in self.shards) + len(self.config_json) + len(self.index_json) + copied

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
    copies = sorted({file for pattern in COPIED for file in source.folder.glob(pattern) if file.is_file()})
    plan = Plan(
        source=source.folder,
        options=options,
        tensors=tensors,
        shards=lay_out([tensor.outputs for tensor in tensors]),
        config=_config(source.config, options, chosen),
        copies=tuple(copies),
        source_bytes=source.source_bytes,
        peak_memory_bytes=peak_bytes(source, options, chosen, tensors),
        notes=tuple(_notes(source, chosen)),
    )
    useless = in_vain(plan)
    return replace(plan, notes=(useless, *plan.notes)) if useless else plan


def _notes(source: Source, chosen: Choices) -> Iterator[str]:
    yield from source.notes
    yield from left_out(source, chosen)
    if not any(any(source.folder.glob(name)) for name in TOKENIZERS):
        yield "the source has no tokenizer files"
    again = [
        path for path, packed in source.packed.items() if (choice := chosen.get(path)) and choice != packed.packing
    ]
    if again:
        yield f"{len(again)} layers were packed before and are packed again, so their errors add up: the original is better"


def _tensor(source: Source, options: Options, name: str, array: mx.array, chosen: Choices) -> TensorPlan:
    path, _, leaf = name.rpartition(".")
    packing = chosen.get(path) if leaf == "weight" else None
    target = _target_type(source, options, name, array)
    kept = packing is not None and path in source.packed and source.packed[path].packing == packing
    if packing is None:
        outputs: tuple[Tensor, ...] = (_described(name, target, tuple(array.shape)),)
    else:
        outputs = tuple(_outputs(path, tuple(array.shape), packing, target))
    source_bytes = sum(each.nbytes for each in source.packed[path].arrays) if kept else array.nbytes
    return TensorPlan(name, tuple(array.shape), type_name(array.dtype), source_bytes, target, packing, kept, outputs)


def _outputs(path: str, shape: tuple[int, ...], packing: Packing, target: str) -> Iterator[Tensor]:
    """Yield the arrays that ``mx.quantize`` makes of a weight: asked of MLX itself, which computes nothing for it."""
    of_type = mx.broadcast_to(mx.zeros((), FLOATS[target]), shape)
    arrays = mx.quantize(of_type, **asdict(packing))
    for leaf, made in zip(("weight", "scales", "biases"), arrays, strict=False):  # microscaling modes have no biases
        yield _described(f"{path}.{leaf}", type_name(made.dtype), tuple(made.shape))


def _described(name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    return Tensor(name, dtype, shape, math.prod(shape) * type_bytes(dtype))


def _target_type(source: Source, options: Options, name: str, array: mx.array) -> str:
    """Return the type a tensor is cast to; some models name tensors that must keep theirs (mlx-lm's ``cast_predicate``)."""
    allowed = getattr(source.module, "cast_predicate", None) or (lambda _: True)
    casts = options.dtype is not None and mx.issubdtype(array.dtype, mx.floating) and allowed(name)
    return type_name(getattr(mx, options.dtype)) if casts and options.dtype else type_name(array.dtype)


def _config(config: dict[str, Any], options: Options, chosen: Choices) -> dict[str, Any]:
    """Return the converted model's config, in the form mlx-lm reads: one default, and an entry for every module that differs."""
    kept = {key: value for key, value in config.items() if key not in ("_name_or_path", "auto_map", "model_file")}
    types = {"dtype": options.dtype, "torch_dtype": options.dtype} if options.dtype else {}
    if not any(chosen.values()):
        return {**kept, **types}
    default = _default(options, chosen)
    quantization: dict[str, Any] = asdict(default)
    for path, packing in chosen.items():
        if packing != default:
            quantization[path] = asdict(packing) if packing else False
    return {**kept, **types, "quantization": quantization, "quantization_config": quantization}


def _default(options: Options, chosen: Choices) -> Packing:
    """Return the packing that stands for every module without an entry: the one asked for, else the most frequent."""
    asked, used = Packing(options.packed_bits, options.group, options.mode), [each for each in chosen.values() if each]
    return asked if asked in used else max(used, key=used.count)


def _tagged(value: Any) -> Any:
    """Return ``value`` with non-finite floats as transformers writes them, so that the file stays JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, dict):
        return {key: _tagged(entry) for key, entry in value.items()}
    return [_tagged(entry) for entry in value] if isinstance(value, list | tuple) else value


SAMPLE_S = 0.3
"""Packing is timed for no longer than this, once it has been set up."""

FIRST_VALUES = 1 << 16
GROWTH = 4
"""Each piece that is packed is so many times larger than the one before: small ones cost more a value."""

ENOUGH_VALUES = 1 << 18
"""A tensor of so many weights is packed at the rate of large ones, and read in a moment."""

_PACKERS: Mapping[Method, Callable[[], Quantizer]] = {"round": Round, "search": Search}
"""Methods that work tensor by tensor; the others run the model."""


def conversion_s(plan: Plan) -> float | None:
    """Return about how many seconds reading, packing and writing will take; None where a sample can't tell.

    Reads one tensor of the source and packs a piece of it. Writing is taken to be as fast as reading. Raises ModelError.
    """
    if plan.options.how not in _PACKERS or plan.options.target_bpw is not None:
        return None
    tensor = _sample(plan)
    weight = open_source(plan.source).weights[tensor.name]
    moved_bps = _reading_bps(weight, tensor)
    if moved_bps is None:
        return None
    moving_s = sum(each.source_bytes + each.nbytes for each in plan.tensors) / moved_bps
    values = sum(each.parameters for each in plan.tensors if each.packing is not None and not each.kept)
    if not values:
        return moving_s
    packed_vps = _packing_vps(weight, tensor, _PACKERS[plan.options.how]())
    return None if packed_vps is None else moving_s + values / packed_vps


def _sample(plan: Plan) -> TensorPlan:
    """Return the tensor to try: the smallest of those that are large enough, packed ones first."""
    packed = [tensor for tensor in plan.tensors if tensor.packing is not None and not tensor.kept]
    among = packed or list(plan.tensors)
    large = [tensor for tensor in among if tensor.parameters >= ENOUGH_VALUES]
    return min(large, key=_parameters) if large else max(among, key=_parameters)


def _parameters(tensor: TensorPlan) -> int:
    return tensor.parameters


def _reading_bps(weight: mx.array, tensor: TensorPlan) -> float | None:
    began_s = time.perf_counter()
    mx.eval(weight)
    return rate(tensor.source_bytes, time.perf_counter() - began_s)


def _packing_vps(weight: mx.array, tensor: TensorPlan, quantizer: Quantizer) -> float | None:
    """Return the values packed a second, of the largest piece there was time for."""
    assert tensor.packing is not None
    rows = weight.reshape(-1, weight.shape[-1])
    path = tensor.name.rpartition(".")[0]
    # What is compiled at the first call is not the tensor's doing.
    mx.eval(*quantizer.pack(path, rows[:1], tensor.packing))
    taken, left_s, found = max(1, FIRST_VALUES // rows.shape[1]), SAMPLE_S, None
    while True:
        began_s = time.perf_counter()
        piece = rows[:taken]
        mx.eval(*quantizer.pack(path, piece, tensor.packing))
        elapsed_s = time.perf_counter() - began_s
        found = rate(piece.size, elapsed_s)
        left_s -= elapsed_s
        if taken >= rows.shape[0] or left_s < GROWTH * elapsed_s:
            return found
        taken *= GROWTH
