"""From the corpus to training sequences: conversations of many shapes, as token ids with a mask of what is learned."""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from tokamac.assets.guide.augment import nonsense, vary
from tokamac.assets.guide.corpus import Entry, normalised
from tokamac.assets.guide.vocabulary import ASSISTANT, END, PAD, SYSTEM, USER, mark_id

SYSTEM_PROMPTS = (
    "Answer briefly.",
    "You are a helpful assistant.",
    "You are guide, the small model inside Tokamac.",
    "Be concise and clear.",
    "You are a helpful, honest assistant. Answer in plain words.",
    "Explain things simply.",
    "You are an expert on local language models.",
    "Keep your answers short.",
    "Answer the user's questions about Tokamac.",
    "You are a terminal assistant. Use short sentences.",
    "Help the user with this program.",
    "Answer as well as you can.",
)
NONSENSE_SHARE = 0.25
"""Of in-scope questions, how many are copied as nonsense that must be declined."""

CHAINED_SHARE = 0.06
"""Of all questions, how many come again in chains."""

OPENING_SHARE, OPENING_TOKENS = 0.90, (3, 8)
"""Of questions asked alone, how many end after so many tokens of the answer: which answer it is shows there, and reciting the
rest is learned from far fewer examples."""

DECLINED_OPENING_SHARE = 0.97
"""The same, of questions that are declined: they share one answer, which is soon learned."""

PATTERN_DRAWS, OUTSIDE_PATTERN_DRAWS = 2, 6
"""How many wordings of a pattern an epoch draws. What is out of scope has no end, so its patterns are drawn most."""

Exchange = tuple[str, str]  # question, answer


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation: token ids, for each how much predicting it counts, and where which answer begins.

    routes: (position of an assistant mark, number of the answer that follows it), for learned answers.
    """

    ids: list[int]
    weights: list[float]
    routes: list[tuple[int, int]]


class Conversations:
    """Makes the conversations of an epoch, another set each time."""

    def __init__(self, entries: Sequence[Entry], tokenizer: Tokenizer, seed: int) -> None:
        self.decline_weight = 1.0  # of the token that begins to decline: which way a doubtful question goes
        self._rng = random.Random(seed)
        self._tokenizer = tokenizer
        self._single = [entry for entry in entries if len(entry.turns) == 1 and not entry.out_of_scope]
        self._dialogues = [entry for entry in entries if len(entry.turns) > 1]
        self._outside = [entry for entry in entries if entry.out_of_scope]
        self._outside_words = foreign_words(entries)
        self._decline = self._outside[0].turns[0].answer
        answers = {turn.answer: None for entry in entries for turn in entry.turns}
        self._answers = {answer: number for number, answer in enumerate(answers)}
        self._held_out = {normalised(text) for entry in entries for turn in entry.turns for text in turn.held_out}
        self._ids = {mark: mark_id(tokenizer, mark) for mark in (SYSTEM, USER, ASSISTANT, END, PAD)}

    @property
    def answers(self) -> int:
        """How many different answers there are."""
        return len(self._answers)

    def epoch(self) -> list[Sample]:
        """Return one pass over all trained phrasings alone, the dialogues, and chains of unrelated questions."""
        rng = self._rng
        exchanges = list(self._all_exchanges())
        samples = [
            self._encode([exchange], opening=rng.random() < self._opening_share(exchange)) for exchange in exchanges
        ]
        samples += [self._encode(dialogue) for dialogue in self._all_dialogues()]
        rng.shuffle(exchanges)
        chained = exchanges[: int(len(exchanges) * CHAINED_SHARE)]
        while chained:  # unrelated questions in a row: the last one counts, whatever came before
            length = rng.choice((2, 2, 3, 3, 4, 6))
            samples.append(self._encode(chained[:length]))
            del chained[:length]
        samples.append(self._long(exchanges))
        rng.shuffle(samples)
        return samples

    def _all_exchanges(self) -> Iterator[Exchange]:
        for entry in (*self._single, *self._outside):
            turn = entry.turns[0]
            draws = OUTSIDE_PATTERN_DRAWS if entry.out_of_scope else PATTERN_DRAWS
            for text in (*turn.trained, *turn.patterns * (draws - 1)):
                yield self._draw(text), turn.answer
                if not entry.out_of_scope and self._rng.random() < NONSENSE_SHARE:
                    yield self._draw(nonsense(text, self._outside_words, self._rng)), self._decline

    def _opening_share(self, exchange: Exchange) -> float:
        return DECLINED_OPENING_SHARE if exchange[1] == self._decline else OPENING_SHARE

    def _draw(self, text: str) -> str:
        """Return the question as another hand might type it, but never as one that is held out."""
        for _ in range(20):
            drawn = vary(text, self._rng)
            if normalised(drawn) not in self._held_out:
                return drawn
        raise ValueError(f"every way to vary this question is held out: {text}")

    def _all_dialogues(self) -> Iterator[list[Exchange]]:
        for entry in self._dialogues:
            for _ in range(max(len(turn.trained) for turn in entry.turns)):
                yield [(self._draw(self._rng.choice(turn.trained)), turn.answer) for turn in entry.turns]

    def _long(self, exchanges: Sequence[Exchange]) -> Sample:
        """One conversation that fills the context, so that far positions are learned too."""
        chosen = [self._rng.choice(exchanges) for _ in range(44)]
        sample = self._encode(chosen)
        return Sample(sample.ids[:4096], sample.weights[:4096], [route for route in sample.routes if route[0] < 4095])

    def _encode(self, exchanges: Sequence[Exchange], *, opening: bool = False) -> Sample:
        ids: list[int] = []
        weights: list[float] = []
        routes: list[tuple[int, int]] = []

        def add(mark: str, text: str, learn: bool) -> None:
            body = [*self._tokenizer.encode(text, add_special_tokens=False).ids, self._ids[END]]
            ids.extend([self._ids[mark], *body])
            first = self.decline_weight if text == self._decline else 1.0
            weights.extend([0.0, *([first, *[1.0] * (len(body) - 1)] if learn else [0.0] * len(body))])

        if self._rng.random() < 0.35:
            add(SYSTEM, self._rng.choice(SYSTEM_PROMPTS), False)
        for question, answer in exchanges:
            add(USER, question, False)
            routes.append((len(ids), self._answers[answer]))
            add(ASSISTANT, answer, True)
        if opening:  # cut inside the last answer
            end = routes[-1][0] + 1 + self._rng.randint(*OPENING_TOKENS)
            del ids[end:], weights[end:]
        return Sample(ids, weights, routes)


def foreign_words(entries: Sequence[Entry]) -> list[str]:
    """Return the words that are trained on in out-of-scope questions and stand nowhere else in the corpus."""
    outside: set[str] = set()
    inside: set[str] = set()
    for entry in entries:
        found = outside if entry.out_of_scope else inside
        for turn in entry.turns:
            for text in (*turn.trained, "" if entry.out_of_scope else turn.answer):
                found.update(re.findall(r"[a-z]{3,}", text.lower()))
    return sorted(outside - inside)


def batches(samples: Sequence[Sample], tokens: int, rng: random.Random) -> list[list[Sample]]:
    """Group samples of like length into batches of about ``tokens`` padded tokens, in random order."""
    ordered = sorted(samples, key=lambda sample: len(sample.ids) + rng.random() * 8)
    groups: list[list[Sample]] = [[]]
    for sample in ordered:
        if groups[-1] and (len(groups[-1]) + 1) * len(sample.ids) > tokens:
            groups.append([])
        groups[-1].append(sample)
    rng.shuffle(groups)
    return groups
