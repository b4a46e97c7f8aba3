"""What a model's own cache list holds, told apart leaf by leaf: what our caches can stand in for, and what stays, and why."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tokamac.engine.kv.compressed import CompressedCache
from tokamac.engine.kv.probe import Seen, leaves, probe
from tokamac.engine.kv.windows import ignored_windows

Kind = Literal["full", "window", "state", "latent", "compressed", "own"]
"""full: grows with the context. window: slides. state: of a fixed size. latent: MLA. compressed: a window, and an entry for so many
tokens before it (compressed.py). own: another cache of the model's."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One cache of the model's own list, and what became known of it.

    path: (layer,) or (layer, part). ours: whether our cache can stand in. slides: whether mlx-lm's own cache slides. window: the
    model's own, also where mlx-lm ignores it. bytes_per_token and fixed_bytes: as the model made it. note: why it stays, or
    what is special.
    """

    path: tuple[int, ...]
    kind: Kind
    ours: bool
    slides: bool
    window: int | None
    bytes_per_token: int
    fixed_bytes: int
    note: str
    seen: Seen | None

    @property
    def grows(self) -> bool:
        """Whether it holds ever more tokens."""
        return self.bytes_per_token > 0 and self.window is None


def look(model: Any, config: Mapping[str, Any]) -> tuple[list[Leaf], tuple[str, ...]]:
    """Return the leaves of the model's own cache list, and notes on the model as a whole.

    Runs the model's forward pass once, lazily, through stand-ins; see ``probe``.
    """
    from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

    caches = make_prompt_cache(model)
    windows = ignored_windows(config, len(caches))
    latent = "kv_lora_rank" in config.get("text_config", config)
    trouble = ""
    try:
        seen = probe(model, caches, lambda cache: type(cache) in (KVCache, RotatingKVCache))
    except Exception as error:  # any model's own code may run here; its caches then stay, and the plan says so
        trouble = f"a first pass over the model failed ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
        seen = {}
    reaches = _reaches(caches, seen)
    found = [
        _leaf(path, cache, seen.get(path), windows[path[0]], reaches, trouble, latent=latent)
        for path, cache in leaves(caches)
    ]
    growing = [leaf for leaf in found if leaf.ours and not leaf.slides]
    masked = {leaf.seen.reach for leaf in growing if leaf.seen is not None}  # the class slides by its mask alone
    named = sorted({leaf.window for leaf in growing if leaf.window is not None and leaf.window not in masked})
    notes = tuple(
        f"{sum(leaf.window == window and not leaf.slides for leaf in found)} layers slide over {window} tokens, as the model's"
        " config says; mlx-lm's own class ignores that"
        for window in named
    )
    return found, notes


def _reaches(caches: list[Any], seen: Mapping[tuple[int, ...], Seen | None]) -> dict[int, int]:
    """Return for the size of a sliding cache how far the model's mask lets a token see: plamo3's sees one token more.

    One mask serves all layers that slide alike, so one cache of a size answers for all. mlx-lm's cache then forgets that token in
    decoding; ours keeps it.
    """
    from mlx_lm.models.cache import RotatingKVCache

    asked: dict[int, int] = {}
    for path, cache in leaves(caches):
        each = seen.get(path)
        if each is not None and each.reach is not None and isinstance(cache, RotatingKVCache):
            asked[cache.max_size] = max(each.reach, cache.max_size)
    return asked


def _leaf(  # noqa: PLR0917
    path: tuple[int, ...],
    cache: Any,
    seen: Seen | None,
    ignored: int | None,
    reaches: Mapping[int, int],
    trouble: str,
    *,
    latent: bool,
) -> Leaf:
    from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache

    per_token = 0 if seen is None else seen.heads * (seen.key_dim + seen.value_dim) * seen.scale_bytes
    if isinstance(cache, ArraysCache):
        note = "its recurrent state stays as the model made it"
        return Leaf(path, "state", False, False, None, 0, int(cache.nbytes), note, None)
    if isinstance(cache, CompressedCache):
        return _compressed(path, cache, trouble)
    if isinstance(cache, ChunkedKVCache):
        keys: Any = cache.keys
        per_token = 0 if keys is None else int(cache.nbytes) // int(keys.shape[2])
        note = f"it attends in chunks of {cache.chunk_size} tokens and stays as the model made it"
        return Leaf(path, "own", False, False, cache.chunk_size, per_token, 0, note, None)
    if type(cache) not in (KVCache, RotatingKVCache):
        note = f"its {type(cache).__name__} stays as the model made it"
        return Leaf(path, "own", False, False, None, 0, int(cache.nbytes), note, None)
    slides = isinstance(cache, RotatingKVCache)
    window = reaches.get(cache.max_size, cache.max_size) if slides else ignored
    if seen is not None and seen.through:
        kind: Kind = "full" if window is None else "window"
        return Leaf(path, kind, True, slides, window, per_token, 0, "", seen)
    kind, note = _stays(seen, trouble, latent=latent)
    return Leaf(path, kind, False, slides, cache.max_size if slides else None, per_token, 0, note, seen)


def _compressed(path: tuple[int, ...], cache: CompressedCache, trouble: str) -> Leaf:
    note = trouble or "it holds keys and values as one, compressed by the model itself, and stays as the model made it"
    if not cache.ratio:
        return Leaf(path, "window", False, True, cache.window, 0, cache.fixed_bytes, note, None)
    return Leaf(path, "compressed", False, False, None, cache.bytes_per_token, cache.fixed_bytes, note, None)


def _stays(seen: Seen | None, trouble: str, *, latent: bool) -> tuple[Kind, str]:
    if trouble:
        return "own", f"{trouble}, so its cache stays as the model made it"
    if seen is None:
        return "own", "it is not filled once per pass, so it stays as the model made it"
    if latent:
        return "latent", "latent attention (MLA) compresses keys and values itself; they stay as the model made them"
    return (
        "own",
        "its attention does not take keys and values as the cache hands them out, so they stay as the model made them",
    )
