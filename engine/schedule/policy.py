"""Whose turn it is on the device: arithmetic on demands and measured seconds, with neither MLX nor a clock inside.

    act = policy.choose(demands)       what to do next
    policy.spent(act, seconds)         how long it took

Every reply that is written gets a token each turn. Between two turns at most one piece of one prompt is read, as long as the stall
budget, so that no reader waits longer than that and a step; and as long as the last turn took, so that a waiting prompt gets half
of the time at least. Prompts are read one after another, in the order of their arrival. What runs in the background joins only
while it takes a tenth of the time at most.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

STALL_S = 0.1
"""A piece of a prompt at most, while a reply is written that somebody reads, or where nobody waits for the prompt."""
ALONE_S = 1.0
"""The same where none is."""
BACKGROUND_SHARE = 0.1
"""Of the time, for what nobody waits for, while somebody waits for something."""
REMEMBERED_S = 10.0
"""Seconds after which a share counts half."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What one reply asks for: a piece of its prompt (``reads``), else its next token. number: in the order of arrival."""

    number: int
    reads: bool
    background: bool = False


@dataclass(frozen=True, slots=True)
class Act:
    """One turn. decodes: replies that get a token, together. reads: the reply of whose prompt a piece is read, within seconds."""

    decodes: tuple[int, ...] = ()
    reads: int | None = None
    within_s: float = ALONE_S
    background: bool = False


@dataclass(slots=True)
class _Ground:
    """What was done for those that somebody waits for, or for the others. spent_s: lately; last_s, decode_s: of the last turn."""

    read_last: bool = True
    last_s: float = 0.0
    decode_s: float = 0.0
    spent_s: float = 0.0

    def spent(self, act: Act, seconds: float) -> None:
        self.read_last = act.reads is not None
        self.last_s = seconds
        if act.decodes:
            self.decode_s = seconds
        self.spent_s += seconds


def beside_s(reading_s: float, step_s: float) -> float:
    """Return the seconds in which a prompt is read beside replies whose step takes ``step_s``; alone it takes ``reading_s``.

    It is read in pieces, with a step between two: in twice the time at most.
    """
    pieces = math.ceil(reading_s / max(STALL_S, step_s))
    return reading_s + max(pieces - 1, 0) * step_s


@dataclass(slots=True)
class Pace:
    """What the schedule tells whoever computes a prompt.

    within_s: seconds after which others may have a turn. is_in_the_way: whether it gives way, and another waits for some to leave.
    """

    within_s: float = ALONE_S
    is_in_the_way: bool = False


class Policy:
    """Chooses turns."""

    def __init__(self) -> None:
        self._front, self._back = _Ground(), _Ground()
        self._went_aside = False  # since those that are waited for got a token

    def choose(self, demands: Sequence[Demand]) -> Act | None:
        """Return the next act; None where nothing is asked for."""
        front = [each for each in demands if not each.background]
        back = [each for each in demands if each.background]
        share = BACKGROUND_SHARE * self._front.spent_s
        spared = not self._went_aside and self._back.spent_s + self._back.last_s <= share
        if back and (spared or not front):
            return self._among(back, self._back, background=True)
        return self._among(front, self._front, background=False) if front else None

    def spent(self, act: Act, seconds: float) -> None:
        """Take note of how long an act took."""
        self._went_aside = act.background or (self._went_aside and act.reads is not None)
        fade = 0.5 ** (seconds / REMEMBERED_S)
        self._front.spent_s *= fade
        self._back.spent_s *= fade
        (self._back if act.background else self._front).spent(act, seconds)

    def _among(self, demands: list[Demand], ground: _Ground, *, background: bool) -> Act:
        written = tuple(each.number for each in demands if not each.reads)
        waiting = [each.number for each in demands if each.reads]
        if waiting and (not written or not ground.read_last):
            ours = max(STALL_S, ground.decode_s) if written else ALONE_S
            return Act(reads=min(waiting), within_s=STALL_S if background else ours, background=background)
        return Act(decodes=written, background=background)
