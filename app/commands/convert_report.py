"""What ``tokamac convert`` says at the end: sizes, quality, the speed to expect before and after, and what to type next."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamac.app.fidelity import sentence
from tokamac.app.output import table
from tokamac.app.sanitise import sanitise_line
from tokamac.app.tui.units import rate, seconds, size
from tokamac.engine.errors import TokamacError

if TYPE_CHECKING:
    from tokamac.quant import Conversion

CONTEXT = 4096

_FIELDS = (
    "path", "weight_bytes", "bits_per_weight", "source_bytes", "seconds", "peak_memory_bytes",
)  # fmt: skip
"""The public contract's names, in its order; the quality comes last."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens a second that decoding is expected to reach on this machine, before and after; None is unknown."""

    before_tps: float | None
    after_tps: float | None


def speeds_of(source: Path, converted: Path) -> Speeds:
    """Return what to expect of both folders, from their headers and this machine alone."""
    return Speeds(_expected_tps(source), _expected_tps(converted))


def speeds_json(speeds: Speeds) -> dict[str, Any]:
    """Return the line that goes before the result."""
    return {"event": "expected", "before_tps": speeds.before_tps, "after_tps": speeds.after_tps, "context": CONTEXT}


def to_json(report: "Conversion") -> dict[str, Any]:
    """Return the result, under the names of the public contract."""
    plain = report.to_json()
    return {"event": "converted", **{name: plain[name] for name in (*_FIELDS, "quality")}}


def summary(report: "Conversion", speeds: Speeds) -> str:
    """Return the result for people."""
    sizes = f"{size(report.source_bytes)} → {size(report.weight_bytes)}, {report.bits_per_weight:.2f} bits per weight"
    expected = f"{rate(speeds.before_tps)} → {rate(speeds.after_tps)} expected here, {CONTEXT:,} tokens in"
    took = f"{seconds(report.seconds)}, and {size(report.peak_memory_bytes)} of memory at most"
    rows = [["size", sizes], ["quality", _compared(report)], ["speed", expected], ["took", took]]
    following = f"next: tokamac chat {shlex.quote(as_folder(str(report.path)))}"
    return "\n".join([sanitise_line(str(report.path)), table(rows), sanitise_line(following)])


def _compared(report: "Conversion") -> str:
    found = report.quality
    if found is None:
        return "not compared with the source"
    said = sentence(found.quality, found.relative_error)
    return said if found.unable is None else f"{said}; no text was compared: {sanitise_line(found.unable)}"


def as_folder(path: str) -> str:
    """Return a path that can't be taken for a Hugging Face id or a flag."""
    return path if path.startswith(("/", ".", "~")) else f"./{path}"


def _expected_tps(folder: Path) -> float | None:
    from tokamac.engine.limits.inspect import inspect_model

    try:
        return inspect_model(folder, CONTEXT).expected_tps
    except TokamacError:  # a source of a form that only mlx-lm's conversion reads has no speed of its own
        return None
