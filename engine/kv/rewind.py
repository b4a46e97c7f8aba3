"""Taking back the tokens of a pass that were guessed, and wrongly: over any kind of cache.

grows, or packed            it only counts fewer tokens; the next write covers the others
rings, windows, latent      the same, as far as their spare slots reach after they wrapped
recurrent                   holds no tokens: its state of before the pass is put back, and the pass is taken back whole;
                            the next one reads what was right in it again, together with what is new
"""

from collections.abc import Sequence
from typing import Any

from .cache import Cache
from .compressed import SPARE, CompressedCache
from .layout import Ring
from .probe import leaves

UNBOUNDED = 1 << 20
"""Tokens that a cache takes back that keeps all."""


def most_taken_back(caches: Sequence[Any]) -> int:
    """Return how many tokens of the next pass can be taken back whatever it is; 0 where one of the caches can't."""
    return min((_most(cache) for _, cache in leaves(list(caches))), default=0)


def _most(cache: Any) -> int:
    from mlx_lm.models.cache import ArraysCache, ConcatenateKVCache, KVCache, QuantizedKVCache

    if isinstance(cache, Cache):
        return cache.layout.spare if isinstance(cache.layout, Ring) else UNBOUNDED
    if isinstance(cache, CompressedCache):
        return SPARE
    return UNBOUNDED if isinstance(cache, KVCache | QuantizedKVCache | ConcatenateKVCache | ArraysCache) else 0


class BeforePass:
    """What caches held before a pass that may be taken back. Make it right before the pass: it copies nothing.

    caches: one a layer, of which ``most_taken_back`` says that they can.
    """

    def __init__(self, caches: Sequence[Any]) -> None:
        from mlx_lm.models.cache import ArraysCache

        found = [cache for _, cache in leaves(list(caches))]
        self._states = [(cache, _content(cache)) for cache in found if isinstance(cache, ArraysCache)]
        self._others = [cache for cache in found if not isinstance(cache, ArraysCache)]

    def take_back(self, wrong: int, read: int) -> int:
        """Take back the last ``wrong`` tokens of a pass that read so many; return how many of the others they still hold."""
        taken = read if wrong and self._states else wrong
        if not taken:
            return read
        for cache in self._others:
            if cache.trim(taken) != taken:
                raise RuntimeError(f"a {type(cache).__name__} can't take back {taken} tokens")
        for cache, content in self._states:
            vars(cache).update(content)
        return read - taken


def _content(cache: Any) -> dict[str, Any]:
    """Return all that a recurrent cache holds: its arrays are replaced by a pass, never written to."""
    return {name: list(value) if isinstance(value, list) else value for name, value in vars(cache).items()}
