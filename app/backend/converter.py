"""``tokamac convert --json`` as a process of its own: what its lines say."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .command_process import LineProcess, Refused, decode_line


@dataclass(frozen=True, slots=True)
class PackingLine:
    """How weights are packed."""

    bits: int
    group_size: int
    mode: str


@dataclass(frozen=True, slots=True)
class PartLine:
    """Tensors of one part of the model that are packed alike; None: unpacked."""

    part: str
    packing: PackingLine | None
    tensors: int
    parameters: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DiskLine:
    """Room on the disk of the new folder, bytes."""

    needed: int
    free: int
    fits: bool


@dataclass(frozen=True, slots=True)
class Planned:
    """A dry run's answer. Bytes and seconds; seconds: about, of converting alone; quality_seconds: of the comparison at the end,
    None where none is wanted; of both, None is unknown. quality: nothing yet."""

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
    disk: DiskLine
    notes: tuple[str, ...]
    quality_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class TensorWritten:
    """A tensor is written: ``done`` of ``total``."""

    name: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class StageLine:
    """How far a stage has come. total: None is not known yet. peak_memory_bytes: the most MLX held so far."""

    stage: str
    done: int
    total: int | None
    unit: Literal["bytes", "steps"]
    peak_memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Expected:
    """Decoding on this machine with so many tokens of context, tokens a second; None is unknown.

    reason: why one is unknown.
    """

    before_tps: float | None
    after_tps: float | None
    context: int
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class QualityLine:
    """How close the result is to its source; quant/report.py says what each figure is. None is unknown.

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
class ConvertedLine:
    """The result. Bytes and seconds; quality: None was not measured."""

    path: str
    weight_bytes: int
    bits_per_weight: float
    source_bytes: int
    seconds: float
    peak_memory_bytes: int
    quality: QualityLine | None


ConversionLine = Planned | TensorWritten | StageLine | Expected | ConvertedLine | Refused

_CONVERSION_KINDS: dict[object, type[ConversionLine]] = {
    "plan": Planned,
    "tensor": TensorWritten,
    "stage": StageLine,
    "expected": Expected,
    "converted": ConvertedLine,
    "error": Refused,
}


def decode_conversion(line: bytes) -> ConversionLine:
    """Return what a line of ``convert --json`` says."""
    return decode_line(_CONVERSION_KINDS, line, "the conversion")


def converter_command() -> list[str]:
    """Return the command that converts; flags and the source are to be added."""
    return [sys.executable, "-m", "tokamac.app.cli", "convert"]


class Converter(LineProcess[ConversionLine]):
    """Runs a conversion."""

    def __init__(self, command: Sequence[str]) -> None:
        super().__init__(command, decode_conversion)
