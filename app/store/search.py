"""Full-text search: newest message first, each with the part of its text that shows why.

What a person types becomes a question that SQLite can't misread. Every word must be there; the last one may be a beginning. Words
go to the index in quotes, where its operators mean nothing. The index splits text where letters and digits end, so what has none
of them (``->``, an emoji), and scripts that put no space between words, are looked for as they stand instead.
"""

import re
import secrets
import sqlite3
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .values import Hit, storable

MAX_CHARS, MAX_WORDS = 1000, 32
"""What of a longer query is used: its beginning. Each further word could only take hits away."""
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai and Lao, Burmese, Khmer
    "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"  # Japanese, Chinese
)


@dataclass(frozen=True, slots=True)
class Query:
    """match: a question to the index, empty if nothing is asked of it. parts: texts that must also stand in a message."""

    match: str
    parts: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is asked at all."""
        return not self.match and not self.parts


def parse(typed: str) -> Query:
    """Return what is asked for by this text. Never raises."""
    words = storable(typed[:MAX_CHARS]).split()[:MAX_WORDS]
    indexed = [word for word in words if _is_indexed(word)]
    quoted = ['"' + word.replace('"', '""') + '"' for word in indexed]
    if indexed and words[-1] is indexed[-1] and not typed[:MAX_CHARS][-1:].isspace():
        quoted[-1] += "*"  # it may still be being typed
    return Query(" ".join(quoted), tuple(word for word in words if not _is_indexed(word)))


def like(part: str) -> str:
    """Return the pattern for LIKE that finds ``part`` anywhere. Escaped by a backslash."""
    return "%" + re.sub(r"([\\%_])", r"\\\1", part) + "%"


def _is_indexed(word: str) -> bool:
    return not _UNSPACED.search(word) and any(unicodedata.category(char)[0] in "LN" for char in word)


SNIPPET_CHARS = 160
_BEFORE_CHARS = 40
"""Shown before the first match, so that it stands where the eye looks even on a narrow line."""

Mark = tuple[int, int]

SEARCHED = "m.state <> 'partial'"
"""What is looked through: the user's messages, replies, and the system messages of an import, which are shown like them."""
_COLUMNS = "m.id, m.chat, m.role, m.created_at, c.title"
_INDEXED = f"""
SELECT {_COLUMNS}, highlight(search, 0, :open, :close) AS shown
FROM search CROSS JOIN messages m ON m.id = search.rowid CROSS JOIN chats c ON c.id = m.chat
WHERE search MATCH :match AND {SEARCHED} AND c.deleted_at IS NULL"""
_SCANNED = f"""
SELECT {_COLUMNS}, m.text AS shown
FROM messages m CROSS JOIN chats c ON c.id = m.chat
WHERE {SEARCHED} AND c.deleted_at IS NULL"""


def search(connection: sqlite3.Connection, query: Query, limit: int) -> list[Hit]:
    """Return the newest ``limit`` finished messages, of chats that are not deleted, that hold all of the query."""
    if query.is_empty or limit <= 0:
        return []
    # The index marks matches inside the text. Nobody can have put these marks into a message: they are drawn now.
    opening, closing = f"<{secrets.token_hex(8)}>", f"</{secrets.token_hex(8)}>"
    sql = _INDEXED if query.match else _SCANNED
    sql += "".join(f" AND m.text LIKE :part{number} ESCAPE '\\'" for number in range(len(query.parts)))
    values = {f"part{number}": like(part) for number, part in enumerate(query.parts)}
    rows = connection.execute(
        f"{sql} ORDER BY {'search.rowid' if query.match else 'm.id'} DESC LIMIT :limit",
        {**values, "match": query.match, "open": opening, "close": closing, "limit": limit},
    )
    return [_hit(row, opening, closing, query.parts) for row in rows]


def merge_index(connection: sqlite3.Connection, pages: int) -> bool:
    """Do a part of merging the index into one piece, which deleted words do not survive; return whether there is more to do.

    pages: how much to write; negative for the first part. As https://www.sqlite.org/fts5.html#the_merge_command says.
    """
    before = connection.total_changes
    connection.execute("INSERT INTO search (search, rank) VALUES ('merge', ?)", (pages,))
    return connection.total_changes - before > 1


def _hit(row: sqlite3.Row, opening: str, closing: str, parts: Iterable[str]) -> Hit:
    text, marks = unmarked(row["shown"], opening, closing)
    marks = joined([*marks, *found(text, parts)])
    start, end = window(text, marks[0] if marks else (0, 0))
    inside = tuple((max(a, start) - start, min(b, end) - start) for a, b in marks if a < end and b > start)
    return Hit(
        chat=row["chat"],
        title=row["title"],
        message=row["id"],
        role=row["role"],
        created_at=row["created_at"],
        snippet=text[start:end],
        marks=inside,
        start=start,
        length=len(text),
    )


def unmarked(shown: str, opening: str, closing: str) -> tuple[str, list[Mark]]:
    """Take the marks out of a text; return it, and where they were."""
    marks: list[Mark] = []
    pieces = shown.split(opening)
    out = [pieces[0]]
    at = len(pieces[0])
    for piece in pieces[1:]:
        inside, _, after = piece.partition(closing)
        marks.append((at, at + len(inside)))
        out += [inside, after]
        at += len(inside) + len(after)
    return "".join(out), marks


def found(text: str, parts: Iterable[str]) -> Iterator[Mark]:
    """Yield where the parts stand in the text, as LIKE sees it: ASCII letters without case."""
    for part in parts:
        for match in re.finditer(re.escape(part), text, re.IGNORECASE):
            yield match.span()


def joined(marks: Iterable[Mark]) -> list[Mark]:
    """Return the marks in order, those that overlap as one."""
    out: list[Mark] = []
    for begin, end in sorted(marks):
        if out and begin < out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((begin, end))
    return out


def window(text: str, mark: Mark) -> Mark:
    """Return the part of the text to show: around the mark, cut between words where there are any."""
    start = max(0, mark[0] - _BEFORE_CHARS)
    if start > 0:
        space = text.find(" ", start, mark[0])
        start = space + 1 if space >= 0 else start
    end = min(len(text), start + SNIPPET_CHARS)
    if end < len(text):
        space = text.rfind(" ", max(mark[1], start), end)
        end = space if space >= 0 else end
    return start, max(end, min(mark[1], start + SNIPPET_CHARS))
