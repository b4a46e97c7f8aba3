"""A conversion as a process of its own. However it ends, the same command goes on from there."""

import sys
from collections.abc import Sequence

from tokamac.app.backend.conversion import Line, LineError, Refused, decode
from tokamac.app.backend.line_process import Ended, LineProcess

__all__ = ["Converter", "Ended", "converter_command"]


def converter_command() -> list[str]:
    """Return the command that converts; flags and the source are to be added."""
    return [sys.executable, "-m", "tokamac.app.cli", "convert"]


class Converter(LineProcess[Line]):
    """Runs ``command``. A line that is not understood is handed over as a Refused: what follows it may still be."""

    def __init__(self, command: Sequence[str]) -> None:
        super().__init__(command, _understood)


def _understood(line: bytes) -> Line:
    try:
        return decode(line)
    except LineError as error:
        return Refused(error.message, "")
