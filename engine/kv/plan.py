"""From a model's own cache list and the user's wishes to the caches it gets, layer by layer, with reasons.

    plan = plan_caches(model, config, KVSpec(key_bits=8, value_bits=4, window=4096))
    plan.layers, plan.notes, plan.bytes_at(4096)      what was decided, and its price
    caches = plan.make()                               one list per conversation

Layers with growing keys and values follow the user's spec; a model's own sliding windows keep their size and take the bits;
recurrent, latent and other state stays as the model made it. What can't be honoured anywhere is an OptionError.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import OptionError
from ..model.config import context_length, ignored_windows, unbounded
from ..options import KVSpec
from .attention import install_seam
from .cache import Cache
from .codec import Affine, Codec, Plain, rotation_block
from .compressed import CompressedCache
from .layout import Growing, Ring
from .probe import Path, Seen, leaves, map_leaves, probe
from .rotary import KeyPositions, Rotation, key_positions
from .sizes import ROTATED_KEY_BITS, group_for

Kind = Literal["full", "window", "state", "latent", "compressed", "own"]
"""full: grows with the context. window: slides. state: of a fixed size. latent: MLA. compressed: a window, and entries for groups
of earlier tokens (kv/compressed.py). own: another cache of the model's."""

Keep = int | Literal["system"]

DEFAULT = KVSpec()
"""Its group size and pinned tokens give way to what fits; other values were asked for."""

READ_ELSEWHERE = "other layers attend to its keys, too"


@dataclass(frozen=True, slots=True)
class Leaf:
    """One cache of the model's own list, and what is known of it.

    note: why it stays, or what is special. ours: whether our cache can stand in. slides: whether mlx-lm's own cache slides.
    window: the model's own, also where mlx-lm ignores it. bytes_per_token and fixed_bytes: as the model made it.
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
    """What our cache of a layer is made of.

    own_mask: it can't use the model's mask, made for layers of another window. rotation: what moves the keys of its pinned tokens;
    None where none are pinned, or they stay.
    """

    key_codec: Codec
    value_codec: Codec
    seen: Seen
    own_mask: bool
    rotation: Rotation | None = None


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What one cache will be.

    path: (layer,), or (layer, part) where a layer has several. window, keep: None where it grows. bytes_per_token: while it
    grows. fixed_bytes: whatever the context. note: why it stays as the model made it (``ours`` is None then), or what is special.
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
        """The layer."""
        return self.path[0]

    @property
    def key_bits(self) -> int:
        """Bits per key number; 16 is the model's own type."""
        return 16 if self.ours is None else self.ours.key_codec.bits

    @property
    def value_bits(self) -> int:
        """Bits per value number; 16 is the model's own type."""
        return 16 if self.ours is None else self.ours.value_codec.bits

    @property
    def group_size(self) -> int | None:
        """The group of the keys, or of the values where only they are packed, or None."""
        return None if self.ours is None else self.ours.key_codec.group_size or self.ours.value_codec.group_size

    @property
    def rotated(self) -> bool:
        """Whether keys are rotated."""
        return self.ours is not None and self.ours.key_codec.block is not None

    @property
    def limit(self) -> int | None:
        """Tokens held at most: the window, and what is spare for rewinding. None where it grows."""
        return self.window if self.window is None or self.ours is None else self.window + spare_slots(self.window)

    @property
    def block(self) -> int:
        """Positions by which the keys of pinned tokens move at once; 0 where none move. Takes a system prompt to be one token."""
        if self.ours is None or self.ours.rotation is None or self.window is None:
            return 0
        return Ring(self.window, self.keep if isinstance(self.keep, int) else 1).block

    def bytes_at(self, context: int) -> int:
        """Bytes held after ``context`` tokens; room to grow (up to a sixteenth, in steps of 256 tokens) comes on top."""
        held = context if self.limit is None else min(context, self.limit)
        return self.fixed_bytes + held * self.bytes_per_token + self.pinned_bytes(context)

    def pinned_bytes(self, context: int) -> int:
        """Bytes of the keys that move, as the model made them, beside the slots.

        Those of a system prompt come on top: its length is not known here.
        """
        if self.ours is None or self.ours.rotation is None or not isinstance(self.keep, int):
            return 0
        seen = self.ours.seen
        return min(context, self.keep) * seen.heads * seen.key_dim * seen.scale_bytes

    def make(self, ours: Ours, keep: int | None) -> Cache:
        """Make the cache. keep: pinned tokens, instead of the plan's."""
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
    """The caches of a model under a spec. ``notes`` say what the user should know, in plain sentences."""

    spec: KVSpec
    layers: tuple[LayerPlan, ...]
    notes: tuple[str, ...]
    _model: Any = field(repr=False, compare=False)

    @property
    def bytes_per_token(self) -> int:
        """Bytes by which one more token makes the caches grow while nothing has reached its window."""
        return sum(layer.bytes_per_token for layer in self.layers)

    def bytes_at(self, context: int) -> int:
        """Bytes held after ``context`` tokens."""
        return sum(layer.bytes_at(context) for layer in self.layers)

    def make(self, keep: int | None = None) -> list[Any]:
        """Make the caches of one conversation, and install the seam that they need.

        Args:
            keep: Tokens to pin, instead of the spec's; required where that is "system": the number of system tokens.

        Raises:
            OptionError: They leave no room in the window.
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
    """Decide on the caches of a model. Installs the seam.

    Runs the model's forward pass once, lazily; twice more where tokens are pinned in a window.

    Args:
        model: mlx-lm's module made from ``config``.
        config: The normalised config.
        spec: What the user asked for.
        rotate_keys: Hadamard rotation of packed keys; None: where they have 4 bits or fewer.
        rotate_values: The same for packed values.

    Raises:
        OptionError: Something asked for can't be honoured.
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
    """Return the slots to rewind into: an eighth of the window, 64 to 256.

    They take memory, and with the mask that hides them a little of each step's time: at a window of 4,096, one layer's attention
    took 2.98 ms against 2.61 of mlx-lm's ring, which can't be rewound (2-core x86 CPU, 16 bits, 8 heads on 4, D 64).
    """
    return max(64, min(256, window // 8))


def _look(model: Any, config: Mapping[str, Any]) -> tuple[list[Leaf], tuple[str, ...]]:
    """Return the leaves of the model's own cache list, and notes on the model as a whole; see ``probe``."""
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
    """Return for the size of a sliding cache how far the model's mask lets a token see: plamo3's sees one token more.

    One mask serves all layers that slide alike, so one cache of a size answers for all. mlx-lm's cache then forgets that token in
    decoding; ours keeps it.
    """
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
    """Raise where no layer can be packed, or not all that grow can have a window. unbounded: why none can."""
    ours = [leaf for leaf in found if leaf.ours]
    reasons = "; ".join(sorted({leaf.note for leaf in found if not leaf.ours}))
    if spec.quantized and not ours:
        raise OptionError(f"this model's cache can't be quantized: {reasons}", "Keep it at 16 bits (--kv-bits).")
    grow = any(leaf.bytes_per_token > 0 and leaf.window is None and not leaf.ours for leaf in found)
    if spec.window is not None and (unbounded or grow or not ours):
        why = unbounded or reasons
        raise OptionError(f"this model's cache can't have a window: {why}", "Leave out the window (--kv-window).")


def _refuse_group(layers: tuple[LayerPlan, ...], spec: KVSpec) -> None:
    """Raise where a group size larger than the default was asked for, and divides the head dimension of no layer."""
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
    """Return the window and what it keeps: the smaller of the model's own, in which nothing is pinned, and the user's."""
    if leaf.window is None:
        return spec.window, spec.keep if spec.window is not None else None
    return min(leaf.window, spec.window or leaf.window), 0


def _positions(model: Any, found: list[Leaf], spec: KVSpec) -> dict[Path, KeyPositions]:
    """Return what moves the keys of each cache in which tokens are pinned while others roll out."""
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
    """Yield what was decided otherwise than the user may think, and what of the spec has no effect."""
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
