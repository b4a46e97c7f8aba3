"""Reading and writing files within bounds, and sizes as text."""

import ctypes
import errno
import fcntl
import os
import resource
import stat
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from .errors import DeviceError, OptionError


def figures(value: float) -> str:
    """Format with three significant figures, or all integer digits: 0.98, 2.26, 50.4, 1,024."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def size(value: int) -> str:
    """Return bytes in decimal units: 2.26 GB."""
    for factor, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if value >= factor:
            return f"{figures(value / factor)} {unit}"
    return f"{value} B"


def memory_size(value: int) -> str:
    """Return a machine's memory as it is sold: 16 GB for 16 GiB."""
    gib, rest = divmod(value, 1 << 30)
    return f"{gib} GB" if gib and not rest else size(value)


def sizes(first: int, second: int) -> tuple[str, str]:
    if first == second or size(first) != size(second):
        return size(first), size(second)
    return f"{first:,} B", f"{second:,} B"


# A FIFO can block forever and a device may never end: both are an OSError here. A file must reach the disk
# before it is renamed, or it may be incomplete after a power loss. MLX keeps every shard open until its
# arrays are read; macOS starts with a limit of 256 open files, fewer than large checkpoints have shards.


# A config or another small JSON file at most: the largest published ones have some hundred kilobytes.
CONFIG_BYTES = 16 << 20
INDEX_BYTES = 128 << 20  # the index of a checkpoint's tensors at most: a tensor takes about a hundred bytes
TOKENIZER_BYTES = 512 << 20  # a file of a tokenizer at most: the largest published ones have about 35 MB
# Of which a folder with a whole model has one.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "spiece.model")
# An adapter's files: its config, and its weights in mlx-lm's form or in PEFT's.
ADAPTER_CONFIG, ADAPTER_WEIGHTS, PEFT_WEIGHTS = (
    "adapter_config.json",
    "adapters.safetensors",
    "adapter_model.safetensors",
)
SLICE_BYTES = 1 << 16  # read at a time of a file that has grown, or whose size the system does not tell (/proc)

_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)

# How long closing an engine may take to finish its writes. Whoever waits for one, or ends its process, waits longer.
FLUSH_S = 3.0

# macOS alone has it: its fsync leaves data in the drive's own cache, which may write them in any order.
FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)
_AT_FDCWD, _RENAME_EXCHANGE, _RENAME_SWAP = -100, 2, 2
# The errors of a kernel, a container's filter or a file system that can't exchange names.
_CANT = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM)

WANTED = 8192  # more than twice the shards of any checkpoint, and less than macOS lets a process have (10,240 or more)
# How often a conversion may have its source open, and about how many files a process has open otherwise, at most.
READINGS, OTHERS = 3, 64
REMEDY = f"Allow more: ulimit -n {WANTED}; where the system refuses that, an administrator sets the hard limit."


class NotRegularError(OSError):
    """A path is a FIFO, a device or a socket."""


class TooLargeError(OSError):
    """A file exceeds the size limit for its purpose."""


def expanded(path: str | os.PathLike[str], *, strict: bool = False) -> Path:
    """Expand ``~`` and ``~name``; an unknown name stays as written, or raises OptionError if ``strict``."""
    try:
        return Path(path).expanduser()
    except (RuntimeError, ValueError) as error:  # ValueError: the name holds what no name can
        if strict:
            raise OptionError(f"there is no home folder for {os.fspath(path)}", "Write the whole path.") from error
        return Path(path)


def exists(path: str | os.PathLike[str]) -> bool:
    # False too where it can't be known: up to Python 3.13, Path.exists raises OSError there.
    return os.path.exists(path)  # noqa: PTH110


def is_dir(path: str | os.PathLike[str]) -> bool:
    return os.path.isdir(path)  # noqa: PTH112


def is_file(path: str | os.PathLike[str]) -> bool:
    # False too where it can't be known.
    return os.path.isfile(path)  # noqa: PTH113


FileId = tuple[int, int]  # of a file, whatever its name: device and inode
# Files that SQLite has open in this process, by owner: to close another descriptor of one would drop its locks.
HELD: dict[int, frozenset[FileId]] = {}


def file_id(path: str | os.PathLike[str]) -> FileId | None:
    try:
        at = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return at.st_dev, at.st_ino


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file to read bytes. Raises OSError (NotRegularError for a FIFO, device or socket).

    PermissionError for a database that this process has open.
    """
    at = os.stat(path)  # noqa: PTH116  # before it is opened: opening some devices does something
    _check(path, at)
    if any((at.st_dev, at.st_ino) in files for files in tuple(HELD.values())):
        raise PermissionError(errno.EACCES, "it is a database that this program has open", os.fspath(path))
    # Another thing may be in its place by now. Without O_NONBLOCK, opening a FIFO would wait for a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(path, os.fstat(handle))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """Read a regular file. Raises OSError; TooLargeError above ``most`` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        _check_size(path, size, most)
        parts, left = [], most + 1
        while left and (part := file.read(min(left, max(size, SLICE_BYTES)))):  # reading takes the memory asked for
            parts.append(part)
            left -= len(part)
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    _check_size(path, len(data), most)
    return data


def read_text(path: str | os.PathLike[str], most: int = CONFIG_BYTES, encoding: str = "utf-8") -> str:
    """Read a regular text file of at most ``most`` bytes. Raises OSError and UnicodeDecodeError."""
    return read_bytes(path, most).decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def check_regular(paths: Iterable[Path], most: int) -> None:
    """Raise OSError for the first existing path that isn't a regular file of at most ``most`` bytes; folders pass."""
    # For files that another library opens by name.
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
        there, allowed = sizes(size, most)
        raise TooLargeError(errno.EFBIG, f"it has {there} or more, and may have {allowed}", os.fspath(path))


@contextmanager
def atomic_write(path: Path, prefix: str = ".") -> Iterator[BinaryIO]:
    """Yield a file (mode 0600) that becomes ``path`` whole and on disk, or not at all. Raises OSError."""
    handle, temporary = tempfile.mkstemp(dir=path.absolute().parent, prefix=prefix)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            to_disk(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync(path.absolute().parent)


def to_disk(handle: int) -> None:
    """Flush an open file, and everything synced before it, to the disk itself. Raises OSError."""
    if FULL_SYNC is not None:
        with suppress(OSError):  # not every file system knows it: network folders don't, and some drives
            fcntl.fcntl(handle, FULL_SYNC)
            return
    os.fsync(handle)


def sync(path: Path) -> None:
    # On macOS this only queues the data for the disk; elsewhere it is there on return. Raises OSError.
    _sync(path, os.fsync)


def path_to_disk(path: Path) -> None:
    _sync(path, to_disk)


def _sync(path: Path, sync_handle: Callable[[int], None]) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        sync_handle(handle)
    finally:
        os.close(handle)


def exchange(first: Path, second: Path) -> bool:
    """Swap two names on one file system atomically; False (no change) where unsupported. Raises OSError."""
    names = os.fsencode(first), os.fsencode(second)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "darwin":
            failed = libc.renamex_np(*names, _RENAME_SWAP)
        else:
            failed = libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)
    except (AttributeError, OSError):  # a C library without it
        return False
    if not failed:
        return True
    number = ctypes.get_errno()
    if number in _CANT:
        return False
    raise OSError(number, os.strerror(number), os.fspath(first), None, os.fspath(second))


def raise_open_files(wanted: int = WANTED) -> None:
    """Raise the soft limit on open files to ``wanted``, within the hard limit; never lower it."""
    _raise_limit(wanted, resource.setrlimit)


def _raise_limit(wanted: int, setrlimit: Callable[[int, tuple[int, int]], None]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with suppress(OSError, ValueError):
            setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def not_opened(error: Exception, folder: Path) -> DeviceError | None:
    """Return the error for a model with more shards than the open-file limit, else None."""
    # MLX says "Failed to open file" whatever the reason.
    if "Failed to open" not in str(error):
        return None
    traceback.clear_frames(error.__traceback__)  # they hold opened files, and looking into the folder takes one too
    shards = len(list(folder.glob("model*.safetensors")))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY or allowed > READINGS * shards + OTHERS:
        return None
    return DeviceError(f"this process may have {allowed} files open, and {folder} has {shards} shards", REMEDY)


@contextmanager
def keeping_open_files() -> Iterator[None]:
    """Let code that sets the limit on open files only raise it, as ``raise_open_files`` does."""
    setrlimit = resource.setrlimit

    def raised(which: int, limits: tuple[int, int], /) -> None:
        if which == resource.RLIMIT_NOFILE:
            _raise_limit(limits[0], setrlimit)
        else:
            setrlimit(which, limits)

    resource.setrlimit = raised
    try:
        yield
    finally:
        resource.setrlimit = setrlimit
