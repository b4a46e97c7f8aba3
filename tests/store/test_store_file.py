"""The file: who may read it, its versions, and what happens when it is not what it should be."""

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tokamac.app.store import database
from tokamac.app.store.database import APPLICATION_ID, STEPS, Database
from tokamac.app.store.store import Store
from tokamac.app.store.values import StoreError

VERSION_1 = Path(__file__).parent / "version1.sql"
"""Every statement that made version 1, and a chat in it: what is in the hands of users never changes."""


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


def test_the_place_is_the_users_data_folder_or_the_one_that_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_a_file_that_another_process_makes_meanwhile_is_ours(
    file: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
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
