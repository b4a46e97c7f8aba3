"""Whether the logits of every row of a pass are asked for. Of a prompt's pieces they are not: there, no head is computed."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_asked: ContextVar[bool] = ContextVar("asked", default=False)


@contextmanager
def asking_for_logits() -> Iterator[None]:
    """Inside a with block, the logits of all rows are asked for: a head may compute them at once, by what is fastest."""
    before = _asked.set(True)
    try:
        yield
    finally:
        _asked.reset(before)


def are_asked_for() -> bool:
    """Return whether they are."""
    return _asked.get()
