"""Whether caches were made larger, or will be by the next token, which copies all that they hold."""

from typing import Any

from tokamac.engine.kv.cache import Cache
from tokamac.engine.kv.layout import STEP
from tokamac.engine.kv.probe import leaves


class Room:
    """Watches a list of caches. One stands for all of its layout: they hold the same tokens, and grow by the same rule.

    mlx-lm's own caches are not watched: they are taken to grow every STEP tokens, as its KVCache does.
    """

    def __init__(self, caches: list[Any]) -> None:
        found = [cache for _, cache in leaves(caches)]
        self._watched = list({cache.layout: cache for cache in found if isinstance(cache, Cache)}.values())
        self._others = any(not isinstance(cache, Cache) for cache in found)
        self._slots = self._count()

    def grew(self) -> bool:
        """Whether there are more slots than when this was asked last. Takes less than a microsecond."""
        before, self._slots = self._slots, self._count()
        return self._slots > before

    def will_grow(self, held: int) -> bool:
        """Whether the token after ``held`` makes one of them larger. Takes about a microsecond."""
        return (self._others and held % STEP == 0) or any(
            cache.offset >= cache.slots and _grows(cache) for cache in self._watched
        )

    def _count(self) -> int:
        return sum([cache.slots for cache in self._watched])


def _grows(cache: Cache) -> bool:
    limit = cache.layout.limit
    return limit is None or cache.slots < limit
