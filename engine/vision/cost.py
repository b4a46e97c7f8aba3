"""What a tower takes for a picture: operations and memory, from the shapes of its weights."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..kv.costs import AttentionCall, AttentionDevice, kernel_of

if TYPE_CHECKING:
    from ..model.safetensors import StoredTensor
    from .families import PictureFamily, PicturePlan

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|blk)\.(\d+)\.")
_ROWS = 3.5  # rows of the layer's input that exist beside queries, keys, values and the feed-forward's; measured


@dataclass(frozen=True, slots=True)
class TowerShape:
    nbytes: int  # as held
    in_layers: int  # parameters that each patch is multiplied by
    after: int  # the same of each token
    layers: int
    width: int
    heads: int
    widest: int

    @classmethod
    def of(
        cls, stored: "Mapping[str, StoredTensor]", vision: Mapping[str, Any], group_size: int, *, wide: bool
    ) -> "TowerShape":
        # wide: 16-bit numbers are held as float32.
        in_layers, after, numbers, widest = 0, 0, set[str](), 0
        for name, tensor in stored.items():
            scales = stored.get(f"{name.rpartition('.')[0]}.scales")
            if len(tensor.shape) < 2 or name.endswith((".scales", ".biases")) or "position" in name:
                continue
            parameters = math.prod(tensor.shape) if scales is None else math.prod(scales.shape) * group_size
            if found := _LAYER.search(name):
                numbers.add(found[1])
                widest = max(widest, tensor.shape[0])
            in_layers, after = (in_layers + parameters, after) if found else (in_layers, after + parameters)
        heads = vision.get("num_attention_heads") or vision.get("num_heads") or 1
        held = {2: 4} if wide else {}
        nbytes = sum(math.prod(each.shape) * held.get(each.item_bytes, each.item_bytes) for each in stored.values())
        width = vision.get("hidden_size") or vision.get("embed_dim") or heads
        return cls(nbytes, in_layers, after, max(len(numbers), 1), int(width), int(heads), widest)


@dataclass(frozen=True, slots=True)
class TowerCost:
    operations: int
    working: int  # bytes beside the tower's weights


@dataclass(frozen=True, slots=True)
class PicturePrice:
    """seen: the (width, height) the model is shown. see_s, read_s: of tower and prefill; None if not known."""

    size: tuple[int, int]
    seen: tuple[int, int]
    tokens: int
    see_s: float | None = None
    read_s: float | None = None

    @property
    def seconds(self) -> float | None:
        return None if self.see_s is None or self.read_s is None else self.see_s + self.read_s


def cost_of(
    shape: TowerShape, family: "PictureFamily", plan: "PicturePlan", value_bytes: int, device: AttentionDevice
) -> TowerCost:
    # A product takes two operations a parameter and row, attention four a pair of patches and number of its width.
    patches = plan.tokens * family.merge**2
    mean, most = family.attended(patches)
    attention = 4 * patches * mean * shape.width * shape.layers
    operations = 2 * (shape.in_layers * patches + shape.after * plan.tokens) + round(attention)
    rows = patches * (_ROWS * shape.width + max(3 * shape.width, 2 * shape.widest))
    return TowerCost(operations, round(value_bytes * (rows + _scores(shape, patches, most, value_bytes, device))))


def _scores(shape: TowerShape, patches: int, most: int, value_bytes: int, device: AttentionDevice) -> int:
    dim, tiles = shape.width // shape.heads, max(1, patches // max(most, 1))
    number = "float32" if value_bytes == 4 else "bfloat16"
    call = AttentionCall(shape.heads, shape.heads, most, most, dim, dim, "none", number, batch=tiles)  # type: ignore[arg-type]
    return 2 * tiles * shape.heads * most * most if kernel_of(call, device) == "unfused" else 0
