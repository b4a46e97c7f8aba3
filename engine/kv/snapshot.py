"""What outlives a conversation: token slices of caches that grow, and whole states of all other caches.

A cache that grows keeps every token in order, so any run of its tokens can be cut out and put back after the same prefix. Of a
ring that has wrapped, a recurrent state or an unknown kind of cache, only the whole state at one position can be kept. Arrays are
shared as long as nobody writes to them; slices own their memory, so dropping one frees it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx

from .cache import Cache
from .layout import Growing
from .probe import leaves

Arrays = tuple[mx.array, ...]
KVSlice = tuple[Arrays, ...]
"""The arrays of a run of tokens, for each cache that grows, in order: (B, H, tokens, …) each. () for an empty cache."""

NAMES = ("keys", "values", "pinned", "offset", "high")
"""The items of ``Cache.state``, in order."""


@dataclass(frozen=True, slots=True)
class State:
    """The whole content of a cache: its arrays by name (``name.0``, ``name.1`` … for a list), and its numbers."""

    arrays: dict[str, mx.array]
    numbers: dict[str, int | None]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())


States = tuple[State, ...]
"""The state of each cache that does not grow, in order."""


def grows(cache: Any) -> bool:
    """Whether any run of its tokens can be cut out and put back."""
    from mlx_lm.models.cache import KVCache

    if isinstance(cache, Cache):
        return isinstance(cache.layout, Growing)
    return type(cache) is KVCache


def all_grow(caches: list[Any]) -> bool:
    """Whether slices alone hold everything of these caches."""
    return not _fixed(caches)


def cut(caches: list[Any], start: int, stop: int) -> KVSlice:
    """Return copies of the tokens start…stop of all caches that grow, evaluated."""
    cut_out = tuple(_copy(_arrays(cache), start, stop) for cache in _growing(caches))
    mx.eval(cut_out)
    return cut_out


def cut_off(caches: list[Any], bounds: Sequence[int]) -> list[KVSlice]:
    """Move the tokens from bounds[0] on out of all caches that grow: return the slices between the bounds, in order.

    Works cache by cache, so that never more than one cache's tokens are held twice, and frees the memory that is left over.
    """
    mx.clear_cache()  # MLX may put a small array into a pooled buffer of twice its size, where it would stay
    columns: list[list[Arrays]] = []
    for cache in _growing(caches):
        column = [_copy(_arrays(cache), start, stop) for start, stop in pairwise(bounds)]
        mx.eval(column)
        _shorten(cache, bounds[0])
        columns.append(column)
    return [tuple(column[number] for column in columns) for number in range(len(bounds) - 1)]


def extend(caches: list[Any], piece: KVSlice, start: int = 0, stop: int | None = None, *, reserve: int = 0) -> None:
    """Append the tokens start…stop of a slice to all caches that grow. reserve: tokens that they will soon hold.

    Raises ValueError where the slice has another number of caches.
    """
    for cache, whole in zip(_growing(caches), piece, strict=True):
        arrays = whole if (start, stop) == (0, None) else tuple(array[..., start:stop, :] for array in whole)
        if isinstance(cache, Cache):
            cache.append(arrays, reserve)
        elif arrays:
            cache.update_and_fetch(*arrays)
        mx.eval(cache.state)  # one cache at a time, so that the slices of the others may be freed


def share(held: list[Any], empty: list[Any], tokens: int) -> int:
    """Have empty caches begin with up to ``tokens`` that others hold, of all that grow; nothing is copied for the second to ask.

    Return how many it is; 0 where the caches of some layer can't share. Evaluates.
    """
    pairs = list(zip(_growing(held), _growing(empty), strict=True))
    if not pairs or not all(isinstance(cache, Cache) and cache.can_share for pair in pairs for cache in pair):
        return 0
    mx.clear_cache()  # see cut_off
    found = 0
    for cache, other in pairs:
        prefix = cache.share_prefix(tokens)
        found = sum(each.tokens for each in prefix)
        if found:
            other.begin_with(prefix)
    return found


def own_prefixes(caches: list[Any]) -> None:
    """Give all caches that share a prefix their own copy of it, one at a time."""
    for cache in _growing(caches):
        if isinstance(cache, Cache) and cache.prefix:
            cache.own_prefix()
            mx.eval(cache.state)


def split(piece: KVSlice, at: int) -> tuple[KVSlice, KVSlice]:
    """Return the first ``at`` tokens of a slice and the rest, each with its own memory."""
    mx.clear_cache()  # see cut_off
    parts = part(piece, None, at), part(piece, at, None)
    mx.eval(parts)
    return parts


def part(piece: KVSlice, start: int | None, stop: int | None) -> KVSlice:
    """Return the tokens start…stop of a slice with their own memory, not evaluated."""
    return tuple(_copy(arrays, start, stop) for arrays in piece)


def join(pieces: Sequence[KVSlice]) -> KVSlice:
    """Return consecutive slices as one, evaluated."""
    whole = pieces[0]
    if len(pieces) > 1:
        whole = tuple(
            tuple(mx.concatenate(list(arrays), axis=-2) for arrays in zip(*each, strict=True))
            for each in zip(*pieces, strict=True)
        )
    mx.eval(whole)
    return whole


def slice_bytes(piece: KVSlice) -> int:
    """Return the bytes of a slice."""
    return sum(array.nbytes for arrays in piece for array in arrays)


def freeze(caches: list[Any]) -> States:
    """Return the states of all caches that do not grow. Nothing is copied until somebody writes."""
    states = tuple(_freeze(cache) for cache in _fixed(caches))
    mx.eval([list(state.arrays.values()) for state in states])
    return states


def thaw(caches: list[Any], states: States) -> None:
    """Put states back into caches of the same kinds. Raises ValueError for other states."""
    for cache, state in zip(_fixed(caches), states, strict=True):
        _thaw(cache, state)


def rewind(caches: list[Any], n: int) -> None:
    """Trim the last n tokens from all caches that do not grow; the caller has checked ``rewindable``."""
    for cache in _fixed(caches):
        cache.trim(n)


def _growing(caches: list[Any]) -> list[Any]:
    return [cache for _, cache in leaves(caches) if grows(cache)]


def _fixed(caches: list[Any]) -> list[Any]:
    return [cache for _, cache in leaves(caches) if not grows(cache)]


def _shorten(cache: Any, length: int) -> None:
    """Forget all but the first ``length`` tokens, and free the memory of unused slots where those are the most."""
    cache.trim(cache.offset - length)
    if isinstance(cache, Cache):
        cache.shrink()
    elif cache.keys is not None and length <= cache.keys.shape[2] // 2:
        cache.keys, cache.values = (mx.contiguous(array[..., :length, :]) for array in (cache.keys, cache.values))
        mx.eval(cache.keys, cache.values)


def _copy(arrays: Arrays, start: int | None, stop: int | None) -> Arrays:
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
            arrays[name] = mx.contiguous(value)  # a copy only of what is a small part of a larger array
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
    for name, now in _content(cache).items():
        if name in state.arrays:
            content[name] = mx.array(state.arrays[name])
        elif name not in state.numbers:
            raise ValueError(f"a state has no {name}")
        elif isinstance(now, list | tuple):
            items = (state.arrays.get(f"{name}.{number}") for number in range(state.numbers[name] or 0))
            content[name] = [None if item is None else mx.array(item) for item in items]
        else:
            content[name] = state.numbers[name]
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
