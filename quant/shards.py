"""Safetensors files written one array at a time.

All types and shapes are known before the first array is computed, so the header goes first and every array is appended where the
header says. Nothing is held back: memory stays that of one tensor, and the size of every file is known before it exists.

    8 bytes: length of the header │ header: JSON, padded to a multiple of 8 │ the arrays, without gaps
"""

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import mlx.core as mx
import numpy as np

from tokamac.engine.errors import ConversionError
from tokamac.engine.limits.cost import Tensor

SHARD_BYTES = 1_000_000_000
INDEX = "model.safetensors.index.json"

_TYPES: dict[Any, tuple[str, int]] = {
    mx.float32: ("F32", 4), mx.float16: ("F16", 2), mx.bfloat16: ("BF16", 2), mx.uint32: ("U32", 4), mx.int32: ("I32", 4),
    mx.uint8: ("U8", 1), mx.int8: ("I8", 1), mx.uint16: ("U16", 2), mx.int16: ("I16", 2), mx.int64: ("I64", 8),
    mx.uint64: ("U64", 8), mx.bool_: ("BOOL", 1),
}  # fmt: skip
_BYTES = dict(_TYPES.values())


def type_name(dtype: Any) -> str:
    """Return the safetensors name of an MLX type."""
    if dtype not in _TYPES:
        raise ConversionError(
            f"weights of type {dtype} can't be written", "Use a checkpoint in float32, float16 or bfloat16."
        )
    return _TYPES[dtype][0]


def float_bytes(name: str) -> int:
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
            entries[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [end, end + tensor.nbytes],
            }
            end += tensor.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

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
    if len(shards) == 1:
        return (Shard("model.safetensors", tuple(shards[0])),)
    return tuple(
        Shard(f"model-{number:05d}-of-{len(shards):05d}.safetensors", tuple(tensors))
        for number, tensors in enumerate(shards, start=1)
    )


def index_json(shards: Sequence[Shard], *, parameters: int) -> bytes:
    """Return the index: which file holds which array."""
    where = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
    total = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    index = {
        "metadata": {"total_size": total, "total_parameters": parameters},
        "weight_map": dict(sorted(where.items())),
    }
    return (json.dumps(index, indent=4) + "\n").encode()


class Writer:
    """Appends arrays to the shards of a folder, in the order they were laid out; a file is on disk when its last array is."""

    def __init__(self, folder: Path, shards: Sequence[Shard]) -> None:
        self._folder = folder
        self._pending = [(shard, tensor) for shard in shards for tensor in shard.tensors][::-1]
        self._shard: Shard | None = None
        self._file: Any = None

    def append(self, name: str, array: mx.array) -> None:
        """Write the next array. It must be the one the layout says, with that type and shape."""
        shard, tensor = self._pending.pop()
        if (name, type_name(array.dtype), tuple(array.shape)) != (tensor.name, tensor.dtype, tensor.shape):
            raise ConversionError(
                f"{name} came out as {array.dtype} {array.shape} where {tensor} was planned",
                "This is a bug: please report it.",
            )
        if shard is not self._shard:
            self._finish()
            self._shard, self._file = shard, (self._folder / shard.name).open("wb")
            self._file.write(shard.header)
        # Bytes, because NumPy has no bfloat16; a view of the array, not a copy.
        self._file.write(np.asarray(mx.contiguous(array).reshape(-1).view(mx.uint8)).data)

    def _finish(self) -> None:
        if self._file is None:
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish()
        elif self._file is not None:
            # What is still buffered may not fit the disk either: the folder is thrown away, so let it go.
            self._file.raw.close()
