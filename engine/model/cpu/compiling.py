"""How this package's functions are compiled: by numba, once a machine, and kept on disk with the package or in the user's cache.

numba compiles again where the file of a function has changed. What it calls, and what writes its instructions, stands in others of
this folder: so what is kept has a digest of them all in its name.

Whatever runs inside a step holds no lock of the interpreter, checks no index and raises nothing. Sums stay in the order in which
they are written; ``contract`` alone (a product and a sum may be rounded once instead of twice) is left to the compiler.
"""

import fcntl
import hashlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from numba import cfunc, njit, types
from numba.core.caching import FunctionCache

from ...device import usable_cores

F = TypeVar("F", bound=Callable[..., Any])

KERNEL = types.void(types.intp, types.intp, types.intp)
"""What a pool runs: f(address of its arguments, first, last), which does the pieces from first to before last."""


_SETTINGS: dict[str, Any] = {"nogil": True, "fastmath": {"contract"}, "error_model": "numpy", "_nrt": False}
"""_nrt: references are not counted, so it makes no array."""


def compiled(function: F) -> F:
    """Compile at the first call. Where no folder can be written, every process compiles anew."""
    _name_by_sources(function)
    try:
        return njit(cache=True, **_SETTINGS)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # numba found no folder for it
        return njit(**_SETTINGS)(function)  # type: ignore[no-any-return]


def inner(function: F) -> F:
    """Compile for others that are compiled, and keep it with them alone: in half the time."""
    return njit(**_SETTINGS, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)  # type: ignore[no-any-return]


def compile_kernel(function: Callable[..., None]) -> int:
    """Compile a KERNEL now, and return its address. It lives as long as the process."""
    _name_by_sources(function)
    with alone(function):
        try:
            made = cfunc(KERNEL, cache=True, error_model="numpy")(function)
        except RuntimeError:
            made = cfunc(KERNEL, error_model="numpy")(function)
    _alive.append(made)
    return int(made.address)


@contextmanager
def alone(function: Callable[..., Any]) -> Iterator[None]:
    """Let no other process compile ``function`` meanwhile, where it is kept.

    numba takes a name for what it made and writes it to an index, without a lock: two that do so at once may give one's name to
    the code of the other, for good.
    """
    with _compiling, ExitStack() as stack:
        with suppress(RuntimeError, OSError):  # no folder, or one that can't be written: nothing is kept there
            place = _lock_of(function)
            place.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(place.open("w")), fcntl.LOCK_EX)
        yield


def is_missing(function: Callable[..., Any]) -> bool:
    """Whether ``function``, which is ``compiled``, could be kept on this machine, and is not yet."""
    try:
        return not any(_folder_of(function).glob(f"*{function.__qualname__}*.nbi"))
    except (RuntimeError, OSError):
        return False


def run_beside(code: str) -> None:
    """Run Python in a process of its own that nobody waits for, where there is a core for it: numba compiles on one."""
    if usable_cores() > 1:
        silent = subprocess.DEVNULL
        with suppress(OSError):
            other = subprocess.Popen([sys.executable, "-P", "-c", code], stdin=silent, stdout=silent, stderr=silent)
            threading.Thread(target=other.wait, name="tokamac-compile-beside", daemon=True).start()


def _lock_of(function: Callable[..., Any]) -> Path:
    return _folder_of(function) / f"{function.__module__}.{function.__name__}-{function.__code__.co_firstlineno}.lock"


def _folder_of(function: Callable[..., Any]) -> Path:
    """Return where what is made of a function is kept. Raises RuntimeError where numba finds no folder."""
    return Path(FunctionCache(function).cache_path)


def _name_by_sources(function: Callable[..., Any]) -> None:
    function.__qualname__ = f"{function.__name__}_{digest_of(Path(__file__).parent)}"


@cache
def digest_of(folder: Path) -> str:
    """Return 16 hexadecimal digits of the Python files of a folder."""
    found = hashlib.sha256()
    for file in sorted(folder.glob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


_alive: list[Any] = []
_compiling = threading.RLock()
