"""The chat is used in a terminal, and killed: the screen, the engine, or both, at any moment. Nothing it had stored is lost."""

import json
import os
import random
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.terminal import Terminal
from tokamac.app.store.store import Store
from tokamac.app.store.values import StoreError

ROUNDS = ("screen", "engine", "both") * 2
SEED = 20
READY = " bpw"  # in the side panel: the engine has loaded
PATIENCE_S = 30.0
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


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.05)


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
def test_whatever_is_killed_the_store_is_whole_and_the_chat_opens_again(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    command = [sys.executable, "-m", "tests.app.kill_chat_app", str(tmp_path)]
    for number, victim in enumerate(ROUNDS):
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
