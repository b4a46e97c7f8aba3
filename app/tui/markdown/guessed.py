"""Which characters of a rendered text were guessed. The parser keeps no places, so its words are found in the source again.

Rendered text is its source less markup, in the same order. Each word is looked for a little further on; what is further away, past
an address or a fence, must be followed by the next word as well. What is not found has no tint, and moves nothing.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from .blocks import Block, Code, Flow, Inline, Line, StyledSpan, Table

Range = tuple[int, int]
WORD = re.compile(r"\w+|[^\w\s]")
NEAR, FAR = 24, 800
"""Characters of markup between two words: as usual; and at most, such as those of a link's address."""


class GuessedText:
    """A text that grows, and which of it was guessed.

    Attributes:
        text: all of it.
    """

    def __init__(self) -> None:
        self.text = ""
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, text: str, *, guessed: bool) -> None:
        """Append ``text``."""
        start = len(self.text)
        self.text += text
        if not guessed or not text:
            return
        if self._ends and self._ends[-1] == start:
            self._ends[-1] = len(self.text)
        else:
            self._starts.append(start)
            self._ends.append(len(self.text))

    def __bool__(self) -> bool:
        """Whether any of it was guessed."""
        return bool(self._starts)

    def marked(self, blocks: Iterable[Block], at: int) -> tuple[list[Block], int]:
        """Return blocks whose source begins at ``at``, with what was guessed marked in them, and where the last word ends."""
        found: list[Block] = []
        for block in blocks:
            match block:
                case Flow(lines):
                    new: list[Line] = []
                    for line in lines:
                        inline, at = self._inline(line.inline, at)
                        new.append(replace(line, inline=inline))
                    found.append(replace(block, lines=tuple(new)))
                case Table(rows):
                    cells: list[tuple[Inline, ...]] = []
                    for row in rows:
                        made: list[Inline] = []
                        for cell in row:
                            inline, at = self._inline(cell, at)
                            made.append(inline)
                        cells.append(tuple(made))
                    found.append(replace(block, rows=tuple(cells)))
                case Code(text):
                    ranges, at = self._found(text, at)
                    found.append(replace(block, guessed=tuple(joined(ranges, text))))
                case _:
                    found.append(block)
        return found, at

    def _inline(self, inline: Inline, at: int) -> tuple[Inline, int]:
        """Mark a text. Where something else stands for a formula, its source is looked for."""
        ranges: list[Range] = []
        place = 0
        formulas = sorted((span for span in inline.spans if span.source is not None), key=lambda span: span.start)
        for span in formulas:
            before, at = self._found(inline.text[place : span.start], at)
            ranges += [(place + start, place + end) for start, end in before]
            place = span.end
            if span.source and (began := self.text.find(span.source, at, at + FAR + len(span.source))) >= 0:
                at = began + len(span.source)
                if sum(end - start for start, end in self._guessed(began, at)) * 2 > at - began:
                    ranges.append((span.start, span.end))
        rest, at = self._found(inline.text[place:], at)
        ranges += [(place + start, place + end) for start, end in rest]
        spans = (StyledSpan(start, end, "guessed") for start, end in joined(ranges, inline.text))
        return replace(inline, spans=(*inline.spans, *spans)) if ranges else inline, at

    def _found(self, text: str, at: int) -> tuple[list[Range], int]:
        """Return which characters of a rendered text were guessed, and where in the source its last word ends."""
        ranges: list[Range] = []
        words = list(WORD.finditer(text))
        for number, word in enumerate(words):
            following = words[number + 1].group() if number + 1 < len(words) else ""
            if (began := self._place(word.group(), following, at)) < 0:
                continue
            at = began + len(word.group())
            shift = word.start() - began
            ranges += [(start + shift, end + shift) for start, end in self._guessed(began, at)]
        return ranges, at

    def _place(self, word: str, following: str, at: int) -> int:
        """Return where a word stands from ``at`` on; -1 where it is not sure."""
        began = self.text.find(word, at, at + NEAR + len(word))
        if began >= 0 or not word[0].isalnum():
            return began
        began = self.text.find(word, at + 1, at + FAR + len(word))
        end = began + len(word)
        sure = began >= 0 and following and self.text.find(following, end, end + NEAR + len(following)) >= 0
        return began if sure else -1

    def _guessed(self, start: int, end: int) -> Iterator[Range]:
        """Yield which of the source's characters from ``start`` to ``end`` were guessed."""
        for index in range(max(0, bisect_right(self._starts, start) - 1), len(self._starts)):
            if self._starts[index] >= end:
                return
            if self._ends[index] > start:
                yield max(start, self._starts[index]), min(end, self._ends[index])


def joined(ranges: Sequence[Range], text: str) -> Iterator[Range]:
    """Yield ranges of ``text``, those as one between which there is nothing but white space."""
    last: Range | None = None
    for start, end in ranges:
        if last is not None and not text[last[1] : start].strip():
            last = last[0], end
            continue
        if last is not None:
            yield last
        last = start, end
    if last is not None:
        yield last
