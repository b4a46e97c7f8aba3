"""Files that are part of the system prompt: the facts to remember, one file a profile, and a project's instructions."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from tokamac.engine.files import is_file

from . import own_files
from .own_files import OwnFileError
from .text.sanitise import sanitise_line

PROJECT_FILES = ("AGENTS.md", "README.md")


class SystemFileError(OwnFileError):
    """A file for the system prompt can't be read or written."""


@dataclass(frozen=True, slots=True)
class SystemPart:
    """What a file adds to the system prompt. name: for lists."""

    kind: Literal["project", "memory"]
    name: str
    text: str

    @property
    def whole(self) -> str:
        head = "What the user wants you to remember" if self.kind == "memory" else f"About this project ({self.name})"
        return f"{head}:\n\n{self.text}"


def with_parts(system: str, parts: Iterable[SystemPart]) -> str:
    return "\n\n".join(filter(str.strip, (system, *(part.whole for part in parts))))


def memory_file(home: Path, profile: str) -> Path:
    return home / "memory" / f"{quote(profile, safe=' ')}.md" if profile else home / "memory.md"


def memory(home: Path, profile: str) -> list[SystemPart]:
    """Return the facts of a profile, if there are any. Raises OwnFileError."""
    file = memory_file(home, profile)
    return [SystemPart("memory", file.name, text)] if (text := _read(file)) else []


def remember(home: Path, profile: str, fact: str) -> None:
    """Add a line to the facts. Raises OwnFileError."""
    known = _read(memory_file(home, profile))
    write_memory(home, profile, "\n".join(filter(None, (known, f"- {' '.join(fact.split())}"))))


def write_memory(home: Path, profile: str, text: str) -> None:
    """Raises OwnFileError."""
    own_files.write(memory_file(home, profile), text)


def project_file(folder: Path) -> Path:
    """Return the file that tells of the project in ``folder``. Raises SystemFileError."""
    found = next((folder / name for name in PROJECT_FILES if is_file(folder / name)), None)
    if found is None:
        which = " or ".join(PROJECT_FILES)
        raise SystemFileError(f"{sanitise_line(str(folder))} has no {which}", "Start the chat in the project's folder.")
    return found


def project(path: str | None) -> list[SystemPart]:
    """Return what a project's file says; None is no file. Raises OwnFileError."""
    if path is None:
        return []
    if not (text := _read(Path(path))):
        raise SystemFileError(f"{sanitise_line(path)} is empty or gone", "/project off leaves it out.")
    return [SystemPart("project", Path(path).name, text)]


def _read(file: Path) -> str:
    return (own_files.read(file) or "").strip()
