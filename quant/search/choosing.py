"""The seam between packing and what computes it, and which of the two that is."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from tokamac.engine.device import device_kind
from tokamac.engine.limits.config_cost import Packing

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np

    Arrays = tuple[mx.array, mx.array, mx.array]


class Implementation(Protocol):
    """Finds and compares affine groups. Weights here are matrices; packings are affine."""

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
    """Return numba's where MLX computes on the CPU, and MLX's own where it has a GPU, or where numba is not installed.

    Both find the same: their errors agree within half a per cent. On a CPU, MLX's takes some thirty times as long.
    """
    if device_kind() == "cpu" and find_spec("numba") is not None:
        from tokamac.quant.search.on_cpu import NumbaSearch

        return NumbaSearch()
    from tokamac.quant.search.on_mlx import MlxSearch

    return MlxSearch()
