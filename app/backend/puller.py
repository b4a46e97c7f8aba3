"""``tokamac models --json`` as a process of its own, which downloads, removes and searches: what its lines say."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from .command_process import LineProcess, Refused, decode_line


@dataclass(frozen=True, slots=True)
class PullProgress:
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
class HubModelLine:
    """A model that a search of the hub found (engine/hub/search.py); told again once its config has come. None is unknown."""

    id: str
    nbytes: int | None
    context: int | None
    licence: str | None
    downloads: int | None
    good_for: str
    mlx: bool
    config_folder: str | None


@dataclass(frozen=True, slots=True)
class Searched:
    """The search is over: all that was found for ``words``."""

    words: str
    models: tuple[HubModelLine, ...]


PullLine = PullProgress | Pulled | Removed | Refused | HubModelLine | Searched

_PULL_KINDS: dict[object, type[PullLine]] = {
    "progress": PullProgress,
    "pulled": Pulled,
    "removed": Removed,
    "found": HubModelLine,
    "searched": Searched,
    "error": Refused,
}


def models_command() -> list[str]:
    """Return the command; what it is to do is to be added."""
    return [sys.executable, "-m", "tokamac.app.cli", "models"]


def pull_arguments(model: str) -> list[str]:
    """Return the arguments that bring ``model`` to disk."""
    return ["--json", "--", "pull", model]


def search_arguments(words: str) -> list[str]:
    """Return the arguments that search the hub."""
    return ["--json", "--", "search", words]


def remove_arguments(model: str, *, unfinished: bool) -> list[str]:
    """Return the arguments that take ``model`` off the disk, or only what a download left of it that did not end."""
    return [*(["--unfinished"] if unfinished else []), "--json", "--", "remove", model]


def decode_pull(line: bytes) -> PullLine:
    """Return what a line of ``models --json`` says."""
    return decode_line(_PULL_KINDS, line, "the download")


class Puller(LineProcess[PullLine]):
    """Runs a download, a removal or a search."""

    def __init__(self, command: Sequence[str]) -> None:
        super().__init__(command, decode_pull)
