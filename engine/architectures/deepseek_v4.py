"""DeepSeek V4 (Flash and Pro), which mlx-lm 0.32.2 lacks: compressed attention, and four residual streams."""

# Follows transformers 5.23's ``models/deepseek_v4``, and reuses mlx-lm's V4.1: hyper-connections and experts. V4
# differs: every layer compresses by itself (V4.1 shares), sparse groups overlap with their own indexer compressor,
# queries are normed per head, first layers route by token id, a head joins the streams, no fp8/fp4 rounding.

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import BaseModelArgs
from mlx_lm.models.deepseek_v41 import Experts, HyperConnection, SharedMLP
from mlx_lm.models.switch_layers import SwitchLinear

from ..errors import ModelUnsupportedError
from ..kv.costs import BLOCK_BYTES
from ..kv.layout import CompressedCache
from ..model.corrected_layers import ScaledRoPE, yarn
from ..model.weights import times_scales

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"


@dataclass
class ModelArgs(BaseModelArgs):
    layer_types: list[str]
    mlp_layer_types: list[str]
    compress_rates: dict[str, int]
    model_type: str = "deepseek_v4"
    vocab_size: int = 129280
    hidden_size: int = 4096
    num_hidden_layers: int = 43
    num_attention_heads: int = 64
    head_dim: int = 512
    q_lora_rank: int = 1024
    qk_rope_head_dim: int | None = None
    partial_rotary_factor: float | None = None
    o_groups: int = 8
    o_lora_rank: int = 1024
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 1048576

    moe_intermediate_size: int = 2048
    n_routed_experts: int = 256
    num_experts_per_tok: int = 6
    scoring_func: str = "sqrtsoftplus"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0

    sliding_window: int = 128
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 512

    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None

    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6

    def __post_init__(self) -> None:
        count = self.num_hidden_layers
        for name, listed, known in (
            ("layer_types", self.layer_types, (SLIDING, SPARSE, HEAVY)),
            ("mlp_layer_types", self.mlp_layer_types, ("hash_moe", "moe")),
        ):
            if len(listed) < count or not set(listed) <= set(known):
                raise _unknown(name, sorted(set(listed) - set(known)) or f"{len(listed)} layers of {count}")
        if self.scoring_func not in SCORES:
            raise _unknown("scoring_func", self.scoring_func)
        if not self.norm_topk_prob:
            raise _unknown("norm_topk_prob", False)

    def ratio(self, layer: int) -> int:
        """Tokens per compressed entry of a layer; 0 for none."""
        kind = self.layer_types[layer]
        return 0 if kind == SLIDING else int(self.compress_rates[kind])

    def rope(self, *, compressed: bool) -> ScaledRoPE:
        named = (self.rope_parameters or {}).get("compress" if compressed else "main")
        theta, given = (self.compress_rope_theta, self.rope_scaling) if compressed else (self.rope_theta, None)
        if isinstance(named, dict):
            theta, given = named.get("rope_theta", theta), named
        scaling = {key: value for key, value in (given or {}).items() if value is not None}
        share = scaling.get("partial_rotary_factor", self.partial_rotary_factor)
        dims = (self.qk_rope_head_dim or 64) if share is None else int(self.head_dim * share)
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind == "default":
            return ScaledRoPE([theta ** (2 * i / dims) for i in range(dims // 2)], traditional=True)
        if kind != "yarn":
            raise _unknown("rope_type", kind)
        # What yarn by itself multiplies attention by is left out, unless a file names it.
        return yarn(dims, True, {"rope_scaling": {"attention_factor": 1.0, **scaling}, "rope_theta": theta})


def _unknown(key: str, value: Any) -> ModelUnsupportedError:
    return ModelUnsupportedError(
        f"config.json sets {key} to {value}, which DeepSeek V4 is not known to have", "Choose another model."
    )


SCORES: dict[str, Callable[[mx.array], mx.array]] = {
    "sqrtsoftplus": lambda logits: mx.sqrt(nn.softplus(logits)),
    "softmax": lambda logits: mx.softmax(logits, axis=-1),
    "sigmoid": mx.sigmoid,
}


def rotate(x: mx.array, rope: ScaledRoPE, first: int, *, every: int = 1, back: bool = False) -> mx.array:
    """Rotate the last channels of x (…, T, D) at positions first, first + every, …; ``back``: inverse."""
    tail = x[..., -rope.dims :].astype(mx.float32)
    periods = -rope._freqs if back else rope._freqs
    tail = mx.fast.rope(
        tail, rope.dims, traditional=True, base=None, scale=float(every), offset=first // every, freqs=periods
    )
    if rope.attention != 1.0:
        tail = tail * rope.attention
    return mx.concatenate([x[..., : -rope.dims], tail.astype(x.dtype)], axis=-1)


class Compressor(nn.Module):
    """Compresses each ``ratio`` tokens to an entry: a mean of values with channel-wise weights.

    overlapping: an entry also includes the previous group, by separate values.
    """

    def __init__(self, args: ModelArgs, ratio: int, size: int, *, overlapping: bool) -> None:
        super().__init__()
        width = 2 * size if overlapping else size
        self.kv_proj = nn.Linear(args.hidden_size, width, bias=False)
        self.gate_proj = nn.Linear(args.hidden_size, width, bias=False)
        self.position_bias = mx.zeros((ratio, width))
        self.kv_norm = nn.RMSNorm(size, eps=args.rms_norm_eps)
        self._ratio, self._size, self._overlapping = ratio, size, overlapping

    def add(self, x: mx.array, cache: CompressedCache, number: int, rope: ScaledRoPE) -> None:
        """Add tokens x (B, N, hidden), and append entries of completed groups."""
        closed = cache.close(number, self.kv_proj(x), self.gate_proj(x))
        if closed is None:
            return
        values, gates = (mx.unflatten(rows, 1, (-1, self._ratio)) for rows in closed)  # (B, G, ratio, ·)
        gates = gates + self.position_bias
        if self._overlapping:
            values, gates = self._with_group_before(values), self._with_group_before(gates)
        weights = mx.softmax(gates.astype(mx.float32), axis=2).astype(values.dtype)
        entries = self.kv_norm((values * weights).sum(axis=2))
        cache.append(number, rotate(entries, rope, cache.groups * self._ratio, every=self._ratio))

    def _with_group_before(self, rows: mx.array) -> mx.array:
        """rows (B, 1 + G, ratio, 2 size) → (B, G, 2 ratio, size): previous group's first half, own second half."""
        return mx.concatenate([rows[:, :-1, :, : self._size], rows[:, 1:, :, self._size :]], axis=2)


class Indexer(nn.Module):
    """Selects entries for each query by separately compressed keys."""

    def __init__(self, args: ModelArgs, ratio: int) -> None:
        super().__init__()
        self.compressor = Compressor(args, ratio, args.index_head_dim, overlapping=True)
        self.q_b_proj = nn.Linear(args.q_lora_rank, args.index_n_heads * args.index_head_dim, bias=False)
        self.weights_proj = nn.Linear(args.hidden_size, args.index_n_heads, bias=False)
        self.topk = args.index_topk
        self._heads, self._size, self._ratio = args.index_n_heads, args.index_head_dim, ratio

    def __call__(self, x: mx.array, latent: mx.array, keys: mx.array, first: int, rope: ScaledRoPE) -> mx.array:
        """Return chosen entries (B, N, topk) of queries from position ``first``, −1 for none.

        x (B, N, hidden); latent (B, N, q_lora_rank); keys (B, E, size), E > ``topk``.
        """
        batch, count, _ = x.shape
        queries = mx.unflatten(self.q_b_proj(latent), -1, (self._heads, self._size)).swapaxes(1, 2)
        queries = rotate(queries, rope, first).swapaxes(1, 2)  # (B, N, H, size)
        weights = self.weights_proj(x).astype(mx.float32) * (self._heads * self._size) ** -0.5
        keys = keys[:, None].swapaxes(-1, -2)
        closed = (first + 1 + mx.arange(count)[:, None]) // self._ratio  # entries that each query may see
        chosen = []
        for part in query_blocks(count, 4 * batch * self._heads * keys.shape[-1]):
            scores = mx.maximum((queries[:, part] @ keys).astype(mx.float32), 0.0)
            scores = (scores * weights[:, part, :, None]).sum(axis=2)  # (B, n, E)
            scores = mx.where(mx.arange(keys.shape[-1]) < closed[part], scores, -mx.inf)
            best = mx.argpartition(-scores, self.topk - 1, axis=-1)[..., : self.topk].astype(mx.int32)
            chosen.append(mx.where(best < closed[part], best, -1))
        return mx.concatenate(chosen, axis=1)


class Attention(nn.Module):
    """Multi-head queries over shared key-value rows: a window, and compressed entries."""

    def __init__(self, args: ModelArgs, layer: int) -> None:
        super().__init__()
        wide, ratio = args.num_attention_heads * args.head_dim, args.ratio(layer)
        self.q_a_proj = nn.Linear(args.hidden_size, args.q_lora_rank, bias=False)
        self.q_a_norm = nn.RMSNorm(args.q_lora_rank, eps=args.rms_norm_eps)
        self.q_b_proj = nn.Linear(args.q_lora_rank, wide, bias=False)
        self.kv_proj = nn.Linear(args.hidden_size, args.head_dim, bias=False)
        self.kv_norm = nn.RMSNorm(args.head_dim, eps=args.rms_norm_eps)
        self.o_a_proj = SwitchLinear(wide // args.o_groups, args.o_lora_rank, args.o_groups, bias=False)
        self.o_b_proj = nn.Linear(args.o_groups * args.o_lora_rank, args.hidden_size, bias=False)
        self.sinks = mx.zeros((args.num_attention_heads,))
        sparse = args.layer_types[layer] == SPARSE
        if ratio:
            self.compressor = Compressor(args, ratio, args.head_dim, overlapping=sparse)
        if sparse:
            self.indexer = Indexer(args, ratio)
        self._rope = args.rope(compressed=bool(ratio))
        self._heads, self._size, self._groups = args.num_attention_heads, args.head_dim, args.o_groups
        self._eps, self._window, self._ratio = args.rms_norm_eps, args.sliding_window, ratio

    def make_cache(self) -> CompressedCache:
        overlapping = "indexer" in self
        reach = self._ratio if overlapping else 0
        return CompressedCache(self._window, self._ratio, reach, 2 if overlapping else int(self._ratio > 0))

    def __call__(self, x: mx.array, cache: CompressedCache) -> mx.array:
        """x (B, N, hidden) → the same shape; advances the cache by N tokens."""
        count, first = x.shape[1], cache.offset
        latent = self.q_a_norm(self.q_a_proj(x))
        queries = mx.unflatten(self.q_b_proj(latent), -1, (self._heads, self._size)).swapaxes(1, 2)  # (B, H, N, D)
        queries = rotate(mx.fast.rms_norm(queries, None, self._eps), self._rope, first)
        rows = cache.slide(rotate(self.kv_norm(self.kv_proj(x)), self._rope, first))
        entries, chosen = None, None
        if self._ratio:
            self.compressor.add(x, cache, 0, self._rope)
            entries = cache.read(0, count)
        if "indexer" in self:
            self.indexer.compressor.add(x, cache, 1, self._rope)
            keys = cache.read(1, count)
            if keys is not None and keys.shape[1] > self.indexer.topk:  # else a query attends to all that it may see
                chosen = self.indexer(x, latent, keys, first, self._rope)
        if chosen is None:
            out = self._attend(queries, rows, entries, first)
        else:
            assert entries is not None
            out = self._attend_chosen(queries, rows, entries, chosen)
        cache.advance(count)
        out = rotate(out.astype(x.dtype), self._rope, first, back=True)
        groups = mx.unflatten(out.swapaxes(1, 2).flatten(2), -1, (self._groups, 1, -1))  # (B, N, groups, 1, ·)
        indices = mx.broadcast_to(mx.arange(self._groups), groups.shape[:3])
        joined: mx.array = self.o_b_proj(self.o_a_proj(groups, indices).flatten(2))
        return joined

    def _attend(self, queries: mx.array, rows: mx.array, entries: mx.array | None, first: int) -> mx.array:
        """queries (B, H, N, D) from position ``first``, over rows (B, T, D) with their own last, entries (B, E, D)."""
        count = queries.shape[2]
        mask = None if count == 1 else self._sees_rows(count, rows.shape[1])
        if entries is not None:
            if mask is not None:
                closed = (first + 1 + mx.arange(count)[:, None]) // self._ratio
                mask = mx.concatenate([mask, mx.arange(entries.shape[1])[None] < closed], axis=1)
            rows = mx.concatenate([rows, entries], axis=1)
        return self._weigh(queries, rows[:, None], mask)

    def _attend_chosen(self, queries: mx.array, rows: mx.array, entries: mx.array, chosen: mx.array) -> mx.array:
        """queries (B, H, N, D) over rows (B, T, D), their own last, and chosen (B, N, k) entries, −1 for none."""
        batch, heads, count, size = queries.shape
        width = min(self._window, rows.shape[1])
        at = rows.shape[1] - count + mx.arange(count)[:, None] - mx.arange(width)[None]  # (N, W), the own token first
        near = mx.broadcast_to(mx.where(at < 0, -1, at), (batch, count, width))
        outs = []
        for part in query_blocks(count, 4 * batch * size * (width + chosen.shape[-1])):
            picks = (near[:, part], chosen[:, part])
            gathered = mx.concatenate([_gather(rows, picks[0]), _gather(entries, picks[1])], axis=2)  # (B, n, W + k, D)
            each = queries[:, :, part].swapaxes(1, 2).reshape(-1, heads, 1, size)  # each query is a sequence of its own
            seen = (mx.concatenate(list(picks), axis=-1) >= 0).reshape(each.shape[0], 1, 1, -1)
            out = self._weigh(each, gathered.reshape(each.shape[0], 1, -1, size), seen)
            outs.append(out.reshape(batch, -1, heads, size).swapaxes(1, 2))
        return mx.concatenate(outs, axis=2)

    def _sees_rows(self, count: int, held: int) -> mx.array:
        """Return the mask (N, T) of ``held`` rows for the last ``count`` tokens."""
        behind = held - count + mx.arange(count)[:, None] - mx.arange(held)[None]
        return (behind >= 0) & (behind < self._window)

    def _weigh(self, queries: mx.array, rows: mx.array, mask: mx.array | None) -> mx.array:
        """queries (B, H, N, D), rows (B, 1, T, D) → (B, H, N, D), float32."""
        rows = rows.astype(mx.float32)  # of heads so wide MLX rounds the scores to the type it is given
        return mx.fast.scaled_dot_product_attention(
            queries.astype(mx.float32),
            rows,
            rows,
            scale=self._size**-0.5,
            mask=mask,
            sinks=self.sinks.astype(mx.float32),
        )


def query_blocks(count: int, bytes_each: int) -> Iterator[slice]:
    size = max(1, BLOCK_BYTES // max(bytes_each, 1))
    for begin in range(0, count, size):
        yield slice(begin, min(begin + size, count))


def _gather(rows: mx.array, indices: mx.array) -> mx.array:
    """rows (B, T, D), indices (B, n, k) → (B, n, k, D); any row for −1."""
    batch, held, size = rows.shape
    first = (mx.arange(batch) * held)[:, None, None]  # of each sequence, where all lie in one
    return rows.reshape(-1, size)[mx.maximum(indices, 0) + first]


class Router(nn.Module):
    def __init__(self, args: ModelArgs, *, hashed: bool) -> None:
        super().__init__()
        self.weight = mx.zeros((args.n_routed_experts, args.hidden_size))
        if hashed:
            self.tid2eid = mx.zeros((args.vocab_size, args.num_experts_per_tok), dtype=mx.int64)
        else:
            self.e_score_correction_bias = mx.zeros((args.n_routed_experts,))
        self._score, self._k, self._scale = (
            SCORES[args.scoring_func],
            args.num_experts_per_tok,
            args.routed_scaling_factor,
        )

    def __call__(self, x: mx.array, ids: mx.array) -> tuple[mx.array, mx.array]:
        """x (T, hidden), ids (T,) → experts and weights, (T, k) each."""
        scores = self._score(x.astype(mx.float32) @ self.weight.astype(mx.float32).T)
        if "tid2eid" in self:
            chosen = self.tid2eid[ids].astype(mx.int32)
        else:
            chosen = mx.argpartition(-(scores + self.e_score_correction_bias), self._k - 1, axis=-1)[..., : self._k]
        weights = mx.take_along_axis(scores, chosen, axis=-1)
        return chosen, weights / (weights.sum(axis=-1, keepdims=True) + 1e-20) * self._scale


class Mixture(nn.Module):
    def __init__(self, args: ModelArgs, layer: int) -> None:
        super().__init__()
        self.gate = Router(args, hashed=args.mlp_layer_types[layer] == "hash_moe")
        self.experts = Experts(args)
        self.shared_experts = SharedMLP(args)

    def __call__(self, x: mx.array, ids: mx.array) -> mx.array:
        """x (B, N, hidden), ids (B, N) → (B, N, hidden)."""
        flat = x.reshape(-1, x.shape[-1])
        chosen, weights = self.gate(flat, ids.reshape(-1))
        out = self.experts(flat, chosen, weights) + self.shared_experts(flat).astype(mx.float32)
        mixed: mx.array = out.reshape(x.shape).astype(x.dtype)
        return mixed


class DecoderLayer(nn.Module):
    def __init__(self, args: ModelArgs, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(args, layer)
        self.mlp = Mixture(args, layer)
        self.input_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.attn_hc = HyperConnection(args)
        self.ffn_hc = HyperConnection(args)

    def __call__(self, streams: mx.array, ids: mx.array, cache: CompressedCache) -> mx.array:
        """streams (B, N, hc_mult, hidden) → the same shape."""
        pre, post, mix = self.attn_hc(streams)
        out = self.self_attn(self.input_layernorm(_join(streams, pre)), cache)
        streams = _spread(out, streams, post, mix)
        pre, post, mix = self.ffn_hc(streams)
        out = self.mlp(self.post_attention_layernorm(_join(streams, pre)), ids)
        return _spread(out, streams, post, mix)


def _join(streams: mx.array, weights: mx.array) -> mx.array:
    """streams (B, N, S, hidden), weights (B, N, S) → (B, N, hidden)."""
    return (weights[..., None] * streams.astype(mx.float32)).sum(axis=2).astype(streams.dtype)


def _spread(out: mx.array, streams: mx.array, post: mx.array, mix: mx.array) -> mx.array:
    """Mix streams by mix (B, N, S, S), plus out (B, N, hidden) weighted by post (B, N, S)."""
    mixed = mix.swapaxes(-1, -2) @ streams.astype(mx.float32)
    return (post[..., None] * out.astype(mx.float32)[..., None, :] + mixed).astype(streams.dtype)


class StreamHead(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.hc_fn = mx.zeros((args.hc_mult, args.hc_mult * args.hidden_size))
        self.hc_base = mx.zeros((args.hc_mult,))
        self.hc_scale = mx.ones((1,))
        self._norm_eps, self._eps = args.rms_norm_eps, args.hc_eps

    def __call__(self, streams: mx.array) -> mx.array:
        """streams (B, N, S, hidden) → (B, N, hidden)."""
        flat = mx.fast.rms_norm(streams.flatten(2).astype(mx.float32), None, self._norm_eps)
        weights = mx.sigmoid(flat @ self.hc_fn.T * self.hc_scale + self.hc_base) + self._eps
        return _join(streams, weights)


class Layers(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [DecoderLayer(args, index) for index in range(args.num_hidden_layers)]
        self.hc_head = StreamHead(args)
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self._streams = args.hc_mult

    def __call__(self, ids: mx.array, cache: list[CompressedCache]) -> mx.array:
        """ids (B, N) → (B, N, hidden)."""
        x = self.embed_tokens(ids)
        streams = mx.broadcast_to(x[:, :, None], (*x.shape[:2], self._streams, x.shape[-1]))
        for layer, own in zip(self.layers, cache, strict=True):
            streams = layer(streams, ids, own)
        joined: mx.array = self.norm(self.hc_head(streams))
        return joined


class Model(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args, self.model_type = args, args.model_type
        self.model = Layers(args)
        self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def __call__(self, inputs: mx.array, cache: list[CompressedCache] | None = None) -> mx.array:
        """Token ids (B, N) → logits (B, N, vocabulary)."""
        logits: mx.array = self.lm_head(self.model(inputs, cache or self.make_cache()))
        return logits

    @property
    def layers(self) -> list[DecoderLayer]:
        layers: list[DecoderLayer] = self.model.layers
        return layers

    def make_cache(self) -> list[CompressedCache]:
        return [layer.self_attn.make_cache() for layer in self.layers]

    @property
    def quant_predicate(self) -> Callable[[str, nn.Module], bool | dict[str, int]]:
        """Quantization per module: those that make and select entries, published unpacked, get 8 bits."""

        def predicate(path: str, module: nn.Module) -> bool | dict[str, int]:
            if "compressor." in path or path.endswith("weights_proj"):
                return {"group_size": 64, "bits": 8}
            return "to_quantized" in dir(module)

        return predicate

    @property
    def cast_predicate(self) -> Callable[[str], bool]:
        """Whether a tensor may be cast: streams, gates, experts' and sinks' stay float32."""
        kept = re.compile(r"_hc\.|hc_head\.|\.sinks$|\.position_bias$|\.e_score_correction_bias$")
        return lambda name: kept.search(name) is None

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        return rename_weights(weights, self.args.o_groups)


MTP = re.compile(r"^(model\.)?mtp\.")  # the heads that predict further tokens, which are left out
EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.w([123])\.(\w+)$")
EXPERT_LAYERS = {"1": "gate_proj", "2": "down_proj", "3": "up_proj"}
RENAMED = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^(model\.)?embed\.", "model.embed_tokens."),
        (r"^(model\.)?head\.", "lm_head."),
        (r"^(model\.)?hc_head(?:\.hc)?_", "model.hc_head.hc_"),
        (r"^(?=layers\.|norm\.)", "model."),
        (r"\.attn\.", ".self_attn."),
        (r"\.ffn\.", ".mlp."),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.hc_(attn|ffn)_", r".\1_hc."),
        (r"\.attn_sink$", ".sinks"),
        (r"\.compressor\.indexer\.(?:scorer\.)?(?=weights_proj|q_b_proj)", ".indexer."),
        (r"\.compressor\.indexer\.", ".indexer.compressor."),
        (r"(?<=\.self_attn|compressor)\.norm\.", ".kv_norm."),
        (r"\.ape$", ".position_bias"),
        (r"\.wq_([ab])\.", r".q_\1_proj."),
        (r"\.wo_([ab])\.", r".o_\1_proj."),
        (r"\.wkv\.", ".kv_proj."),
        (r"\.wgate\.", ".gate_proj."),
        (r"\.q_norm\.", ".q_a_norm."),
        (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
        (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
        (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
        (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
    )
)


# An nvfp4 tensor's own scale is 1 where its largest number is this; MLX keeps the largest number itself.
SCALES_2_TO_GLOBAL = 448.0 * 6.0
TILE = 128  # rows and columns of the fp8 blocks that share a scale


def rename_weights(weights: dict[str, mx.array], groups: int) -> dict[str, mx.array]:
    found: dict[str, mx.array] = {}
    stacks: dict[str, dict[int, mx.array]] = {}
    for name, value in repack(weights).items():
        if MTP.match(name):
            continue
        ours = name
        for pattern, other in RENAMED:
            ours = pattern.sub(other, ours)
        if (expert := EXPERT.match(ours)) is not None:
            stack = f"{expert[1]}.switch_mlp.{EXPERT_LAYERS[expert[3]]}.{expert[4]}"
            stacks.setdefault(stack, {})[int(expert[2])] = value
        elif ours.endswith(".experts.gate_up_proj"):
            stem = f"{ours.removesuffix('gate_up_proj')}switch_mlp"
            found[f"{stem}.gate_proj.weight"], found[f"{stem}.up_proj.weight"] = mx.split(value, 2, axis=1)
        elif ours.endswith(".experts.down_proj"):
            found[f"{ours.removesuffix('down_proj')}switch_mlp.down_proj.weight"] = value
        elif ".o_a_proj." in ours and value.ndim == 2:
            found[ours] = value.reshape(groups, -1, value.shape[-1])
        else:
            found[ours] = value
    for name, parts in stacks.items():
        if sorted(parts) != list(range(len(parts))):
            raise ValueError(f"some experts of {name} are missing")
        found[name] = mx.stack([parts[index] for index in range(len(parts))])
    return found


def repack(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Repack published fp8 and fp4 for MLX.

    Power-of-two scales (e8m0) give mxfp8 and mxfp4, e4m3 with a tensor scale nvfp4; others are multiplied to bfloat16.
    """
    found = dict(weights)
    for name, value in weights.items():
        stem, _, kind = name.rpartition(".")
        if kind == "scale" and f"{stem}.weight" in weights:
            numbers = weights[f"{stem}.weight"]
            del found[name]
            if value.dtype == mx.uint8:
                found[f"{stem}.weight"], found[f"{stem}.scales"] = numbers.view(mx.uint32), _row_scales(numbers, value)
            else:
                found[f"{stem}.weight"] = times_scales(mx.from_fp8(numbers, mx.bfloat16), value, (TILE, TILE))
        elif kind == "weight_scale_2":
            numbers, scales = (found.pop(f"{stem}.{each}") for each in ("weight", "weight_scale"))
            found[f"{stem}.weight"], found[f"{stem}.scales"] = numbers.view(mx.uint32), scales
            found[f"{stem}.global_scale"] = found.pop(name).astype(mx.float32).reshape(()) * SCALES_2_TO_GLOBAL
        elif kind == "input_scale":
            del found[name]
    return found


def _row_scales(numbers: mx.array, scales: mx.array) -> mx.array:
    if scales.shape[0] == numbers.shape[0]:
        return scales
    return mx.repeat(mx.repeat(scales, TILE, axis=0)[: numbers.shape[0]], TILE // 32, axis=1)[
        :, : numbers.shape[1] // 32
    ]
