"""A conversation as a page or a picture to share. Nothing in these files runs, and nothing is fetched when they are opened.

Here: which format a file's name asks for, and the name a chat is exported under. A file that exists is never replaced. A
conversation from a file comes as the chat can hold it: what a system message says first becomes the chat's own system prompt.

entries   what of a conversation is shown: the branch it stands on, as safe text
html      one page of its own
svg       one picture, drawn from text

Markdown and JSON, which come back in, are the store's own (``app/store/export``).
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tokamac.engine.files import exists

from ..store import export
from ..store.export import to_json, to_markdown, write
from ..store.values import Archive, StoreError

MOST_CHARACTERS = 60
_NOT_IN_NAMES = re.compile(r"[\W_]+")


def export_chat(archive: Archive, path: Path) -> None:
    """Write the conversation into a new file, in the format that its suffix names. Raises StoreError."""
    write(path, _format(path)(archive))


def check_suffix(path: Path) -> None:
    """Raise StoreError where ``path`` names no format."""
    _format(path)


def free_name(title: str, folder: Path, suffix: str = ".md") -> Path:
    """Return a path in ``folder`` that is made of the title and is not taken yet."""
    stem = _NOT_IN_NAMES.sub("-", title[:MOST_CHARACTERS].lower()).strip("-") or "chat"
    number = 1
    while exists(path := folder / (f"{stem}{suffix}" if number == 1 else f"{stem}-{number}{suffix}")):
        number += 1
    return path


def _format(path: Path) -> Callable[[Archive], str]:
    made = _FORMATS.get(path.suffix.lower())
    if made is None:
        raise StoreError(f"{path.name} names no format", f"End the name in one of {', '.join(_FORMATS)}.")
    return made


def _html(archive: Archive) -> str:
    from .html import to_html

    return to_html(archive)


def _svg(archive: Archive) -> str:
    from .svg import to_svg

    return to_svg(archive)


_FORMATS: dict[str, Callable[[Archive], str]] = {".md": to_markdown, ".json": to_json, ".html": _html, ".svg": _svg}


def bring(path: Path, *, now: float) -> Archive:
    """Return the conversation in a file; ``now``, in seconds since 1970, dates what has no date. Raises StoreError."""
    return with_system_apart(export.read(path, now=now))


def with_system_apart(archive: Archive) -> Archive:
    """Return the conversation without the system message that it begins with, which its settings hold then.

    Left as it is where it begins in several ways, or has a system prompt in its settings.
    """
    first = archive.messages[0] if archive.messages else None
    roots = sum(message.parent is None for message in archive.messages)
    if first is None or first.role != "system" or roots > 1 or "system" in archive.chat.settings:
        return archive
    messages = tuple(
        replace(message, parent=None) if message.parent == first.id else message for message in archive.messages[1:]
    )
    head = None if archive.chat.head == first.id else archive.chat.head
    chat = replace(archive.chat, head=head, settings={**archive.chat.settings, "system": first.text})
    return Archive(chat, messages)
