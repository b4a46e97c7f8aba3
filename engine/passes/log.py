"""What is kept of a reply's passes: the tokens that came, when each came, and what held it up.

    prompt   [ cached ][ piece ][ piece ] last          each piece is one pass; the last token is the first step's
    reply                              ╰▶ t1 ─▶ t2 ─▶ t3    each step takes the token before it in, and makes the next

Recorded is what costs nothing while a reply is written: ids that the host has anyway, and time stamps. What is a function of the
depth, bytes and operations, is derived from ``PassCost``, which is the same for all passes. Probabilities are not kept: they are
computed again when they are asked for (likely.py).

Ids and durations are packed into one text of about five bytes a token: varints, compressed, in base64. A duration is a whole
number of 10 µs, and its lowest bit says that a byte with the causes follows.
"""

import base64
import binascii
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..errors import TokamacError
from ..metrics import Cause, Gap, Outlier, PromptBeside, Recorder, Throttle, gap_percentiles, gaps_ms, outliers
from .cost import PassCost

CAUSES: tuple[Cause, ...] = (
    "kv growth", "pool cleared", "swap", "slow reader", "processor taken", "thermal", "low power",
    "another prompt",
)  # fmt: skip
"""By their bits in a stored log: only ever added to at the end."""
TICK_MS = 0.01
LARGEST_BITS = 63
"""Of a number in a log."""
LONGEST = 64_000_000
"""Bytes that a log is unpacked to at most: what is stored may come from elsewhere."""


class PassLogError(TokamacError):
    """A stored log can't be read."""


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Tokens of a prompt that were computed at once, and how long that took."""

    tokens: int
    ms: float


@dataclass(frozen=True, slots=True)
class HeldUp:
    """A step, by the place of its token from 0, that stood out, and the prompt that was read before it."""

    token: int
    prompt: PromptBeside


@dataclass(frozen=True, slots=True)
class PassLog:
    """What was recorded of one reply: small, and plain, so that it can be stored with it.

    pieces: of the prompt after what was cached, all but its last token. tokens: how many came; packed: their ids and durations.
    ahead: each step was launched before the token before it was read. prompts: others', that held steps up.
    """

    pieces: tuple[PromptPiece, ...]
    tokens: int
    packed: str
    cost: PassCost
    ahead: bool = False
    prompts: tuple[HeldUp, ...] = ()

    def unpacked(self) -> "TimedTokens":
        """Return the tokens. Raises PassLogError where the text is damaged."""
        try:
            data = zlib.decompressobj().decompress(base64.b64decode(self.packed, validate=True), LONGEST)
            return _unpack(data, self.tokens)
        except (ValueError, IndexError, zlib.error, binascii.Error) as error:
            raise PassLogError("the recorded steps of this reply are damaged", "Generate it again.") from error


@dataclass(frozen=True)
class TimedTokens:
    """The tokens of a reply: their ids, the milliseconds of each one's step, and which steps stood out, with the known causes."""

    ids: tuple[int, ...]
    ms: tuple[float, ...]
    held_up: Mapping[int, tuple[Cause, ...]] = field(default_factory=dict)

    @cached_property
    def median_ms(self) -> float | None:
        """The usual step; None where there is none but the first, which waits for the prompt's last token too."""
        found = gap_percentiles(self.ms[1:])
        return None if found is None else found.p50


def log_of(recorder: Recorder, cost: PassCost, *, ahead: bool, throttled: Sequence[Throttle] = ()) -> PassLog | None:
    """Return what ``recorder`` holds of a reply; None where nothing was computed."""
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
    """Return the tokens as text; see ``PassLog.unpacked``."""
    out = bytearray()
    for token in timed.ids:
        _add(out, token)
    for index, ms in enumerate(timed.ms):
        causes = timed.held_up.get(index)
        _add(out, max(round(ms / TICK_MS), 0) << 1 | (causes is not None))
        if causes is not None:
            out.append(sum(1 << CAUSES.index(cause) for cause in set(causes)))
    return base64.b64encode(zlib.compress(bytes(out))).decode("ascii")


def _unpack(data: bytes, tokens: int) -> TimedTokens:
    numbers = _Numbers(data)
    ids = tuple(numbers.take(tokens))
    ms: list[float] = []
    held_up: dict[int, tuple[Cause, ...]] = {}
    for index in range(tokens):
        value = numbers.next()
        ms.append((value >> 1) * TICK_MS)
        if value & 1:
            bits = numbers.byte()
            held_up[index] = tuple(cause for at, cause in enumerate(CAUSES) if bits >> at & 1)
    return TimedTokens(ids, tuple(ms), held_up)


def _add(out: bytearray, number: int) -> None:
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)


class _Numbers:
    """Reads varints: seven bits a byte, lowest first, the eighth bit set on all but the last."""

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

    def take(self, count: int) -> Iterator[int]:
        return (self.next() for _ in range(count))
