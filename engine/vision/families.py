"""What each family does with a picture: its size, the text that stands for it, its patches, its tower."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..errors import PictureError
from .processing import (
    BICUBIC,
    BILINEAR,
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    LANCZOS,
    MOST_ASPECT,
    Numbers,
    canvas_of,
    closest_grid,
    fitting,
    longest_edge,
    normalised,
    padded,
    patches,
    scaled,
    tiled,
    too_narrow,
    undistorted,
    whole_tiles,
    within_patches,
)

if TYPE_CHECKING:
    from mlx import nn

    from .processing import Pixels

Config = Mapping[str, Any]
SIGLIP: Config = {"intermediate_size": 3072, "num_hidden_layers": 12, "image_size": 224}


@dataclass(frozen=True, slots=True)
class PicturePlan:
    """What becomes of a picture of some size.

    text: for the template's mark, with ``tokens`` times the picture's own. size: (width, height) it is scaled to.
    grid: its (rows, columns) of tokens, or of tiles.
    """

    text: str
    tokens: int
    size: tuple[int, int]
    grid: tuple[int, int]


class PictureFamily(ABC):
    """How a model sees.

    mark: what the template writes for a picture. token: a picture's own, in the text. stands: the id of such a token in
    tables of the language model, if another. sees_ahead: its tokens attend to each other both ways; "slides": in
    layers with a window alone. sections: of rotary positions in a plane, if any. merge: patches in a row that become
    one token. takes_embeddings: whether the language model's class does.
    """

    mark: str
    token: str
    stands: int | None = None
    sees_ahead: bool | Literal["slides"] = False
    sections: tuple[int, ...] = ()
    interleaved: bool = False
    deep_layers: int = 0
    merge: int = 1
    takes_embeddings: bool = True
    usual: ClassVar[Config] = {}  # what a config's tower has where it does not say

    def _completed(self, config: Config) -> dict[str, Any]:
        vision = {**self.usual, **config["vision_config"]}
        return {**config, "vision_config": vision, "text_config": config.get("text_config") or config}

    @abstractmethod
    def plan(self, width: int, height: int) -> PicturePlan:
        """Raises PictureError for a shape that the model can't see."""

    @abstractmethod
    def pixels(self, image: Any, plan: PicturePlan) -> "Pixels":
        """Return what the tower takes, of Pillow's RGB image."""

    @abstractmethod
    def tower(self) -> "nn.Module":
        """Called with pixels and the plan's grid, returns features (tokens, width)."""

    @abstractmethod
    def own_name(self, name: str) -> str | None:
        """Return a checkpoint's tensor's name in the tower; None for another part's."""

    def attended(self, patches: int) -> tuple[float, int]:
        """Return how many patches each attends to: on average over the tower's layers, and at most."""
        return patches, patches

    def embedding_scale(self) -> float:
        """What the language model multiplies given embeddings by."""
        return 1.0


class Gemma3(PictureFamily):
    mark, token = "<start_of_image>", "<image_soft_token>"
    sees_ahead = True
    usual: ClassVar[Config] = {**SIGLIP, "hidden_size": 768, "num_attention_heads": 12, "patch_size": 16}

    def __init__(self, config: Config, settings: Config) -> None:
        if settings.get("do_pan_and_scan"):
            raise PictureError("its pictures are to be panned and scanned, which is not done here", "Turn it off.")
        self._config = self._completed(config)
        self._vision = self._config["vision_config"]
        self._side = int(self._vision["image_size"])
        self._numbers = Numbers.of(settings, BILINEAR, HALF, HALF)
        count = int(config.get("mm_tokens_per_image") or 256)
        text = f"\n\n{self.mark}{self.token * count}<end_of_image>\n\n"
        side = math.isqrt(count)
        self.merge = self._side // self._vision["patch_size"] // side
        self._plan = PicturePlan(text, count, (self._side, self._side), (side, side))

    def plan(self, width: int, height: int) -> PicturePlan:  # noqa: ARG002  # one size for all
        return self._plan

    def pixels(self, image: Any, plan: PicturePlan) -> "Pixels":
        return patches(normalised(scaled(image, *plan.size, self._numbers), self._numbers), self._vision["patch_size"])[
            None
        ]

    def tower(self) -> "nn.Module":
        from .towers import Gemma3Tower

        return Gemma3Tower(self._config)

    def own_name(self, name: str) -> str | None:
        name = name.removeprefix("model.")
        kept = name.startswith(("vision_tower.", "multi_modal_projector."))
        return name.replace("vision_tower.vision_model.", "vision_tower.") if kept else None

    def embedding_scale(self) -> float:
        import mlx.core as mx

        root: Any = mx.array(self._config["text_config"]["hidden_size"] ** 0.5, mx.bfloat16).astype(mx.float32).item()
        return float(root)


class Idefics3(PictureFamily):
    mark = token = "<image>"
    usual: ClassVar[Config] = {**SIGLIP, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}

    def __init__(self, config: Config, settings: Config) -> None:
        self._config = self._completed(config)
        self._vision = self._config["vision_config"]
        self._numbers = Numbers.of(settings, LANCZOS, HALF, HALF)
        self._tile = int((settings.get("max_image_size") or {}).get("longest_edge") or self._vision["image_size"])
        self._edge = int((settings.get("size") or {}).get("longest_edge") or 4 * self._tile)
        self._splits = settings.get("do_image_splitting") is not False
        self.merge = int(config.get("scale_factor") or 2)
        self._each = (self._vision["image_size"] // self._vision["patch_size"] // self.merge) ** 2

    def attended(self, patches: int) -> tuple[float, int]:  # noqa: ARG002  # within a tile
        return self._each * self.merge**2, self._each * self.merge**2

    def plan(self, width: int, height: int) -> PicturePlan:
        size = longest_edge(width, height, self._edge)
        size = whole_tiles(*size, self._tile) if self._splits else (self._tile, self._tile)
        rows, columns = size[1] // self._tile, size[0] // self._tile
        if rows == columns == 1:
            rows = columns = 0
        around, own = "<fake_token_around_image>", self.token * self._each
        lines = ["".join(f"{around}<row_{r + 1}_col_{c + 1}>{own}" for c in range(columns)) + "\n" for r in range(rows)]
        text = f"{''.join(lines)}{chr(10) if rows else ''}{around}<global-img>{own}{around}"
        return PicturePlan(text, self._each * (rows * columns + 1), size, (rows, columns))

    def pixels(self, image: Any, plan: PicturePlan) -> "Pixels":
        import numpy as np

        first = longest_edge(image.width, image.height, self._edge)
        whole = scaled(scaled(image, *first, self._numbers), *plan.size, self._numbers)
        cut = tiled(whole, plan.grid[1], plan.grid[0], self._tile, self._numbers) if plan.grid[0] else []
        cut.append(scaled(whole, self._tile, self._tile, self._numbers))
        return np.stack([patches(normalised(each, self._numbers), self._vision["patch_size"]) for each in cut])

    def tower(self) -> "nn.Module":
        from .towers import Idefics3Tower

        return Idefics3Tower(self._config)

    def own_name(self, name: str) -> str | None:
        name = name.removeprefix("model.").replace("connector.modality_projection.proj.", "connector.")
        return name if name.startswith(("vision_model.", "connector.")) else None


class Qwen25VL(PictureFamily):
    mark = token = "<|image_pad|>"
    usual: ClassVar[Config] = {
        **{"depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584},
        **{"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112},
        "fullatt_block_indexes": (7, 15, 23, 31),
    }

    def __init__(self, config: Config, settings: Config) -> None:
        whole = self._completed(config)
        self._vision, text = whole["vision_config"], whole["text_config"]
        self._numbers = Numbers.of(settings, BICUBIC, CLIP_MEAN, CLIP_STD)
        self._patch, self.merge = int(self._vision["patch_size"]), int(self._vision["spatial_merge_size"])
        size = settings.get("size") or {}
        self._least = int(settings.get("min_pixels") or size.get("shortest_edge") or self.usual_pixels[0])
        self._most = int(settings.get("max_pixels") or size.get("longest_edge") or self.usual_pixels[1])
        scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
        self.sections = tuple(scaling.get("mrope_section") or text.get("mrope_section") or self.usual_sections)

    usual_sections: tuple[int, ...] = (16, 24, 24)
    usual_pixels = 56 * 56, 28 * 28 * 1280

    def plan(self, width: int, height: int) -> PicturePlan:
        factor = self._patch * self.merge
        if max(width, height) > MOST_ASPECT * min(width, height):
            raise too_narrow(width, height)
        size = fitting(width, height, factor, self._least, self._most)
        grid = size[1] // factor, size[0] // factor
        return PicturePlan(self.token * (grid[0] * grid[1]), grid[0] * grid[1], size, grid)

    def pixels(self, image: Any, plan: PicturePlan) -> "Pixels":
        values = normalised(scaled(image, *plan.size, self._numbers), self._numbers)
        return patches(values, self._patch, self.merge, int(self._vision["temporal_patch_size"]))

    def tower(self) -> "nn.Module":
        from .towers import Qwen25Tower

        return Qwen25Tower(self._vision)

    def attended(self, patches: int) -> tuple[float, int]:
        if "window_size" not in self._vision:
            return super().attended(patches)
        window, full = (self._vision["window_size"] // self._patch) ** 2, len(self._vision["fullatt_block_indexes"])
        return min(window, patches) + (patches - min(window, patches)) * full / self._vision["depth"], patches

    def own_name(self, name: str) -> str | None:
        name = name.removeprefix("model.").replace("vision_tower.", "visual.")
        return name.removeprefix("visual.") if name.startswith("visual.") else None


class Qwen3VL(Qwen25VL):
    interleaved = True
    usual_sections = (24, 20, 20)
    usual_pixels = 65536, 16777216
    usual: ClassVar[Config] = {
        **{"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 3584},
        **{"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304},
        "deepstack_visual_indexes": (8, 16, 24),
    }

    def __init__(self, config: Config, settings: Config) -> None:
        super().__init__(config, {"image_mean": HALF, "image_std": HALF, **settings})
        self.deep_layers = len(self._vision.get("deepstack_visual_indexes") or ())

    def tower(self) -> "nn.Module":
        from .towers import Qwen3Tower

        return Qwen3Tower(self._vision)


class Qwen35(Qwen3VL):
    usual: ClassVar[Config] = {**Qwen3VL.usual, "deepstack_visual_indexes": ()}


class Mistral3(PictureFamily):
    mark = token = "[IMG]"
    usual: ClassVar[Config] = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24} | {
        "num_attention_heads": 16,
        "patch_size": 16,
    }

    def __init__(self, config: Config, settings: Config) -> None:
        self._config = self._completed(config)
        self._vision = self._config["vision_config"]
        if (
            self._vision.get("model_type") != "pixtral"
            or config.get("vision_feature_layer", -2 if config["model_type"] == "llava" else -1) != -1
        ):
            raise PictureError(f"its tower is a {self._vision.get('model_type')}, which is not supported yet")
        self._numbers = Numbers.of(settings, BICUBIC, CLIP_MEAN, CLIP_STD)
        self._patch = int(self._vision["patch_size"])
        self.merge = int(config.get("spatial_merge_size") or 1)
        self._square = self._patch * self.merge
        self._edge = int((settings.get("size") or {}).get("longest_edge") or 1024)

    def plan(self, width: int, height: int) -> PicturePlan:
        ratio = max(width, height) / self._edge
        if ratio > 1:
            width, height = math.floor(width / ratio), math.floor(height / ratio)
        rows, columns = (max(1, math.ceil(side / self._square)) for side in (height, width))
        text = "[IMG_BREAK]".join([self.token * columns] * rows) + "[IMG_END]"
        return PicturePlan(text, rows * columns, (columns * self._square, rows * self._square), (rows, columns))

    def pixels(self, image: Any, plan: PicturePlan) -> "Pixels":
        return patches(normalised(scaled(image, *plan.size, self._numbers), self._numbers), self._patch)

    def tower(self) -> "nn.Module":
        from .towers import MistralTower

        return MistralTower(self._config)

    def own_name(self, name: str) -> str | None:
        name = name.removeprefix("model.")
        return name if name.startswith(("vision_tower.", "multi_modal_projector.")) else None


class Lfm2VL(PictureFamily):
    """Small pictures whole; larger ones in tiles, and once more whole and small."""

    mark = token = "<image>"
    usual: ClassVar[Config] = {**SIGLIP, "hidden_size": 768, "num_attention_heads": 12, "patch_size": 16} | {
        "num_patches": 256
    }

    def __init__(self, config: Config, settings: Config) -> None:
        self._config = self._completed(config)
        self._numbers = Numbers.of(settings, BILINEAR, HALF, HALF)
        self._patch, self.merge = (
            int(settings.get("encoder_patch_size") or 16),
            int(settings.get("downsample_factor") or 2),
        )
        self._square, self._tile = self._patch * self.merge, int(settings.get("tile_size") or 512)
        pixels = self._square**2
        self._least = int(settings.get("min_image_tokens") or 64) * pixels
        self._most = int(settings.get("max_image_tokens") or 256) * pixels
        self._bound = self._most * float(settings.get("max_pixels_tolerance") or 2.0)
        self._tiles = int(settings.get("min_tiles") or 2), int(settings.get("max_tiles") or 10)
        self._splits = settings.get("do_image_splitting") is not False and self._tiles != (1, 1)
        self._whole = settings.get("use_thumbnail") is not False

    def plan(self, width: int, height: int) -> PicturePlan:
        size = fitting(width, height, self._square, self._least, self._most, side=self._square)
        grid = size[1] // self._square, size[0] // self._square
        own, tiles = self.token * (grid[0] * grid[1]), self._grid(width, height)
        count, parts = grid[0] * grid[1], ["<|image_start|>"]
        if tiles != (1, 1):
            each = math.ceil(self._tile // self._patch / self.merge) ** 2
            places = [(r + 1, c + 1) for r in range(tiles[1]) for c in range(tiles[0])]
            parts += [f"<|img_row_{r}_col_{c}|>{self.token * each}" for r, c in places]
            own, grid, count = ("<|img_thumbnail|>" + own, grid, count) if self._whole else ("", (0, 0), 0)
            count += each * len(places)
        return PicturePlan("".join([*parts, own, "<|image_end|>"]), count, size, grid)

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        across, down = (max(self._patch, round(each / self._square) * self._square) for each in (width, height))
        if not self._splits or across * down <= self._bound:
            return 1, 1
        return closest_grid(width, height, self._tile, *self._tiles)

    def pixels(self, image: Any, plan: PicturePlan) -> "Pixels":
        import numpy as np

        tiles = self._grid(image.width, image.height)
        cut = [] if tiles == (1, 1) else tiled(image, *tiles, self._tile, self._numbers)
        cut += [scaled(image, *plan.size, self._numbers)] if plan.grid[0] else []
        values = [patches(normalised(each, self._numbers), self._patch, colours_last=True) for each in cut]
        return np.concatenate(values)

    def attended(self, patches: int) -> tuple[float, int]:
        tile = min(patches, (self._tile // self._patch) ** 2)
        return tile, tile

    def tower(self) -> "nn.Module":
        from .towers import Lfm2Tower

        return Lfm2Tower(self._config, self.merge, self._tile // self._patch)

    def own_name(self, name: str) -> str | None:
        name = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")
        kept = name.startswith(("vision_tower.", "multi_modal_projector.")) and not name.startswith(
            "vision_tower.head."
        )
        return name if kept else None


class InternVL(PictureFamily):
    mark = token = "<IMG_CONTEXT>"
    usual: ClassVar[Config] = {
        **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
        **{"image_size": 448, "patch_size": 14},
    }

    def __init__(self, config: Config, settings: Config) -> None:
        self._config = self._completed(config)
        vision = self._config["vision_config"]
        self._side, self._patch = (_one(vision[key]) for key in ("image_size", "patch_size"))
        if config.get("vision_feature_layer", -1) != -1:
            raise PictureError(f"layer {config['vision_feature_layer']} of its tower is asked for, not the last")
        self._numbers = Numbers.of(settings, BICUBIC, CLIP_MEAN, CLIP_STD)
        size = settings.get("size") or {}
        if {size.get("height", self._side), size.get("width", self._side)} != {self._side}:
            raise PictureError(f"its pictures are not cut into tiles of {self._side} × {self._side}")
        self._tiles = int(settings.get("min_patches") or 1), int(settings.get("max_patches") or 12)
        self.merge = round(1 / float(config.get("downsample_ratio") or 0.5))
        self._each = (self._side // self._patch // self.merge) ** 2

    def plan(self, width: int, height: int) -> PicturePlan:
        columns, rows = closest_grid(width, height, self._side, *self._tiles)
        count = self._each * (columns * rows + (columns * rows > 1))
        size = columns * self._side, rows * self._side
        return PicturePlan(f"<img>{self.token * count}</img>", count, size, (rows, columns))

    def pixels(self, image: Any, plan: PicturePlan) -> "Pixels":
        import numpy as np

        cut = tiled(image, plan.grid[1], plan.grid[0], self._side, self._numbers)
        cut += [scaled(image, self._side, self._side, self._numbers)] if len(cut) > 1 else []
        return np.stack([patches(normalised(each, self._numbers), self._patch) for each in cut])

    def attended(self, patches: int) -> tuple[float, int]:  # noqa: ARG002  # within a tile
        return self._each * self.merge**2, self._each * self.merge**2

    def tower(self) -> "nn.Module":
        from .towers import InternTower

        return InternTower(self._config, self._patch, self._side // self._patch, self.merge)

    def own_name(self, name: str) -> str | None:
        name = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")
        kept = name.startswith(("vision_tower.", "multi_modal_projector.")) and not name.endswith(".mask_token")
        return name if kept else None


class Llama4(PictureFamily):
    """Tiles on a canvas of the picture's form, dark where it does not reach; then the whole picture in one tile."""

    mark, token = "<|image|>", "<|patch|>"
    takes_embeddings = False
    usual: ClassVar[Config] = {
        **{"hidden_size": 768, "intermediate_size": 5632, "num_hidden_layers": 34, "num_attention_heads": 16},
        **{"image_size": 448, "patch_size": 14, "pixel_shuffle_ratio": 0.5, "vision_output_dim": 7680},
        **{"projector_input_dim": 4096, "projector_output_dim": 4096},
    }

    def __init__(self, config: Config, settings: Config) -> None:
        self._config = self._completed(config)
        vision = self._config["vision_config"]
        self._tile, self._patch = (_one(vision[key]) for key in ("image_size", "patch_size"))
        if {int(each) for each in (settings.get("size") or {}).values()} - {self._tile}:
            raise PictureError(f"its pictures are not cut into tiles of {self._tile} × {self._tile}")
        self._numbers = Numbers.of(settings, BILINEAR, HALF, HALF)
        self._most, self._largest = int(settings.get("max_patches") or 16), bool(settings.get("resize_to_max_canvas"))
        self.merge = round(1 / float(vision["pixel_shuffle_ratio"]))
        self._each = (self._tile // self._patch // self.merge) ** 2

    def plan(self, width: int, height: int) -> PicturePlan:
        columns, rows = canvas_of(width, height, self._tile, self._most, largest=self._largest)
        whole = columns * self._tile, rows * self._tile
        room = (
            whole if self._largest else (min(max(width, self._tile), whole[0]), min(max(height, self._tile), whole[1]))
        )
        own, tiles = self.token * self._each, columns * rows if columns * rows > 1 else 0
        row = "<|tile_x_separator|>".join([own] * columns) + "<|tile_y_separator|>"
        text = f"<|image_start|>{row * rows if tiles else ''}<|image|>{own}<|image_end|>"
        return PicturePlan(text, self._each * (tiles + 1), undistorted(width, height, *room), (rows, columns))

    def pixels(self, image: Any, plan: PicturePlan) -> "Pixels":
        import numpy as np

        rows, columns = plan.grid
        canvas = padded(scaled(image, *plan.size, self._numbers), columns * self._tile, rows * self._tile)
        cut = tiled(canvas, columns, rows, self._tile, self._numbers)
        cut += [scaled(image, self._tile, self._tile, self._numbers)] if len(cut) > 1 else []
        return np.stack([patches(normalised(each, self._numbers, half=True), self._patch) for each in cut])

    def attended(self, patches: int) -> tuple[float, int]:  # noqa: ARG002  # within a tile
        return self._each * self.merge**2, self._each * self.merge**2

    def tower(self) -> "nn.Module":
        from .towers import Llama4Tower

        return Llama4Tower(self._config, self._tile // self._patch, self.merge)

    def own_name(self, name: str) -> str | None:
        return name if name.startswith(("vision_model.", "multi_modal_projector.")) else None


def _one(size: Any) -> int:
    """Return a side, given once or for both. Raises PictureError."""
    sides = {int(each) for each in (size if isinstance(size, list | tuple) else [size])}
    if len(sides) != 1:
        raise PictureError("its tower sees tiles that are not square, which is not supported yet")
    return sides.pop()


class Gemma4(PictureFamily):
    mark = token = "<|image|>"
    usual: ClassVar[Config] = {
        **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12},
        **{"head_dim": 64, "patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 10240},
    }

    def __init__(self, config: Config, settings: Config) -> None:
        self._config = self._completed(config)
        plain = {} if settings.get("do_normalize") else {"image_mean": None, "image_std": None}
        self._numbers = Numbers.of({**settings, **plain}, BICUBIC, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
        vision, text = self._config["vision_config"], self._config["text_config"]
        self._patch, self._pool = int(vision["patch_size"]), int(vision["pooling_kernel_size"])
        self.merge = self._pool
        self._most = int(settings.get("max_soft_tokens") or config.get("vision_soft_tokens_per_image") or 280)
        self.stands = int(text.get("pad_token_id") or 0)
        self.sees_ahead = self.ahead if text.get("use_bidirectional_attention") == "vision" else False

    ahead: bool | Literal["slides"] = "slides"

    def plan(self, width: int, height: int) -> PicturePlan:
        square = self._patch * self._pool
        size = within_patches(width, height, square, self._most)
        grid = size[1] // square, size[0] // square
        count = grid[0] * grid[1]
        return PicturePlan(f"<|image>{self.token * count}<image|>", count, size, grid)

    def pixels(self, image: Any, plan: PicturePlan) -> "Pixels":
        values = normalised(scaled(image, *plan.size, self._numbers), self._numbers)
        return patches(values, self._patch, colours_last=True)

    def tower(self) -> "nn.Module":
        from .gemma4_towers import Gemma4Tower

        return Gemma4Tower(self._config)

    def own_name(self, name: str) -> str | None:
        name = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")
        return name if name.startswith(("vision_tower.", "vision_embedder.", "embed_vision.")) else None

    def embedding_scale(self) -> float:
        return float(self._config["text_config"]["hidden_size"] ** 0.5)


class Gemma4Unified(Gemma4):
    ahead = True
    usual: ClassVar[Config] = {"patch_size": 16, "pooling_kernel_size": 3, "mm_embed_dim": 3840, "mm_posemb_size": 1120}

    def pixels(self, image: Any, plan: PicturePlan) -> "Pixels":
        values = normalised(scaled(image, *plan.size, self._numbers), self._numbers)
        return patches(values, self._patch * self._pool, colours_last=True)

    def tower(self) -> "nn.Module":
        from .gemma4_towers import Gemma4UnifiedTower

        return Gemma4UnifiedTower(self._config)


FAMILIES: dict[str, Callable[[Config, Config], PictureFamily]] = {
    "gemma3": Gemma3,
    "gemma4": Gemma4,
    "gemma4_unified": Gemma4Unified,
    "idefics3": Idefics3,
    "smolvlm": Idefics3,
    "internvl": InternVL,
    "lfm2_vl": Lfm2VL,
    "llama4": Llama4,
    "llava": Mistral3,
    "mistral3": Mistral3,
    "qwen2_5_vl": Qwen25VL,
    "qwen3_vl": Qwen3VL,
    "qwen3_vl_moe": Qwen3VL,
    "qwen3_5": Qwen35,
    "qwen3_5_moe": Qwen35,
}
