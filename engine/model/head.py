"""Both ends of an output head, as a pass goes through it: whether the logits of every row are asked for, and what it is given.

Of a prompt's pieces logits are not asked for: there, no head is computed. What a head is given, the hidden state after the last
norm, is what heads for further tokens read: it is kept of passes that run anyway.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

_asked: ContextVar[bool] = ContextVar("asked", default=False)
_kept: ContextVar[list[Any] | None] = ContextVar("kept", default=None)


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


@contextmanager
def keeping_hidden_states() -> Iterator[list[Any]]:
    """Inside a with block, hidden states (B, N, D) are added to the list, of each pass of a model with a door for them."""
    kept: list[Any] = []
    before = _kept.set(kept)
    try:
        yield kept
    finally:
        _kept.reset(before)


def keep_hidden_states(states: Callable[[], Any]) -> None:
    """Keep what a head was given, (B, N, D), in a pass that was not computed by the model's class."""
    if (kept := _kept.get()) is not None:
        kept.append(states())


def backbone_of(model: Any) -> Any:
    """Return the part of mlx-lm's module that makes hidden states of ids, the last norm included; None where none is known."""
    found = [
        each for _, each in model.named_modules() if all(name in each for name in ("embed_tokens", "layers", "norm"))
    ]
    return found[0] if len(found) == 1 else None


def open_door(model: Any) -> bool:
    """Let ``keeping_hidden_states`` see what goes into a model's head; return whether that can be done."""
    backbone = backbone_of(model)
    if backbone is not None:
        kind: Any = type(backbone)
        backbone.__class__ = _with_door(kind)
    return backbone is not None


@cache
def _with_door(kind: Any) -> type[Any]:
    class Backbone(kind):
        """The same, whose result can be kept."""

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            found = super().__call__(*args, **kwargs)
            if (kept := _kept.get()) is not None:
                kept.append(found)
            return found

    return Backbone
