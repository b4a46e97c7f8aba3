"""Chats that other programs exported or keep: ChatGPT's, Claude's, Open WebUI's, LM Studio's and Ollama's, as archives."""

# What is read is bounded, and a chat that can't be read costs nothing but itself. Ids are hashes of the other program's,
# so a second import finds each message where it is. Pictures whose bytes are in the export become attachments, others
# are named in the text; messages of tools are counted.

import json
import re
import sqlite3
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from tokamac.engine.errors import PictureError
from tokamac.engine.events import Role
from tokamac.engine.files import open_regular, read_bytes
from tokamac.engine.vision.picture import BYTES, Picture

from .export import FORMAT, LAST_S
from .messages import ID_CHARS, ID_LENGTH
from .values import PICTURE, Archive, Attachment, StoredChat, StoredMessage, StoreError, one_line, storable

MOST_BYTES = 256_000_000  # of a file, or of one in an archive
MOST_CHATS = 20_000
MOST_MESSAGES = 20_000  # of a chat
MOST_PICTURE_BYTES = 1 << 30  # of an export, in base64: they are held until its chats are stored
SQL_S = 30.0
_FILE_ID = re.compile(r"file[-_][A-Za-z0-9]+")  # what ChatGPT's names of files begin with
ROLES: Mapping[str, Role] = {"user": "user", "human": "user", "assistant": "assistant", "model": "assistant"}


@dataclass(frozen=True, slots=True)
class ForeignMessage:
    """A message as another program has it. role: None where it is none that is kept."""

    id: str
    parent: str | None
    role: Role | None
    text: str
    created: float | None = None
    thinking: str = ""
    model: str = ""
    files: tuple[Attachment, ...] = ()


@dataclass(frozen=True, slots=True)
class ForeignChats:
    """program: whose they are. unread: chats that could not be read. left_out: messages of tools and the like.

    pictures: how many are copied; named: how many are not in the export or can't be read.
    """

    program: str
    archives: tuple[Archive, ...]
    unread: int
    left_out: int
    pictures: int = 0
    named: int = 0

    @property
    def summary(self) -> str:
        messages = sum(len(each.messages) for each in self.archives)
        parts = [f"{len(self.archives):,} chats of {self.program}, {messages:,} messages"]
        parts += [f"pictures: {self.pictures:,}"] if self.pictures else []
        parts += [f"pictures by name alone, not in it or unreadable: {self.named:,}"] if self.named else []
        parts += [f"{self.left_out:,} messages of tools or without text are left out"] if self.left_out else []
        parts += [f"{self.unread:,} chats can't be read"] if self.unread else []
        return "; ".join(parts)


class Pictures:
    """The pictures of an export: files in its archive and data URLs, checked like any other picture."""

    def __init__(self, archive: zipfile.ZipFile | None = None) -> None:
        self._archive = archive
        self._files: dict[str, zipfile.ZipInfo] = {}
        for info in [] if archive is None else archive.infolist():
            name = info.filename.rpartition("/")[2]
            for key in (name, *_FILE_ID.findall(name)[:1]):
                self._files.setdefault(key, info)
        self.copied = self.named = self._held = 0

    def take(self, name: object, *keys: object, url: object = "") -> Attachment | str:
        """Return a picture, or its name in brackets. keys: of its file in the archive, the surest first."""
        said = one_line(storable(name if isinstance(name, str) and name else "picture"))[:200]
        with suppress(
            PictureError, OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, zlib.error
        ):
            if (picture := self._find(said, keys, url)) is not None:
                self._held += len(picture.encoded)
                if self._held <= MOST_PICTURE_BYTES:
                    self.copied += 1
                    return Attachment(said, picture.encoded, PICTURE)
        self.named += 1
        return f"[picture {said}]"

    def _find(self, name: str, keys: Iterable[object], url: object) -> Picture | None:
        if isinstance(url, str) and url.startswith("data:image/"):
            return Picture.of_base64(url.partition(";base64,")[2], name)
        info = next((self._files[key] for key in keys if isinstance(key, str) and key in self._files), None)
        if (
            info is None
            or self._archive is None
            or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        ):
            return None
        with self._archive.open(info) as member:
            data = member.read(BYTES + 1)
        if len(data) > BYTES:
            raise PictureError(f"{name} has more than {BYTES >> 20} MiB")
        return Picture.of(data, name)


Read = Callable[[Any, Pictures], tuple[Archive, int]]


def read(path: Path, *, sql_s: float = SQL_S) -> ForeignChats | None:
    """Return the chats of a file or folder of another program; None: it is none. Raises StoreError."""
    try:
        if path.is_dir():
            files = sorted(path.rglob("*.conversation.json"))[:MOST_CHATS]
            return _collected("LM Studio", (_json(read_bytes(each, MOST_BYTES)) for each in files), _lm_studio)
        with open_regular(path) as file:
            magic = file.read(16)
        if magic == b"SQLite format 3\0":
            return _ollama(path, sql_s)
        if magic[:4] == b"PK\3\4":
            with zipfile.ZipFile(path) as archive:
                return _recognised(_zipped(archive, path.name), Pictures(archive))
        return _recognised(_json(read_bytes(path, MOST_BYTES))) if path.suffix.lower() == ".json" else None
    except OSError:
        return None  # who reads it as ours says why
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise StoreError(f"{path.name} can't be read: {error}") from error
    except (ValueError, RecursionError):
        raise StoreError(f"{path.name} is not JSON that can be read") from None


def _json(data: bytes) -> Any:
    return json.loads(data.decode("utf-8-sig"))


def _zipped(archive: zipfile.ZipFile, file: str) -> list[Any]:
    found: list[Any] = []
    for info in archive.infolist():
        name = info.filename.rpartition("/")[2]
        if not (name.startswith("conversations") and name.endswith(".json")):
            continue
        with archive.open(info) as member:
            data = member.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise StoreError(f"{name} in {file} has more than {MOST_BYTES // 10**6} MB")
        chats = _json(data)
        found += chats if isinstance(chats, list) else [chats]
    if not found:
        raise StoreError(f"{file} holds no conversations.json", "ChatGPT's and Claude's exports do.")
    return found


def _recognised(value: Any, pictures: Pictures | None = None) -> ForeignChats | None:
    chats = value if isinstance(value, list) else [value]
    first = next((each for each in chats if isinstance(each, dict)), {})
    if first.get("format") == FORMAT:
        return None
    for program, key, reader in KINDS:
        if key in first:
            return _collected(program, iter(chats), reader, pictures)
    messages = first.get("messages")
    if isinstance(messages, list) and messages and isinstance(messages[0], dict) and "versions" in messages[0]:
        return _collected("LM Studio", iter(chats), _lm_studio)
    return None


def _collected(program: str, chats: Iterator[Any], reader: Read, pictures: Pictures | None = None) -> ForeignChats:
    pictures = pictures or Pictures()
    archives, unread, left = list[Archive](), 0, 0
    for number, each in enumerate(chats):
        if number >= MOST_CHATS:
            raise StoreError(f"There are more than {MOST_CHATS:,} chats in it")
        try:
            archive, left_out = reader(each, pictures)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError, OverflowError):
            unread += 1
            continue
        left += left_out
        archives += [archive] if archive.messages else []
    return ForeignChats(program, tuple(archives), unread, left, pictures.copied, pictures.named)


def _chat(id: object, title: object, created: object, system: object = "") -> StoredChat:
    key = "".join(ID_CHARS[byte % 32] for byte in sha256(str(id).encode("utf-8", "replace")).digest()[:ID_LENGTH])
    name = one_line(storable(title if isinstance(title, str) else ""))[:200]
    settings = {"system": storable(system)} if isinstance(system, str) and system.strip() else {}
    began = _when(created) or 0.0
    return StoredChat(key, name, "user", began, began, "", settings)


def _archived(chat: StoredChat, nodes: Mapping[str, ForeignMessage], head: str | None) -> tuple[Archive, int]:
    """Return a chat, and how many of its messages are left out; what follows these goes on from before them."""
    if len(nodes) > MOST_MESSAGES:
        raise ValueError("too many messages")
    children: dict[str | None, list[ForeignMessage]] = {}
    for node in nodes.values():
        children.setdefault(node.parent if node.parent in nodes else None, []).append(node)
    made, left, messages = dict[str, int | None](), 0, list[StoredMessage]()
    todo: list[tuple[ForeignMessage, int | None, str]] = [(each, None, "") for each in reversed(children.get(None, []))]
    while todo:
        node, parent, thought = todo.pop()  # what was thought in a message before, without a text of its own
        thought = "\n\n".join(filter(None, (thought, node.thinking))) if node.role != "user" else ""
        left += node.role is None
        made[node.id] = parent
        if node.role is not None and (node.text.strip() or node.files):
            made[node.id] = key = len(messages) + 1
            when = node.created if node.created is not None else chat.created_at + len(messages) / 1000
            kept = StoredMessage(key, "", parent, node.role, storable(node.text), storable(thought), "complete", when)
            messages.append(replace(kept, model=storable(node.model), attachments=node.files))
            thought = ""
        todo += [(each, made[node.id], thought) for each in reversed(children.get(node.id, []))]
    last = made.get(head or "", messages[-1].id if messages else None)
    began = chat.created_at or min((each.created_at for each in messages), default=0.0)
    ended = max((each.created_at for each in messages), default=began)
    model = next((each.model for each in reversed(messages) if each.model), "")
    return Archive(replace(chat, created_at=began, updated_at=ended, model=model, head=last), tuple(messages)), left


def _when(value: object) -> float | None:
    """Return seconds since 1970 of a number of seconds or milliseconds, or of a text."""
    if isinstance(value, str):
        for text in (value, value[:19]):  # Go writes what follows in its own way
            with suppress(ValueError):
                moment = datetime.fromisoformat(text)
                value = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
                break
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    seconds = value / 1000 if value > 1e11 else float(value)
    return round(seconds, 6) if 0 <= seconds < LAST_S else None


def _joined(parts: object, pictures: Pictures) -> tuple[str, tuple[Attachment, ...]]:
    """Return the text of a list of parts, and its pictures."""
    found: list[Attachment | str] = []
    for part in parts if isinstance(parts, list) else [parts]:
        if isinstance(part, str):
            found.append(part)
        elif isinstance(part, dict):
            pointer = part.get("asset_pointer") or part.get("fileIdentifier") or ""
            text, url = part.get("text") or part.get("content") or "", (part.get("image_url") or {}).get("url", "")
            if pointer or url:
                name = pointer.rpartition("/")[2]
                found.append(pictures.take(name, name, *_FILE_ID.findall(name)[:1], url=url))
            elif isinstance(text, str):
                found.append(text)
    return _apart(found)


def _apart(found: Iterable[Attachment | str]) -> tuple[str, tuple[Attachment, ...]]:
    """Return the texts of a message as one, and its attachments."""
    parts = list(found)
    text = "\n\n".join(each for each in parts if isinstance(each, str) and each)
    return text, tuple(each for each in parts if isinstance(each, Attachment))


def _chatgpt(chat: Any, pictures: Pictures) -> tuple[Archive, int]:
    nodes = {}
    for key, node in chat["mapping"].items():
        said = node.get("message") or {}
        content, meta = said.get("content") or {}, said.get("metadata") or {}
        kind, role = content.get("content_type"), ROLES.get((said.get("author") or {}).get("role", ""))
        thoughts = [each.get("content", "") for each in content.get("thoughts") or [] if isinstance(each, dict)]
        text, files = ("", ()) if thoughts else _joined(content.get("parts") or content.get("text") or "", pictures)
        if kind == "code" and text:
            text = f"```\n{text}\n```"
        hidden = meta.get("is_visually_hidden_from_conversation") or kind == "user_editable_context"
        role = None if hidden or said.get("recipient", "all") != "all" else role
        thinking, model = "\n\n".join(filter(None, thoughts)), meta.get("model_slug") or ""
        nodes[key] = ForeignMessage(
            key, node.get("parent"), role, text, _when(said.get("create_time")), thinking, model, files
        )
    own = _chat(chat.get("conversation_id") or chat.get("id"), chat.get("title"), chat.get("create_time"))
    archive, left = _archived(own, nodes, chat.get("current_node"))
    # Nodes without a message are where a tree begins, and no message.
    return archive, left - sum(not node.get("message") for node in chat["mapping"].values())


def _claude(chat: Any, pictures: Pictures) -> tuple[Archive, int]:
    nodes, before = dict[str, ForeignMessage](), None
    for said in chat["chat_messages"]:
        content = [each for each in said.get("content") or [] if isinstance(each, dict)]
        text = "\n\n".join(each["text"] for each in content if each.get("type") == "text" and each.get("text"))
        thinking = "\n\n".join(each["thinking"] for each in content if each.get("type") == "thinking")
        taken = (
            pictures.take(each["file_name"], each.get("file_uuid"), each["file_name"])
            for each in said.get("files") or []
            if each.get("file_name")
        )
        text, seen = _apart([text or said.get("text") or "", *taken])
        files = seen + tuple(
            Attachment(one_line(storable(str(each.get("file_name") or "file"))), storable(each["extracted_content"]))
            for each in said.get("attachments") or []
            if each.get("extracted_content")
        )
        parent, created = said.get("parent_message_uuid", before), _when(said.get("created_at"))
        role, before = ROLES.get(said.get("sender", "")), said["uuid"]
        nodes[before] = ForeignMessage(before, parent, role, text, created, thinking, files=files)
    own = _chat(chat["uuid"], chat.get("name"), chat.get("created_at"))
    return _archived(own, nodes, chat.get("current_leaf_message_uuid"))


def _open_webui(chat: Any, pictures: Pictures) -> tuple[Archive, int]:
    inner = chat["chat"]
    history = inner.get("history") or {}
    nodes = {}
    for key, said in (history.get("messages") or {}).items():
        written, files = _joined(said.get("content") or "", pictures)
        taken = (
            pictures.take(each.get("name"), url=each.get("url"))
            for each in said.get("files") or []
            if each.get("type") == "image"
        )
        text, files = _apart([written, *files, *taken])
        when, model = _when(said.get("timestamp")), said.get("model") or ""
        nodes[key] = ForeignMessage(
            key, said.get("parentId"), ROLES.get(said.get("role", "")), text, when, "", model, files
        )
    title, system = chat.get("title") or inner.get("title"), (inner.get("params") or {}).get("system")
    own = _chat(chat.get("id") or inner.get("id"), title, chat.get("created_at"), system)
    return _archived(own, nodes, history.get("currentId"))


def _lm_studio(chat: Any, pictures: Pictures) -> tuple[Archive, int]:
    nodes, before = dict[str, ForeignMessage](), None
    for number, message in enumerate(chat["messages"]):
        versions, selected = message["versions"], message.get("currentlySelected", 0)
        for at, version in enumerate(versions):
            steps = version.get("steps") or [{"content": version.get("content")}]
            kept = [step for step in steps if isinstance(step, dict) and step.get("content")]
            texts = [
                (_joined(step["content"], pictures)[0], (step.get("style") or {}).get("type") == "thinking")
                for step in kept
            ]
            text, thinking = (
                "\n\n".join(said for said, is_thought in texts if is_thought is want) for want in (False, True)
            )
            model = next(
                ((step.get("genInfo") or {}).get("identifier") or "" for step in kept if step.get("genInfo")), ""
            )
            key, role = f"{number}.{at}", ROLES.get(version.get("role", ""))
            nodes[key] = ForeignMessage(key, before, role, text, None, thinking, model)
        before = f"{number}.{selected}"
    named = f"lm-studio {chat.get('createdAt')} {next((each.text for each in nodes.values()), '')[:200]}"
    return _archived(_chat(named, chat.get("name"), chat.get("createdAt"), chat.get("systemPrompt")), nodes, before)


KINDS: tuple[tuple[str, str, Read], ...] = (
    ("ChatGPT", "mapping", _chatgpt), ("Claude", "chat_messages", _claude), ("Open WebUI", "chat", _open_webui),
)  # fmt: skip


def _ollama(path: Path, sql_s: float) -> ForeignChats:
    """Read the database of Ollama's app, which may be open."""
    ends_s = time.monotonic() + sql_s
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            database.row_factory = sqlite3.Row
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)
            database.set_progress_handler(lambda: time.monotonic() > ends_s, 10_000)
            database.execute("PRAGMA trusted_schema = OFF")
            chats = database.execute(f"SELECT id, title, created_at FROM chats LIMIT {MOST_CHATS}").fetchall()
            asked = f"SELECT * FROM messages WHERE chat_id = ? ORDER BY id LIMIT {MOST_MESSAGES}"
            rows = ((dict(chat), database.execute(asked, (chat["id"],)).fetchall()) for chat in chats)
            return _collected("Ollama", rows, _ollama_chat)
    except (sqlite3.Error, MemoryError) as error:
        raise StoreError(f"{path.name} is no database of Ollama's chats: {error}") from error


def _ollama_chat(chat: Any, _: Pictures) -> tuple[Archive, int]:
    own, rows = chat
    nodes, before = dict[str, ForeignMessage](), None
    for row in map(dict, rows):
        key, role = str(row["id"]), ROLES.get(row["role"])
        when, thinking, model = _when(row["created_at"]), row.get("thinking") or "", row.get("model_name") or ""
        nodes[key] = ForeignMessage(key, before, role, row["content"], when, thinking, model)
        before = key
    return _archived(_chat(f"ollama {own['id']}", own["title"], own["created_at"]), nodes, before)
