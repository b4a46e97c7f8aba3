"""Wired memory: what the system may not page out while models are in use.

Only Metal and CUDA devices name a recommended size; on a plain CPU everything here does nothing. What happens on those devices
has been tested with a stand-in for MLX only: no Mac was at hand.

MLX has one limit for the process, and a process may have several engines: their needs are added.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tokamac.engine.limits.memory import recommended

_lock = threading.Lock()
_needs: list[int] = []
_before = 0  # the limit that was in force before the first need


@contextmanager
def wired(needed_bytes: int) -> Iterator[int | None]:
    """Let ``needed_bytes`` be wired, never more than the device recommends; put the limit back after.

    needed_bytes: the planned peak, with the whole context in use.
    Yields the limit in force, None where the device has none. A limit that is higher already stays.
    """
    most = recommended()
    if most is None:
        yield None
        return
    import mlx.core as mx

    limit = _change(lambda: _needs.append(needed_bytes), most)
    try:
        yield limit
    finally:
        mx.synchronize()  # Metal's residency set must not change under work that is still running
        _change(lambda: _needs.remove(needed_bytes), most)


def _change(change: Callable[[], None], most: int) -> int:
    """Change the needs, and set the limit to what they come to."""
    global _before  # noqa: PLW0603  # one limit for the process, as in MLX
    import mlx.core as mx

    with _lock:
        first = not _needs
        change()
        wanted = min(sum(_needs), most)
        replaced = int(mx.set_wired_limit(wanted))
        if first:
            _before = replaced
        limit = max(_before, wanted)
        if limit != wanted:
            mx.set_wired_limit(limit)
        return limit
