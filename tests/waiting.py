"""Waiting for an event. The bound names what hangs before pytest ends the test; nothing is measured by it."""

import time
from collections.abc import Callable

PATIENCE_S = 180.0  # many times what anything takes on a machine a third as fast that has other work; pytest's is 240


def until(condition: Callable[[], object], what: str = "", often_s: float = 0.01) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(often_s)
