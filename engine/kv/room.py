"""Whether caches were made larger, or will be by the next token, which copies all that they hold."""

from typing import Any

from tokamac.engine.kv.cache import Cache
from tokamac.engine.kv.probe import leaves


class Room:
    """Watches a list of caches. One stands for all of its layout: they hold the same tokens, and grow by the same rule.

    mlx-lm's own caches are not watched: when they grow is not known.
    """

    def __init__(self, caches: list[Any]) -> None:
        self._watched = list({cache.layout: cache for _, cache in leaves(caches) if isinstance(cache, Cache)}.values())
        self._slots = self._count()

    def grew(self) -> bool:
        """Whether there are more slots than when this was asked last. Takes less than a microsecond."""
        before, self._slots = self._slots, self._count()
        return self._slots > before

    def will_grow(self) -> bool:
        """Whether the next token makes one of them larger. Takes less than a microsecond."""
        return any(cache.offset >= cache.slots and _grows(cache) for cache in self._watched)

    def _count(self) -> int:
        return sum([cache.slots for cache in self._watched])


def _grows(cache: Cache) -> bool:
    limit = cache.layout.limit
    return limit is None or cache.slots < limit
