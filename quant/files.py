"""Bytes of files: appended while they are hashed, checked later."""

import os
from collections.abc import Callable
from pathlib import Path

import xxhash

from tokamac.engine.regular_files import open_regular

SLICE_BYTES = 8 << 20
"""Hashed, and then written, at a time: it fits a processor's cache, so memory is read once for both."""


def append(handle: int, data: memoryview | bytes, hashed: Callable[[memoryview], object] = lambda _: None) -> None:
    """Write ``data`` to a file descriptor, slice by slice; ``hashed`` is given each slice before it is written.

    No buffer and no copy: what this function has returned from survives the end of the process. Raises OSError.
    """
    view = memoryview(data)
    for start in range(0, len(view), SLICE_BYTES):
        part = view[start : start + SLICE_BYTES]
        hashed(part)
        while part:
            part = part[os.write(handle, part) :]  # a disk that fills up takes a part, and fails the next time


def checksum(file: Path, start: int = 0, end: int | None = None) -> str:
    """Return the XXH3 checksum (128 bits, hexadecimal) of a file's bytes from ``start`` to ``end``, or to where it ends before."""
    digest, left = xxhash.xxh3_128(), file.stat().st_size - start if end is None else end - start
    buffer = memoryview(bytearray(min(SLICE_BYTES, max(left, 1))))
    with open_regular(file) as opened:
        opened.seek(start)
        while left > 0 and (count := opened.readinto(buffer[:left])):
            digest.update(buffer[:count])
            left -= count
    return digest.hexdigest()
