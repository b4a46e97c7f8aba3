"""Waiting that can't hold up the suite."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

DEADLINE_S = 60.0


def within(work: Callable[[], T]) -> T:
    """Return what ``work`` returns on a thread that can't hold up the suite; fail where it does not return at all."""
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive(), "it hangs"
    if failed:
        raise failed[0]
    return found[0]


def until(true: Callable[[], bool]) -> None:
    ends = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < ends, "it never came true"
        time.sleep(0.002)
