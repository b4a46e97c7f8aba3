"""How far predictions are from published speeds: the errors of rows, by engine, phase and kind of model, and the rows far off."""

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

from tokamac.assets.tables.measurements import Measurement
from tokamac.engine.limits.fitted import Constants, Fitted, kind_of, units_of
from tokamac.engine.limits.prediction import decode_phase, prefill_phase

REASONS = Path(__file__).resolve().parent / "likely_reasons.csv"
FAR = 0.25
"""Relative error from which a row is listed by itself."""
ENGINES = ("mlx", "llama.cpp 2023", "llama.cpp")
"""llama.cpp's rows of one build of 2023 can't be compared with later ones, as their source says."""
KINDS = ("dense", "mixture", "hybrid")

Phase = Literal["decode", "prefill"]

Rate = Callable[[Measurement, "All"], float | None]

All = Mapping[str, Constants]
"""The constants of every engine."""


@dataclass(frozen=True, slots=True)
class Error:
    """Predicted ÷ published − 1 of one phase of a row."""

    phase: Phase
    row: Measurement
    value: float


def decode_rate(row: Measurement, constants: All) -> float | None:
    """Return the tokens a second that decoding is predicted at."""
    return decode_phase(row.work, row.chip, Fitted(row.chip, constants[row.engine]), row.depth).expected_tps


def prefill_rate(row: Measurement, constants: All) -> float | None:
    """Return the tokens a second that the prompt is predicted to be read at; None where its length or the peak is unknown."""
    if row.prompt is None:
        return None
    return prefill_phase(
        row.work, row.chip, Fitted(row.chip, constants[row.engine]), row.prompt, row.cached
    ).expected_tps


def _published(row: Measurement, predicted: Rate) -> float:
    published = row.decode_tps if predicted is decode_rate else row.prefill_tps
    assert published is not None
    return published


def log_ratio(row: Measurement, predicted: Rate, constants: All) -> float:
    """Return the logarithm of predicted ÷ published."""
    rate = predicted(row, constants)
    assert rate is not None
    return math.log(rate / _published(row, predicted))


def fitted_errors(rows: Sequence[Measurement], constants: All) -> list[Error]:
    """Return the errors of all rows that these constants predict."""
    return [error for phase, row in given(rows) for error in error_of(phase, row, constants)]


def given(rows: Iterable[Measurement]) -> Iterator[tuple[Phase, Measurement]]:
    """Yield what the rows give speeds of, each row once for each phase."""
    for row in rows:
        if row.decode_tps is not None:
            yield "decode", row
        if row.prefill_tps is not None and row.prompt is not None:
            yield "prefill", row


def error_of(phase: Phase, row: Measurement, constants: All) -> Iterator[Error]:
    """Yield the error of a phase, if these constants predict it."""
    predicted = decode_rate if phase == "decode" else prefill_rate
    if predicted(row, constants) is not None:
        yield Error(phase, row, math.expm1(log_ratio(row, predicted, constants)))


def tells(other: Measurement, row: Measurement, phase: Phase) -> bool:
    """Whether a row of another chip tells anything of this row's constants: kinds of models share decoding, but prefill differs by
    kind and by what multiplies."""
    if chip_of(other) == chip_of(row) or other.engine != row.engine:
        return False
    same_units, same_kind = units_of(other.chip) == units_of(row.chip), kind_of(other.work) == kind_of(row.work)
    return phase == "decode" or (same_units and same_kind)


def chip_of(row: Measurement) -> str:
    """Return the name of the chip, whose bins count as one."""
    return row.chip.name


def summaries(by_how: Mapping[str, Sequence[Error]]) -> dict[str, dict[str, Any]]:
    """Return how large errors are, by engine, then by phase and kind of model, then by how they came about.

    Beside the kinds, each alone: all of them together, and both builds of llama.cpp.
    """
    found: dict[str, dict[str, Any]] = {}
    for engine, phase in product(ENGINES, ("decode", "prefill")):
        groups: list[tuple[str, Sequence[str], Sequence[str]]] = [
            ("dense", (engine,), ("dense",)),
            ("mixture and hybrid", (engine,), ("mixture", "hybrid")),
            ("all", (engine,), KINDS),
        ]
        if engine == "llama.cpp":
            groups.append(("both builds", ("llama.cpp 2023", "llama.cpp"), KINDS))
        for label, engines, kinds in groups:
            for how, errors in by_how.items():
                chosen = [
                    each
                    for each in errors
                    if each.phase == phase and each.row.engine in engines and kind_of(each.row.work) in kinds
                ]
                if chosen:
                    sizes = found.setdefault(engine, {}).setdefault(f"{phase}, {label}", {})
                    sizes[how] = _sizes(chosen) | ({} if label in ("all", "both builds") else {"far": _far(chosen)})
    return found


def _sizes(errors: Iterable[Error]) -> dict[str, Any]:
    sizes = sorted(abs(each.value) for each in errors)
    return {
        "rows": len(sizes),
        "median": round(median(sizes), 4),
        "p90": round(float(np.quantile(sizes, 0.9)), 4),
    }


def _far(errors: Iterable[Error]) -> dict[str, dict[str, Any]]:
    """Return the rows that are far off, each with its likely reason."""
    return {
        each.row.label: {"error": round(each.value, 3), "likely": _reason(each.row)}
        for each in errors
        if abs(each.value) > FAR
    }


def _reason(row: Measurement) -> str:
    """Return the likely reason why a row is far off. Raises KeyError for a row that nobody has looked at."""
    with REASONS.open(encoding="utf-8", newline="") as file:
        for marks, reason in list(csv.reader(file))[1:]:
            if all(mark in row.label for mark in marks.split(" + ")):
                return reason
    raise KeyError(f"{row.label} is far off: find out why, and add the likely reason to {REASONS.name}")
