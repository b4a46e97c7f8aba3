"""Pixels as a tower takes them: scaled, normalised, cut into patches. Equal to transformers' Pillow processors."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import PictureError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Pixels = npt.NDArray[np.float32]

HALF = (0.5, 0.5, 0.5)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
BILINEAR, BICUBIC, LANCZOS = 2, 3, 1  # as Pillow counts them
LONGEST_SIDE = 4096  # of a picture that is cut into tiles
MOST_ASPECT = 200


@dataclass(frozen=True, slots=True)
class Numbers:
    resample: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    factor: float = 1 / 255

    @classmethod
    def of(cls, settings: Mapping[str, Any], resample: int, mean: Sequence[float], std: Sequence[float]) -> "Numbers":
        return cls(
            int(settings.get("resample") or resample),
            tuple(float(each) for each in settings.get("image_mean") or mean),
            tuple(float(each) for each in settings.get("image_std") or std),
            float(settings.get("rescale_factor") or 1 / 255),
        )


def scaled(image: Any, width: int, height: int, numbers: Numbers) -> Any:
    return image if image.size == (width, height) else image.resize((width, height), resample=numbers.resample)


def normalised(image: Any, numbers: Numbers, *, half: bool = False) -> "Pixels":
    """Return an RGB image as (3, H, W) float32. half: in steps that are rounded to bfloat16."""
    import numpy as np

    if half:
        import mlx.core as mx

        exact = mx.array(np.moveaxis(np.asarray(image, np.uint8), -1, 0)).astype(mx.float32)
        parts = (mx.array(each).astype(mx.bfloat16)[:, None, None] for each in (numbers.mean, numbers.std))
        with mx.stream(mx.cpu):
            levels, (middle, spread) = (exact * numbers.factor).astype(mx.bfloat16), parts
            return np.array(((levels - middle) / spread).astype(mx.float32))

    values = np.moveaxis(np.asarray(image, np.uint8), -1, 0).astype(np.float64) * numbers.factor
    mean, std = (np.array(each, np.float32)[:, None, None] for each in (numbers.mean, numbers.std))
    return (values.astype(np.float32) - mean) / std


def patches(pixels: "Pixels", size: int, merge: int = 1, repeat: int = 1, *, colours_last: bool = False) -> "Pixels":
    """Return (N, 3 · repeat · size²), by blocks of merge × merge."""
    import numpy as np

    channels, height, width = pixels.shape
    rows, columns = height // size, width // size
    cut = pixels.reshape(channels, rows // merge, merge, size, columns // merge, merge, size)
    cut = cut.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    cut = np.broadcast_to(cut, (*cut.shape[:5], repeat, size, size))
    cut = np.moveaxis(cut, 4, -1) if colours_last else cut
    return np.ascontiguousarray(cut.reshape(rows * columns, channels * repeat * size * size))


def too_narrow(width: int, height: int) -> PictureError:
    return PictureError(f"a picture of {width:,} × {height:,} is too narrow for this model", "Cut a part out of it.")


def fitting(width: int, height: int, factor: int, least: int, most: int, *, side: int = 0) -> tuple[int, int]:
    """Return (width, height) in multiples of ``factor``, of at least ``side`` before they are scaled to fit."""
    across, down = (max(side, round(each / factor) * factor) for each in (width, height))
    if across * down > most:
        shrink = math.sqrt(width * height / most)
        across, down = (max(factor, math.floor(side / shrink / factor) * factor) for side in (width, height))
    elif across * down < least:
        grow = math.sqrt(least / (width * height))
        across, down = (math.ceil(side * grow / factor) * factor for side in (width, height))
    return across, down


def longest_edge(width: int, height: int, edge: int) -> tuple[int, int]:
    wide, aspect = width >= height, width / height
    if wide:
        width, height = edge, int(edge / aspect)
        height += height % 2
    else:
        width, height = int(edge * aspect), edge
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    aspect = width / height
    if width >= height and width > LONGEST_SIDE:
        width, height = LONGEST_SIDE, int(LONGEST_SIDE / aspect)
    elif height > width and height > LONGEST_SIDE:
        width, height = int(LONGEST_SIDE * aspect), LONGEST_SIDE
    return max(width, 1), max(height, 1)


def whole_tiles(width: int, height: int, tile: int) -> tuple[int, int]:
    aspect = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        return width, math.ceil(int(width / aspect) / tile) * tile
    height = math.ceil(height / tile) * tile
    return math.ceil(int(height * aspect) / tile) * tile, height


def within_patches(width: int, height: int, square: int, most: int) -> tuple[int, int]:
    """Return the largest (width, height) in multiples of ``square`` with at most ``most`` squares. Raises PictureError."""
    factor = math.sqrt(most * square**2 / (width * height))
    across, down = math.floor(factor * width / square), math.floor(factor * height / square)
    if not across and not down:
        raise too_narrow(width, height)
    if not down:
        across, down = min(width // height, most), 1
    elif not across:
        across, down = 1, min(height // width, most)
    return across * square, down * square


def closest_grid(width: int, height: int, tile: int, least: int, most: int) -> tuple[int, int]:
    """Return the (columns, rows) of tiles, ``least`` to ``most`` of them, whose aspect is the nearest to a picture's."""
    counts = range(1, most + 1)
    grids = sorted(((c, r) for c in counts for r in counts if least <= c * r <= most), key=lambda at: at[0] * at[1])
    best, nearest = (1, 1), math.inf
    for columns, rows in grids:
        away = abs(width / height - columns / rows)
        # Of equally near ones the larger, unless the picture has less than half of its pixels.
        if away < nearest or (away == nearest and width * height > 0.5 * tile**2 * columns * rows):
            best, nearest = (columns, rows), away
    return best


def canvas_of(width: int, height: int, tile: int, most: int, *, largest: bool) -> tuple[int, int]:
    """Return the (columns, rows) of at most ``most`` tiles in which a picture keeps most of its size, on the least space."""
    import numpy as np

    grids = [(c, r) for r in range(1, most + 1) for c in range(1, most // r + 1)]
    sides = np.array(grids, np.float32) * tile / np.array((width, height), np.float32)
    scales = sides.min(axis=1)
    bigger = scales[scales >= 1]
    best = scales.max() if largest or not len(bigger) else bigger.min()
    return min((grid for grid, scale in zip(grids, scales, strict=True) if scale == best), key=math.prod)


def undistorted(width: int, height: int, most_width: int, most_height: int) -> tuple[int, int]:
    across, down = most_width / width, most_height / height
    if across < down:
        return most_width, max(1, min(math.floor(height * across), most_height))
    return max(1, min(math.floor(width * down), most_width)), most_height


def padded(image: Any, width: int, height: int) -> Any:
    """Return an image whose rest, right and below, is black."""
    return image if image.size == (width, height) else image.crop((0, 0, width, height))


def tiled(image: Any, columns: int, rows: int, tile: int, numbers: Numbers) -> list[Any]:
    whole = scaled(image, columns * tile, rows * tile, numbers)
    boxes = [(c * tile, r * tile, (c + 1) * tile, (r + 1) * tile) for r in range(rows) for c in range(columns)]
    return [whole.crop(box) for box in boxes]
