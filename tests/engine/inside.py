"""What tests look at inside an engine: here alone, so that one place follows when it is built otherwise."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokamac.engine import Engine
from tokamac.engine.runner import Runner


def runner_of(engine: Engine) -> Runner:
    return engine._runner


def runtime_of(engine: Engine) -> Any:
    """Return its model, and what is known of it."""
    return runner_of(engine).runtime


def store_of(engine: Engine) -> Any:
    """Return its prompt cache."""
    return runner_of(engine).store


def held_of(store: Any) -> Any:
    """Return the caches of a store that replies hold."""
    return store._held


def idle_of(store: Any) -> Any:
    """Return the caches that the last reply left, as the next one may go on with them."""
    return store._idle


def nodes_of(store: Any) -> Any:
    """Return each stretch of tokens whose keys and values a store has set aside."""
    return store._nodes()


def disk_of(store: Any) -> Any:
    """Return what writes a store's blocks to the disk; None where nothing does."""
    return store._disk


def replies_of(engine: Engine) -> Any:
    """Return the replies that are open, and their schedule."""
    return engine._replies


def batches_of(stream: Any) -> Any:
    """Return the queue of what a reply has said that nobody has read."""
    return stream._batches


def worker_of(engine: Engine) -> Any:
    """Return the thread that the engine computes on."""
    return engine._worker


def speculation_of(engine: Engine) -> Any:
    return runner_of(engine).speculation


@contextmanager
def speculating(engine: Engine, by: Any) -> Iterator[None]:
    """Have an engine's replies guessed by something else, or by nothing."""
    runner, own = runner_of(engine), speculation_of(engine)
    runner.speculation = by
    try:
        yield
    finally:
        runner.speculation = own
