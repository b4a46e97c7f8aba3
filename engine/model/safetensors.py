"""The safetensors files of a model folder, checked from their headers alone: nothing is loaded, no MLX is needed."""

import json
import math
import operator
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelDamagedError, ModelUnsupportedError, unreadable
from ..files import INDEX_BYTES, NotRegularError, open_regular, read_text

INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
HEADER_LIMIT = 100_000_000
"""Bytes; the format's own limit for a header."""
TYPE_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8), **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2), **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2"), 1),
}  # fmt: skip
"""Bytes of an element, by type; the length of a tensor of another type is not checked."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is. begin: of its first byte, in the file."""

    file: Path
    begin: int
    shape: tuple[int, ...]
    item_bytes: int


def find_shards(folder: Path) -> list[Path]:
    """Return the weight files of a model folder, each checked to be whole.

    Raises ModelDamagedError for a missing or truncated file, ModelUnsupportedError where there are only pickles.
    """
    shards = sorted(folder.glob("model*.safetensors"))
    listed = _listed(folder)
    for name in sorted(set(listed.values())):
        if not (folder / name).is_file():
            raise ModelDamagedError(f"{folder / name} is missing, though {INDEX} names it", "Download the model again.")
    if not shards:
        if any(True for pattern in PICKLES for _ in folder.glob(pattern)):
            raise ModelUnsupportedError(
                f"{folder} has only pickled weights, which can run code when read",
                "Use a safetensors version of the model.",
            )
        raise ModelDamagedError(f"{folder} has no weights (model*.safetensors)", "Download or convert the model again.")
    for shard in shards:
        read_header(shard)
    return shards


def check_places(folder: Path, shards: list[Path]) -> None:
    """Raise ModelDamagedError where a tensor is in two of a folder's weight files, or not in the one its index says.

    Such a folder may still load: of two tensors the last one counts, and mlx-lm does not look at the index.
    """
    headers = {shard.name: read_header(shard) for shard in shards}
    where: dict[str, str] = {}
    for file, tensors in headers.items():
        for name in tensors:
            if name in where:
                raise ModelDamagedError(
                    f"{name} is both in {folder / where[name]} and in {file}",
                    "Remove the file that is not the model's.",
                )
            where[name] = file
    for name, file in _listed(folder).items():
        if name not in headers.get(file, {name}):  # a file of another name pattern is not read
            raise ModelDamagedError(
                f"{folder / file} lacks {name}, which {INDEX} promises", "Download that file again."
            )


def locate_tensors(shards: Sequence[Path]) -> dict[str, StoredTensor]:
    """Return where each tensor of these files is, by name: those of one file alone whose type has bytes of its own.

    Raises ModelDamagedError like ``read_header``.
    """
    found, twice = dict[str, StoredTensor](), set[str]()
    for shard in shards:
        tensors, begin = _read_header(shard)
        twice |= found.keys() & tensors.keys()
        for name, entry in tensors.items():
            if (width := TYPE_BYTES.get(entry["dtype"])) is not None:
                found[name] = StoredTensor(shard, begin + entry["data_offsets"][0], tuple(entry["shape"]), width)
    return {name: tensor for name, tensor in found.items() if name not in twice}


def read_header(shard: Path) -> dict[str, Any]:
    """Return a safetensors header (tensor name → dtype, shape, data_offsets) after checking that the file is as long as it says.

    Raises ModelDamagedError when it is not.
    """
    return _read_header(shard)[0]


def _read_header(shard: Path) -> tuple[dict[str, Any], int]:
    """Return a header, and where in the file the tensors begin."""
    try:
        file = open_regular(shard)
    except NotRegularError as error:
        raise unreadable(shard, error) from error
    with file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else HEADER_LIMIT + 1
        if length > min(HEADER_LIMIT, size):
            raise _damaged(shard, "its header is cut off")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = _checked_end(tensors)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise _damaged(shard, "its header is not readable") from error
    if 8 + length + end != size:
        raise _damaged(shard, f"it has {size:,} bytes instead of {8 + length + end:,}")
    return tensors, 8 + length


def _checked_end(tensors: dict[str, Any]) -> int:
    """Return where the last tensor's bytes end; raises ValueError where two overlap."""
    end = 0
    for begin, next_end in sorted(_span(entry) for entry in tensors.values()):
        if begin < end:
            raise ValueError
        end = next_end
    return end


def _span(entry: dict[str, Any]) -> tuple[int, int]:
    """Return where a tensor's bytes begin and end; raises for an entry that is not one."""
    begin, end = (operator.index(offset) for offset in entry["data_offsets"])
    shape, kind = [operator.index(size) for size in entry["shape"]], entry["dtype"]
    if not isinstance(kind, str) or not 0 <= begin <= end or min(shape, default=0) < 0:
        raise ValueError
    width = TYPE_BYTES.get(kind)
    if width is not None and end - begin != width * math.prod(shape):
        raise ValueError
    return begin, end


def _listed(folder: Path) -> dict[str, str]:
    """Return the index: tensor name → file name; empty where there is none."""
    index = folder / INDEX
    try:
        listed = dict(json.loads(read_text(index, INDEX_BYTES))["weight_map"])
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise unreadable(index, error) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelDamagedError(f"{index} is not a readable index", "Download that file again.") from error
    if any(not isinstance(name, str) or Path(name).name != name for name in listed.values()):
        raise ModelDamagedError(f"{index} names files outside the model's folder", "Don't use this model.")
    return listed


def _damaged(shard: Path, what: str) -> ModelDamagedError:
    return ModelDamagedError(f"{shard} is damaged: {what}", "Download that file again.")
