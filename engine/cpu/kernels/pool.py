"""How pieces are shared between threads, see ../pool.py, and what kernels call."""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from ..words.pool import *

F = TypeVar("F", bound=Callable[..., Any])


def inner(function: F) -> F:
    """Compile for compiled callers."""
    # Step code holds no GIL, checks no index and raises nothing. Sums keep their order; of fast-math only ``contract`` is
    # allowed. _nrt: references are not counted, so it makes no array.
    settings: dict[str, Any] = {"nogil": True, "fastmath": {"contract"}, "error_model": "numpy", "_nrt": False}
    return njit(**settings, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)  # type: ignore[no-any-return]


ORDER = "seq_cst"

_lock = types.ExternalFunction("pthread_mutex_lock", types.int32(types.intp))
_unlock = types.ExternalFunction("pthread_mutex_unlock", types.int32(types.intp))
_wait = types.ExternalFunction("pthread_cond_wait", types.int32(types.intp, types.intp))
_wake_all = types.ExternalFunction("pthread_cond_broadcast", types.int32(types.intp))
make_room = types.ExternalFunction("calloc", types.intp(types.intp, types.intp))
let_go = types.ExternalFunction("free", types.void(types.intp))
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


@inner
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


@inner
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


@inner
def end(state: int) -> None:
    store(state + 8 * ENDED, 1)
    _lock(state + 8 * MUTEX)
    _wake_all(state + 8 * CONDITION)
    _unlock(state + 8 * MUTEX)
