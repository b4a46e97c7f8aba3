"""Pieces of caches that outlive a conversation: runs of tokens cut out of caches that grow, and whole states of all others.

A cache that grows keeps every token in order, so any run of its tokens can be cut out and put back after the same prefix. A ring
that has wrapped, a recurrent state, anything that we don't know: of these only the state as a whole can be kept, at one position.
Arrays are shared wherever nobody writes; what is cut out has memory of its own, so that letting go of it returns it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx

from tokamac.engine.kv.cache import Cache
from tokamac.engine.kv.layout import Growing
from tokamac.engine.kv.probe import leaves

Arrays = tuple[mx.array, ...]
Piece = tuple[Arrays, ...]
"""For each cache that grows, in order, the arrays of a run of tokens: (B, H, tokens, …) each. () for one that holds nothing."""

NAMES = ("keys", "values", "pinned", "offset", "high")
"""What ``Cache.state`` holds, in its order."""


@dataclass(frozen=True, slots=True)
class State:
    """A cache's content as a whole: its arrays by name (a name repeats with ``.0``, ``.1`` … for a list), and its numbers."""

    arrays: dict[str, mx.array]
    numbers: dict[str, int | None]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())


States = tuple[State, ...]
"""For each cache that can't be cut, in order, its state."""


def grows(cache: Any) -> bool:
    """Whether any run of its tokens can be cut out and put back."""
    from mlx_lm.models.cache import KVCache

    if isinstance(cache, Cache):
        return isinstance(cache.layout, Growing)
    return type(cache) is KVCache


def all_grow(caches: list[Any]) -> bool:
    """Whether no cache of the list has state that can't be cut."""
    return all(grows(cache) for _, cache in leaves(caches))


def cut(caches: list[Any], start: int, stop: int) -> Piece:
    """Return copies of the tokens start…stop of all caches that grow, evaluated."""
    piece = tuple(_copied(_arrays(cache), start, stop) for _, cache in leaves(caches) if grows(cache))
    mx.eval(piece)
    return piece


def cut_off(caches: list[Any], bounds: Sequence[int]) -> list[Piece]:
    """Take the tokens from bounds[0] on out of all caches that grow: return the pieces between the bounds, in order.

    Cache by cache, so that no more than one cache's tokens are ever held twice. Memory that is no longer used is returned.
    """
    mx.clear_cache()  # MLX may put a small array into a buffer of the pool that is twice its size, and there it would stay
    columns: list[list[Arrays]] = []
    for _, cache in leaves(caches):
        if not grows(cache):
            continue
        column = [_copied(_arrays(cache), start, stop) for start, stop in pairwise(bounds)]
        mx.eval(column)
        shorten(cache, bounds[0])
        columns.append(column)
    return [tuple(column[number] for column in columns) for number in range(len(bounds) - 1)]


def shorten(cache: Any, length: int) -> None:
    """Forget all but the first ``length`` tokens of a cache that grows; where most slots are unused then, return their memory."""
    cache.trim(cache.offset - length)
    if isinstance(cache, Cache):
        cache.shrink()
    elif cache.keys is not None and length <= cache.keys.shape[2] // 2:
        cache.keys, cache.values = (mx.contiguous(array[..., :length, :]) for array in (cache.keys, cache.values))
        mx.eval(cache.keys, cache.values)


def extend(caches: list[Any], piece: Piece, start: int = 0, stop: int | None = None, *, room: int = 0) -> None:
    """Append the tokens start…stop of a piece to all caches that grow, which will soon hold ``room`` tokens.

    Raises ValueError where the piece is not theirs.
    """
    growing = [cache for _, cache in leaves(caches) if grows(cache)]
    for cache, whole in zip(growing, piece, strict=True):
        arrays = whole if (start, stop) == (0, None) else tuple(array[..., start:stop, :] for array in whole)
        if isinstance(cache, Cache):
            cache.append(arrays, room)
        elif arrays:
            cache.update_and_fetch(*arrays)
        mx.eval(cache.state)  # one cache at a time: the pieces of the others may be let go of


def split(piece: Piece, at: int) -> tuple[Piece, Piece]:
    """Return the first ``at`` tokens of a piece and the rest, each with memory of its own."""

    mx.clear_cache()  # see cut_off
    parts = (
        tuple(_copied(arrays, None, at) for arrays in piece),
        tuple(_copied(arrays, at, None) for arrays in piece),
    )
    mx.eval(parts)
    return parts


def part(piece: Piece, start: int, stop: int) -> Piece:
    """Return the tokens start…stop of a piece with memory of their own, not evaluated."""
    return tuple(_copied(arrays, start, stop) for arrays in piece)


def joined(pieces: Sequence[Piece]) -> Piece:
    """Return pieces that follow one another as one, evaluated."""
    if len(pieces) == 1:
        (whole,) = pieces
    else:
        whole = tuple(
            tuple(mx.concatenate(list(arrays), axis=-2) for arrays in zip(*each, strict=True))
            for each in zip(*pieces, strict=True)
        )
    mx.eval(whole)
    return whole


def piece_bytes(piece: Piece) -> int:
    """Return the bytes of a piece."""
    return sum(array.nbytes for arrays in piece for array in arrays)


def freeze(caches: list[Any]) -> States:
    """Return the states of all caches that can't be cut. Nothing is copied; whoever writes next makes its own copy then."""
    states = tuple(_freeze(cache) for _, cache in leaves(caches) if not grows(cache))
    mx.eval([list(state.arrays.values()) for state in states])
    return states


def thaw(caches: list[Any], states: States) -> None:
    """Put states back into caches of the same kinds."""
    for cache, state in zip([c for _, c in leaves(caches) if not grows(c)], states, strict=True):
        _thaw(cache, state)


def rewind(caches: list[Any], n: int) -> None:
    """Take the last n tokens back from all caches that can't be cut; the caller has asked ``rewindable``."""
    for _, cache in leaves(caches):
        if not grows(cache):
            cache.trim(n)


def states_bytes(states: States) -> int:
    """Return the bytes of states."""
    return sum(state.nbytes for state in states)


def _copied(arrays: Arrays, start: int | None, stop: int | None) -> Arrays:
    """Return the tokens start…stop with memory of their own, not evaluated."""
    return tuple(mx.contiguous(array[..., start:stop, :]) for array in arrays)


def _arrays(cache: Any) -> Arrays:
    if isinstance(cache, Cache):
        return cache.arrays
    return () if cache.keys is None else (cache.keys, cache.values)


def _freeze(cache: Any) -> State:
    arrays: dict[str, mx.array] = {}
    numbers: dict[str, int | None] = {}
    for name, value in _content(cache).items():
        if isinstance(value, mx.array):
            arrays[name] = mx.contiguous(value)  # nothing is copied, unless it is a small part of a larger array
        elif isinstance(value, list | tuple):
            numbers[name] = len(value)
            for number, item in enumerate(value):
                if item is not None:
                    arrays[f"{name}.{number}"] = mx.contiguous(item)
        elif value is None or isinstance(value, int):
            numbers[name] = value
        else:
            raise TypeError(f"{type(cache).__name__}.{name} is a {type(value).__name__}, which no state can hold")
    return State(arrays, numbers)


def _thaw(cache: Any, state: State) -> None:
    content: dict[str, Any] = {}
    for name in _content(cache):
        count = state.numbers.get(name)
        if name in state.arrays:
            content[name] = mx.array(state.arrays[name])
        elif name not in state.numbers:
            raise ValueError(f"a state has no {name}")
        elif isinstance(_content(cache)[name], list | tuple):
            items = (state.arrays.get(f"{name}.{number}") for number in range(count or 0))
            content[name] = [None if item is None else mx.array(item) for item in items]
        else:
            content[name] = count
    if isinstance(cache, Cache):
        cache.state = tuple(content[name] for name in NAMES)
    else:
        vars(cache).update(content)


def _content(cache: Any) -> dict[str, Any]:
    """Return what a cache holds, by name: for mlx-lm's classes, all their attributes."""
    if isinstance(cache, Cache):
        return dict(zip(NAMES, cache.state, strict=True))
    content: dict[str, Any] = vars(cache)
    return content
