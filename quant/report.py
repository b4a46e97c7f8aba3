"""What a conversion tells of itself: how far it has come, what its plan comes to, and how close the result is to its source.

Pure: values in, values out; no file is read here (provenance.py does that) and nothing is measured.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from tokamac.engine.limits.cost import PARTS, Tensor, part_of
from tokamac.engine.limits.part_names import PartName
from tokamac.quant.divergence import Quality, concerns
from tokamac.quant.options import CALIBRATED

if TYPE_CHECKING:
    from tokamac.engine.limits.config_cost import Packing
    from tokamac.quant.options import Options
    from tokamac.quant.plan import Plan, TensorPlan
    from tokamac.quant.provenance import Provenance

RECORD = "conversion.json"
"""The file of a converted model that says how it was made and how close it is to its source."""

FORMAT = 1


@dataclass(frozen=True, slots=True)
class StageDone:
    """Of a stage of a conversion in which no tensor is written: ``done`` of ``total`` steps."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class WeightError:
    """Of a packed tensor W, unpacked again as Ŵ: Σ (W − Ŵ)² and Σ W² over its weights."""

    squared_error: float
    squared_weights: float

    @property
    def relative(self) -> float | None:
        """‖W − Ŵ‖ ÷ ‖W‖; None where W is all zeros."""
        return math.sqrt(self.squared_error / self.squared_weights) if self.squared_weights else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How close a converted model is to its source. None was not measured.

    bits_per_weight: of the result, by which it is judged. relative_error: ‖W − Ŵ‖ ÷ ‖W‖ over all weights that were packed; None of
    awq, which scales them first.
    quality: what both models said of a text; None: they were not compared, and ``unable`` says why where that was not wished.
    layers: relative error of every layer's output on that text, errors of the layers before it included; empty where unknown.
    """

    bits_per_weight: float
    relative_error: float | None = None
    quality: Quality | None = None
    layers: tuple[float | None, ...] = ()
    unable: str | None = None

    @property
    def concerns(self) -> tuple[str, ...]:
        """What is worse than so many bits explain, each as a sentence; empty where all is well or nothing is known."""
        return () if self.quality is None else concerns(self.quality, self.bits_per_weight)

    def to_json(self) -> dict[str, Any]:
        """Return plain values: the names of the public contract first. Floats have four significant figures."""
        figures: dict[str, Any] = dict.fromkeys(field.name for field in fields(Quality))
        if self.quality is not None:
            figures = {name: _rounded(value) for name, value in asdict(self.quality).items()}
        return {
            "relative_error": _rounded(self.relative_error),
            "kl": figures["kl"],
            "perplexity_ratio": figures["perplexity_ratio"],
            **figures,
            "layers": [_rounded(layer) for layer in self.layers],
            "unable": self.unable,
            "concerns": list(self.concerns),
        }


@dataclass(frozen=True, slots=True)
class PartRow:
    """Tensors of one part of a model that are packed alike (None: unpacked). Bytes as written."""

    part: PartName
    packing: "Packing | None"
    tensors: int
    parameters: int
    nbytes: int


def relative_error(errors: Iterable[WeightError]) -> float | None:
    """Return ‖W − Ŵ‖ ÷ ‖W‖ over the weights of several tensors together; None where there are none."""
    known = list(errors)
    return WeightError(sum(e.squared_error for e in known), sum(e.squared_weights for e in known)).relative


def by_part(plan: "Plan") -> tuple[PartRow, ...]:
    """Return the plan's tensors, counted by part and packing, in the order of ``PARTS`` and the most weights first."""
    groups: dict[tuple[PartName, Packing | None], list[TensorPlan]] = {}
    for tensor in plan.tensors:
        part = part_of(Tensor(tensor.name, tensor.dtype, tensor.shape, 0), plan.config)
        groups.setdefault((part, tensor.packing), []).append(tensor)
    rows = [
        PartRow(part, packing, len(found), sum(t.parameters for t in found), sum(t.nbytes for t in found))
        for (part, packing), found in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: (PARTS.index(row.part), -row.parameters)))


def in_vain(plan: "Plan") -> str:
    """Return why the conversion gains nothing: its source is packed like that already, or smaller; "" where it gains something."""
    if not any(tensor.packing for tensor in plan.tensors):
        return ""
    if _copies(plan):
        return "the source is packed like this already: the result is a copy of it"
    if plan.weight_bytes <= plan.source_bytes:
        return ""
    bits = 8 * plan.source_bytes / plan.parameters
    return f"the source has {bits:.2f} bits per weight already: with {plan.bits_per_weight:.2f} it gets larger and no better"


def _copies(plan: "Plan") -> bool:
    """Whether every tensor is taken over. What a calibrated method packs looks so too, and a budget's choices are made later."""
    if plan.options.how in CALIBRATED or plan.options.target_bpw is not None:
        return False
    return all(each.kept or (each.packing is None and each.dtype == each.source_dtype) for each in plan.tensors)


def record(plan: "Plan", errors: Mapping[str, WeightError], result: Outcome | None, made: "Provenance") -> bytes:
    """Return ``conversion.json``. The same conversion gives the same bytes: no time, no folder, no memory figure is in it.

    errors: by the tensor's name in the plan, of those that were packed. result: None where nothing was compared.
    Floats have four significant figures; one tensor stands on one line.
    """
    facts = {
        "format": FORMAT,
        "versions": dict(made.versions),
        "tf32": made.tf32,
        "source": {"name": made.name, "config_sha256": made.config_sha256, "shards": [asdict(s) for s in made.shards]},
        "options": _options(plan.options, made),
        "parameters": plan.parameters,
        "weight_bytes": plan.weight_bytes,
        "bits_per_weight": _rounded(plan.bits_per_weight),
        "source_bytes": plan.source_bytes,
        "quality": None if result is None else _quality(result),
        "notes": list(plan.notes),
    }
    # What a calibrated method has packed, the plan takes over as if the source had held it so.
    packs = plan.options.how in CALIBRATED
    lines = [f' "{key}": {json.dumps(value, allow_nan=False)}' for key, value in facts.items()]
    rows = [_tensor(each, errors.get(each.name), kept=each.kept and not packs) for each in plan.tensors]
    tensors = [f"  {json.dumps(row, allow_nan=False)}" for row in rows]
    lines.append(' "tensors": [\n' + ",\n".join(tensors) + "\n ]")
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _tensor(tensor: "TensorPlan", error: WeightError | None, *, kept: bool) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "packing": None if tensor.packing is None else asdict(tensor.packing),
        "taken_over": kept,
        "bytes": tensor.nbytes,
        "relative_error": None if error is None else _rounded(error.relative),
    }


def _quality(result: Outcome) -> dict[str, Any]:
    """Return the figures. Why there are none may name a folder of this machine, so that is left out."""
    return {name: value for name, value in result.to_json().items() if name != "unable"}


def _options(options: "Options", made: "Provenance") -> dict[str, Any]:
    """Return what was asked for. A text of the user's is named by its hash: where it lies is nobody's business."""
    plain = asdict(options)
    if options.calibration is not None and options.calibration != "shipped":
        plain["calibration"] = {"sha256": made.calibration_sha256}
    return {**plain, "adapter": made.adapter, "method": options.how}


def _rounded(value: float | None) -> float | None:
    """Return ``value`` in four significant figures; whole numbers as they are."""
    return value if value is None or isinstance(value, int) else float(f"{value:.4g}")
