"""Safetensors files: headers, and reading parts of a tensor."""

import itertools
import json
import math
import mmap
import operator
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelDamagedError, ModelUnsupportedError, unreadable
from ..files import INDEX_BYTES, NotRegularError, open_regular, read_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
HEADER_LIMIT = 100_000_000  # bytes; the format's own limit for a header
# Bytes of an element, by type; the length of a tensor of another type is not checked.
TYPE_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8), **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2), **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2"), 1),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    file: Path
    begin: int
    shape: tuple[int, ...]
    item_bytes: int


def weight_files(folder: Path) -> list[Path]:
    """Return all files of weights: safetensors, or the parts of a GGUF file (gguf/checkpoint.py)."""
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.gguf"))


def find_shards(folder: Path) -> list[Path]:
    """Return complete weight files. Raises ModelDamagedError; ModelUnsupportedError for pickles only."""
    shards = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("model*.gguf"))
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
    """Raise ModelDamagedError for tensors in two files, or not where the index says."""
    # Such a folder may load: the last of two tensors wins, and mlx-lm ignores the index.
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
    """Return each tensor's place; only byte-sized types and unique names. Raises ModelDamagedError."""
    found, twice = dict[str, StoredTensor](), set[str]()
    for shard in shards:
        tensors, begin = _read_header(shard)
        twice |= found.keys() & tensors.keys()
        for name, entry in tensors.items():
            if (width := TYPE_BYTES.get(entry["dtype"])) is not None:
                found[name] = StoredTensor(shard, begin + entry["data_offsets"][0], tuple(entry["shape"]), width)
    return {name: tensor for name, tensor in found.items() if name not in twice}


def read_header(shard: Path) -> dict[str, Any]:
    """Return a header, after checking the file's length; of a GGUF part what it stands for. Raises ModelDamagedError."""
    if shard.suffix == ".gguf":
        from ..gguf.checkpoint import header_of

        return header_of(shard)
    return _read_header(shard)[0]


def _read_header(shard: Path) -> tuple[dict[str, Any], int]:
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
    end = 0
    for begin, next_end in sorted(_span(entry) for entry in tensors.values()):
        if begin < end:
            raise ValueError
        end = next_end
    return end


def _span(entry: dict[str, Any]) -> tuple[int, int]:
    begin, end = (operator.index(offset) for offset in entry["data_offsets"])
    shape, kind = [operator.index(size) for size in entry["shape"]], entry["dtype"]
    if not isinstance(kind, str) or not 0 <= begin <= end or min(shape, default=0) < 0:
        raise ValueError
    width = TYPE_BYTES.get(kind)
    if width is not None and end - begin != width * math.prod(shape):
        raise ValueError
    return begin, end


def _listed(folder: Path) -> dict[str, str]:
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


# Gaps shorter than a page are read through: a disk brings that page anyhow.


# What a thread reads before it takes the next: long enough to hide what a task costs, short enough to hold beside a
# tensor.
BLOCK_BYTES = 4 << 20
READERS = 4  # threads: short pieces come from a disk several times as fast when it is asked for some at once

Piece = tuple[int, memoryview]  # where it begins in the file, and the memory to fill


@dataclass(frozen=True, slots=True)
class Part:
    """Runs [begin, end) of indices along an axis, in the wanted order."""

    axis: int
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of_indices(cls, axis: int, indices: Sequence[int]) -> "Part":
        ends = [at for at in range(1, len(indices)) if indices[at] != indices[at - 1] + 1]
        cuts = itertools.pairwise([0, *ends, len(indices)])
        return cls(axis, tuple((indices[begin], indices[end - 1] + 1) for begin, end in cuts))


def read_part(tensor: StoredTensor, part: Part, *, page: int = mmap.PAGESIZE) -> "NDArray[np.unsignedinteger[Any]]":
    """Read a part as unsigned integers of element width. Raises ModelDamagedError."""
    import numpy as np

    before, after = tensor.shape[: part.axis], tensor.shape[part.axis + 1 :]
    each = math.prod(after) * tensor.item_bytes  # of an index, in a row of all indices
    row_bytes = tensor.shape[part.axis] * each
    runs = [(begin * each, end * each) for begin, end in part.runs]
    width = sum(end - begin for begin, end in runs)
    rows = np.empty((math.prod(before), width), np.uint8)
    through = row_bytes - width < page
    try:
        with open_regular(tensor.file) as file:
            if through:
                _read_through(file.fileno(), tensor.begin, row_bytes, runs, rows)
            else:
                _read_all(file.fileno(), _pieces(tensor.begin, row_bytes, runs, rows))
    except EOFError as error:
        raise ModelDamagedError(f"{tensor.file} is damaged: its end is missing", "Download that file again.") from error
    except OSError as error:
        raise unreadable(tensor.file, error) from error
    return rows.view(f"u{tensor.item_bytes}").reshape(*before, sum(end - begin for begin, end in part.runs), *after)


def _read_through(
    handle: int, begin: int, row_bytes: int, runs: Sequence[tuple[int, int]], rows: "NDArray[np.uint8]"
) -> None:
    import numpy as np

    most = max(1, BLOCK_BYTES // max(row_bytes, 1))
    for first in range(0, len(rows), most):
        some = rows[first : first + most]
        whole = np.empty((len(some), row_bytes), np.uint8)
        _read_pieces(handle, [(begin + first * row_bytes, whole.reshape(-1).data)])
        np.concatenate([whole[:, start:end] for start, end in runs], axis=1, out=some)


def _pieces(begin: int, row_bytes: int, runs: Sequence[tuple[int, int]], rows: "NDArray[np.uint8]") -> Iterator[Piece]:
    memory, at = rows.reshape(-1).data, 0
    for row in range(len(rows)):
        for start, end in runs:
            for offset in range(start, end, BLOCK_BYTES):
                length = min(end - offset, BLOCK_BYTES)
                yield begin + row * row_bytes + offset, memory[at : at + length]
                at += length


def _read_all(handle: int, pieces: Iterable[Piece]) -> None:
    tasks, size = list[list[Piece]]([[]]), 0
    for piece in pieces:
        tasks[-1].append(piece)
        size += len(piece[1])
        if size >= BLOCK_BYTES:
            tasks.append([])
            size = 0
    with ThreadPoolExecutor(min(READERS, len(tasks))) as pool:
        for _ in pool.map(lambda task: _read_pieces(handle, task), tasks):
            pass


def _read_pieces(handle: int, pieces: Iterable[Piece]) -> None:
    """Fill each piece. Raises EOFError."""
    for at, memory in pieces:
        done = 0
        while done < len(memory):
            found = os.pread(handle, len(memory) - done, at + done)
            if not found:
                raise EOFError
            memory[done : done + len(found)] = found
            done += len(found)
