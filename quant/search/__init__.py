"""Packing weights with less squared error than rounding has, in the same format, and measuring that error.

``search`` packs affine groups of any rank on any device, ``squared_error`` takes every packed form, and ``implementation().name``
says what computes here: kernels.py on a plain CPU, on_mlx.py elsewhere. Microscaling formats are searched by
``on_mlx.search_scales``. Importing this package loads neither MLX nor numba.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from tokamac.engine.device import device_kind
from tokamac.engine.perf.config_cost import Packing

from ..options import BITS, DTYPES, GROUP_SIZES

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np

    Arrays = tuple[mx.array, mx.array, mx.array]


class Implementation(Protocol):
    """Finds and compares affine groups. Weights are matrices here."""

    @property
    def name(self) -> str:
        """What a plan calls it."""
        ...

    def search(self, weight: "mx.array", packing: Packing, importance: "np.ndarray | None") -> "Arrays":
        """Return words, scales and biases. weight: (rows, in). importance: (parts, in), each for an equal share of the rows."""
        ...

    def squared_error(self, weight: "mx.array", arrays: "Sequence[mx.array]", packing: Packing) -> tuple[float, float]:
        """Return Σ (weight − packed)² and Σ weight²."""
        ...


def implementation() -> Implementation:
    """Return numba's where MLX computes on the CPU, and MLX's own where it has a GPU or numba is not installed.

    Both find the same: their errors agree within half a per cent. On a CPU, MLX's takes some thirty times as long.
    """
    if device_kind() == "cpu" and find_spec("numba") is not None:
        from .kernels import NumbaSearch

        return NumbaSearch()
    from .on_mlx import MlxSearch

    return MlxSearch()


def search(weight: "mx.array", packing: Packing, importance: "np.ndarray | None" = None) -> "Arrays":
    """Return affine groups that minimise Σ h · (w − (scale · q + bias))², in mx.quantize's format.

    No group's error is larger than with mx.quantize: where nothing better was found, its scale and bias stand. Errors are taken in
    float32 from scale and bias as stored, and finite weights give finite scales and biases, however large or small.

    Args:
        weight: (…, in) of float32, float16 or bfloat16, finite.
        packing: affine.
        importance: h, not negative: (in,), or (experts, in) for a weight (experts, out, in). Only ratios within a group matter; a
            group that is all zero counts as one that is all alike.

    Returns:
        Words, scales and biases; the last two have the weight's type, and may have either sign.

    Raises:
        ValueError: For other shapes, types, packings or importance.
    """
    from .on_mlx import checked

    bits, size = packing.bits, packing.group_size
    if bits not in BITS or size not in GROUP_SIZES or packing.mode != "affine":
        raise ValueError(f"{packing} can't be searched")
    if not _searchable(weight) or weight.ndim < 2 or not weight.size or weight.shape[-1] % size:
        raise ValueError(f"a weight of {weight.dtype} {weight.shape} can't be packed in groups of {size}")
    rows = weight.reshape(-1, weight.shape[-1])
    found = implementation().search(rows, packing, checked(importance, weight))
    words, scales, biases = (each.reshape(*weight.shape[:-1], -1) for each in found)
    return words, scales, biases


def squared_error(weight: "mx.array", arrays: "Sequence[mx.array]", packing: Packing) -> tuple[float, float]:
    """Return the sum of squared errors and of squared weights of any packed form, added up in float64.

    weight: (…, in), floating. arrays: words, scales[, biases] as mx.quantize gives them. A packed weight is scale · q + bias as
    float32 computes it, which is what a product with it uses. Memory beyond the arguments is bounded.
    """
    from .on_mlx import unpacked_error

    exact, *packed = (each.reshape(-1, each.shape[-1]) for each in (weight, *arrays))
    affine = packing.mode == "affine" and _searchable(weight)
    return (implementation().squared_error if affine else unpacked_error)(exact, packed, packing)


def _searchable(weight: "mx.array") -> bool:
    return str(weight.dtype).removeprefix("mlx.core.") in DTYPES
