"""Predicts prefill's peak memory from shapes, as ``mx.get_peak_memory`` counts, without MLX."""

#     peak = weights + keys and values + the largest temporaries of any call + what the prompt cache keeps beside
#
# N tokens at once, T held; widths H (hidden), A (queries), K, V, I (feed-forward) per token, D per head:
#
#     rotation   2H + A + K + V + 3A + 1.5D
#     keys       … + growth + 2TK                  (unpacked: integers, then values)
#     values     … + TK + growth + 2TV
#     output     2H + 3A + TK + TV, then 3H + 2A
#     feeding    4H + 2I                           (a mixture copies per expert used)
#     windows    on overflow old and new tokens, new ones of every layer, a mask
#     logits     3 × vocabulary

# Scores, heads × N × T, are stored unless fused (kv/costs.py): once, three times with sinks; on CUDA array masks are
# expanded. CPU kernels (stepping.py) use KV in place. If launched ahead (``Order``), one or two layers coexist. CPU:
# 0.9–1.15 of MLX's count in float32, 10–30 % over in half; Metal, CUDA not run. NumPy is extra.

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from ..kv.costs import (
    BLOCK_BYTES,
    BLOCK_QUERIES,
    NUMPY_SCORES,
    NUMPY_SCORES_PACKED,
    ROTATED_KEY_BITS,
    AttentionCall,
    AttentionDevice,
    MaskKind,
    group_for,
    grown,
    kernel_of,
    multiplies_packed,
    rounded,
    token_bytes,
)
from ..model.weights import text_config
from .config_cost import chosen_entries
from .cost import active_share, first_of

if TYPE_CHECKING:
    from ..kv.plan import CachePlan, LayerPlan


# When arrays are computed, and so how many of a layer's exist together. at once: each product when it is asked for (a
# plain CPU in float32: its own kernels multiply, NumPy attends). ahead: MLX launches work, and allocates for it, before
# earlier work has ended (GPUs, and half precision on a CPU).
Order = Literal["at once", "ahead"]

# Families whose attention has a logit per head that takes weight and gives nothing.
_SINKS = frozenset({"gpt_oss", "mimo_v2_flash", "deepseek_v4", "deepseek_v41"})


@dataclass(frozen=True, slots=True)
class Compressed:
    """What a compressing layer's query sees (DeepSeek V4). every: tokens per entry. chosen: at most; None: all."""

    near: int
    every: int
    chosen: int | None
    index_heads: int
    size: int


@lru_cache(maxsize=64)  # asked for every layer, of which there are few kinds
def _token_bytes(heads: int, dim: int, bits: int, group_size: int, value_bytes: int) -> int:
    return token_bytes(heads, dim, bits, group_for(dim, group_size) or group_size, value_bytes)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's cache; heads and dims are 0 where not ours.

    window, spare: slots; None if it grows. block: positions per move of pinned keys. written_out: two products, no
    kernel. sinks: see ``stepwise``. seen: for compressing caches.
    """

    heads: int
    key_dim: int
    value_dim: int
    value_bytes: int
    key_bits: int = 16
    value_bits: int = 16
    group_size: int = 64
    window: int | None = None
    spare: int = 0
    other_bytes_per_token: int = 0
    fixed_bytes: int = 0
    block: int = 0
    written_out: bool = False
    sinks: bool = False
    seen: Compressed | None = None

    @property
    def ours(self) -> bool:
        return self.heads > 0

    @property
    def limit(self) -> int | None:
        return None if self.window is None else self.window + self.spare

    @property
    def key_numbers(self) -> int:
        return self.heads * self.key_dim

    @property
    def value_numbers(self) -> int:
        return self.heads * self.value_dim

    @property
    def key_bytes(self) -> int:
        return _token_bytes(self.heads, self.key_dim, self.key_bits, self.group_size, self.value_bytes)

    @property
    def value_token_bytes(self) -> int:
        return _token_bytes(self.heads, self.value_dim, self.value_bits, self.group_size, self.value_bytes)

    def packable(self) -> bool:
        return self.ours and all(group_for(dim, self.group_size) is not None for dim in (self.key_dim, self.value_dim))


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model in memory; widths are numbers per token.

    queries: all heads. value_bytes: per activation. force_fused: prefer fused kernels. piece: prompt tokens per CPU
    kernel call; None: the model's class.
    """

    weights: int
    hidden: int
    heads: int
    queries: int
    mlp: int
    experts: int
    experts_used: int
    expert_mlp: int
    vocabulary: int
    value_bytes: int
    order: Order
    device: AttentionDevice
    layers: tuple[LayerCache, ...]
    force_fused: bool = False
    piece: int | None = None
    kinds: tuple[tuple[LayerCache, int], ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", tuple(Counter(self.layers).items()))

    def packed(self, key_bits: int, value_bits: int) -> "ModelShape":
        layers = tuple(
            replace(layer, key_bits=key_bits, value_bits=value_bits) if layer.packable() else layer
            for layer in self.layers
        )
        return replace(self, layers=layers)

    def windowed(self, window: int, spare: int) -> "ModelShape":
        layers = tuple(
            replace(layer, window=window, spare=spare) if layer.ours and (layer.window or window) >= window else layer
            for layer in self.layers
        )
        return replace(self, layers=layers)


def shape_of(
    config: Mapping[str, Any],
    plan: "CachePlan",
    *,
    weights: int,
    value_bytes: int,
    order: Order,
    device: AttentionDevice,
) -> ModelShape:
    text = text_config(config)
    hidden = _number(text, "hidden_size", "n_embd", "d_model")
    heads = _number(text, "num_attention_heads", "n_head", "n_heads") or 1
    dense, experts, used, width, shared = _feed_forward(text, hidden)
    return ModelShape(
        weights=weights,
        hidden=hidden,
        heads=heads,
        queries=heads * (_number(text, "head_dim") or hidden // heads),
        mlp=max(dense, shared),
        experts=experts,
        experts_used=used,
        expert_mlp=width,
        vocabulary=_number(text, "vocab_size"),
        value_bytes=value_bytes,
        order=order,
        device=device,
        layers=cache_layers(config, plan, value_bytes),
    )


def cache_layers(config: Mapping[str, Any], plan: "CachePlan", value_bytes: int) -> tuple[LayerCache, ...]:
    text = text_config(config)
    capped = bool(text.get("attn_logit_softcapping"))
    sinks = text.get("model_type", config.get("model_type")) in _SINKS
    return tuple(
        replace(_layer_cache(layer, text, plan.spec.group_size, value_bytes), written_out=capped, sinks=sinks)
        for layer in plan.layers
    )


def _layer_cache(layer: "LayerPlan", text: Mapping[str, Any], group_size: int, value_bytes: int) -> LayerCache:
    if layer.ours is None:
        return LayerCache(
            heads=0,
            key_dim=0,
            value_dim=0,
            value_bytes=value_bytes,
            other_bytes_per_token=layer.bytes_per_token,
            fixed_bytes=layer.fixed_bytes,
            seen=_compressed(text, layer),
        )
    seen, limit = layer.ours.seen, layer.limit
    return LayerCache(
        heads=seen.heads,
        key_dim=seen.key_dim,
        value_dim=seen.value_dim,
        value_bytes=value_bytes,
        key_bits=layer.key_bits,
        value_bits=layer.value_bits,
        group_size=group_size,
        window=layer.window,
        spare=0 if limit is None or layer.window is None else limit - layer.window,
        fixed_bytes=0 if layer.window is None else layer.pinned_bytes(layer.window),
        block=layer.block,
    )


def _compressed(text: Mapping[str, Any], layer: "LayerPlan") -> Compressed | None:
    if layer.kind != "compressed":
        return None
    chosen = chosen_entries(text, layer.index)
    every = text["compress_rates"][text["layer_types"][layer.index]]
    most = None if chosen is None else chosen[1]
    return Compressed(text["sliding_window"], every, most, text["index_n_heads"], text["head_dim"])


def _feed_forward(text: Mapping[str, Any], hidden: int) -> tuple[int, int, int, int, int]:
    """Return widths: dense, experts, used, per expert, shared."""
    dense = _number(text, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden
    if (share := active_share(text)) is None:
        return dense, 0, 0, 0, 0
    used, experts = share
    own = _number(text, "moe_intermediate_size")
    width = own or dense
    shared = _number(text, "shared_expert_intermediate_size") or _number(text, "n_shared_experts") * width
    # A mixture with a width of its own may have dense layers besides; one without has none (Mixtral, gpt-oss).
    return dense if own else 0, experts, used, width, shared


def _number(text: Mapping[str, Any], *keys: str) -> int:
    found = first_of(text, *keys)
    return found if isinstance(found, int) else 0


# Parts of a call whose keys exist at once. Seen on a CPU, where MLX launches some ten kernels ahead: 13 of 17.
MOST_PARTS = 16

# Layers whose arrays exist at once where work is launched ahead. Seen in half precision on a plain CPU: 1.5 to 2.
LAYERS_AHEAD = 2

# Arrays of scores where MLX's own products put sinks beside them: the scores, both together, and the part without
# sinks.
SINK_SCORES = 3


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes at the highest call. kv: room to grow included. image: of seeing, before it."""

    weights: int
    kv: int
    working: int
    prompt_cache: int
    image: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + max(self.working, self.image) + self.prompt_cache


@dataclass(frozen=True, slots=True)
class ModelCall:
    new: int
    held: int
    decodes: bool = False


def predict_peak(
    shape: ModelShape,
    *,
    held: int,
    new: int,
    chunk: int,
    slots: int | None = None,
    reply: int = 0,
    prompt_cache: int = 0,
) -> Peak:
    """Return the peak of ``new`` tokens after ``held`` in chunks, then ``reply``.

    slots: of growing caches now; None derives them.
    """
    slots = rounded(held) if slots is None else slots
    if shape.piece is not None:
        piece = min(chunk, shape.piece)
        if any(_overflows(layer, ModelCall(piece, held + new)) for layer, _ in shape.kinds):
            shape = replace(shape, piece=None)  # its class computes what is left of a chunk
        else:
            chunk = piece
    kv = sum([count * _cache_bytes(layer, _slots(layer, slots, held)) for layer, count in shape.kinds])
    idle = Peak(shape.weights, kv, 0, prompt_cache)
    limits = {layer.limit for layer, _ in shape.kinds if layer.ours}
    calls = _high_calls(slots, held, new, chunk, reply, limits)
    peaks = (_call_peak(shape, before, call, prompt_cache) for before, call in calls)
    return max(peaks, key=lambda peak: peak.total, default=idle)


def _high_calls(  # noqa: PLR0917
    slots: int, held: int, new: int, chunk: int, reply: int, limits: set[int | None]
) -> Iterator[tuple[int, ModelCall]]:
    """Yield candidates for the highest call: the last of each kind, as more held is never less."""
    # Kind: whole chunk or not, which caches grow, whether MLX stores the scores.
    last: dict[tuple[bool, ...], tuple[int, ModelCall]] = {}
    for start, stop in _distinct_calls(slots, held, held + new, chunk):
        count, before, slots = stop - start, slots, grown(slots, stop)
        few = (count * stop < NUMPY_SCORES, count * stop < NUMPY_SCORES_PACKED)
        grew = tuple(min(slots, limit or slots) > min(before, limit or before) for limit in limits)
        last[count == chunk, *grew, *few] = before, ModelCall(count, stop)
    yield from last.values()
    end = held + new
    while slots < end + reply:  # decoding grows the caches a token at a time
        before, slots = slots, grown(slots, slots + 1)
        yield before, ModelCall(1, before + 1, decodes=True)
    if reply:
        yield slots, ModelCall(1, end + reply, decodes=True)


def _distinct_calls(slots: int, held: int, end: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of calls with the last of each kind; bounded at any context."""
    start = held
    while start < end:
        whole = (end - start) // chunk
        still = min(whole, max(0, (slots - start) // chunk))  # whole chunks before one makes the caches grow
        few = (max(0, (scores - 1) // chunk - start) // chunk for scores in (NUMPY_SCORES, NUMPY_SCORES_PACKED))
        for call in sorted({min(still, calls) for calls in few} | {still}):
            if call:
                yield start + (call - 1) * chunk, start + call * chunk
        start += still * chunk
        if start < end:
            stop = min(start + chunk, end)
            yield start, stop
            start, slots = stop, grown(slots, stop)


def _call_peak(shape: ModelShape, slots: int, call: ModelCall, prompt_cache: int) -> Peak:
    """Return one call's peak: in the last layer, all other caches having grown."""
    kv = sum([count * _cache_bytes(layer, _slots(layer, slots, call.held)) for layer, count in shape.kinds])
    if shape.piece is not None:
        growing = max((_growth_in_place(layer, slots, call) for layer, _ in shape.kinds), default=0)
        return Peak(shape.weights, kv, growing + (3 * 4 * shape.vocabulary if call.decodes else 0), prompt_cache)
    working = max((_layer(shape, layer, slots, call) for layer, _ in shape.kinds), default=0)
    feed_forward = call.new * shape.value_bytes * (4 * shape.hidden + _widths(shape))
    working = max(working, feed_forward) + (3 * 4 * shape.vocabulary if call.decodes else 0)
    pending = sum(
        [  # all layers write at the end of the call
            count * call.new * (layer.key_bytes + layer.value_token_bytes)
            for layer, count in shape.kinds
            if _overflows(layer, call)
        ]
    )
    return Peak(shape.weights, kv, working + _mask(shape, call) + pending, prompt_cache)


def _slots(layer: LayerCache, slots: int, held: int) -> int:
    if not layer.ours:
        return held
    return min(grown(slots, held), layer.limit or grown(slots, held))


def _cache_bytes(layer: LayerCache, slots: int) -> int:
    return slots * (layer.key_bytes + layer.value_token_bytes + layer.other_bytes_per_token) + layer.fixed_bytes


def _layer(shape: ModelShape, layer: LayerCache, slots: int, call: ModelCall) -> int:
    if shape.order == "ahead":
        return _ahead(shape, layer, slots, call)
    return max(_attention(shape, layer, slots, call))


def _attention(shape: ModelShape, layer: LayerCache, slots: int, call: ModelCall) -> Iterator[int]:
    number, n, wide = shape.value_bytes, call.new, _queries(shape, layer)
    entry = n * number * (2 * shape.hidden + wide + layer.key_numbers + layer.value_numbers)
    rotation = 3 * layer.key_dim * n * number // 2  # angles, their sines and cosines, half of D each
    grow = _Growth.growth(layer, slots, call)
    keys, values = _unpacked(shape, layer, call)
    yield entry + 3 * wide * n * number + rotation - grow.both
    moved = _moved(shape, layer, call)
    yield entry + 3 * layer.key_numbers * n * number + rotation + grow.keys_and_new + 2 * keys - grow.both
    yield entry + keys + grow.values_and_new + 2 * values - grow.values
    yield n * number * (2 * shape.hidden + 3 * wide) + keys + values + moved
    yield n * number * (3 * shape.hidden + 2 * wide)
    if (scores := _scores(shape, layer, call)) > 0:
        yield entry + 3 * wide * n * number + keys + values + moved + 2 * scores


@dataclass(frozen=True, slots=True)
class _Growth:
    """Growing caches' bytes; keys_and_new: old and larger arrays together."""

    keys: int
    values: int
    keys_and_new: int
    values_and_new: int

    @property
    def both(self) -> int:
        return self.keys + self.values

    @staticmethod
    def growth(layer: LayerCache, slots: int, call: ModelCall) -> "_Growth":
        after = _slots(layer, slots, call.held)
        before = min(slots, after)
        more = after - before if layer.ours else 0
        written = after + more + (call.new if layer.key_bits != 16 else 0) if more else 0
        also = after + more + (call.new if layer.value_bits != 16 else 0) if more else 0
        return _Growth(
            more * layer.key_bytes,
            more * layer.value_token_bytes,
            written * layer.key_bytes,
            also * layer.value_token_bytes,
        )


def _growth_in_place(layer: LayerCache, slots: int, call: ModelCall) -> int:
    after = _slots(layer, slots, call.held)
    more = after - min(slots, after)
    return max(after * layer.key_bytes - more * layer.value_token_bytes, after * layer.value_token_bytes) if more else 0


def _queries(shape: ModelShape, layer: LayerCache) -> int:
    return shape.heads * layer.key_dim if layer.ours else shape.queries


def _multiplies_packed(shape: ModelShape, layer: LayerCache, call: ModelCall) -> bool:
    return (layer.key_bits, layer.value_bits) != (16, 16) and multiplies_packed(call.new, shape.device.kind)


def _unpacked(shape: ModelShape, layer: LayerCache, call: ModelCall) -> tuple[int, int]:
    if not layer.ours or _multiplies_packed(shape, layer, call):
        return 0, 0
    seen, whole = _seen(layer, call), _overflows(layer, call)
    keys = seen * layer.key_numbers * layer.value_bytes if whole or layer.key_bits != 16 else 0
    values = seen * layer.value_numbers * layer.value_bytes if whole or layer.value_bits != 16 else 0
    return keys, values


def _moved(shape: ModelShape, layer: LayerCache, call: ModelCall) -> int:
    # MLX makes several parts' ahead; NumPy goes part by part.
    if not layer.block or call.new == 1 or layer.window is None or call.held <= layer.window:
        return 0
    last, before = ((held - 1 - layer.window) // layer.block for held in (call.held, call.held - call.new))
    if last == max(before, -1):
        return 0  # all of it sees them where they are
    once = _seen(layer, call) * layer.key_numbers * layer.value_bytes
    if _attends_by_numpy(shape, layer, call):
        return once
    return once * min(last - max(before, -1) + 1, MOST_PARTS)


def _overflows(layer: LayerCache, call: ModelCall) -> bool:
    return layer.limit is not None and call.held > layer.limit and call.new > layer.spare + 1


def _seen(layer: LayerCache, call: ModelCall) -> int:
    if layer.limit is None:
        return call.held
    return min(call.held, layer.limit + (call.new if _overflows(layer, call) else 0))


def _scores(shape: ModelShape, layer: LayerCache, call: ModelCall) -> int:
    if layer.seen is not None:
        return _compressed_scores(shape, layer.seen, call)
    if not layer.ours:
        own = layer.other_bytes_per_token > 0  # else it keeps a state, and nothing attends
        return shape.heads * call.new * call.held * shape.value_bytes if own else 0
    seen = _seen(layer, call)
    one = shape.heads * call.new * seen * shape.value_bytes
    if layer.written_out or _multiplies_packed(shape, layer, call):
        return one * (shape.value_bytes + 4) // shape.value_bytes if layer.sinks else one
    if _attends_by_numpy(shape, layer, call):
        return 0
    return _written(shape, layer, call, seen, one)


def _attends_by_numpy(shape: ModelShape, layer: LayerCache, call: ModelCall) -> bool:
    packed = (layer.key_bits, layer.value_bits) != (16, 16)
    rows = min(call.new, layer.block) if layer.block and call.held > (layer.window or 0) else call.new
    worth = NUMPY_SCORES_PACKED if packed else NUMPY_SCORES
    return shape.device.kind == "cpu" and shape.order != "ahead" and call.new > 1 and rows * _seen(layer, call) >= worth


def _compressed_scores(shape: ModelShape, seen: Compressed, call: ModelCall) -> int:
    """Return float32 score bytes over window and entries, or of gathered rows."""
    entries = call.held // seen.every
    if seen.chosen is None or entries <= seen.chosen:
        return 2 * 4 * shape.heads * call.new * (min(call.held, seen.near + call.new) + entries)
    gathered = 4 * call.new * (seen.near + seen.chosen) * seen.size
    scored = 4 * call.new * seen.index_heads * entries
    return 2 * max(min(each, BLOCK_BYTES) for each in (gathered, scored))


def _written(shape: ModelShape, layer: LayerCache, call: ModelCall, seen: int, one: int) -> int:
    mask = _mask_kind(layer, call)
    attention = AttentionCall(
        shape.heads,
        layer.heads,
        call.new,
        seen,
        layer.key_dim,
        layer.value_dim,
        mask,
        "float32" if layer.value_bytes == 4 else "bfloat16",
        sinks=layer.sinks,
    )
    force = shape.force_fused and call.new > 1
    kernel = kernel_of(attention, shape.device, force_fused=force)
    if force and kernel == "unfused":
        kernel = kernel_of(attention, shape.device)
    if kernel == "unfused":
        causal = call.new * seen if mask == "causal" else 0  # the mask that MLX makes of the word
        return one * (SINK_SCORES if layer.sinks else 1) + causal
    if kernel == "blocked":
        rows = min(call.new, BLOCK_QUERIES)
        return shape.heads * rows * (seen + layer.key_dim + layer.value_dim) * shape.value_bytes
    return 2 * one if kernel == "cudnn" and attention.has_array else 0


def _mask_kind(layer: LayerCache, call: ModelCall) -> MaskKind:
    if layer.window is not None and call.held > layer.window:
        return "bool"
    return "none" if call.new == 1 else "causal"


def _widths(shape: ModelShape) -> int:
    mixture = shape.experts_used * (2 * shape.hidden + 2 * shape.expert_mlp) + 2 * shape.experts
    return 2 * shape.mlp + (mixture if shape.experts_used else 0)


def _between(shape: ModelShape, layer: LayerCache, n: int) -> int:
    wide = _queries(shape, layer)
    turned = 3 * wide if shape.device.kind == "cpu" else wide
    widths = 6 * shape.hidden + _widths(shape) + 3 * wide + turned + layer.key_numbers + layer.value_numbers
    return n * shape.value_bytes * widths


def _ahead(shape: ModelShape, layer: LayerCache, slots: int, call: ModelCall) -> int:
    keys, values = _unpacked(shape, layer, call)
    rotated = keys if layer.key_bits <= ROTATED_KEY_BITS else 0  # turned back into an array of their own
    integers = keys * (layer.key_bits != 16) + values * (layer.value_bits != 16)
    beside = integers if shape.device.kind == "cpu" else rotated  # a GPU unpacks in one kernel
    grow = _Growth.growth(layer, slots, call)
    made = LAYERS_AHEAD * _between(shape, layer, call.new) + keys + values + _moved(shape, layer, call)
    made += max(beside, _scores(shape, layer, call))
    return made + grow.keys_and_new + grow.values_and_new - grow.both


def _mask(shape: ModelShape, call: ModelCall) -> int:
    """Bytes of a rolled window's mask: three bool arrays meanwhile."""
    bounded = [layer for layer, _ in shape.kinds if layer.window is not None and layer.window < call.held]
    if call.new == 1 or not bounded:
        return 0
    return 3 * call.new * max(min(call.held, (layer.limit or 0) + call.new) for layer in bounded)
