"""Benchmark runs of ``tokamac bench``: points, order, measuring."""

# A round visits every point once, so that thermal throttling affects all alike. With a peer both sides answer each
# prompt in turn; who begins alternates.

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import TYPE_CHECKING, Protocol

from tokamac.engine.errors import ContextError, OptionError
from tokamac.engine.events import Finished, Message
from tokamac.engine.metrics import Metrics
from tokamac.engine.options import NOTHING_TOLD, Sampling, TemplateOptions
from tokamac.engine.perf.roofline import Limits

from ...text.terminal import note
from ...text.units import rate
from .peer import PeerRun

if TYPE_CHECKING:
    from tokamac.engine import Engine
    from tokamac.engine.events import ModelSpec

TEXT = (
    "The river had risen in the night, and by morning the lower fields were a lake with fences standing in it. Nobody in the "
    "village was surprised. They moved the sheep to the hill, put the boats where the carts had been, and went on with the day. "
)


class Peer(Protocol):
    @property
    def title(self) -> str:
        """Its name and version."""

    def reply(self, ids: Sequence[int], new: int) -> PeerRun:
        """Generate ``new`` tokens greedily. Raises PeerError."""


@dataclass(frozen=True, slots=True)
class BenchPoint:
    """An uncached prompt of ``tokens`` tokens and its reply.

    as_prompt: from --prompt, to measure prefill. as_depth: from --depth, to measure decode behind it.
    """

    tokens: int
    as_prompt: bool
    as_depth: bool

    @property
    def label(self) -> str:
        kinds = " and ".join(["prompt"] * self.as_prompt + ["depth"] * self.as_depth)
        return f"{kinds} {self.tokens:,}"


@dataclass(slots=True)
class Series:
    """Our runs and the peer's at a point, by round."""

    point: BenchPoint
    runs: list[Metrics] = field(default_factory=list)
    peer_runs: list[PeerRun] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """A point's runs, and the machine's limits at the context in the middle of its replies."""

    point: BenchPoint
    runs: tuple[Metrics, ...]
    limits: Limits
    peer_runs: tuple[PeerRun, ...] = ()


def points(prompts: Sequence[int], depths: Sequence[int]) -> list[BenchPoint]:
    return [BenchPoint(tokens, tokens in prompts, tokens in depths) for tokens in dict.fromkeys((*prompts, *depths))]


def check_room(spec: "ModelSpec", wanted: Sequence[BenchPoint], new: int) -> None:
    """Raise ContextError if the context can't hold a point plus ``new`` tokens."""
    deepest = max(wanted, key=lambda point: point.tokens)
    if spec.capacity is None or spec.rolls or deepest.tokens + new <= spec.capacity:
        return
    room = spec.capacity - new
    less = f"Ask for {room:,} at most, or for fewer new tokens." if room > 0 else "Ask for fewer new tokens."
    raise ContextError(
        f"{deepest.label} with {new:,} new tokens needs {deepest.tokens + new:,} tokens of context, and the context of "
        f"{spec.name} holds {spec.capacity:,}",
        less,
    )


def measure(
    engine: "Engine",
    wanted: Sequence[BenchPoint],
    rounds: int,
    sampling: Sampling,
    peer: Peer | None,
    *,
    template: TemplateOptions = NOTHING_TOLD,
) -> list[MeasuredPoint]:
    """Measure point by point; progress on stderr. ``sampling.max_tokens`` must be set.

    template: if not empty, prompts are user messages. Raises PeerError, and OptionError for unsupported options.
    """
    asks = Asks(engine, sampling, template)
    engine.tokenizer.eos_ids = frozenset()  # every run makes as many tokens as it is asked for
    made = [Series(point) for point in wanted]
    for series in made:
        _round(asks, Series(series.point), 0, peer)
    for number in range(1, rounds + 1):
        for series in made:
            _round(asks, series, number, peer)
            note(_line(series, number, alone=len(made) == 1, peer=peer))
    return [_finished(engine, series) for series in made]


def prompt_ids(engine: "Engine", length: int, number: int) -> list[int]:
    """Return ``length`` ids of ordinary text that differ from the first id on for each ``number``."""
    ids = engine.tokenizer.encode(TEXT)
    begin = (7 * number) % len(ids)
    return list(islice(cycle(ids[begin:] + ids[:begin]), length))


def message_ids(engine: "Engine", length: int, number: int, template: TemplateOptions) -> list[int]:
    """Return such text as a templated user message of ``length`` ids. Raises OptionError, also if too short for it."""
    tokenizer = engine.tokenizer.using(template)
    before, _, after = tokenizer.render([Message("user", TEXT.strip())]).partition(TEXT.strip())
    begin, end = tokenizer.encode(before), tokenizer.encode(after)
    if (room := length - len(begin) - len(end)) < 1:
        raise OptionError(
            f"a prompt of {length:,} tokens has no room for a message: the chat template takes {len(begin) + len(end):,}",
            "Ask for a longer prompt.",
        )
    return [*begin, *prompt_ids(engine, room, number), *end]


@dataclass(frozen=True, slots=True)
class Asks:
    engine: "Engine"
    sampling: Sampling
    template: TemplateOptions

    def prompt(self, length: int, number: int) -> list[int]:
        if self.template == NOTHING_TOLD:
            return prompt_ids(self.engine, length, number)
        return message_ids(self.engine, length, number, self.template)

    def reply(self, ids: list[int], number: int) -> Metrics:
        budget = TemplateOptions(thinking_budget=self.template.thinking_budget)  # the rest is in the prompt
        for event in self.engine.generate(ids, _seeded(self.sampling, number), template=budget):
            if isinstance(event, Finished):
                return event.metrics
        raise AssertionError("a reply ends with Finished")


def _round(asks: Asks, series: Series, number: int, peer: Peer | None) -> None:
    """Run each side once; ``number`` decides the order."""
    ids = asks.prompt(series.point.tokens, number)
    new = asks.sampling.max_tokens or 0

    def ours() -> None:
        series.runs.append(asks.reply(ids, number))

    def theirs() -> None:
        if peer is not None:
            series.peer_runs.append(peer.reply(ids, new))

    for turn in (ours, theirs) if number % 2 else (theirs, ours):
        turn()


def _seeded(wanted: Sampling, number: int) -> Sampling:
    return wanted if wanted.seed is not None else replace(wanted, seed=number)


def _line(series: Series, number: int, *, alone: bool, peer: Peer | None) -> str:
    run = series.runs[-1]
    where = f"run {number}" if alone else f"run {number}, {series.point.label}"
    beside = f"; {peer.title}: decode {rate(series.peer_runs[-1].decode_tps)}" if peer is not None else ""
    return f"{where}: prefill {rate(run.prefill_tps)}, decode {rate(run.decode_tps)}{beside}"


def _finished(engine: "Engine", series: Series) -> MeasuredPoint:
    # Last, because a reply may have shown that the bandwidth was measured too low.
    middle = series.runs[0].prompt_tokens + series.runs[0].generated_tokens // 2
    return MeasuredPoint(series.point, tuple(series.runs), engine.limits(middle), tuple(series.peer_runs))
