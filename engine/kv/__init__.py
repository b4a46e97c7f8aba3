"""Keys and values: how they are stored, packed, windowed and rewound.

A cache is a layout (growing, or a ring with pinned sinks) times a codec for keys and one for values (the model's own type, or
affine groups of a few bits). A plan turns a model's own cache list into such caches; one seam leads attention to them. The names
below are imported on first use, with MLX, so that sizes can be computed without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import install_seam
    from .cache import Cache, nbytes, rewindable
    from .plan import CachePlan, LayerPlan, plan_caches

__all__ = ["Cache", "CachePlan", "LayerPlan", "install_seam", "nbytes", "plan_caches", "rewindable"]

_MODULES = {"install_seam": "attention", "Cache": "cache", "nbytes": "cache", "rewindable": "cache"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'plan')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
