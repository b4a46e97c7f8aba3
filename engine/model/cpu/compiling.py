"""How this package's functions are compiled: by numba, once a machine, and kept on disk with the package or in the user's cache.

Whatever runs inside a step holds no lock of the interpreter, checks no index and raises nothing. Sums stay in the order in which
they are written; ``contract`` alone (a product and a sum may be rounded once instead of twice) is left to the compiler.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from numba import cfunc, njit, types

F = TypeVar("F", bound=Callable[..., Any])

KERNEL = types.void(types.intp, types.intp, types.intp)
"""What a pool runs: f(address of its arguments, first, last), which does the pieces from first to before last."""


def compiled(function: F) -> F:
    """Compile at the first call. Where no folder can be written, every process compiles anew."""
    settings: dict[str, Any] = {"nogil": True, "fastmath": {"contract"}, "error_model": "numpy"}
    try:
        return njit(cache=True, **settings)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # numba found no folder for it
        return njit(**settings)(function)  # type: ignore[no-any-return]


def compile_kernel(function: Callable[..., None]) -> int:
    """Compile a KERNEL now, and return its address. It lives as long as the process."""
    try:
        made = cfunc(KERNEL, cache=True, error_model="numpy")(function)
    except RuntimeError:
        made = cfunc(KERNEL, error_model="numpy")(function)
    _alive.append(made)
    return int(made.address)


_alive: list[Any] = []
