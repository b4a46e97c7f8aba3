"""Replacements for mlx-lm layers that don't follow the config (config_rules.py)."""

# Frequencies follow transformers' modeling_rope_utils, in double precision. MLX's "frequency" is a period
# here.

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx import nn

Config = dict[str, Any]


class ScaledRoPE(nn.Module):
    """Rotary embedding with one period per pair of dimensions. attention: factor on the rotated dimensions."""

    def __init__(self, periods: list[float], *, traditional: bool, attention: float = 1.0) -> None:
        super().__init__()
        self.dims = 2 * len(periods)
        self.traditional, self.attention = traditional, attention
        self._freqs = mx.array(periods, dtype=mx.float32)  # (dims/2,); underscored: not a parameter

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        """x (B, H, T, D) → the same, rotated to positions offset … offset + T − 1."""
        if self.attention != 1.0:
            x = mx.concatenate([x[..., : self.dims] * self.attention, x[..., self.dims :]], axis=-1)
        return mx.fast.rope(
            x, self.dims, traditional=self.traditional, base=None, scale=1.0, offset=offset, freqs=self._freqs
        )


class LongRoPE(ScaledRoPE):
    """LongRoPE (Ding et al., 2024): short factors for the pretraining context, long ones beyond."""

    # One set from the first token to the last: keys rotated by the other wouldn't fit.

    def __init__(self, short: ScaledRoPE, long: ScaledRoPE) -> None:
        super().__init__([1.0] * (long.dims // 2), traditional=long.traditional)
        self._sets = (short, long)
        self.choose(long=True)

    def choose(self, *, long: bool) -> None:
        chosen = self._sets[long]
        self.attention, self._freqs = chosen.attention, chosen._freqs


class FeedForward(nn.Module):
    """down(GELU(up x)), or down(GELU(gate x) · up x), reusing another block's layers and names."""

    def __init__(
        self, block: nn.Module, names: tuple[str, str, str | None], gelu: Callable[[mx.array], mx.array]
    ) -> None:
        super().__init__()
        self._names, self._gelu = names, gelu
        for name in filter(None, names):
            self[name] = block[name]

    def __call__(self, x: mx.array) -> mx.array:
        """x (B, T, D) → the same shape."""
        up, down, gate = self._names
        hidden = self._gelu(self[gate](x)) * self[up](x) if gate else self._gelu(self[up](x))
        out: mx.array = self[down](hidden)
        return out


class GroupedNorm(nn.Module):
    """Gated RMSNorm over ``groups`` equal parts of the width (Mamba 2)."""

    def __init__(self, norm: nn.Module, groups: int) -> None:
        super().__init__()
        self.weight, self.eps, self._groups = norm.weight, norm.eps, groups

    def __call__(self, x: mx.array, gate: mx.array | None = None) -> mx.array:
        """x, gate (B, T, D) → (B, T, D)."""
        if gate is not None:
            x = nn.silu(gate) * x
        parts = mx.unflatten(x, -1, (self._groups, -1))
        normed: mx.array = self.weight * mx.flatten(mx.fast.rms_norm(parts, None, self.eps), -2)
        return normed


class BiasedRouting(nn.Module):
    """ERNIE 4.5's mixture: a bias selects experts but doesn't weight them."""

    def __init__(self, block: nn.Module, experts: int) -> None:
        super().__init__()
        self.gate, self.switch_mlp, self.shared_experts = block.gate, block.switch_mlp, block.shared_experts
        self._act, self._k = block.gate_act, block.k
        self.moe_statics = Statics(experts)

    def __call__(self, x: mx.array) -> mx.array:
        """x (B, T, D) → the same shape."""
        scores = self._act(self.gate(x).astype(mx.float32))  # (B, T, E)
        chosen = _largest(scores + self.moe_statics.e_score_correction_bias.reshape(-1), self._k)
        weights = mx.take_along_axis(scores, chosen, axis=-1)
        weights = weights / mx.maximum(weights.sum(axis=-1, keepdims=True), 1e-12)
        out = _weighted(self.switch_mlp(x, chosen), weights)
        return out if self.shared_experts is None else out + self.shared_experts(x)


class Statics(nn.Module):
    """ERNIE 4.5's expert statistics: the selection bias."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.e_score_correction_bias = mx.zeros((1, experts))


class ShareOfAll(nn.Module):
    """Jamba's mixture: expert weights are softmax shares over all experts."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.router, self.switch_mlp, self._k = block.router, block.switch_mlp, block.num_experts_per_tok

    def __call__(self, x: mx.array) -> mx.array:
        """x (B, T, D) → the same shape."""
        shares = mx.softmax(self.router(x), axis=-1, precise=True)  # (B, T, E)
        chosen = _largest(shares, self._k)
        return _weighted(self.switch_mlp(x, chosen), mx.take_along_axis(shares, chosen, axis=-1))


def _largest(scores: mx.array, k: int) -> mx.array:
    """scores (B, T, E) → the indices of the k largest, (B, T, k), in no order."""
    return mx.stop_gradient(mx.argpartition(-scores, kth=k - 1, axis=-1)[..., :k])


def _weighted(values: mx.array, weights: mx.array) -> mx.array:
    """values (B, T, k, D), weights (B, T, k) → (B, T, D)."""
    return (values * weights[..., None]).sum(axis=-2).astype(values.dtype)


class TiedHead(nn.Module):
    """An output head tied to another module's current embedding."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self._owner = (owner,)  # in a tuple it is not a submodule: the weights are one parameter

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = self._owner[0].embed_tokens.as_linear(x)
        return out


class ClippedAttention(nn.Module):
    """OLMo 1's attention: a Llama's with queries, keys and values clipped to ±limit."""

    def __init__(self, attention: nn.Module, limit: float) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "rope"):
            self[name] = attention[name]
        self.n_heads, self.n_kv_heads, self.scale = attention.n_heads, attention.n_kv_heads, attention.scale
        self._limit = limit

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """x (B, T, D) → the same shape."""
        from mlx_lm.models import llama

        def heads(name: str, count: int) -> mx.array:
            cut = mx.clip(self[name](x), -self._limit, self._limit)
            return mx.unflatten(cut, -1, (count, -1)).swapaxes(1, 2)  # (B, H, T, D/H)

        offset = 0 if cache is None else cache.offset
        queries = self.rope(heads("q_proj", self.n_heads), offset=offset)
        keys, values = self.rope(heads("k_proj", self.n_kv_heads), offset=offset), heads("v_proj", self.n_kv_heads)
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
        # Looked up at each call: it is the seam that packed caches go through.
        out = llama.scaled_dot_product_attention(queries, keys, values, cache=cache, scale=self.scale, mask=mask)
        attended: mx.array = self.o_proj(mx.flatten(out.swapaxes(1, 2), -2))
        return attended


class Choice:
    """The last indices (B, 1, T, k) chosen by an indexer, or None for all keys. Copies of a layer share it."""

    indices: mx.array | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Choice":
        return self


class SharedIndexer(nn.Module):
    """Reuses the choice of an earlier layer's indexer in the same pass."""

    def __init__(self, chosen: Choice) -> None:
        super().__init__()
        self._chosen = chosen

    def __call__(self, x: mx.array, latent: mx.array, mask: Any, cache: Any = None) -> mx.array | None:  # noqa: ARG002
        """x (B, T, D) → key indices or None. The index-key cache only counts tokens."""
        if cache is not None:
            nothing = mx.zeros((x.shape[0], 1, x.shape[1], 1), x.dtype)
            cache.update_and_fetch(nothing, nothing)
        return self._chosen.indices


def remembering(indexer: nn.Module, chosen: Choice) -> nn.Module:
    """Return an equivalent indexer that records its choice in ``chosen``."""
    kind = type(indexer)

    class Remembering(kind):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> mx.array | None:
            chosen.indices = super().__call__(*args, **kwargs)
            return chosen.indices

    made = Remembering.__new__(Remembering)
    made.__dict__.update(indexer.__dict__)
    dict.update(made, indexer)  # its own update() is for parameters
    return made


def yarn(dims: int, traditional: bool, config: Config) -> ScaledRoPE:
    """YaRN with ``truncate`` and ``attention_factor``, which mlx-lm's ignores."""
    scaling, base = config["rope_scaling"], float(config["rope_theta"])
    factor, pretrained = float(scaling["factor"]), scaling["original_max_position_embeddings"]

    def boundary(rotations: float) -> float:
        # The dimension that turns so many times within the pretraining context.
        return float(dims * math.log(pretrained / (rotations * 2 * math.pi)) / (2 * math.log(base)))

    low, high = boundary(scaling.get("beta_fast") or 32), boundary(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001
    periods = []
    for i in range(dims // 2):
        period = base ** (2 * i / dims)
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)  # 0: keep the frequency, 1: divide it by the factor
        periods.append(1 / (ramp / (factor * period) + (1 - ramp) / period))
    return ScaledRoPE(periods, traditional=traditional, attention=_yarn_attention(scaling, factor))


def _yarn_attention(scaling: Config, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    # A factor of DeepSeek's Qwen3 that transformers does not know, and vLLM and SGLang multiply by.
    more = float(scaling.get("attn_factor") or 1.0)
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"]) * more
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return more * mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return more * mscale(1.0)


def longrope(dims: int, traditional: bool, config: Config) -> LongRoPE:
    scaling, base = config["rope_scaling"], float(config["rope_theta"])
    pretrained = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or config["max_position_embeddings"] / pretrained
    usual = scaling.get("attention_factor")
    if usual is None:
        usual = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(pretrained))

    def rope(name: str) -> ScaledRoPE:
        plain = (base ** (2 * i / dims) for i in range(dims // 2))
        periods = [period * stretch for period, stretch in zip(plain, scaling[f"{name}_factor"], strict=True)]
        attention = scaling.get(f"{name}_mscale") or usual  # Phi-3.5-MoE has one for each set
        return ScaledRoPE(periods, traditional=traditional, attention=float(attention))

    return LongRoPE(rope("short"), rope("long"))
