"""What a conversion will do, exactly, before it does any of it: every tensor's bits, every file's bytes."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from tokamac.engine.limits.cost import Tensor, part_of
from tokamac.quant.options import UNQUANTIZED, Options
from tokamac.quant.shards import Shard, float_bytes, index_json, lay_out, type_name
from tokamac.quant.source import Source

COPIED = (
    "tokenizer*.json", "tokenizer.model", "*.tiktoken", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "*.jinja", "chat_template.json", "generation_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
"""Files that go along. Never code, never pickles."""

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken")


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor: its shape and type in the source, and what becomes of it.

    bits, group_size: None where it stays unpacked. outputs: the arrays written for it. nbytes: theirs together.
    """

    name: str
    shape: tuple[int, ...]
    source_dtype: str
    source_bytes: int
    dtype: str
    bits: int | None
    group_size: int | None
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

    weight_bytes: the arrays written; output_bytes: the finished folder, every file of it, exactly.
    peak_memory_bytes: an upper estimate of what MLX holds at once: the largest tensor, its copies and its packed form.
    config: of the converted model. notes: what a user should know.
    """

    source: Path
    options: Options
    tensors: tuple[TensorPlan, ...]
    shards: tuple[Shard, ...]
    config: dict[str, Any]
    copies: tuple[Path, ...]
    source_bytes: int
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
    def peak_memory_bytes(self) -> int:
        """Memory for the most expensive tensor: as read, as put together by mlx-lm, as cast, and packed."""
        return max(_peak(tensor) for tensor in self.tensors)

    @property
    def output_bytes(self) -> int:
        """Bytes of every file of the finished folder."""
        copied = sum(file.stat().st_size for file in self.copies)
        return sum(shard.file_bytes for shard in self.shards) + len(self.config_json) + len(self.index_json) + copied

    @property
    def config_json(self) -> bytes:
        """config.json as it will be written."""
        return (json.dumps(_tagged(self.config), indent=4, sort_keys=True) + "\n").encode()

    @property
    def index_json(self) -> bytes:
        """model.safetensors.index.json as it will be written."""
        return index_json(self.shards, parameters=self.parameters)


def make_plan(source: Source, options: Options) -> Plan:
    """Return what converting ``source`` will do. Reads no weight."""
    chosen = dict(_choices(source, options))
    tensors = tuple(_tensor(source, options, name, array, chosen) for name, array in source.weights.items())
    copies = sorted({file for pattern in COPIED for file in source.folder.glob(pattern) if file.is_file()})
    notes = () if any(any(source.folder.glob(name)) for name in TOKENIZERS) else ("the source has no tokenizer files",)
    return Plan(
        source=source.folder,
        options=options,
        tensors=tensors,
        shards=lay_out([tensor.outputs for tensor in tensors]),
        config=_config(source.config, options, chosen),
        copies=tuple(copies),
        source_bytes=source.source_bytes,
        notes=notes,
    )


Choice = dict[str, int] | None
"""Bits and group size of a module that could be packed; None where it is not."""


def _choices(source: Source, options: Options) -> Iterator[tuple[str, Choice]]:
    """Yield every module that could be packed, by path, with what is chosen for it.

    A model may have rules of its own (mlx-lm's ``quant_predicate``: routers at 8 bits, say); they hold, as in mlx-lm.
    """
    modules = tree_flatten(source.module.leaf_modules(), is_leaf=nn.Module.is_module)
    rule = getattr(source.module, "quant_predicate", None) or (lambda *_: True)
    for path, module in modules:
        weight = source.weights.get(f"{path}.weight")
        if "to_quantized" not in dir(module) or weight is None or not mx.issubdtype(weight.dtype, mx.floating):
            continue
        asked = rule(path, module)
        own = asked if isinstance(asked, dict) else {}
        bits, group = int(own.get("bits", options.bits)), int(own.get("group_size", options.group_size))
        tensor = Tensor(f"{path}.weight", "", tuple(weight.shape), 0)
        if options.embed_bits is not None and part_of(tensor, source.config) in ("embedding", "head"):
            bits = options.embed_bits
        if weight.shape[-1] % group:
            group = options.group_size
        packs = bool(asked) and bits != UNQUANTIZED and weight.ndim >= 2 and weight.shape[-1] % group == 0
        yield path, {"bits": bits, "group_size": group} if packs else None


def _tensor(source: Source, options: Options, name: str, array: mx.array, chosen: dict[str, Choice]) -> TensorPlan:
    path, _, leaf = name.rpartition(".")
    choice = chosen.get(path) if leaf == "weight" else None
    shape, dtype = tuple(array.shape), type_name(array.dtype)
    target = _target_type(source, options, name, array)
    outputs: tuple[Tensor, ...]
    if choice is None:
        outputs = (Tensor(name, target, shape, array.size * float_bytes(target)),)
    else:
        rows, last = shape[:-1], shape[-1]
        packed, groups = (*rows, last * choice["bits"] // 32), (*rows, last // choice["group_size"])
        outputs = (
            Tensor(name, "U32", packed, 4 * math.prod(packed)),
            *(
                Tensor(f"{path}.{n}", target, groups, math.prod(groups) * float_bytes(target))
                for n in ("scales", "biases")
            ),
        )
    bits, group = (choice["bits"], choice["group_size"]) if choice else (None, None)
    return TensorPlan(name, shape, dtype, array.nbytes, target, bits, group, outputs)


def _target_type(source: Source, options: Options, name: str, array: mx.array) -> str:
    """Return the type a tensor is cast to; some models name tensors that must keep theirs (mlx-lm's ``cast_predicate``)."""
    allowed = getattr(source.module, "cast_predicate", None) or (lambda _: True)
    casts = options.dtype is not None and mx.issubdtype(array.dtype, mx.floating) and allowed(name)
    return type_name(getattr(mx, options.dtype)) if casts and options.dtype else type_name(array.dtype)


def _config(config: dict[str, Any], options: Options, chosen: dict[str, Choice]) -> dict[str, Any]:
    """Return the converted model's config, in the form mlx-lm reads: one default, and an entry for every module that differs."""
    default = {"group_size": options.group_size, "bits": options.bits}
    quantization: dict[str, Any] = {**default, "mode": "affine"}
    for path, choice in chosen.items():
        if choice != default:
            quantization[path] = {**choice, "mode": "affine"} if choice else False
    kept = {key: value for key, value in config.items() if key not in ("_name_or_path", "auto_map", "model_file")}
    types = {"dtype": options.dtype, "torch_dtype": options.dtype} if options.dtype else {}
    return {**kept, **types, "quantization": quantization, "quantization_config": quantization}


def _peak(tensor: TensorPlan) -> int:
    cast = tensor.parameters * float_bytes(tensor.dtype) if tensor.dtype != tensor.source_dtype else 0
    return 2 * tensor.source_bytes + cast + tensor.parameters + tensor.nbytes


def _tagged(value: Any) -> Any:
    """Return ``value`` with non-finite floats as transformers writes them, so that the file stays JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, dict):
        return {key: _tagged(entry) for key, entry in value.items()}
    return [_tagged(entry) for entry in value] if isinstance(value, list | tuple) else value
