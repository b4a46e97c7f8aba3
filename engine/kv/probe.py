"""Look at what a model does with its caches: its forward pass is built once, lazily, over caches that only watch.

That tells, for any architecture and without a table of names, what a plan must know of each layer: the shape of its keys and
values; whether its attention takes what the cache returns (latent attention doesn't, nor does attention written out by hand);
whether other layers ask for the same keys and values again. No array is computed, unless the model's own code computes some.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .attention import AttendingCache, Scoring, fused, install_seam, recording
from .layout import Mask

Path = tuple[int, ...]
"""Of a cache: (layer,), or (layer, part) inside mlx-lm's ``CacheList``."""

TOKENS = 2
"""Tokens in the pass: more than one, so that it is built as a prefill is."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one layer's cache saw.

    heads, key_dim, value_dim: key-value heads and the dimensions of a head. scale_bytes: bytes of a number in the model's own
    type. through: every attention over its keys went through the seam with this cache, and took them as they were returned.
    direct: so did those of other layers. shared: ``keys_and_values`` asked for them again. reach: the window that the model asked
    its mask for, if it asked this cache and named one.
    """

    heads: int
    key_dim: int
    value_dim: int
    scale_bytes: int
    through: bool
    direct: bool
    shared: bool
    reach: int | None


def _reaching_inside(name: str) -> Any:
    """Return a property for an array of the watched cache: a model that uses it is one that our caches can't serve."""

    def get(self: "WatchingCache") -> Any:
        self._calls["altered"] += 1
        return getattr(self._own, name)

    def put(self: "WatchingCache", value: Any) -> None:
        self._calls["altered"] += 1
        setattr(self._own, name, value)

    return property(get, put)


class WatchingCache(AttendingCache):
    """Stands in for one of mlx-lm's caches in a first pass, and notes how it is used."""

    keys, values = _reaching_inside("keys"), _reaching_inside("values")

    def __init__(self, own: Any) -> None:
        self._own = own
        self._fetched: list[tuple[mx.array, mx.array]] = []
        self._calls = {"mine": 0, "altered": 0, "foreign": 0, "again": 0}
        self._reach: int | None = None

    @property
    def offset(self) -> int:
        """Tokens held."""
        return int(self._own.offset)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:  # noqa: N803
        """Return the watched cache's mask."""
        self._reach = window_size
        mask: Mask = self._own.make_mask(N, return_array=return_array, window_size=window_size)
        return mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return what the watched cache returns, and remember it."""
        fetched: tuple[mx.array, mx.array] = self._own.update_and_fetch(keys, values)
        self._fetched.append(fetched)
        return fetched

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the same again."""
        self._calls["again"] += 1
        return self._fetched[-1]

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: Mask,
        sinks: mx.array | None = None,
        softcap: float | None = None,  # noqa: ARG002
    ) -> mx.array:
        """Attend as mlx-lm would: only the shape matters here."""
        return fused(queries, keys, values, Scoring(scale, mask, sinks))

    def note(self, keys: mx.array, values: mx.array, cache: Any) -> None:
        """Note an attention call anywhere in the model."""
        ours = any(keys is k and values is v for k, v in self._fetched)
        if cache is self:
            self._calls["mine" if ours else "altered"] += 1
        elif ours:
            self._calls["foreign"] += 1

    def seen(self) -> Seen | None:
        """Return what was noted, or None if the cache was not used exactly once."""
        if len(self._fetched) != 1:
            return None
        keys, values = self._fetched[0]
        return Seen(
            heads=keys.shape[1],
            key_dim=keys.shape[3],
            value_dim=values.shape[3],
            scale_bytes=keys.itemsize,
            through=self._calls["mine"] > 0 and not self._calls["altered"],
            direct=not self._calls["foreign"],
            shared=self._calls["again"] > 0,
            reach=self._reach,
        )


def probe(model: Any, caches: list[Any], watched: Callable[[Any], bool]) -> dict[Path, Seen | None]:
    """Run a lazy first pass of ``model`` over ``caches``, which are used up; return what each ``watched`` one saw, by path."""
    install_seam()
    watching: dict[Path, WatchingCache] = {}

    def stand_in(path: Path, cache: Any) -> Any:
        if not watched(cache):
            return cache
        watching[path] = WatchingCache(cache)
        return watching[path]

    def note(keys: mx.array, values: mx.array, cache: Any) -> None:
        for each in watching.values():
            each.note(keys, values, cache)

    with recording(note):
        model(mx.zeros((1, TOKENS), mx.int32), cache=map_leaves(caches, stand_in))
    return {path: each.seen() for path, each in watching.items()}


def leaves(caches: list[Any]) -> Iterator[tuple[Path, Any]]:
    """Yield each cache with its path, looking into mlx-lm's ``CacheList``."""
    from mlx_lm.models.cache import CacheList

    for index, cache in enumerate(caches):
        if isinstance(cache, CacheList):
            yield from (((index, part), each) for part, each in enumerate(cache.caches))
        else:
            yield (index,), cache


def map_leaves(caches: list[Any], change: Callable[[Path, Any], Any]) -> list[Any]:
    """Return the list with every leaf changed."""
    from mlx_lm.models.cache import CacheList

    gather: Any = CacheList
    return [
        gather(*(change((index, part), each) for part, each in enumerate(cache.caches)))
        if isinstance(cache, CacheList)
        else change((index,), cache)
        for index, cache in enumerate(caches)
    ]
