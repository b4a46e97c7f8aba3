"""Quantization search: less squared error than rounding, in the same format. Loads no MLX or numba."""

# kernels.py computes on a plain CPU, on_mlx.py elsewhere and for microscaling formats.

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
    @property
    def name(self) -> str: ...

    def search(self, weight: "mx.array", packing: Packing, importance: "np.ndarray | None") -> "Arrays":
        """Return words, scales, biases. weight: (rows, in); importance: (parts, in), equal shares of rows."""
        ...

    def squared_error(self, weight: "mx.array", arrays: "Sequence[mx.array]", packing: Packing) -> tuple[float, float]:
        """Return Σ (weight − packed)² and Σ weight²."""
        ...


def implementation() -> Implementation:
    """Return numba's search on a CPU, MLX's on a GPU or without numba."""
    # Errors agree within half a per cent; on a CPU, MLX's takes some thirty times as long.
    if device_kind() == "cpu" and find_spec("numba") is not None:
        from .kernels import NumbaSearch

        return NumbaSearch()
    from .on_mlx import MlxSearch

    return MlxSearch()


def search(weight: "mx.array", packing: Packing, importance: "np.ndarray | None" = None) -> "Arrays":
    """Return affine groups minimising Σ h · (w − (scale · q + bias))², in mx.quantize's format.

    No group is worse than with mx.quantize. Raises ValueError for bad shapes, types, packings or importance.

    Args:
        weight: (…, in) of float32, float16 or bfloat16, finite.
        packing: Affine.
        importance: h ≥ 0: (in,), or (experts, in) for (experts, out, in); only ratios within a group matter.
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
    """Return Σ error² and Σ weight² of any packed form, in float64; bounded extra memory.

    weight: (…, in). arrays: words, scales[, biases], evaluated as scale · q + bias in float32.
    """
    from .on_mlx import unpacked_error

    exact, *packed = (each.reshape(-1, each.shape[-1]) for each in (weight, *arrays))
    affine = packing.mode == "affine" and _searchable(weight)
    return (implementation().squared_error if affine else unpacked_error)(exact, packed, packing)


def _searchable(weight: "mx.array") -> bool:
    return str(weight.dtype).removeprefix("mlx.core.") in DTYPES
