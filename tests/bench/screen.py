"""Sections screen, chat_screen, chat_use and start: what the screen costs, and how soon it is there."""

import itertools
import os
import queue
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from tests.bench import texts
from tests.bench.machine import children, cpu_s
from tests.bench.plan import BenchError, Plan
from tests.bench.report import Row, Section, Series, alternate, at_least, at_most, holds, plain, ratios, series
from tests.bench.screen_app import ENGINES
from tests.bench.terminal import COLUMNS, ROWS, Terminal
from tests.scripted_engine import ANSWER, CHIP, WORK
from tokamac.app.backend.client import BackendEvent, Died, EngineProcess
from tokamac.app.backend.protocol import Generate, Load, Loaded, ReplyEvent, RequestFailed, decode_message
from tokamac.app.chat.conversation import Reply, Turn, messages
from tokamac.app.chat.recording import measured
from tokamac.app.store.store import Store
from tokamac.app.store.values import Archive, StoredChat, StoredMessage
from tokamac.assets import asset_path
from tokamac.engine.events import Finished
from tokamac.engine.lab.passes import PassLog, PromptPiece, TimedTokens, cost_of, pack
from tokamac.engine.metrics import Metrics
from tokamac.engine.options import Sampling

# Section: what the chat's screen costs the model.

QUESTION = "Why is decode memory-bound?"
PROMPT_SHOWN = "rite a message"  # the placeholder; its first letter may stand under the cursor
LONGEST_S = 120.0

T = TypeVar("T", Loaded, Finished)


def measure_screen(plan: Plan) -> Section:
    """Decode a reply with the chat's screen on and without one, in turn."""
    new = plan.count(480, 48)
    on, off = alternate(
        plan.many_rounds,
        lambda _: with_screen("long", plan.model, new),
        lambda _: without_screen("long", plan.model, new),
    )
    if any(metrics.generated_tokens != new for metrics in on + off):
        raise BenchError(f"not every reply has {new} tokens")
    tps_on, tps_off = (series([metrics.decode_tps for metrics in side]) for side in (on, off))
    p99_on, p99_off = (
        series([gaps.p99 if (gaps := metrics.itl_ms) else None for metrics in side]) for side in (on, off)
    )
    rows = [
        plain("decode without a screen", tps_off, "tok/s"),
        plain("decode with the screen on", tps_on, "tok/s"),
        at_least("decode, on ÷ off", ratios(tps_on, tps_off), 0.97),
        plain("ITL p99 without a screen", p99_off, "ms"),
        plain("ITL p99 with the screen on", p99_on, "ms"),
        at_most("ITL p99, on ÷ off", ratios(p99_on, p99_off), 2.0),
    ]
    how = (
        f"With: the real chat in a pseudo-terminal of {COLUMNS}×{ROWS} whose output is read all the time; a question "
        "is typed into it. Without: its engine's process alone, sent the same conversation. A fresh process each "
        f"time; figures are the metrics that the engine's process sends when the reply ends. The model computes {new} "
        "tokens at temperature 0 without obeying its end mark, and what is shown for them is a fixed prose with "
        "emphasis, four characters a token, so the screen's work does not depend on the model."
    )
    return Section("Decode with the chat's screen on", rows, how)


def with_screen(engine: str, model: str, tokens: int) -> Metrics:
    """Ask in the chat, whose engine's process is one of ENGINES, for at most so many tokens; return the metrics it sent."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "tests.bench.screen_app", engine, model, str(tokens), name]
        with Terminal(command, os.environ) as terminal:
            terminal.wait_for(PROMPT_SHOWN, 30)
            terminal.press(QUESTION)
            time.sleep(0.3)  # a line typed at once may look like a paste
            terminal.press("\r")
            return _noted(folder / "replies", terminal)


def without_screen(engine: str, model: str, tokens: int) -> Metrics:
    """Ask the engine's process alone; return the metrics it sent."""
    said: queue.SimpleQueue[BackendEvent] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory() as name:
        process = EngineProcess(ENGINES[engine], Path(name) / "engine.log", said.put)
        try:
            process.send(Load(model))
            _next(said, Loaded)
            process.send(Generate(1, messages("", [Turn(QUESTION)]), Sampling(temperature=0, max_tokens=tokens)))
            return _next(said, Finished).metrics
        finally:
            process.close()


def _next(said: "queue.SimpleQueue[BackendEvent]", kind: type[T]) -> T:
    while not isinstance(event := _inner(said.get(timeout=LONGEST_S)), kind):
        if isinstance(event, RequestFailed | Died):
            raise BenchError(f"the engine's process failed: {event}")
    return event


def _inner(event: BackendEvent) -> object:
    return event.event if isinstance(event, ReplyEvent) else event


def _noted(replies: Path, terminal: Terminal) -> Metrics:
    until = time.monotonic() + LONGEST_S
    while time.monotonic() < until and terminal.running:
        if replies.exists() and (lines := replies.read_bytes().splitlines()):
            reply = _inner(decode_message(lines[0]))
            if isinstance(reply, Finished):
                return reply.metrics
            raise BenchError(f"the chat's engine failed: {reply}")
        time.sleep(0.2)
    raise BenchError("no reply ended in the chat")


# Section: what the chat's screen costs an engine of 500 tok/s, by what is written.

SCENARIOS = {"prose": "prose", "code": "one long block of code", "list": "a list of 300 items"}
WHOLE = 10_000  # tokens, more than any scenario has


def measure_chat_screen(plan: Plan) -> Section:
    """Play each scenario with the chat's screen on and without one, in turn."""
    rows = [row for scenario in SCENARIOS for row in _rows(plan, scenario)]
    how = (
        "A scripted engine, in a process of its own, waits 2 ms for each token; no model computes, so this machine's cores are "
        f"free for the screen. With: the real chat in a pseudo-terminal of {COLUMNS}×{ROWS} whose output is read all the time, "
        "and which stores the reply as it grows. Without: the engine's process alone, sent the same conversation. Figures are "
        "the metrics that the engine's process sends when the reply ends."
    )
    return Section("Screen on over off at 500 tok/s", rows, how)


def _rows(plan: Plan, scenario: str) -> list[Row]:
    limit = plan.count(WHOLE, 600)
    on, off = alternate(
        plan.rounds, *(partial(_played, side, scenario, limit) for side in (with_screen, without_screen))
    )
    tps_on, tps_off = (series([metrics.decode_tps for metrics in side]) for side in (on, off))
    p99_on, p99_off = _p99(on), _p99(off)
    what = SCENARIOS[scenario]
    return [
        plain(f"{what}: decode without a screen", tps_off, "tok/s"),
        at_least(f"{what}: decode, on ÷ off", ratios(tps_on, tps_off), 0.97),
        plain(f"{what}: ITL p99 without a screen", p99_off, "ms"),
        at_most(f"{what}: ITL p99, on ÷ off", ratios(p99_on, p99_off), 2.0),
    ]


def _played(side: Callable[[str, str, int], Metrics], scenario: str, limit: int, number: int) -> Metrics:
    del number  # the same text each time
    return side("scripted", scenario, limit)


def _p99(side: list[Metrics]) -> Series:
    return series([gaps.p99 if (gaps := metrics.itl_ms) is not None else None for metrics in side])


# Section: how soon something is there.

HEAVY = ("mlx", "mlx_lm", "textual", "transformers", "numpy")
IMPORTED = re.compile(r"^import time:[^|]*\|[^|]*\|\s*([\w.]+)$", re.MULTILINE)


def measure_start(plan: Plan) -> Section:
    """Time ``tokamac --version``, a question of one token and the chat's first paint, as whole processes."""
    command, runs = tokamac(), plan.count(20, 3)
    asked, bare, peer = _questions(command, plan.count(9, 2))
    _version_s(command)  # once, so that the files are in the system's cache
    heavy = imports([*command, "--version"]) & set(HEAVY)
    first_paint_s(command, plan.model)
    rows = [
        at_most("`tokamac --version`", series([_version_s(command) for _ in range(runs)]), 0.15, "s"),
        holds("of mlx and textual, it imports", ", ".join(sorted(heavy)) or "none", "none", met=not heavy),
        plain("`tokamac ask`, one token of the guide", series([each.wall_s for each in asked]), "s"),
        at_most(
            "of it ÷ bare MLX that reads the same weights",
            ratios(*(series([each.wall_s for each in runs]) for runs in (asked, bare))),
            8,
        ),
        at_most(
            "its CPU time ÷ that of `mlx_lm generate`",
            ratios(*(series([each.cpu_s for each in runs]) for runs in (asked, peer))),
            0.12,
        ),
        at_most(
            "first paint of the chat",
            series([first_paint_s(command, plan.model) for _ in range(plan.count(15, 3))]),
            0.5,
            "s",
        ),
    ]
    how = (
        f"Wall time of the whole process (`{_shown(command)}`), after one run to warm the system's file cache. The question, "
        "bare MLX (`mx.load`, `mx.eval`) and mlx-lm's command answer in turn, each a process in a home that it used before. The "
        "imports are those that `python -X importtime` lists for the same command. First paint: from the start of "
        "the process in a pseudo-terminal until the prompt has been drawn; the model loads after that."
    )
    return Section("Start", rows, how)


def tokamac() -> list[str]:
    """Return the installed command, or what it would run where only the source tree is there."""
    script = Path(sys.executable).with_name("tokamac")
    return [str(script)] if script.exists() else [sys.executable, "-m", "tokamac.app.cli"]


def imports(command: Sequence[str]) -> set[str]:
    """Return the top-level names that a Python program imports."""
    program = command if command[0] == sys.executable else [sys.executable, *command]
    traced = [program[0], "-X", "importtime", *program[1:]]
    run = subprocess.run(traced, capture_output=True, text=True, check=True)
    found = {name.split(".")[0] for name in IMPORTED.findall(run.stderr)}
    if "tokamac" not in found:
        raise BenchError("the list of imports was not understood: it lacks tokamac itself")
    return found


def first_paint_s(command: Sequence[str], model: str) -> float:
    """Open the chat in a home of its own; return the seconds until the prompt had been drawn."""
    with tempfile.TemporaryDirectory() as home, Terminal([*command, "chat", model], at_home(Path(home))) as terminal:
        return terminal.wait_for(PROMPT_SHOWN, 30)


def at_home(home: Path) -> dict[str, str]:
    """Return the environment of a program whose user's folders are all below ``home``, the chats in ``home/chats``."""
    folders = ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR")
    # An installed program has its bytecode on the disk; else the first run makes it.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | dict.fromkeys((*folders, "TOKAMAC_DATA_DIR"), str(home))


class Spent(NamedTuple):
    """What a process took. cpu_s: of all its threads."""

    wall_s: float
    cpu_s: float


BARE = "import sys, mlx.core as mx; mx.eval(mx.load(sys.argv[1]))"


def _questions(command: Sequence[str], rounds: int) -> list[list[Spent]]:
    """Ask the guide for a token, read its weights with bare MLX, and ask mlx-lm, in turn."""
    guide = asset_path("guide", "model")
    commands = (
        [*command, "ask", "hi", "-m", "guide", "--max-tokens", "1"],
        [sys.executable, "-c", BARE, str(guide / "model.safetensors")],
        [sys.executable, "-m", "mlx_lm", "generate", "--model", str(guide), "--prompt", "hi", "--max-tokens", "1"],
    )
    with tempfile.TemporaryDirectory() as home:
        measures = [partial(_spent, each, at_home(Path(home))) for each in commands]
        for measure in measures:
            measure(0)
        return alternate(rounds, *measures)


def _spent(command: Sequence[str], environment: Mapping[str, str], _: int) -> Spent:
    began_s = time.perf_counter()
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, env=environment, stdin=quiet, stdout=quiet, stderr=quiet)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise BenchError(f"{command} ended with {os.waitstatus_to_exitcode(status)}")
    return Spent(time.perf_counter() - began_s, used.ru_utime + used.ru_stime)


def _version_s(command: Sequence[str]) -> float:
    began = time.perf_counter()
    subprocess.run([*command, "--version"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def _shown(command: Sequence[str]) -> str:
    return " ".join([Path(command[0]).name, *command[1:], "--version"])


# Section: what the store of chats takes from a person's time.

SEED = 11
# A vocabulary, as often used as its rank says (Zipf's law), and the size of a message and of a chat.
WORDS, WORDS_EACH, MESSAGES_EACH = 30_000, 80, 20


def measure_store(plan: Plan) -> Section:
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


# Section: how quick the chat is to a person's hand, with many messages stored and while a reply is written.

STORED, LONG = 10_000, 500
TITLE, LAST_WORDS = "The long one", "These are the last words of it."
# No reply holds them, and none is typed twice into one prompt: what is painted after a key is its echo.
LETTERS = "абвгдежзийклмнопрстуфхцчшщъыьэюяАБВГДЕЖЗИЙКЛМНОПРСТУФХЦЧШЩЪЫЬЭЮЯ"
WRITING = "tokens at"
TYPIST_S = (0.06, 0.14)  # between keys, from and to
STEPS = 4_000
F10 = "\x1b[21~"
CHATS, ENTER, MODELS = "\x0c", "\r", "\x0f"
LISTED = "Recommended for"  # above the catalogue, in its final order
LOADED = " bits · "  # in the side panel
SETTLES_S = 5.0  # longer than any part of the machine's latency takes to be timed
# How long the measuring of the latency is waited for: a machine that was busy is looked at again every 20 s.
MEASURING_S = 120.0


def measure_chat_use(plan: Plan) -> Section:
    """Time a start, an opening and keys in pseudo-terminals; count an idle chat's processor time."""
    with tempfile.TemporaryDirectory(prefix="tokamac-bench-") as name:
        home = Path(name)
        count = plan.count(STORED, 1_000)
        fill(home / "chats" / "chats.db", Words(), count)
        with Store.open(home / "chats" / "chats.db") as store:
            store.adopt(_long_chat())
            walked = store.adopt(_chat_of_steps()).id
        starts = series([_first_paint_s(home) for _ in range(plan.rounds)])
        opens = series([_open_s(home) for _ in range(plan.rounds)])
        picks = series([_pick_s(home) for _ in range(plan.rounds)])
        walks = series([_steps_s(home, walked) for _ in range(plan.rounds)])
        echoes = series(list(_echoes_ms(home, replies=plan.count(5, 1))))
    rows = [
        at_most(f"first paint with {count + LONG:,} stored messages", starts, 0.5, "s"),
        at_most(f"a chat of {LONG} messages: from the key to its end painted", opens, 0.4, "s"),
        at_most("the first Ctrl+O: from the key to the catalogue painted, best first", picks, 0.4, "s"),
        at_most(f"Steps of a reply of {STEPS:,} tokens: from the key to its first step painted", walks, 0.3, "s"),
        at_most("a key's echo while a reply is written, median", _middle(echoes), 30, "ms"),
        at_most("a key's echo while a reply is written, p99", _p99_chat_use(echoes), 30, "ms"),
        *_idle(plan),
    ]
    how = (
        f"The real chat in a pseudo-terminal of {COLUMNS}×{ROWS}. Its engine is scripted where nothing is said about it. "
        "A chat is opened from the list (Ctrl+L, Enter) of a chat that has just been started, so that what is imported for it "
        "counts: prompts of a line, replies of prose, lists, code and tables, and the time until the last words of the last "
        "reply had been written to the terminal. The list of models is there before anything is estimated, and fills in. "
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


def _chat_of_steps() -> Archive:
    """Return a chat of one prompt, whose reply has a long log of its steps."""
    chat = conversation(Words(), 2, 1.0)
    ids = tuple((number * 2_654_435_761) % 152_000 for number in range(STEPS))
    ms = tuple(20.0 + (number * 7_919 % 1_000) / 100 for number in range(STEPS))
    cost = cost_of(WORK, CHIP)
    log = PassLog((PromptPiece(99, 250.0),), STEPS, pack(TimedTokens(ids, ms, {7: ("swap",)})), cost, ahead=True)
    unknown = dict.fromkeys(field.name for field in fields(Metrics))
    metrics = Metrics(**{**unknown, "prompt_tokens": 100, "cached_tokens": 0, "generated_tokens": STEPS})  # type: ignore[arg-type]
    reply = replace(chat.messages[-1], metrics=measured(Reply(chat.messages[-1].text, metrics=metrics, passes=log)))
    return Archive(chat.chat, (*chat.messages[:-1], reply))


def _steps_s(home: Path, chat: str) -> float:
    command = [sys.executable, "-m", "tests.bench.screen_app", "scripted", "guide", "100000", str(home), chat]
    with Terminal(command, at_home(home)) as terminal:
        terminal.wait_for(LOADED, 30)
        time.sleep(1.0)  # the chat is open
        return terminal.answers(F10, "of the reply", 30)


def _first_paint_s(home: Path) -> float:
    with Terminal([*tokamac(), "chat", "guide"], at_home(home)) as terminal:
        return terminal.wait_for(PROMPT_SHOWN, 30)


def _scripted(home: Path, scenario: str) -> Terminal:
    command = [sys.executable, "-m", "tests.bench.screen_app", "scripted", scenario, "100000", str(home)]
    return Terminal(command, at_home(home))


def _open_s(home: Path) -> float:
    with _scripted(home, "guide") as terminal:
        terminal.wait_for(LOADED, 30)
        terminal.answers(CHATS, TITLE, 30)
        time.sleep(0.5)  # the list is whole, and a person reads it
        return terminal.answers(ENTER, LAST_WORDS, 30)


def _pick_s(home: Path) -> float:
    with _scripted(home, "guide") as terminal:
        terminal.wait_for(LOADED, 30)
        return terminal.answers(MODELS, LISTED, 30)


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


def _p99_chat_use(times: Series) -> Series:
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
    """Wait until the engine has measured the machine's latency, which it does once, when nobody has asked for a while. Where
    that is published it measures nothing, and this waits in vain."""
    seen: set[tuple[Path, int]] = set()
    changed = begun = time.monotonic()
    while (now := time.monotonic()) < begun + MEASURING_S and not (seen and now > changed + SETTLES_S):
        files = {(file, file.stat().st_mtime_ns) for file in home.rglob("parts.json")}
        if files != seen:
            seen, changed = files, now
        time.sleep(0.2)
