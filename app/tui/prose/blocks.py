"""What a Markdown text is made of, as values: equal text gives equal blocks, so that only what changed is drawn again."""

from dataclasses import dataclass
from typing import Literal

InlineStyle = Literal["strong", "em", "code", "strike", "link", "faint", "marker", "heading", "quote"]


@dataclass(frozen=True, slots=True)
class Span:
    """``style`` from character ``start`` to ``end`` (exclusive)."""

    start: int
    end: int
    style: InlineStyle


@dataclass(frozen=True, slots=True)
class Inline:
    """Text and its styles. ``text`` may hold newlines: hard breaks."""

    text: str
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Line:
    """One paragraph to wrap. ``first`` stands before its first row (a bullet), ``rest`` before the others, of equal width."""

    inline: Inline
    first: str = ""
    rest: str = ""


@dataclass(frozen=True, slots=True)
class Flow:
    """Wrapped text: a paragraph, a heading, a list, a quotation. ``joined``: the next block goes on with it, without a gap."""

    lines: tuple[Line, ...]
    joined: bool = False


@dataclass(frozen=True, slots=True)
class Code:
    """Code, verbatim. ``closed``: its end was seen, so that it is worth highlighting."""

    text: str
    language: str = ""
    closed: bool = True


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells; the first row is the header."""

    rows: tuple[tuple[Inline, ...], ...]
    right: tuple[bool, ...]  # of each column, whether it is aligned right


@dataclass(frozen=True, slots=True)
class Rule:
    """A horizontal line."""


Block = Flow | Code | Table | Rule


@dataclass(frozen=True, slots=True)
class Section:
    """One top-level part of a text: its blocks, its first source line, and the line after its last.

    ``items``: of a list or a table that may be cut before any of them without a trace, the first lines of its items, or of its
    rows below the header. ``loose``: it is a list with space between its items.
    """

    start_line: int
    end_line: int
    blocks: tuple[Block, ...]
    items: tuple[int, ...] = ()
    loose: bool = False
