"""Wired memory: what the system may not page out while a model is in use.

Only Metal and CUDA devices name a recommended size; on a plain CPU everything here does nothing. What happens on those devices
has been tested with a stand-in for MLX only: no Mac was at hand.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from tokamac.engine.limits.memory import recommended


@contextmanager
def wired(needed_bytes: int) -> Iterator[int | None]:
    """Let ``needed_bytes`` (weights and planned caches) be wired, never more than the device recommends; put the limit back after.

    Yields the limit in force, None where the device has none. A limit that is higher already stays.
    """
    most = recommended()
    if most is None:
        yield None
        return
    import mlx.core as mx

    wanted = min(needed_bytes, most)
    before = int(mx.set_wired_limit(wanted))
    if before > wanted:
        mx.set_wired_limit(before)
    try:
        yield max(before, wanted)
    finally:
        mx.synchronize()  # Metal's residency set must not change under work that is still running
        mx.set_wired_limit(before)
