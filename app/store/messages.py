"""Rows of chats and messages, in the caller's transaction, and full-text search; missing ones raise StoreError."""

import contextlib
import fcntl
import json
import os
import re
import secrets
import sqlite3
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from tokamac.engine.errors import OptionError
from tokamac.engine.events import ToolCall

from ..text.strict_json import ShapeError, build
from .database import INDEXES
from .values import (
    MARKS,
    Archive,
    Attachment,
    Hit,
    Json,
    Merged,
    StoredChat,
    StoredMessage,
    StoreError,
    left_out_of,
    one_line,
    refused,
    storable,
    title_of,
)

ID_CHARS = "abcdefghijklmnopqrstuvwxyz234567"
ID_LENGTH = 8

_BESIDE = "FROM messages s WHERE s.chat = m.chat AND s.parent IS m.parent"
_SELECT = (
    f"SELECT m.*, (SELECT count(*) {_BESIDE} AND s.id < m.id) AS position, (SELECT count(*) {_BESIDE}) AS siblings"
)
_UP = """
WITH RECURSIVE up (id, parent, depth) AS (
    SELECT id, parent, 0 FROM messages WHERE id = ?
    UNION ALL SELECT m.id, m.parent, up.depth + 1 FROM up JOIN messages m ON m.id = up.parent
)"""


def chat_of(row: sqlite3.Row) -> StoredChat:
    return StoredChat(**{**dict(row), "settings": json.loads(row["settings"])})


def as_json(value: Json) -> str:
    """Return JSON to store. Raises StoreError for other values."""
    try:
        return json.dumps(dict(value), allow_nan=False)  # ASCII: halves of surrogate pairs too
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(
            f"Settings or metrics can't be stored: {error}", "Use numbers, texts, lists and tables."
        ) from None


def chat(connection: sqlite3.Connection, name: str) -> StoredChat:
    row = connection.execute("SELECT * FROM chats WHERE id = ?", (name,)).fetchone()
    if row is None:
        raise StoreError(f"There is no chat {name!r:.20}", "It may have been purged, here or in another window.")
    return chat_of(row)


def update_chat(connection: sqlite3.Connection, name: str, **columns: Any) -> StoredChat:
    names = ", ".join(f"{column} = :{column}" for column in columns)
    connection.execute(f"UPDATE chats SET {names} WHERE id = :id", {**columns, "id": name})
    return chat(connection, name)


def add_chat(connection: sqlite3.Connection, draft: StoredChat, name: str = "") -> StoredChat:
    while not name or connection.execute("SELECT 1 FROM chats WHERE id = ?", (name,)).fetchone():
        name = "".join(secrets.choice(ID_CHARS) for _ in range(ID_LENGTH))
    _insert(
        connection, "chats", id=name, title=one_line(storable(draft.title)), title_origin=draft.title_origin,
        created_at=draft.created_at, updated_at=draft.updated_at, model=storable(draft.model),
        settings=as_json(draft.settings), draft=storable(draft.draft), folder=one_line(storable(draft.folder)),
    )  # fmt: skip
    return chat(connection, name)


def message(connection: sqlite3.Connection, name: int) -> StoredMessage:
    found = select(connection, "FROM messages m WHERE m.id = ?", name)
    if not found:
        raise StoreError(f"There is no message {name}", "Its chat may have been purged, here or in another window.")
    return found[0]


def path(connection: sqlite3.Connection, head: int) -> list[StoredMessage]:
    return select(connection, "FROM up JOIN messages m ON m.id = up.id ORDER BY up.depth DESC", head, before=_UP)


def select(connection: sqlite3.Connection, source: str, *values: Any, before: str = "") -> list[StoredMessage]:
    rows = connection.execute(f"{before} {_SELECT} {source}", values).fetchall()
    attached = _attachments(connection, [row["id"] for row in rows])
    return [_message_of(row, attached.get(row["id"], ())) for row in rows]


def require_within(connection: sqlite3.Connection, name: str, message_id: int) -> None:
    if connection.execute("SELECT 1 FROM messages WHERE chat = ? AND id = ?", (name, message_id)).fetchone() is None:
        raise StoreError(f"Chat {name} has no message {message_id}", "Open the chat again.")


def add(connection: sqlite3.Connection, draft: StoredMessage, *, owner: str | None = None) -> StoredMessage:
    """Add a message and move the chat's head to it; undeletes the chat. Raises StoreError.

    owner: the claim of the writing process, if partial.
    """
    chat(connection, draft.chat)
    if draft.parent is not None:
        require_within(connection, draft.chat, draft.parent)
    made = _add(connection, draft, owner=owner)
    at = update_chat(connection, draft.chat, head=made, updated_at=draft.created_at, deleted_at=None)
    if draft.role == "user" and draft.text and not at.title:
        update_chat(connection, draft.chat, title=title_of(storable(draft.text)), title_origin="words")
    return message(connection, made)


def adopt(connection: sqlite3.Connection, archive: Archive) -> StoredChat:
    """Add a chat with new ids; partial messages become stopped. Raises StoreError."""
    name = add_chat(connection, archive.chat).id
    made: dict[int | None, int | None] = {None: None}
    for each in archive.messages:
        if each.parent not in made:
            raise StoreError(f"Message {each.id} continues message {each.parent}, which does not come before it")
        state = "stopped" if each.state == "partial" else each.state
        made[each.id] = _add(connection, replace(each, chat=name, parent=made[each.parent], state=state))
    if archive.chat.head not in made:
        raise StoreError(f"The chat stands at message {archive.chat.head}, which is not in it")
    settings = as_json(_with_ids(archive.chat.settings, made))
    return update_chat(connection, name, head=made[archive.chat.head], settings=settings)


def _with_ids(settings: Json, made: Mapping[int | None, int | None]) -> Json:
    found = {
        name: sorted((made[key], file) for key, file in left_out_of(settings, name) if key in made) for name in MARKS
    }
    rest = {key: value for key, value in settings.items() if key not in MARKS}
    return {**rest, **{name: moved for name, moved in found.items() if moved}}


def merge(connection: sqlite3.Connection, archive: Archive, *, stopped: bool = False) -> Merged:
    """Add what is missing here of a chat from another file; changes nothing existing. Raises StoreError.

    A new chat keeps its id if free. stopped: add unfinished replies as stopped; else leave them to their writer.
    """
    known = connection.execute("SELECT * FROM chats WHERE id = ?", (archive.chat.id,)).fetchone()
    if known is not None and known["created_at"] == archive.chat.created_at:
        name, here = archive.chat.id, select(connection, "FROM messages m WHERE m.chat = ?", archive.chat.id)
    else:
        own = archive.chat.id if re.fullmatch(f"[{ID_CHARS}]{{{ID_LENGTH}}}", archive.chat.id) else ""
        name, here, known = add_chat(connection, archive.chat, own).id, [], None
    whole = {_content(each): each.id for each in here}
    begun = {_beginning(each): each for each in here}
    made: dict[int | None, int | None] = {None: None}
    added = 0
    for each in archive.messages:
        if each.parent not in made:
            continue  # it follows a reply that is still being written
        draft = replace(each, chat=name, parent=made[each.parent])
        found = whole.get(_content(draft))
        if each.state == "partial":
            same = begun.get(_beginning(draft))
            found = same.id if same is not None and (stopped or same.state == "partial") else None
            if found is None and not stopped:
                continue
            draft = replace(draft, state="stopped")
        if found is None:
            found, added = _add(connection, draft), added + 1
        made[each.id] = found
    head = next((made[key] for key in _upwards(archive) if key in made), None)
    if known is None:
        kept = {"pinned_at": archive.chat.pinned_at, "deleted_at": archive.chat.deleted_at}
        update_chat(connection, name, head=head, settings=as_json(_with_ids(archive.chat.settings, made)), **kept)
    elif added and head is not None and known["head"] in {None, *(each.id for each in path(connection, head))}:
        update_chat(connection, name, head=head)  # it goes on from where the chat stands
    return Merged(name, {old: new for old, new in made.items() if old and new}, added, is_new=known is None)


def _beginning(message: StoredMessage) -> tuple[Any, ...]:
    return message.parent, message.role, message.created_at


def _content(message: StoredMessage) -> tuple[Any, ...]:
    said = message.state, message.text, message.thinking, message.calls, message.attachments
    return (*_beginning(message), *said)


def _upwards(archive: Archive) -> Iterator[int | None]:
    parents = {each.id: each.parent for each in archive.messages}
    at = archive.chat.head
    while at is not None:
        yield at
        at = parents.get(at)


def _add(connection: sqlite3.Connection, draft: StoredMessage, *, owner: str | None = None) -> int:
    made = _insert(
        connection, "messages", chat=draft.chat, parent=draft.parent, role=draft.role, state=draft.state, owner=owner,
        created_at=draft.created_at, model=storable(draft.model), settings=as_json(draft.settings),
        metrics=None if draft.metrics is None else as_json(draft.metrics), text=storable(draft.text),
        thinking=storable(draft.thinking), calls=calls_as_json(draft.calls),
    )  # fmt: skip
    for position, each in enumerate(draft.attachments):
        texts = {"kind": storable(each.kind), "name": storable(each.name), "text": storable(each.text)}
        _insert(connection, "attachments", message=made, position=position, **texts)
    return made


def _insert(connection: sqlite3.Connection, table: str, **columns: Any) -> int:
    names, values = ", ".join(columns), ", ".join(f":{name}" for name in columns)
    return int(connection.execute(f"INSERT INTO {table} ({names}) VALUES ({values})", columns).lastrowid or 0)


def _attachments(connection: sqlite3.Connection, ids: Sequence[int]) -> dict[int, tuple[Attachment, ...]]:
    found: dict[int, tuple[Attachment, ...]] = {}
    wanted = "SELECT * FROM attachments WHERE message IN (SELECT value FROM json_each(?)) ORDER BY message, position"
    for row in connection.execute(wanted, (json.dumps(ids),)):
        attachment = Attachment(row["name"], row["text"], row["kind"])
        found[row["message"]] = (*found.get(row["message"], ()), attachment)
    return found


def _message_of(row: sqlite3.Row, attachments: tuple[Attachment, ...]) -> StoredMessage:
    values: Mapping[str, Any] = {
        **{each.name: row[each.name] for each in fields(StoredMessage) if each.name != "attachments"},
        "calls": _calls_of(row["calls"]),
        "settings": json.loads(row["settings"]),
        "metrics": None if row["metrics"] is None else json.loads(row["metrics"]),
    }
    return StoredMessage(**values, attachments=attachments)


def calls_as_json(calls: Sequence[ToolCall]) -> str | None:
    return json.dumps([asdict(each) for each in calls]) if calls else None


def _calls_of(stored: str | None) -> tuple[ToolCall, ...]:
    if stored is None:
        return ()
    try:
        read: tuple[ToolCall, ...] = build(tuple[ToolCall, ...], json.loads(stored), "calls")
    except (ShapeError, OptionError, ValueError):
        return (ToolCall("", stored, problem="it was written by another version"),)
    return read


# Claims on unfinished replies: a process locks a file while it lives, and its replies carry the file's
# name. The system frees locks however a process ends; process ids are reused, and heartbeats stop during sleep.
_TOKEN = re.compile(r"[0-9a-f]{32}")
_PREFIX = "writer-"


class Claim:
    """A token, alive until ``release`` or until this process ends."""

    def __init__(self, folder: Path) -> None:
        """Raises StoreError where ``folder`` can't be written."""
        self.token = secrets.token_hex(16)
        self._path = _file(folder, self.token)
        unlocked = folder / f".new-{self.token}"
        try:
            self._handle = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX)
                unlocked.rename(self._path)  # it is never seen by its name without its lock
            except OSError:
                os.close(self._handle)
                unlocked.unlink()
                raise
        except OSError as problem:
            raise refused(folder, problem) from problem

    def release(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._handle)


def is_alive(folder: Path, token: str) -> bool:
    if not _TOKEN.fullmatch(token):
        return False
    try:
        handle = os.open(_file(folder, token), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError as problem:
        raise refused(folder, problem) from problem
    try:
        # Shared: two who ask at once don't take each other for the writer.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as problem:
        raise refused(folder, problem) from problem
    finally:
        os.close(handle)
    return False


def tidy(folder: Path) -> None:
    for path in folder.glob(f"{_PREFIX}*"):
        if not is_alive(folder, path.name.removeprefix(_PREFIX)):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _file(folder: Path, token: str) -> Path:
    return folder / f"{_PREFIX}{token}"


# All words must match; the last may be a prefix. Words are quoted, so FTS operators mean nothing. The index
# splits where letters and digits end, so text without any (``->``, emoji) and scripts without spaces use LIKE
# instead.


# What of a longer query is used: its beginning. Each further word could only take hits away.
MAX_CHARS, MAX_WORDS = 1000, 32
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai and Lao, Burmese, Khmer
    "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"  # Japanese, Chinese
)


@dataclass(frozen=True, slots=True)
class Query:
    """match: an FTS query, or empty. parts: texts that must also occur."""

    match: str
    parts: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        return not self.match and not self.parts


def parse(typed: str) -> Query:
    words = storable(typed[:MAX_CHARS]).split()[:MAX_WORDS]
    indexed = [word for word in words if _is_indexed(word)]
    quoted = ['"' + word.replace('"', '""') + '"' for word in indexed]
    if indexed and words[-1] is indexed[-1] and not typed[:MAX_CHARS][-1:].isspace():
        quoted[-1] += "*"  # it may still be being typed
    return Query(" ".join(quoted), tuple(word for word in words if not _is_indexed(word)))


def like(part: str) -> str:
    return "%" + re.sub(r"([\\%_])", r"\\\1", part) + "%"


def _is_indexed(word: str) -> bool:
    return not _UNSPACED.search(word) and any(unicodedata.category(char)[0] in "LN" for char in word)


SNIPPET_CHARS = 160
_BEFORE_CHARS = 40  # shown before the first match, so that it stands where the eye looks even on a narrow line

Mark = tuple[int, int]

# What is looked through: the user's messages, replies, and the system messages of an import, which are shown like them.
SEARCHED = "m.state <> 'partial'"
_COLUMNS = "m.id, m.chat, m.role, m.created_at, c.title"
_CHATS = f"CROSS JOIN chats c ON c.id = m.chat WHERE {SEARCHED} AND c.deleted_at IS NULL"
_FILES = "CROSS JOIN attachments a ON a.message"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where words are looked for, as SQL."""

    index: str
    text: str
    found: str
    all: str
    columns: str
    names: tuple[str, ...] = ()


_PLACES = (
    _Place("search", "m.text", "search CROSS JOIN messages m ON m.id = search.rowid", "messages m", "'' AS file"),
    _Place(
        "file_search",
        "CASE a.kind WHEN 'picture' THEN '' ELSE a.text END",
        f"file_search {_FILES} = file_search.rowid >> 20 AND a.position = file_search.rowid & 0xfffff"
        " CROSS JOIN messages m ON m.id = a.message",
        f"messages m {_FILES} = m.id",
        "a.name AS file",
        ("a.name",),
    ),
)


def search(connection: sqlite3.Connection, query: Query, limit: int) -> list[Hit]:
    if query.is_empty or limit <= 0:
        return []
    # The index marks matches inside the text. Nobody can have put these marks into a message: they are drawn now.
    opening, closing = f"<{secrets.token_hex(8)}>", f"</{secrets.token_hex(8)}>"
    values = {f"part{number}": like(part) for number, part in enumerate(query.parts)}
    values |= {"match": query.match, "open": opening, "close": closing}
    hits: list[Hit] = []
    for place in _PLACES:
        shown = f"highlight({place.index}, {len(place.names)}, :open, :close)" if query.match else place.text
        sql = f"SELECT {_COLUMNS}, {place.columns}, {shown} AS shown FROM {place.found if query.match else place.all} {_CHATS}"
        sql += f" AND {place.index} MATCH :match" if query.match else ""
        order = f"{place.index}.rowid" if query.match else "m.id"
        for number in range(len(query.parts)):
            told = (f"{text} LIKE :part{number} ESCAPE '\\'" for text in (place.text, *place.names))
            sql += f" AND ({' OR '.join(told)})"
        rows = connection.execute(f"{sql} ORDER BY {order} DESC LIMIT :limit", {**values, "limit": limit})
        hits += [_hit(row, opening, closing, query.parts) for row in rows]
    return sorted(hits, key=lambda hit: -hit.message)[:limit]


def merge_index(connection: sqlite3.Connection, pages: int) -> bool:
    """Merge a part of the index, which drops deleted words; return whether more is left.

    pages: to write; negative for the first part (https://www.sqlite.org/fts5.html#the_merge_command).
    """
    more = False
    for index in INDEXES:
        before = connection.total_changes
        connection.execute(f"INSERT INTO {index} ({index}, rank) VALUES ('merge', ?)", (pages,))
        more |= connection.total_changes - before > 1
    return more


def _hit(row: sqlite3.Row, opening: str, closing: str, parts: Iterable[str]) -> Hit:
    text, marks = unmarked(row["shown"], opening, closing)
    marks = joined([*marks, *found(text, parts)])
    start, end = window(text, marks[0] if marks else (0, 0))
    inside = tuple((max(a, start) - start, min(b, end) - start) for a, b in marks if a < end and b > start)
    return Hit(
        chat=row["chat"],
        title=row["title"],
        message=row["id"],
        role=row["role"],
        created_at=row["created_at"],
        snippet=text[start:end],
        marks=inside,
        start=start,
        length=len(text),
        file=row["file"],
    )


def unmarked(shown: str, opening: str, closing: str) -> tuple[str, list[Mark]]:
    marks: list[Mark] = []
    pieces = shown.split(opening)
    out = [pieces[0]]
    at = len(pieces[0])
    for piece in pieces[1:]:
        inside, _, after = piece.partition(closing)
        marks.append((at, at + len(inside)))
        out += [inside, after]
        at += len(inside) + len(after)
    return "".join(out), marks


def found(text: str, parts: Iterable[str]) -> Iterator[Mark]:
    for part in parts:
        for match in re.finditer(re.escape(part), text, re.IGNORECASE):
            yield match.span()


def joined(marks: Iterable[Mark]) -> list[Mark]:
    out: list[Mark] = []
    for begin, end in sorted(marks):
        if out and begin < out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((begin, end))
    return out


def window(text: str, mark: Mark) -> Mark:
    start = max(0, mark[0] - _BEFORE_CHARS)
    if start > 0:
        space = text.find(" ", start, mark[0])
        start = space + 1 if space >= 0 else start
    end = min(len(text), start + SNIPPET_CHARS)
    if end < len(text):
        space = text.rfind(" ", max(mark[1], start), end)
        end = space if space >= 0 else end
    return start, max(end, min(mark[1], start + SNIPPET_CHARS))
