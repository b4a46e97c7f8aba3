"""What a reply's tokens might have been: each one in its place, with its probability and the likeliest others."""

from dataclasses import dataclass

from ..events import Alternative

OTHERS = 5
"""Other tokens that are told of each place."""


@dataclass(frozen=True, slots=True)
class StepToken:
    """A token of a reply, and the natural log-probability that the model itself gives it there, before any sampling.

    text: what it adds to the text before it; a mark for the model by its name. others: the likeliest of the other tokens, likeliest
    first. thinking, answer: characters of each that the tokens before it make. settled: all of these tokens' text is among them: no
    character is incomplete, and nothing may yet be the beginning of a mark. marks: the ids of the others that are a mark for the
    model and no text, such as the reply's end.
    """

    id: int
    text: str
    logprob: float
    others: tuple[Alternative, ...]
    thinking: int
    answer: int
    settled: bool
    marks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Tokens of a reply that follow each other; ``first``: the place of the first of them, from 0. total: of all the reply."""

    first: int
    total: int
    tokens: tuple[StepToken, ...]


@dataclass(frozen=True, slots=True)
class PromptText:
    """The prompt as it was rendered again: how many tokens it has, and how each piece of it begins and ends."""

    tokens: int
    pieces: tuple[str, ...]
