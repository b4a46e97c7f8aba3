"""Files that are part of the system prompt: the facts to remember, one file a profile, and a project's instructions."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from tokamac.engine.errors import TokamacError
from tokamac.engine.files import atomic_write, is_file, read_text

from .text.sanitise import sanitise_line

LARGEST_BYTES = 256 << 10  # some 60,000 tokens: no more than that is meant for every message
PROJECT_FILES = ("AGENTS.md", "README.md")


class SystemFileError(TokamacError):
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
    """Return the facts of a profile, if there are any. Raises SystemFileError."""
    file = memory_file(home, profile)
    return [SystemPart("memory", file.name, text)] if (text := _read(file)) else []


def remember(home: Path, profile: str, fact: str) -> None:
    """Add a line to the facts. Raises SystemFileError."""
    known = _read(memory_file(home, profile))
    write_memory(home, profile, "\n".join(filter(None, (known, f"- {' '.join(fact.split())}"))))


def write_memory(home: Path, profile: str, text: str) -> None:
    """Raises SystemFileError."""
    file = memory_file(home, profile)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as out:
            out.write(f"{text.strip()}\n".encode())
    except OSError as error:
        raise SystemFileError(f"{file} can't be written: {error.strerror}", "Check the folder.") from error


def project_file(folder: Path) -> Path:
    """Return the file that tells of the project in ``folder``. Raises SystemFileError."""
    found = next((folder / name for name in PROJECT_FILES if is_file(folder / name)), None)
    if found is None:
        which = " or ".join(PROJECT_FILES)
        raise SystemFileError(f"{sanitise_line(str(folder))} has no {which}", "Start the chat in the project's folder.")
    return found


def project(path: str | None) -> list[SystemPart]:
    """Return what a project's file says; None is no file. Raises SystemFileError."""
    if path is None:
        return []
    if not (text := _read(Path(path))):
        raise SystemFileError(f"{sanitise_line(path)} is empty or gone", "/project off leaves it out.")
    return [SystemPart("project", Path(path).name, text)]


def _read(file: Path) -> str:
    try:
        return read_text(file, LARGEST_BYTES).strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise SystemFileError(f"{sanitise_line(str(file))} can't be read: {why}", "It is not sent.") from error
