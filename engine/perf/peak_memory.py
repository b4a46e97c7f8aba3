"""How much memory a prefill will take at its highest: arithmetic from shapes, nothing is computed and MLX is not needed.

    peak = weights + keys and values + the largest temporaries of any call + what the prompt cache keeps beside

Counted are MLX's arrays, as ``mx.get_peak_memory`` counts them. NumPy's own arrays on a plain CPU come on top: a product's rows
before MLX copies them, and one head's scores.

The steps of a layer, N tokens computed at once, T of them held at its end; widths H (hidden), A (queries), K and V (keys and
values), I (feed-forward), in numbers a token, and D dimensions a head:

    rotation   x, its norm, q, k, v; to rotate q: four half products and their union             2H + A + K + V + 3A + 1.5D
    keys       the same, k rotated; keys grow into larger arrays beside the old; packed ones are
               unpacked: the integers, then what they become                                      … + growth + 2TK
    values     unpacked keys stay; values grow and are unpacked                                   … + TK + growth + 2TV
    output     q, what was gathered, its copy in order, unpacked keys and values                  2H + 3A + TK + TV, then 3H + 2A
    feeding    x, attention's output, their sum, its norm; gate and up, whose product takes the
               place of one; a mixture sorts a copy for each expert used                          4H + 2I
    windows    where a call overflows its ring: old and new tokens side by side; the new ones of every layer until all are
               written; a mask
    logits     of one token, as computed, as float32, and as log-probabilities                    3 × vocabulary

Attention's scores, heads × N × T numbers, are written down unless MLX runs a fused kernel, which each call's shapes decide
(engine/kv/attention_kernel.py): once, since softmax and mask work in place; three times where sinks are put beside them. Our own
two products (soft caps, packed decoding) hold them once, and as float32 for sinks. On CUDA a mask that is an array is written out
for all heads, from two arrays of that size. Attention that is the model's own is taken as not fused.

Where a CPU's kernels compute (engine/model/cpu/stepping.py), keys and values are written and read where they lie: MLX has caches
that grow, one store after another, and logits.

Where work is launched ahead (see ``Order``), all arrays of one layer or two exist at once; scores once. That was measured on
a CPU: in float32 with scores written down it gives 0.9 to 1.15 of what MLX counts, in half precision 10 to 30 % too much beside
the weights. On Metal and CUDA none of this was run. Models with layers of another kind (recurrent, latent) are taken by their
widths.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ..kv.attention_kernel import (
    BLOCK_BYTES,
    BLOCK_QUERIES,
    NUMPY_SCORES,
    NUMPY_SCORES_PACKED,
    AttentionCall,
    AttentionDevice,
    MaskKind,
    kernel_of,
    multiplies_packed,
)
from ..kv.sizes import ROTATED_KEY_BITS, group_for, grown, rounded, token_bytes
from .cost import active_share, first_of, text_config
from .model_work import chosen_entries

if TYPE_CHECKING:
    from ..kv.plan import CachePlan, LayerPlan


Order = Literal["at once", "ahead"]
"""When arrays are computed, and so how many of a layer's exist together.

at once: each product when it is asked for (a plain CPU in float32: its own kernels multiply, NumPy attends). ahead: MLX launches
work, and allocates for it, before earlier work has ended (GPUs, and half precision on a CPU).
"""

_SINKS = frozenset({"gpt_oss", "mimo_v2_flash", "deepseek_v4", "deepseek_v41"})
"""Families whose attention has a logit per head that takes weight and gives nothing."""


@dataclass(frozen=True, slots=True)
class Compressed:
    """What a query of a compressing layer attends to (DeepSeek V4). near: the last tokens, one by one. every: tokens to an entry.

    chosen: entries that it attends to at most, by ``index_heads`` heads' scores; None is all. size: numbers of an entry.
    """

    near: int
    every: int
    chosen: int | None
    index_heads: int
    size: int


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cache of one layer. heads, key_dim, value_dim: of keys and values, 0 where it keeps none of ours.

    bits: 16 is the model's own type, of ``value_bytes`` each. window, spare: slots seen, and beside them to rewind into; None
    where it grows. other_bytes_per_token: of a cache that is the model's own. fixed_bytes: of such a one, or beside the slots.
    block: positions by which the pinned keys of its window move at once (engine/kv/layout.py); 0 where none do.
    written_out: attention is two products of ours, whatever kernels there are (for a soft cap). sinks: see ``stepwise``.
    seen: what a query sees of a cache that compresses, None of any other.
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
        """Whether the KV flags apply to it."""
        return self.heads > 0

    @property
    def limit(self) -> int | None:
        """Slots at most."""
        return None if self.window is None else self.window + self.spare

    @property
    def key_numbers(self) -> int:
        """Numbers in the keys of one token."""
        return self.heads * self.key_dim

    @property
    def value_numbers(self) -> int:
        """Numbers in the values of one token."""
        return self.heads * self.value_dim

    @property
    def key_bytes(self) -> int:
        """Bytes that the keys of one token take."""
        return self._token_bytes(self.key_dim, self.key_bits)

    @property
    def value_token_bytes(self) -> int:
        """Bytes that the values of one token take."""
        return self._token_bytes(self.value_dim, self.value_bits)

    def _token_bytes(self, dim: int, bits: int) -> int:
        group = group_for(dim, self.group_size) or self.group_size
        return token_bytes(self.heads, dim, bits, group, self.value_bytes)

    def packable(self) -> bool:
        """Whether keys and values of this layer can be packed at all."""
        return self.ours and all(group_for(dim, self.group_size) is not None for dim in (self.key_dim, self.value_dim))


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model as it is held in memory. Widths in numbers a token.

    weights: bytes of all weights, in the form they are held. queries: of all heads of a layer. mlp: of the widest dense
    feed-forward layer, or of the shared experts. expert_mlp: of one expert, ``experts_used`` of which compute a token.
    value_bytes: of an activation. device: what attends, and so which kernels there are. force_fused: prefill asks for a fused
    kernel wherever there is one, also where MLX takes another path because it is quicker. piece: tokens of a prompt that a CPU's
    kernels read at once; None: its class computes, as is taken of a model that is not loaded.
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

    def packed(self, key_bits: int, value_bits: int) -> "ModelShape":
        """Return the same model with keys and values of these bits, where they can be packed."""
        layers = tuple(
            replace(layer, key_bits=key_bits, value_bits=value_bits) if layer.packable() else layer
            for layer in self.layers
        )
        return replace(self, layers=layers)

    def windowed(self, window: int, spare: int) -> "ModelShape":
        """Return the same model with a window on every layer that has no smaller one."""
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
    """Return the shape of a model from its normalised config and the plan of its caches."""
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
    """Return what the caches of a plan are to the memory of a model with this normalised config."""
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
    """Return widths: a dense layer's, then of a mixture its experts, those used, an expert's, and that of the shared ones."""
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


MOST_PARTS = 16
"""Parts of a call whose keys exist at once. Seen on a CPU, where MLX launches some ten kernels ahead: 13 of 17."""

LAYERS_AHEAD = 2
"""Layers whose arrays exist at once where work is launched ahead. Seen in half precision on a plain CPU: 1.5 to 2."""

SINK_SCORES = 3
"""Arrays of scores where MLX's own products put sinks beside them: the scores, both together, and the part without sinks."""


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes at the highest call.

    kv: of the conversation's caches then, slots to grow into included. prompt_cache: what is kept beside.
    """

    weights: int
    kv: int
    working: int
    prompt_cache: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv + self.working + self.prompt_cache


@dataclass(frozen=True, slots=True)
class ModelCall:
    """new: tokens computed; held: tokens in the caches at its end; decodes: logits are asked for."""

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
    """Return the peak of computing ``new`` tokens after ``held``, ``chunk`` at a time, and of ``reply`` tokens after them.

    slots: of the caches that grow, now; None is as many as the tokens held would have made. prompt_cache: bytes of other
    prompts kept beside.
    """
    slots = rounded(held) if slots is None else slots
    if shape.piece is not None:
        piece = min(chunk, shape.piece)
        if any(_overflows(layer, ModelCall(piece, held + new)) for layer in shape.layers):
            shape = replace(shape, piece=None)  # its class computes what is left of a chunk
        else:
            chunk = piece
    kv = sum(_cache_bytes(layer, _slots(layer, slots, held)) for layer in shape.layers)
    idle = Peak(shape.weights, kv, 0, prompt_cache)
    limits = {layer.limit for layer in shape.layers if layer.ours}
    calls = _high_calls(slots, held, new, chunk, reply, limits)
    peaks = (_call_peak(shape, before, call, prompt_cache) for before, call in calls)
    return max(peaks, key=lambda peak: peak.total, default=idle)


def _high_calls(  # noqa: PLR0917
    slots: int, held: int, new: int, chunk: int, reply: int, limits: set[int | None]
) -> Iterator[tuple[int, ModelCall]]:
    """Yield the slots before, and the call, of all that can be the highest: the last of each kind, since more held is never less.

    A call's kind: whether it is a whole chunk, which caches it makes grow (of those ``limits``, in slots), and whether it has few
    enough scores for MLX to write them down.
    """
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
    """Yield (start, stop) of calls among which the last of each kind is, in order: a bounded number at any length of context.

    Between two calls that make caches grow the others differ in their scores alone, so the last of each number of scores will do.
    """
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
    """Return the peak of one call whose growing caches had ``slots``.

    The highest point is in the last layer: all caches but its own have grown by then. Each kind of layer is taken for it.
    """
    kv = sum(_cache_bytes(layer, _slots(layer, slots, call.held)) for layer in shape.layers)
    if shape.piece is not None:
        growing = max((_growth_in_place(layer, slots, call) for layer in set(shape.layers)), default=0)
        return Peak(shape.weights, kv, growing + (3 * 4 * shape.vocabulary if call.decodes else 0), prompt_cache)
    working = max((_layer(shape, layer, slots, call) for layer in set(shape.layers)), default=0)
    feed_forward = call.new * shape.value_bytes * (4 * shape.hidden + _widths(shape))
    working = max(working, feed_forward) + (3 * 4 * shape.vocabulary if call.decodes else 0)
    overflowing = (
        layer for layer in shape.layers if _overflows(layer, call)
    )  # all layers write at the end of the call
    pending = sum(call.new * (layer.key_bytes + layer.value_token_bytes) for layer in overflowing)
    return Peak(shape.weights, kv, working + _mask(shape, call) + pending, prompt_cache)


def _slots(layer: LayerCache, slots: int, held: int) -> int:
    """The slots that a layer has once ``held`` tokens are in it; of the model's own caches, those tokens."""
    if not layer.ours:
        return held
    return min(grown(slots, held), layer.limit or grown(slots, held))


def _cache_bytes(layer: LayerCache, slots: int) -> int:
    return slots * (layer.key_bytes + layer.value_token_bytes + layer.other_bytes_per_token) + layer.fixed_bytes


def _layer(shape: ModelShape, layer: LayerCache, slots: int, call: ModelCall) -> int:
    """Return the temporaries of one layer's attention above the caches as they are after it."""
    if shape.order == "ahead":
        return _ahead(shape, layer, slots, call)
    return max(_attention(shape, layer, slots, call))


def _attention(shape: ModelShape, layer: LayerCache, slots: int, call: ModelCall) -> Iterator[int]:
    """Yield the bytes at each step of one layer's attention where NumPy attends."""
    number, n, wide = shape.value_bytes, call.new, _queries(shape, layer)
    entry = n * number * (2 * shape.hidden + wide + layer.key_numbers + layer.value_numbers)
    rotation = 3 * layer.key_dim * n * number // 2  # angles, their sines and cosines, half of D each
    grow = _Growth.of(layer, slots, call)
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
    """Caches that grow, in bytes. keys, values: what they grow by; keys_and_new: the larger array beside the old one, and the part
    that is filled in."""

    keys: int
    values: int
    keys_and_new: int
    values_and_new: int

    @property
    def both(self) -> int:
        return self.keys + self.values

    @staticmethod
    def of(layer: LayerCache, slots: int, call: ModelCall) -> "_Growth":
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
    """Return the bytes beside the grown caches while a layer's keys grow, or its values: those as they were, and the room added."""
    after = _slots(layer, slots, call.held)
    more = after - min(slots, after)
    return max(after * layer.key_bytes - more * layer.value_token_bytes, after * layer.value_token_bytes) if more else 0


def _queries(shape: ModelShape, layer: LayerCache) -> int:
    """Return the numbers in a token's queries: heads of one layer may be wider than another's."""
    return shape.heads * layer.key_dim if layer.ours else shape.queries


def _multiplies_packed(shape: ModelShape, layer: LayerCache, call: ModelCall) -> bool:
    """Whether a call multiplies packed keys and values as they lie; alone, or with a ring that it fits into."""
    return (layer.key_bits, layer.value_bits) != (16, 16) and multiplies_packed(call.new, shape.device.kind)


def _unpacked(shape: ModelShape, layer: LayerCache, call: ModelCall) -> tuple[int, int]:
    """Return the bytes of keys and of values as attention reads them, where that is not how they lie."""
    if not layer.ours or _multiplies_packed(shape, layer, call):
        return 0, 0
    seen, whole = _seen(layer, call), _overflows(layer, call)
    keys = seen * layer.key_numbers * layer.value_bytes if whole or layer.key_bits != 16 else 0
    values = seen * layer.value_numbers * layer.value_bytes if whole or layer.value_bits != 16 else 0
    return keys, values


def _moved(shape: ModelShape, layer: LayerCache, call: ModelCall) -> int:
    """Return the bytes of the keys that are made again for each part of a call that sees pinned ones elsewhere.

    MLX makes them for several parts ahead of the attention of the first; NumPy attends to one part after the other.
    """
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
    """Whether a window is full, and the call too long to be written into its ring before it is read."""
    return layer.limit is not None and call.held > layer.limit and call.new > layer.spare + 1


def _seen(layer: LayerCache, call: ModelCall) -> int:
    """Return the tokens that attention reads: where a ring overflows, what it held and the new ones after it."""
    if layer.limit is None:
        return call.held
    return min(call.held, layer.limit + (call.new if _overflows(layer, call) else 0))


def _scores(shape: ModelShape, layer: LayerCache, call: ModelCall) -> int:
    """Return the bytes of all heads' scores, and of what is made of them, where they are written down."""
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
    """Whether NumPy attends (engine/kv/attention.py), to each part of a call where pinned keys move."""
    packed = (layer.key_bits, layer.value_bits) != (16, 16)
    rows = min(call.new, layer.block) if layer.block and call.held > (layer.window or 0) else call.new
    worth = NUMPY_SCORES_PACKED if packed else NUMPY_SCORES
    return shape.device.kind == "cpu" and shape.order != "ahead" and call.new > 1 and rows * _seen(layer, call) >= worth


def _compressed_scores(shape: ModelShape, seen: Compressed, call: ModelCall) -> int:
    """Return the bytes of scores over a window and entries, or of the rows gathered for blocks of queries; always float32."""
    entries = call.held // seen.every
    if seen.chosen is None or entries <= seen.chosen:
        return 2 * 4 * shape.heads * call.new * (min(call.held, seen.near + call.new) + entries)
    gathered = 4 * call.new * (seen.near + seen.chosen) * seen.size
    scored = 4 * call.new * seen.index_heads * entries
    return 2 * max(min(each, BLOCK_BYTES) for each in (gathered, scored))


def _written(shape: ModelShape, layer: LayerCache, call: ModelCall, seen: int, one: int) -> int:
    """Return the bytes of scores that MLX writes down, given those of all heads' scores ``one``."""
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
    """Return the mask of a call: an array once something has left a window (engine/kv/layout.py)."""
    if layer.window is not None and call.held > layer.window:
        return "bool"
    return "none" if call.new == 1 else "causal"


def _widths(shape: ModelShape) -> int:
    """Return the widths of gate and up; of a mixture's, with the sorted copies before and after them, and the router's weights."""
    mixture = shape.experts_used * (2 * shape.hidden + 2 * shape.expert_mlp) + 2 * shape.experts
    return 2 * shape.mlp + (mixture if shape.experts_used else 0)


def _between(shape: ModelShape, layer: LayerCache, n: int) -> int:
    """Return all arrays from one attention to the next: gathered, its copy, output, sums, norms, feeding, q, k, v, turned q."""
    wide = _queries(shape, layer)
    turned = 3 * wide if shape.device.kind == "cpu" else wide
    widths = 6 * shape.hidden + _widths(shape) + 3 * wide + turned + layer.key_numbers + layer.value_numbers
    return n * shape.value_bytes * widths


def _ahead(shape: ModelShape, layer: LayerCache, slots: int, call: ModelCall) -> int:
    keys, values = _unpacked(shape, layer, call)
    rotated = keys if layer.key_bits <= ROTATED_KEY_BITS else 0  # turned back into an array of their own
    integers = keys * (layer.key_bits != 16) + values * (layer.value_bits != 16)
    beside = integers if shape.device.kind == "cpu" else rotated  # a GPU unpacks in one kernel
    grow = _Growth.of(layer, slots, call)
    made = LAYERS_AHEAD * _between(shape, layer, call.new) + keys + values + _moved(shape, layer, call)
    made += max(beside, _scores(shape, layer, call))
    return made + grow.keys_and_new + grow.values_and_new - grow.both


def _mask(shape: ModelShape, call: ModelCall) -> int:
    """Return the bytes of the mask that a window needs once something has left it: three of bool on the way to one."""
    bounded = [layer for layer in shape.layers if layer.window is not None and layer.window < call.held]
    if call.new == 1 or not bounded:
        return 0
    return 3 * call.new * max(min(call.held, (layer.limit or 0) + call.new) for layer in bounded)
