"""What Gemma 4 sees with: a transformer whose angles lie in the plane, or, in the unified model, two projections."""

from typing import Any

import mlx.core as mx
from mlx import nn

from .towers import Config, Patches, activation, attend, blockwise, plane_angles, turned


class ClippedLinear(nn.Module):
    """Gemma 4's: what goes in and out stays between bounds, where the checkpoint has them."""

    def __init__(self, inputs: int, outputs: int, *, clipped: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        if clipped:
            self.input_min, self.input_max = mx.array(-mx.inf), mx.array(mx.inf)
            self.output_min, self.output_max = mx.array(-mx.inf), mx.array(mx.inf)

    def __call__(self, x: mx.array) -> Any:
        if "input_min" not in self:
            return self.linear(x)
        return mx.clip(self.linear(mx.clip(x, self.input_min, self.input_max)), self.output_min, self.output_max)


class Gemma4Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.dim, clipped = config["hidden_size"], config["head_dim"], bool(config.get("use_clipped_linears"))
        heads, eps = config["num_attention_heads"], config.get("rms_norm_eps", 1e-6)
        shared = config.get("num_key_value_heads") or heads
        self.q_proj = ClippedLinear(width, heads * self.dim, clipped=clipped)
        self.k_proj, self.v_proj = (ClippedLinear(width, shared * self.dim, clipped=clipped) for _ in range(2))
        self.o_proj = ClippedLinear(heads * self.dim, width, clipped=clipped)
        self.q_norm, self.k_norm, self.eps = nn.RMSNorm(self.dim, eps), nn.RMSNorm(self.dim, eps), eps

    def __call__(self, x: mx.array, angles: tuple[mx.array, mx.array]) -> Any:
        queries, keys, values = (
            project(x).reshape(len(x), -1, self.dim) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = in_plane(self.q_norm(queries), *angles), in_plane(self.k_norm(keys), *angles)
        values = mx.fast.rms_norm(values, None, self.eps)
        queries, keys, values = (each.transpose(1, 0, 2)[None] for each in (queries, keys, values))
        return self.o_proj(attend(queries, keys, values, 1.0)[0])


def in_plane(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Rotate the first half of each head by the columns' angles, the other by the rows'."""
    half, quarter = x.shape[-1] // 2, cos.shape[-1] // 2
    first = turned(x[..., :half], cos[:, :quarter], sin[:, :quarter])
    return mx.concatenate([first, turned(x[..., half:], cos[:, quarter:], sin[:, quarter:])], axis=-1)


class Gemma4MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        clipped = bool(config.get("use_clipped_linears"))
        self.gate_proj, self.up_proj = (ClippedLinear(width, inner, clipped=clipped) for _ in range(2))
        self.down_proj = ClippedLinear(inner, width, clipped=clipped)
        self.act = activation(config.get("hidden_activation", "gelu_pytorch_tanh"))

    def __call__(self, x: mx.array) -> Any:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Gemma4Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config.get("rms_norm_eps", 1e-6)
        self.self_attn, self.mlp = Gemma4Attention(config), Gemma4MLP(config)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)

    def __call__(self, x: mx.array, angles: tuple[mx.array, mx.array]) -> Any:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), angles))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Gemma4PatchEmbedder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_proj = Patches(3 * config["patch_size"] ** 2, config["hidden_size"], bias=False)
        self.position_embedding_table = mx.zeros((2, config["position_embedding_size"], config["hidden_size"]))

    def __call__(self, patches: mx.array, rows: mx.array, columns: mx.array) -> Any:
        across, down = self.position_embedding_table
        return self.input_proj(2 * (patches - 0.5)) + across[columns] + down[rows]


class Gemma4Vision(nn.Module):
    """(N, 3 · P²) → (N / pool², width): means of squares, in float32."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.pool, self.dim = config["pooling_kernel_size"], config["head_dim"]
        rotary = config.get("rope_parameters") or {}
        self.base = float((rotary.get("full_attention") or rotary).get("rope_theta") or 100.0)
        self.patch_embedder = Gemma4PatchEmbedder(config)
        self.encoder = {"layers": [Gemma4Layer(config) for _ in range(config["num_hidden_layers"])]}
        if config.get("standardize"):
            self.std_bias, self.std_scale = mx.zeros((config["hidden_size"],)), mx.ones((config["hidden_size"],))

    def __call__(self, patches: mx.array, grid: tuple[int, int]) -> Any:
        rows, columns = blockwise(grid[0] * self.pool, grid[1] * self.pool, self.pool)
        order = rows * (grid[1] * self.pool) + columns
        angles = plane_angles(columns, rows, self.dim, self.base)
        x = self.patch_embedder(patches[order], rows, columns)
        for layer in self.encoder["layers"]:
            x = layer(x, angles)
        seen = x.astype(mx.float32).reshape(-1, self.pool**2, x.shape[-1]).mean(axis=1) * x.shape[-1] ** 0.5
        return ((seen - self.std_bias) * self.std_scale if "std_bias" in self else seen).astype(x.dtype)


class NormedProjection(nn.Module):
    def __init__(self, width: int, config: Config) -> None:
        super().__init__()
        self.embedding_projection = nn.Linear(width, config["text_config"]["hidden_size"], bias=False)
        self.eps = config["vision_config"].get("rms_norm_eps", 1e-6)

    def __call__(self, x: mx.array) -> Any:
        return self.embedding_projection(mx.fast.rms_norm(x, None, self.eps))


class Gemma4Tower(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.vision_tower = Gemma4Vision(config["vision_config"])
        self.embed_vision = NormedProjection(config["vision_config"]["hidden_size"], config)

    def __call__(self, patches: mx.array, grid: tuple[int, int]) -> Any:
        return self.embed_vision(self.vision_tower(patches, grid))


class Gemma4Embedder(nn.Module):
    def __init__(self, vision: Config) -> None:
        super().__init__()
        inputs, width = 3 * (vision["patch_size"] * vision["pooling_kernel_size"]) ** 2, vision["mm_embed_dim"]
        self.patch_ln1, self.patch_ln2, self.pos_norm = nn.LayerNorm(inputs), nn.LayerNorm(width), nn.LayerNorm(width)
        self.patch_dense = nn.Linear(inputs, width)
        self.pos_embedding = mx.zeros((vision["mm_posemb_size"], 2, width))

    def __call__(self, patches: mx.array, rows: mx.array, columns: mx.array) -> Any:
        x = self.patch_ln2(self.patch_dense(self.patch_ln1(patches.astype(self.pos_embedding.dtype))))
        return self.pos_norm(x + self.pos_embedding[columns, 0] + self.pos_embedding[rows, 1])


class Gemma4UnifiedTower(nn.Module):
    """No transformer: norms, a projection, places, and the projection that all of Gemma 4 have."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.vision_embedder = Gemma4Embedder(config["vision_config"])
        self.embed_vision = NormedProjection(config["vision_config"]["mm_embed_dim"], config)

    def __call__(self, patches: mx.array, grid: tuple[int, int]) -> Any:
        return self.embed_vision(self.vision_embedder(patches, *blockwise(*grid, 1)))
