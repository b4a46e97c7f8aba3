"""A conversation from a file, as the chat can hold it: what a system message says first becomes the chat's own system prompt."""

from dataclasses import replace
from pathlib import Path

from tokamac.app.store import export
from tokamac.app.store.values import Archive


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
