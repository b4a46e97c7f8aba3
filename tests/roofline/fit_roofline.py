"""Fit the roofline's overheads to published measurements: `python -m tests.roofline.fit_roofline` (extra `fit`).

Writes assets/roofline.json: the constants of each engine, the range of models that its rows cover, and three kinds of errors.
"fitted" is of all rows with constants that saw them. "held out" is what a new chip would get: each chip's rows are predicted with
constants fitted without any row, or kernel's time, of that chip. "model held out" is what a new model would get: each model's rows
are predicted with constants fitted without any row of that model. A row that no other chip's (or model's) rows tell anything of is
not held out (mixtures read by neural accelerators, for one, were measured on a single chip). p90 is the 90th percentile of the
errors' sizes.

Beside whole models, decoding is fitted to published times of MLX's attention kernels (attention.csv): few published speeds are of
long contexts, and they alone hardly tell how many query heads a key head has from how large the heads are.

The residual of a row is the logarithm of predicted ÷ published, and its loss grows linearly beyond a tenth, so that a few odd rows
don't pull the rest. A chip's rows count together as much as a few rows would, however many there are; what data say nothing about
stays near the neutral values.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from tests.roofline.measurements import (
    ENGINES,
    KINDS,
    All,
    AttentionTiming,
    Error,
    Measurement,
    Rate,
    attention_errors,
    attention_ratio,
    chip_of,
    decode_rate,
    error_of,
    fitted_errors,
    given,
    log_ratio,
    model_of,
    prefill_rate,
    read,
    read_attention,
    summaries,
    tells,
)
from tokamac.engine.perf.roofline import Constants

TARGET = Path(__file__).parents[2] / "assets" / "roofline.json"
LINEAR_FROM = 0.1
A_CHIP = 6  # rows that a chip's rows count as, at most
# Weight of the neutral values: being off by half counts about as much as a row that is off by a tenth. Of 0.1 and 0.3,
# the one with which new chips, and new models, are predicted best.
PULL = 0.3
LARGEST_SHARE = 0.98
TOLERANCE = 1e-4  # relative step of all constants at which a fit is done: the file has four digits

Solution = tuple[list[float], list[float]]  # the values found for decoding and for prefill

NEUTRAL = Constants(
    shared=0.9,
    kv=1.0,
    attend={"M1": 0.3, "M2": 0.3, "M5": 0.5},
    per_key=256.0,  # as much as heads of 128
    gather_s=4e-6,  # two launches more: sorting the scores, and taking the rows that they choose
    launch_s=2e-6,
    older=1.0,
    larger=math.sqrt(2),  # twice the area is so much more across
    narrow=100.0,
    few_rows=10.0,
    prefill={units: dict.fromkeys(("dense", "mixture", "hybrid"), 0.6) for units in ("shaders", "neural")},
)
OF_ENGINE = ("shared", "kv", "gather_s", "launch_s")
OF_CHIP = ("older", "larger", "per_key", *(f"attend {first}" for first in NEUTRAL.attend))
# Neutral values of an engine's prefill: the share on shaders of dense models, and the factors of all other cells on
# their kin.
ENGINE_CELLS = (0.7, 1.0, 1.0, 1.0, 1.0, 1.0)


def main() -> None:
    """Fit every engine and write the file."""
    (rows, left), timings = read(), read_attention()
    best, solution = fit(rows, timings)
    constants = {name: _rounded(each) for name, each in best.items()}
    errors = summaries(
        {
            "fitted": fitted_errors(rows, constants),
            "held out": _held_out_errors(rows, timings, chip_of, solution),
            "model held out": _held_out_errors(rows, timings, model_of, solution),
        }
    )
    document: dict[str, Any] = {
        "made_by": "tests/roofline/fit_roofline.py",
        "from": ["tests/roofline/measured.csv", "tests/roofline/attention.csv"],
        "date": datetime.now(UTC).date().isoformat(),
        "engines": {name: asdict(each) for name, each in constants.items()},
        "ranges": {engine: _range([row for row in rows if row.engine == engine]) for engine in ENGINES},
        "errors": errors,
        "attention": attention_errors(timings, constants),
        "left_out": dict(Counter(each.reason for each in left).most_common()),
    }
    TARGET.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    _print(errors, document["left_out"])


def fit(
    rows: Sequence[Measurement], timings: Sequence[AttentionTiming], near: Solution | None = None
) -> tuple[All, Solution]:
    """Return the constants that fit these rows best, decode first; prefill then takes its launches from it.

    near: the values found for almost the same rows, from which a few steps lead to these.
    """
    neutral = dict.fromkeys(ENGINES, NEUTRAL)
    decode = [row for row in rows if row.decode_tps is not None]
    names = [(engine, name) for engine in ENGINES for name in OF_ENGINE] + [("", name) for name in OF_CHIP]
    build = _with_decode(names)
    first, second = near or (None, None)
    neutral_values = [_value(NEUTRAL, name) for _, name in names]
    first = _solve(Published(decode, decode_rate, timings), neutral_values, build, first)
    build = _with_prefill(build(first))
    prefill = [row for row in rows if row.prefill_tps is not None and prefill_rate(row, neutral) is not None]
    cells = [NEUTRAL.narrow, NEUTRAL.few_rows, *ENGINE_CELLS * len(ENGINES)]
    second = _solve(Published(prefill, prefill_rate), cells, build, second)
    return build(second), (first, second)


@dataclass(frozen=True)
class Published:
    """What constants are to be near to: rows of one phase, how their rates are predicted, and the times of kernels."""

    rows: Sequence[Measurement]
    predicted: Rate
    timings: Sequence[AttentionTiming] = ()


def _solve(
    published: Published,
    neutral_values: Sequence[float],
    build: Callable[[Sequence[float]], All],
    near: Sequence[float] | None,
) -> list[float]:
    """Return the values, each positive, that bring what is predicted closest to what was published."""
    rows, predicted, timings = published.rows, published.predicted, published.timings
    weights = _weights([(row.engine, chip_of(row)) for row in rows])
    timing_weights = _weights([timing.chip.name for timing in timings])
    neutral = np.log(neutral_values)

    def residuals(logs: Any) -> Any:
        constants = build(np.exp(logs).tolist())
        off = [weight * log_ratio(row, predicted, constants) for row, weight in zip(rows, weights, strict=True)]
        pairs = zip(timings, timing_weights, strict=True)
        kernels = [weight * math.log(attention_ratio(timing, constants)) for timing, weight in pairs]
        return np.array([*off, *kernels, *(PULL * (logs - neutral))])

    start = neutral if near is None else np.log(near)
    found = least_squares(residuals, start, loss="soft_l1", f_scale=LINEAR_FROM, xtol=TOLERANCE, ftol=TOLERANCE**2)
    return [float(value) for value in np.exp(found.x)]


def _weights(chips: Sequence[Hashable]) -> list[float]:
    """Return the weights of rows of these chips, so that those of one count as much as A_CHIP rows at most."""
    count = Counter(chips)
    return [math.sqrt(min(1, A_CHIP / count[chip])) for chip in chips]


def _value(constants: Constants, name: str) -> float:
    field, _, key = name.partition(" ")
    value = getattr(constants, field)
    return float(value[key] if key else value)


def _with_decode(names: Sequence[tuple[str, str]]) -> Callable[[Sequence[float]], All]:
    """Keys and values are read as weights where nothing was measured; beyond the bandwidth nothing is."""

    def build(values: Sequence[float]) -> All:
        changes: dict[str, dict[str, Any]] = {engine: {"attend": {}} for engine in ENGINES}
        for (engine, name), value in zip(names, values, strict=True):
            field, _, first = name.partition(" ")
            for each in ENGINES if not engine else (engine,):
                if first:
                    changes[each][field][first] = min(value, LARGEST_SHARE)
                else:
                    changes[each][field] = value
        for of_engine in changes.values():
            of_engine["kv"] = min(of_engine["shared"] * of_engine["kv"], LARGEST_SHARE)
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


def _held_out_errors(
    rows: Sequence[Measurement],
    timings: Sequence[AttentionTiming],
    group_of: Callable[[Measurement], str],
    near: Solution,
) -> list[Error]:
    """Return the errors of rows predicted without their group, a chip or a model, where other groups' rows tell of them."""
    found: list[Error] = []
    all_given = list(given(rows))
    for group in sorted({group_of(row) for row in rows}):
        kept = [row for row in rows if group_of(row) != group]
        without, _ = fit(kept, [timing for timing in timings if timing.chip.name != group], near)
        for phase, row in all_given:
            others = (other for other_phase, other in all_given if other_phase == phase and group_of(other) != group)
            if group_of(row) == group and any(tells(other, row, phase) for other in others):
                found += error_of(phase, row, without)
    return found


def _range(rows: Sequence[Measurement]) -> dict[str, int]:
    """Return what the rows of decoding cover: the least bytes of weights that a step reads, and the longest context."""
    decoding = [row for row in rows if row.decode_tps is not None]
    weights = [row.work.weight_bytes() for row in decoding]
    return {
        "least_weight_bytes": min(each for each in weights if each is not None),
        "longest_context": max(row.depth for row in decoding),
    }


def _rounded(constants: Constants) -> Constants:
    """Return them as the file has them, so that its errors are those that they give."""

    def rounded(value: Any) -> Any:
        return {key: rounded(each) for key, each in value.items()} if isinstance(value, dict) else float(f"{value:.4g}")

    return Constants(**rounded(asdict(constants)))


def _print(errors: Mapping[str, Any], left_out: Mapping[str, int]) -> None:
    for engine, phases in errors.items():
        for (phase, sizes), how in product(phases.items(), ("fitted", "held out", "model held out")):
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
