"""What the engine does with a whole list of caches, ours and mlx-lm's own: take back, measure, ask where it stands."""

from typing import Any

from tokamac.engine.kv.cache import Cache
from tokamac.engine.kv.compressed import CompressedCache
from tokamac.engine.kv.probe import leaves


def rewindable(caches: list[Any]) -> int:
    """Return how many of the last tokens every cache can take back exactly, now."""
    return min((_rewindable(cache) for _, cache in leaves(caches)), default=0)


def trim(caches: list[Any], n: int) -> int:
    """Take back the last n tokens from every cache, or from none: return n, or 0 where one of them can't (see ``rewindable``)."""
    if n <= 0 or n > rewindable(caches):
        return 0
    for _, cache in leaves(caches):
        if not _stateless(cache):
            cache.trim(n)
    return n


def nbytes(caches: list[Any]) -> int:
    """Return the bytes of all arrays held, room to grow included."""
    return sum(int(cache.nbytes) for _, cache in leaves(caches))


def offset(caches: list[Any]) -> int | None:
    """Return the tokens held, or None where no cache counts them (a model with recurrent state alone)."""
    from mlx_lm.models.cache import ChunkedKVCache, ConcatenateKVCache, KVCache, QuantizedKVCache, RotatingKVCache

    counting = (Cache, CompressedCache, KVCache, RotatingKVCache, QuantizedKVCache, ChunkedKVCache, ConcatenateKVCache)
    return next((int(cache.offset) for _, cache in leaves(caches) if isinstance(cache, counting)), None)


def bypassed(caches: list[Any]) -> list[tuple[int, ...]]:
    """Return the paths of our caches that were written to while no attention came through the seam: there should be none."""
    return [
        path
        for path, cache in leaves(caches)
        if isinstance(cache, Cache) and not cache.empty() and not cache.seam_calls
    ]


def _stateless(cache: Any) -> bool:
    from mlx_lm.models.cache import ArraysCache

    return isinstance(cache, ArraysCache)  # is only ever reached while empty: nothing to take back


def _rewindable(cache: Any) -> int:
    from mlx_lm.models.cache import ChunkedKVCache, ConcatenateKVCache, KVCache, QuantizedKVCache, RotatingKVCache

    if isinstance(cache, Cache | CompressedCache):
        return cache.rewindable
    if isinstance(cache, KVCache | QuantizedKVCache | ConcatenateKVCache):
        return int(cache.offset)
    if isinstance(cache, RotatingKVCache):
        return int(cache.offset) if cache.offset < cache.max_size else 0
    if isinstance(cache, ChunkedKVCache):
        return int(cache.offset - cache.start_position)
    return 0  # recurrent state, and kinds we don't know, can't be taken back
