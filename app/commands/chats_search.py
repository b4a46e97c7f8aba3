"""``tokamac chats search``: the chats whose titles hold some words, and the messages in which they were said, newest first."""

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tokamac.app.output import table
from tokamac.app.sanitise import sanitise_line
from tokamac.app.tui.listing import part
from tokamac.app.tui.units import count

if TYPE_CHECKING:
    from tokamac.app.store.questions import Questions
    from tokamac.app.store.values import Chat, Hit


def search(store: "Questions", words: str) -> "tuple[list[Chat], list[Hit]]":
    """Return all that is found. Raises StoreError."""
    return store.chats(words, limit=sys.maxsize), store.search(words, limit=sys.maxsize)


def to_json(hits: "Sequence[Hit]") -> list[dict[str, Any]]:
    """Return the messages as the JSON has them: ``text`` is a part of each, and ``marks`` where in it the words are."""
    return [
        {"chat": hit.chat, "title": hit.title, "role": hit.role, "text": hit.snippet, "marks": hit.marks}
        for hit in hits
    ]


def text(chats: "Sequence[Chat]", hits: "Sequence[Hit]") -> str:
    """Return a row for each."""
    if not chats and not hits:
        return "nothing was found"
    rows = [["id", "when", "where", "text"]]
    rows += [[chat.id, _day(chat.updated_at), "title", sanitise_line(chat.title)] for chat in chats]
    rows += [[hit.chat, _day(hit.created_at), hit.role, part(hit)] for hit in hits]
    number = len(rows) - 1
    return f"{table(rows)}\n\n{count(number)} place{'' if number == 1 else 's'}; tokamac chats show ID prints a chat"


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(seconds))
