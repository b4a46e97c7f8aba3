"""Files, safely: read only what is regular and bounded, write what survives a power loss, open as many as a model has shards.

Whatever reads a model's folder, a setting, a cache or a file of the user's opens it here. A FIFO that nobody writes to blocks
forever, and a device may never end: here they are an OSError, whose ``strerror`` says what the path is. What was written must
reach the disk itself before it is renamed into place, or the file may not be whole after a power loss. And MLX holds every shard of
a checkpoint open until all its arrays are read; macOS begins with a limit of 256 open files, and large checkpoints have more.
"""

import ctypes
import errno
import fcntl
import gc
import os
import resource
import stat
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from .errors import DeviceError, OptionError
from .units import sizes

CONFIG_BYTES = 16 << 20
"""A config or another small JSON file at most: the largest published ones have some hundred kilobytes."""
INDEX_BYTES = 128 << 20
"""The index of a checkpoint's tensors at most: a tensor takes about a hundred bytes."""
TOKENIZER_BYTES = 512 << 20
"""A file of a tokenizer at most: the largest published ones have about 35 MB."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "spiece.model")
"""Of which a folder with a whole model has one."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS, PEFT_WEIGHTS = (
    "adapter_config.json",
    "adapters.safetensors",
    "adapter_model.safetensors",
)
"""An adapter's files: its config, and its weights in mlx-lm's form or in PEFT's."""
SLICE_BYTES = 1 << 16
"""Read at a time of a file that has grown, or whose size the system does not tell (/proc)."""

_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)

FLUSH_S = 3.0
"""How long closing an engine may take to finish its writes. Whoever waits for one, or ends its process, waits longer."""

FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)
"""macOS alone has it: its fsync leaves data in the drive's own cache, which may write them in any order."""
_AT_FDCWD, _RENAME_EXCHANGE, _RENAME_SWAP = -100, 2, 2
_CANT = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM)
"""The errors of a kernel, a container's filter or a file system that can't exchange names."""

WANTED = 8192
"""More than twice the shards of any checkpoint, and less than macOS lets a process have (10,240 or more)."""
READINGS, OTHERS = 3, 64
"""How often a conversion may have its source open, and about how many files a process has open otherwise, at most."""
REMEDY = f"Allow more: ulimit -n {WANTED}; where the system refuses that, an administrator sets the hard limit."

_importing = threading.Lock()


class NotRegularError(OSError):
    """A path is a FIFO, a device or a socket."""


class TooLargeError(OSError):
    """A file has more bytes than its purpose allows."""


def expanded(path: str | os.PathLike[str], *, strict: bool = False) -> Path:
    """Return a path with the folder that ``~`` or ``~name`` stands for.

    Where nobody has that name, the path stays as it was written, as in a shell: whoever opens it says that there is no such file.
    strict: OptionError is raised instead, for what is to be made.
    """
    try:
        return Path(path).expanduser()
    except (RuntimeError, ValueError) as error:  # ValueError: the name holds what no name can
        if strict:
            raise OptionError(f"there is no home folder for {os.fspath(path)}", "Write the whole path.") from error
        return Path(path)


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether something has this path; False too where that can't be known. Path's own raises OSError there, up to Python 3.13."""
    return os.path.exists(path)  # noqa: PTH110


def is_dir(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder's; False too where that can't be known: its name is too long, its parent can't be read."""
    return os.path.isdir(path)  # noqa: PTH112


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a file's; False too where that can't be known."""
    return os.path.isfile(path)  # noqa: PTH113


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file to read its bytes.

    Raises OSError: NotRegularError for what is neither a file nor a folder, IsADirectoryError, FileNotFoundError and the like.
    """
    _check(path, os.stat(path))  # noqa: PTH116  # before it is opened: opening some devices does something
    # Another thing may be in its place by now. Without O_NONBLOCK, opening a FIFO would wait for a writer.
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
    """Return the text of a regular file of at most ``most`` bytes, with newlines. Raises OSError and UnicodeDecodeError."""
    return read_bytes(path, most).decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def check_regular(paths: Iterable[Path], most: int) -> None:
    """Raise OSError for the first existing path that is no regular file of at most ``most`` bytes; folders pass.

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
        there, allowed = sizes(size, most)
        raise TooLargeError(errno.EFBIG, f"it has {there} or more, and may have {allowed}", os.fspath(path))


@contextmanager
def atomic_write(path: Path, prefix: str = ".") -> Iterator[BinaryIO]:
    """Yield a file (mode 0600) that becomes ``path`` at the end of the block: whole and on the disk, or not at all.

    prefix: of its temporary name, in the same folder. Raises OSError.
    """
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
    """Return when what was written to an open file, and whatever was synced before it, is on the disk. Raises OSError."""
    if FULL_SYNC is not None:
        with suppress(OSError):  # not every file system knows it: network folders don't, and some drives
            fcntl.fcntl(handle, FULL_SYNC)
            return
    os.fsync(handle)


def sync(path: Path) -> None:
    """Hand a file, or the names in a folder, to the disk: on macOS on their way, elsewhere there. Raises OSError."""
    _sync(path, os.fsync)


def path_to_disk(path: Path) -> None:
    """Do what ``to_disk`` does, for a file or the names in a folder. Raises OSError."""
    _sync(path, to_disk)


def _sync(path: Path, sync_handle: Callable[[int], None]) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        sync_handle(handle)
    finally:
        os.close(handle)


def exchange(first: Path, second: Path) -> bool:
    """Exchange what two names on one file system stand for, in one step: at no moment is either missing.

    Returns False, and nothing has changed, where the system or the file system can't. Raises OSError.
    """
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
    """Raise the soft limit on open files to ``wanted``, as far as the hard one allows; a higher one stays."""
    _raise_limit(wanted, resource.setrlimit)


def _raise_limit(wanted: int, setrlimit: Callable[[int, tuple[int, int]], None]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with suppress(OSError, ValueError):
            setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def not_opened(error: Exception, folder: Path) -> DeviceError | None:
    """Return the error for a model that could not be loaded because it has more shards than files may be open.

    MLX says "Failed to open file" whatever the reason was, so None wherever the limit leaves room for the shards.
    """
    if "Failed to open" not in str(error):
        return None
    traceback.clear_frames(error.__traceback__)  # they hold opened files, and looking into the folder takes one too
    shards = len(list(folder.glob("model*.safetensors")))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY or allowed > READINGS * shards + OTHERS:
        return None
    return DeviceError(f"this process may have {allowed} files open, and {folder} has {shards} shards", REMEDY)


def import_mlx_lm() -> None:
    """Import mlx-lm, without what that does to the limit on open files.

    ``mlx_lm/utils.py`` sets it to 2,048 and at most 4,096 when it is imported: that fails where the hard limit is lower, and
    lowers a higher one for the rest of the process. Here the soft limit is raised where it can be, and the hard one stays.
    """
    with _importing:
        if "mlx_lm.utils" in sys.modules:
            return
        setrlimit = resource.setrlimit

        def raised(which: int, limits: tuple[int, int], /) -> None:
            if which == resource.RLIMIT_NOFILE:
                _raise_limit(limits[0], setrlimit)
            else:
                setrlimit(which, limits)

        resource.setrlimit = raised
        collects = gc.isenabled()
        gc.disable()  # what a module makes stays: looking through it for garbage, again and again, is an eighth of the time
        try:
            import mlx_lm.utils  # noqa: F401
        finally:
            resource.setrlimit = setrlimit
            if collects:
                gc.enable()
