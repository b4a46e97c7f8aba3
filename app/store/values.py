"""The store's values and errors."""

# Times are seconds since 1970, UTC, to the microsecond.
#
#     TokamacError
#     └── StoreError                failure and remedy
#         ├── NoChatError           unknown id
#         ├── StoreReplacedError    file or log was replaced: Store.follow reopens it
#         └── StoreDamagedError     file is corrupt: Store.set_aside makes room for a new one

import base64
import errno
import hashlib
import re
import sqlite3
import unicodedata
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self

from tokamac.engine.errors import TokamacError, access_hint
from tokamac.engine.events import Message, Role, ToolCall
from tokamac.engine.vision.picture import Picture

# Of a message: whole; being written; ended early by the user or by a crash; ended by an error.
State = Literal["complete", "partial", "stopped", "failed"]
FinalState = Literal["complete", "stopped", "failed"]  # of a message that never changes again
# Who made a title: the first words of the chat, a model, or the user, whose title no model replaces.
TitleOrigin = Literal["words", "model", "user"]
Json = Mapping[str, Any]  # an object that JSON can hold. The store keeps it and does not look inside, but for LEFT_OUT.
# The key, in a chat's settings, of what is kept but not sent: [[message, file], …]; a file of "" is the whole turn.
LEFT_OUT = "left_out"
PINNED = "pinned_turns"  # the same of turns that compaction keeps whole; each file is ""
MARKS = (LEFT_OUT, PINNED)


def left_out_of(settings: Json, mark: str = LEFT_OUT) -> set[tuple[int, str]]:
    stored = settings.get(mark)
    pairs = [each for each in stored if isinstance(each, list) and len(each) == 2] if isinstance(stored, list) else []
    return {(key, name) for key, name in pairs if type(key) is int and isinstance(name, str)}


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file's text attached to a message. kind: such as ``text``, ``code`` or ``pdf``."""

    name: str
    text: str
    kind: str = "text"


PICTURE = "picture"  # the kind whose text is the file in base64
UNSEEN = "[a picture, which this model can't see]"


def pictures_of(attachments: Iterable[Attachment]) -> tuple[Picture, ...]:
    return tuple(_picture(each.name, each.text) for each in attachments if each.kind == PICTURE)


@lru_cache(maxsize=32)
def _picture(name: str, encoded: str) -> Picture:
    with suppress(ValueError):
        return Picture(hashlib.sha256(base64.b64decode(encoded)).hexdigest(), name, encoded=encoded)
    return Picture("", name, encoded=encoded)  # the engine says that it was changed


# Of a call: it was run; running it failed, or it was stopped meanwhile; the user did not allow it, or it was stopped
# before.
Outcome = Literal["done", "failed", "refused"]
# The states in which results are stored.
OUTCOMES: Mapping[Outcome, FinalState] = {"done": "complete", "failed": "failed", "refused": "stopped"}


@dataclass(frozen=True, slots=True)
class ToolResult:
    call: ToolCall
    text: str
    outcome: Outcome = "done"
    attachments: tuple[Attachment, ...] = ()

    @property
    def as_message(self) -> Message:
        images = pictures_of(self.attachments)
        return Message("tool", self.text, tool_call_id=self.call.id, name=self.call.name, images=images)

    def told_to(self, *, sees: bool) -> "ToolResult":
        if sees or not self.attachments:
            return self
        return replace(
            self, text="\n".join(filter(None, [self.text, *[UNSEEN] * len(self.attachments)])), attachments=()
        )


@dataclass(frozen=True, slots=True)
class FileWrite:
    """A tool's write below ``root``. before: None where there was no file; after: SHA-256 of what is written."""

    path: Path
    root: Path
    before: bytes | None
    after: bytes
    mode: int | None = None


@dataclass(frozen=True, slots=True)
class StoredChat:
    """A conversation. ``title`` is empty until there is a message.

    settings: overrides of this chat (sampling, KV, system prompt). head: current message, None for none.
    updated_at: time of the last message. deleted_at, pinned_at: None where it isn't. folder: "" for none.
    """

    id: str
    title: str
    title_origin: TitleOrigin
    created_at: float
    updated_at: float
    model: str
    settings: Json = field(default_factory=dict)
    draft: str = ""
    head: int | None = None
    deleted_at: float | None = None
    pinned_at: float | None = None
    folder: str = ""


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A node of a chat's tree. ``id`` is greater than its parent's and never reused.

    model, settings, metrics: of a reply; else empty and None. calls: a reply's tool calls; for role "tool" the
    one it answers. position, siblings: index (from 0, by age) and number of messages with the same parent.
    """

    id: int
    chat: str
    parent: int | None
    role: Role
    text: str
    thinking: str
    state: State
    created_at: float
    model: str = ""
    settings: Json = field(default_factory=dict)
    metrics: Json | None = None
    attachments: tuple[Attachment, ...] = ()
    position: int = 0
    siblings: int = 1
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class BranchPreview:
    id: int
    parent: int | None
    role: Role
    state: State
    preview: str
    created_at: float
    children: int


@dataclass(frozen=True, slots=True)
class Hit:
    """A search hit.

    snippet: a part of the text from character ``start``. marks: sorted, disjoint (begin, end) in the snippet.
    length: characters of the whole text. file: the attachment's name where it is the text of one. likeness: cosine of
    what was found by meaning.
    """

    chat: str
    title: str
    message: int
    role: Role
    created_at: float
    snippet: str
    marks: tuple[tuple[int, int], ...]
    start: int
    length: int
    file: str = ""
    likeness: float | None = None


@dataclass(frozen=True, slots=True)
class Archive:
    """A chat and its messages, parents first. Ids are local to it."""

    chat: StoredChat
    messages: tuple[StoredMessage, ...]


@dataclass(frozen=True, slots=True)
class Merged:
    """The result of a merge. ids: new message ids by old ones. added: messages that were missing here."""

    chat: str
    ids: Mapping[int, int]
    added: int
    is_new: bool


@dataclass(frozen=True, slots=True)
class Followed:
    """Merged chats of a replaced file, by id. unread: chats that could not be read."""

    chats: Mapping[str, Merged]
    unread: int = 0


class StoreError(TokamacError):
    """A store operation failed; nothing was changed."""


class NoChatError(StoreError):
    """No chat has this id or id prefix."""


class StoreReplacedError(StoreError):
    @classmethod
    def replaced(cls, path: Path) -> Self:
        return cls(f"Another program replaced {path}", "Try again.")


class StoreDamagedError(StoreError):
    """The chat file is corrupt: ``Store.repair`` rebuilds its index; else ``Store.set_aside`` keeps it."""


_ASIDE = "`tokamac chats repair --set-aside` sets the file aside, unchanged, and starts a new one."
_FULL = "Free some disk space; what was stored before is safe."
_DENIED = "Check the permissions of the folder, or set TOKAMAC_DATA_DIR to another."
_AGAIN = "Try again; if it stays so, close the other program."
_CAUSES = {
    sqlite3.SQLITE_FULL: ("the disk is full", _FULL),
    sqlite3.SQLITE_IOERR: ("reading or writing it failed", "Check the disk, and the space left on it."),
    sqlite3.SQLITE_READONLY: ("it may not be written", _DENIED),
    sqlite3.SQLITE_CANTOPEN: ("it can't be opened", _DENIED),
    sqlite3.SQLITE_PERM: ("it may not be opened", _DENIED),
    sqlite3.SQLITE_AUTH: ("it may not be opened", _DENIED),
    sqlite3.SQLITE_BUSY: ("another program keeps it busy", _AGAIN),
    sqlite3.SQLITE_LOCKED: ("another program keeps it busy", _AGAIN),
    sqlite3.SQLITE_TOOBIG: ("a text is too large for it", "Send less text at once."),
}


def explained(error: sqlite3.Error, path: Path) -> StoreError:
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # it comes from Python, which could not decode what SQLite read
        return damaged(path, str(error))
    code &= 0xFF  # the upper bits only say more of the same
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return damaged(path, str(error))
    if code in _CAUSES:
        cause, hint = _CAUSES[code]
        return StoreError(f"The chats in {path} can't be used: {cause}", hint)
    return StoreError(f"The chats in {path} can't be used: {error}", "Please report this with the text above.")


def damaged(path: Path, finding: str) -> StoreDamagedError:
    return StoreDamagedError(
        f"{path} is damaged ({finding})", f"`tokamac chats repair` mends its search index; failing that, {_ASIDE}"
    )


def beyond_repair(error: StoreDamagedError) -> StoreDamagedError:
    return StoreDamagedError(error.message, f"A new search index does not mend that: {_ASIDE}")


def refused(path: Path, problem: OSError) -> StoreError:
    hint = _FULL if problem.errno in (errno.ENOSPC, errno.EDQUOT) else access_hint(problem, _DENIED)
    return StoreError(f"The chats in {path} can't be used: {problem.strerror or problem}", hint)


TITLE_CHARS = 60
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_FENCE = re.compile(r"\s*(`{3,}|~{3,})")
_DECORATION = re.compile(r"^[\s#>*+=-]+")


def storable(text: str) -> str:
    """Return ``text`` with NUL (ends SQLite's text functions) and lone surrogates (no UTF-8) as ``�``."""
    return _UNSTORABLE.sub("\ufffd", text)


def fold(text: str) -> str:
    apart = unicodedata.normalize("NFKD", text.casefold())
    return "".join(char for char in apart if not unicodedata.combining(char))


def one_line(text: str) -> str:
    return " ".join(text.split())


def title_of(text: str) -> str:
    for line in text.split("\n"):
        words = "" if _FENCE.match(line) else one_line(_DECORATION.sub("", line))
        if words:
            return _shortened(words, TITLE_CHARS)
    return ""


def _shortened(words: str, chars: int) -> str:
    if len(words) <= chars:
        return words
    cut = words[:chars].rpartition(" ")[0]
    return (cut if len(cut) > chars // 2 else words[: chars - 1]) + "…"  # one endless word is cut inside
