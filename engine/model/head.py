"""The output head's interface: whether all rows' logits are wanted, and its input."""

# Prompt chunks need no logits, so no head is computed. Multi-token heads read the input, kept from normal
# passes.

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

_asked: ContextVar[bool] = ContextVar("asked", default=False)
_kept: ContextVar[list[Any] | None] = ContextVar("kept", default=None)


@contextmanager
def asking_for_logits() -> Iterator[None]:
    """Inside a with block, request all rows' logits together."""
    before = _asked.set(True)
    try:
        yield
    finally:
        _asked.reset(before)


def are_asked_for() -> bool:
    return _asked.get()


@contextmanager
def keeping_hidden_states() -> Iterator[list[Any]]:
    """Collect each pass's hidden states (B, N, D) inside a with block, after ``open_door``."""
    kept: list[Any] = []
    before = _kept.set(kept)
    try:
        yield kept
    finally:
        _kept.reset(before)


def keep_hidden_states(states: Callable[[], Any]) -> None:
    if (kept := _kept.get()) is not None:
        kept.append(states())


def backbone_of(model: Any) -> Any:
    found = [
        each for _, each in model.named_modules() if all(name in each for name in ("embed_tokens", "layers", "norm"))
    ]
    return found[0] if len(found) == 1 else None


def open_door(model: Any) -> bool:
    """Let ``keeping_hidden_states`` observe a model's head; return whether that is possible."""
    backbone = backbone_of(model)
    if backbone is not None:
        kind: Any = type(backbone)
        backbone.__class__ = _with_door(kind)
    return backbone is not None


@cache
def _with_door(kind: Any) -> type[Any]:
    class Backbone(kind):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            found = super().__call__(*args, **kwargs)
            if (kept := _kept.get()) is not None:
                kept.append(found)
            return found

    return Backbone
