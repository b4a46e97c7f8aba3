"""Packing weights with less squared error than rounding has, in the same format, and measuring that error.

``search`` packs affine groups, ``search_scales`` microscaling formats; ``squared_error`` takes any. ``implementation().name`` says
what computes affine groups here. Importing this does no work: MLX is loaded by the first call, and numba where it is used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokamac.quant.search.blocks import search_scales
    from tokamac.quant.search.packing import implementation, search, squared_error

__all__ = ["implementation", "search", "search_scales", "squared_error"]


def __getattr__(name: str) -> Any:
    if name in ("implementation", "search", "squared_error"):
        from tokamac.quant.search import packing as module
    elif name == "search_scales":
        from tokamac.quant.search import blocks as module  # type: ignore[no-redef]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)
