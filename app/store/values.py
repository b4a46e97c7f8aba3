"""What the store gives and takes: frozen values, texts that it can hold, and what can go wrong.

Moments are seconds since 1970, UTC, to the microsecond.

    TokamacError
    └── StoreError                what failed, and what to do
        ├── NoChatError           no chat has that id
        └── StoreDamagedError     the file is no longer whole: Store.set_aside keeps it and makes room for a new one
"""

import errno
import re
import sqlite3
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tokamac.engine.errors import TokamacError, access_hint
from tokamac.engine.events import Role, ToolCall

State = Literal["complete", "partial", "stopped", "failed"]
"""Of a message: whole; being written; ended early by the user or by a crash; ended by an error."""
FinalState = Literal["complete", "stopped", "failed"]
"""Of a message that never changes again."""
TitleOrigin = Literal["words", "model", "user"]
"""Who made a title: the first words of the chat, a model, or the user, whose title no model replaces."""
Json = Mapping[str, Any]
"""An object that JSON can hold. The store keeps it and does not look inside, but for LEFT_OUT."""
LEFT_OUT = "left_out"
"""The key, in a chat's settings, of what is kept but not sent: [[message, file], …]; a file of "" is the whole turn."""


def left_out_of(settings: Json) -> set[tuple[int, str]]:
    """Return what a chat's settings leave out, as (message, file)."""
    stored = settings.get(LEFT_OUT)
    pairs = [each for each in stored if isinstance(each, list) and len(each) == 2] if isinstance(stored, list) else []
    return {(key, name) for key, name in pairs if type(key) is int and isinstance(name, str)}


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file's text that goes with a message. kind: what it is, such as ``text``, ``code`` or ``pdf``."""

    name: str
    text: str
    kind: str = "text"


Outcome = Literal["done", "failed", "refused"]
"""Of a call: it was run; running it failed, or it was stopped meanwhile; the user did not allow it, or it was stopped before."""
OUTCOMES: Mapping[Outcome, FinalState] = {"done": "complete", "failed": "failed", "refused": "stopped"}
"""The states in which results are stored."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What came of a call. text: what the model is told."""

    call: ToolCall
    text: str
    outcome: Outcome = "done"


@dataclass(frozen=True, slots=True)
class StoredChat:
    """One conversation. ``title`` is empty until there is a message.

    settings: what holds for this chat alone (sampling, KV, system prompt). head: the message at which the chat now stands; None
    until there is one. updated_at: when a message last came. deleted_at: None unless it was deleted and not yet purged.
    pinned_at: when the user pinned it; None where it is not. folder: its name; "" is none.
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
    """One node of a chat's tree. ``id`` is greater than its parent's, and never used again.

    model, settings, metrics: what wrote a reply, how, and what it cost; empty, and None, for other messages.
    calls: of a reply, those of tools; of role "tool", the one whose result it is.
    position, siblings: the place among the messages with the same parent, counted from 0 in order of age, and how many they are.
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
    """One node of the tree view: a message without its text. preview: how it begins, on one line. children: how many."""

    id: int
    parent: int | None
    role: Role
    state: State
    preview: str
    created_at: float
    children: int


@dataclass(frozen=True, slots=True)
class Hit:
    """A message that a search found.

    snippet: a part of the message's text, from the character ``start`` on. marks: the matches in it, as (begin, end) in characters
    of the snippet, in order and apart. length: characters of the whole text, so that both ends can be told from a cut.
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


@dataclass(frozen=True, slots=True)
class Archive:
    """A conversation outside the store: a chat and its messages, parents first. Ids mean something in here only."""

    chat: StoredChat
    messages: tuple[StoredMessage, ...]


class StoreError(TokamacError):
    """The store of chats can't do what was asked; nothing was changed."""


class NoChatError(StoreError):
    """No chat has the id that was given, nor one that begins so."""


class StoreDamagedError(StoreError):
    """The file of chats is broken: ``Store.repair`` mends its index, and failing that, ``Store.set_aside`` keeps it."""


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


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Turn what SQLite raises about the file at ``path`` into a StoreError. A mistake of the caller's is let through."""
    try:
        yield
    except sqlite3.ProgrammingError:
        raise
    except sqlite3.Error as error:
        raise explained(error, path) from error


def explained(error: sqlite3.Error, path: Path) -> StoreError:
    """Return what SQLite's error means for the person whose chats are in ``path``."""
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
    """Return the error for a file that is no longer whole."""
    return StoreDamagedError(
        f"{path} is damaged ({finding})", f"`tokamac chats repair` mends its search index; failing that, {_ASIDE}"
    )


def beyond_repair(error: StoreDamagedError) -> StoreDamagedError:
    """Return the error for a file of which more than the search index is broken."""
    return StoreDamagedError(error.message, f"A new search index does not mend that: {_ASIDE}")


def refused(path: Path, problem: OSError) -> StoreError:
    """Return the error for a file or folder that the system does not let us use."""
    hint = _FULL if problem.errno in (errno.ENOSPC, errno.EDQUOT) else access_hint(problem, _DENIED)
    return StoreError(f"The chats in {path} can't be used: {problem.strerror or problem}", hint)


TITLE_CHARS = 60
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_FENCE = re.compile(r"\s*(`{3,}|~{3,})")
_DECORATION = re.compile(r"^[\s#>*+=-]+")


def storable(text: str) -> str:
    """Return ``text`` as it will be read back: NUL, at which SQLite's text functions stop, and halves of surrogate pairs,
    which UTF-8 can't hold, become ``�``. Everything else is kept as it is.
    """
    return _UNSTORABLE.sub("\ufffd", text)


def fold(text: str) -> str:
    """Return ``text`` without case and accents, for comparing."""
    apart = unicodedata.normalize("NFKD", text.casefold())
    return "".join(char for char in apart if not unicodedata.combining(char))


def one_line(text: str) -> str:
    """Return ``text`` with every run of white space as one space."""
    return " ".join(text.split())


def title_of(text: str, chars: int = TITLE_CHARS) -> str:
    """Return a title made of the first words of ``text``: its first line that says something, cut between words.

    Empty where no line does.
    """
    for line in text.split("\n"):
        words = "" if _FENCE.match(line) else one_line(_DECORATION.sub("", line))
        if words:
            return _shortened(words, chars)
    return ""


def _shortened(words: str, chars: int) -> str:
    if len(words) <= chars:
        return words
    cut = words[:chars].rpartition(" ")[0]
    return (cut if len(cut) > chars // 2 else words[: chars - 1]) + "…"  # one endless word is cut inside
