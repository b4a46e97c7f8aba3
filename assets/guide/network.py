"""A small Llama in PyTorch, for training only; its weights carry the names that Hugging Face's checkpoints use."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """The model's dimensions, by their names in config.json."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 768
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = 4096

    def config(self, eos_token_id: int, pad_token_id: int) -> dict[str, Any]:
        """Return what goes into config.json."""
        fixed = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        }
        return {**fixed, **asdict(self), "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}


ROUTE_AFTER = 4
"""The layer after which, in training, the assistant mark must tell which answer is coming."""

GROUP, LEVELS = 64, 15
"""The shipped format: 4 bits, groups of 64."""


class Linear(nn.Linear):
    """A layer that can train as if its weights were packed already: forward sees 4 bits, backward full precision."""

    packed = False

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) → (..., out)."""
        weight = self.weight
        if self.packed:
            # Straight-through estimator (Bengio et al. 2013).
            weight = weight + (as_packed(weight.detach()) - weight.detach())
        return F.linear(x, weight)


def as_packed(weight: Tensor) -> Tensor:
    """Return what MLX's affine 4-bit quantization, group 64, makes of ``weight`` (out, in)."""
    groups = weight.view(-1, GROUP)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    downward = low.abs() > high.abs()
    scale = ((high - low) / LEVELS).clamp_min(1e-7)
    scale = torch.where(downward, scale, -scale)
    edge = torch.where(downward, low, high)
    steps = (edge / scale).round()
    scale = torch.where(steps != 0, edge / steps, scale)
    bias = torch.where(steps != 0, edge, torch.zeros_like(edge))
    return (((groups - bias) / scale).round().clamp(0, LEVELS) * scale + bias).view_as(weight)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = Linear(shape.hidden_size, width, bias=False)
        self.k_proj = Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = Linear(width, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (B, T, D) → (B, T, D)."""
        batch, length, _ = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, length, -1, self.shape.head_dim).transpose(1, 2)  # (B, H, T, head_dim)

        q, k = rotate(heads(self.q_proj(x)), cos, sin), rotate(heads(self.k_proj(x)), cos, sin)
        v = heads(self.v_proj(x))
        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021), halves rotated as in Hugging Face's Llama. x (B, H, T, D), cos and sin (T, D)."""
    a, b = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-b, a), dim=-1) * sin.to(x.dtype)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, D) → (B, T, D)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP, each on a normalised residual; ``dropout`` on what they add."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (B, T, D) → (B, T, D)."""
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    """Embedding, layers and final norm: ``model.`` in a checkpoint."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)


class Llama(nn.Module):
    """The whole model, its head tied to the embedding."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.model = Decoder(shape, dropout)
        self.dropout = nn.Dropout(dropout)
        frequencies = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(shape.max_position_embeddings), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.apply(_initialise)

    def hidden(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids (B, T) → two of (B, T, D): the end, normalised and ready for the head, and the state after ROUTE_AFTER layers."""
        length = ids.shape[1]
        cos, sin = self.get_buffer("cos")[:length], self.get_buffer("sin")[:length]
        x = self.dropout(self.model.embed_tokens(ids))
        midway = x
        for index, layer in enumerate(self.model.layers, 1):
            x = layer(x, cos, sin)
            midway = x if index == ROUTE_AFTER else midway
        return self.model.norm(x), midway

    def head(self, hidden: Tensor) -> Tensor:
        """hidden (..., D) → logits (..., V)."""
        return F.linear(hidden, self.model.embed_tokens.weight)


class Router(nn.Module):
    """Names the answer that is about to begin, from the state at the assistant mark. Training only: it is not saved.

    Without it the model learns the answers by heart long before it learns which question asks for which.
    """

    def __init__(self, shape: Shape, answers: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.out = nn.Linear(shape.hidden_size, answers)

    def forward(self, state: Tensor) -> Tensor:
        """state (N, D) → logits (N, answers)."""
        return self.out(self.norm(state))


def train_packed(model: nn.Module) -> None:
    """From now on, let every linear layer see its weights as they will ship."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.packed = True


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        std = 0.02 if isinstance(module, nn.Embedding) else module.weight.shape[1] ** -0.5 * 0.7
        nn.init.normal_(module.weight, std=std)
