"""What the store gives and takes: frozen values. Moments are seconds since 1970, UTC, to the microsecond."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tokamac.engine.events import Role

State = Literal["complete", "partial", "stopped", "failed"]
"""Of a message: whole; being written; ended early by the user or by a crash; ended by an error."""
FinalState = Literal["complete", "stopped", "failed"]
"""Of a message that never changes again."""
TitleOrigin = Literal["words", "model", "user"]
"""Who made a title: the first words of the chat, a model, or the user, whose title no model replaces."""
Json = Mapping[str, Any]
"""An object that JSON can hold. The store keeps it and does not look inside."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file's text that goes with a message. kind: what it is, such as ``text``, ``code`` or ``pdf``."""

    name: str
    text: str
    kind: str = "text"


@dataclass(frozen=True, slots=True)
class Chat:
    """One conversation. ``title`` is empty until there is a message.

    settings: what holds for this chat alone (sampling, KV, system prompt). head: the message at which the chat now stands; None
    until there is one. updated_at: when a message last came. deleted_at: None unless it was deleted and not yet purged.
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


@dataclass(frozen=True, slots=True)
class Message:
    """One node of a chat's tree. ``id`` is greater than its parent's, and never used again.

    model, settings, metrics: what wrote a reply, how, and what it cost; empty, and None, for other messages.
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


@dataclass(frozen=True, slots=True)
class Branch:
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

    chat: Chat
    messages: tuple[Message, ...]
