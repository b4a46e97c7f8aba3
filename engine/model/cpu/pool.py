"""Threads that share the pieces of one piece of work: a product's outputs, an attention's heads. All of it is compiled.

    run(state, kernel, arguments, pieces, size)     the caller and whoever comes in time do the pieces; returns when all are done

numba's own threads would do, were they there: its portable ones (workqueue) end the process when two threads use them at once, and
the others need libraries that a machine may lack. OpenBLAS's spin while they wait, and so take the cores from whoever has work: on
two busy cores a prompt took ten times as long.

Here whoever has time takes the next piece, the caller first of all: it never waits for a thread that has not begun, only for pieces
that are being done. A worker that finds nothing looks around for WATCH turns, yielding its core in each, and then sleeps until it
is called. A step's next product mostly comes before that.

    caller   arguments, pieces  →  OPEN = number  →  takes pieces  →  OPEN = 0  →  waits until INSIDE is 0
    worker   INSIDE + 1  →  if OPEN: takes pieces  →  INSIDE − 1

One work is done at a time. Who finds the pool in use does all pieces alone.
"""

import atexit
import os
import threading
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...device import usable_cores
from .compiling import KERNEL, compiled, inner

# Words of the state, each in a cache line of its own.
LINE = 8
OPEN, NEXT, INSIDE, SLEEPING, ENDED, KERNEL_AT, ARGUMENTS_AT, PIECES, SIZE, NUMBER, MUTEX, CONDITION = (
    LINE * index for index in range(12)
)
WORDS = LINE * 14
"""Beyond CONDITION there is room: a mutex takes 40 bytes, a condition 48, and zeros are what both begin as."""

WATCH = 300
"""Turns in which an idle worker looks for work before it sleeps: some 0.2 ms where nobody else wants the core."""

SPIN = 200
"""Looks in a row before a core is yielded, a few nanoseconds each."""

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
    """Read a word that other threads write."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        return builder.load_atomic(_word(builder, values[0]), ORDER, 8)

    return types.intp(types.intp), generate


@intrinsic
def store(typingctx, address, value):  # type: ignore[no-untyped-def]  # noqa
    """Write a word that other threads read."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        builder.store_atomic(values[1], _word(builder, values[0]), ORDER, 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@intrinsic
def add(typingctx, address, value):  # type: ignore[no-untyped-def]  # noqa
    """Add to a word that other threads use, and return what it was."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        return builder.atomic_rmw("add", _word(builder, values[0]), values[1], ORDER)

    return types.intp(types.intp, types.intp), generate


@intrinsic
def call(typingctx, kernel, arguments, first, last):  # type: ignore[no-untyped-def]  # noqa
    """Call the kernel at an address."""

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
    """Do ``pieces`` pieces, ``size`` at a time. state: the pool's address; 0 does all here. Only one thread may be in here."""
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
    """A worker's life: it ends when ENDED is set."""
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
    """Worker threads, one less than ``threads``, made at the first work."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._in_use = threading.Lock()
        self._state: Any = None
        self._workers: list[threading.Thread] = []

    def acquire(self) -> int:
        """Return the address that ``run`` takes, or 0 where another thread has the pool. Release what is not 0."""
        if self.threads < 2 or not self._in_use.acquire(blocking=False):
            return 0
        if self._state is None and not self._begin():
            self._in_use.release()
            return 0
        return int(self._state.ctypes.data)

    def release(self, address: int) -> None:
        """Let others have the pool."""
        if address:
            self._in_use.release()

    def _begin(self) -> bool:
        """Start the workers; return whether there are any. A process that ends, or has too many threads, gets none."""
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
        """End the workers, once the work that is being done is done: it uses their memory."""
        with self._in_use:
            if self._state is not None:
                _end(int(self._state.ctypes.data))
                for worker in self._workers:
                    worker.join()
                self._state, self._workers = None, []

    def forget(self) -> None:
        """In a process that was forked off: the threads are not there."""
        self._in_use, self._state, self._workers = threading.Lock(), None, []


def cores() -> int:
    """Return how many threads may compute: the cores that this process may use, or fewer by OMP_NUM_THREADS."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    there = usable_cores()
    return min(there, int(asked)) if asked.isdigit() and int(asked) else there


POOL = Pool(cores())
atexit.register(POOL.end)  # before what was compiled is let go
os.register_at_fork(after_in_child=POOL.forget)
