"""The file: who may read it, its versions, damage, and processes that are killed or write at once."""

import json
import os
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until
from tokamac.app.store import database
from tokamac.app.store.database import APPLICATION_ID, STEPS, Database
from tokamac.app.store.store import Store
from tokamac.app.store.values import StoreDamagedError, StoreError
from tokamac.engine.events import ToolCall
from tokamac.engine.files import open_regular

# What the store may rest on: it is used before the screen and without the engine.


def test_the_store_needs_neither_mlx_nor_textual_nor_asyncio() -> None:
    code = "import sys, tokamac.app.store.store, tokamac.app.store.export; print(*sys.modules)"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert "tokamac.app.store.store" in loaded
    assert not loaded & {"mlx", "mlx.core", "textual", "asyncio", "numpy", "platformdirs"}


# The file: who may read it, its versions, and what happens when it is not what it should be.

# Every statement that made version 1, and a chat in it: what is in the hands of users never changes.
VERSION_1 = Path(__file__).parent / "version1.sql"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def write_some(file: Path) -> str:
    with Store.open(file) as store:
        chat = store.new_chat().id
        store.add_message(chat, None, "user", "kept words")
        return chat


@pytest.fixture
def open_mask() -> Iterator[None]:
    old = os.umask(0)
    yield
    os.umask(old)


def test_only_the_user_can_read_anything_whatever_the_umask(file: Path, open_mask: None) -> None:
    with Store.open(file) as store:
        store.begin_reply(store.new_chat().id, None)
        names = {path.name.split("-")[0] for path in file.parent.iterdir()}
        assert names == {"chats.db", "writer"}
        assert {mode(path) for path in file.parent.iterdir()} == {0o600}
        assert mode(file.parent) == 0o700


def test_what_others_could_read_is_closed_to_them(file: Path) -> None:
    write_some(file)
    file.chmod(0o644)
    file.parent.chmod(0o755)
    write_some(file)
    assert (mode(file), mode(file.parent)) == (0o600, 0o700)


def test_the_place_is_the_users_data_folder_or_one_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKAMAC_DATA_DIR", str(tmp_path))
    assert database.default_path() == tmp_path / "chats" / "chats.db"
    with Store.open() as store:
        assert store.file == tmp_path / "chats" / "chats.db"
    monkeypatch.delenv("TOKAMAC_DATA_DIR")
    assert database.default_path().parts[-3:] == ("tokamac", "chats", "chats.db")


def version_1(file: Path) -> None:
    file.parent.mkdir(parents=True)
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript(VERSION_1.read_text(encoding="utf-8"))


def schema(file: Path) -> set[tuple[str, ...]]:
    with closing(sqlite3.connect(file)) as connection:
        return set(connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master"))


def test_the_steps_to_version_1_still_make_what_version_1_was(file: Path, tmp_path: Path) -> None:
    version_1(file)
    Database(tmp_path / "new" / "chats.db", steps=STEPS[:1]).close()
    assert schema(tmp_path / "new" / "chats.db") == schema(file)


def test_a_file_of_version_1_opens_with_all_that_is_in_it(file: Path) -> None:
    version_1(file)
    with Store.open(file) as store:
        (chat,) = store.chats()
        assert (chat.id, chat.title, chat.settings) == ("aaaabbbb", "What is a token?", {"sampling": {"top_p": 0.9}})
        assert [(m.role, m.state, m.text) for m in store.path(chat.id)] == [
            ("user", "complete", "What is a token?"),
            ("assistant", "stopped", "A piece of"),  # its writer is long gone
        ]
        assert store.path(chat.id)[0].attachments[0].text == "attached"
        assert [hit.message for hit in store.search("token")] == [1]
        assert (chat.pinned_at, chat.folder, store.folders()) == (None, "", [])
        assert store.pin(chat.id).pinned_at is not None
        assert store.move(chat.id, "work\nnotes").folder == "work notes"
        store.check()


NEXT = (*STEPS, ("ALTER TABLE chats ADD COLUMN colour TEXT NOT NULL DEFAULT ''", "CREATE TABLE more (x) STRICT"))
WORKING = (*STEPS, ("ALTER TABLE chats ADD COLUMN colour TEXT NOT NULL DEFAULT ''",))


def backups(file: Path) -> list[Path]:
    return sorted(path for path in file.parent.iterdir() if ".v" in path.name)


def test_an_older_file_is_copied_before_it_is_changed(file: Path) -> None:
    chat = write_some(file)
    Database(file, steps=WORKING).close()
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (len(WORKING),)
        assert connection.execute("SELECT id, colour FROM chats").fetchall() == [(chat, "")]
    (backup,) = backups(file)
    assert mode(backup) == 0o600
    with Store.open(backup) as store:
        assert store.chat(chat).title == "kept words"
        store.check()
    Database(file, steps=WORKING).close()
    assert len(backups(file)) == 1  # nothing to do, nothing to copy


def test_a_step_that_fails_leaves_the_file_as_it_was(file: Path) -> None:
    write_some(file)
    before = schema(file)
    with pytest.raises(StoreError):
        Database(file, steps=NEXT)  # a column without a type, in a strict table
    assert schema(file) == before
    write_some(file)


def test_a_newer_file_is_refused_and_not_written(file: Path) -> None:
    write_some(file)
    Database(file, steps=WORKING).close()
    before = file.read_bytes()
    with pytest.raises(StoreError, match="newer tokamac") as caught:
        Store.open(file)
    assert caught.value.hint == "Update tokamac; the file was left as it is."
    assert file.read_bytes() == before


def test_a_program_that_runs_writes_no_more_once_the_file_is_newer(file: Path) -> None:
    with Store.open(file) as store:
        store.set_draft(store.new_chat().id, "before")
        Database(file, steps=WORKING).close()
        with pytest.raises(StoreError, match="newer tokamac"):
            store.new_chat()


def test_another_programs_database_is_not_touched(file: Path) -> None:
    file.parent.mkdir(parents=True)
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    before = file.read_bytes()
    with pytest.raises(StoreError, match="another program"):
        Store.open(file)
    assert file.read_bytes() == before


@pytest.mark.parametrize("moment", ["user_version", "application_id", "sqlite_master"])
def test_a_file_another_process_makes_is_ours(file: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    overtaken: list[str] = []

    class Overtaken(sqlite3.Connection):
        """Another process makes the chats just before this one asks the file one of its questions."""

        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            if moment in sql and not overtaken:
                overtaken.append(sql)
                with monkeypatch.context() as other:
                    other.setattr(sqlite3, "connect", connect)
                    with suppress(StoreError):  # it may be kept waiting until this one has asked
                        Database(file, patience_s=0.1).close()
            return super().execute(sql, *values)

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", partial(connect, factory=Overtaken))
    assert write_some(file)
    assert len(overtaken) == 1


def test_a_file_without_a_log_is_not_taken_for_one_that_was_replaced(file: Path) -> None:
    write_some(file)
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",)
    with Store.open(file) as store:
        assert len(store.chats()) == 1
        store.new_chat()
        assert store.follow() is None


def test_a_link_to_the_file_is_the_file(file: Path, tmp_path: Path) -> None:
    file.parent.mkdir(parents=True)
    file.symlink_to(tmp_path / "elsewhere.db")
    write_some(file)
    assert mode(tmp_path / "elsewhere.db") == 0o600
    assert file.is_symlink()
    assert Store.set_aside(file).name == "elsewhere.db"
    write_some(file)


def test_the_file_is_not_opened_by_code_of_ours_while_it_is_open(file: Path) -> None:
    with Store.open(file) as store:
        store.new_chat()
        for each in file.parent.iterdir():
            with pytest.raises(PermissionError, match="a database that this program has open"):
                open_regular(each)
        other = Store.open(file)
        other.close()
        with pytest.raises(PermissionError):
            open_regular(file)
    open_regular(file).close()


def test_a_folder_that_cant_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="can't be used: Not a directory") as caught:
        Store.open(tmp_path / "file" / "chats" / "chats.db")
    assert "TOKAMAC_DATA_DIR" in caught.value.hint


def test_a_folder_in_place_of_the_file_is_one_clear_line(file: Path) -> None:
    file.mkdir(parents=True)
    with pytest.raises(StoreError, match="can't be used: Is a directory"):
        Store.open(file)


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is closed to root")
def test_a_folder_that_may_not_be_written_is_one_clear_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StoreError, match="can't be used: Permission denied"):
            Store.open(tmp_path / "chats" / "chats.db")
    finally:
        tmp_path.chmod(0o700)


def test_a_file_that_another_program_keeps_busy_is_said_to_be_busy(file: Path) -> None:
    write_some(file)
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        mine = Database(file, patience_s=0.05)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="busy"), mine.writing():
            pass
        other.execute("ROLLBACK")
        with mine.writing():
            pass
        mine.close()


def test_an_old_sqlite_is_said_to_be_too_old(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "OLDEST_SQLITE", (99, 0, 0))
    with pytest.raises(StoreError, match=r"need 99\.0\.0"):
        Store.open(file)


def test_a_store_that_is_left_by_an_error_tells_that_error(file: Path) -> None:
    def fail() -> None:
        with Store.open(file) as store:
            store.begin_reply(store.new_chat().id, None)
            store.delete("aaaaaaaa")

    with pytest.raises(StoreError, match="no chat"):
        fail()
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_the_header_says_whose_file_it_is(file: Path) -> None:
    write_some(file)
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.parametrize(
    "change",
    ["UPDATE messages SET text = 'x'", "UPDATE messages SET metrics = '{}'", "UPDATE messages SET parent = NULL"],
)
def test_the_file_itself_refuses_to_change_a_finished_message(file: Path, change: str) -> None:
    write_some(file)
    with closing(sqlite3.connect(file)) as connection, pytest.raises(sqlite3.IntegrityError, match="never changed"):
        connection.execute(change)


# Processes that are killed, and processes that write at once: nothing that was acknowledged is lost.

WRITER = "tests.app.store.writer"


@contextmanager
def writing(what: str, file: Path, *more: str) -> Iterator["subprocess.Popen[str]"]:
    """A writer that is at work."""
    command = [sys.executable, "-m", WRITER, what, str(file), *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline(), "the writer could not begin"
        try:
            yield process
        finally:
            process.kill()


def acknowledged(process: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    """Read the rest of what it said; a line that was cut off was not said."""
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


def state(process: int) -> str:
    return subprocess.run(["ps", "-o", "state=", "-p", str(process)], capture_output=True, text=True, check=True).stdout


def test_a_reply_of_a_living_process_is_left_alone_and_of_a_dead_one_is_stopped(file: Path) -> None:
    with writing("replies", file) as process, Store.open(file) as store:
        said = json.loads(process.stdout.readline())
        while said["state"] == "complete":
            said = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGSTOP)  # it sleeps, as with the lid closed, and is not dead
        until(lambda: state(process.pid).startswith("T"))
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


def test_a_disk_that_may_only_be_read_is_read_and_said_to_be_so(file: Path) -> None:
    write_some(file)
    script = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" || exit 77; shift; "$@" list && "$@" repair'
    command = [sys.executable, "-m", "tokamac.app.cli", "chats"]
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", file.parent, *command],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("mounting is not permitted here")
    assert "kept words" in done.stdout
    note, refused = done.stderr.splitlines()
    assert done.returncode == 1
    assert note.endswith("Read-only file system; reading without writing")
    assert refused.startswith("tokamac: ")
    assert "can't be used: Read-only file system" in refused


# Files that are broken: said in one line, never lost, and mended where they can be.


def test_what_is_no_database_is_kept_and_set_aside_when_asked(file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.write_bytes(b"not a database, but somebody's" * 100)
    with pytest.raises(StoreDamagedError, match="not a database") as caught:
        Store.open(file)
    assert "`tokamac chats repair --set-aside`" in caught.value.hint
    assert file.read_bytes().startswith(b"not a database")
    kept = Store.set_aside(file)
    file.write_bytes(b"another")
    other = Store.set_aside(file)  # within the same second
    assert kept != other
    assert (kept.read_bytes()[:5], other.read_bytes()) == (b"not a", b"another")
    assert mode(kept.parent) == 0o700
    write_some(file)
    with pytest.raises(StoreError, match="There is no"):
        Store.set_aside(file.with_name("missing.db"))


def test_a_file_is_set_aside_with_its_log(file: Path) -> None:
    with Store.open(file) as store:
        chat = store.new_chat().id
        store.set_draft(chat, "only in the log so far")
        kept = Store.set_aside(file)
        with Store.open(kept) as old:
            assert old.chat(chat).draft == "only in the log so far"
    with Store.open(file) as new:
        assert new.chats() == []


def test_a_damaged_page_is_found_by_the_check_and_said_when_it_is_met(file: Path) -> None:
    with Store.open(file) as store:
        chat = store.new_chat().id
        for number in range(200):
            store.add_message(chat, None, "user", f"{number} " * 200)
    data = bytearray(file.read_bytes())
    pages = len(data) // 4096
    for page in range(pages // 3, 2 * pages // 3):
        data[page * 4096 : page * 4096 + 64] = b"\xff" * 64
    file.write_bytes(data)
    before = file.read_bytes()
    store = Store.open(file)
    try:
        with pytest.raises(StoreDamagedError, match="damaged"):
            store.check()
        with pytest.raises(StoreDamagedError, match="damaged"):
            store.archive(chat)
    finally:
        store.close()
    assert file.read_bytes() == before


def spoil(file: Path, *statements: str) -> None:
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def test_a_damaged_index_costs_no_message(file: Path) -> None:
    chat = write_some(file)
    spoil(file, "UPDATE search_data SET block = x'0102' WHERE id > 1000")
    with Store.open(file) as store:
        with pytest.raises(StoreDamagedError):
            store.search("kept")
        store.repair_search()
        assert [hit.snippet for hit in store.search("kept")] == ["kept words"]
        store.add_message(chat, None, "user", "more words")
        assert len(store.search("words")) == 2


def test_repair_opens_what_open_can_not(file: Path) -> None:
    """A reply that a dead process left is indexed when it is ended, and that fails on a broken index."""
    with writing("replies", file) as process:
        said = [json.loads(process.stdout.readline()) for _ in range(5)]  # a prompt, and all but the end of its reply
        process.kill()
    spoil(file, "UPDATE search_data SET block = x'ffffffffffffffffffff' WHERE id = 10")
    with pytest.raises(StoreDamagedError, match="damaged") as caught:
        Store.open(file)
    assert "tokamac chats repair" in caught.value.hint
    before = _texts(file)
    assert Store.repair(file) == len(before)
    with Store.open(file) as store:
        assert store.message(said[-1]["id"]).state == "stopped"
        assert {hit.message for hit in store.search("part")} >= {said[-1]["id"]}
        assert {hit.message for hit in store.search("prompt")} >= {said[0]["id"]}
    assert _texts(file) == before
    check_whole(file)


def test_repair_of_what_is_beyond_it_says_so_and_changes_no_message(file: Path) -> None:
    chat = write_some(file)
    with Store.open(file) as store:
        for number in range(200):
            store.add_message(chat, None, "user", f"{number} " * 200)
    data = bytearray(file.read_bytes())
    at = len(data) // 4096 // 2 * 4096
    data[at : at + 64] = b"\xff" * 64
    file.write_bytes(data)
    with pytest.raises(StoreDamagedError, match="damaged") as caught:
        Store.repair(file)
    assert "`tokamac chats repair --set-aside`" in caught.value.hint
    assert "`tokamac chats repair`" not in caught.value.hint


def _texts(file: Path) -> list[tuple[str]]:
    with closing(sqlite3.connect(file)) as connection:
        return connection.execute("SELECT text FROM messages ORDER BY id").fetchall()


def test_text_that_is_no_text_any_more_is_said_to_be_damaged(file: Path) -> None:
    write_some(file)
    spoil(file, "UPDATE chats SET draft = CAST(x'ff41' AS TEXT)")
    with Store.open(file) as store, pytest.raises(StoreDamagedError, match="decode"):
        store.chats()


def test_a_file_that_was_cut_short_is_said_to_be_damaged(file: Path) -> None:
    with Store.open(file) as store:
        chat = store.new_chat().id
        for number in range(50):
            store.add_message(chat, None, "user", f"{number} " * 500)
    file.write_bytes(file.read_bytes()[:8192])
    with pytest.raises(StoreDamagedError), Store.open(file) as store:
        store.check()


def test_a_file_of_before_tools_takes_calls_and_loses_nothing(tmp_path: Path) -> None:
    file = tmp_path / "chats.db"
    connection = sqlite3.connect(file)
    connection.executescript(VERSION_1.read_text(encoding="utf-8"))
    before = connection.execute("SELECT id, parent, role, text FROM messages ORDER BY id").fetchall()
    last = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'messages'").fetchone()[0]
    connection.close()
    call = ToolCall("add", '{"a": 1}', "abc123def")
    with Store.open(file) as store:
        chat = store.new_chat().id
        asked = store.add_message(chat, None, "user", "sum of unusual")
        assert asked.id == last + 1  # no number is used twice
        reply = store.begin_reply(chat, asked.id)
        store.finish_reply(reply.id, "", calls=(call,))
        store.add_message(chat, reply.id, "tool", "two", calls=(call,), state="failed")
        assert [(each.role, each.state, each.calls) for each in store.path(chat)] == [
            ("user", "complete", ()),
            ("assistant", "complete", (call,)),
            ("tool", "failed", (call,)),
        ]
        assert [hit.message for hit in store.search("unusual")] == [asked.id]
        store.check()
        with pytest.raises(StoreError, match="never changed"), store._database.writing() as writing:
            writing.execute("UPDATE messages SET text = 'x' WHERE id = ?", (asked.id,))
    connection = sqlite3.connect(file)
    assert (
        connection.execute("SELECT id, parent, role, text FROM messages WHERE id <= ? ORDER BY id", (last,)).fetchall()
        == before
    )
    connection.close()
