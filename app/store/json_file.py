"""A whole conversation, all its branches, as JSON.

    {"format": "tokamac-chat", "version": 1, "chat": {…, "head": 4},
     "messages": [{"id": 1, "parent": null, "role": "user", "created": "…", "state": "complete", "text": "…"}, …]}

Messages come parents first; ``thinking``, ``model``, ``settings``, ``metrics`` and ``attachments`` may be missing.
"""

from dataclasses import replace
from typing import Any

from tokamac.app.backend.shapes import ShapeError
from tokamac.app.store.portable import (
    VERSION,
    attachment_from,
    blank,
    chat_from,
    chat_record,
    dumps,
    loads,
    message_from,
    message_record,
    taken,
)
from tokamac.app.store.values import Archive, Attachment, Message

FORMAT = "tokamac-chat"


def to_json(archive: Archive) -> str:
    """Return the conversation as JSON."""
    messages = [_record(message) for message in archive.messages]
    chat = {**chat_record(archive.chat), "head": archive.chat.head}
    return dumps({"format": FORMAT, "version": VERSION, "chat": chat, "messages": messages}, indent=2) + "\n"


def from_json(text: str) -> Archive:
    """Return the conversation in a JSON text. Raises ValueError (ShapeError) that says what is wrong, and where."""
    value = loads(text)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ShapeError(f'it has no "format": "{FORMAT}"')
    if taken(value, "file", "version", int) != VERSION:
        raise ShapeError(f"it is of version {value['version']}, and this tokamac reads version {VERSION}")
    if unknown := value.keys() - {"format", "version", "chat", "messages"}:
        raise ShapeError(f"unknown field {min(unknown)!r}")
    messages = _messages(value.get("messages"))
    return _with_head(value.get("chat"), messages)


def _record(message: Message) -> dict[str, Any]:
    record = {"id": message.id, "parent": message.parent, **message_record(message)}
    if message.attachments:
        record["attachments"] = [{"name": a.name, "kind": a.kind, "text": a.text} for a in message.attachments]
    if message.thinking:
        record["thinking"] = message.thinking
    return {**record, "text": message.text}


def _messages(records: object) -> tuple[Message, ...]:
    if not isinstance(records, list):
        raise ShapeError("messages: not a list")
    made: dict[int, Message] = {}
    for index, record in enumerate(records):
        message = _message(record, f"messages[{index}]")
        if message.id in made:
            raise ShapeError(f"messages[{index}].id: {message.id} stands twice")
        if message.parent is not None and message.parent not in made:
            raise ShapeError(f"messages[{index}].parent: no message {message.parent} comes before it")
        made[message.id] = message
    return tuple(made.values())


def _message(record: object, where: str) -> Message:
    if not isinstance(record, dict):
        raise ShapeError(f"{where}: not an object")
    rest = {
        key: value for key, value in record.items() if key not in ("id", "parent", "text", "thinking", "attachments")
    }
    parent = None if record.get("parent", 0) is None else taken(record, where, "parent", int)
    message = message_from(rest, where, blank(taken(record, where, "id", int), parent))
    return replace(
        message,
        text=taken(record, where, "text", str),
        thinking=taken(record, where, "thinking", str) if "thinking" in record else "",
        attachments=_attachments(record.get("attachments", []), f"{where}.attachments"),
    )


def _attachments(records: object, where: str) -> tuple[Attachment, ...]:
    if not isinstance(records, list):
        raise ShapeError(f"{where}: not a list")
    out = []
    for index, record in enumerate(records):
        at = f"{where}[{index}]"
        if not isinstance(record, dict):
            raise ShapeError(f"{at}: not an object")
        rest = {key: value for key, value in record.items() if key != "text"}
        out.append(attachment_from(rest, at, taken(record, at, "text", str)))
    return tuple(out)


def _with_head(record: object, messages: tuple[Message, ...]) -> Archive:
    if not isinstance(record, dict):
        raise ShapeError("chat: not an object")
    chat = chat_from({key: value for key, value in record.items() if key != "head"}, "chat")
    if not messages:
        return Archive(chat, ())
    head = taken(record, "chat", "head", int)
    if head not in {message.id for message in messages}:
        raise ShapeError(f"chat.head: there is no message {head}")
    return Archive(replace(chat, head=head), messages)
