"""One-shot conversion to a quantized MLX model folder.

    from tokamac.quant import convert, quality

    report = convert("path/or/hub-id", "out", bits=4, group_size=64)
    report.bits_per_weight, report.quality
    quality("out", "path/or/hub-id").kl

Importing this package does no work: MLX is loaded by the first conversion.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .conversion import Conversion, convert
    from .evaluation import quality
    from .options import Options
    from .plan import Plan, TensorPlan
    from .report import Outcome, Quality, StageDone
    from .writer import TensorDone

__all__ = [
    "Conversion",
    "Options",
    "Outcome",
    "Plan",
    "Quality",
    "StageDone",
    "TensorDone",
    "TensorPlan",
    "convert",
    "quality",
]  # fmt: skip

# Which module of this package each public name is defined in.
_HOMES = {
    "Conversion": "conversion", "convert": "conversion", "Options": "options", "Plan": "plan", "TensorPlan": "plan",
    "Quality": "report", "quality": "evaluation", "Outcome": "report", "StageDone": "report", "TensorDone": "writer",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
