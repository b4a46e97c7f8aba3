"""What the list of conversations shows: chats by title, and messages by what was said. A store of its own, for any thread."""

from dataclasses import dataclass
from pathlib import Path

from tokamac.app.sanitise import sanitise_line
from tokamac.app.store.store import Store
from tokamac.app.store.values import Chat, Hit

MOST_CHATS = 200
MOST_HITS = 50
LEAST_CHARACTERS = 2
"""A single letter is found nearly everywhere."""
EXCERPT = 40


@dataclass(frozen=True, slots=True)
class Found:
    """What fits ``text``: chats by their titles, and messages by their words."""

    text: str
    chats: tuple[Chat, ...]
    hits: tuple[Hit, ...]


@dataclass(frozen=True, slots=True)
class Library:
    """The store at ``path``, opened for each question: SQLite's connections stay on their thread. Methods raise StoreError."""

    path: Path

    def find(self, text: str) -> Found:
        """Return the chats and messages that fit ``text``."""
        with Store.open(self.path) as store:
            chats = store.chats(text, limit=MOST_CHATS)
            hits = store.search(text, limit=MOST_HITS) if len(text.strip()) >= LEAST_CHARACTERS else []
        return Found(text, tuple(chats), tuple(hits))

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
