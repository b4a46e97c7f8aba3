"""One-shot conversion to a quantized MLX model folder.

    from tokamac.quant import convert

    report = convert("path/or/hub-id", "out", bits=4, group_size=64)

Importing this package does no work: MLX is loaded by the first conversion.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokamac.quant.conversion import Conversion, TensorDone, convert
    from tokamac.quant.options import Options
    from tokamac.quant.plan import Plan, TensorPlan

__all__ = ["Conversion", "Options", "Plan", "TensorDone", "TensorPlan", "convert"]


def __getattr__(name: str) -> Any:
    if name in ("Conversion", "TensorDone", "convert"):
        from tokamac.quant import conversion as module
    elif name == "Options":
        from tokamac.quant import options as module  # type: ignore[no-redef]
    elif name in ("Plan", "TensorPlan"):
        from tokamac.quant import plan as module  # type: ignore[no-redef]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)
