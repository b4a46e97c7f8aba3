"""What ``tokamac convert --dry-run`` says: what becomes of which part of a model, and what that takes."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamac.app.output import table
from tokamac.app.sanitise import sanitise_line
from tokamac.app.tui.units import UNKNOWN, count, seconds, short, size, sizes

if TYPE_CHECKING:
    from tokamac.quant import Plan


@dataclass(frozen=True, slots=True)
class Disk:
    """Room on the disk of the new folder, bytes."""

    needed: int
    free: int

    @property
    def fits(self) -> bool:
        """Whether there is enough."""
        return self.needed <= self.free


def disk_for(target: Path, plan: "Plan") -> Disk:
    """Return what ``plan`` needs of the disk that ``target`` will be on, and what it has."""
    from tokamac.quant.folder import SPARE_BYTES, free_bytes

    return Disk(plan.needed_bytes + SPARE_BYTES, free_bytes(target))


def report(plan: "Plan", target: Path, disk: Disk, converting_s: float | None) -> str:
    """Return the plan for people. converting_s: about how long it takes; None is unknown."""
    from tokamac.quant.card import packing_name
    from tokamac.quant.report import by_part

    head = ["part", "packing", "tensors", "weights", "size"]
    rows = [
        [row.part, packing_name(row.packing), count(row.tensors), short(row.parameters), size(row.nbytes)]
        for row in by_part(plan)
    ]
    whole = ["all", "", count(len(plan.tensors)), short(plan.parameters), size(plan.weight_bytes)]
    parts = table([head, *rows, whole], right=(2, 3, 4))
    title = sanitise_line(f"{plan.source} → {target}  (nothing is written)")
    return "\n\n".join([title, parts, table(_figures(plan, disk, converting_s))])


def to_json(plan: "Plan", target: Path, disk: Disk, converting_s: float | None) -> dict[str, Any]:
    """Return the plan as one line of JSON, under the names that the finished conversion has."""
    from tokamac.quant.report import by_part

    return {
        "event": "plan",
        "path": str(target),
        "weight_bytes": plan.weight_bytes,
        "bits_per_weight": plan.bits_per_weight,
        "source_bytes": plan.source_bytes,
        "output_bytes": plan.output_bytes,
        "seconds": converting_s,
        "peak_memory_bytes": plan.peak_memory_bytes,
        "quality": None,
        "parameters": plan.parameters,
        "parts": [
            {**asdict(row), "packing": None if row.packing is None else asdict(row.packing)} for row in by_part(plan)
        ],
        "disk": {**asdict(disk), "fits": disk.fits},
        "notes": list(plan.notes),
    }


def _figures(plan: "Plan", disk: Disk, converting_s: float | None) -> list[list[str]]:
    needed, free = sizes(disk.needed, disk.free)
    room, target = "fits" if disk.fits else "does not fit", plan.options.target_bpw
    bits = f"{plan.bits_per_weight:.2f} bits per weight" if target is None else f"at most {target:.2f} bits per weight"
    return [
        [
            "weights",
            f"{size(plan.source_bytes)} → {size(plan.weight_bytes + plan.needed_bytes - plan.output_bytes)}, {bits}",
        ],
        ["memory", f"{size(plan.peak_memory_bytes)} at most"],
        ["disk", f"{needed} needed, {free} free: {room}"],
        ["time", _time(plan, converting_s)],
    ]


def _time(plan: "Plan", converting_s: float | None) -> str:
    options = plan.options
    if converting_s is not None:
        calibrating = ["looking at the calibration text"] if options.calibration is not None else []
        apart = " and ".join([*calibrating, *(["comparing at the end"] if options.verify else [])])
        return f"about {seconds(converting_s)} to convert{f', not counting {apart}' if apart else ''}"
    if options.target_bpw is not None:
        return f"{UNKNOWN}: how sensitive each tensor is has to be measured"
    return f"{UNKNOWN}: {options.how} runs the model over a text"
