"""What guesses the next tokens of a reply: the seam between those that guess and the one that asks whether it pays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TokenDraft:
    """Tokens that may come next.

    Attributes:
        tokens: at least one.
        source: the drafter's name.
        match: how many tokens before them speak for them; by this and the source it is remembered how often they came true.
    """

    tokens: tuple[int, ...]
    source: str
    match: int


class Drafter(Protocol):
    """Guesses how one reply goes on. It decides nothing: a wrong guess costs time, never a token."""

    def propose(self, ids: Sequence[int], k: int) -> TokenDraft | None:
        """Return up to ``k`` tokens that may follow ``ids``; None where there is no guess.

        ids: all tokens so far, the prompt's first. From call to call they only grow, and none changes.
        """


class ComputingDrafter(Protocol):
    """Guesses by computing, which takes time: it is asked only where a guess is worth that, and how long it may be is said first.

    Times are in plain steps.
    """

    @property
    def source(self) -> str:
        """Its name."""

    @property
    def most(self) -> int:
        """Tokens of a draft at most; 0 where it guesses no more."""

    @property
    def rests(self) -> str:
        """Why it guesses no more; "" while it does."""

    def reading(self, ids: Sequence[int], most: float) -> float | None:
        """Return what it takes at first, once, to guess how ``ids`` go on; None for more than ``most``."""

    def drafting(self, width: int) -> float:
        """Return what a draft of so many tokens takes."""

    def draft(self, ids: Sequence[int], k: int) -> tuple[int, ...]:
        """Return ``k`` tokens that may follow ``ids``, for which ``reading`` was asked; none where it can't."""

    def took(self, width: int, steps: float) -> None:
        """Take what the last draft took."""

    def rested(self) -> None:
        """Take it that a plain step was made."""
