"""``tokamac models pull`` and ``remove`` as processes of their own: what they say, one frozen dataclass for each kind of line.

A pull that is interrupted, or killed, goes on from there when it is run again.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tokamac.app.backend.line_process import LineProcess
from tokamac.app.backend.shapes import ShapeError, build


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes on disk so far, and in all; None is not known yet."""

    done: int
    total: int | None


@dataclass(frozen=True, slots=True)
class Pulled:
    """The model is whole, in the folder ``path``; ``bytes`` of its files."""

    id: str
    path: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Removed:
    """The model, or what was unfinished of it, is gone."""

    id: str
    freed_bytes: int


@dataclass(frozen=True, slots=True)
class Refused:
    """It failed: why, and what to do."""

    error: str
    hint: str


Line = Progress | Pulled | Removed | Refused

_KINDS: dict[object, type[Line]] = {"progress": Progress, "pulled": Pulled, "removed": Removed, "error": Refused}


def models_command() -> list[str]:
    """Return the command; what it is to do is to be added."""
    return [sys.executable, "-m", "tokamac.app.cli", "models"]


def pull_arguments(model: str) -> list[str]:
    """Return the arguments that bring ``model`` to disk."""
    return ["--json", "--", "pull", model]


def remove_arguments(model: str, *, unfinished: bool) -> list[str]:
    """Return the arguments that take ``model`` off the disk, or only what a download left of it that did not end."""
    return [*(["--unfinished"] if unfinished else []), "--json", "--", "remove", model]


class Puller(LineProcess[Line]):
    """Runs ``command``. A line that is not understood is handed over as a Refused: what follows it may still be."""

    def __init__(self, command: Sequence[str]) -> None:
        super().__init__(command, understood)


def understood(line: bytes) -> Line:
    """Return what a line of JSON says; a Refused where it says nothing."""
    try:
        value = json.loads(line)
        if not isinstance(value, dict) or value.get("event") not in _KINDS:
            raise ShapeError("unknown kind")
        event = value.pop("event")
        found: Line = build(_KINDS[event], value, str(event))
    except (ValueError, RecursionError, TypeError) as error:
        return Refused(f"a line of the download is not understood: {error}", "")
    return found
