"""The user's own texts beside the settings: prompts and memory. Read, written, and named for a backup."""

import re
from collections.abc import Iterator
from pathlib import Path

from tokamac.engine.errors import TokamacError
from tokamac.engine.files import atomic_write, is_file, read_text

from .text.sanitise import sanitise_line

LARGEST_BYTES = 256 << 10  # some 60,000 tokens: no more than that is meant for a message
MOST_FILES = 1000
FOLDERS = ("prompts", "memory")
# What a backup may name: nothing outside of these folders, and nothing hidden.
NAME = re.compile(r"memory\.md|(?:prompts|memory)/[^/.\x00-\x1f][^/\x00-\x1f]{0,199}\.(?:md|json)")


class OwnFileError(TokamacError):
    """A file of the user can't be read or written; the message names it."""


def read(file: Path) -> str | None:
    """Return its text, None where there is none. Raises OwnFileError."""
    try:
        return read_text(file, LARGEST_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror or error
        raise OwnFileError(f"{sanitise_line(str(file))} can't be read: {why}", "Check it in an editor.") from error


def write(file: Path, text: str) -> Path:
    """Replace its text; the folder is made. Raises OwnFileError."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as out:
            out.write(f"{text.strip()}\n".encode())
    except OSError as error:
        raise OwnFileError(f"{file} can't be written: {error.strerror}", "Check the folder.") from error
    return file


def all_in(home: Path) -> Iterator[str]:
    """Yield the names of all, below ``home``. Raises OwnFileError."""
    found = [home / "memory.md", *(each for name in FOLDERS for each in sorted((home / name).glob("*.*")))]
    if len(found) > MOST_FILES:
        raise OwnFileError(f"{home} has more than {MOST_FILES:,} prompts", "Move some away.")
    yield from filter(NAME.fullmatch, (each.relative_to(home).as_posix() for each in found if is_file(each)))
