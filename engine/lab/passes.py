"""A reply, pass by pass: what its log keeps, and chunks of its prompt, then decode steps, each with bytes and time."""

import base64
import binascii
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from ..errors import TokamacError
from ..metrics import Cause, Gap, Outlier, PromptBeside, Recorder, Throttle, gap_percentiles, gaps_ms, outliers
from ..perf.hardware import Chip
from ..perf.roofline import Attention, KVUse, Workload, peak_tflops

# Each prompt piece is one pass; the prompt's last token is the first step's. Packed at about five bytes per
# token: varints, compressed, base64. A duration counts 10 µs units; its lowest bit flags a following byte of
# causes. Bytes and operations derive from ``PassCost``; probabilities are recomputed on demand (likely.py).


# What one pass of a model reads and computes, as a function of how deep in the context it is; and the passes of a
# reply.


@dataclass(frozen=True, slots=True)
class PassCost:
    """Costs common to all passes of a model on a chip; None is unknown.

    shared_bytes: weights that each pass reads. expert_bytes: of all experts, a token using the share ``active``.
    """

    shared_bytes: int
    expert_bytes: int
    active: float | None
    linear_parameters: int | None
    head_parameters: int
    kv: tuple[tuple[int, KVUse], ...]
    attention: tuple[tuple[int, Attention], ...]
    bandwidth_gbs: float | None
    peak_tflops: float | None

    def weight_bytes(self, tokens: int = 1) -> int | None:
        if not self.expert_bytes:
            return self.shared_bytes
        if self.active is None:
            return None
        return self.shared_bytes + round(self.expert_bytes * (1 - (1 - self.active) ** tokens))

    def kv_bytes(self, context: int) -> int:
        return sum(layers * each.bytes_at(context) for layers, each in self.kv)

    def operations(self, tokens: int, cached: int, *, head: bool) -> int | None:
        if self.linear_parameters is None:
            return None
        linear = 2 * (self.linear_parameters * tokens + self.head_parameters * head)
        return linear + sum(layers * each.operations(tokens, cached) for layers, each in self.attention)

    def work(self, tokens: int, cached: int, *, head: bool) -> "PassWork":
        weights, kv = self.weight_bytes(tokens), self.kv_bytes(cached + tokens)
        operations = self.operations(tokens, cached, head=head)
        computing = None
        if operations is not None and self.peak_tflops:
            computing = operations / (self.peak_tflops * 1e9)
        return PassWork(weights, kv, operations, self._ms(weights), self._ms(kv), computing)

    def _ms(self, nbytes: int | None) -> float | None:
        return nbytes / (self.bandwidth_gbs * 1e6) if nbytes is not None and self.bandwidth_gbs else None


@dataclass(frozen=True, slots=True)
class PassWork:
    weight_bytes: int | None
    kv_bytes: int
    operations: int | None
    weights_ms: float | None
    kv_ms: float | None
    computing_ms: float | None

    @property
    def reading_ms(self) -> float | None:
        return None if self.weights_ms is None or self.kv_ms is None else self.weights_ms + self.kv_ms

    @property
    def least_ms(self) -> float | None:
        return max((ms for ms in (self.reading_ms, self.computing_ms) if ms is not None), default=None)

    def share_of_ceiling(self, ms: float | None) -> float | None:
        least = self.least_ms
        return None if least is None or not ms else least / ms


def cost_of(work: Workload, chip: Chip) -> PassCost:
    kv = Counter(replace(each, heads=None) for each in work.kv)
    attention = Counter(replace(each, layer=0) for each in work.attention)
    return PassCost(
        shared_bytes=work.shared_bytes,
        expert_bytes=work.expert_bytes,
        active=work.active,
        linear_parameters=work.prefill_parameters,
        head_parameters=work.head_parameters,
        kv=tuple((count, each) for each, count in kv.items()),
        attention=tuple((count, each) for each, count in attention.items()),
        bandwidth_gbs=chip.bandwidth_gbs,
        peak_tflops=peak_tflops(chip),
    )


# By their bits in a stored log: only ever added to at the end.
CAUSES: tuple[Cause, ...] = (
    "kv growth", "pool cleared", "swap", "slow reader", "processor taken", "thermal", "low power",
    "another prompt",
)  # fmt: skip
TICK_MS = 0.01
LARGEST_BITS = 63  # of a number in a log
LONGEST = 64_000_000  # bytes that a log is unpacked to at most: what is stored may come from elsewhere


class PassLogError(TokamacError):
    """A stored log can't be read."""


@dataclass(frozen=True, slots=True)
class PromptPiece:
    tokens: int
    ms: float


@dataclass(frozen=True, slots=True)
class HeldUp:
    token: int
    prompt: PromptBeside


@dataclass(frozen=True, slots=True)
class PassLog:
    """A reply's log, small and plain, stored with it.

    packed: ids and durations. ahead: steps were launched before the token before was read.
    """

    pieces: tuple[PromptPiece, ...]
    tokens: int
    packed: str
    cost: PassCost
    ahead: bool = False
    prompts: tuple[HeldUp, ...] = ()

    def unpacked(self) -> "TimedTokens":
        """Decode the tokens. Raises PassLogError."""
        try:
            data = zlib.decompressobj().decompress(base64.b64decode(self.packed, validate=True), LONGEST)
            return _unpack(data, self.tokens)
        except (ValueError, IndexError, zlib.error, binascii.Error) as error:
            raise PassLogError("the recorded steps of this reply are damaged", "Generate it again.") from error


@dataclass(frozen=True)
class TimedTokens:
    ids: tuple[int, ...]
    ms: tuple[float, ...]
    held_up: Mapping[int, tuple[Cause, ...]] = field(default_factory=dict)

    @cached_property
    def median_ms(self) -> float | None:
        found = gap_percentiles(self.ms[1:])
        return None if found is None else found.p50


def log_of(recorder: Recorder, cost: PassCost, *, ahead: bool, throttled: Sequence[Throttle] = ()) -> PassLog | None:
    began_s = recorder.prefill_began_s
    if began_s is None or not recorder.token_times:
        return None
    pieces = []
    for tokens, at_s in recorder.pieces:
        pieces.append(PromptPiece(tokens, round((at_s - began_s) * 1e3, 3)))
        began_s = at_s
    times, ids = recorder.token_times, recorder.ids
    gaps = gaps_ms([began_s + recorder.others_s, *times])
    usual = gap_percentiles(gaps[1:])
    found: tuple[Outlier, ...] = ()
    usual_ms = recorder.usual_ms if recorder.several else None if usual is None else usual.p50
    if usual_ms is not None:
        later = [Gap(ms, token) for token, ms in enumerate(gaps[1:], 2) if token not in recorder.several]
        found = outliers(later, usual_ms, recorder.marks, ahead=ahead, throttled=throttled)
    held_up = {each.token - 1: each.causes for each in found}
    prompts = tuple(HeldUp(each.token - 1, each.prompt) for each in found if each.prompt is not None)
    return PassLog(tuple(pieces), len(ids), pack(TimedTokens(tuple(ids), gaps, held_up)), cost, ahead, prompts)


def pack(timed: TimedTokens) -> str:
    out = bytearray()
    _add(out, timed.ids)
    begin = 0
    ticks = [max(round(ms / TICK_MS), 0) << 1 for ms in timed.ms]
    for index, causes in sorted(timed.held_up.items()):
        ticks[index] |= 1
        _add(out, ticks[begin : index + 1])
        out.append(sum(1 << CAUSES.index(cause) for cause in set(causes)))
        begin = index + 1
    _add(out, ticks[begin:])
    return base64.b64encode(zlib.compress(bytes(out))).decode("ascii")


def _unpack(data: bytes, tokens: int) -> TimedTokens:
    numbers = _Numbers(data)
    ids = tuple(numbers.read_many(tokens))
    ms: list[float] = []
    held_up: dict[int, tuple[Cause, ...]] = {}
    for index in range(tokens):
        value = numbers.next()
        ms.append((value >> 1) * TICK_MS)
        if value & 1:
            bits = numbers.byte()
            held_up[index] = tuple(cause for at, cause in enumerate(CAUSES) if bits >> at & 1)
    return TimedTokens(ids, tuple(ms), held_up)


def _add(out: bytearray, numbers: Sequence[int]) -> None:
    for number in numbers:
        rest = number
        while rest > 0x7F:
            out.append(rest & 0x7F | 0x80)
            rest >>= 7
        out.append(rest)


class _Numbers:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def next(self) -> int:
        data, at = self._data, self._at
        number = shift = 0
        while (byte := data[at]) & 0x80:
            if shift > LARGEST_BITS:  # or a stored log could ask for any amount of work
                raise ValueError("it holds no such number")
            number |= (byte & 0x7F) << shift
            shift, at = shift + 7, at + 1
        self._at = at + 1
        return number | byte << shift

    def read_many(self, count: int) -> Iterator[int]:
        return (self.next() for _ in range(count))


PassKind = Literal["prompt", "step"]


@dataclass(frozen=True, slots=True)
class ModelPass:
    """One pass, numbered from 1.

    cached: tokens in the caches; tokens: its input. token: the one it made, from 0; None for a prompt piece.
    """

    number: int
    kind: PassKind
    cached: int
    tokens: int
    token: int | None
    ms: float | None
    work: PassWork | None
    held_up: bool = False
    causes: tuple[Cause, ...] = ()
    prompt: PromptBeside | None = None

    @property
    def share_of_ceiling(self) -> float | None:
        return None if self.work is None else self.work.share_of_ceiling(self.ms)


@dataclass(frozen=True)
class ReplyWalk:
    """A reply's passes, built lazily. log: None leaves ``tokens`` steps without data."""

    prompt_tokens: int
    cached_tokens: int
    log: PassLog | None
    tokens: int = 0

    @cached_property
    def timed(self) -> TimedTokens:
        """The recorded tokens. Raises PassLogError."""
        return TimedTokens((), ()) if self.log is None else self.log.unpacked()

    @cached_property
    def pieces(self) -> int:
        return 0 if self.log is None else len(self.log.pieces)

    @cached_property
    def _prompts(self) -> dict[int, PromptBeside]:
        return {} if self.log is None else {each.token: each.prompt for each in self.log.prompts}

    @cached_property
    def begins(self) -> tuple[int, ...]:
        at = [self.cached_tokens]
        for piece in () if self.log is None else self.log.pieces:
            at.append(at[-1] + piece.tokens)
        return tuple(at)

    @cached_property
    def ms(self) -> tuple[float | None, ...]:
        if self.log is None:
            return (None,) * self.tokens
        return (*(piece.ms for piece in self.log.pieces), *self.timed.ms)

    def __len__(self) -> int:
        return self.pieces + (self.tokens if self.log is None else self.log.tokens)

    def __getitem__(self, index: int) -> ModelPass:
        if not 0 <= index < len(self):
            raise IndexError(index)
        log, token = self.log, index - self.pieces
        if log is None:
            return ModelPass(index + 1, "step", self.prompt_tokens - 1 + token, 1, token, None, None)
        if token < 0:
            cached, tokens = self.begins[index], log.pieces[index].tokens
            work = log.cost.work(tokens, cached, head=False)
            return ModelPass(index + 1, "prompt", cached, tokens, None, log.pieces[index].ms, work)
        cached = self.prompt_tokens - 1 + token
        work, causes = log.cost.work(1, cached, head=True), self.timed.held_up.get(token)
        return ModelPass(
            index + 1,
            "step",
            cached,
            1,
            token,
            self.timed.ms[token],
            work,
            causes is not None,
            causes or (),
            self._prompts.get(token),
        )

    def at_token(self, token: int) -> int:
        return self.pieces + token

    def next_held_up(self, index: int, by: int) -> int | None:
        others = (self.pieces + token for token in self.timed.held_up)
        beyond = [each for each in others if (each - index) * by > 0]
        return None if not beyond else min(beyond) if by > 0 else max(beyond)
