"""Blocks of Markdown as values: what the parser makes, and what is laid out as rows.

Equal text gives equal blocks, so that only what changed is drawn again.
"""

from dataclasses import dataclass
from typing import Literal

InlineStyle = Literal[
    "strong", "em", "code", "strike", "link", "faint", "marker", "heading", "quote", "math", "guessed"
]
Align = Literal["left", "center", "right"]


@dataclass(frozen=True, slots=True)
class StyledSpan:
    """``style`` from character ``start`` to ``end`` (exclusive).

    link: the address that it leads to. source: what copying takes in its place; None is the text itself.
    """

    start: int
    end: int
    style: InlineStyle
    link: str = ""
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Inline:
    """Text and its styles. ``text`` may hold newlines: hard breaks."""

    text: str
    spans: tuple[StyledSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class Line:
    """One paragraph to wrap. ``first`` stands before its first row (a bullet), ``rest`` before the others, of equal width."""

    inline: Inline
    first: str = ""
    rest: str = ""

    @property
    def is_formula(self) -> bool:
        """Whether it is a row of a formula on lines of its own."""
        return any(
            span.style == "math" and span.end - span.start == len(self.inline.text) for span in self.inline.spans
        )

    @property
    def goes_on(self) -> bool:
        """Whether it is a further row of a formula, which is copied with its first row."""
        return any(span.source == "" for span in self.inline.spans)


@dataclass(frozen=True, slots=True)
class Flow:
    """Wrapped text: a paragraph, a heading, a list, a quotation. ``joined``: the next block goes on with it, without a gap."""

    lines: tuple[Line, ...]
    joined: bool = False


@dataclass(frozen=True, slots=True)
class Code:
    """Code, verbatim. ``closed``: its end was seen, so that it is worth highlighting. ``indent``: of the list it stands in.

    guessed: characters to mark, from and to (exclusive).
    """

    text: str
    language: str = ""
    closed: bool = True
    indent: str = ""
    guessed: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells; the first row is the header."""

    rows: tuple[tuple[Inline, ...], ...]
    align: tuple[Align, ...]  # of each column


@dataclass(frozen=True, slots=True)
class HorizontalRule:
    """A horizontal line."""


Block = Flow | Code | Table | HorizontalRule


@dataclass(frozen=True, slots=True)
class Section:
    """One top-level part of a text: its blocks, its first source line, and the line after its last.

    ``items``: of a list or a table that may be cut before any of them without a trace, the first lines of its items, or of its
    rows below the header. ``loose``: it is a list with space between its items. ``unsure``: a formula that is not over; it may
    yet prove to be a part of the section before.
    """

    start_line: int
    end_line: int
    blocks: tuple[Block, ...]
    items: tuple[int, ...] = ()
    loose: bool = False
    unsure: bool = False
