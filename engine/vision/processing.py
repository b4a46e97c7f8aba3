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


def normalised(image: Any, numbers: Numbers) -> "Pixels":
    """Return an RGB image as (3, H, W) float32."""
    import numpy as np

    values = np.moveaxis(np.asarray(image, np.uint8), -1, 0).astype(np.float64) * numbers.factor
    mean, std = (np.array(each, np.float32)[:, None, None] for each in (numbers.mean, numbers.std))
    return (values.astype(np.float32) - mean) / std


def patches(pixels: "Pixels", size: int, merge: int = 1, repeat: int = 1) -> "Pixels":
    """Return (N, 3 · repeat · size²), by blocks of merge × merge."""
    import numpy as np

    channels, height, width = pixels.shape
    rows, columns = height // size, width // size
    cut = pixels.reshape(channels, rows // merge, merge, size, columns // merge, merge, size)
    cut = cut.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    cut = np.broadcast_to(cut, (*cut.shape[:5], repeat, size, size))
    return np.ascontiguousarray(cut.reshape(rows * columns, channels * repeat * size * size))


def fitting(width: int, height: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Return (width, height) in multiples of ``factor``. Raises PictureError."""
    if max(width, height) > MOST_ASPECT * min(width, height):
        raise PictureError(f"a picture of {width:,} × {height:,} is too narrow for this model", "Cut a part out of it.")
    across, down = round(width / factor) * factor, round(height / factor) * factor
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
