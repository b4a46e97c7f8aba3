"""The whole product in a terminal, with the embedded model; and killed, at any moment, without a loss."""

import fcntl
import json
import os
import pty
import random
import re
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.app.terminals import Size, Tmux
from tests.bench.terminal import Terminal
from tests.waiting import PATIENCE_S, until
from tokamac.app.store.store import Store
from tokamac.app.store.values import StoredMessage, StoreError

EMPTY = "Write a message"
LOADED = " bits"  # in the side panel
COLOUR = re.compile(r"\x1b\[(?:[0-9;:]*;)?(?:[349][0-8]|10[0-7])[;:m]")
ATTEMPTS = 12


class Home:
    """A user's folders, and what the store in them holds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def environment(self) -> dict[str, str]:
        names = ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "HF_HOME")
        ours = dict.fromkeys((*names, "TOKAMAC_DATA_DIR", "TOKAMAC_CACHE_DIR"), str(self.folder))
        return ours | {"OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "LC_ALL": "C.UTF-8"}

    def messages(self) -> list[StoredMessage]:
        """The path that is read in the newest chat."""
        with closing(Store.open(self.folder / "chats" / "chats.db")) as store:
            newest = store.latest()
            return [] if newest is None else store.path(newest.id)

    def versions(self) -> int:
        """How many replies stand beside the last one."""
        return self.messages()[-1].siblings


@contextmanager
def chat(
    folder: Path, *flags: str, size: Size = (100, 30), term: str = "xterm-256color", **environment: str
) -> Iterator[tuple[Tmux, Home]]:
    home = Home(folder)
    command = [sys.executable, "-m", "tokamac.app.cli", "chat", *flags]
    with Tmux(command, folder, size, term, home.environment | environment) as tmux:
        tmux.shows(EMPTY)
        yield tmux, home


def ask(tmux: Tmux, home: Home, question: str) -> None:
    """Send a question and wait for its whole reply."""
    tmux.write(question)
    tmux.shows(question)
    tmux.press("Enter")
    tmux.until(lambda: ended(home, question), f"a reply to {question!r}")


def ended(home: Home, *questions: str) -> bool:
    """Whether the last question is one of these, and has its whole reply."""
    kept = home.messages()
    return len(kept) > 1 and kept[-2].text in questions and kept[-1].state != "partial"


def stop_one(tmux: Tmux, home: Home) -> None:
    """Stop a reply. The model is quicker than the key, so its process is held until the app has read the key."""
    for attempt in range(ATTEMPTS):
        question = f"What is prefill, what is decode, what is a ceiling, and which keys are there? ({attempt})"
        tmux.write(question)
        tmux.shows(f"({attempt})")
        with held(tmux.children("backend.child")):
            tmux.press("Enter")
            tmux.until(lambda question=question: home.messages()[-2].text == question, "the question is kept")
            tmux.press("Escape")
            tmux.shows("stopping")
        tmux.until(lambda question=question: ended(home, question), "the end of the reply")
        if home.messages()[-1].state == "stopped":
            return
    pytest.fail(f"none of {ATTEMPTS} replies was stopped")


@contextmanager
def held(processes: Sequence[int]) -> Iterator[None]:
    assert processes
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            os.kill(process, signal.SIGCONT)


def leave(tmux: Tmux) -> None:
    tmux.press("C-q")
    tmux.until(lambda: tmux.exit_status is not None, "the end of the program")
    assert tmux.exit_status == 0


@pytest.mark.e2e
@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed: nothing to run the chat in")
def test_a_first_run_to_a_chat_that_is_continued(tmp_path: Path) -> None:
    with chat(tmp_path) as (tmux, home):
        tmux.shows(LOADED)
        ask(tmux, home, "What is prefill?")
        tmux.shows("What is prefill?")
        answer = home.messages()[-1]
        assert answer.text
        assert answer.metrics is not None
        stop_one(tmux, home)
        tmux.shows("stopped")
        tmux.press("C-x", "r")
        tmux.until(lambda: home.versions() == 2 and home.messages()[-1].state != "partial", "another reply")
        tmux.shows("‹ 2 of 2 ›")
        tmux.press("C-n")
        ask(tmux, home, "Which keys make a new line?")
        tmux.press("C-l")
        tmux.shows("Search titles, messages, files")
        tmux.write("ceiling")
        tmux.shows("what is a ceiling")
        tmux.press("Enter")
        tmux.shows("‹ 2 of 2 ›")
        leave(tmux)
        before = home.messages()
    with chat(tmp_path, "--continue") as (tmux, home):
        tmux.shows(before[-2].text.rpartition(" ")[2])
        ask(tmux, home, "What does TTFT mean?")
        assert [message.id for message in home.messages()[:-2]] == [message.id for message in before]
        leave(tmux)


@pytest.mark.e2e
@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed: nothing to run the chat in")
@pytest.mark.parametrize("term", ["xterm-256color", "screen"])
def test_without_colours(tmp_path: Path, term: str) -> None:
    with chat(tmp_path, term=term, NO_COLOR="1") as (tmux, home):
        tmux.shows(LOADED)
        ask(tmux, home, "What is prefill?")
        assert not COLOUR.search(tmux.screen(colours=True))
        leave(tmux)


@pytest.mark.e2e
@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed: nothing to run the chat in")
@pytest.mark.parametrize(("size", "term"), [((40, 12), "screen"), ((250, 80), "xterm-256color")])
def test_the_smallest_and_the_largest_window(tmp_path: Path, size: Size, term: str) -> None:
    with chat(tmp_path, size=size, term=term) as (tmux, home):
        ask(tmux, home, "What is prefill?")
        assert COLOUR.search(tmux.screen(colours=True))
        for other in ((100, 30), (39, 11), (250, 80), (40, 12), size):
            tmux.resize(other)
            tmux.until(lambda other=other: fits(tmux, other), f"a screen of {other}")
            tmux.shows("too small" if other == (39, 11) else EMPTY)
        leave(tmux)


def fits(tmux: Tmux, size: Size) -> bool:
    lines = tmux.screen().splitlines()
    time.sleep(0.1)  # two looks alike: it has been drawn
    return len(lines) == size[1] and max(map(len, lines)) <= size[0] and tmux.screen().splitlines() == lines


# The chat is used in a terminal, and killed: the screen, the engine, or both, at any moment. Nothing it had stored
# is lost.

VICTIMS = ("screen", "engine", "both")
SEED = 20
READY = " bits"  # in the side panel: the engine has loaded
ESCAPE, ENTER, CHATS, DELETE, UNDO = "\x1b", "\r", "\x0c", "\x04", "\x1a"


class User:
    """Types as a person would, if one typed so fast. Each prompt is unlike any other."""

    def __init__(self, terminal: Terminal, chance: random.Random, number: int) -> None:
        self._terminal = terminal
        self._chance = chance
        self._number = number
        self._said = 0

    def act(self) -> None:
        """Do one thing of those that one does in a chat."""
        acts: dict[Callable[[], None], int] = {
            self._send: 8,
            lambda: self._command("again"): 3,
            self._edit: 3,
            lambda: self._command("older"): 2,
            lambda: self._command("newer"): 1,
            lambda: self._command("new"): 2,
            lambda: self._command("fork"): 1,
            lambda: self._keys(ESCAPE): 2,
            lambda: self._keys(CHATS, "\x1b[B", ENTER): 2,
            lambda: self._keys(CHATS, "\x1b[B", DELETE, ESCAPE): 1,
            lambda: self._keys(CHATS, "\x1b[B", DELETE, UNDO, ESCAPE): 1,
            lambda: self._keys(f" half a thought {self._new()}"): 2,
        }
        (act,) = self._chance.choices(list(acts), list(acts.values()))
        act()
        time.sleep(self._chance.choice((0.05, 0.2, 0.5)))

    def _new(self) -> str:
        self._said += 1
        return f"n{self._number}x{self._said}"

    def _keys(self, *keys: str) -> None:
        for key in keys:
            self._terminal.press(key)
            time.sleep(0.12)  # Esc and what follows it at once would be another key

    def _send(self) -> None:
        self._keys(f"Why is decode bound by memory, {self._new()}?", ENTER)

    def _command(self, word: str) -> None:
        self._keys(f"/{word}", ENTER)

    def _edit(self) -> None:
        self._keys("/edit", ENTER, f" {self._new()}", ENTER)


@dataclass(frozen=True, slots=True)
class Note:
    """A write to the store: begun, and when it is ``done``, acknowledged. made: the id of what it made."""

    op: str
    done: bool
    given: list[Any]
    named: dict[str, Any]
    made: Any = None


def notes(folder: Path) -> list[Note]:
    """What the chat noted; a line that was cut off was not said."""
    lines = (folder / "notes").read_bytes().splitlines(keepends=True)
    return [Note(**json.loads(line)) for line in lines if line.endswith(b"\n")]


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:  # it was ended already
        return


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat = Path(f"/proc/{pid}/stat")  # where nobody asks for its exit status, a process that has ended is still listed
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z"


def engines(folder: Path) -> list[int]:
    return [note.made for note in notes(folder) if note.op == "engine"]


def check_stored(folder: Path) -> None:
    """The file is whole, and every write that was acknowledged is in it."""
    file = folder / "chats" / "chats.db"
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    said = notes(folder)
    with Store.open(file) as store:
        for note in said:
            if note.done and note.op == "add_message":
                assert store.message(note.made).text == note.given[3]
            elif note.done and note.op == "begin_reply":
                assert store.message(note.made).role == "assistant"
            elif note.done and note.op in ("checkpoint", "finish_reply"):
                assert store.message(note.given[0]).text.startswith(note.given[1])
        drafts = list(last_of(said, "set_draft", lambda note: note.given[1]))
        assert all(store.chat(chat).draft in possible for chat, possible in drafts)
        removals = list(last_of(said, ("delete", "undelete"), lambda note: note.op == "delete"))
        assert all((store.chat(chat).deleted_at is not None) in possible for chat, possible in removals)


def last_of(
    said: list[Note], ops: str | tuple[str, ...], value: Callable[[Note], Any]
) -> Iterator[tuple[str, list[Any]]]:
    """Yield each chat and what it may be: as the last write that was acknowledged says, or one that was only begun."""
    possible: dict[str, list[Any]] = {}
    for note in said:
        if note.op in ops:
            possible[note.given[0]] = [value(note)] if note.done else [*possible.get(note.given[0], []), value(note)]
    for chat, values in possible.items():
        begun_alone = len(values) == 1 and not any(n.done and n.op in ops and n.given[0] == chat for n in said)
        if not begun_alone:
            yield chat, values


def expected(folder: Path) -> str:
    """What the chat must show when it is opened again: the last prompt of the newest chat, or its draft."""
    if not (folder / "chats" / "chats.db").exists():
        return READY
    with Store.open(folder / "chats" / "chats.db") as store:
        newest = store.latest()
        if newest is None:
            return READY
        asked = [message.text for message in store.path(newest.id) if message.role == "user"]
    words = (asked[-1:] or [newest.draft])[0].split()
    return words[-1] if words else READY


def end(folder: Path, terminal: Terminal, victim: str, user: User) -> None:
    """Kill the victim; when that is the engine alone, use the chat, which starts another, and then kill the screen."""
    before = engines(folder)
    if victim != "screen":
        kill(before[-1])
    if victim == "engine":
        until(lambda: len(engines(folder)) > len(before), "another engine")
        user.act()
    kill(terminal.pid)
    until(lambda: not terminal.running, "the end of the screen")
    until(lambda: all(gone(engine) for engine in engines(folder)), "the end of engines whose screen is gone")


@pytest.mark.e2e
@pytest.mark.parametrize("rounds", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_whatever_is_killed_the_store_is_whole_and_the_chat_opens_again(tmp_path: Path, rounds: int) -> None:
    chance = random.Random(SEED)
    command = [sys.executable, "-m", "tests.app.kill_chat_app", str(tmp_path)]
    for number, victim in enumerate(VICTIMS * rounds):
        shown = expected(tmp_path)
        with Terminal(command, os.environ) as terminal:
            terminal.wait_for(READY, PATIENCE_S)
            terminal.wait_for(shown, PATIENCE_S)
            user = User(terminal, chance, number)
            for _ in range(chance.randint(5, 11)):
                user.act()
            time.sleep(chance.uniform(0, 0.3))
            end(tmp_path, terminal, victim, user)
        check_stored(tmp_path)
    done = {note.op for note in notes(tmp_path) if note.done}
    assert {"add_message", "begin_reply", "checkpoint", "finish_reply"} <= done
    with Terminal(command, os.environ) as terminal:
        terminal.wait_for(expected(tmp_path), PATIENCE_S)


@pytest.mark.e2e
def test_what_is_written_after_another_program_came_and_went_outlives_a_kill(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.app.kill_chat_app", str(tmp_path)]
    (tmp_path / "more.md").write_text("## User\n\nimported\n\n## Assistant\n\nyes\n")
    file, store = tmp_path / "chats" / "chats.db", {"TOKAMAC_DATA_DIR": str(tmp_path)}
    log = file.with_name("chats.db-wal")

    def commands() -> None:
        for words in (["list"], ["search", "first"], ["import", str(tmp_path / "more.md")], ["repair"]):
            program = [sys.executable, "-m", "tokamac.app.cli", "chats", *words]
            subprocess.run(program, env=os.environ | store, check=True, capture_output=True)

    def replied(prompt: str) -> bool:
        with Store.open(file) as opened:
            chats = [opened.path(chat.id) for chat in opened.chats()]
        return any([m.text for m in path[-2:-1]] == [prompt] and path[-1].state == "complete" for path in chats)

    with Terminal(command, os.environ) as terminal:
        terminal.wait_for(READY, PATIENCE_S)
        for key in ("the first prompt", ENTER):
            terminal.press(key)
        until(lambda: replied("the first prompt"), "a reply")
        terminal.press(CHATS)  # a second connection of the app
        terminal.wait_for("Search titles, messages, files", PATIENCE_S)
        terminal.press(ESCAPE)
        inode = log.stat().st_ino
        commands()
        assert log.stat().st_ino == inode
        time.sleep(0.2)  # Esc and what follows it at once would be another key
        for key in ("the second prompt", ENTER):
            terminal.press(key)
        until(lambda: replied("the second prompt"), "a reply")
        log.unlink()  # by a tool that knows nothing of SQLite
        for key in ("the third prompt", ENTER):
            terminal.press(key)
        terminal.wait_for("replaced the chat file", PATIENCE_S)
        until(lambda: replied("the third prompt"), "a reply")
        kill(terminal.pid)
        until(lambda: not terminal.running, "the end of the screen")
    with Store.open(file) as opened:
        opened.check()
        texts = [m.text for chat in opened.chats() for m in opened.path(chat.id) if m.role == "user"]
    assert sorted(texts) == ["imported", "the first prompt", "the second prompt", "the third prompt"]


def test_a_damaged_store_is_told_apart_from_a_whole_one(tmp_path: Path) -> None:
    with Store.open(tmp_path / "chats" / "chats.db") as store:
        kept = store.add_message(store.new_chat().id, None, "user", "Why?").id
        chat = store.chats()[0].id
    line = {"op": "add_message", "done": True, "given": [chat, None, "user", "Why not?"], "named": {}, "made": kept}
    (tmp_path / "notes").write_text(json.dumps(line) + "\n")
    with pytest.raises(AssertionError):
        check_stored(tmp_path)
    (tmp_path / "notes").write_text(json.dumps(line | {"made": kept + 1}) + "\n" + '{"op": "cut o')
    with pytest.raises(StoreError):
        check_stored(tmp_path)


@pytest.mark.parametrize("ignored", [False, True])
def test_a_window_that_is_closed_leaves_no_process(tmp_path: Path, ignored: bool) -> None:
    """Also where the signal for that is ignored, as a program is begun by `nohup`."""
    environment = {**os.environ, "TERM": "xterm-256color", "TOKAMAC_DATA_DIR": str(tmp_path / "data")}
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))

    def in_its_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        if ignored:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    command = [sys.executable, "-m", "tokamac.app.cli", "chat"]
    chat = subprocess.Popen(
        command,
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True, preexec_fn=in_its_terminal,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while b"Write a message" not in shown:
        shown += os.read(ours, 1 << 16)
    os.close(ours)
    assert chat.wait(PATIENCE_S) in (0, 128 + signal.SIGHUP)
    until(lambda: group_is_gone(chat.pid))  # its engine's process, of the same session, ends with it


def group_is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False
