"""VaultGemma: Gemma 2 without post-norms, trained with differential privacy."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import base, gemma2
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.models.rope_utils import initialize_rope

from ._layers import GatedFeedForward


@dataclass
class ModelArgs(gemma2.ModelArgs):
    query_pre_attn_scalar: float = 256
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0
    hidden_activation: str = "gelu_pytorch_tanh"
    max_position_embeddings: int | None = None
    rope_scaling: dict[str, Any] | None = None
    sliding_window: int = 4096
    layer_types: list[str] = field(default_factory=list)


class Attention(gemma2.Attention):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        self.rope = initialize_rope(
            args.head_dim, args.rope_theta, False, args.rope_scaling, args.max_position_embeddings
        )

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """x (B, T, D) → the same shape."""
        if self.attn_logit_softcapping is not None:
            capped: mx.array = super().__call__(x, mask, cache)
            return capped
        queries, keys, values = (
            mx.unflatten(project(x), -1, (-1, self.head_dim)).swapaxes(1, 2)  # (B, H, T, D/H)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        offset = 0 if cache is None else cache.offset
        queries, keys = self.rope(queries, offset=offset), self.rope(keys, offset=offset)
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
        out = base.scaled_dot_product_attention(queries, keys, values, cache=cache, scale=self.scale, mask=mask)
        attended: mx.array = self.o_proj(mx.flatten(out.swapaxes(1, 2), -2))
        return attended


class Body(gemma2.GemmaModel):
    """Token ids (B, T) → (B, T, D)."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        for layer in self.layers:
            layer.self_attn = Attention(args)
            layer.mlp = GatedFeedForward(args.hidden_size, args.intermediate_size, args.hidden_activation)
            layer.post_attention_layernorm = layer.post_feedforward_layernorm = nn.Identity()

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        kinds, window = self.args.layer_types, self.args.sliding_window
        x = self.embed_tokens(inputs) * self.args.hidden_size**0.5
        caches = cache or [None] * len(self.layers)
        masks = {
            kind: base.create_attention_mask(
                x,
                caches[kinds.index(kind)],
                window_size=window if kind == "sliding_attention" else None,
                return_array=True,
            )
            for kind in dict.fromkeys(kinds)
        }
        for layer, kind, each in zip(self.layers, kinds, caches, strict=True):
            x = layer(x, masks[kind], each)
        normed: mx.array = self.norm(x)
        return normed


class Model(nn.Module):
    """Token ids (B, T) → logits (B, T, V)."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.model_type, self.args = args.model_type, args
        self.model = Body(args)

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        logits: mx.array = self.model.embed_tokens.as_linear(self.model(inputs, cache))
        cap = self.args.final_logit_softcapping
        return logits if cap is None else mx.tanh(logits / cap) * cap

    @property
    def layers(self) -> list[nn.Module]:
        layers: list[nn.Module] = self.model.layers
        return layers

    def make_cache(self) -> list[Any]:
        slides = (kind == "sliding_attention" for kind in self.args.layer_types)
        return [RotatingKVCache(max_size=self.args.sliding_window) if each else KVCache() for each in slides]
