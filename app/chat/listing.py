"""Lists of chats and messages: store matches, ages, one-line excerpts. Foreign text is sanitized here."""

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Self

import platformdirs

from tokamac.engine.perf.hardware import keep, read, store_file

from ..models.local import OnDisk, embedding_model, short_name
from ..settings import Settings
from ..store.passages import nearest
from ..store.store import Store
from ..store.values import Hit, StoredChat, fold
from ..text import units
from ..text.sanitise import sanitise_line
from .conversation import EDITED, ENDINGS, Ending, MessageNode

MOST_CHATS = 200
MOST_HITS = 50
MOST_NEAR = 20  # found by meaning
TOGETHER = 32  # passages that a model reads between two commits
LARGE_PASSAGES = 100  # from here on the price of reading them is told, and it begins when it is asked for again
LEAST_CHARACTERS = 2  # a single letter is found nearly everywhere
EXCERPT = 40

if TYPE_CHECKING:
    from ..backend.embedding_process import EmbeddingProcess


@dataclass(frozen=True, slots=True)
class ChatMatches:
    """Chats by title and messages by words. folder: the one shown."""

    text: str
    chats: tuple[StoredChat, ...]
    hits: tuple[Hit, ...]
    folders: tuple[str, ...] = ()
    folder: str | None = None


@dataclass(frozen=True, slots=True)
class ChatSearch:
    """Chat queries; opens the store per call, as SQLite connections stay on one thread. Raises StoreError."""

    path: Path

    def find(self, text: str, folder: str | None = None) -> ChatMatches:
        """Return matches, pinned first; with ``folder``, only its chats."""
        with Store.open(self.path) as store:
            chats = store.chats(text, limit=MOST_CHATS, pinned_first=True, folder=folder)
            searched = len(text.strip()) >= LEAST_CHARACTERS and folder is None
            hits = store.search(text, limit=MOST_HITS) if searched else []
            folders = tuple(name for name, _ in store.folders())
        return ChatMatches(text, tuple(chats), tuple(hits), folders, folder)

    def pin(self, chat: str, *, pinned: bool) -> None:
        with Store.open(self.path) as store:
            store.pin(chat, pinned=pinned)

    def move(self, chat: str, folder: str) -> None:
        with Store.open(self.path) as store:
            store.move(chat, folder)

    def delete(self, chat: str) -> None:
        with Store.open(self.path) as store:
            store.delete(chat)

    def restore(self, chat: str) -> None:
        with Store.open(self.path) as store:
            store.undelete(chat)

    def rename(self, chat: str, title: str) -> None:
        with Store.open(self.path) as store:
            store.rename(chat, title)


@dataclass(frozen=True, slots=True)
class MeaningPrice:
    """What is read before the first answer. seconds: at last time's rate."""

    model: OnDisk
    passages: int
    unread: int
    seconds: float | None

    @property
    def is_large(self) -> bool:
        return self.unread > LARGE_PASSAGES

    def __str__(self) -> str:
        wait = "" if self.seconds is None else f", about {units.seconds(self.seconds)}"
        name, memory = short_name(self.model.model), units.size(self.model.nbytes)
        return f"{name} reads {self.unread:,} of {self.passages:,} passages once{wait}; it takes {memory} of memory meanwhile."


class MeaningSearch:
    """Finds by meaning; its process runs until ``close``. Raises TokamacError."""

    def __init__(self, path: Path, model: OnDisk) -> None:
        self._path, self._model = path, model
        self._name = f"{model.model} {model.fingerprint}"
        self._rates = store_file("embedding.json")
        self._embedder: EmbeddingProcess | None = None
        self._one = Lock()  # a search that was begun ends before the next one begins

    @classmethod
    def here(cls, path: Path, settings: Settings, home: Path) -> Self:
        return cls(path, embedding_model(settings.embedding_model, home, settings.models_path))

    def price(self) -> MeaningPrice:
        with Store.open(self._path) as store:
            found, vectors = store.passages(), store.vectors(self._name)
        texts = {each.key: len(each.text) for each in found if not each.deleted}
        unread = texts.keys() - vectors.keys()
        rate = read(self._rates, self._name)
        seconds = None if rate is None else sum(texts[key] for key in unread) / rate
        return MeaningPrice(self._model, len(texts), len(unread), seconds)

    def find(self, text: str, told: Callable[[int, int], object], limit: int = MOST_NEAR) -> list[Hit]:
        """Return the nearest, best first; what was read is kept. told: hears of passages read, and of all."""
        from ..backend.embedding_process import EmbeddingProcess

        with self._one, Store.open(self._path) as store:
            if self._embedder is None:
                log = platformdirs.user_log_path("tokamac") / "embedding.log"
                self._embedder = EmbeddingProcess(self._model.model, log)
            found, vectors = store.passages(), store.vectors(self._name)
            unread = {each.key: each.text for each in found if not each.deleted and each.key not in vectors}
            keys, began = list(unread), time.monotonic()
            for first in range(0, len(keys), TOGETHER):
                told(first, len(keys))
                batch = keys[first : first + TOGETHER]
                made = self._embedder.vectors([unread[key] for key in batch], "document")
                store.keep_vectors(self._name, new := dict(zip(batch, made, strict=True)))
                vectors |= new
            if len(keys) > TOGETHER:
                keep(self._rates, {self._name: sum(map(len, unread.values())) / (time.monotonic() - began)})
            (question,) = self._embedder.vectors([text], "query")
            return nearest(found, vectors, question, limit)

    def close(self) -> None:
        if self._embedder is not None:
            self._embedder.close()


def beside(hits: Sequence[Hit], near: Sequence[Hit]) -> tuple[Hit, ...]:
    known = {(hit.message, hit.file) for hit in hits}
    return (*hits, *(hit for hit in near if (hit.message, hit.file) not in known))


def ago(seconds: float) -> str:
    for size, unit in ((86400 * 7, "week"), (86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            number = int(seconds // size)
            return f"{number} {unit}{'' if number == 1 else 's'} ago"
    return "just now"


def date_of(seconds: float, now: float) -> str:
    """Format a time: ``14:05``, ``Mon 14:05``, ``21 Nov`` or ``2025-11-21``."""
    at, today = datetime.fromtimestamp(seconds), datetime.fromtimestamp(now).date()
    if at.date() == today:
        return f"{at:%H:%M}"
    if timedelta() < today - at.date() < timedelta(days=7):
        return f"{at:%a %H:%M}"
    return f"{at.day} {at:%b}" if at.year == today.year else f"{at:%Y-%m-%d}"


def group_of(chat: StoredChat, now: float) -> str:
    """Return a chat's list heading: ``Pinned``, ``Today``, ``Yesterday`` …, ``October 2026``."""
    if chat.pinned_at is not None:
        return "Pinned"
    at, today = datetime.fromtimestamp(chat.updated_at).date(), datetime.fromtimestamp(now).date()
    days = (today - at).days
    named = ((0, "Today"), (1, "Yesterday"), (7, "Last 7 days"), (30, "Last 30 days"))
    return next((name for most, name in named if days <= most), f"{at:%B %Y}")


@dataclass(frozen=True, slots=True)
class ChatFolder:
    name: str
    chats: tuple[StoredChat, ...]
    folded: bool


def grouped(
    chats: Sequence[StoredChat], now: float, folded: Collection[str] | None
) -> Iterator[str | ChatFolder | StoredChat]:
    """Yield chats under headings: pinned, folders by name, dates. folded: folder names; None: no folder headings."""
    if folded is None:
        yield from _dated(chats, now)
        return
    yield from _dated([chat for chat in chats if chat.pinned_at is not None], now)
    others = [chat for chat in chats if chat.pinned_at is None]
    for name in sorted({chat.folder for chat in others if chat.folder}, key=lambda name: (fold(name), name)):
        inside = tuple(chat for chat in others if chat.folder == name)
        yield ChatFolder(name, inside, folded=name in folded)
        yield from () if name in folded else inside
    yield from _dated([chat for chat in others if not chat.folder], now)


def _dated(chats: Iterable[StoredChat], now: float) -> Iterator[str | StoredChat]:
    last = ""
    for chat in chats:
        if (group := group_of(chat, now)) != last:
            yield group
        yield chat
        last = group


_HEADING = re.compile(r"^#{1,6} +", re.MULTILINE)
_STARS = re.compile(r"(?<!\w)\*\*(?=\S)|(?<=\S)\*\*(?!\w)")


def without_marks(text: str) -> str:
    return _STARS.sub("", _HEADING.sub("", text))


def plain_hit(hit: Hit) -> Hit:
    gone = sorted(match.span() for shape in (_HEADING, _STARS) for match in shape.finditer(hit.snippet))

    def moved(at: int) -> int:
        return at - sum(max(0, min(end, at) - begin) for begin, end in gone)

    kept = "".join(char for at, char in enumerate(hit.snippet) if not any(begin <= at < end for begin, end in gone))
    marks = tuple((moved(begin), moved(end)) for begin, end in hit.marks)
    cut = len(hit.snippet) - len(kept)
    return replace(hit, snippet=kept, marks=tuple(m for m in marks if m[0] < m[1]), length=hit.length - cut)


def excerpt(text: str) -> str:
    line = sanitise_line(" ".join(text.split()))
    return line if len(line) <= EXCERPT else line[: EXCERPT - 1] + "…"


def place_of(hit: Hit) -> str:
    return f"{hit.chat}:{hit.message}"


def part(hit: Hit) -> str:
    hit = plain_hit(hit)
    before = "…" if hit.start else ""
    after = "…" if hit.start + len(hit.snippet) < hit.length else ""
    return f"{before}{sanitise_line(' '.join(hit.snippet.split()))}{after}"


def said_in(node: MessageNode, most: int) -> tuple[str, str]:
    """Return the author and at most ``most`` characters of text, or why there is none."""
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
    edited = f", {EDITED}" if node.reply.edited else ""
    return (short_name(node.reply.model) or "reply") + edited, said


def _beginning(text: str, most: int) -> str:
    said = sanitise_line(without_marks(text.lstrip()[: 4 * most]))  # more is not shown, whatever it becomes
    return said if len(said) <= most else f"{said[: most - 1]}…"


def ending_text(ending: Ending, reason: str) -> str:
    """Describe an incomplete ending on one sanitized line, or ""."""
    return ": ".join(part for part in (ENDINGS[ending], sanitise_line(reason)) if part)
