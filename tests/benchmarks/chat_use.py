"""Section: how quick the chat is to a person's hand, with many messages stored and while a reply is written."""

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.benchmarks import texts
from tests.benchmarks.plan import Plan
from tests.benchmarks.processes import children, cpu_s
from tests.benchmarks.report import Row, Section, at_most, plain
from tests.benchmarks.screen import PROMPT_SHOWN
from tests.benchmarks.start import at_home, tokamac
from tests.benchmarks.stats import Series, series
from tests.benchmarks.store import Words, conversation, fill
from tests.benchmarks.terminal import COLUMNS, ROWS, Terminal
from tests.scripted_engine import ANSWER
from tokamac.app.store.store import Store
from tokamac.app.store.values import Archive

STORED, LONG = 10_000, 500
TITLE, LAST_WORDS = "The long one", "These are the last words of it."
LETTERS = "абвгдежзийклмнопрстуфхцчшщъыьэюяАБВГДЕЖЗИЙКЛМНОПРСТУФХЦЧШЩЪЫЬЭЮЯ"
"""No reply holds them, and none is typed twice into one prompt: what is painted after a key is its echo."""
WRITING = "tokens at"
TYPIST_S = (0.06, 0.14)  # between keys, from and to
CHATS, ENTER = "\x0c", "\r"
LOADED = " bpw"  # in the side panel
SETTLES_S = 5.0
"""Longer than any part of the machine's pace takes to be timed."""
MEASURING_S = 120.0
"""How long the measuring of the pace is waited for: a machine that was busy is looked at again every 20 s."""


def measure(plan: Plan) -> Section:
    """Time a start, an opening and keys in pseudo-terminals; count an idle chat's processor time."""
    with tempfile.TemporaryDirectory(prefix="tokamac-bench-") as name:
        home = Path(name)
        count = plan.count(STORED, 1_000)
        fill(home / "chats" / "chats.db", Words(), count)
        with Store.open(home / "chats" / "chats.db") as store:
            store.adopt(_long_chat())
        starts = series([_first_paint_s(home) for _ in range(plan.rounds)])
        opens = series([_open_s(home) for _ in range(plan.rounds)])
        echoes = series(list(_echoes_ms(home, replies=plan.count(5, 1))))
    rows = [
        at_most(f"first paint with {count + LONG:,} stored messages", starts, 0.7, "s"),
        at_most(f"a chat of {LONG} messages: from the key to its end painted", opens, 0.4, "s"),
        at_most("a key's echo while a reply is written, median", _middle(echoes), 30, "ms"),
        at_most("a key's echo while a reply is written, p99", _p99(echoes), 30, "ms"),
        *_idle(plan),
    ]
    how = (
        f"The real chat in a pseudo-terminal of {COLUMNS}×{ROWS}. Its engine is scripted where nothing is said about it. "
        "A chat is opened from the list (Ctrl+L, Enter) of a chat that has just been started, so that what is imported for it "
        "counts: prompts of a line, replies of prose, lists, code and tables, and the time until the last words of the last "
        "reply had been written to the terminal. "
        f"Keys are pressed {TYPIST_S[0] * 1e3:.0f} to {TYPIST_S[1] * 1e3:.0f} ms apart while an engine writes 500 tok/s, from the "
        "write to the terminal until the letter came back. Idle: the processor time of the screen's process and of the "
        "engine's, with the model loaded and nothing to do, once the machine's pace was measured. "
        "Searches of 100,000 messages are timed in *Store: chats on disk*."
    )
    return Section("The chat in use", rows, how)


def _long_chat() -> Archive:
    """Return a chat of prompts and replies in Markdown, the newest of all."""
    replies = (ANSWER, texts.PROSE, texts.SHOWN_PROSE[:1200])
    plain_chat = conversation(Words(), LONG, 1e9)
    messages = [
        replace(message, text=texts.QUESTIONS[at % 10] if message.role == "user" else replies[at // 2 % 3])
        for at, message in enumerate(plain_chat.messages)
    ]
    messages[-1] = replace(messages[-1], text=f"{messages[-1].text}\n\n{LAST_WORDS}")
    return Archive(replace(plain_chat.chat, title=TITLE), tuple(messages))


def _first_paint_s(home: Path) -> float:
    with Terminal([*tokamac(), "chat", "guide"], at_home(home)) as terminal:
        return terminal.wait_for(PROMPT_SHOWN, 30)


def _scripted(home: Path, scenario: str) -> Terminal:
    command = [sys.executable, "-m", "tests.benchmarks.screen_app", "scripted", scenario, "100000", str(home)]
    return Terminal(command, at_home(home))


def _open_s(home: Path) -> float:
    with _scripted(home, "guide") as terminal:
        terminal.wait_for(LOADED, 30)
        terminal.answers(CHATS, TITLE, 30)
        time.sleep(0.5)  # the list is whole, and a person reads it
        return terminal.answers(ENTER, LAST_WORDS, 30)


def _echoes_ms(home: Path, *, replies: int) -> Iterator[float]:
    """Type into the prompt while replies are written; yield how long each letter took to come back."""
    gaps = random.Random(5)
    with _scripted(home, "list") as terminal:
        terminal.wait_for(LOADED, 30)
        terminal.press("Go")
        for _ in range(replies):
            time.sleep(0.5)  # a line typed at once may look like a paste
            terminal.answers(ENTER, WRITING, 30)
            for letter in LETTERS:
                time.sleep(gaps.uniform(*TYPIST_S))
                yield terminal.answers(letter, letter, 30) * 1e3
            terminal.wait_for("item 299 of", 60)


def _middle(times: Series) -> Series:
    return Series((times.median,))


def _p99(times: Series) -> Series:
    return Series((statistics.quantiles(times.values, n=100, method="inclusive")[98],))


def _idle(plan: Plan) -> list[Row]:
    """Leave the chat alone with its model loaded."""
    seconds = plan.count(20, 4)
    with (
        tempfile.TemporaryDirectory() as home,
        Terminal([*tokamac(), "chat", plan.model], at_home(Path(home))) as terminal,
    ):
        terminal.wait_for(LOADED, 120)
        pids = [terminal.pid, *children(terminal.pid)]
        loaded = [cpu_s(pid) for pid in pids]
        _wait_for_quiet(Path(home))
        before = [cpu_s(pid) for pid in pids]
        time.sleep(seconds)
        shares = [(cpu_s(pid) - was) / seconds * 100 for pid, was in zip(pids, before, strict=True)]
    measuring = sum(after - was for after, was in zip(before[1:], loaded[1:], strict=True))
    return [
        plain(
            "first start: the engine's process after loading, until the pace is measured",
            Series((measuring,)),
            "s of a core",
        ),
        at_most(f"idle chat, the screen's process over {seconds} s", Series((shares[0],)), 1.0, "% of a core"),
        at_most(f"idle chat, the engine's process over {seconds} s", Series((sum(shares[1:]),)), 1.0, "% of a core"),
    ]


def _wait_for_quiet(home: Path) -> None:
    """Wait until the engine has measured the machine's pace, which it does once, when nobody has asked for a while; where that is
    published it measures nothing, and this waits in vain."""
    seen: set[tuple[Path, int]] = set()
    changed = begun = time.monotonic()
    while (now := time.monotonic()) < begun + MEASURING_S and not (seen and now > changed + SETTLES_S):
        files = {(file, file.stat().st_mtime_ns) for file in home.rglob("parts.json")}
        if files != seen:
            seen, changed = files, now
        time.sleep(0.2)
