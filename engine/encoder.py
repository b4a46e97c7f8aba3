"""Encode texts piece by piece, and remember the pieces: of a conversation that went on, only what is new is encoded.

A tokenizer splits a text at its added tokens before anything else, so what stands before ``<|im_start|>`` and what begins with it
are encoded apart anyway. A rendered conversation is cut there: its ids are those of its segments, one after another, and each
segment is encoded once, however often the conversation is rendered. Nothing of a conversation is kept beside that: an edit, a
branch and a truncated prompt find the segments that they share with any other.
"""

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

MOST_CHARACTERS = 1 << 23
"""Of the segments that are remembered: some two million tokens, in about 16 MB."""


class AddedToken(Protocol):
    """What is asked of an added token of transformers."""

    content: str
    lstrip: bool
    normalized: bool
    single_word: bool


class SegmentEncoder:
    """Encodes texts by segments. encode: the ids of one. added: the tokenizer's added tokens; none where it does not split at them.

    Callable from any thread.
    """

    def __init__(self, encode: Callable[[str], list[int]], added: Iterable[AddedToken] = ()) -> None:
        self._encode = encode
        # Others are found in the normalized text, or not everywhere: the text is not cut where it has one of these alone.
        exact = {str(token.content): token for token in added if not (token.normalized or token.single_word)}
        self._cuts = {text for text, token in exact.items() if not token.lstrip}  # which takes white space before it
        longest_first = sorted(filter(None, exact), key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()

    def __call__(self, text: str) -> list[int]:
        """Return the ids of ``text``."""
        ids: list[int] = []
        for segment in self._segments(text):
            ids += self._ids(segment)
        return ids

    def _segments(self, text: str) -> Iterator[str]:
        """Yield the text in pieces; all but the first begin with a mark."""
        begin = 0
        for found in self._marks.finditer(text):
            if found.start() > begin and found.group() in self._cuts:
                yield text[begin : found.start()]
                begin = found.start()
        yield text[begin:]

    def _ids(self, segment: str) -> "array[int]":
        with self._lock:
            known = self._known.get(segment)
            if known is not None:
                self._known.move_to_end(segment)
                return known
        ids = array("q", self._encode(segment))
        with self._lock:
            if segment not in self._known and len(segment) <= MOST_CHARACTERS:
                self._known[segment] = ids
                self._characters += len(segment)
            while self._characters > MOST_CHARACTERS:
                self._characters -= len(self._known.popitem(last=False)[0])
        return ids
