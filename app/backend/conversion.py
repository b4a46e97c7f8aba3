"""What ``tokamac convert --json`` says, a frozen dataclass for each kind of line, decoded strictly. The screen imports no MLX."""

import json
from dataclasses import dataclass
from typing import Literal

from tokamac.app.backend.shapes import ShapeError, build
from tokamac.engine.errors import TokamacError


class LineError(TokamacError):
    """A line that is none of these."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How weights are packed."""

    bits: int
    group_size: int
    mode: str


@dataclass(frozen=True, slots=True)
class PartLine:
    """Tensors of one part of the model that are packed alike; None: unpacked."""

    part: str
    packing: Packing | None
    tensors: int
    parameters: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Disk:
    """Room on the disk of the new folder, bytes."""

    needed: int
    free: int
    fits: bool


@dataclass(frozen=True, slots=True)
class Planned:
    """A dry run's answer. Bytes and seconds; seconds: about, of converting alone, None is unknown. quality: nothing yet."""

    path: str
    weight_bytes: int
    bits_per_weight: float
    source_bytes: int
    output_bytes: int
    seconds: float | None
    peak_memory_bytes: int
    quality: None
    parameters: int
    parts: tuple[PartLine, ...]
    disk: Disk
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TensorWritten:
    """A tensor is written: ``done`` of ``total``."""

    name: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Stage:
    """How far a stage has come. total: None is not known yet. peak_memory_bytes: the most MLX held so far."""

    stage: str
    done: int
    total: int | None
    unit: Literal["bytes", "steps"]
    peak_memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Expected:
    """Decoding on this machine with so many tokens of context, tokens a second; None is unknown."""

    before_tps: float | None
    after_tps: float | None
    context: int


@dataclass(frozen=True, slots=True)
class Quality:
    """How close the result is to its source; quant/divergence.py says what each figure is. None is unknown.

    positions: None where no text was compared, and ``unable`` may say why. concerns: what is worse than it should be.
    """

    relative_error: float | None
    kl: float | None
    perplexity_ratio: float | None
    kl_se: float | None
    top1: float | None
    reference_perplexity: float | None
    reference_perplexity_se: float | None
    perplexity: float | None
    perplexity_se: float | None
    perplexity_ratio_se: float | None
    positions: int | None
    layers: tuple[float | None, ...]
    unable: str | None
    concerns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Converted:
    """The result. Bytes and seconds; quality: None was not measured."""

    path: str
    weight_bytes: int
    bits_per_weight: float
    source_bytes: int
    seconds: float
    peak_memory_bytes: int
    quality: Quality | None


@dataclass(frozen=True, slots=True)
class Refused:
    """It failed, or was not begun."""

    error: str
    hint: str


Line = Planned | TensorWritten | Stage | Expected | Converted | Refused

_KINDS: dict[object, type[Line]] = {
    "plan": Planned,
    "tensor": TensorWritten,
    "stage": Stage,
    "expected": Expected,
    "converted": Converted,
    "error": Refused,
}


def decode(line: bytes) -> Line:
    """Return what a line of JSON says. Raises LineError."""
    try:
        value = json.loads(line)
        if not isinstance(value, dict) or value.get("event") not in _KINDS:
            raise ShapeError("unknown kind")
        event = value.pop("event")
        found: Line = build(_KINDS[event], value, str(event))
    except (ValueError, RecursionError, TypeError) as error:
        raise LineError(f"a line of the conversion is not understood: {error}") from error
    return found
