"""How kernels are compiled."""

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile with numba at the first call, without the interpreter's lock, and keep the result on disk if a folder can be written.

    numba looks for one beside the package, then in the user's cache (or in NUMBA_CACHE_DIR), and raises RuntimeError where it finds
    none; then every process compiles anew, for some seconds.
    """
    settings: dict[str, Any] = {"nogil": True, "fastmath": {"contract"}, "error_model": "numpy"}
    try:
        return njit(cache=True, **settings)(function)  # type: ignore[no-any-return]
    except RuntimeError:
        return njit(**settings)(function)  # type: ignore[no-any-return]
