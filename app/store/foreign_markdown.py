"""Conversations that other programs wrote as Markdown: a heading, or a bold line, with a known name begins each message."""

import re

from tokamac.app.backend.shapes import ShapeError
from tokamac.app.store.text import title_of
from tokamac.app.store.values import Archive, Chat, Message
from tokamac.engine.events import Role

_NAMES: dict[str, Role] = {
    **dict.fromkeys(("user", "you", "human", "me", "prompt", "question"), "user"),
    **dict.fromkeys(("assistant", "ai", "model", "bot", "response", "answer"), "assistant"),
    "system": "system",
}
_SPEAKER = re.compile(r"(?:#{1,6} +|\*\*)(\w+):?(?:\*\*)?:?\s*")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


def from_foreign_markdown(text: str, now: float) -> Archive:
    """Return the conversation, dated ``now`` (seconds since 1970). Raises ShapeError where no message begins."""
    title, parts = _parts(text.removeprefix("\ufeff").replace("\r\n", "\n"))
    if not parts:
        raise ShapeError("no message begins in it: a line such as ## User or ## Assistant must stand before each")
    messages = tuple(
        Message(number, "", number - 1 or None, role, body, "", "complete", now)
        for number, (role, body) in enumerate(parts, 1)
    )
    if not title:
        title = title_of(next((body for role, body in parts if role == "user"), ""))
    return Archive(Chat("", title, "words", now, now, "", head=len(messages)), messages)


def _parts(text: str) -> tuple[str, list[tuple[Role, str]]]:
    """Return the title before the first message, and of each message who speaks and what is said."""
    before: list[str] = []
    parts: list[tuple[Role, list[str]]] = []
    fence = ""
    for line in text.split("\n"):
        fence = _fence_after(line, fence)
        role = None if fence else _speaker(line)
        if role is not None:
            parts.append((role, []))
        else:
            (parts[-1][1] if parts else before).append(line)
    return title_of("\n".join(before)), [(role, "\n".join(lines).strip("\n")) for role, lines in parts]


def _speaker(line: str) -> Role | None:
    match = _SPEAKER.fullmatch(line)
    return _NAMES.get(match[1].casefold()) if match else None


def _fence_after(line: str, fence: str) -> str:
    """Return the fence that is open after a line: a longer or equal one of the same kind ends it."""
    match = _FENCE.match(line)
    if match is None:
        return fence
    if not fence:
        return match[1]
    ends = match[1].startswith(fence) and not line[match.end() :].strip()
    return "" if ends else fence
