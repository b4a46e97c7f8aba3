"""Foreign text made safe for a terminal: the one gate that every model's, file's or child's text passes.

What a terminal would obey is replaced by ``�``, never let through: escape sequences (CSI, OSC, DCS and the rest, whole, also
when split over chunks), C0 but newline and tab, DEL, C1, bidirectional overrides, isolates and marks, lone surrogates (they
can't be written to a terminal at all). Joiners pass, since emoji are made with them. Carriage returns and Unicode line
separators become newlines.

A sequence that never ends must not swallow a reply, so a newline, or ``LONGEST_SEQUENCE`` characters, ends it.
"""

import re
from enum import Enum, auto

REPLACEMENT = "\ufffd"
LONGEST_SEQUENCE = 4096

_FORBIDDEN = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_SUSPECT = re.compile(f"[{_FORBIDDEN}\u2028\u2029]")
_STRING_INTRODUCERS = frozenset("P]X^_\x90\x9d\x98\x9e\x9f")
_LINE_ENDS = frozenset("\r\u2028\u2029")
_CONTROL = re.compile(f"[{_FORBIDDEN}]")
_LINE_END = re.compile("\r\n?|[\u2028\u2029]")
_NOT_IN_A_ROW = re.compile(f"[{_FORBIDDEN}\t\n\u2028\u2029]")


class _State(Enum):
    TEXT = auto()
    ESCAPE = auto()  # after ESC, also while intermediate bytes (0x20–0x2f) follow
    CSI = auto()  # until a final byte 0x40–0x7e
    STRING = auto()  # OSC, DCS, SOS, PM, APC: until BEL or ST
    STRING_ESCAPE = auto()  # ESC inside a string: a backslash makes it ST


class Sanitiser:
    """Cleans a stream: any way of cutting the same text into chunks gives the same result. replacement: of what is taken out."""

    def __init__(self, replacement: str = REPLACEMENT) -> None:
        self._replacement = replacement
        self._state = _State.TEXT
        self._length = 0
        self._after_cr = False

    def feed(self, chunk: str) -> str:
        """Return what of ``chunk`` may be shown."""
        if self._state is _State.TEXT and not self._after_cr and not _SUSPECT.search(chunk):
            return chunk
        return "".join(self._step(char) for char in chunk)

    def _step(self, char: str) -> str:
        if char == "\n" and self._after_cr:
            self._after_cr = False
            return ""
        self._after_cr = char == "\r"
        if char == "\n" or char in _LINE_ENDS:
            self._state = _State.TEXT
            return "\n"
        if self._state is _State.TEXT:
            return self._text(char)
        self._length += 1
        if self._length > LONGEST_SEQUENCE:
            self._state = _State.TEXT
            return self._text(char)
        return self._inside(char)

    def _text(self, char: str) -> str:
        if not _SUSPECT.match(char):
            return char
        self._length = 0
        if char == "\x1b":
            self._state = _State.ESCAPE
        elif char == "\x9b":
            self._state = _State.CSI
        elif char in _STRING_INTRODUCERS:
            self._state = _State.STRING
        return self._replacement

    def _inside(self, char: str) -> str:
        """Take one character of a sequence; return it if it proves not to belong to one."""
        if char == "\x1b":
            self._state = (
                _State.STRING_ESCAPE if self._state in (_State.STRING, _State.STRING_ESCAPE) else _State.ESCAPE
            )
            return ""
        if self._state is _State.STRING:
            if char in "\x07\x9c":
                self._state = _State.TEXT
            return ""
        if self._state is _State.STRING_ESCAPE:
            self._state = _State.TEXT if char == "\\" else _State.ESCAPE
            return "" if char == "\\" else self._inside(char)
        if self._state is _State.CSI:
            if " " <= char <= "?":
                return ""
            self._state = _State.TEXT
            return "" if "@" <= char <= "~" else self._text(char)
        return self._after_escape(char)

    def _after_escape(self, char: str) -> str:
        if " " <= char <= "/":
            return ""
        if char == "[":
            self._state = _State.CSI
            return ""
        if char in _STRING_INTRODUCERS:
            self._state = _State.STRING
            return ""
        self._state = _State.TEXT
        return "" if "0" <= char <= "~" else self._text(char)


def sanitise(text: str) -> str:
    """Return the whole of ``text`` made safe to show."""
    return Sanitiser().feed(text)


def reveal(text: str) -> str:
    """Return ``text`` made safe, with all that ``sanitise`` would take out with an escape sequence.

    For what the user is asked to allow: nothing of it may hide inside a sequence.
    """
    return _CONTROL.sub(REPLACEMENT, _LINE_END.sub("\n", text))


def sanitise_line(text: str) -> str:
    """Return ``text`` made safe and put on one line, for names, paths and log lines."""
    return " ".join(sanitise(text).split())


LONGEST_LINK = 2048
_LINK = re.compile(r"(?:https?://|mailto:)[!-~]+", re.IGNORECASE)


def safe_link(address: str) -> str:
    """Return ``address`` where a terminal may offer to open it: of the web or of mail, in ASCII, without spaces; "" elsewhere.

    No files: what a model writes must not open a program of this machine.
    """
    return address if len(address) <= LONGEST_LINK and _LINK.fullmatch(address) else ""


def bare(row: str) -> str:
    """Return a row of a screen without what a terminal would obey. It keeps its cells: each of these counts for none.

    This is the last gate, behind all others: the row has been laid out, so nothing can be put in its place.
    """
    return _NOT_IN_A_ROW.sub(_in_its_place, row)


def _in_its_place(found: re.Match[str]) -> str:
    return REPLACEMENT if "\ud800" <= found[0] <= "\udfff" else ""  # a lone surrogate counts for one cell
