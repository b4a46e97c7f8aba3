"""Arcee's AFM: a Llama whose ungated feed-forward uses squared ReLU."""

from dataclasses import dataclass

import mlx.core as mx
from mlx import nn
from mlx_lm.models import llama

from ._layers import activation


@dataclass
class ModelArgs(llama.ModelArgs):
    hidden_act: str = "relu2"
    tie_word_embeddings: bool = False


class FeedForward(nn.Module):
    """down(activation(up x))."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.up_proj = nn.Linear(args.hidden_size, args.intermediate_size, bias=args.mlp_bias)
        self.down_proj = nn.Linear(args.intermediate_size, args.hidden_size, bias=args.mlp_bias)
        self._activation = activation(args.hidden_act)

    def __call__(self, x: mx.array) -> mx.array:
        """x (B, T, D) → the same shape."""
        out: mx.array = self.down_proj(self._activation(self.up_proj(x)))
        return out


class Model(llama.Model):
    """Token ids (B, T) → logits (B, T, V)."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        for layer in self.layers:
            layer.mlp = FeedForward(args)
