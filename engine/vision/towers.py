"""Vision transformers and their projectors, as checkpoints name their parts."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx import nn

from ..kv.attention import Scoring, fused

Config = Mapping[str, Any]


def attend(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None = None) -> Any:
    """(B, H, N, D) each → (B, N, H · D)."""
    out = fused(queries, keys, values, Scoring(scale, mask))
    return out.transpose(0, 2, 1, 3).reshape(out.shape[0], out.shape[2], -1)


def activation(name: str) -> Any:
    known = {"gelu_pytorch_tanh": nn.gelu_approx, "gelu": nn.gelu, "silu": nn.silu, "quick_gelu": nn.gelu_fast_approx}
    if name not in known:
        raise ValueError(f"a tower's activation {name!r} is not known")
    return known[name]


class Patches(nn.Module):
    """A convolution whose stride is its size."""

    def __init__(self, inputs: int, width: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = mx.zeros((width, inputs))
        if bias:
            self.bias = mx.zeros((width,))

    def __call__(self, x: mx.array) -> Any:
        out = x.astype(self.weight.dtype) @ self.weight.T
        return out + self.bias if "bias" in self else out


class SiglipAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))
        self.heads = heads

    def __call__(self, x: mx.array) -> Any:
        shape = (*x.shape[:2], self.heads, -1)
        queries, keys, values = (
            project(x).reshape(shape).transpose(0, 2, 1, 3) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(attend(queries, keys, values, (x.shape[-1] // self.heads) ** -0.5))


class SiglipMLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config["hidden_size"], config["intermediate_size"])
        self.fc2 = nn.Linear(config["intermediate_size"], config["hidden_size"])
        self.act = activation(config.get("hidden_act", "gelu_pytorch_tanh"))

    def __call__(self, x: mx.array) -> Any:
        return self.fc2(self.act(self.fc1(x)))


class SiglipLayer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config.get("layer_norm_eps", 1e-6)
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)
        self.self_attn = SiglipAttention(width, config["num_attention_heads"])
        self.mlp = SiglipMLP(config)

    def __call__(self, x: mx.array) -> Any:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class SiglipEmbeddings(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        patch, width = config["patch_size"], config["hidden_size"]
        self.patch_embedding = Patches(3 * patch * patch, width, bias=True)
        self.position_embedding = nn.Embedding((config["image_size"] // patch) ** 2, width)

    def __call__(self, patches: mx.array) -> Any:
        return self.patch_embedding(patches) + self.position_embedding.weight


class SiglipEncoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.layers = [SiglipLayer(config) for _ in range(config["num_hidden_layers"])]

    def __call__(self, x: mx.array) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class Siglip(nn.Module):
    """(tiles, N, 3 · P²) → (tiles, N, width)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embeddings = SiglipEmbeddings(config)
        self.encoder = SiglipEncoder(config)
        self.post_layernorm = nn.LayerNorm(config["hidden_size"], config.get("layer_norm_eps", 1e-6))

    def __call__(self, patches: mx.array) -> Any:
        return self.post_layernorm(self.encoder(self.embeddings(patches)))


class Gemma3Projector(nn.Module):
    def __init__(self, vision: Config, width: int, tokens: int) -> None:
        super().__init__()
        self.mm_input_projection_weight = mx.zeros((vision["hidden_size"], width))
        self.mm_soft_emb_norm = nn.RMSNorm(vision["hidden_size"], vision.get("layer_norm_eps", 1e-6))
        self.side, self.out = vision["image_size"] // vision["patch_size"], int(tokens**0.5)

    def __call__(self, x: mx.array) -> Any:
        pool = self.side // self.out
        kept = x.reshape(-1, self.side, self.side, x.shape[-1])[:, : self.out * pool, : self.out * pool]
        pooled = kept.reshape(-1, self.out, pool, self.out, pool, x.shape[-1]).mean(axis=(2, 4))
        norm = self.mm_soft_emb_norm
        normed = mx.fast.rms_norm(pooled.reshape(-1, x.shape[-1]), 1.0 + norm.weight, norm.eps)
        return normed @ self.mm_input_projection_weight


class Gemma3Tower(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.vision_tower = Siglip(config["vision_config"])
        self.multi_modal_projector = Gemma3Projector(
            config["vision_config"], config["text_config"]["hidden_size"], config.get("mm_tokens_per_image", 256)
        )

    def __call__(self, patches: mx.array, _: tuple[int, int]) -> Any:
        return self.multi_modal_projector(self.vision_tower(patches))


class Idefics3Tower(nn.Module):
    """Tiles of one size, each shuffled to fewer and wider tokens."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        vision, self.factor = config["vision_config"], int(config.get("scale_factor") or 2)
        self.vision_model = Siglip(vision)
        width = vision["hidden_size"] * self.factor**2
        self.connector = nn.Linear(width, config["text_config"]["hidden_size"], bias=False)

    def __call__(self, patches: mx.array, _: tuple[int, int]) -> Any:
        x = self.vision_model(patches)
        side = int(x.shape[1] ** 0.5)
        return self.connector(squares(x, side, side, self.factor))


def turned(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Rotate (N, H, D) by angles (N, D / 2), in float32."""
    half = x.shape[-1] // 2
    first, second = x[..., :half].astype(mx.float32), x[..., half:].astype(mx.float32)
    cos, sin = cos[:, None], sin[:, None]
    return mx.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class QwenAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def __call__(self, x: mx.array, angles: tuple[mx.array, mx.array], windows: list[tuple[int, int]]) -> Any:
        queries, keys, values = self.qkv(x).reshape(len(x), 3, self.heads, -1).transpose(1, 0, 2, 3)
        queries, keys = turned(queries, *angles), turned(keys, *angles)
        queries, keys, values = (a.transpose(1, 0, 2)[None] for a in (queries, keys, values))
        scale = queries.shape[-1] ** -0.5
        parts = [attend(queries[:, :, a:b], keys[:, :, a:b], values[:, :, a:b], scale)[0] for a, b in windows]
        return self.proj(mx.concatenate(parts))


class GatedMLP(nn.Module):
    def __init__(self, width: int, inner: int, act: str = "silu", *, bias: bool = True) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, inner, bias), nn.Linear(width, inner, bias)
        self.down_proj, self.act = nn.Linear(inner, width, bias), activation(act)

    def __call__(self, x: mx.array) -> Any:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class PlainMLP(nn.Module):
    def __init__(self, width: int, inner: int, act: str) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2, self.act = nn.Linear(width, inner), nn.Linear(inner, width), activation(act)

    def __call__(self, x: mx.array) -> Any:
        return self.linear_fc2(self.act(self.linear_fc1(x)))


class QwenBlock(nn.Module):
    def __init__(self, config: Config, *, gated: bool) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.norm1, self.norm2 = norm(width, 1e-6), norm(width, 1e-6)
        self.attn = QwenAttention(width, config["num_heads"])
        self.mlp = (
            GatedMLP(width, inner) if gated else PlainMLP(width, inner, config.get("hidden_act", "gelu_pytorch_tanh"))
        )

    def __call__(self, x: mx.array, angles: tuple[mx.array, mx.array], windows: list[tuple[int, int]]) -> Any:
        x = x + self.attn(self.norm1(x), angles, windows)
        return x + self.mlp(self.norm2(x))


def blockwise(rows: int, columns: int, merge: int) -> tuple[mx.array, mx.array]:
    """Return each patch's row and column, by blocks of merge × merge."""
    row, column = mx.meshgrid(mx.arange(rows), mx.arange(columns), indexing="ij")
    shape = rows // merge, merge, columns // merge, merge
    both = (each.reshape(shape).transpose(0, 2, 1, 3).reshape(-1) for each in (row, column))
    return tuple(both)  # type: ignore[return-value]


def plane_angles(
    rows: mx.array, columns: mx.array, dim: int, base: float = 10_000.0, *, between: bool = False
) -> tuple[mx.array, mx.array]:
    """Return cosines and sines (N, dim / 2): the first half by rows, the other by columns, whose frequencies may lie between."""
    own = mx.arange(0, dim // 2, 2, dtype=mx.float32)
    parts = [(rows, own), (columns, own + 1 if between else own)]
    angles = mx.concatenate(
        [at[:, None].astype(mx.float32) * base ** (-each / (dim // 2)) for at, each in parts], axis=-1
    )
    return mx.cos(angles), mx.sin(angles)


class Qwen25Merger(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config["hidden_size"] * config["spatial_merge_size"] ** 2
        self.ln_q = nn.RMSNorm(config["hidden_size"], 1e-6)
        self.mlp = [nn.Linear(width, width), nn.GELU(), nn.Linear(width, config["out_hidden_size"])]

    def __call__(self, x: mx.array, merge: int) -> Any:
        first, act, last = self.mlp
        return last(act(first(self.ln_q(x).reshape(len(x) // merge**2, -1))))


class PatchProjection(nn.Module):
    def __init__(self, config: Config, *, bias: bool) -> None:
        super().__init__()
        inputs = 3 * config["temporal_patch_size"] * config["patch_size"] ** 2
        self.proj = Patches(inputs, config["hidden_size"], bias=bias)

    def __call__(self, x: mx.array) -> Any:
        return self.proj(x)


class Qwen25Tower(nn.Module):
    """Attention in windows, but for some layers. Called with the grid of merged tokens."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.merge, self.whole = config["spatial_merge_size"], set(config["fullatt_block_indexes"])
        self.window = config["window_size"] // config["patch_size"] // self.merge
        self.dim = config["hidden_size"] // config["num_heads"]
        self.patch_embed = PatchProjection(config, bias=False)
        self.blocks = [QwenBlock(config, gated=True) for _ in range(config["depth"])]
        self.merger = Qwen25Merger(config)

    def __call__(self, patches: mx.array, grid: tuple[int, int]) -> Any:
        unit = self.merge**2
        order, windows = self._windows(*grid)
        rows, columns = blockwise(grid[0] * self.merge, grid[1] * self.merge, self.merge)
        cos, sin = (
            each.reshape(-1, unit, each.shape[-1])[order].reshape(each.shape)
            for each in plane_angles(rows, columns, self.dim)
        )
        x = self.patch_embed(patches)
        x = x.reshape(-1, unit, x.shape[-1])[order].reshape(x.shape)
        for number, block in enumerate(self.blocks):
            x = block(x, (cos, sin), [(0, len(x))] if number in self.whole else windows)
        return self.merger(x, self.merge)[mx.argsort(order)]

    def _windows(self, rows: int, columns: int) -> tuple[mx.array, list[tuple[int, int]]]:
        order: list[int] = []
        windows: list[tuple[int, int]] = []
        side = self.window
        for top in range(0, rows, side):
            for left in range(0, columns, side):
                begin = len(order)
                order += [
                    row * columns + column
                    for row in range(top, min(top + side, rows))
                    for column in range(left, min(left + side, columns))
                ]
                windows.append((begin * self.merge**2, len(order) * self.merge**2))
        return mx.array(order), windows


class Qwen3Merger(nn.Module):
    def __init__(self, config: Config, *, shuffled: bool) -> None:
        super().__init__()
        self.width, self.shuffled = config["hidden_size"] * config["spatial_merge_size"] ** 2, shuffled
        self.norm = nn.LayerNorm(self.width if shuffled else config["hidden_size"], 1e-6)
        self.linear_fc1 = nn.Linear(self.width, self.width)
        self.linear_fc2 = nn.Linear(self.width, config["out_hidden_size"])

    def __call__(self, x: mx.array) -> Any:
        x = self.norm(x.reshape(-1, self.width)) if self.shuffled else self.norm(x).reshape(-1, self.width)
        return self.linear_fc2(nn.gelu(self.linear_fc1(x)))


class Qwen3Tower(nn.Module):
    """Returns (tokens, width · (1 + layers)): beside the features, what is added to the first layers."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.merge, self.deep = config["spatial_merge_size"], list(config.get("deepstack_visual_indexes") or ())
        self.dim, self.side = (
            config["hidden_size"] // config["num_heads"],
            int(config["num_position_embeddings"] ** 0.5),
        )
        self.patch_embed = PatchProjection(config, bias=True)
        self.pos_embed = nn.Embedding(config["num_position_embeddings"], config["hidden_size"])
        self.blocks = [QwenBlock(config, gated=False) for _ in range(config["depth"])]
        self.merger = Qwen3Merger(config, shuffled=False)
        if self.deep:
            self.deepstack_merger_list = [Qwen3Merger(config, shuffled=True) for _ in self.deep]

    def __call__(self, patches: mx.array, grid: tuple[int, int]) -> Any:
        height, width = grid[0] * self.merge, grid[1] * self.merge
        rows, columns = blockwise(height, width, self.merge)
        angles = plane_angles(rows, columns, self.dim)
        x = self.patch_embed(patches) + self._positions(rows, columns, height, width)
        deep = {}
        for number, block in enumerate(self.blocks):
            x = block(x, angles, [(0, len(x))])
            if number in self.deep:
                deep[number] = self.deepstack_merger_list[self.deep.index(number)](x)
        return mx.concatenate([self.merger(x), *(deep[each] for each in self.deep)], axis=-1)

    def _positions(self, rows: mx.array, columns: mx.array, height: int, width: int) -> mx.array:
        def between(places: mx.array, count: int) -> tuple[mx.array, mx.array, mx.array]:
            at = places.astype(mx.float32) * ((self.side - 1) / max(count - 1, 1))
            low = mx.floor(at).astype(mx.int32)
            return low, mx.minimum(low + 1, self.side - 1), (at - low)[:, None]

        top, bottom, down = between(rows, height)
        left, right, across = between(columns, width)
        table = self.pos_embed.weight
        upper = table[top * self.side + left] * (1 - across) + table[top * self.side + right] * across
        lower = table[bottom * self.side + left] * (1 - across) + table[bottom * self.side + right] * across
        found: mx.array = upper * (1 - down) + lower * down
        return found.astype(table.dtype)


class PixtralAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.heads = heads

    def __call__(self, x: mx.array, angles: tuple[mx.array, mx.array]) -> Any:
        queries, keys, values = (
            project(x).reshape(len(x), self.heads, -1) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = turned(queries, *angles), turned(keys, *angles)
        queries, keys, values = (each.transpose(1, 0, 2)[None] for each in (queries, keys, values))
        return self.o_proj(attend(queries, keys, values, queries.shape[-1] ** -0.5)[0])


class PixtralLayer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        self.attention = PixtralAttention(width, config["num_attention_heads"])
        self.feed_forward = GatedMLP(width, config["intermediate_size"], config.get("hidden_act", "gelu"), bias=False)

    def __call__(self, x: mx.array, angles: tuple[mx.array, mx.array]) -> Any:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.ffn_norm(x))


class PixtralEncoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.layers = [PixtralLayer(config) for _ in range(config["num_hidden_layers"])]

    def __call__(self, x: mx.array, angles: tuple[mx.array, mx.array]) -> Any:
        for layer in self.layers:
            x = layer(x, angles)
        return x


class Pixtral(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.patch_conv = Patches(3 * config["patch_size"] ** 2, config["hidden_size"], bias=False)
        self.ln_pre, self.transformer = nn.RMSNorm(config["hidden_size"], 1e-5), PixtralEncoder(config)
        self.dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        self.base = float((config.get("rope_parameters") or config).get("rope_theta") or 10_000.0)

    def __call__(self, patches: mx.array, rows: int, columns: int) -> Any:
        places = blockwise(rows, columns, 1)
        angles = plane_angles(*places, self.dim, self.base, between=True)
        return self.transformer(self.ln_pre(self.patch_conv(patches)), angles)


class PatchMerger(nn.Module):
    def __init__(self, width: int, merge: int) -> None:
        super().__init__()
        self.merging_layer = nn.Linear(width * merge**2, width, bias=False)

    def __call__(self, x: mx.array) -> Any:
        return self.merging_layer(x)


class MistralProjector(nn.Module):
    """Two layers; Mistral 3's norms and merges squares of patches before."""

    def __init__(self, config: Config, width: int, merge: int) -> None:
        super().__init__()
        text = config["text_config"]
        bias = config.get("multimodal_projector_bias", merge == 1)
        if merge > 1:
            self.norm, self.patch_merger = nn.RMSNorm(width, text.get("rms_norm_eps", 1e-5)), PatchMerger(width, merge)
        self.linear_1 = nn.Linear(width, text["hidden_size"], bias)
        self.linear_2 = nn.Linear(text["hidden_size"], text["hidden_size"], bias)
        self.act = activation(config.get("projector_hidden_act", "gelu"))

    def __call__(self, x: mx.array, grid: tuple[int, int], merge: int) -> Any:
        if merge > 1:
            cut = self.norm(x).reshape(grid[0], merge, grid[1], merge, -1).transpose(0, 2, 4, 1, 3)
            x = self.patch_merger(cut.reshape(grid[0] * grid[1], -1))
        return self.linear_2(self.act(self.linear_1(x)))


class MistralTower(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        vision, self.merge = config["vision_config"], int(config.get("spatial_merge_size") or 1)
        self.vision_tower = Pixtral(vision)
        self.multi_modal_projector = MistralProjector(config, vision["hidden_size"], self.merge)

    def __call__(self, patches: mx.array, grid: tuple[int, int]) -> Any:
        seen = self.vision_tower(patches, grid[0] * self.merge, grid[1] * self.merge)
        return self.multi_modal_projector(seen, grid, self.merge)


class ShuffledProjector(nn.Module):
    """Squares of merge × merge tokens made one, in two layers."""

    def __init__(self, config: Config, merge: int, inner: int, *, bias: bool = True, norm: bool = True) -> None:
        super().__init__()
        width, out = config["vision_config"]["hidden_size"] * merge**2, config["text_config"]["hidden_size"]
        if norm:
            self.layer_norm = nn.LayerNorm(width, 1e-5)
        self.linear_1, self.linear_2 = nn.Linear(width, inner, bias), nn.Linear(inner, out, bias)
        self.act = activation(config.get("projector_hidden_act", "gelu"))

    def __call__(self, x: mx.array) -> Any:
        x = self.layer_norm(x) if "layer_norm" in self else x
        return self.linear_2(self.act(self.linear_1(x)))


def squares(x: mx.array, rows: int, columns: int, merge: int) -> mx.array:
    """(B, rows · columns, width) → (tokens, merge² · width)."""
    cut = x.reshape(len(x), rows // merge, merge, columns // merge, merge, -1).transpose(0, 1, 3, 2, 4, 5)
    return cut.reshape(-1, x.shape[-1] * merge**2)


class Siglip2Embeddings(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.patch_embedding = Patches(3 * config["patch_size"] ** 2, config["hidden_size"], bias=True)
        self.position_embedding = nn.Embedding(config["num_patches"], config["hidden_size"])

    def __call__(self, patches: mx.array, rows: int, columns: int) -> Any:
        table = self.position_embedding.weight
        side = int(len(table) ** 0.5)
        down, across = spread(rows, side), spread(columns, side)
        table = table.astype(mx.float32).reshape(side, side, -1)
        placed = mx.einsum("rs,cd,sdw->rcw", down, across, table).reshape(rows * columns, -1)
        return self.patch_embedding(patches) + placed.astype(self.position_embedding.weight.dtype)


def spread(count: int, side: int) -> mx.array:
    """Return (count, side): how much of each of ``side`` places goes into each of ``count``, linearly and widened."""
    scale = side / count
    centre = (mx.arange(count) + 0.5) * scale - 0.5
    away = mx.abs(mx.arange(side)[None] - centre[:, None]) / max(scale, 1.0)
    weights = mx.maximum(1 - away, 0)
    return weights / weights.sum(axis=-1, keepdims=True)


class Siglip2(nn.Module):
    """Siglip for pictures of any shape: (tiles, N, 3 · P²) → (tiles, N, width)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embeddings, self.encoder = Siglip2Embeddings(config), SiglipEncoder(config)
        self.post_layernorm = nn.LayerNorm(config["hidden_size"], config.get("layer_norm_eps", 1e-6))

    def __call__(self, patches: mx.array, rows: int, columns: int) -> Any:
        return self.post_layernorm(self.encoder(self.embeddings(patches, rows, columns)))


class Lfm2Tower(nn.Module):
    """Tiles of side × side patches, then the whole picture, whose grid of tokens may be (0, 0)."""

    def __init__(self, config: Config, merge: int, side: int) -> None:
        super().__init__()
        self.merge, self.side = merge, side
        self.vision_tower = Siglip2(config["vision_config"])
        self.multi_modal_projector = ShuffledProjector(
            config,
            merge,
            config.get("projector_hidden_size", 2560),
            bias=config.get("projector_bias", True),
            norm=config.get("projector_use_layernorm", True),
        )

    def __call__(self, patches: mx.array, grid: tuple[int, int]) -> Any:
        whole, each = grid[0] * grid[1] * self.merge**2, self.side**2
        tiles = (len(patches) - whole) // each
        shapes = [(patches[: tiles * each].reshape(tiles, each, -1), self.side, self.side)] if tiles else []
        shapes += [(patches[tiles * each :][None], grid[0] * self.merge, grid[1] * self.merge)] if whole else []
        seen = [squares(self.vision_tower(*shape), *shape[1:], self.merge) for shape in shapes]
        return self.multi_modal_projector(mx.concatenate(seen))


class Llama4Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))
        self.heads = heads

    def __call__(self, x: mx.array, cos: mx.array, sin: mx.array) -> Any:
        shape = (*x.shape[:2], self.heads, -1)
        queries, keys, values = (project(x).reshape(shape) for project in (self.q_proj, self.k_proj, self.v_proj))
        queries, keys = neighbours_turned(queries, cos, sin), neighbours_turned(keys, cos, sin)
        queries, keys, values = (each.transpose(0, 2, 1, 3) for each in (queries, keys, values))
        return self.o_proj(attend(queries, keys, values, queries.shape[-1] ** -0.5))


def neighbours_turned(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Rotate (B, N, H, D) by angles (N, D / 2), in float32: each pair of neighbours by one."""
    pairs = x.astype(mx.float32).reshape(*x.shape[:-1], -1, 2)
    first, second, cos, sin = pairs[..., 0], pairs[..., 1], cos[:, None], sin[:, None]
    return mx.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x.shape).astype(x.dtype)


class Llama4Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attn = Llama4Attention(width, config["num_attention_heads"])
        self.mlp = SiglipMLP({**config, "hidden_act": "gelu"})

    def __call__(self, x: mx.array, cos: mx.array, sin: mx.array) -> Any:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama4Adapter(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        out = config["projector_output_dim"]
        self.fc1 = nn.Linear(config["intermediate_size"], config["projector_input_dim"], bias=False)
        self.fc2 = nn.Linear(out, out, bias=False)

    def __call__(self, x: mx.array) -> Any:
        return nn.gelu(self.fc2(nn.gelu(self.fc1(x))))


class Llama4Vision(nn.Module):
    """(tiles, N, 3 · P²) → (tokens, width). What sums up a tile stands last, and is left out."""

    def __init__(self, config: Config, side: int, merge: int) -> None:
        super().__init__()
        width, self.side, self.merge = config["hidden_size"], side, merge
        self.patch_embedding = {"linear": Patches(3 * config["patch_size"] ** 2, width, bias=False)}
        self.class_embedding, self.positional_embedding_vlm = mx.zeros((width,)), mx.zeros((side**2 + 1, width))
        self.layernorm_pre, self.layernorm_post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.model = {"layers": [Llama4Layer(config) for _ in range(config["num_hidden_layers"])]}
        self.vision_adapter = {"mlp": Llama4Adapter(config)}
        self.dim = width // config["num_attention_heads"]
        self.base = float((config.get("rope_parameters") or config).get("rope_theta") or 10_000.0)

    def __call__(self, patches: mx.array) -> Any:
        rows, columns = blockwise(self.side, self.side, 1)
        cos, sin = plane_angles(columns + 1, rows + 1, self.dim, self.base)
        cos, sin = mx.pad(cos, [(0, 1), (0, 0)], constant_values=1), mx.pad(sin, [(0, 1), (0, 0)])
        seen = self.patch_embedding["linear"](patches)
        last = mx.broadcast_to(self.class_embedding, (len(seen), 1, seen.shape[-1]))
        x = self.layernorm_pre(mx.concatenate([seen, last], axis=1) + self.positional_embedding_vlm)
        for layer in self.model["layers"]:
            x = layer(x, cos, sin)
        x = self.layernorm_post(x)[:, :-1]
        return self.vision_adapter["mlp"](squares(x, self.side, self.side, self.merge))


class Llama4Tower(nn.Module):
    def __init__(self, config: Config, side: int, merge: int) -> None:
        super().__init__()
        vision = config["vision_config"]
        self.vision_model = Llama4Vision(vision, side, merge)
        out = nn.Linear(vision["vision_output_dim"], config["text_config"]["hidden_size"], bias=False)
        self.multi_modal_projector = {"linear_1": out}

    def __call__(self, patches: mx.array, _: tuple[int, int]) -> Any:
        return self.multi_modal_projector["linear_1"](self.vision_model(patches))


class InternAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.heads = config["hidden_size"], config["num_attention_heads"]
        bias = bool(config.get("attention_bias", False))
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias) for _ in range(3))
        self.projection_layer = nn.Linear(width, width)
        if config.get("use_qk_norm"):
            self.q_norm, self.k_norm = nn.RMSNorm(width, 1e-6), nn.RMSNorm(width, 1e-6)

    def __call__(self, x: mx.array) -> Any:
        queries, keys, values = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if "q_norm" in self:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        shape = (*x.shape[:2], self.heads, -1)
        queries, keys, values = (each.reshape(shape).transpose(0, 2, 1, 3) for each in (queries, keys, values))
        return self.projection_layer(attend(queries, keys, values, (x.shape[-1] // self.heads) ** -0.5))


class InternLayer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config.get("layer_norm_eps", 1e-6)
        norm = nn.RMSNorm if config.get("norm_type") == "rms_norm" else nn.LayerNorm
        self.layernorm_before, self.layernorm_after = norm(width, eps), norm(width, eps)
        self.attention, self.mlp = InternAttention(config), SiglipMLP({"hidden_act": "gelu", **config})
        self.lambda_1, self.lambda_2 = mx.ones((width,)), mx.ones((width,))

    def __call__(self, x: mx.array) -> Any:
        x = x + self.lambda_1 * self.attention(self.layernorm_before(x))
        return x + self.lambda_2 * self.mlp(self.layernorm_after(x))


class InternEmbeddings(nn.Module):
    def __init__(self, config: Config, inputs: int, count: int) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.cls_token = mx.zeros((1, 1, width))
        self.patch_embeddings = {"projection": Patches(inputs, width, bias=True)}
        if config.get("use_absolute_position_embeddings", True):
            self.position_embeddings = mx.zeros((1, count + 1, width))

    def __call__(self, patches: mx.array) -> Any:
        seen = self.patch_embeddings["projection"](patches)
        first = mx.broadcast_to(self.cls_token, (len(seen), 1, seen.shape[-1]))
        x = mx.concatenate([first, seen], axis=1)
        return x + self.position_embeddings if "position_embeddings" in self else x


class Intern(nn.Module):
    """(tiles, N, 3 · P²) → (tiles, N, width)."""

    def __init__(self, config: Config, inputs: int, count: int) -> None:
        super().__init__()
        self.embeddings = InternEmbeddings(config, inputs, count)
        self.encoder = {"layer": [InternLayer(config) for _ in range(config["num_hidden_layers"])]}
        if config.get("use_mean_pooling") is False:
            self.layernorm = nn.LayerNorm(config["hidden_size"], config.get("layer_norm_eps", 1e-6))

    def __call__(self, patches: mx.array) -> Any:
        x = self.embeddings(patches)
        for layer in self.encoder["layer"]:
            x = layer(x)
        return (self.layernorm(x) if "layernorm" in self else x)[:, 1:]


class InternTower(nn.Module):
    def __init__(self, config: Config, patch: int, side: int, merge: int) -> None:
        super().__init__()
        self.side, self.merge = side, merge
        self.vision_tower = Intern(config["vision_config"], 3 * patch**2, side**2)
        self.multi_modal_projector = ShuffledProjector(config, merge, config["text_config"]["hidden_size"])

    def __call__(self, patches: mx.array, _: tuple[int, int]) -> Any:
        return self.multi_modal_projector(squares(self.vision_tower(patches), self.side, self.side, self.merge))
