"""How much more address space a process may take, where somebody bounds it (``ulimit -v``, RLIMIT_AS).

Libraries, stacks of threads and reserved memory count in it, used or not. Where it runs out, threads can't be started, libraries
can't be loaded, and some of them end the process themselves; so what is certainly too little is refused before they are loaded.
"""

import sys
from pathlib import Path

from tokamac.engine.errors import MemoryLimitError

LEAST = 288_000_000
"""Bytes that an engine's libraries and threads take before there is any model. Measured on 2-core x86 Linux: the guide answers
where the process may have 400 MB in all, some 100 of them taken by then, and not with 300."""
LEAST_TO_INSPECT = 180_000_000
"""Bytes that are enough to weigh a model: likewise, ``inspect`` works with 300 MB in all, and not with 150."""


def space_left() -> int | None:
    """Return the bytes of address space that this process may still take; None where nothing bounds them, or it is unknown."""
    if sys.platform == "win32":
        return None
    import resource

    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    if allowed == resource.RLIM_INFINITY:
        return None
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return None  # macOS does not enforce it
    return max(0, allowed - pages * resource.getpagesize())


def check_address_space(least: int = LEAST) -> None:
    """Raise MemoryLimitError where there is less than ``least`` for libraries; does nothing once they are loaded."""
    left = None if "mlx.core" in sys.modules else space_left()
    if left is not None and left < least:
        raise too_little(left, least)


def too_little(left: int, least: int = LEAST) -> MemoryLimitError:
    """Return the error for a process that may take so little more address space."""
    return MemoryLimitError(
        f"this process may take {left / 1e6:.0f} MB more of address space, and the libraries it needs take {least / 1e6:.0f}",
        "Raise the limit (ulimit -v unlimited), or start it where there is none.",
    )
