"""``tokamac bench --parallel 1,2,4,8``: parallel replies at each width, against the roofline's prediction."""

# All replies of a run start together, each with its own prompt:
#
#     together       tokens/s of all replies while all are decoding (metrics.shared_rate)
#     each           median decode rate per reply, including pauses for others' prefill
#     overall        all tokens over the time from the request to the last token
#
# The peer answers the same prompts in one batch, measured alike. The order of both sides alternates.

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tokamac.engine.events import Failed, Finished
from tokamac.engine.metrics import Metrics, decode_rate, rate, share, shared_rate
from tokamac.engine.options import Sampling
from tokamac.engine.perf.roofline import Prediction

from ...text import units
from ...text.sanitise import sanitise_line
from ...text.terminal import note, picked, table
from ...text.units import percent, seconds
from . import peer
from .peer import PeerBatch
from .report import (
    Shown,
    Spread,
    medians,
    medians_text,
    peer_json,
    ratio_text,
    ratios,
    runs_text,
    spread,
    spreads,
    spreads_json,
    with_range,
)
from .runs import prompt_ids

if TYPE_CHECKING:
    from tokamac.engine import Engine

# What is compared with a peer, by the names of the fields.
SHOWN: Shown = {"together_tps": units.rate, "each_tps": units.rate, "ttft_s": seconds, "overall_tps": units.rate}


class BatchPeer(Protocol):
    """A program that answers several prompts in one batch."""

    @property
    def title(self) -> str:
        """Its name and version."""

    def replies(self, prompts: Sequence[Sequence[int]], new: int) -> PeerBatch:
        """Generate ``new`` tokens per prompt, greedily. Raises PeerError."""


@dataclass(frozen=True, slots=True)
class SharedRun:
    """A parallel run, in tokens/s, seconds and bytes; None is unknown.

    *_tps: see the module. ttft_s: median. total_s: to the last token.
    """

    generated_tokens: int
    together_tps: float | None
    each_tps: float | None
    overall_tps: float | None
    ttft_s: float | None
    total_s: float | None
    peak_memory_bytes: int | None


@dataclass(slots=True)
class MeasuredWidth:
    """Runs of ``parallel`` replies. prediction: set once all is measured. peer_runs: empty without a peer."""

    parallel: int
    runs: list[SharedRun] = field(default_factory=list)
    replies: list[Metrics] = field(default_factory=list)
    peer_runs: list[SharedRun] = field(default_factory=list)
    prediction: Prediction | None = None

    @property
    def label(self) -> str:
        return f"{self.parallel} at once"


def shared_run(token_times: Sequence[Sequence[float]], peak: int | None) -> SharedRun:
    """Compute figures from each reply's token times (seconds from the request)."""
    rates = [found for times in token_times if (found := decode_rate(times)) is not None]
    tokens, end = sum(map(len, token_times)), max((times[-1] for times in token_times if times), default=None)
    firsts = [times[0] for times in token_times if times]
    return SharedRun(
        generated_tokens=tokens,
        together_tps=shared_rate(token_times),
        each_tps=statistics.median(rates) if rates else None,
        overall_tps=rate(tokens, end),
        ttft_s=statistics.median(firsts) if firsts else None,
        total_s=end,
        peak_memory_bytes=peak,
    )


@dataclass(frozen=True, slots=True)
class Replies:
    """Requests of a run: prompts of ``length`` tokens; ``sampling.max_tokens`` is set."""

    length: int
    sampling: Sampling

    @property
    def new(self) -> int:
        return self.sampling.max_tokens or 0


def measure(
    engine: "Engine", widths: Sequence[int], rounds: int, wanted: Replies, beside: BatchPeer | None
) -> list[MeasuredWidth]:
    """Measure width by width; progress on stderr. Raises TokamacError, also if one reply failed."""
    engine.tokenizer.eos_ids = frozenset()  # every reply makes as many tokens as it is asked for
    made = [MeasuredWidth(width) for width in widths]
    for number in range(rounds + 1):
        for each in made:
            into = each if number else MeasuredWidth(each.parallel)  # the first run is the warm-up
            _round(engine, into, number, wanted, beside)
            if number:
                note(_line(each, number, beside))
    for each in made:
        each.prediction = engine.predict(wanted.length, wanted.length + wanted.new // 2, batch=each.parallel)
    return made


def _round(engine: "Engine", into: MeasuredWidth, number: int, wanted: Replies, beside: BatchPeer | None) -> None:
    """Run each side once; ``number`` decides the order."""
    prompts = [prompt_ids(engine, wanted.length, number * into.parallel + place) for place in range(into.parallel)]

    def ours() -> None:
        ends = _replies(engine, prompts, wanted.sampling)
        into.replies += [end.metrics for end in ends]
        peaks = [end.metrics.peak_memory_bytes for end in ends]
        known = [peak for peak in peaks if peak is not None]
        into.runs.append(shared_run([_token_times(end) for end in ends], max(known, default=None)))

    def theirs() -> None:
        if beside is not None:
            answered = beside.replies(prompts, wanted.new)
            into.peer_runs.append(shared_run(answered.token_times_s, answered.peak_memory_bytes))

    for turn in (ours, theirs) if number % 2 else (theirs, ours):
        turn()


def _replies(engine: "Engine", prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Finished]:
    """Run parallel replies. Raises TokamacError if one failed."""
    ends: dict[int, Finished] = {}
    for prompt, _, event in engine.generate_many(prompts, sampling):
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Finished):
            ends[prompt] = event
    return [ends[prompt] for prompt in range(len(prompts))]


def _token_times(end: Finished) -> list[float]:
    if end.passes is None or end.metrics.ttft_s is None:
        return []
    gaps_ms = end.passes.unpacked().ms[1:]
    return [end.metrics.ttft_s + gap / 1e3 for gap in itertools.accumulate(gaps_ms, initial=0.0)]


def _line(each: MeasuredWidth, number: int, beside: BatchPeer | None) -> str:
    theirs = f"; {beside.title}: {units.rate(each.peer_runs[-1].together_tps)}" if beside is not None else ""
    return f"run {number}, {each.label}: {units.rate(each.runs[-1].together_tps)} together{theirs}"


# The report ---------------------------------------------------------------------------------------------------------------------


def times_one(each: MeasuredWidth, measured: Sequence[MeasuredWidth]) -> float | None:
    """Return the speedup over a single reply; None if either is unmeasured."""
    alone = next((other for other in measured if other.parallel == 1), None)
    one = None if alone is None else _together(alone)
    own = _together(each)
    return share(None if own is None else own.median, None if one is None else one.median)


def to_json(measured: Sequence[MeasuredWidth], peer_version: str | None) -> dict[str, Any]:
    """Return the first width's JSON object, plus ``parallel`` with one per width."""
    listed = [_width_json(each, measured, peer_version) for each in measured]
    replies = [asdict(reply) for reply in measured[0].replies]
    of_first = {name: listed[0][name] for name in ("ceiling_tps", "expected_tps", "peer")}
    return {"runs": replies, "median": medians(replies), **of_first, "parallel": listed}


def _width_json(each: MeasuredWidth, measured: Sequence[MeasuredWidth], peer_version: str | None) -> dict[str, Any]:
    runs = [asdict(run) for run in each.runs]
    middle = medians(runs)
    limits = picked(each.prediction, "ceiling_tps", "expected_tps")
    return {
        "width": each.parallel,
        "runs": runs,
        "median": middle,
        "spread": spreads_json(spreads(each.runs, SHOWN)),
        "times_one": times_one(each, measured),
        **limits,
        "share_of_ceiling": share(middle["together_tps"], limits["ceiling_tps"]),
        "share_of_expected": share(middle["together_tps"], limits["expected_tps"]),
        "peer": None if peer_version is None else peer_json(peer_version, each.runs, each.peer_runs, SHOWN),
    }


def _together(each: MeasuredWidth) -> Spread | None:
    return spread(run.together_tps for run in each.runs)


def text(model: str, wanted: Replies, measured: Sequence[MeasuredWidth], peer_version: str | None) -> str:
    runs = runs_text(len(measured[0].runs))
    title = f"{sanitise_line(model)}: {wanted.length:,} prompt tokens and {wanted.new:,} new ones each; {runs}"
    parts = [title, _own_table(measured), TOLD, *remarks(measured)]
    if peer_version is not None:
        parts.append(_peer_table(measured, f"{peer.NAME} {peer_version}"))
        parts.append("ratios are ours ÷ its, of pairs of runs taken in turn on the same prompts")
    return "\n\n".join(parts)


def remarks(measured: Sequence[MeasuredWidth]) -> list[str]:
    apart = [str(each.parallel) for each in measured if _together(each) is None]
    if not apart:
        return []
    return [
        f"{', '.join(apart)} in parallel: the replies never all ran at the same time; make them longer (--max-tokens)"
    ]


TOLD = """\
together  tokens a second of all replies, while all are written
each      a reply's own rate, pauses for others' prompts included
overall   all tokens, over the time from the question to the last of them"""


def _own_table(measured: Sequence[MeasuredWidth]) -> str:
    head = ["at once", "together", "× one", "each", "TTFT", "overall", "expected", "of it", "ceiling"]
    rows = []
    for each in measured:
        together, limits = _together(each), each.prediction
        expected = None if limits is None else limits.expected_tps
        ceiling = None if limits is None else limits.ceiling_tps
        reached = share(None if together is None else together.median, expected)
        rows.append(
            [
                f"{each.parallel}",
                with_range(units.rate, together),
                ratio_text(times_one(each, measured)),
                *medians_text(each.runs, SHOWN)[1:],
                units.rate(expected),
                percent(reached),
                units.rate(ceiling),
            ]
        )
    return table([head, *rows], right=range(len(head)))


def _peer_table(measured: Sequence[MeasuredWidth], title: str) -> str:
    head = [title, "together", "each", "TTFT", "overall", "together ratio", "overall ratio"]
    rows = []
    for each in measured:
        found = ratios(each.runs, each.peer_runs, SHOWN)
        both = (with_range(ratio_text, found[name]) for name in ("together_tps", "overall_tps"))
        rows.append([each.label, *medians_text(each.peer_runs, SHOWN), *both])
    return table([head, *rows], right=range(1, len(head)))
