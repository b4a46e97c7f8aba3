"""Processes that are killed, and processes that write at once: nothing that was acknowledged is lost."""

import json
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tokamac.app.store.store import Store

WRITER = "tests.store.writer"


@contextmanager
def writing(what: str, file: Path, *more: str) -> Iterator["subprocess.Popen[str]"]:
    """A writer that is at work."""
    command = [sys.executable, "-m", WRITER, what, str(file), *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline(), "the writer could not begin"
        try:
            yield process
        finally:
            process.kill()


def acknowledged(process: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    """Read the rest of what it said; a line that was cut off was not said."""
    assert process.stdout is not None
    return [json.loads(line) for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]


def check_whole(file: Path) -> None:
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        connection.execute(
            "INSERT INTO search (search, rank) VALUES ('integrity-check', 1)"
        )  # against the texts themselves


def test_a_writer_that_is_killed_at_any_moment_loses_nothing_it_had_stored(file: Path) -> None:
    moments = random.Random(7)
    stored: dict[int, dict[str, Any]] = {}
    for _ in range(20):
        with writing("replies", file) as process:
            time.sleep(moments.uniform(0, 0.15))
            process.kill()
            for said in acknowledged(process):
                stored[said["id"]] = said
        with Store.open(file) as store:
            for name, said in stored.items():
                message = store.message(name)
                assert message.state in (said["state"], "complete")
                assert message.text.startswith(said["text"])
            assert not any(message.state == "partial" for chat in store.chats() for message in store.path(chat.id))
        check_whole(file)
    assert len(stored) > 20
    assert [path.name for path in file.parent.iterdir() if path.name.startswith("writer-")] == []


def test_a_reply_of_a_living_process_is_left_alone_and_of_a_dead_one_is_stopped(file: Path) -> None:
    with writing("replies", file) as process, Store.open(file) as store:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        while said["state"] == "complete":
            said = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGSTOP)  # SIGSTOP: it sleeps, as with the lid closed, and is not dead
        time.sleep(0.05)
        partial = [m for chat in store.chats() for m in store.archive(chat.id).messages if m.state == "partial"]
        assert store.recover() == 0
        assert [store.message(m.id) for m in partial] == partial
        process.kill()
        process.wait()
        assert store.recover() == len(partial)
        assert {store.message(m.id).state for m in partial} <= {"stopped"}


def test_two_processes_that_write_at_once_lose_nothing_of_each_other(file: Path) -> None:
    count = 150
    with Store.open(file) as store:
        chat = store.new_chat().id
        head = store.add_message(chat, None, "user", "begin").id
        with writing("many", file, str(count)) as one, writing("many", file, str(count)) as two:
            mine = [store.add_message(chat, head, "user", f"mine {number}") for number in range(count)]
            said = [*acknowledged(one), *acknowledged(two)]
            assert (one.wait(), two.wait()) == (0, 0)
        children = {message.id: message.text for message in store.children(chat, head)}
        assert len(said) == 2 * count
        assert children == {one["id"]: one["text"] for one in said} | {message.id: message.text for message in mine}
        assert [message.position for message in store.children(chat, head)] == list(range(3 * count))
        assert len(store.chat(chat).settings) == 2 * count
    check_whole(file)


def test_many_processes_may_make_the_file_at_once(file: Path) -> None:
    code = (
        f"from pathlib import Path; from tokamac.app.store.store import Store; Store.open(Path({str(file)!r})).close()"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) for _ in range(6)]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    check_whole(file)


def test_a_full_file_is_an_error_that_loses_nothing(file: Path) -> None:
    with writing("limited_fill", file) as process:
        *stored, last = acknowledged(process)
        assert process.wait() == 0
    assert "can't be used" in last["error"]
    with Store.open(file) as store:
        (chat,) = store.chats()
        assert [message.id for message in store.archive(chat.id).messages] == [said["id"] for said in stored]
        store.add_message(chat.id, None, "user", "there is room again")
    check_whole(file)


def test_a_full_disk_is_said_to_be_full_and_loses_nothing(tmp_path: Path) -> None:
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    script = (
        'mount -t tmpfs -o size=2m none "$1" || exit 77; "$2" -m "$3" fill "$1/chats/chats.db" && cp -r "$1/chats" "$4"'
    )
    try:
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script, "sh", disk, sys.executable, WRITER, copy],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("mounting is not permitted here")
    assert done.returncode == 0, done.stderr
    *stored, last = [json.loads(line) for line in done.stdout.splitlines()[1:]]
    assert "the disk is full" in last["error"]
    assert "disk space" in last["hint"]
    with Store.open(copy / "chats.db") as store:
        (chat,) = store.chats()
        assert [message.id for message in store.archive(chat.id).messages] == [said["id"] for said in stored]
