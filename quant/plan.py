"""What a conversion will do, exactly, before it does any of it: every tensor's bits, every file's bytes."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from tokamac.engine.limits.config_cost import Packing
from tokamac.engine.limits.cost import Tensor
from tokamac.engine.tokens import TOKENIZER_FILES
from tokamac.quant.choices import Choices, left_out
from tokamac.quant.options import Options
from tokamac.quant.peak import peak_bytes
from tokamac.quant.report import in_vain
from tokamac.quant.shards import FLOATS, Shard, index_json, lay_out, type_bytes, type_name
from tokamac.quant.source import Source

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
