"""Import and export of one conversation. Reading raises ShapeError for invalid records."""

#     export.write(Path("chat.md"), export.to_markdown(store.archive(chat.id)))      the current branch
#     export.write(Path("chat.json"), export.to_json(store.archive(chat.id)))        all of it
#     store.adopt(export.read(Path("chat.json"), now=time.time()))                   either, or foreign Markdown
#
# Markdown round-trips texts; settings and metrics are only in JSON. Metadata is in comments on lines of their
# own, each valid until the next:
#
#     <!-- tokamac-chat {"version": 2, "title": "Bandwidth", …} -->
#     # Bandwidth
#
#     <!-- tokamac-message {"role": "user", "created": "…"} -->
#     ## You
#
#     Why is decode memory-bound?
#
#     <!-- tokamac-end -->
#
# Others: ``tokamac-thinking``, then ``tokamac-text``; ``tokamac-attachment``; ``tokamac-figures``, for people
# only. A message line like such a comment gets a leading backslash. Also reads version 1 (Tokamac 0.1), with
# metrics in comments, and foreign Markdown, where a known name as a heading or in bold begins a message.
#
# JSON is strict: unknown keys are errors. Times are ISO 8601 in UTC; chat ids and drafts are not exported.
#
#     {"format": "tokamac-chat", "version": 1, "chat": {…, "head": 4},
#      "messages": [{"id": 1, "parent": null, "role": "user", "created": "…", "state": "complete", "text": "…"}, …]}
#
# Parents come first; ``thinking``, ``model``, ``settings``, ``metrics``, ``calls``, ``attachments`` are
# optional.

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from tokamac.engine.errors import OptionError, access_hint
from tokamac.engine.events import Role, ToolCall
from tokamac.engine.files import TooLargeError, read_bytes, to_disk
from tokamac.engine.metrics import Metrics

from ..reports.verdict import figures_text
from ..text.strict_json import ShapeError, build
from .values import (
    Archive,
    Attachment,
    Json,
    State,
    StoredChat,
    StoredMessage,
    StoreError,
    TitleOrigin,
    one_line,
    title_of,
)

VERSION = 1
MARKDOWN_VERSION = 2  # of Markdown; 1 is read as well
T = TypeVar("T")
# Times of chats are before it: later ones are no date in every time zone.
LAST_S = datetime(9999, 1, 1, tzinfo=UTC).timestamp()
_HALF = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class ChatRecord:
    title: str
    title_origin: TitleOrigin
    created: str
    updated: str
    model: str = ""


@dataclass(frozen=True, slots=True)
class MessageRecord:
    role: Role
    created: str
    state: State = "complete"
    model: str = ""


@dataclass(frozen=True, slots=True)
class AttachmentRecord:
    name: str
    kind: str = "text"


def chat_record(chat: StoredChat) -> dict[str, Any]:
    return {
        "title": chat.title,
        "title_origin": chat.title_origin,
        "created": _moment(chat.created_at),
        "updated": _moment(chat.updated_at),
        "model": chat.model,
        "settings": dict(chat.settings),
    }


def chat_from(record: object, where: str) -> StoredChat:
    table, (settings,) = _without(record, where, "settings")
    read = build(ChatRecord, table, where)
    return StoredChat(
        id="",
        title=read.title,
        title_origin=read.title_origin,
        created_at=_seconds(read.created, f"{where}.created"),
        updated_at=_seconds(read.updated, f"{where}.updated"),
        model=read.model,
        settings=_table(settings, f"{where}.settings") or {},
    )


def message_record(message: StoredMessage) -> dict[str, Any]:
    record: dict[str, Any] = {"role": message.role, "created": _moment(message.created_at), "state": message.state}
    if message.model:
        record["model"] = message.model
    if message.settings:
        record["settings"] = dict(message.settings)
    if message.metrics is not None:
        record["metrics"] = dict(message.metrics)
    if message.calls:
        record["calls"] = [{key: value for key, value in asdict(call).items() if value} for call in message.calls]
    return record


def message_from(record: object, where: str, number: int, parent: int | None) -> StoredMessage:
    table, (settings, metrics, calls) = _without(record, where, "settings", "metrics", "calls")
    read = build(MessageRecord, table, where)
    created = _seconds(read.created, f"{where}.created")
    kept, measured = _table(settings, f"{where}.settings") or {}, _table(metrics, f"{where}.metrics")
    message = StoredMessage(number, "", parent, read.role, "", "", read.state, created, read.model, kept, measured)
    return message if calls is None else replace(message, calls=_calls(calls, f"{where}.calls"))


def _calls(records: object, where: str) -> tuple[ToolCall, ...]:
    try:
        read: tuple[ToolCall, ...] = build(tuple[ToolCall, ...], records, where)
    except OptionError as error:
        raise ShapeError(f"{where}: {error.message}") from None
    return read


def attachment_from(record: object, where: str, text: str) -> Attachment:
    read = build(AttachmentRecord, record, where)
    return Attachment(read.name, text, read.kind)


def dumps(value: object, *, indent: int | None = None) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    return _HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", text)  # they stand inside strings only


def loads(text: str) -> Any:
    """Parse JSON without duplicate keys or non-finite numbers. Raises ValueError."""
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def taken(table: Any, where: str, key: str, kind: type[T]) -> T:
    """Return a required value of this type. Raises ShapeError."""
    if key not in table:
        raise ShapeError(f"{where}: no field {key!r}")
    value: T = build(kind, table[key], f"{where}.{key}")
    return value


def _without(record: object, where: str, *keys: str) -> tuple[dict[str, Any], list[Any]]:
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
    if not 0 <= (seconds := read.timestamp()) < LAST_S:
        raise ShapeError(f"{where}: {moment!r:.40} is not from 1970 to 9998")
    return seconds


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        twice = next(key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1)
        raise ValueError(f"the key {twice!r:.40} stands twice")
    return table


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a number")


FORMAT = "tokamac-chat"


def to_json(archive: Archive) -> str:
    messages = [_record(message) for message in archive.messages]
    chat = {**chat_record(archive.chat), "head": archive.chat.head}
    return dumps({"format": FORMAT, "version": VERSION, "chat": chat, "messages": messages}, indent=2) + "\n"


def from_json(text: str) -> Archive:
    """Parse a JSON conversation. Raises ValueError (ShapeError) that names the place."""
    value = loads(text)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ShapeError(f'it has no "format": "{FORMAT}"')
    if taken(value, "file", "version", int) != VERSION:
        raise ShapeError(f"it is of version {value['version']}, and this tokamac reads version {VERSION}")
    if unknown := value.keys() - {"format", "version", "chat", "messages"}:
        raise ShapeError(f"unknown field {min(unknown)!r}")
    return _with_head(value.get("chat"), _messages(value.get("messages")))


def _record(message: StoredMessage) -> dict[str, Any]:
    record = {"id": message.id, "parent": message.parent, **message_record(message)}
    if message.attachments:
        record["attachments"] = [{"name": a.name, "kind": a.kind, "text": a.text} for a in message.attachments]
    if message.thinking:
        record["thinking"] = message.thinking
    return {**record, "text": message.text}


def _messages(records: object) -> tuple[StoredMessage, ...]:
    if not isinstance(records, list):
        raise ShapeError("messages: not a list")
    made: dict[int, StoredMessage] = {}
    for index, record in enumerate(records):
        message = _message_of(record, f"messages[{index}]")
        if message.id in made:
            raise ShapeError(f"messages[{index}].id: {message.id} stands twice")
        if message.parent is not None and message.parent not in made:
            raise ShapeError(f"messages[{index}].parent: no message {message.parent} comes before it")
        made[message.id] = message
    return tuple(made.values())


def _message_of(record: Any, where: str) -> StoredMessage:
    rest, _ = _without(record, where, "id", "parent", "text", "thinking", "attachments")
    parent = None if record.get("parent", 0) is None else taken(record, where, "parent", int)
    return replace(
        message_from(rest, where, taken(record, where, "id", int), parent),
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
        rest, _ = _without(record, at, "text")
        out.append(attachment_from(rest, at, taken(record, at, "text", str)))
    return tuple(out)


def _with_head(record: object, messages: tuple[StoredMessage, ...]) -> Archive:
    rest, _ = _without(record, "chat", "head")
    chat = chat_from(rest, "chat")
    if not messages:
        return Archive(chat, ())
    head = taken(record, "chat", "head", int)
    if head not in {message.id for message in messages}:
        raise ShapeError(f"chat.head: there is no message {head}")
    return Archive(replace(chat, head=head), messages)


_MARK = re.compile(r"^<!-- tokamac-([a-z]+)(?: (\{.*\}))? -->$\n?", re.MULTILINE)
_ESCAPABLE = re.compile(r"^(?=\\*<!-- tokamac-)", re.MULTILINE)
_ESCAPED = re.compile(r"^\\(?=\\*<!-- tokamac-)", re.MULTILINE)
_FOLDED = re.compile(r"\A<details><summary>Thinking</summary>\n\n(.*)\n\n</details>\n*\Z", re.DOTALL)
_FENCED = re.compile(r"\A[^\n]*\n\n(`{3,})\n(.*)\n\1\n*\Z", re.DOTALL)
_HEADED = re.compile(r"\A## [^\n]*\n\n(.*\S.*)\Z", re.DOTALL)
_WHO = {"system": "System", "user": "You", "assistant": "Assistant", "tool": "Tool"}


def is_ours(text: str) -> bool:
    return bool(re.match(r"\ufeff?\s*<!-- tokamac-chat ", text))


def to_markdown(archive: Archive) -> str:
    chat = {"version": MARKDOWN_VERSION, **chat_record(archive.chat)}
    parts = [f"{_mark('chat', chat)}# {_plain(archive.chat.title or 'Chat')}\n\n"]
    parts += [_message(message) for message in branch(archive)]
    return "".join([*parts, _mark("end")])


def from_markdown(text: str) -> Archive:
    """Parse ``to_markdown`` output. Raises ValueError (ShapeError) that names the place."""
    text = text.removeprefix("\ufeff").lstrip()
    if text.partition("\n")[0].endswith("\r"):  # an editor has changed all line ends
        text = text.replace("\r\n", "\n")
    sections = list(_sections(text))
    if not sections or sections[0].kind != "chat":
        raise ShapeError("line 1: the comment tokamac-chat is damaged")
    if sections[-1].kind != "end":
        raise ShapeError("its end is missing")
    _require_heading(sections[0], 1)
    _require_heading(sections[-1], 0)
    messages: list[StoredMessage] = []
    for section in sections[1:-1]:
        _read_section(section, messages)
    record = dict(sections[0].record)
    if not 1 <= build(int, record.pop("version", None), "line 1: version") <= MARKDOWN_VERSION:
        raise ShapeError(f"it is not of version 1 or {MARKDOWN_VERSION}, which this tokamac reads")
    return Archive(replace(chat_from(record, "line 1"), head=messages[-1].id if messages else None), tuple(messages))


@dataclass(frozen=True, slots=True)
class _Section:
    kind: str
    record: dict[str, object]
    body: str
    line: int


def _sections(text: str) -> Iterator[_Section]:
    marks = list(_MARK.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    line, at = 1, 0
    for mark, end in zip(marks, ends, strict=True):
        line, at = line + text.count("\n", at, mark.start()), mark.start()
        try:
            record = loads(mark[2]) if mark[2] else {}
        except ValueError as error:
            raise ShapeError(f"line {line}: {error}") from None
        yield _Section(mark[1], record, text[mark.end() : end], line)


def _read_section(section: _Section, messages: list[StoredMessage]) -> None:
    where = f"line {section.line}"
    if section.kind == "message":
        number = len(messages) + 1
        message = message_from(section.record, where, number, number - 1 or None)
        if headed := _HEADED.match(section.body):
            message = replace(message, text=_unescaped(_without_gap(headed[1])))
        else:
            _require_heading(section, 1)
        messages.append(message)
        return
    if not messages:
        raise ShapeError(f"{where}: tokamac-{section.kind} belongs to no message")
    message = messages[-1]
    if section.kind == "text":
        if message.text:
            raise ShapeError(f"{where}: there is text before tokamac-text already")
        message = replace(message, text=_unescaped(_without_gap(section.body)))
    elif section.kind == "figures":
        _require_heading(section, 1)
    elif section.kind == "thinking":
        message = replace(message, thinking=_unescaped(_inside(_FOLDED, section, 1)))
    elif section.kind == "attachment":
        attachment = attachment_from(section.record, where, _unescaped(_inside(_FENCED, section, 2)))
        message = replace(message, attachments=(*message.attachments, attachment))
    else:
        raise ShapeError(f"{where}: tokamac-{section.kind} is not known")
    messages[-1] = message


def _without_gap(body: str) -> str:
    return body[:-2] if body.endswith("\n\n") else body.removesuffix("\n")


def _message(message: StoredMessage) -> str:
    who = _plain(message.model) if message.role == "assistant" and message.model else _WHO[message.role]
    if message.role == "tool" and message.calls:
        who = f"{who}: {_plain(message.calls[0].name)}"
    ended = {
        key: said for key, said in (message.metrics or {}).items() if key in ("ending", "reason") and said != "stop"
    }
    record = message_record(
        replace(message, settings={}, metrics=ended or None)
    )  # how it ended is part of what is read
    if message.state == "complete":
        del record["state"]
    out = f"{_mark('message', record)}## {who}\n\n"
    if message.thinking:
        folded = f"<details><summary>Thinking</summary>\n\n{_escaped(message.thinking)}\n\n</details>"
        out += f"{_mark('thinking')}{folded}\n\n"
    if message.thinking or not message.text.strip():
        out += _mark("text")
    out += f"{_escaped(message.text)}\n\n"
    out += "".join(_attachment(each) for each in message.attachments)
    figures = figures_line(message)
    return out + (f"{_mark('figures')}*{figures}*\n\n" if figures else "")


def figures_line(message: StoredMessage) -> str:
    """Return ``72 tok/s · 370 tokens · first token 0.06 s · model``; "" if nothing is known."""
    measured = (message.metrics or {}).get("metrics")
    if message.role != "assistant" or not isinstance(measured, Mapping):
        return ""
    try:
        figures = figures_text(build(Metrics, dict(measured), "metrics"))
    except ShapeError:  # of another program, or of another version
        return ""
    return f"{figures} · {_plain(message.model)}" if message.model else figures


def _attachment(attachment: Attachment) -> str:
    longest = max((len(run) for run in re.findall("`+", attachment.text)), default=0)
    fence = "`" * max(3, longest + 1)
    record: dict[str, object] = {"name": attachment.name, "kind": attachment.kind}
    shown = f"**{_plain(attachment.name)}**\n\n{fence}\n{_escaped(attachment.text)}\n{fence}"
    return f"{_mark('attachment', record)}{shown}\n\n"


def _mark(kind: str, record: dict[str, object] | None = None) -> str:
    """Return a comment that no text can end: angle brackets occur only in strings, where JSON escapes them."""
    said = "" if record is None else " " + dumps(record).replace("<", "\\u003c").replace(">", "\\u003e")
    return f"<!-- tokamac-{kind}{said} -->\n"


def branch(archive: Archive) -> list[StoredMessage]:
    by_id = {message.id: message for message in archive.messages}
    out, at = [], archive.chat.head
    while at is not None:
        out.append(by_id[at])
        at = by_id[at].parent
    return out[::-1]


def _plain(name: str) -> str:
    return one_line(name).replace("<", "‹")


def _require_heading(section: _Section, lines: int) -> None:
    if sum(bool(line.strip()) for line in section.body.split("\n")) > lines:
        raise ShapeError(f"line {section.line}: there is text after tokamac-{section.kind} that belongs to no message")


def _inside(shape: re.Pattern[str], section: _Section, group: int) -> str:
    match = shape.match(section.body)
    if match is None:
        raise ShapeError(f"line {section.line}: the block of tokamac-{section.kind} is not complete")
    return match[group]


def _escaped(text: str) -> str:
    return _ESCAPABLE.sub(r"\\", text)


def _unescaped(text: str) -> str:
    return _ESCAPED.sub("", text)


_NAMES: dict[str, Role] = {
    **dict.fromkeys(("user", "you", "human", "me", "prompt", "question"), "user"),
    **dict.fromkeys(("assistant", "ai", "model", "bot", "response", "answer"), "assistant"),
    "system": "system",
}
_SPEAKER = re.compile(r"(?:#{1,6} +|\*\*)(\w+):?(?:\*\*)?:?\s*")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


def from_foreign_markdown(text: str, now: float) -> Archive:
    """Parse foreign Markdown, dated ``now`` (seconds since 1970). Raises ShapeError if no message begins."""
    title, parts = _parts(text.removeprefix("\ufeff").replace("\r\n", "\n"))
    if not parts:
        raise ShapeError("no message begins in it: a line such as ## User or ## Assistant must stand before each")
    messages = tuple(
        StoredMessage(number, "", number - 1 or None, role, body, "", "complete", now)
        for number, (role, body) in enumerate(parts, 1)
    )
    if not title:
        title = title_of(next((body for role, body in parts if role == "user"), ""))
    return Archive(StoredChat("", title, "words", now, now, "", head=len(messages)), messages)


def _parts(text: str) -> tuple[str, list[tuple[Role, str]]]:
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
    match = _FENCE.match(line)
    if match is None:
        return fence
    if not fence:
        return match[1]
    ends = match[1].startswith(fence) and not line[match.end() :].strip()
    return "" if ends else fence


MAX_BYTES = 256 << 20  # a conversation of fifty million words: what is larger is something else


def parse(text: str, *, now: float) -> Archive:
    """Parse JSON or Markdown; ``now`` dates undated messages. Raises StoreError."""
    try:
        if text.lstrip("\ufeff \t\r\n").startswith("{"):
            return from_json(text.lstrip("\ufeff"))
        return from_markdown(text) if is_ours(text) else from_foreign_markdown(text, now)
    except ShapeError as error:
        raise StoreError(f"This is not a conversation that can be imported: {error}", "Nothing was stored.") from error
    except ValueError as error:
        raise StoreError(f"This is not JSON: {error}", "Nothing was stored.") from error


def read(path: Path, *, now: float) -> Archive:
    """Read a conversation from a file. Raises StoreError."""
    try:
        return parse(read_bytes(path, MAX_BYTES).decode("utf-8"), now=now)
    except TooLargeError as problem:
        raise StoreError(f"{path} is larger than {MAX_BYTES >> 20} MiB", "A conversation is not.") from problem
    except OSError as problem:
        hint = access_hint(problem, "Check the path and its permissions.")
        raise StoreError(f"{path} can't be read: {problem.strerror or problem}", hint) from problem
    except UnicodeDecodeError as error:
        raise StoreError(f"{path} is not UTF-8 text", "Save it as UTF-8.") from error


def write(path: Path, text: str) -> None:
    """Write a new file, readable by its user only. Raises StoreError if it exists or can't be written."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise StoreError(f"{path} exists", "Give another name; nothing was replaced.") from None
    except OSError as problem:
        raise _unwritable(path, problem) from problem
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode("utf-8"))
            file.flush()
            to_disk(file.fileno())
    except BaseException as problem:
        path.unlink(missing_ok=True)  # half a file is none, by Ctrl-C too
        if isinstance(problem, OSError):
            raise _unwritable(path, problem) from problem
        raise


def _unwritable(path: Path, problem: OSError) -> StoreError:
    return StoreError(f"{path} can't be written: {problem.strerror or problem}", access_hint(problem, ""))
