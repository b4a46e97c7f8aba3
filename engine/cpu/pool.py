"""A compiled thread pool that shares the pieces of a product or an attention."""

import atexit
import fcntl
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core.caching import FunctionCache
from numba.extending import intrinsic

from ..device import usable_cores

# numba recompiles when a function's own file changes; callees and code writers are in other files, so the cache
# name has a digest of the folder. Step code holds no GIL, checks no index and raises nothing. Sums keep their
# order; of fast-math only ``contract`` is allowed.


F = TypeVar("F", bound=Callable[..., Any])

# What a pool runs: f(address of its arguments, first, last), which does the pieces from first to before last.
KERNEL = types.void(types.intp, types.intp, types.intp)


# _nrt: references are not counted, so it makes no array.
_SETTINGS: dict[str, Any] = {"nogil": True, "fastmath": {"contract"}, "error_model": "numpy", "_nrt": False}


def compiled(function: F) -> F:
    """Compile at the first call; per process if no cache folder is writable."""
    _name_by_sources(function)
    try:
        return njit(cache=True, **_SETTINGS)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # numba found no folder for it
        return njit(**_SETTINGS)(function)  # type: ignore[no-any-return]


def inner(function: F) -> F:
    """Compile for compiled callers, cached only with them: half the time."""
    return njit(**_SETTINGS, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)  # type: ignore[no-any-return]


def compile_kernel(function: Callable[..., None]) -> int:
    """Compile a KERNEL now; return its address, valid for the process."""
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
    """Lock compilation of ``function`` across processes."""
    # numba indexes results without a lock: two in parallel may permanently swap one's name and the other's code.
    with _compiling, ExitStack() as stack:
        with suppress(RuntimeError, OSError):  # no folder, or one that can't be written: nothing is kept there
            place = _lock_of(function)
            place.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(place.open("w")), fcntl.LOCK_EX)
        yield


def is_missing(function: Callable[..., Any]) -> bool:
    try:
        return not any(_folder_of(function).glob(f"*{function.__qualname__}*.nbi"))
    except (RuntimeError, OSError):
        return False


def run_beside(code: str) -> None:
    """Run Python in a detached process, if a core is free: numba compiles on one."""
    if usable_cores() > 1:
        silent = subprocess.DEVNULL
        with suppress(OSError):
            other = subprocess.Popen([sys.executable, "-P", "-c", code], stdin=silent, stdout=silent, stderr=silent)
            threading.Thread(target=other.wait, name="tokamac-compile-beside", daemon=True).start()


def _lock_of(function: Callable[..., Any]) -> Path:
    return _folder_of(function) / f"{function.__module__}.{function.__name__}-{function.__code__.co_firstlineno}.lock"


def _folder_of(function: Callable[..., Any]) -> Path:
    """Return a function's cache folder. Raises RuntimeError where numba finds none."""
    return Path(FunctionCache(function).cache_path)


def _name_by_sources(function: Callable[..., Any]) -> None:
    function.__qualname__ = f"{function.__name__}_{digest_of(Path(__file__).parent)}"


@cache
def digest_of(folder: Path) -> str:
    found = hashlib.sha256()
    for file in sorted(folder.glob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


_alive: list[Any] = []
_compiling = threading.RLock()


#     run(state, kernel, arguments, pieces, size)     caller and free workers do the pieces; returns when all are done
#
# numba's workqueue aborts when two threads use it; its other pools need libraries. OpenBLAS's threads spin: on
# two busy cores a prompt took ten times as long. Here the caller works first, and waits only for pieces in
# progress. Idle workers yield for WATCH turns, then sleep; a step's next product mostly comes before that.
#
#     caller   arguments, pieces  →  OPEN = number  →  takes pieces  →  OPEN = 0  →  waits until INSIDE is 0
#     worker   INSIDE + 1  →  if OPEN: takes pieces  →  INSIDE − 1
#
# One job at a time; a caller that finds the pool in use does all pieces alone.


# Words of the state, each in a cache line of its own.
LINE = 8
OPEN, NEXT, INSIDE, SLEEPING, ENDED, KERNEL_AT, ARGUMENTS_AT, PIECES, SIZE, NUMBER, MUTEX, CONDITION = (
    LINE * index for index in range(12)
)
# Beyond CONDITION there is room: a mutex takes 40 bytes, a condition 48, and zeros are what both begin as.
WORDS = LINE * 14

# Turns in which an idle worker looks for work before it sleeps: some 0.2 ms where nobody else wants the core.
WATCH = 300

SPIN = 200  # looks in a row before a core is yielded, a few nanoseconds each

ORDER = "seq_cst"

_lock = types.ExternalFunction("pthread_mutex_lock", types.int32(types.intp))
_unlock = types.ExternalFunction("pthread_mutex_unlock", types.int32(types.intp))
_wait = types.ExternalFunction("pthread_cond_wait", types.int32(types.intp, types.intp))
_wake_all = types.ExternalFunction("pthread_cond_broadcast", types.int32(types.intp))
_yield_core = types.ExternalFunction("sched_yield", types.int32())


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.IntType(64).as_pointer())


@intrinsic
def load(typingctx, address):  # type: ignore[no-untyped-def]  # noqa
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        return builder.load_atomic(_word(builder, values[0]), ORDER, 8)

    return types.intp(types.intp), generate


@intrinsic
def store(typingctx, address, value):  # type: ignore[no-untyped-def]  # noqa
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        builder.store_atomic(values[1], _word(builder, values[0]), ORDER, 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@intrinsic
def add(typingctx, address, value):  # type: ignore[no-untyped-def]  # noqa
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        return builder.atomic_rmw("add", _word(builder, values[0]), values[1], ORDER)

    return types.intp(types.intp, types.intp), generate


@intrinsic
def call(typingctx, kernel, arguments, first, last):  # type: ignore[no-untyped-def]  # noqa
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 3)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    assert len(KERNEL.args) == 3
    return types.void(*[types.intp] * 4), generate


@inner
def _take_pieces(state: int) -> None:
    kernel, arguments = load(state + 8 * KERNEL_AT), load(state + 8 * ARGUMENTS_AT)
    pieces, size = load(state + 8 * PIECES), load(state + 8 * SIZE)
    while True:
        first = add(state + 8 * NEXT, size)
        if first >= pieces:
            return
        call(kernel, arguments, first, min(first + size, pieces))


@compiled
def run(state: int, kernel: int, arguments: int, pieces: int, size: int) -> None:
    if state == 0 or pieces <= size:
        call(kernel, arguments, 0, pieces)
        return
    store(state + 8 * KERNEL_AT, kernel)
    store(state + 8 * ARGUMENTS_AT, arguments)
    store(state + 8 * PIECES, pieces)
    store(state + 8 * SIZE, size)
    store(state + 8 * NEXT, 0)
    store(state + 8 * OPEN, 1 + add(state + 8 * NUMBER, 1))
    if load(state + 8 * SLEEPING) > 0:
        _lock(state + 8 * MUTEX)
        _wake_all(state + 8 * CONDITION)
        _unlock(state + 8 * MUTEX)
    _take_pieces(state)
    store(state + 8 * OPEN, 0)
    looks = 0
    while load(state + 8 * INSIDE) > 0:
        looks += 1
        if looks % SPIN == 0:
            _yield_core()


@compiled
def serve(state: int) -> None:
    done: Any = np.intp(0)  # a literal would be a type of its own, and what takes it compiled again
    turns = 0
    while load(state + 8 * ENDED) == 0:
        number = load(state + 8 * OPEN)
        if number != 0 and number != done:  # noqa: PLR1714, a set would be made anew
            add(state + 8 * INSIDE, 1)
            # Open still, or again: the caller waits for whoever is inside before it changes anything.
            number = load(state + 8 * OPEN)
            if number != 0:
                _take_pieces(state)
                done = number
            add(state + 8 * INSIDE, -1)
            turns = 0
            continue
        turns += 1
        if turns % SPIN == 0:
            _yield_core()
        if turns >= WATCH * SPIN:
            _sleep(state, done)
            turns = 0


@inner
def _sleep(state: int, done: int) -> None:
    _lock(state + 8 * MUTEX)
    add(state + 8 * SLEEPING, 1)
    while load(state + 8 * ENDED) == 0 and (load(state + 8 * OPEN) == 0 or load(state + 8 * OPEN) == done):
        _wait(state + 8 * CONDITION, state + 8 * MUTEX)
    add(state + 8 * SLEEPING, -1)
    _unlock(state + 8 * MUTEX)


@compiled
def _end(state: int) -> None:
    store(state + 8 * ENDED, 1)
    _lock(state + 8 * MUTEX)
    _wake_all(state + 8 * CONDITION)
    _unlock(state + 8 * MUTEX)


class Pool:
    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._in_use = threading.Lock()
        self._state: Any = None
        self._workers: list[threading.Thread] = []

    def acquire(self) -> int:
        """Return the address for ``run``, to be released, or 0 if another thread has the pool."""
        if self.threads < 2 or not self._in_use.acquire(blocking=False):
            return 0
        if self._state is None and not self._begin():
            self._in_use.release()
            return 0
        return int(self._state.ctypes.data)

    def release(self, address: int) -> None:
        if address:
            self._in_use.release()

    def _begin(self) -> bool:
        self._state = np.zeros(WORDS, np.int64)
        address = int(self._state.ctypes.data)
        try:
            for number in range(1, self.threads):
                worker = threading.Thread(target=serve, args=(address,), name=f"tokamac-cpu-{number}", daemon=True)
                worker.start()
                self._workers.append(worker)
        except RuntimeError:
            pass
        if not self._workers:
            self._state = None
        return bool(self._workers)

    def end(self) -> None:
        with self._in_use:
            if self._state is not None:
                _end(int(self._state.ctypes.data))
                for worker in self._workers:
                    worker.join()
                self._state, self._workers = None, []

    def forget(self) -> None:
        self._in_use, self._state, self._workers = threading.Lock(), None, []


def cores() -> int:
    asked = os.environ.get("OMP_NUM_THREADS", "")
    there = usable_cores()
    return min(there, int(asked)) if asked.isdigit() and int(asked) else there


POOL = Pool(cores())
atexit.register(POOL.end)  # before what was compiled is let go
os.register_at_fork(after_in_child=POOL.forget)
