"""What MLX raises while it computes, as errors of the engine.

MLX knows one exception for all of it, RuntimeError, so its text is what tells the cases apart (upstream in mlx/backend/metal and
mlx/backend/cuda: allocator.cpp, eval.cpp, error.h, utils.cpp). On a GPU a step fails at the next time its results are asked for,
and MLX then forgets the failure: the next step may succeed. C++'s own failed allocations arrive as MemoryError. On a CPU, an
array of MLX 0.32.4 that the system has no memory for ends the process; nothing here can help that.

What the caches hold after a failed step is not known: arrays are written in place, and one whose step failed may count as
computed. So nobody goes on from there. The caches are dropped, and what is tried again is computed anew from the last place that
the prompt cache has (engine/request.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager

from tokamac.engine.errors import DeviceError, MemoryLimitError, TokamacError, panic_error

FAILURES = (RuntimeError, MemoryError)
"""What MLX raises for trouble with memory or the device."""

_MEMORY = (
    "insufficient memory",  # [METAL] Command buffer execution failed: Insufficient Memory
    "maximum allowed buffer size",  # [metal::malloc] Attempting to allocate … bytes which is greater than …
    "resource limit",  # [metal::malloc] Resource limit (499000) exceeded
    "unable to allocate",
    "[malloc",
    "out of memory",  # CUDA, cuDNN and cuBLAS
    "memoryallocation",  # cudaErrorMemoryAllocation
    "cublas_status_alloc_failed",
    "bad_alloc",
)
_TIMES = ("impactinginteractivity", "impacting interactivity", "timeout", "timed out")
_SHORTER = "Shorten the prompt, pack keys and values (--kv-bits 8), take a smaller model, or close other programs."


def engine_error(error: BaseException) -> TokamacError | None:
    """Return the engine's error for what MLX raised, or for a panic in Rust; None for what is no failure that is known."""
    if isinstance(error, TokamacError) or not isinstance(error, FAILURES):
        return panic_error(error)
    said = " ".join(str(error).split())[:200]
    known = said.lower()
    if isinstance(error, MemoryError) or any(text in known for text in _MEMORY):
        return MemoryLimitError(f"there was not enough memory to go on ({said or 'allocation failed'})", _SHORTER)
    if any(text in known for text in _TIMES):
        hint = "Close what draws on the screen, or load the model with a shorter context; then try again."
        return DeviceError(f"the system stopped the GPU's work, since it took too long ({said})", hint)
    if "command buffer" in known or "[metal" in known or "cuda" in known:
        return DeviceError(
            f"the GPU failed ({said})", "Try again. If it comes back, restart the computer or update MLX."
        )
    return None


def computing_error(error: BaseException) -> TokamacError | None:
    """Return the engine's error for what was raised while it computed: a failure that is not known is the device's, too."""
    known = engine_error(error)
    if known is not None or isinstance(error, TokamacError) or not isinstance(error, FAILURES):
        return known
    said = " ".join(str(error).split())[:200]
    return DeviceError(f"computing failed ({said})", "Try again. If it comes back, update MLX and report it.")


@contextmanager
def computing() -> Iterator[None]:
    """Raise MLX's failures inside a with block as MemoryLimitError or DeviceError."""
    try:
        yield
    except FAILURES as error:
        if (known := computing_error(error)) is None:
            raise
        raise known from error
