"""How a weight becomes packed words: the seam between a conversion and what finds the codes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx

from tokamac.engine.limits.config_cost import Packing
from tokamac.quant.options import SEARCHED

if TYPE_CHECKING:
    import numpy as np

BLOCK_WEIGHTS = 1 << 22
"""Weights that are rounded at once: MLX takes up to 77 bytes a weight for it on a CPU, so this bounds that to 0.3 GB."""


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
        rows = weight.reshape(-1, weight.shape[-1])
        step = max(1, BLOCK_WEIGHTS // rows.shape[1])
        if rows.shape[0] <= step:
            return tuple(mx.quantize(weight, **asdict(packing)))
        whole: list[mx.array] = []
        for begin in range(0, rows.shape[0], step):
            block = mx.quantize(rows[begin : begin + step], **asdict(packing))
            whole = whole or [mx.zeros((rows.shape[0], part.shape[1]), part.dtype) for part in block]
            for into, part in zip(whole, block, strict=True):
                into[begin : begin + step] = (
                    part  # in place, as nothing else holds it: joining blocks would hold all twice
                )
            mx.eval(*whole)
        return tuple(part.reshape(*weight.shape[:-1], part.shape[-1]) for part in whole)


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
