"""Section: what the search of groups saves of rounding's error, and how fast it is."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from tests.benchmarks.plan import Plan
from tests.benchmarks.remote import Remote
from tests.benchmarks.report import Row, Section, at_least, holds, plain
from tests.benchmarks.stats import alternate, ratios, series
from tokamac.engine.metrics import rate
from tokamac.engine.perf.config_cost import Packing

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np

KINDS = ("gaussian", "student", "laplace")
TARGETS = {(4, 64): 0.82, (3, 64): 0.76, (2, 64): 0.70, (4, 32): 0.76}
"""By bits and group size: squared error over that of mx.quantize."""

EMBEDDED_TARGETS = {(3, 64): 0.76, (2, 64): 0.70, (4, 128): None}
"""The embedded model ships with 4 bits at groups of 64, where there is nothing left to find."""

PACKINGS = [(bits, size) for size in (64, 32, 128) for bits in (4, 3, 2, 5, 6, 8)]
COLUMNS = 4096
SCALES = (Packing(4, 32, "mxfp4"), Packing(4, 16, "nvfp4"))
MINIMUM_MWPS = 25.0


@dataclass(frozen=True, slots=True)
class Errors:
    """Sums of squared errors."""

    searched: float
    rounded: float

    @property
    def ratio(self) -> float:
        """What is left of rounding's error."""
        return self.searched / self.rounded


class SearchLab:
    """Seeded weights in bfloat16, (rows, COLUMNS) of each kind, searched and rounded."""

    def __init__(self, rows: int) -> None:
        from tests.quant.search_weights import seeded

        self._seeded = {kind: _stored(seeded(kind, rows, COLUMNS)) for kind in KINDS}

    def described(self) -> str:
        """Return what computes the search."""
        from tokamac.quant.search import implementation

        return implementation().name

    def errors(self, kind: str, packing: Packing) -> Errors:
        """Pack seeded weights both ways."""
        return _compared([self._seeded[kind]], packing)

    def embedded(self, packing: Packing) -> Errors:
        """Pack every packed weight of the embedded model both ways, from what it unpacks to."""
        from tokamac.assets import asset_path
        from tokamac.quant.source import open_source

        source = open_source(asset_path("guide", "model"))
        return _compared([source.weights[f"{path}.weight"] for path in source.packed], packing)

    def seconds(self, side: str, number: int) -> float:
        """Search or round the Gaussian weights at 4 bits, or measure how far the rounded ones are."""
        import mlx.core as mx

        from tokamac.quant.search import search, squared_error

        del number  # the same weights each time
        weight, packing = self._seeded["gaussian"], Packing(4)
        arrays = _rounded(weight, packing)
        mx.eval(arrays)
        began = time.perf_counter()
        if side == "error":
            squared_error(weight, arrays, packing)
        else:
            mx.eval(search(weight, packing) if side == "search" else _rounded(weight, packing))
        return time.perf_counter() - began


def _stored(values: "np.ndarray") -> "mx.array":
    import mlx.core as mx

    stored = mx.array(values).astype(mx.bfloat16)
    mx.eval(stored)
    return stored


def _rounded(weight: "mx.array", packing: Packing) -> "tuple[mx.array, ...]":
    import mlx.core as mx

    return tuple(mx.quantize(weight, **asdict(packing)))


def _compared(weights: "Sequence[mx.array]", packing: Packing) -> Errors:
    from tokamac.quant.search import search, squared_error
    from tokamac.quant.search.on_mlx import search_scales

    find = search if packing.mode == "affine" else search_scales
    searched = sum(squared_error(weight, find(weight, packing), packing)[0] for weight in weights)
    rounded = sum(squared_error(weight, _rounded(weight, packing), packing)[0] for weight in weights)
    return Errors(searched, rounded)


def measure(plan: Plan) -> Section:
    """Compare errors on seeded weights and on the embedded model's, then rates in turn."""
    rows = plan.count(2048, 256)
    with Remote(SearchLab, rows) as lab:
        by = lab.call("described")
        figures = [_seeded_row(lab, Packing(bits, size), TARGETS.get((bits, size))) for bits, size in PACKINGS]
        figures += [_seeded_row(lab, packing, None) for packing in SCALES]
        figures += [_embedded_row(lab, Packing(*each), bound) for each, bound in EMBEDDED_TARGETS.items()]
        figures += _rates(lab, plan, rows * COLUMNS / 1e6)
    how = (
        "Squared error of what `search` packs, divided by that of `mx.quantize`: Gaussian / Student-t (5 degrees of "
        f"freedom) / Laplace weights, {rows:,} × {COLUMNS:,} seeded values of each in bfloat16; a target is for the worst "
        "of the three. The embedded model ships packed at 4 bits in groups of 64, and the weights it was made from are not "
        "kept: what it unpacks to has 16 values a group, which any method packs again at 4 bits and 64 without loss. So "
        "its rows say what packing it to fewer bits, or in larger groups, loses. Rates: 4 bits, groups of 64, the Gaussian "
        f"weights, in turn; the search by {by} on all cores, and one call of `mx.quantize`, which on a CPU uses one."
    )
    return Section("Search: packing with less error", figures, how)


def _seeded_row(lab: Remote, packing: Packing, bound: float | None) -> Row:
    found = [lab.call("errors", kind, packing).ratio for kind in KINDS]
    what = f"{packing.bits} bits" if packing.mode == "affine" else packing.mode
    return _row(f"error ÷ rounding's, {what}, groups of {packing.group_size}", found, bound)


def _embedded_row(lab: Remote, packing: Packing, bound: float | None) -> Row:
    found = [lab.call("embedded", packing).ratio]
    return _row(f"embedded model to {packing.bits} bits, groups of {packing.group_size}", found, bound)


def _row(what: str, found: list[float], bound: float | None) -> Row:
    value = " / ".join(f"{each:.3f}" for each in found)
    return Row(what, value) if bound is None else holds(what, value, f"≤ {bound:.2f}", met=max(found) <= bound)


def _rates(lab: Remote, plan: Plan, megaweights: float) -> list[Row]:
    sides = ("search", "round", "error")
    for side in sides:
        lab.call("seconds", side, 0)
    taken = alternate(plan.many_rounds, *(partial(lab.call, "seconds", side) for side in sides))
    searched, rounded, compared = (series([rate(megaweights, each) for each in found]) for found in taken)
    return [
        at_least("search", searched, MINIMUM_MWPS, "M weights/s"),
        plain("mx.quantize", rounded, "M weights/s"),
        plain("time of search ÷ mx.quantize", ratios(rounded, searched)),
        plain("measuring the error", compared, "M weights/s"),
    ]
