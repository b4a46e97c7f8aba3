"""Files that are broken: said in one line, never lost, and mended where they can be."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.store.test_store_crash import check_whole, writing
from tests.store.test_store_file import mode, write_some
from tokamac.app.store.store import Store
from tokamac.app.store.values import StoreDamagedError, StoreError


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
        assert process.stdout is not None
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
