"""How a weight becomes packed words: the seam between a conversion and what finds the codes."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx

from tokamac.engine.device import device_kind
from tokamac.engine.limits.config_cost import Packing
from tokamac.quant.options import SEARCHED

if TYPE_CHECKING:
    import numpy as np

BLOCK_WEIGHTS = 1 << 22
"""Weights that are rounded at once, by all cores: MLX takes up to 77 bytes a weight on a CPU, so this bounds that to 0.3 GB."""


class Quantizer(Protocol):
    """Packs one weight at a time."""

    def pack(self, path: str, weight: mx.array, packing: Packing) -> tuple[mx.array, ...]:
        """Return words, scales and, of affine groups, biases, in the layout, shapes and types of ``mx.quantize``.

        path: of the module. weight: (…, in), floating; scales and biases have its type.
        """
        ...


class Round:
    """MLX's own: each value goes to the nearest step between a group's two ends."""

    def pack(self, path: str, weight: mx.array, packing: Packing) -> tuple[mx.array, ...]:  # noqa: ARG002
        """See Quantizer."""
        rows, lanes = weight.reshape(-1, weight.shape[-1]), _lanes()
        step = max(1, BLOCK_WEIGHTS // len(lanes) // rows.shape[1])
        # MLX on a CPU packs 32 values at a time: in groups of 16, an odd number of narrow rows would end within such a pack.
        # Where all rows together are odd, the last block is too, as the whole would be.
        step += step % 2
        if rows.shape[0] <= step:
            return tuple(mx.quantize(weight, **asdict(packing)))
        whole: list[mx.array] = []
        for begin in range(0, rows.shape[0], step * len(lanes)):
            for at, lane in zip(range(begin, rows.shape[0], step), lanes, strict=False):
                block = mx.quantize(rows[at : at + step], **asdict(packing), stream=lane)
                whole = whole or [mx.zeros((rows.shape[0], part.shape[1]), part.dtype) for part in block]
                for into, part in zip(whole, block, strict=True):
                    # In place, as nothing else holds it: joining blocks would hold all twice.
                    into[at : at + step] = part
            mx.eval(*whole)
        return tuple(part.reshape(*weight.shape[:-1], part.shape[-1]) for part in whole)


@cache
def _lanes() -> "tuple[mx.ThreadLocalStream | mx.Stream, ...]":
    """Return the streams to share the work among: on a CPU one for each core, as MLX rounds with one core of a stream."""
    device = mx.default_device()
    if device_kind() != "cpu":
        return (mx.default_stream(device),)
    return tuple(mx.new_thread_local_stream(device) for _ in range(os.cpu_count() or 1))


@dataclass(frozen=True, slots=True)
class Search:
    """For every group the scale, and of affine ones the bias, of least squared error; what has no gain in it is rounded.

    moments: by module path, the mean squared input of each channel over a text; errors weigh by it where it is known.
    """

    moments: "Mapping[str, np.ndarray]" = field(default_factory=dict)

    def pack(self, path: str, weight: mx.array, packing: Packing) -> tuple[mx.array, ...]:
        """See Quantizer."""
        from tokamac.quant.search import search, search_scales

        if packing.mode not in SEARCHED:
            return Round().pack(path, weight, packing)
        find = search if packing.mode == "affine" else search_scales
        return find(weight, packing, self.moments.get(path))
