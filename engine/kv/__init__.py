"""Keys and values: how they are kept, packed, windowed and taken back.

A cache is a layout (growing, or a ring with pinned sinks) times a codec for keys and one for values (the model's own type, or
affine groups of a few bits). A plan turns a model's own cache list into such caches; one seam leads attention to them.

    codec   how a token's keys or values are written down      size    the same in bytes, without MLX
    layout  where they lie, how long, and who sees them        cache   the two put together, as mlx-lm's models call it
    pinned  the first tokens, moved along with a window        rotary  how a model rotates keys, and rotating them further
    attention  the seam; cpu  many queries through NumPy        plan    which layer gets what, and why (survey, probe, windows)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokamac.engine.kv.attention import install_seam
    from tokamac.engine.kv.cache import Cache, bypassed, nbytes, offset, rewindable, trim
    from tokamac.engine.kv.plan import CachePlan, LayerPlan, plan_caches

__all__ = [
    "Cache",
    "CachePlan",
    "LayerPlan",
    "bypassed",
    "install_seam",
    "nbytes",
    "offset",
    "plan_caches",
    "rewindable",
    "trim",
]

_HOMES = {
    "attention": ("install_seam",),
    "cache": ("Cache", "bypassed", "nbytes", "offset", "rewindable", "trim"),
    "plan": ("CachePlan", "LayerPlan", "plan_caches"),
}


def __getattr__(name: str) -> Any:
    # MLX is imported with the first of these names, so that sizes can be told without it.
    from importlib import import_module

    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
