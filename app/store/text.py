"""Text on its way into the store, and titles made of it."""

import re
import unicodedata

TITLE_CHARS = 60
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_FENCE = re.compile(r"\s*(`{3,}|~{3,})")
_DECORATION = re.compile(r"^[\s#>*+=-]+")


def storable(text: str) -> str:
    """Return ``text`` as it will be read back: NUL, at which SQLite's text functions stop, and halves of surrogate pairs,
    which UTF-8 can't hold, become ``�``. Everything else is kept as it is.
    """
    return _UNSTORABLE.sub("\ufffd", text)


def fold(text: str) -> str:
    """Return ``text`` without case and accents, for comparing."""
    apart = unicodedata.normalize("NFKD", text.casefold())
    return "".join(char for char in apart if not unicodedata.combining(char))


def one_line(text: str) -> str:
    """Return ``text`` with every run of white space as one space."""
    return " ".join(text.split())


def title_of(text: str, chars: int = TITLE_CHARS) -> str:
    """Return a title made of the first words of ``text``: its first line that says something, cut between words.

    Empty where no line does.
    """
    for line in text.split("\n"):
        words = "" if _FENCE.match(line) else one_line(_DECORATION.sub("", line))
        if words:
            return _shortened(words, chars)
    return ""


def _shortened(words: str, chars: int) -> str:
    if len(words) <= chars:
        return words
    cut = words[:chars].rpartition(" ")[0]
    return (cut if len(cut) > chars // 2 else words[: chars - 1]) + "…"  # one endless word is cut inside
