"""Foreign text made safe for a terminal: the single gate of all model, file and subprocess text."""

# Replaced by ``�``: whole escape sequences (CSI, OSC, DCS …, also across chunks), C0 except newline and tab,
# DEL, C1, bidi controls and lone surrogates. Joiners pass, since emoji need them. CR and Unicode line
# separators become newlines. A newline or ``LONGEST_SEQUENCE`` characters end a sequence, so that it can't
# swallow a reply.

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
    """Cleans a stream; the result doesn't depend on chunk boundaries."""

    def __init__(self, replacement: str = REPLACEMENT) -> None:
        self._replacement = replacement
        self._state = _State.TEXT
        self._length = 0
        self._after_cr = False

    def feed(self, chunk: str) -> str:
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
    return Sanitiser().feed(text)


def reveal(text: str) -> str:
    """Return safe ``text`` that still shows the contents of escape sequences, for consent questions."""
    return _CONTROL.sub(REPLACEMENT, _LINE_END.sub("\n", text))


def sanitise_line(text: str) -> str:
    return " ".join(sanitise(text).split())


LONGEST_LINK = 2048
_LINK = re.compile(r"(?:https?://|mailto:)[!-~]+", re.IGNORECASE)


def safe_link(address: str) -> str:
    """Return ``address`` if a terminal may offer it: web or mail, ASCII, no spaces; else ""."""
    # No files: a model's text must not open a local program.
    return address if len(address) <= LONGEST_LINK and _LINK.fullmatch(address) else ""


def bare(row: str) -> str:
    """Return a laid-out row without control characters, which occupy no cells, so that the layout stays."""
    return _NOT_IN_A_ROW.sub(_in_its_place, row)


def _in_its_place(found: re.Match[str]) -> str:
    return REPLACEMENT if "\ud800" <= found[0] <= "\udfff" else ""  # a lone surrogate counts for one cell
