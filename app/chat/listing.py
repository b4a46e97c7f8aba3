"""A message on one line: who says it, and how it begins. Foreign text: made safe.

What the list of conversations shows: chats by title, and messages by what was said. A store of its own, for any thread.

Conversations deleted, and brought back: what may be, what is done, and what is said of it, on a screen or in lines.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokamac.app.chat.conversation import ENDINGS, MessageNode
from tokamac.app.chat.models import short_name
from tokamac.app.sanitise import sanitise_line
from tokamac.app.store.store import Store
from tokamac.app.store.values import Hit, StoredChat

if TYPE_CHECKING:
    from tokamac.app.chat.recording import Recording


MOST_CHATS = 200
MOST_HITS = 50
LEAST_CHARACTERS = 2
"""A single letter is found nearly everywhere."""
EXCERPT = 40


@dataclass(frozen=True, slots=True)
class ChatMatches:
    """What fits ``text``: chats by their titles, and messages by their words."""

    text: str
    chats: tuple[StoredChat, ...]
    hits: tuple[Hit, ...]


@dataclass(frozen=True, slots=True)
class Library:
    """The store at ``path``, opened for each question: SQLite's connections stay on their thread. Methods raise StoreError."""

    path: Path

    def find(self, text: str) -> ChatMatches:
        """Return the chats and messages that fit ``text``."""
        with Store.open(self.path) as store:
            chats = store.chats(text, limit=MOST_CHATS)
            hits = store.search(text, limit=MOST_HITS) if len(text.strip()) >= LEAST_CHARACTERS else []
        return ChatMatches(text, tuple(chats), tuple(hits))

    def delete(self, chat: str) -> None:
        """Delete a chat; it can be brought back."""
        with Store.open(self.path) as store:
            store.delete(chat)

    def bring_back(self, chat: str) -> None:
        """Bring back a chat that was deleted."""
        with Store.open(self.path) as store:
            store.undelete(chat)

    def rename(self, chat: str, title: str) -> None:
        """Give a chat the user's title."""
        with Store.open(self.path) as store:
            store.rename(chat, title)


def ago(seconds: float) -> str:
    """Return how long ago something was, as a person would say it."""
    for size, unit in ((86400 * 7, "week"), (86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            number = int(seconds // size)
            return f"{number} {unit}{'' if number == 1 else 's'} ago"
    return "just now"


def excerpt(text: str) -> str:
    """Return how a text begins, on one line."""
    line = sanitise_line(" ".join(text.split()))
    return line if len(line) <= EXCERPT else line[: EXCERPT - 1] + "…"


def part(hit: Hit) -> str:
    """Return the part of a message that holds what was searched, on one line, with … where it is cut."""
    before = "…" if hit.start else ""
    after = "…" if hit.start + len(hit.snippet) < hit.length else ""
    return f"{before}{sanitise_line(' '.join(hit.snippet.split()))}{after}"


NOT_WHOLE = "Not all of this chat could be saved: deleted now, it could not be brought back whole."


@dataclass(frozen=True, slots=True)
class ChatNotice:
    """What the user is told. refused: nothing was done, for a reason that matters."""

    text: str
    refused: bool = False


def delete(
    recording: "Recording", chat: StoredChat, begin_new: Callable[[], bool], *, title: str, back: str
) -> ChatNotice:
    """Delete ``chat``; if it is the open one, after another was begun. back: what brings it back. Raises StoreError.

    begin_new: leaves the open one; returns whether what was not sent stays with it.
    """
    if chat.deleted_at is not None:
        return ChatNotice(f"It is deleted already: /restore {chat.id} brings it back.")
    if chat.id != recording.chat:
        recording.store.delete(chat.id)
        return ChatNotice(f"Deleted: {title}. {back} brings it back.")
    if recording.lacking():  # after another try
        return ChatNotice(NOT_WHOLE, refused=True)
    unsent = begin_new()  # before it is deleted: what is still to be written of a chat would bring it back
    recording.store.delete(chat.id)
    draft = ", with what was not sent" if unsent else ""
    return ChatNotice(f"Deleted, and a new chat begun: {title}. {back} brings it back{draft}.")


def restore(
    store: Store, chat: StoredChat | None, open_it: Callable[[str], object], *, title: Callable[[StoredChat], str]
) -> ChatNotice:
    """Bring ``chat`` back and open it by its id. None: there is none to bring back. Raises StoreError."""
    if chat is None:
        return ChatNotice("No chat is deleted.")
    if chat.deleted_at is None:
        return ChatNotice(f"It is not deleted: /open {chat.id} opens it.")
    store.undelete(chat.id)
    open_it(chat.id)
    return ChatNotice(f"Brought back: {title(chat)}.")


def said_in(node: MessageNode, most: int) -> tuple[str, str]:
    """Return who says a message, and at most so many characters of what is said, or of why nothing is."""
    if node.prompt is not None:
        return "you", _beginning(node.prompt, most) or _beginning(
            ", ".join(each.name for each in node.attachments), most
        )
    if node.system is not None:
        return "system", _beginning(node.system, most)
    if node.reply is None:
        return "reply", "is being written"
    said = _beginning(node.reply.text, most) or ENDINGS[node.reply.ending] or "says nothing"
    return short_name(node.reply.model) or "reply", said


def _beginning(text: str, most: int) -> str:
    said = sanitise_line(text.lstrip()[: 4 * most])  # more is not shown, whatever it becomes
    return said if len(said) <= most else f"{said[: most - 1]}…"
