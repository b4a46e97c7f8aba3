"""Section: what the store of chats takes from a person's time."""

import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.benchmarks.plan import Plan
from tests.benchmarks.report import Row, Section, at_most, plain
from tests.benchmarks.stats import Series, series
from tokamac.app.store.store import Store
from tokamac.app.store.values import Archive, StoredChat, StoredMessage

SEED = 11
WORDS, WORDS_EACH, MESSAGES_EACH = 30_000, 80, 20
"""A vocabulary, as often used as its rank says (Zipf's law), and the size of a message and of a chat."""


def measure(plan: Plan) -> Section:
    """Fill stores with seeded chats, and time what the chat asks of them."""
    words = Words()
    with tempfile.TemporaryDirectory(prefix="tokamac-bench-") as folder:
        large, small = Path(folder) / "large" / "chats.db", Path(folder) / "small" / "chats.db"
        fill(large, words, plan.count(100_000, 2_000))
        fill(small, words, plan.count(10_000, 500))
        rows = [*_searches(plan, large, words), *_lists(plan, small), *_chat(plan, small, words)]
    how = (
        f"Seeded chats of {MESSAGES_EACH} messages of {WORDS_EACH} words, drawn from {WORDS:,} words by Zipf's law. Each time "
        "is of the store alone, on its thread: the question, its rows and the values made of them. A search gives the 50 newest "
        "hits with their snippets. What the index does not know (an arrow, an emoji) is looked for in every text. "
        "What is stored is on the disk when the call returns."
    )
    return Section("Store: chats on disk", rows, how)


class Words:
    """Seeded words; the first is the most frequent."""

    def __init__(self) -> None:
        self._random = random.Random(SEED)
        letters = "abcdefghijklmnopqrstuvwxyz"
        self.all = ["".join(self._random.choices(letters, k=self._random.randint(2, 10))) for _ in range(WORDS)]
        self._weights = list(itertools.accumulate(1 / rank for rank in range(1, WORDS + 1)))

    def text(self, count: int = WORDS_EACH) -> str:
        """Return a text of so many words."""
        return " ".join(self._random.choices(self.all, cum_weights=self._weights, k=count))


def fill(file: Path, words: Words, messages: int) -> None:
    """Store so many messages in chats."""
    with Store.open(file) as store:
        for number in range(messages // MESSAGES_EACH):
            store.adopt(conversation(words, MESSAGES_EACH, float(number)))


def conversation(words: Words, length: int, when: float) -> Archive:
    """Return a chat of prompts and replies."""
    messages = tuple(
        StoredMessage(n, "", n - 1 or None, "user" if n % 2 else "assistant", words.text(), "", "complete", when)
        for n in range(1, length + 1)
    )
    return Archive(StoredChat("", words.text(6), "words", when, when, "guide", head=length), messages)


def _searches(plan: Plan, file: Path, words: Words) -> Iterator[Row]:
    common, rare = words.all[0], words.all[-1]
    for what, typed in {
        "a frequent word": common,
        "three frequent words": " ".join(words.all[:3]),
        "a rare word": rare,
        "a frequent word with a rare one": f"{common} {rare}",
        "one letter": "a",
        "nothing that is there": "qqqqqqqqqqqq",
        "an arrow, read in every text": "->",
        "an emoji, read in every text": "😀",
    }.items():
        with Store.open(file) as store:
            times = _times(plan, partial(store.search, typed))
        yield at_most(f"search of {plan.count(100_000, 2_000):,} messages: {what}", times, 100, "ms")


def _lists(plan: Plan, file: Path) -> Iterator[Row]:
    count = plan.count(10_000, 500)
    yield at_most(f"open the file, {count:,} messages", _times(plan, lambda: Store.open(file).close()), 20, "ms")
    with Store.open(file) as store:
        yield at_most(f"list of chats, first 50, {count:,} messages", _times(plan, store.chats), 5, "ms")
        yield plain("the same, filtered by a word of the title", _times(plan, lambda: store.chats("qu")), "ms")
        yield plain("whole file checked", _times(plan, store.check), "ms")


def _chat(plan: Plan, file: Path, words: Words) -> Iterator[Row]:
    long = words.text(15_000)
    with Store.open(file) as store:
        chat = store.adopt(conversation(words, 500, 1e9)).id
        yield at_most("open a chat of 500 messages", _times(plan, lambda: store.path(chat)), 50, "ms")
        yield plain("store a prompt", _times(plan, lambda: store.add_message(chat, None, "user", "Why?")), "ms")
        reply = store.begin_reply(chat, None).id
        yield plain(
            f"checkpoint of a reply of {len(long) / 1e3:.0f} kB",
            _times(plan, lambda: store.checkpoint(reply, long)),
            "ms",
        )


def _times(plan: Plan, action: Callable[[], object]) -> Series:
    """Return how long the action takes, in milliseconds, each time."""
    taken = []
    for _ in range(plan.many_rounds):
        began = time.perf_counter()
        action()
        taken.append((time.perf_counter() - began) * 1e3)
    return series(taken)
