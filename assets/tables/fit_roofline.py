"""Fit the roofline's overheads to published measurements: `python -m tokamac.assets.tables.fit_roofline` (extra `fit`).

Writes assets/roofline.json: the constants of each engine, and two kinds of errors. "fitted" is of all rows with constants that
saw them. "held out" is what a new chip would get: each chip's rows are predicted with constants fitted without any row of that
chip. A row that no other chip's rows tell anything of is not held out (mixtures read by neural accelerators, for one, were
measured on a single chip). p90 is the 90th percentile of the errors' sizes.

The residual of a row is the logarithm of predicted ÷ published, and its loss grows linearly beyond a tenth, so that a few odd rows
don't pull the rest. A chip's rows count together as much as a few rows would, however many there are; what data say nothing about
stays near the neutral values.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from tokamac.assets.tables.measurements import Measurement, read
from tokamac.assets.tables.prediction_errors import (
    ENGINES,
    KINDS,
    All,
    Error,
    Rate,
    chip_of,
    decode_rate,
    error_of,
    fitted_errors,
    given,
    log_ratio,
    prefill_rate,
    summaries,
    tells,
)
from tokamac.engine.limits.fitted import Constants

HERE = Path(__file__).resolve().parent
TARGET = HERE.parent / "roofline.json"
LINEAR_FROM = 0.1
A_CHIP = 6
"""Rows that a chip's rows count as, at most."""
PULL = 0.3
"""Weight of the neutral values: being off by half counts about as much as a row that is off by a tenth. Of 0.1, 0.2 and 0.3,
the one with which new chips are predicted best."""
LARGEST_SHARE = 0.98

NEUTRAL = Constants(
    shared=0.9,
    experts=1.0,
    kv=1.0,
    launch_s=2e-6,
    older=1.0,
    larger=math.sqrt(2),  # twice the area is so much more across
    narrow=100.0,
    few_rows=10.0,
    prefill={units: dict.fromkeys(("dense", "mixture", "hybrid"), 0.6) for units in ("shaders", "neural")},
)
OF_ENGINE = ("shared", "experts", "kv", "launch_s")
OF_CHIP = ("older", "larger")
ENGINE_CELLS = (0.7, 1.0, 1.0, 1.0, 1.0, 1.0)
"""Neutral values of an engine's prefill: the share on shaders of dense models, and the factors of all other cells on their kin."""


def main() -> None:
    """Fit every engine and write the file."""
    rows, left = read()
    constants = {name: _rounded(each) for name, each in fit(rows).items()}
    errors = summaries({"fitted": fitted_errors(rows, constants), "held out": _held_out_errors(rows)})
    document: dict[str, Any] = {
        "made_by": "assets/tables/fit_roofline.py",
        "from": "assets/tables/measured.csv",
        "date": datetime.now(UTC).date().isoformat(),
        "engines": {name: asdict(each) for name, each in constants.items()},
        "errors": errors,
        "left_out": dict(Counter(each.reason for each in left).most_common()),
    }
    TARGET.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    _print(errors, document["left_out"])


def fit(rows: Sequence[Measurement]) -> All:
    """Return the constants that fit these rows best, decode first; prefill then takes its launches from it."""
    neutral = dict.fromkeys(ENGINES, NEUTRAL)
    decode = [row for row in rows if row.decode_tps is not None]
    names = [(engine, name) for engine in ENGINES for name in OF_ENGINE] + [("", name) for name in OF_CHIP]
    build = _with_decode(names)
    constants = build(_solve(decode, decode_rate, [getattr(NEUTRAL, name) for _, name in names], build))
    build = _with_prefill(constants)
    prefill = [row for row in rows if row.prefill_tps is not None and prefill_rate(row, neutral) is not None]
    return build(_solve(prefill, prefill_rate, [NEUTRAL.narrow, NEUTRAL.few_rows, *ENGINE_CELLS * len(ENGINES)], build))


def _solve(
    rows: Sequence[Measurement], predicted: Rate, start: Sequence[float], build: Callable[[Sequence[float]], All]
) -> list[float]:
    """Return the values, each positive, that bring ``predicted`` closest to the rows."""
    count = Counter((row.engine, chip_of(row)) for row in rows)
    weights = [math.sqrt(min(1, A_CHIP / count[row.engine, chip_of(row)])) for row in rows]
    neutral = np.log(start)

    def residuals(logs: Any) -> Any:
        constants = build(np.exp(logs).tolist())
        off = [weight * log_ratio(row, predicted, constants) for row, weight in zip(rows, weights, strict=True)]
        return np.array([*off, *(PULL * (logs - neutral))])

    return [float(value) for value in np.exp(least_squares(residuals, neutral, loss="soft_l1", f_scale=LINEAR_FROM).x)]


def _with_decode(names: Sequence[tuple[str, str]]) -> Callable[[Sequence[float]], All]:
    """Experts, keys and values are read as dense weights where nothing was measured; beyond the bandwidth nothing is."""

    def build(values: Sequence[float]) -> All:
        changes: dict[str, dict[str, Any]] = {engine: {} for engine in ENGINES}
        for (engine, name), value in zip(names, values, strict=True):
            for each in ENGINES if not engine else (engine,):
                changes[each][name] = value
        for of_engine in changes.values():
            of_engine.update(
                {name: min(of_engine["shared"] * of_engine[name], LARGEST_SHARE) for name in ("experts", "kv")}
            )
            of_engine["shared"] = min(of_engine["shared"], LARGEST_SHARE)
        return {engine: replace(NEUTRAL, **changes[engine]) for engine in ENGINES}

    return build


def _with_prefill(base: All) -> Callable[[Sequence[float]], All]:
    """What was not measured is as its kin: a mixture or a hybrid as dense, neural accelerators as shaders."""

    def build(values: Sequence[float]) -> All:
        narrow, few_rows, *rest = values
        made = {}
        for number, engine in enumerate(ENGINES):
            size = len(ENGINE_CELLS)
            dense, mixture, hybrid, neural, neural_mixture, neural_hybrid = rest[number * size : (number + 1) * size]
            shares = {
                "shaders": _capped(dense, dense * mixture, dense * hybrid),
                "neural": _capped(dense * neural, dense * neural * neural_mixture, dense * neural * neural_hybrid),
            }
            made[engine] = replace(base[engine], narrow=narrow, few_rows=few_rows, prefill=shares)
        return made

    return build


def _capped(*shares: float) -> dict[str, float]:
    return {kind: min(share, LARGEST_SHARE) for kind, share in zip(KINDS, shares, strict=True)}


def _held_out_errors(rows: Sequence[Measurement]) -> list[Error]:
    """Return the errors of rows predicted without their chip, where other chips' rows tell anything of them."""
    chips = sorted({chip_of(row) for row in rows})
    without = {chip: fit([row for row in rows if chip_of(row) != chip]) for chip in chips}
    all_given = list(given(rows))
    return [
        error
        for phase, row in all_given
        if any(phase == other_phase and tells(other, row, phase) for other_phase, other in all_given)
        for error in error_of(phase, row, without[chip_of(row)])
    ]


def _rounded(constants: Constants) -> Constants:
    """Return them as the file has them, so that its errors are those that they give."""

    def rounded(value: Any) -> Any:
        return {key: rounded(each) for key, each in value.items()} if isinstance(value, dict) else float(f"{value:.4g}")

    return Constants(**rounded(asdict(constants)))


def _print(errors: Mapping[str, Any], left_out: Mapping[str, int]) -> None:
    for engine, phases in errors.items():
        for (phase, sizes), how in product(phases.items(), ("fitted", "held out")):
            if how not in sizes:
                continue
            size = sizes[how]
            print(f"{engine} {phase}, {how}: {size['rows']} rows, median {size['median']:.1%}, p90 {size['p90']:.1%}")
            for label, far in size.get("far", {}).items():
                print(f"    {far['error']:+.0%}  {label}: {far['likely']}")
    for reason, count in left_out.items():
        print(f"left out: {count} rows, {reason}")


if __name__ == "__main__":
    main()
