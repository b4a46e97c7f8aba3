"""What lists of chats and messages show: matches in the store, a chat's age, a message on one line.

The texts are foreign and made safe here. ``ChatSearch`` opens a store of its own for each question, so that any thread may ask.
"""

from dataclasses import dataclass
from pathlib import Path

from ..sanitise import sanitise_line
from ..store.store import Store
from ..store.values import Hit, StoredChat
from .conversation import ENDINGS, Ending, MessageNode
from .models import short_name

MOST_CHATS = 200
MOST_HITS = 50
LEAST_CHARACTERS = 2
"""A single letter is found nearly everywhere."""
EXCERPT = 40


@dataclass(frozen=True, slots=True)
class ChatMatches:
    """What matches ``text``: chats by their titles, and messages by their words."""

    text: str
    chats: tuple[StoredChat, ...]
    hits: tuple[Hit, ...]


@dataclass(frozen=True, slots=True)
class ChatSearch:
    """The chats of the store at ``path``, which is opened for each question: SQLite's connections stay on their thread.

    Methods raise StoreError.
    """

    path: Path

    def find(self, text: str) -> ChatMatches:
        """Return the chats and messages that match ``text``."""
        with Store.open(self.path) as store:
            chats = store.chats(text, limit=MOST_CHATS)
            hits = store.search(text, limit=MOST_HITS) if len(text.strip()) >= LEAST_CHARACTERS else []
        return ChatMatches(text, tuple(chats), tuple(hits))

    def delete(self, chat: str) -> None:
        """Delete a chat; it can be restored."""
        with Store.open(self.path) as store:
            store.delete(chat)

    def restore(self, chat: str) -> None:
        """Restore a deleted chat."""
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
    """Return the part of a message that matches, on one line, with … where it is cut."""
    before = "…" if hit.start else ""
    after = "…" if hit.start + len(hit.snippet) < hit.length else ""
    return f"{before}{sanitise_line(' '.join(hit.snippet.split()))}{after}"


def said_in(node: MessageNode, most: int) -> tuple[str, str]:
    """Return who wrote a message, and at most ``most`` characters of its text, or of why there is none."""
    if node.prompt is not None:
        return "you", _beginning(node.prompt, most) or _beginning(
            ", ".join(each.name for each in node.attachments), most
        )
    if node.system is not None:
        return "system", _beginning(node.system, most)
    if node.result is not None:
        return sanitise_line(node.result.call.name) or "tool", _beginning(node.result.text, most)
    if node.reply is None:
        return "reply", "still running"
    called = ", ".join(call.name for call in node.reply.calls)
    said = (
        _beginning(node.reply.text, most)
        or ENDINGS[node.reply.ending]
        or _beginning(f"calls {called}", most) * bool(called)
    )
    said = said or "no text"
    return short_name(node.reply.model) or "reply", said


def _beginning(text: str, most: int) -> str:
    said = sanitise_line(text.lstrip()[: 4 * most])  # more is not shown, whatever it becomes
    return said if len(said) <= most else f"{said[: most - 1]}…"


def ending_text(ending: Ending, reason: str) -> str:
    """Return how a reply that is not whole ended, and why it failed: on one line, safe to show; "" where it is whole."""
    return ": ".join(part for part in (ENDINGS[ending], sanitise_line(reason)) if part)
