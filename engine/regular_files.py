"""Reading files that others name or made: regular files alone, and no more of one than a bound.

A FIFO that nobody writes to is waited for without end, and a device may never end. Whatever reads a model's folder, a setting, a
cache or a file of the user's opens it here, so that it gets an OSError instead, whose ``strerror`` says what the path is.
"""

import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

CONFIG_BYTES = 16 << 20
"""A config or another small JSON file at most: the largest published ones have some hundred kilobytes."""
INDEX_BYTES = 128 << 20
"""The index of a checkpoint's tensors at most: a tensor takes about a hundred bytes."""
TOKENIZER_BYTES = 512 << 20
"""A file of a tokenizer at most: the largest published ones have about 35 MB."""

_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


class NotRegularError(OSError):
    """A path is a FIFO, a device or a socket."""


class TooLargeError(OSError):
    """A file has more bytes than what it is read for can have."""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file to read its bytes.

    Raises OSError: NotRegularError for what is neither a file nor a folder, IsADirectoryError, FileNotFoundError and the like.
    """
    _check(path, os.stat(path))  # noqa: PTH116  # before it is opened: to open some devices does something
    # Another thing may have come to its place since. Without O_NONBLOCK, opening a FIFO would wait for a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(path, os.fstat(handle))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """Return all bytes of a regular file. Raises OSError; TooLargeError where it has more than ``most``."""
    with open_regular(path) as file:
        _check_size(path, os.fstat(file.fileno()).st_size, most)
        data = file.read(most + 1)
    _check_size(path, len(data), most)
    return data


def read_text(path: str | os.PathLike[str], most: int = CONFIG_BYTES, encoding: str = "utf-8") -> str:
    """Return the text of a regular file of at most ``most`` bytes, with newlines. Raises OSError and UnicodeDecodeError."""
    return read_bytes(path, most).decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def check_regular(paths: Iterable[Path], most: int) -> None:
    """Raise OSError for the first path that is there and is no regular file of at most ``most`` bytes; folders pass.

    For files that another library is going to open by their names.
    """
    for path in paths:
        try:
            at = path.stat()
        except OSError:
            continue  # a link to nothing: whoever needs it says so
        if not stat.S_ISDIR(at.st_mode):
            _check(path, at)
            _check_size(path, at.st_size, most)


def _check(path: str | os.PathLike[str], at: os.stat_result) -> None:
    if stat.S_ISDIR(at.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(at.st_mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(at.st_mode)), "something else")
        raise NotRegularError(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path))


def _check_size(path: str | os.PathLike[str], size: int, most: int) -> None:
    if size > most:
        reason = f"it has {size / 1e6:,.1f} MB or more, and may have {most / 1e6:,.1f} MB"
        raise TooLargeError(errno.EFBIG, reason, os.fspath(path))
