"""Reads from a safetensors file what one process needs of a tensor: runs of indices along one axis.

Along the first axis a run is one piece of the file, along the last a piece of every row. Between two pieces nothing is read, unless
they are closer than a page: a disk brings that page anyhow.
"""

import itertools
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ModelDamagedError, unreadable
from ..files import open_regular
from .safetensors import StoredTensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BLOCK_BYTES = 4 << 20
"""What a thread reads before it takes the next: long enough to hide what a task costs, short enough to hold beside a tensor."""
READERS = 4
"""Threads: short pieces come from a disk several times as fast when it is asked for some at once."""

Piece = tuple[int, memoryview]
"""Where it begins in the file, and the memory to fill."""


@dataclass(frozen=True, slots=True)
class Part:
    """Runs [begin, end) of indices along an axis, in the order in which they are wanted."""

    axis: int
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of_indices(cls, axis: int, indices: Sequence[int]) -> "Part":
        """Return the part that has these indices, one by one."""
        ends = [at for at in range(1, len(indices)) if indices[at] != indices[at - 1] + 1]
        cuts = itertools.pairwise([0, *ends, len(indices)])
        return cls(axis, tuple((indices[begin], indices[end - 1] + 1) for begin, end in cuts))


def read_part(tensor: StoredTensor, part: Part, *, page: int = mmap.PAGESIZE) -> "NDArray[np.unsignedinteger[Any]]":
    """Return a part of a tensor, its elements as whole numbers of their width: (…, indices of the part, …).

    Raises ModelDamagedError where the file can't be read, or has become shorter.
    """
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
    """Read whole rows, some at a time, and keep of each what is in the runs."""
    import numpy as np

    most = max(1, BLOCK_BYTES // max(row_bytes, 1))
    for first in range(0, len(rows), most):
        some = rows[first : first + most]
        whole = np.empty((len(some), row_bytes), np.uint8)
        _read_pieces(handle, [(begin + first * row_bytes, whole.reshape(-1).data)])
        np.concatenate([whole[:, start:end] for start, end in runs], axis=1, out=some)


def _pieces(begin: int, row_bytes: int, runs: Sequence[tuple[int, int]], rows: "NDArray[np.uint8]") -> Iterator[Piece]:
    """Yield what is to be read, none longer than a block, in the order of the memory."""
    memory, at = rows.reshape(-1).data, 0
    for row in range(len(rows)):
        for start, end in runs:
            for offset in range(start, end, BLOCK_BYTES):
                length = min(end - offset, BLOCK_BYTES)
                yield begin + row * row_bytes + offset, memory[at : at + length]
                at += length


def _read_all(handle: int, pieces: Iterable[Piece]) -> None:
    """Read pieces by several threads, each about a block at a time."""
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
    """Fill the memory of each piece. Raises EOFError where the file ends before."""
    for at, memory in pieces:
        done = 0
        while done < len(memory):
            found = os.pread(handle, len(memory) - done, at + done)
            if not found:
                raise EOFError
            memory[done : done + len(found)] = found
            done += len(found)
