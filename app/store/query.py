"""What a person types into the search field, made into questions that SQLite can't misread.

Every word must be there; the last one may be a beginning. Words go to the index in quotes, where its operators mean nothing.
The index splits text where letters and digits end, so what has none of them (``->``, an emoji), and scripts that put no space
between words, are looked for as they stand instead.
"""

import re
import unicodedata
from dataclasses import dataclass

from tokamac.app.store.text import storable

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
