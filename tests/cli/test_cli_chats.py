"""``tokamac chats``: list, show, export, import, delete and restore, for people and for programs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Result, Run
from tokamac.app.store.store import Store
from tokamac.app.store.values import Chat

HEAVY = {"mlx", "mlx.core", "numpy", "textual", "transformers", "huggingface_hub"}


@pytest.fixture(autouse=True)
def _own_chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKAMAC_DATA_DIR", str(tmp_path / "data"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def said(prompt: str, reply: str, model: str = "org/m") -> Chat:
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


def test_nothing_is_listed_where_nothing_was_said(tokamac: Run) -> None:
    assert "no chats yet" in tokamac("chats").out
    assert one(tokamac("chats", "--json")) == {"chats": []}


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
    assert all(" ".join(chat) == "id title created updated model" for chat in listed)


def test_show_prints_the_branch_that_is_read(tokamac: Run) -> None:
    chat = said("Why?", "Because\x1b[31m of **memory**.")
    done = tokamac("chats", "show", chat.id[:4])
    assert done == Result(0, "# Why?\n\n## You\n\nWhy?\n\n## org/m\n\nBecause\ufffd of **memory**.\n", "")
    shown = one(tokamac("chats", "show", "--json", chat.id))
    assert (shown["id"], shown["format"], len(shown["messages"])) == (chat.id, "tokamac-chat", 2)
    assert shown["messages"][1]["text"] == "Because\x1b[31m of **memory**."  # JSON escapes it


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


def test_a_system_message_of_another_programs_file_is_the_chats_own(tokamac: Run, tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Title\n\n## System\n\nBe brief.\n\n## User\n\nhi\n\n## Assistant\n\nhello\n")
    made = one(tokamac("chats", "import", tmp_path / "other.md", "--json"))
    with Store.open() as store:
        assert store.chat(made["id"]).settings == {"system": "Be brief."}
        assert [m.role for m in store.path(made["id"])] == ["user", "assistant"]


def test_what_was_deleted_is_listed_apart_and_restored(tokamac: Run) -> None:
    chat = said("about apples", "yes")
    assert f"tokamac chats restore {chat.id}" in tokamac("chats", "delete", chat.id).out
    assert one(tokamac("chats", "--json")) == {"chats": []}
    assert [each["id"] for each in one(tokamac("chats", "--deleted", "--json"))["chats"]] == [chat.id]
    assert one(tokamac("chats", "restore", chat.id, "--json"))["id"] == chat.id
    assert "about apples" in tokamac("chats").out
    assert "no chat was deleted" in tokamac("chats", "list", "--deleted").out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("eat", "'eat'"),
        ("show", "show needs an ID"),
        ("import", "import needs a FILE"),
        ("list abc", "takes neither"),
        ("show abc -o x.md", "--output has no effect with show"),
        ("export abc --deleted", "--deleted has no effect with export"),
        ("show abc def", "unrecognized"),
    ],
)
def test_wrong_usage(tokamac: Run, arguments: str, text: str) -> None:
    assert failed(tokamac("chats", *arguments.split()), 2, text)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [("show zzzz", "No chat has an id"), ("delete ../x", "is no id"), ("import none.md", "can't be read")],
)
def test_what_is_not_there_is_one_line(tokamac: Run, arguments: str, text: str) -> None:
    done = tokamac("chats", *arguments.split(), "--json")
    assert failed(done, 1, text)
    assert set(json.loads(done.out)) == {"event", "error", "hint"}


def test_help_has_examples(tokamac: Run) -> None:
    text = tokamac("chats", "--help").out
    assert "tokamac chats export k3v7 -o bandwidth.html" in text
    assert "TOKAMAC_DATA_DIR" in text


def test_list_and_export_of_text_import_nothing_heavy() -> None:
    chat = said("hi", "ho")
    code = "import sys; from tokamac.app import cli; "
    code += f"status = [cli.main(['chats']), cli.main(['chats', 'export', '{chat.id}'])]"
    code += f"; print({HEAVY} & set(sys.modules), status, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "set() [0, 0]\n"
