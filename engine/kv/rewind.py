"""Taking back the tokens of a pass, over any kind of cache: those that were guessed, and wrongly, or a chunk of a prompt.

guesses                     at the end of a pass that is computed
  grows, or packed          it only counts fewer tokens; the next write covers the others
  rings, windows, latent    the same, as far as their spare slots reach after they wrapped
  recurrent                 holds no tokens: its state of before the pass is put back, and the pass is taken back whole;
                            the next one reads what was right in it again, together with what is new
a chunk                     of which some layers are computed, and others never will be
  grows                     counts fewer tokens where it is computed; else it holds again what it held
  all others                hold again what they held
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .cache import Cache
from .compressed import SPARE, CompressedCache
from .layout import Ring
from .probe import leaves
from .snapshot import freeze, grows, thaw

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


class BeforeChunk:
    """What caches held before a chunk that is computed a few layers at a time. Make it before the pass: nothing is copied.

    Args:
        caches: one a layer.
        stages: in how many parts they are computed, at most.

    Attributes:
        parts: the caches in the order in which they are computed.
    """

    def __init__(self, caches: Sequence[Any], stages: int) -> None:
        self._caches = list(caches)
        found = [cache for _, cache in leaves(self._caches)]
        size = -(-len(found) // stages)
        self.parts = [found[at : at + size] for at in range(0, len(found), size)]
        self._fixed = freeze(self._caches)
        self._growing = [cache for cache in found if grows(cache)]
        self._held = {id(cache): _held(cache) for cache in self._growing}

    def computes(self, part: Sequence[Any]) -> None:
        """The next part is about to be computed."""
        for cache in part:
            self._held.pop(id(cache), None)  # or its keys would be copied, not written in place

    def take_back(self, tokens: int) -> None:
        """Take back the chunk, of so many tokens, between two parts."""
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
    """Return what a cache that grows holds: a pass writes into its arrays, but not into others of the same content."""
    if isinstance(cache, Cache):
        return cache.copy()
    return {name: mx.array(value) if isinstance(value, mx.array) else value for name, value in vars(cache).items()}
