"""What a user writes never becomes a control token: contents are marked where they look like one, and encoded in two pieces there.

A tokenizer reads ``<|im_end|>`` as the end of a turn wherever it stands, so a pasted file could end the user's turn and begin a
system's. Only a chat template may write such marks. So every look-alike in a message gets a BREAK inside it before the template
sees it, and what the template rendered is encoded piece by piece between breaks: no piece holds a whole mark, and decoded the
pieces are the text.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

BREAK = "\ufdd1"
"""A noncharacter: Unicode keeps it out of texts for private use, and no template trims or splits at it."""

LEADS = ("\n", ".", "a")
"""Texts to encode a later piece after: some tokenizers put a space before whatever they are given first."""


class ControlTokens:
    """The control tokens of one tokenizer. marks: their texts."""

    def __init__(self, marks: Iterable[str]) -> None:
        self._marks = frozenset(mark for mark in marks if len(mark) > 1)
        # There may be a thousand: looked up by length, where their first two characters are found.
        self._lengths: dict[str, set[int]] = {}
        for mark in self._marks:
            self._lengths.setdefault(mark[:2], set()).add(len(mark))
        self._begins = re.compile("|".join(map(re.escape, sorted(self._lengths))) or "(?!)")

    def broken(self, content: str, keep: Sequence[str] = ()) -> str:
        """Return ``content`` with a BREAK after the first character of every mark in it, but for those to ``keep``."""
        content = content.replace(BREAK, "\ufffd")
        places = [place + 1 for place in self._places(content, self._marks - set(keep) if keep else self._marks)]
        return BREAK.join(content[a:b] for a, b in zip([0, *places], [*places, len(content)], strict=True))

    def are_all(self, text: str) -> bool:
        """Whether a text is control tokens and white space alone."""
        while text := text.strip():
            lengths = self._lengths.get(text[:2], set())
            longest = max((length for length in lengths if text[:length] in self._marks), default=0)
            if not longest:
                return False
            text = text[longest:]
        return True

    def broken_in(self, value: Any) -> Any:
        """Return a JSON value whose texts are ``broken``."""
        if isinstance(value, str):
            return self.broken(value)
        if isinstance(value, list):
            return [self.broken_in(each) for each in value]
        if isinstance(value, dict):
            return {self.broken(name): self.broken_in(each) for name, each in value.items()}
        return value

    def _places(self, content: str, marks: frozenset[str]) -> Iterator[int]:
        """Yield where ``marks`` begin, also those that overlap."""
        at = 0
        while (found := self._begins.search(content, at)) is not None:
            at = found.start()
            if any(content[at : at + length] in marks for length in self._lengths[found.group()]):
                yield at
            at += 1


def encode_broken(text: str, encode: Callable[[str], list[int]], decode: Callable[[Sequence[int]], str]) -> list[int]:
    """Return the ids of a text with BREAKs in it: of each piece on its own, as it would stand within a text."""
    first, *rest = text.split(BREAK)
    ids = encode(first)
    for piece in rest:
        ids += encode_within(piece, encode, decode)
    return ids


def encode_within(piece: str, encode: Callable[[str], list[int]], decode: Callable[[Sequence[int]], str]) -> list[int]:
    """Return the ids of a piece of text as it would stand within a text."""
    for lead in LEADS:
        before, both = encode(lead), encode(lead + piece)
        if both[: len(before)] == before and decode(both) == decode(before) + piece:
            return both[len(before) :]
    return encode(piece)
