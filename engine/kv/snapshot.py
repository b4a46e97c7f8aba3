"""Slices and states of caches, taking back passes, and the seam through which a model's nodes share them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import filterfalse, pairwise
from typing import Any, Protocol

import mlx.core as mx

from .attention import flat
from .cache import Cache, forward
from .layout import SPARE, CompressedCache, Growing, Ring

# A wrapped ring, recurrent state or unknown cache can only be kept whole at one position. Arrays are shared
# until written; slices own their memory, so dropping one frees it.


Arrays = tuple[mx.array, ...]
# The arrays of a run of tokens, for each cache that grows, in order: (B, H, tokens, …) each. () for an empty cache.
KVSlice = tuple[Arrays, ...]

NAMES = ("keys", "values", "pinned", "offset", "high")  # the items of `Cache.state`, in order


@dataclass(frozen=True, slots=True)
class State:
    arrays: dict[str, mx.array]
    numbers: dict[str, int | None]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


States = tuple[State, ...]  # the state of each cache that does not grow, in order


def grows(cache: Any) -> bool:
    if isinstance(cache, Cache):
        return isinstance(cache.layout, Growing)
    from mlx_lm.models.cache import KVCache

    return type(cache) is KVCache


def all_grow(caches: list[Any]) -> bool:
    return not _fixed(caches)


def cut(caches: list[Any], start: int, stop: int) -> KVSlice:
    cut_out = tuple(_copy(_arrays(cache), start, stop) for cache in _growing(caches))
    mx.eval(cut_out)
    return cut_out


def cut_off(caches: list[Any], bounds: Sequence[int]) -> list[KVSlice]:
    """Move the tokens from bounds[0] on out of all growing caches, as slices between the bounds."""
    # Cache by cache, so that only one cache's tokens exist twice.
    mx.clear_cache()  # MLX may put a small array into a pooled buffer of twice its size, where it would stay
    columns: list[list[Arrays]] = []
    for cache in _growing(caches):
        column = [_copy(_arrays(cache), start, stop) for start, stop in pairwise(bounds)]
        mx.eval(column)
        _shorten(cache, bounds[0])
        columns.append(column)
    return [tuple(column[number] for column in columns) for number in range(len(bounds) - 1)]


def extend(caches: list[Any], piece: KVSlice, start: int = 0, stop: int | None = None, *, reserve: int = 0) -> None:
    """Append tokens start…stop of a slice to all growing caches. Raises ValueError for another cache count."""
    for cache, whole in zip(_growing(caches), piece, strict=True):
        arrays = whole if (start, stop) == (0, None) else tuple(array[..., start:stop, :] for array in whole)
        if isinstance(cache, Cache):
            cache.append(arrays, reserve)
        elif arrays:
            cache.update_and_fetch(*arrays)
        mx.eval(cache.state)  # one cache at a time, so that the slices of the others may be freed


def share(held: list[Any], empty: list[Any], tokens: int) -> int:
    """Share up to ``tokens`` of growing caches with empty ones; return how many, 0 if a layer can't. Evaluates."""
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
    for cache in _growing(caches):
        if isinstance(cache, Cache) and cache.prefix:
            cache.own_prefix()
            mx.eval(cache.state)


def split(piece: KVSlice, at: int) -> tuple[KVSlice, KVSlice]:
    mx.clear_cache()  # see cut_off
    parts = part(piece, None, at), part(piece, at, None)
    mx.eval(parts)
    return parts


def part(piece: KVSlice, start: int | None, stop: int | None) -> KVSlice:
    return tuple(_copy(arrays, start, stop) for arrays in piece)


def join(pieces: Sequence[KVSlice]) -> KVSlice:
    whole = pieces[0]
    if len(pieces) > 1:
        whole = tuple(
            tuple(mx.concatenate(list(arrays), axis=-2) for arrays in zip(*each, strict=True))
            for each in zip(*pieces, strict=True)
        )
    mx.eval(whole)
    return whole


def slice_bytes(piece: KVSlice) -> int:
    return sum([array.nbytes for arrays in piece for array in arrays])


def freeze(caches: list[Any]) -> States:
    states = tuple(_freeze(cache) for cache in _fixed(caches))
    mx.eval([list(state.arrays.values()) for state in states])
    return states


def thaw(caches: list[Any], states: States) -> None:
    """Restore states. Raises ValueError for other kinds of cache."""
    for cache, state in zip(_fixed(caches), states, strict=True):
        _thaw(cache, state)


def rewind(caches: list[Any], n: int) -> None:
    for cache in _fixed(caches):
        cache.trim(n)


def _growing(caches: list[Any]) -> list[Any]:
    return list(filter(grows, flat(caches)))


def _fixed(caches: list[Any]) -> list[Any]:
    return list(filterfalse(grows, flat(caches)))


def _shorten(cache: Any, length: int) -> None:
    cache.trim(cache.offset - length)
    if isinstance(cache, Cache):
        cache.shrink()
    elif cache.keys is not None and length <= cache.keys.shape[2] // 2:
        cache.keys, cache.values = (mx.contiguous(array[..., :length, :]) for array in (cache.keys, cache.values))
        mx.eval(cache.keys, cache.values)


def _copy(arrays: Arrays, start: int | None, stop: int | None) -> Arrays:
    return tuple([mx.contiguous(array[..., start:stop, :]) for array in arrays])


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
    if isinstance(cache, Cache):
        return dict(zip(NAMES, cache.state, strict=True))
    content: dict[str, Any] = vars(cache)
    return content


# drafts, after a pass: growing and packed caches lower their count; rings, windows and latent caches too,
# within their spare slots; recurrent state is restored whole, and the next pass rereads the accepted tokens.
# chunk, partly computed: growing caches lower their count where computed; all others are restored.


UNBOUNDED = 1 << 20  # tokens that a cache takes back that keeps all


def most_taken_back(caches: Sequence[Any]) -> int:
    return min(map(_most, flat(list(caches))), default=0)


def _most(cache: Any) -> int:
    from mlx_lm.models.cache import ArraysCache, ConcatenateKVCache, KVCache, QuantizedKVCache

    if isinstance(cache, Cache):
        return cache.layout.spare if isinstance(cache.layout, Ring) else UNBOUNDED
    if isinstance(cache, CompressedCache):
        return SPARE
    return UNBOUNDED if isinstance(cache, KVCache | QuantizedKVCache | ConcatenateKVCache | ArraysCache) else 0


class BeforePass:
    """Cache contents before a pass that may be undone. Copies nothing; make it right before the pass."""

    def __init__(self, caches: Sequence[Any]) -> None:
        from mlx_lm.models.cache import ArraysCache

        found = flat(list(caches))
        self._states = [(cache, _recurrent_content(cache)) for cache in found if isinstance(cache, ArraysCache)]
        self._others = [cache for cache in found if not isinstance(cache, ArraysCache)]

    def take_back(self, wrong: int, read: int) -> int:
        """Undo the last ``wrong`` of ``read`` tokens; return how many of the others remain."""
        taken = read if wrong and self._states else wrong
        if not taken:
            return read
        for cache in self._others:
            if cache.trim(taken) != taken:
                raise RuntimeError(f"a {type(cache).__name__} can't take back {taken} tokens")
        for cache, content in self._states:
            vars(cache).update(content)
        return read - taken


def _recurrent_content(cache: Any) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, list) else value for name, value in vars(cache).items()}


class BeforeChunk:
    def __init__(self, caches: Sequence[Any], stages: int) -> None:
        self._caches = list(caches)
        found = flat(self._caches)
        size = -(-len(found) // stages)
        self.parts = [found[at : at + size] for at in range(0, len(found), size)]
        self._fixed = freeze(self._caches)
        self._growing = [cache for cache in found if grows(cache)]
        self._held = {id(cache): _held(cache) for cache in self._growing}

    def computes(self, part: Sequence[Any]) -> None:
        for cache in part:
            self._held.pop(id(cache), None)  # or its keys would be copied, not written in place

    def take_back(self, tokens: int) -> None:
        for cache in self._growing:
            held = self._held.get(id(cache))
            if held is None:
                cache.trim(tokens)
            elif isinstance(cache, Cache):
                cache.restore(held)
            else:
                vars(cache).update(held)
        thaw(self._caches, self._fixed)
        mx.clear_cache()


def _held(cache: Any) -> Any:
    if isinstance(cache, Cache):
        return cache.copy()
    return {name: mx.array(value) if isinstance(value, mx.array) else value for name, value in vars(cache).items()}


class TakesBack(Protocol):
    """Cache contents before a pass."""

    def take_back(self, wrong: int, read: int) -> int:
        """Undo the last ``wrong`` of ``read`` tokens; return how many of the others remain."""


class CacheOperations(Protocol):
    """See ``cache.forward``, ``rewind.BeforePass`` and ``snapshot``."""

    def forward(self, model: Any, ids: mx.array, lanes: Sequence[list[Any]]) -> mx.array:
        """Run the next tokens of several sequences."""

    def before_pass(self, caches: list[Any]) -> TakesBack: ...
    def cut(self, caches: list[Any], start: int, stop: int) -> KVSlice: ...
    def cut_off(self, caches: list[Any], bounds: Sequence[int]) -> list[KVSlice]: ...
    def extend(
        self, caches: list[Any], piece: KVSlice, start: int = 0, stop: int | None = None, *, reserve: int = 0
    ) -> None: ...
    def share(self, held: list[Any], empty: list[Any], tokens: int) -> int: ...
    def own_prefixes(self, caches: list[Any]) -> None: ...
    def split(self, piece: KVSlice, at: int) -> tuple[KVSlice, KVSlice]: ...
    def part(self, piece: KVSlice, start: int | None, stop: int | None) -> KVSlice: ...
    def join(self, pieces: Sequence[KVSlice]) -> KVSlice: ...
    def freeze(self, caches: list[Any]) -> States: ...
    def thaw(self, caches: list[Any], states: States) -> None: ...
    def rewind(self, caches: list[Any], n: int) -> None: ...


class LocalOperations:
    forward = staticmethod(forward)
    before_pass = staticmethod(BeforePass)
    cut = staticmethod(cut)
    cut_off = staticmethod(cut_off)
    extend = staticmethod(extend)
    share = staticmethod(share)
    own_prefixes = staticmethod(own_prefixes)
    split = staticmethod(split)
    part = staticmethod(part)
    join = staticmethod(join)
    freeze = staticmethod(freeze)
    thaw = staticmethod(thaw)
    rewind = staticmethod(rewind)


LOCAL: CacheOperations = LocalOperations()
