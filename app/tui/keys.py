"""A key that Textual does not know: Alt+Enter as terminals without extended keys send it, ESC and a carriage return."""

from enum import Enum
from typing import Any, cast

from textual._ansi_sequences import ANSI_SEQUENCES_KEYS


class _Keys(Enum):
    ALT_ENTER = "alt+enter"


def teach_alt_enter() -> None:
    """Make ``ESC CR`` the key ``alt+enter``; Textual drops the Alt and would send the prompt. Terminal.app is such a terminal."""
    cast(dict[str, Any], ANSI_SEQUENCES_KEYS)["\x1b\r"] = (_Keys.ALT_ENTER,)
