"""``tokamac chats``: list, show, search, export, import, delete, restore and repair, for people and for programs."""

import errno
import json
import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.app.commands.conftest import Result, Run
from tokamac.app.store import database
from tokamac.app.store.store import UNDO_S, Store
from tokamac.app.store.values import StoreDamagedError, StoredChat, refused

HEAVY = {"mlx", "mlx.core", "numpy", "textual", "transformers", "huggingface_hub"}


@pytest.fixture
def _own_chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKAMAC_DATA_DIR", str(tmp_path / "data"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def said(prompt: str, reply: str, model: str = "org/m") -> StoredChat:
    with Store.open() as store:
        chat = store.new_chat(model=model)
        asked = store.add_message(chat.id, None, "user", prompt)
        store.finish_reply(store.begin_reply(chat.id, asked.id, model=model).id, reply)
        return store.chat(chat.id)


def one(done: Result) -> dict[str, Any]:
    assert (done.status, done.err) == (0, "")
    (line,) = done.out.splitlines()
    read: dict[str, Any] = json.loads(line)
    return read


def failed(done: Result, status: int, text: str) -> bool:
    return done.status == status and text in done.err and done.err.count("\n") == 1


@pytest.mark.usefixtures("_own_chats")
def test_nothing_is_listed_where_nothing_was_said(tokamac: Run) -> None:
    assert "no chats yet" in tokamac("chats").out
    assert one(tokamac("chats", "--json")) == {"chats": []}


@pytest.mark.usefixtures("_own_chats")
def test_chats_are_listed_last_used_first_with_nothing_a_terminal_obeys(tokamac: Run) -> None:
    first, second = said("about apples", "yes"), said("\x1b[2J about pears", "no", "org/\x1b]0;x\x07m")
    head, *rows, _, number = tokamac("chats", "list").out.splitlines()
    assert head.split() == ["id", "last", "used", "model", "title"]
    assert [row.split()[0] for row in rows] == [second.id, first.id]
    assert "about apples" in rows[1]
    assert number == "2 chats"
    assert "\x1b" not in rows[0]
    listed = one(tokamac("chats", "--json"))["chats"]
    assert [chat["id"] for chat in listed] == [second.id, first.id]
    assert all(" ".join(chat) == "id title created updated model pinned folder" for chat in listed)


@pytest.mark.usefixtures("_own_chats")
def test_show_prints_the_branch_that_is_read(tokamac: Run) -> None:
    chat = said("Why?", "Because\x1b[31m of **memory**.")
    done = tokamac("chats", "show", chat.id[:4])
    assert done == Result(0, "# Why?\n\n## You\n\nWhy?\n\n## org/m\n\nBecause\ufffd of **memory**.\n", "")
    shown = one(tokamac("chats", "show", "--json", chat.id))
    assert (shown["id"], shown["format"], len(shown["messages"])) == (chat.id, "tokamac-chat", 2)
    assert shown["messages"][1]["text"] == "Because\x1b[31m of **memory**."  # JSON escapes it


@pytest.mark.usefixtures("_own_chats")
@pytest.mark.parametrize("suffix", ["md", "json"])
def test_export_and_import_are_a_round_trip(tokamac: Run, tmp_path: Path, suffix: str) -> None:
    chat = said("Why?", "Because.\n\n```\ncode\n```")
    file = tmp_path / f"out.{suffix}"
    assert one(tokamac("chats", "export", chat.id, "-o", file, "--json"))["path"] == str(file)
    made = one(tokamac("chats", "import", file, "--json"))
    assert made["id"] != chat.id
    with Store.open() as store:
        assert [(m.role, m.text) for m in store.path(made["id"])] == [(m.role, m.text) for m in store.path(chat.id)]
        assert store.chat(made["id"]).title == chat.title


@pytest.mark.usefixtures("_own_chats")
def test_export_without_a_name_takes_the_title_and_replaces_nothing(tokamac: Run, tmp_path: Path) -> None:
    chat = said("Keys & values", "ok")
    for name in ("keys-values.md", "keys-values-2.md"):
        assert tokamac("chats", "export", chat.id).out.endswith(f"/{name}\n")
    before = (tmp_path / "here" / "keys-values.md").read_text()
    assert failed(tokamac("chats", "export", chat.id, "-o", "keys-values.md"), 1, "exists")
    assert (tmp_path / "here" / "keys-values.md").read_text() == before
    assert (tmp_path / "here" / "keys-values.md").stat().st_mode & 0o777 == 0o600
    for suffix, begins in (("html", "<!DOCTYPE html>"), ("svg", "<svg")):
        assert tokamac("chats", "export", chat.id, "-o", f"page.{suffix}").status == 0
        assert (tmp_path / "here" / f"page.{suffix}").read_text().startswith(begins)
    assert failed(tokamac("chats", "export", chat.id, "-o", "page.pdf"), 1, "names no format")


@pytest.mark.usefixtures("_own_chats")
def test_what_was_deleted_is_listed_apart_and_restored(tokamac: Run) -> None:
    chat = said("about apples", "yes")
    assert f"tokamac chats restore {chat.id}" in tokamac("chats", "delete", chat.id).out
    assert one(tokamac("chats", "--json")) == {"chats": []}
    assert [each["id"] for each in one(tokamac("chats", "--deleted", "--json"))["chats"]] == [chat.id]
    assert one(tokamac("chats", "restore", chat.id, "--json"))["id"] == chat.id
    assert "about apples" in tokamac("chats").out
    assert "no deleted chats" in tokamac("chats", "list", "--deleted").out


@pytest.mark.usefixtures("_own_chats")
def test_repair_makes_a_broken_index_anew(tokamac: Run, tmp_path: Path) -> None:
    said("about apples", "yes")
    file = tmp_path / "data" / "chats" / "chats.db"
    assert tokamac("chats", "repair") == Result(0, f"{file} is intact; its search index is rebuilt: 2 messages\n", "")
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute("UPDATE search_data SET block = x'ffffffffffffffffffff' WHERE id = 10")
    with Store.open() as store, pytest.raises(StoreDamagedError):
        store.search("apples")
    assert one(tokamac("chats", "repair", "--json")) == {"path": str(file), "messages": 2}
    with Store.open() as store:
        assert [hit.snippet for hit in store.search("apples")] == ["about apples"]


@pytest.mark.usefixtures("_own_chats")
def test_repair_of_what_is_no_store_is_one_line_and_leaves_it(tokamac: Run, tmp_path: Path) -> None:
    file = tmp_path / "data" / "chats" / "chats.db"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"somebody's own" * 1000)
    done = tokamac("chats", "repair", "--json")
    assert failed(done, 1, "is damaged")
    assert "`tokamac chats repair --set-aside`" in json.loads(done.out)["hint"]
    assert file.read_bytes() == b"somebody's own" * 1000


@pytest.mark.usefixtures("_own_chats")
def test_what_is_beyond_repair_is_set_aside_when_asked_and_a_new_file_is_begun(tokamac: Run, tmp_path: Path) -> None:
    file = tmp_path / "data" / "chats" / "chats.db"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"somebody's own" * 1000)
    done = one(tokamac("chats", "repair", "--set-aside", "--json"))
    kept = Path(done["set_aside"])
    assert done == {"path": str(file), "set_aside": str(kept)}
    assert not file.exists()
    assert kept.read_bytes() == b"somebody's own" * 1000
    said("about apples", "yes")
    file.write_bytes(b"broken again")
    second = tokamac("chats", "repair", "--set-aside")
    assert (second.status, second.err) == (0, "")
    assert f"set aside, unchanged, as {tmp_path}" in second.out
    assert (kept.exists(), len(list(file.parent.rglob("chats.db")))) == (True, 2)


@pytest.mark.usefixtures("_own_chats")
def test_a_file_that_can_be_mended_is_not_set_aside(tokamac: Run, tmp_path: Path) -> None:
    chat = said("about apples", "yes")
    file = tmp_path / "data" / "chats" / "chats.db"
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute("UPDATE search_data SET block = x'ffffffffffffffffffff' WHERE id = 10")
    assert one(tokamac("chats", "repair", "--set-aside", "--json")) == {"path": str(file), "messages": 2}
    with Store.open() as store:
        assert [each.id for each in store.chats()] == [chat.id]
    assert list(file.parent.glob("set-aside*")) == []


@pytest.mark.usefixtures("_own_chats")
@pytest.mark.parametrize("action", ["delete", "restore", "import", "list"])
def test_what_was_deleted_long_ago_is_removed_by_what_writes(tokamac: Run, tmp_path: Path, action: str) -> None:
    with Store.open(clock=lambda: time.time() - UNDO_S - 60) as store:
        old = store.new_chat()
        store.add_message(old.id, None, "user", "about apples")
        store.delete(old.id)
    other = said("about pears", "no")
    (tmp_path / "chat.md").write_text("# Title\n\n## User\n\nhi\n\n## Assistant\n\nhello\n")
    target = {"import": [tmp_path / "chat.md"], "list": []}.get(action, [other.id])
    done = tokamac("chats", action, *target)
    assert (done.status, done.err) == (0, "")
    with Store.open() as store:
        assert (store.known(old.id) is None) == (action != "list")
        assert store.known(other.id) is not None


@pytest.mark.usefixtures("_own_chats")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("eat", "'eat'"), ("show", "show needs an ID"), ("import", "import needs a FILE"),
        ("list abc", "takes neither"), ("repair abc", "takes neither"),
        ("show abc -o x.md", "--output has no effect with show"),
        ("export abc --deleted", "--deleted has no effect with export"),
        ("list --set-aside", "--set-aside has no effect with list"),
        ("delete abc --set-aside", "--set-aside has no effect with delete"), ("show abc def", "unrecognized"),
    ],
)  # fmt: skip
def test_wrong_usage(tokamac: Run, arguments: str, text: str) -> None:
    assert failed(tokamac("chats", *arguments.split()), 2, text)


@pytest.mark.usefixtures("_own_chats")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [("show zzzz", "No chat has an id"), ("delete ../x", "is no id"), ("import none.md", "can't be read")],
)
def test_what_is_not_there_is_one_line(tokamac: Run, arguments: str, text: str) -> None:
    done = tokamac("chats", *arguments.split(), "--json")
    assert failed(done, 1, text)
    assert set(json.loads(done.out)) == {"event", "error", "hint"}


@pytest.mark.usefixtures("_own_chats")
def test_list_and_export_of_text_import_nothing_heavy() -> None:
    chat = said("hi", "ho")
    code = "import sys; from tokamac.app import cli; "
    code += f"status = [cli.main(['chats']), cli.main(['chats', 'export', '{chat.id}'])]"
    code += f"; print({HEAVY} & set(sys.modules), status, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "set() [0, 0]\n"


def refuse_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the file be refused for writing, as on a disk that may only be read."""

    def refuse(path: Path) -> None:
        raise refused(path, OSError(errno.EROFS, os.strerror(errno.EROFS)))

    monkeypatch.setattr(database, "prepare", refuse)


@pytest.mark.usefixtures("_own_chats")
def test_on_a_disk_that_may_not_be_written_chats_are_listed_searched_shown_and_exported(
    tokamac: Run, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = said("Why is decode slow?", "Because of bandwidth.")
    asked = (("list",), ("search", "bandwidth"), ("show", chat.id))
    before = [tokamac("chats", *each).out for each in asked]
    kept = data.read_bytes()
    refuse_writes(monkeypatch)
    for each, out in zip(asked, before, strict=True):
        done = tokamac("chats", *each)
        assert (done.status, done.out) == (0, out)
        assert done.err == f"note: The chats in {data} can't be used: Read-only file system; reading without writing\n"
    assert tokamac("chats", "export", chat.id, "-o", tmp_path / "out.md").status == 0
    assert data.read_bytes() == kept
    refusal = tokamac("chats", "delete", chat.id)
    assert refusal.status == 1
    assert "Read-only file system" in refusal.err


@pytest.mark.usefixtures("_own_chats")
def test_the_first_refusal_is_told_where_nothing_is_read(
    tokamac: Run, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_writes(monkeypatch)
    done = tokamac("chats")
    assert done.status == 1
    assert "Read-only file system" in done.err
    assert not data.exists()


# `tokamac chats search`, and what is said where a chat or a file is not there.


@pytest.fixture
def _own_data(data: Path) -> None:
    """The chats are the test's own."""


def said_chats_search(prompt: str, reply: str, title: str = "") -> str:
    with Store.open() as store:
        chat = store.new_chat(model="org/m")
        asked = store.add_message(chat.id, None, "user", prompt)
        store.finish_reply(store.begin_reply(chat.id, asked.id, model="org/m").id, reply)
        if title:
            store.rename(chat.id, title)
        return chat.id


def found(tokamac: Run, *words: str) -> dict[str, Any]:
    done = tokamac("chats", "search", *words, "--json")
    assert (done.status, done.err) == (0, "")
    result: dict[str, Any] = json.loads(done.out)
    return result


@pytest.mark.usefixtures("_own_data")
def test_messages_and_titles_that_hold_all_the_words_are_found(tokamac: Run) -> None:
    memory = said_chats_search("Why is it slow?", "Memory is slow,\nand bandwidth \x1b[31mis the limit.", "Speed")
    said_chats_search("And apples?", "Memory of apples.")
    titled = said_chats_search("Hm?", "Yes.", "Bandwidth of memory")
    read = found(tokamac, "memory", "bandwidth")
    (message,) = read["messages"]
    assert [chat["id"] for chat in read["chats"]] == [titled]
    assert (message["chat"], message["title"], message["role"]) == (memory, "Speed", "assistant")
    assert [message["text"][begin:end].lower() for begin, end in message["marks"]] == ["memory", "bandwidth"]
    head, title, line, _, number = tokamac("chats", "search", "memory bandwidth").out.splitlines()
    assert head.split() == ["id", "when", "where", "text"]
    assert title.startswith(titled)
    assert title.endswith("title      Bandwidth of memory")
    assert line.startswith(memory)
    assert "assistant  Memory is slow, and bandwidth \ufffdis the limit." in line
    assert number.startswith("2 places;")


@pytest.mark.usefixtures("_own_data")
def test_nothing_found_is_no_failure(tokamac: Run) -> None:
    said_chats_search("Why?", "Because.")
    assert found(tokamac, "nothing") == {"chats": [], "messages": []}
    assert tokamac("chats", "search", "nothing").out == "nothing was found\n"


@pytest.mark.usefixtures("_own_data")
@pytest.mark.parametrize("words", [(), ("",), (" ", " ")])
def test_a_search_needs_words(tokamac: Run, words: tuple[str, ...]) -> None:
    done = tokamac("chats", "search", *words)
    assert (done.status, done.out) == (2, "")
    assert "search needs WORDS" in done.err


@pytest.mark.usefixtures("_own_data")
@pytest.mark.parametrize(
    ("action", "lists"),
    [
        ("show", "tokamac chats"),
        ("export", "tokamac chats"),
        ("delete", "tokamac chats"),
        ("restore", "tokamac chats list --deleted"),
    ],
)
def test_an_id_of_no_chat_says_which_command_shows_them(tokamac: Run, action: str, lists: str) -> None:
    done = tokamac("chats", action, "zzz")
    assert done.status == 1
    assert done.err == f"tokamac: No chat has an id that begins with zzz. `{lists}` lists them.\n"
    assert tokamac(*lists.split()[1:]).status == 0


@pytest.mark.usefixtures("_own_data")
def test_a_file_that_is_not_there_says_what_to_check(tokamac: Run, tmp_path: Path) -> None:
    done = tokamac("chats", "import", tmp_path / "nope")
    said = f"tokamac: {tmp_path}/nope can't be read: No such file or directory. Check the path and its permissions.\n"
    assert (done.status, done.err) == (1, said)
