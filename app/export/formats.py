"""Which format a file's name asks for, and the name a chat is exported under. A file that exists is never replaced."""

import re
from collections.abc import Callable
from pathlib import Path

from tokamac.app.store.errors import StoreError
from tokamac.app.store.export import to_json, to_markdown, write
from tokamac.app.store.values import Archive

MOST_CHARACTERS = 60
_NOT_IN_NAMES = re.compile(r"[\W_]+")


def export(archive: Archive, path: Path) -> None:
    """Write the conversation into a new file, in the format that its suffix names. Raises StoreError."""
    write(path, _format(path)(archive))


def check_suffix(path: Path) -> None:
    """Raise StoreError where ``path`` names no format."""
    _format(path)


def free_name(title: str, folder: Path, suffix: str = ".md") -> Path:
    """Return a path in ``folder`` that is made of the title and is not taken yet."""
    stem = _NOT_IN_NAMES.sub("-", title[:MOST_CHARACTERS].lower()).strip("-") or "chat"
    number = 1
    while (path := folder / (f"{stem}{suffix}" if number == 1 else f"{stem}-{number}{suffix}")).exists():
        number += 1
    return path


def _format(path: Path) -> Callable[[Archive], str]:
    made = _FORMATS.get(path.suffix.lower())
    if made is None:
        raise StoreError(f"{path.name} names no format", f"End the name in one of {', '.join(_FORMATS)}.")
    return made


def _html(archive: Archive) -> str:
    from tokamac.app.export.html import to_html

    return to_html(archive)


def _svg(archive: Archive) -> str:
    from tokamac.app.export.svg import to_svg

    return to_svg(archive)


_FORMATS: dict[str, Callable[[Archive], str]] = {".md": to_markdown, ".json": to_json, ".html": _html, ".svg": _svg}
