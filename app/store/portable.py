"""Chats and messages as plain records for files that people keep, and back, strictly: an unknown key is an error that names it.

Moments are ISO 8601 in UTC. Ids of chats and drafts stay behind: the one is the store's, the other was never sent.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from tokamac.app.backend.shapes import ShapeError, build
from tokamac.app.store.values import Attachment, Chat, Json, Message, State, TitleOrigin
from tokamac.engine.events import Role

VERSION = 1
T = TypeVar("T")
_HALF = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class ChatRecord:
    """What a file says about a chat."""

    title: str
    title_origin: TitleOrigin
    created: str
    updated: str
    model: str = ""


@dataclass(frozen=True, slots=True)
class MessageRecord:
    """What a file says about a message, but for its texts and its place."""

    role: Role
    created: str
    state: State = "complete"
    model: str = ""


@dataclass(frozen=True, slots=True)
class AttachmentRecord:
    """What a file says about an attachment, but for its text."""

    name: str
    kind: str = "text"


def chat_record(chat: Chat) -> dict[str, Any]:
    """Return what a file keeps of a chat."""
    return {
        "title": chat.title,
        "title_origin": chat.title_origin,
        "created": _moment(chat.created_at),
        "updated": _moment(chat.updated_at),
        "model": chat.model,
        "settings": dict(chat.settings),
    }


def chat_from(record: object, where: str) -> Chat:
    """Return the chat of a record, without messages. Raises ShapeError."""
    table, (settings,) = _without(record, where, "settings")
    read = build(ChatRecord, table, where)
    return Chat(
        id="",
        title=read.title,
        title_origin=read.title_origin,
        created_at=_seconds(read.created, f"{where}.created"),
        updated_at=_seconds(read.updated, f"{where}.updated"),
        model=read.model,
        settings=_table(settings, f"{where}.settings") or {},
    )


def message_record(message: Message) -> dict[str, Any]:
    """Return what a file keeps of a message, but for its texts and its place."""
    record: dict[str, Any] = {"role": message.role, "created": _moment(message.created_at), "state": message.state}
    if message.model:
        record["model"] = message.model
    if message.settings:
        record["settings"] = dict(message.settings)
    if message.metrics is not None:
        record["metrics"] = dict(message.metrics)
    return record


def message_from(record: object, where: str, blank: Message) -> Message:
    """Return ``blank`` with what the record says. Raises ShapeError."""
    table, (settings, metrics) = _without(record, where, "settings", "metrics")
    read = build(MessageRecord, table, where)
    return replace(
        blank,
        role=read.role,
        created_at=_seconds(read.created, f"{where}.created"),
        state=read.state,
        model=read.model,
        settings=_table(settings, f"{where}.settings") or {},
        metrics=_table(metrics, f"{where}.metrics"),
    )


def attachment_from(record: object, where: str, text: str) -> Attachment:
    """Return the attachment of a record. Raises ShapeError."""
    read = build(AttachmentRecord, record, where)
    return Attachment(read.name, text, read.kind)


def blank(number: int, parent: int | None) -> Message:
    """Return an empty message at this place."""
    return Message(number, "", parent, "user", "", "", "complete", 0.0)


def dumps(value: object, *, indent: int | None = None) -> str:
    """Return a value as JSON that a UTF-8 file can hold."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    return _HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", text)  # they stand inside strings only


def loads(text: str) -> Any:
    """Return the value of a JSON text, in which no key stands twice and every number is one. Raises ValueError."""
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def taken(table: Mapping[str, Any], where: str, key: str, kind: type[T]) -> T:
    """Return a value that must be there and of that type. Raises ShapeError."""
    if key not in table:
        raise ShapeError(f"{where}: no field {key!r}")
    value: T = build(kind, table[key], f"{where}.{key}")
    return value


def _without(record: object, where: str, *keys: str) -> tuple[dict[str, Any], list[Any]]:
    """Return the record without these keys, and their values, None for those that are missing."""
    if not isinstance(record, dict):
        raise ShapeError(f"{where}: not an object")
    return {k: v for k, v in record.items() if k not in keys}, [record.get(key) for key in keys]


def _table(value: object, where: str) -> Json | None:
    if value is not None and not isinstance(value, dict):
        raise ShapeError(f"{where}: not an object")
    return value


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")


def _seconds(moment: str, where: str) -> float:
    try:
        read = datetime.fromisoformat(moment)
    except ValueError:
        raise ShapeError(f"{where}: {moment!r:.40} is no date and time") from None
    if read.tzinfo is None:
        raise ShapeError(f"{where}: {moment!r:.40} has no time zone")
    return read.timestamp()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        twice = next(key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1)
        raise ValueError(f"the key {twice!r:.40} stands twice")
    return table


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")
