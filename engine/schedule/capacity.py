"""How many replies a machine holds in parallel, and their speed: "requests per GPU" of unified memory."""

# memory   = weights + one reply at its peak + (replies − 1) × a decoding reply
# together = replies ÷ seconds of a step that reads the weights once and each reply's KV

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import OptionError
from ..metrics import share
from ..perf.diagnosis import Waits
from ..perf.memory import MemoryFit
from ..perf.roofline import Fitted, HostLimited, Phase, decode_phase, predict
from .schedule import beside_s

if TYPE_CHECKING:
    from ..perf.config_cost import Packing
    from ..perf.what_if import Machine, WeighedModel, WhatIfCase

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
MOST = 1 << 12  # replies at once up to which a limit is looked for: no schedule has more

SEVERAL_UNTIMED = "what to expect of several at once is not known on this machine; tokamac bench --parallel measures it"
AS_ONE = (
    "expected takes kernels to read packed weights as fast for several as for one; tokamac bench --parallel measures it"
)


@dataclass(frozen=True, slots=True)
class WidthOutcome:
    """One batch width at a context. Tokens/s of all replies, seconds; None is unknown."""

    replies: int
    ceiling_tps: float | None
    expected_tps: float | None
    waits: Waits | None
    memory: MemoryFit
    newcomer_ttft_s: float | None

    @property
    def each_tps(self) -> float | None:
        return share(self.expected_tps, self.replies)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Parallel replies of one model in one case on one machine.

    ridge: operations per byte above which a step is compute-bound. arithmetic_from: the smallest compute-bound
    width. caches_from: the smallest with more KV than weights to read; None is never.
    """

    chip: str
    here: bool
    memory_bytes: int | None
    context: int
    prompt: int
    widths: tuple[WidthOutcome, ...]
    fitting: int | None
    or_more: bool
    ridge: float | None
    arithmetic_from: int | None
    caches_from: int | None
    notes: tuple[str, ...] = ()


def capacity(loaded: "WeighedModel", case: "WhatIfCase", widths: Sequence[int] = WIDTHS) -> Capacity:
    """Return the outcomes of ``widths``, and the most that fit. Raises OptionError for unknown cache sizes."""
    from ..perf.what_if import KV_UNKNOWN, outcome_at

    if loaded.limits(case.context) is None:
        raise OptionError(KV_UNKNOWN, "Choose another model.")
    place, fitting = loaded.place, loaded.most_at_once(case)
    found = tuple(width_outcome(loaded, case, replies) for replies in sorted({*widths, fitting or 1}))
    alone = outcome_at(loaded, case)
    return Capacity(
        chip=place.chip.name,
        here=place.local,
        memory_bytes=place.memory_bytes,
        context=case.context,
        prompt=case.prompt,
        widths=found,
        fitting=fitting,
        or_more=fitting is not None and loaded.fit(case, fitting + 1).fits is None,
        ridge=None if alone.prediction is None else alone.prediction.ridge,
        arithmetic_from=_fewest(lambda replies: _phase(loaded, case, replies).bound == "compute"),
        caches_from=_fewest(lambda replies: _reads_more_of_caches(loaded, case, replies)),
        notes=tuple(_notes(loaded, alone.reason, found)),
    )


def capacity_of(
    config: Mapping[str, Any],
    case: "WhatIfCase",
    place: "Machine",
    widths: Sequence[int] = WIDTHS,
    *,
    own: "Packing | None" = None,
) -> Capacity:
    """Return the capacity for a normalised config. Raises OptionError if it or its KV is impossible."""
    from ..perf.footprint import weigh
    from ..perf.what_if import load

    weighed = weigh(config, place.device, packing=case.packing(own))
    if isinstance(weighed, str):
        raise OptionError(weighed, "Choose another model.")
    return capacity(load(weighed, case.kv, place), case, widths)


def width_outcome(loaded: "WeighedModel", case: "WhatIfCase", replies: int) -> WidthOutcome:
    work, chip, latency = loaded.work, loaded.place.chip, loaded.latency
    chunk = loaded.chunking.tokens_at(case.prompt // 2)
    predicted = predict(work, chip, latency, case.prompt, case.context, batch=replies, chunk=chunk)
    newcomer_ttft_s = predicted.ttft_s
    if replies > 1 and newcomer_ttft_s is not None:
        step_s = _phase(loaded, case, replies - 1).expected_s
        newcomer_ttft_s = None if step_s is None else beside_s(newcomer_ttft_s, step_s)
    decode = predicted.decode
    return WidthOutcome(
        replies=replies,
        ceiling_tps=decode.ceiling_tps,
        expected_tps=decode.expected_tps,
        waits="host" if decode.by_host else decode.bound,
        memory=loaded.fit(case, replies),
        newcomer_ttft_s=newcomer_ttft_s,
    )


def _phase(loaded: "WeighedModel", case: "WhatIfCase", replies: int) -> Phase:
    return decode_phase(loaded.work, loaded.place.chip, loaded.latency, case.context, replies)


def _reads_more_of_caches(loaded: "WeighedModel", case: "WhatIfCase", replies: int) -> bool:
    weights = loaded.work.weight_bytes(replies)
    return weights is not None and loaded.work.kv_bytes(case.context, replies) > weights


def _fewest(is_so: Callable[[int], bool]) -> int | None:
    below = bisect.bisect_left(range(1, MOST + 1), True, key=is_so)
    return below + 1 if below < MOST else None


def _notes(loaded: "WeighedModel", reason: str | None, widths: Sequence[WidthOutcome]) -> Iterator[str]:
    if reason is not None:
        yield f"unknown: {reason}"
    elif any(each.ceiling_tps is not None and each.expected_tps is None for each in widths):
        yield SEVERAL_UNTIMED
    elif isinstance(loaded.latency, Fitted | HostLimited) and any(product.bits for product in loaded.work.products):
        yield AS_ONE
