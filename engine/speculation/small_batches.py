"""What a pass over several rows takes, in steps over one: others' timings (assets/small_batches.json), never below the roofline.

Decode waits for memory, so that more rows should cost next to nothing; kernels for packed weights pay for each row all the same,
by generations and bits differently. A ledger begins with these figures and measures then; what is predicted for a chip (gain.py)
has nothing else.
"""

import functools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from ..perf.hardware import Chip, generation_of
from ..perf.roofline import LatencyModel, decode_phase

if TYPE_CHECKING:
    from ..device import DeviceKind
    from ..perf.workload import Workload

LEAST_STEP = 0.05
"""Plain steps that one of a draft model takes at least, however few its bytes, until it was measured."""
UNNAMED = 3
"""The generation whose timings are taken of a GPU that is of none."""
UNPACKED_BITS = 16


@dataclass(frozen=True, slots=True)
class RowCosts:
    """Timings of one kind of weights on one kind of chip.

    generations: of Apple's chips, ascending; none for other chips. bits: of weights, from and to. rows: rows of a pass, and the
    steps that it took.
    """

    device: str
    generations: tuple[int, ...]
    bits: tuple[int, int]
    timed_on: str
    rows: tuple[tuple[int, float], ...]
    source: str

    @property
    def most(self) -> int:
        """Rows up to which it was timed."""
        return self.rows[-1][0]

    def distance(self, generation: int) -> int:
        """Return how many generations lie between a chip and the nearest that was timed."""
        return min((abs(each - generation) for each in self.generations), default=generation)

    def steps(self, rows: int) -> float:
        """Return the steps of a pass: on a line between those timed, and as the widest beyond."""
        return interpolated(self.rows, rows)


@functools.cache
def timings() -> tuple[RowCosts, ...]:
    """Return the shipped table."""
    text = resources.files("tokamac.assets").joinpath("small_batches.json").read_text(encoding="utf-8")
    return tuple(
        RowCosts(
            device=row["device"],
            generations=tuple(row["generations"]),
            bits=(row["bits"][0], row["bits"][1]),
            timed_on=row["timed_on"],
            rows=tuple((rows, steps) for rows, steps in row["rows"]),
            source=row["source"],
        )
        for row in json.loads(text)
    )


def row_costs(device: "DeviceKind", chip: Chip, work: "Workload") -> RowCosts:
    """Return the timings that are nearest: of such weights, and of the nearest generations, else the more particular, the older."""
    bits, kind = weight_bits(work), "cpu" if device == "cpu" else "metal"
    generation = generation_of(chip.name) or UNNAMED
    fitting = (each for each in timings() if each.device == kind and each.bits[0] <= bits <= each.bits[1])
    return min(fitting, key=lambda each: (each.distance(generation), len(each.generations), each.generations))


def weight_bits(work: "Workload") -> int:
    """Return the bits of most weights that a token is multiplied with."""
    counted: Counter[int] = Counter()
    for product in work.products:
        counted[product.bits or UNPACKED_BITS] += product.parameters
    return counted.most_common(1)[0][0] if counted else UNPACKED_BITS


def pass_steps(
    work: "Workload", latency: LatencyModel | None, chip: Chip, context: int, rows: int, *, device: "DeviceKind"
) -> float:
    """Return how many plain steps a pass over ``rows`` should take: as was timed, or what the roofline predicts if more.

    Beyond the widest that was timed the roofline alone says how much more; where it says nothing, each row costs alike.
    """
    costs = row_costs(device, chip, work)
    alone, several = (decode_phase(work, chip, latency, context, each).expected_s for each in (1, rows))
    if alone and several:
        return max(costs.steps(rows), several / alone)
    return costs.steps(rows) * max(1.0, rows / costs.most)


def read_steps(
    work: "Workload", latency: LatencyModel | None, chip: Chip, *, device: "DeviceKind"
) -> Callable[[int], float]:
    """Return the same of a model's reading of so many tokens, each number reckoned once."""
    return functools.cache(lambda rows: pass_steps(work, latency, chip, 1, rows, device=device))


def draft_step(
    draft: tuple["Workload", LatencyModel | None],
    model: tuple["Workload", LatencyModel | None],
    chip: Chip,
    context: int,
) -> float:
    """Return how many steps of a model one of its draft model should take: by the roofline, else by the bytes that both read."""
    own, other = (decode_phase(work, chip, latency, context).expected_s for work, latency in (draft, model))
    if own and other:
        return own / other
    read, wanted = draft[0].step_bytes(context), model[0].step_bytes(context)
    return max(LEAST_STEP, read / wanted) if read and wanted else 1.0


def interpolated(table: Sequence[tuple[int, float]], rows: int) -> float:
    """Return a table's value at ``rows``, on a line between its neighbours."""
    above = next((index for index, (at, _) in enumerate(table) if at >= rows), len(table) - 1)
    if above == 0:
        return table[0][1]
    (low, before), (high, after) = table[above - 1], table[above]
    return before + (after - before) * min(1.0, (rows - low) / (high - low))
