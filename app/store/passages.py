"""Search by meaning: messages and files cut into passages, whose vectors are kept by a hash of their words."""

# What was read once by an embedding model is never read again: a text that is edited, forked or attached twice has the same
# hash. Vectors are float16, of length 1, so a product is a cosine.

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .messages import SEARCHED, SNIPPET_CHARS
from .values import Hit

LONGEST = 800  # characters: some 200 tokens, a paragraph or two
_ENDS = ("\n\n", "\n", ". ", " ")

_FROM = f"FROM messages m CROSS JOIN chats c ON c.id = m.chat {{}} WHERE {SEARCHED}"
_TEXTS = f"""
SELECT m.id, m.chat, m.role, m.created_at, c.title, c.deleted_at IS NOT NULL AS deleted, '' AS file, m.text AS text
{_FROM.format("")} AND m.role IN ('user', 'assistant')
UNION ALL SELECT m.id, m.chat, m.role, m.created_at, c.title, c.deleted_at IS NOT NULL, a.name, a.text
{_FROM.format("CROSS JOIN attachments a ON a.message = m.id")} AND a.kind <> 'picture'"""


@dataclass(frozen=True, slots=True)
class Passage:
    """A part of a message or file. deleted: of a chat that may be restored."""

    key: bytes
    text: str
    hit: Hit
    deleted: bool


def cut(text: str) -> Iterator[tuple[int, str]]:
    """Yield (begin, part), without blank ones."""
    begin = 0
    while begin < len(text):
        end = begin + LONGEST
        if end < len(text):
            places = ((text.rfind(sign, begin + LONGEST // 2, end), len(sign)) for sign in _ENDS)
            end = next((at + size for at, size in places if at >= 0), end)
        if not text[begin:end].isspace():
            yield begin, text[begin:end]
        begin = end


def passages(connection: sqlite3.Connection) -> list[Passage]:
    found = []
    for row in connection.execute(_TEXTS):
        text = row["text"]
        hit = Hit(
            row["chat"], row["title"], row["id"], row["role"], row["created_at"], "", (), 0, len(text), row["file"]
        )
        for begin, part in cut(text):
            key = hashlib.blake2b(part.encode(), digest_size=16).digest()
            found.append(
                Passage(key, part, replace(hit, snippet=part[:SNIPPET_CHARS], start=begin), bool(row["deleted"]))
            )
    return found


def nearest(found: Sequence[Passage], vectors: Mapping[bytes, bytes], question: bytes, limit: int) -> list[Hit]:
    """Return the nearest, best first: one of a message or file, the newest of equal words."""
    import numpy as np

    newest = {each.key: each for each in sorted(found, key=lambda each: each.hit.message) if not each.deleted}
    known = [each for each in newest.values() if len(vectors.get(each.key, b"")) == len(question)]
    if not known:
        return []
    rows = np.frombuffer(b"".join(vectors[each.key] for each in known), np.float16).reshape(len(known), -1)
    cosines = rows.astype(np.float32) @ np.frombuffer(question, np.float16).astype(np.float32)
    best: dict[tuple[int, str], Hit] = {}
    for at in np.argsort(-cosines, kind="stable"):
        hit = known[at].hit
        best.setdefault((hit.message, hit.file), replace(hit, likeness=round(float(cosines[at]), 3)))
        if len(best) == limit:
            break
    return list(best.values())


def vectors_of(connection: sqlite3.Connection, model: str) -> dict[bytes, bytes]:
    return {row["hash"]: row["vector"] for row in connection.execute("SELECT * FROM vectors WHERE model = ?", (model,))}


def keep(connection: sqlite3.Connection, model: str, vectors: Mapping[bytes, bytes]) -> None:
    """Keep vectors of one model alone."""
    connection.execute("DELETE FROM vectors WHERE model <> ?", (model,))
    rows = [(key, model, vector) for key, vector in vectors.items()]
    connection.executemany("INSERT OR REPLACE INTO vectors (hash, model, vector) VALUES (?, ?, ?)", rows)


def forget(connection: sqlite3.Connection) -> None:
    """Remove vectors of words that no chat has any more."""
    if connection.execute("SELECT 1 FROM vectors LIMIT 1").fetchone() is not None:
        live = json.dumps([each.key.hex() for each in passages(connection)])
        connection.execute(
            "DELETE FROM vectors WHERE hex(hash) NOT IN (SELECT upper(value) FROM json_each(?))", (live,)
        )
