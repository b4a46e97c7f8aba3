"""A compiled thread pool that shares the pieces of a product or an attention."""

import atexit
import os
import threading
from typing import Any

import numpy as np

from ..device import usable_cores
from .machine_code import function_of
from .words.pool import WORDS

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


def run(state: int, kernel: int, arguments: int, pieces: int, size: int) -> None:
    function_of("run", 5)(state, kernel, arguments, pieces, size)


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
        serve = function_of("serve", 1)
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
                function_of("end", 1)(int(self._state.ctypes.data))
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
