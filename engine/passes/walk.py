"""A reply walked pass by pass: the pieces of its prompt first, then each step, with what it read, computed and took."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ..metrics import Cause, PromptBeside
from .cost import PassWork
from .log import PassLog, TimedTokens

PassKind = Literal["prompt", "step"]


@dataclass(frozen=True, slots=True)
class ModelPass:
    """One pass of the model.

    number: from 1. cached: tokens that it found in the caches; tokens: that it took in. token: which of the reply it made, from 0;
    None for a piece of the prompt, which makes none. ms: None where it was not recorded.
    held_up: it took much longer than others (metrics.py), for these ``causes`` as far as they are known. prompt: another reply's,
    of which a piece was read before it.
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
        """Its least time ÷ the time it took; None where either is unknown."""
        return None if self.work is None else self.work.share_of_ceiling(self.ms)


@dataclass(frozen=True)
class ReplyWalk:
    """All passes of a reply, made when they are looked at.

    prompt_tokens, cached_tokens: of its metrics. log: None where none was recorded; then there are ``tokens`` steps of which
    only the place is known.
    """

    prompt_tokens: int
    cached_tokens: int
    log: PassLog | None
    tokens: int = 0

    @cached_property
    def timed(self) -> TimedTokens:
        """What was recorded of the tokens. Raises PassLogError."""
        return TimedTokens((), ()) if self.log is None else self.log.unpacked()

    @cached_property
    def pieces(self) -> int:
        """How many passes read the prompt, before the first step."""
        return 0 if self.log is None else len(self.log.pieces)

    @cached_property
    def _prompts(self) -> dict[int, PromptBeside]:
        return {} if self.log is None else {each.token: each.prompt for each in self.log.prompts}

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """Tokens in the caches before each piece, and before the first step."""
        at = [self.cached_tokens]
        for piece in () if self.log is None else self.log.pieces:
            at.append(at[-1] + piece.tokens)
        return tuple(at)

    @cached_property
    def ms(self) -> tuple[float | None, ...]:
        """What each pass took, in milliseconds."""
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
            work = log.cost.of(tokens, cached, head=False)
            return ModelPass(index + 1, "prompt", cached, tokens, None, log.pieces[index].ms, work)
        cached = self.prompt_tokens - 1 + token
        work, causes = log.cost.of(1, cached, head=True), self.timed.held_up.get(token)
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
        """Return the index of the step that made a token, from 0."""
        return self.pieces + token

    def next_held_up(self, index: int, by: int) -> int | None:
        """Return the index of the nearest step that stood out after ``index`` (by 1), or before it (by −1); None: there is none."""
        others = (self.pieces + token for token in self.timed.held_up)
        beyond = [each for each in others if (each - index) * by > 0]
        return None if not beyond else min(beyond) if by > 0 else max(beyond)
