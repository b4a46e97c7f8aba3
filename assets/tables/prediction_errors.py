"""How far predictions are from published speeds: the errors of rows, by engine, phase and kind of model, and the rows far off.

`python -m tokamac.assets.tables.prediction_errors TABLE` prints those of other rows than the constants were fitted to: of a table
like measured.csv, which may have a column more, ``config``, with the path of the model's config.json.
"""

import csv
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

from tokamac.assets.tables.measurements import AttentionTiming, Measurement, read
from tokamac.engine.limits.fitted import Constants, Fitted, constants_of, kind_of, units_of
from tokamac.engine.limits.metrics import rate
from tokamac.engine.limits.prediction import CHUNK

REASONS = Path(__file__).resolve().parent / "likely_reasons.csv"
FAR = 0.25
"""Relative error from which a row is listed by itself."""
ENGINES = ("mlx", "llama.cpp 2023", "llama.cpp")
"""llama.cpp's rows of one build of 2023 can't be compared with later ones, as their source says."""
KINDS = ("dense", "mixture", "hybrid")

DEPTHS = {
    "under 2k tokens": (0, 2048),
    "2k to 16k tokens": (2048, 16_384),
    "16k to 64k tokens": (16_384, 65_537),
    "beyond 64k tokens": (65_537, None),
}
"""Contexts in the middle of decoding, from the first up to below the second: attention's share of a step grows with them."""

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
    """Return the tokens a second that decoding is predicted at. Constants are shares of what a chip allows, so no ceiling has to be
    looked at."""
    return rate(1, Fitted(row.chip, constants[row.engine]).decode_s(row.work, row.depth))


def prefill_rate(row: Measurement, constants: All) -> float | None:
    """Return the tokens a second that the prompt is predicted to be read at; None where its length or the peak is unknown."""
    if row.prompt is None:
        return None
    return rate(row.prompt, Fitted(row.chip, constants[row.engine]).prefill_s(row.work, row.prompt, row.cached, CHUNK))


def _published(row: Measurement, predicted: Rate) -> float:
    published = row.decode_tps if predicted is decode_rate else row.prefill_tps
    assert published is not None
    return published


def log_ratio(row: Measurement, predicted: Rate, constants: All) -> float:
    """Return the logarithm of predicted ÷ published."""
    found = predicted(row, constants)
    assert found is not None
    return math.log(found / _published(row, predicted))


def attention_ratio(timing: AttentionTiming, constants: All) -> float:
    """Return predicted ÷ published seconds of an attention kernel of MLX."""
    bandwidth = timing.chip.bandwidth_gbs
    assert bandwidth is not None
    predicted = Fitted(timing.chip, constants["mlx"]).attending_s(timing.layer, timing.context, bandwidth)
    return predicted / timing.seconds


def attention_errors(timings: Iterable[AttentionTiming], constants: All) -> dict[str, Any]:
    """Return how large the errors of the attention kernels' times are, as fitted."""
    return _sizes(attention_ratio(timing, constants) - 1 for timing in timings)


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
    """Whether another row tells anything of this row's constants: kinds of models share decoding, but prefill differs by kind and
    by what multiplies."""
    if other.engine != row.engine:
        return False
    same_units, same_kind = units_of(other.chip) == units_of(row.chip), kind_of(other.work) == kind_of(row.work)
    return phase == "decode" or (same_units and same_kind)


def chip_of(row: Measurement) -> str:
    """Return the name of the chip, whose bins count as one."""
    return row.chip.name


def model_of(row: Measurement) -> str:
    """Return the name of the model, whatever its bits."""
    return row.model


def summaries(by_how: Mapping[str, Sequence[Error]]) -> dict[str, dict[str, Any]]:
    """Return how large errors are, by engine, then by phase and kind of model, then by how they came about.

    Beside the kinds, each alone: all of them together, both builds of llama.cpp, and MLX's decoding by the context's length.
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
    for (label, (least, below)), (how, errors) in product(DEPTHS.items(), by_how.items()):
        decoding = [each for each in errors if each.phase == "decode" and each.row.engine == "mlx"]
        chosen = [each for each in decoding if least <= each.row.depth < (below or math.inf)]
        if chosen:
            found["mlx"].setdefault(f"decode, {label}", {})[how] = _sizes(chosen)
    return found


def _sizes(errors: Iterable[Error | float]) -> dict[str, Any]:
    sizes = sorted(abs(each.value if isinstance(each, Error) else each) for each in errors)
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


def main(table: Path) -> None:
    """Print the errors of a table's rows with the shipped constants, by model and by the context's length."""
    rows, left = read(table)
    errors = fitted_errors(rows, {engine: constants_of(engine) for engine in ENGINES})
    for phase in ("decode", "prefill"):
        of_phase = [each for each in errors if each.phase == phase]
        _print(f"{phase}, all", of_phase)
        for label, (least, below) in DEPTHS.items():
            _print(f"{phase}, {label}", [each for each in of_phase if least <= each.row.depth < (below or math.inf)])
        for model in sorted({each.row.model for each in of_phase}):
            _print(f"{phase}, {model}", [each for each in of_phase if each.row.model == model])
    for each in sorted(errors, key=lambda error: -abs(error.value))[:10]:
        print(f"    {each.value:+.1%}  {each.phase}, {each.row.label}")
    print(f"left out: {len(left)} rows")


def _print(label: str, errors: Sequence[Error]) -> None:
    if errors:
        sizes = _sizes(errors)
        print(f"{label}: {sizes['rows']} rows, median {sizes['median']:.1%}, p90 {sizes['p90']:.1%}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
