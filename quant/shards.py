"""Safetensors files written one array at a time.

All types and shapes are known before the first array is computed, so the header goes first and every array is appended where the
header says. Nothing is held back: memory stays that of one tensor, and the size of every file is known before it exists.

    8 bytes: length of the header │ header: JSON, padded to a multiple of 8 │ the arrays, without gaps
"""

import itertools
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import numpy as np
import xxhash

from tokamac.engine.errors import ConversionError
from tokamac.engine.perf.cost import Tensor

from .resume import append

SHARD_BYTES = 1_000_000_000
INDEX = "model.safetensors.index.json"

_TYPES: dict[Any, tuple[str, int]] = {
    mx.float32: ("F32", 4), mx.float16: ("F16", 2), mx.bfloat16: ("BF16", 2), mx.uint32: ("U32", 4), mx.int32: ("I32", 4),
    mx.uint8: ("U8", 1), mx.int8: ("I8", 1), mx.uint16: ("U16", 2), mx.int16: ("I16", 2), mx.int64: ("I64", 8),
    mx.uint64: ("U64", 8), mx.bool_: ("BOOL", 1),
}  # fmt: skip
_BYTES = dict(_TYPES.values())

FLOATS = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
"""MLX types that weights are cast to, by safetensors name."""


def type_name(dtype: Any) -> str:
    """Return the safetensors name of an MLX type."""
    if dtype not in _TYPES:
        raise ConversionError(
            f"weights of type {dtype} can't be written", "Use a checkpoint in float32, float16 or bfloat16."
        )
    return _TYPES[dtype][0]


def type_bytes(name: str) -> int:
    """Return the bytes of one element of a safetensors type."""
    return _BYTES[name]


@dataclass(frozen=True, slots=True)
class Shard:
    """One file to write: its name and its arrays, in order."""

    name: str
    tensors: tuple[Tensor, ...]

    @property
    def header(self) -> bytes:
        """The length, and the JSON header."""
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
        """By array, the bytes of the file up to and with it."""
        sizes = itertools.accumulate((tensor.nbytes for tensor in self.tensors), initial=len(self.header))
        next(sizes)
        return dict(zip((tensor.name for tensor in self.tensors), sizes, strict=True))

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


def lay_out(groups: Sequence[tuple[Tensor, ...]], limit: int = SHARD_BYTES) -> tuple[Shard, ...]:
    """Return the files to write, at most ``limit`` bytes of arrays each; what belongs together stays together.

    A group larger than the limit gets a file of its own.
    """
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
    """Return the index: which file holds which array."""
    where = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
    total = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    metadata = {"total_size": total, "total_parameters": parameters}
    index = {"metadata": metadata, "weight_map": dict(sorted(where.items()))}
    return (json.dumps(index, indent=4) + "\n").encode()


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes appended to a shard: those up to ``end`` since the extent before, or the shard's beginning.

    checksum: XXH3, 128 bits. complete: the shard ends with them, and is on the disk.
    """

    shard: str
    end: int
    checksum: str
    complete: bool


class ShardWriter:
    """Appends arrays to the shards of a folder, in the order they were laid out.

    written: how many of the arrays are there already, at the ends of files that hold nothing else.
    """

    def __init__(self, folder: Path, shards: Sequence[Shard], written: int = 0) -> None:
        self._folder = folder
        self._pending = [(shard, tensor) for shard in shards for tensor in shard.tensors][written:][::-1]
        self._shard: Shard | None = None
        self._file: int | None = None
        self._hash = xxhash.xxh3_128()

    def append(self, name: str, array: mx.array) -> None:
        """Write the next array. It must be the one the layout says, with that type and shape. Raises OSError."""
        shard, tensor = self._pending.pop()
        if (name, type_name(array.dtype), tuple(array.shape)) != (tensor.name, tensor.dtype, tensor.shape):
            raise ConversionError(
                f"{name} came out as {array.dtype} {array.shape} where {tensor} was planned",
                "This is a bug: please report it.",
            )
        # Bytes, because NumPy has no bfloat16; a view of the array, not a copy.
        append(self._opened(shard), np.asarray(mx.contiguous(array).reshape(-1).view(mx.uint8)).data, self._hash.update)

    def mark(self) -> Extent:
        """Return where what was appended since the last call lies; a shard that ends with it is on the disk from now on.

        Arrays between two calls must lie in one shard.
        """
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
