"""Encode texts by segments, and remember these: of a conversation that grew, only what is new is encoded.

A tokenizer splits a text at its added tokens before anything else, so the text before ``<|im_start|>`` and the text from it on are
encoded apart anyway. A rendered conversation is cut there: its ids are those of its segments in order, and each segment is
encoded once, however often the conversation is rendered. So an edit, a branch and a truncated prompt find the segments that they
share with any other.

Hostile tokenizers multiply a text without end before it is encoded, or after it is decoded: replacements follow one another, so a
short list makes a book of a word, in one call that nothing can interrupt. What a tokenizer.json can do at most is arithmetic, and
``check_growth`` refuses it before the file is loaded.
"""

import json
import math
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import ModelDamagedError
from ..files import TOKENIZER_BYTES, read_text

MOST_CHARACTERS = 1 << 23
"""Of the remembered segments: some two million tokens, in about 16 MB."""

MOST_GROWTH = 256
"""Times as many characters as before. Unicode's longest decomposition takes 18, and published tokenizers replace by a character."""
DECOMPOSED = {"NFKC": 18, "NFKD": 18, "NFC": 3, "NFD": 4, "Precompiled": 18, "BertNormalizer": 4, "Lowercase": 3}
"""Characters that one becomes at most (unicode.org/faq/normalization.html); a second time nothing is left to take apart."""


class SegmentEncoder:
    """Encodes texts by segments. Callable from any thread.

    Args:
        encode: Returns the ids of one segment.
        added: transformers' AddedTokens of the tokenizer; none where it does not split at them.
    """

    def __init__(self, encode: Callable[[str], list[int]], added: Iterable[Any] = ()) -> None:
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
        """Yield the text in segments; all but the first begin with an added token."""
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


def check_growth(file: Path) -> None:
    """Raise ModelDamagedError where a tokenizer.json could make a text much longer; does nothing where there is none.

    What is not JSON, or not a tokenizer's, passes: loading it says what is wrong.
    """
    try:
        parts = json.loads(read_text(file, TOKENIZER_BYTES))
    except (OSError, ValueError, RecursionError):
        return
    if not isinstance(parts, dict):
        return
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        try:
            steps = [*_steps(parts.get(name))]
            decomposed = max((DECOMPOSED.get(step["type"], 1) for step in steps), default=1)
            growth = math.prod(map(_replacement_growth, steps)) * decomposed
        except (TypeError, KeyError, AttributeError, RecursionError):
            continue
        if growth > MOST_GROWTH:
            raise ModelDamagedError(
                f"the {name} in {file} could make a text {growth:,.0f} times as long".replace(" inf ", " endless "),
                "Don't use this model.",
            )


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a part in order, whatever they are nested in."""
    if not isinstance(part, dict):
        return
    nested = next((part[key] for key in ("normalizers", "pretokenizers", "decoders") if key in part), None)
    if nested is None:
        yield part
        return
    for step in nested:
        yield from _steps(step)


def _replacement_growth(step: dict[str, Any]) -> float:
    """Return how many characters a replacement makes of one at most; 1 for any other step."""
    if step["type"] != "Replace":
        return 1.0
    pattern, content = step["pattern"], step["content"]
    literal = pattern.get("String") if isinstance(pattern, dict) else pattern
    if not literal:  # a regular expression may match at every character, and between all
        return 1.0 + len(content)
    return max(1.0, len(content) / len(literal))
