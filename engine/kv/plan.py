"""Plans a model's caches layer by layer, with reasons."""

# Growing layers follow the user's spec; a model's own windows keep their size and take the bits; recurrent,
# latent and other state stays the model's. A spec that no layer can honour is an OptionError.

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import OptionError
from ..model.config import context_length, ignored_windows, unbounded
from ..options import KVSpec
from .attention import Path, install_seam, leaves, map_leaves
from .cache import Cache
from .costs import ROTATED_KEY_BITS, group_for
from .layout import Affine, Codec, CompressedCache, Growing, Plain, Ring, rotation_block
from .rotary import KeyPositions, Rotation, Seen, key_positions, probe

# full: grows with the context. window: slides. state: of a fixed size. latent: MLA. compressed: a window, and entries
# for groups of earlier tokens (kv/layout.py). own: another cache of the model's.
Kind = Literal["full", "window", "state", "latent", "compressed", "own"]

Keep = int | Literal["system"]

DEFAULT = KVSpec()  # its group size and pinned tokens give way to what fits; other values were asked for

READ_ELSEWHERE = "other layers attend to its keys, too"


@dataclass(frozen=True, slots=True)
class Leaf:
    """One cache of the model's own list.

    note: why it stays. slides: mlx-lm's cache slides. window: the model's, even if mlx-lm ignores it.
    """

    path: Path
    kind: Kind
    note: str = ""
    ours: bool = False
    slides: bool = False
    window: int | None = None
    bytes_per_token: int = 0
    fixed_bytes: int = 0
    seen: Seen | None = None


@dataclass(frozen=True, slots=True)
class Ours:
    """The components of our cache of a layer.

    own_mask: the model's mask is for another window. rotation: moves its pinned keys; None where they stay.
    """

    key_codec: Codec
    value_codec: Codec
    seen: Seen
    own_mask: bool
    rotation: Rotation | None = None


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The plan of one cache.

    path: (layer,) or (layer, part). window, keep: None if it grows. fixed_bytes: independent of context.
    """

    path: Path
    kind: Kind
    window: int | None
    keep: Keep | None
    bytes_per_token: int
    fixed_bytes: int
    note: str
    ours: Ours | None = field(default=None, repr=False)

    @property
    def index(self) -> int:
        return self.path[0]

    @property
    def key_bits(self) -> int:
        return 16 if self.ours is None else self.ours.key_codec.bits

    @property
    def value_bits(self) -> int:
        return 16 if self.ours is None else self.ours.value_codec.bits

    @property
    def group_size(self) -> int | None:
        return None if self.ours is None else self.ours.key_codec.group_size or self.ours.value_codec.group_size

    @property
    def rotated(self) -> bool:
        return self.ours is not None and self.ours.key_codec.block is not None

    @property
    def limit(self) -> int | None:
        return self.window if self.window is None or self.ours is None else self.window + spare_slots(self.window)

    @property
    def block(self) -> int:
        """Positions per move of pinned keys; 0 where none move. Counts a system prompt as one token."""
        if self.ours is None or self.ours.rotation is None or self.window is None:
            return 0
        return Ring(self.window, self.keep if isinstance(self.keep, int) else 1).block

    def bytes_at(self, context: int) -> int:
        held = context if self.limit is None else min(context, self.limit)
        return self.fixed_bytes + held * self.bytes_per_token + self.pinned_bytes(context)

    def pinned_bytes(self, context: int) -> int:
        if self.ours is None or self.ours.rotation is None or not isinstance(self.keep, int):
            return 0
        seen = self.ours.seen
        return min(context, self.keep) * seen.heads * seen.key_dim * seen.scale_bytes

    def make(self, ours: Ours, keep: int | None) -> Cache:
        layout: Growing | Ring = Growing()
        if self.window is not None:
            pinned = self.keep if keep is None or self.keep == 0 else keep
            assert isinstance(pinned, int)
            layout = Ring(self.window, pinned, spare_slots(self.window))
        return Cache(
            layout,
            ours.key_codec,
            ours.value_codec,
            direct=ours.seen.direct,
            shared=ours.seen.shared,
            own_mask=ours.own_mask,
            rotation=ours.rotation,
        )


@dataclass(frozen=True, slots=True)
class CachePlan:
    """A model's caches under a spec. ``notes`` are sentences for the user."""

    spec: KVSpec
    layers: tuple[LayerPlan, ...]
    notes: tuple[str, ...]
    _model: Any = field(repr=False, compare=False)

    @property
    def bytes_per_token(self) -> int:
        return sum(layer.bytes_per_token for layer in self.layers)

    def bytes_at(self, context: int) -> int:
        return sum(layer.bytes_at(context) for layer in self.layers)

    def make(self, keep: int | None = None) -> list[Any]:
        """Make one conversation's caches and install the seam.

        keep: tokens to pin, required where the spec's is "system". Raises OptionError where they leave no room.
        """
        from mlx_lm.models.cache import make_prompt_cache

        if keep is None and self.spec.window is not None and self.spec.keep == "system":
            raise OptionError("the length of the system prompt is not known here", "Pass it as `keep`.")
        install_seam()
        planned = {layer.path: layer for layer in self.layers}

        def choose(path: Path, own: Any) -> Any:
            layer = planned[path]
            return own if layer.ours is None else layer.make(layer.ours, keep)

        return map_leaves(make_prompt_cache(self._model), choose)


def plan_caches(
    model: Any,
    config: Mapping[str, Any],
    spec: KVSpec,
    *,
    rotate_keys: bool | None = None,
    rotate_values: bool = False,
) -> CachePlan:
    """Plan a model's caches and install the seam. Runs one lazy forward pass, three if tokens are pinned.

    Args:
        config: The normalised config.
        rotate_keys: Hadamard-rotate packed keys; None: at 4 bits or fewer.
        rotate_values: The same for packed values.

    Raises:
        OptionError: A setting can't be honoured.
    """
    found, notes = _look(model, config)
    _refuse(found, spec, unbounded(config))
    rotate = (spec.key_bits <= ROTATED_KEY_BITS if rotate_keys is None else rotate_keys, rotate_values)
    windows = {_window(leaf, spec)[0] for leaf in found if leaf.ours and not leaf.slides}
    positions = _positions(model, found, spec)
    layers = tuple(
        _layer(leaf, spec, rotate, positions.get(leaf.path), own_mask=len(windows) > 1 and not leaf.slides)
        for leaf in found
    )
    _refuse_group(layers, spec)
    return CachePlan(spec, layers, (*notes, *_notes(found, layers, spec, positions, config)), model)


def spare_slots(window: int) -> int:
    """Return the slots for rewinding: an eighth of the window, 64 to 256."""
    # At a window of 4,096, attention took 2.98 ms against 2.61 of mlx-lm's non-rewindable ring
    # (2-core x86 CPU, 16 bits, 8 heads on 4, D 64).
    return max(64, min(256, window // 8))


def _look(model: Any, config: Mapping[str, Any]) -> tuple[list[Leaf], tuple[str, ...]]:
    from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

    caches = make_prompt_cache(model)
    windows = ignored_windows(config, len(caches))
    latent = "kv_lora_rank" in config.get("text_config", config)
    trouble, seen = "", dict[Path, Seen | None]()
    try:
        seen = probe(model, caches, lambda cache: type(cache) in (KVCache, RotatingKVCache))
    except Exception as error:  # any model's own code may run here; its caches then stay, and the plan says so
        trouble = f"a first pass over the model failed ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
    reaches = _reaches(caches, seen)
    found = [
        _leaf(path, cache, seen.get(path), windows[path[0]], reaches, trouble, latent=latent)
        for path, cache in leaves(caches)
    ]
    growing = [leaf for leaf in found if leaf.ours and not leaf.slides]
    masked = {leaf.seen.reach for leaf in growing if leaf.seen is not None}  # the class slides by its mask alone
    named = sorted({leaf.window for leaf in growing if leaf.window is not None and leaf.window not in masked})
    return found, tuple(
        f"{sum(leaf.window == window and not leaf.slides for leaf in found)} layers slide over {window} tokens, as the model's"
        " config says; mlx-lm's own class ignores that"
        for window in named
    )


def _reaches(caches: list[Any], seen: Mapping[Path, Seen | None]) -> dict[int, int]:
    # plamo3's mask sees one token more, which mlx-lm's cache drops in decoding and ours keeps.
    from mlx_lm.models.cache import RotatingKVCache

    return {
        cache.max_size: max(each.reach, cache.max_size)
        for path, cache in leaves(caches)
        if (each := seen.get(path)) is not None and each.reach is not None and isinstance(cache, RotatingKVCache)
    }


def _leaf(  # noqa: PLR0917
    path: Path,
    cache: Any,
    seen: Seen | None,
    ignored: int | None,
    reaches: Mapping[int, int],
    trouble: str,
    *,
    latent: bool,
) -> Leaf:
    from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache

    if isinstance(cache, ArraysCache):
        return Leaf(path, "state", "its recurrent state stays as the model made it", fixed_bytes=int(cache.nbytes))
    if isinstance(cache, CompressedCache):
        own = "it holds keys and values as one, compressed by the model itself, and stays as the model made it"
        note = trouble or own
        if not cache.ratio:
            return Leaf(path, "window", note, slides=True, window=cache.window, fixed_bytes=cache.fixed_bytes)
        return Leaf(path, "compressed", note, bytes_per_token=cache.bytes_per_token, fixed_bytes=cache.fixed_bytes)
    if isinstance(cache, ChunkedKVCache):
        keys: Any = cache.keys
        per_token = 0 if keys is None else int(cache.nbytes) // int(keys.shape[2])
        note = f"it attends in chunks of {cache.chunk_size} tokens and stays as the model made it"
        return Leaf(path, "own", note, window=cache.chunk_size, bytes_per_token=per_token)
    if type(cache) not in (KVCache, RotatingKVCache):
        note = f"its {type(cache).__name__} stays as the model made it"
        return Leaf(path, "own", note, fixed_bytes=int(cache.nbytes))
    per_token = 0 if seen is None else seen.heads * (seen.key_dim + seen.value_dim) * seen.scale_bytes
    slides = isinstance(cache, RotatingKVCache)
    if seen is not None and seen.through:
        window = reaches.get(cache.max_size, cache.max_size) if slides else ignored
        kind: Kind = "full" if window is None else "window"
        return Leaf(path, kind, "", True, slides, window, per_token, seen=seen)
    kind, note = _why_it_stays(seen, trouble, latent=latent)
    return Leaf(path, kind, note, False, slides, cache.max_size if slides else None, per_token, seen=seen)


def _why_it_stays(seen: Seen | None, trouble: str, *, latent: bool) -> tuple[Kind, str]:
    if trouble:
        return "own", f"{trouble}, so its cache stays as the model made it"
    if seen is None:
        return "own", "it is not filled once per pass, so it stays as the model made it"
    if latent:
        return "latent", "latent attention (MLA) compresses keys and values itself; they stay as the model made them"
    return (
        "own",
        "its attention does not take keys and values as the cache returns them, so they stay as the model made them",
    )


def _refuse(found: list[Leaf], spec: KVSpec, unbounded: str) -> None:
    ours = [leaf for leaf in found if leaf.ours]
    reasons = "; ".join(sorted({leaf.note for leaf in found if not leaf.ours}))
    if spec.quantized and not ours:
        raise OptionError(f"this model's cache can't be quantized: {reasons}", "Keep it at 16 bits (--kv-bits).")
    grow = any(leaf.bytes_per_token > 0 and leaf.window is None and not leaf.ours for leaf in found)
    if spec.window is not None and (unbounded or grow or not ours):
        why = unbounded or reasons
        raise OptionError(f"this model's cache can't have a window: {why}", "Leave out the window (--kv-window).")


def _refuse_group(layers: tuple[LayerPlan, ...], spec: KVSpec) -> None:
    found = _groups(layers)
    if spec.group_size <= DEFAULT.group_size or not found or spec.group_size in found:
        return
    best = max(found)
    raise OptionError(
        f"this model can't use KV groups of {spec.group_size}: its head dimension is not a multiple of it",
        f"Use groups of {best} (--kv-group-size {best}).",
    )


def _groups(layers: tuple[LayerPlan, ...]) -> set[int]:
    codecs = (codec for layer in layers if layer.ours for codec in (layer.ours.key_codec, layer.ours.value_codec))
    return {codec.group_size for codec in codecs if codec.group_size is not None}


def _window(leaf: Leaf, spec: KVSpec) -> tuple[int | None, Keep | None]:
    if leaf.window is None:
        return spec.window, spec.keep if spec.window is not None else None
    return min(leaf.window, spec.window or leaf.window), 0


def _positions(model: Any, found: list[Leaf], spec: KVSpec) -> dict[Path, KeyPositions]:
    from mlx_lm.models.cache import make_prompt_cache

    ours = [leaf for leaf in found if leaf.ours]
    pinning = [leaf for leaf in ours if _window(leaf, spec)[1]] if spec.rolls else []
    if not pinning:
        return {}
    known = key_positions(model, lambda: make_prompt_cache(model), frozenset(leaf.path for leaf in ours))
    elsewhere = KeyPositions(None, READ_ELSEWHERE)
    return {
        leaf.path: known[leaf.path] if leaf.seen is not None and leaf.seen.direct else elsewhere for leaf in pinning
    }


def _layer(
    leaf: Leaf, spec: KVSpec, rotate: tuple[bool, bool], positions: KeyPositions | None, *, own_mask: bool
) -> LayerPlan:
    seen = leaf.seen
    if not leaf.ours or seen is None:
        return LayerPlan(leaf.path, leaf.kind, leaf.window, None, leaf.bytes_per_token, leaf.fixed_bytes, leaf.note)
    window, keep = _window(leaf, spec)
    keys = _codec(spec.key_bits, seen.key_dim, spec, rotate=rotate[0])
    values = _codec(spec.value_bits, seen.value_dim, spec, rotate=rotate[1])
    size = keys.token_bytes(seen.heads, seen.key_dim, seen.scale_bytes) + values.token_bytes(
        seen.heads, seen.value_dim, seen.scale_bytes
    )
    kind: Kind = "full" if window is None else "window"
    ours = Ours(keys, values, seen, own_mask, positions.rotation if positions else None)
    return LayerPlan(leaf.path, kind, window, keep, size, 0, leaf.note, ours)


def _codec(bits: int, dim: int, spec: KVSpec, *, rotate: bool) -> Codec:
    if bits == 16:
        return Plain()
    group = group_for(dim, spec.group_size)
    if group is None:
        raise OptionError(
            f"{dim} numbers per head can't be packed: no group size up to {spec.group_size} divides them",
            "Use 16 bits for keys and values of this model.",
        )
    return Affine(bits, group, rotation_block(dim) if rotate else None)


def _notes(
    found: list[Leaf],
    layers: tuple[LayerPlan, ...],
    spec: KVSpec,
    positions: Mapping[Path, KeyPositions],
    config: Mapping[str, Any],
) -> Iterator[str]:
    of_all = f"of {len(found)} caches"
    for note, count in Counter(leaf.note for leaf in found if leaf.note).items():
        yield f"{count} {of_all}: {note}"
    for group in sorted(_groups(layers) - {spec.group_size}):
        yield f"groups of {group}, not {spec.group_size}: the largest size that divides this model's head dimension"
    cut = Counter(
        leaf.window for leaf in found if leaf.ours and leaf.window and leaf.window > (spec.window or leaf.window)
    )
    for window, count in cut.items():
        yield f"{count} layers slide over {window} tokens by themselves: cut to {spec.window}, with nothing pinned"
    for trouble, count in Counter(each.trouble for each in positions.values() if each.trouble).items():
        yield (
            f"{count} {of_all}: pinned tokens keep their first positions, ever further from the newest token: {trouble}"
        )
    if spec.window is None:
        if not spec.rolls and spec.keep != DEFAULT.keep:
            yield f"keep {spec.keep} has no effect: without a window nothing is dropped"
        return
    longest, held = context_length(config), spec.capacity(context_length(config))
    if spec.rolls and longest is not None and longest < spec.window:
        yield f"a KV window of {spec.window:,} tokens is more than the {longest:,} that the model was made for"
    if held is not None and held < spec.window:
        yield f"the context holds {held:,} tokens, not {spec.window:,}: only a window that rolls may be longer than the model's own"
