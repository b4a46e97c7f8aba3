"""Read the guide's corpus: plain text that a person can edit.

    [entry-id]
    ? a phrasing of the question          several, one a line
    ? another phrasing
    ~ (stop|halt) the (reply|answer)      only trained on: one wording of each (a|b) is drawn each time
    = the answer, on one line
    + a key fact | another way to say it  each such line must be found in a right answer
    ? the next question of the same conversation, in a dialogue
    = ...

Lines beginning with ``#`` are comments. Entries whose id begins with ``oos-`` are out of scope: their answer declines.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
HELD_OUT_EVERY, HELD_OUT_AT = 5, 3
"""Phrasing i of a turn is held out of training when i % 5 == 3: a fifth, spread over all questions."""


class CorpusError(ValueError):
    """A line of the corpus is not in the format; the message begins with file and line."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One question in several phrasings, its answer, and the facts (each a tuple of alternatives) a right answer holds."""

    phrasings: tuple[str, ...]
    answer: str
    facts: tuple[tuple[str, ...], ...]
    patterns: tuple[str, ...] = ()

    @property
    def trained(self) -> tuple[str, ...]:
        """Phrasings the model learns from, and patterns of more."""
        kept = (text for i, text in enumerate(self.phrasings) if i % HELD_OUT_EVERY != HELD_OUT_AT)
        return (*kept, *self.patterns)

    @property
    def held_out(self) -> tuple[str, ...]:
        """Phrasings the model is scored on and never sees."""
        return tuple(text for i, text in enumerate(self.phrasings) if i % HELD_OUT_EVERY == HELD_OUT_AT)

    def is_right(self, reply: str) -> bool:
        """Whether a reply holds every key fact, in one of its wordings."""
        said = reply.casefold()
        return all(any(wording.casefold() in said for wording in fact) for fact in self.facts)


@dataclass(frozen=True, slots=True)
class Entry:
    """A question with its answer, or a dialogue of several."""

    id: str
    file: str
    turns: tuple[Turn, ...]

    @property
    def out_of_scope(self) -> bool:
        """Whether the guide should decline."""
        return self.id.startswith("oos-")


@dataclass(slots=True)
class _Draft:
    """A turn being read."""

    phrasings: list[str] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)
    answer: str = ""
    facts: list[tuple[str, ...]] = field(default_factory=list)


def normalised(text: str) -> str:
    """Return the words of a question, without case and punctuation: two questions of the same words are the same."""
    return " ".join(re.sub(r"[^a-z0-9+\- ]", " ", text.lower()).split())


def read_corpus(folder: Path = CORPUS) -> list[Entry]:
    """Return every entry of every ``.txt`` file of the folder. Raises CorpusError."""
    entries: dict[str, Entry] = {}
    for path in sorted(folder.glob("*.txt")):
        for entry in _read_file(path):
            if entry.id in entries:
                raise CorpusError(f"{path.name}: [{entry.id}] is also in {entries[entry.id].file}")
            entries[entry.id] = entry
    return list(entries.values())


def _read_file(path: Path) -> Iterator[Entry]:
    name, drafts = "", [_Draft()]
    for number, raw in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("[") and line.endswith("]"):
            if name:
                yield _finish(path, name, drafts)
            name, drafts = line[1:-1], [_Draft()]
            continue
        mark, _, text = line.partition(" ")
        where = f"{path.name}:{number}"
        if not name or mark not in {"?", "~", "=", "+"} or not text.strip():
            raise CorpusError(f"{where}: expected [id], '? question', '~ pattern', '= answer' or '+ fact': {line[:60]}")
        _take(where, mark, text.strip(), drafts)
    if name:
        yield _finish(path, name, drafts)


def _take(where: str, mark: str, text: str, drafts: list[_Draft]) -> None:
    draft = drafts[-1]
    if mark == "?":
        if draft.answer:
            drafts.append(draft := _Draft())
        draft.phrasings.append(text)
    elif mark == "~":
        if draft.answer or not draft.phrasings:
            raise CorpusError(f"{where}: a pattern stands between the questions and their answer")
        draft.patterns.append(text)
    elif mark == "=":
        if draft.answer or not draft.phrasings:
            raise CorpusError(f"{where}: an answer follows its questions, and there is one of it")
        draft.answer = text
    else:
        if not draft.answer:
            raise CorpusError(f"{where}: a fact follows its answer")
        draft.facts.append(tuple(wording.strip() for wording in text.split("|") if wording.strip()))


def _finish(path: Path, name: str, drafts: list[_Draft]) -> Entry:
    turns = tuple(Turn(tuple(d.phrasings), d.answer, tuple(d.facts), tuple(d.patterns)) for d in drafts)
    for turn in turns:
        if not turn.answer or not turn.facts:
            raise CorpusError(f"{path.name}: [{name}] has a question without an answer or without a fact")
        if not turn.is_right(turn.answer):
            raise CorpusError(f"{path.name}: [{name}] its own answer lacks a fact: {turn.facts}")
    return Entry(name, path.name, turns)
