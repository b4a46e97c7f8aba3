"""``tokamac backup`` and ``restore``: all of it, nothing secret, nothing replaced, and no harm from a file that lies."""

import hashlib
import json
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import pytest

from tests.app.commands.conftest import Result, Run
from tokamac.app import settings
from tokamac.app.own_files import NAME, write
from tokamac.app.settings import Settings
from tokamac.app.store.store import Store
from tokamac.app.store.values import Archive, Attachment
from tokamac.engine.events import ToolCall

SECRET = "hunter2"
MINE = f"""
model = "org/m"  # {SECRET}
[system_prompts]
brief = "Answer briefly."
[tools]
allowed = ["read_file"]
folders = ["/"]
[mcp.hub]
command = "npx"
args = ["--token", "{SECRET}"]
env = {{ TOKEN = "{SECRET}" }}
[unknown]
key = "{SECRET}"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Move to another machine."""

    def move(name: str) -> Path:
        monkeypatch.setenv("TOKAMAC_DATA_DIR", str(tmp_path / name / "data"))
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / name / "config"))
        return tmp_path / name

    move("first")
    return move


def talk(store: Store, prompt: str) -> str:
    chat = store.new_chat(model="org/m", settings={"system": "Be brief."}).id
    asked = store.add_message(chat, None, "user", prompt, attachments=[Attachment("notes.md", "attached")])
    reply = store.begin_reply(chat, asked.id, model="org/m")
    store.finish_reply(reply.id, "yes", "hm", metrics={"ending": "stop"}, calls=(ToolCall("add", "{}", "1"),))
    store.add_message(chat, asked.id, "assistant", "another version")
    return chat


def filled() -> dict[str, Archive]:
    """Chats of every kind; return them by ID."""
    with Store.open() as store:
        one, two, gone = (talk(store, text) for text in ("one", "two", "deleted"))
        store.pin(one)
        store.move(one, "work")
        store.set_draft(two, "not sent")
        store.delete(gone)
    settings.default_path().parent.mkdir(parents=True)
    settings.default_path().write_text(MINE, encoding="utf-8")
    return stored()


def stored() -> dict[str, Archive]:
    with Store.open() as store:
        return {chat.id: store.archive(chat.id) for chat in store.chats()}


def said(archive: Archive) -> list[tuple[Any, ...]]:
    return [(m.role, m.text, m.thinking, m.created_at, m.attachments, m.calls, m.metrics) for m in archive.messages]


def result(done: Result) -> dict[str, Any]:
    assert (done.status, done.err) == (0, ""), done
    read: dict[str, Any] = json.loads(done.out)
    return read


def refused(done: Result, text: str) -> bool:
    return done.status == 1 and text in done.err and done.err.count("\n") == 1 and not done.out


def test_a_backup_brings_all_back_on_another_machine(tokamac: Run, home: Callable[[str], Path], tmp_path: Path) -> None:
    before, file = filled(), tmp_path / "b.zip"
    made = result(tokamac("backup", file, "--json"))
    assert (made["chats"], made["bytes"], file.stat().st_mode & 0o777) == (2, file.stat().st_size, 0o600)
    home("second")
    done = result(tokamac("restore", file, "--json"))
    assert done["chats"] == {"new": 2, "extended": 0, "same": 0, "deleted": 0}
    assert sorted(done["settings"]["taken"]) == ["model", "system_prompts.brief"]
    after = stored()
    assert {name: said(each) for name, each in after.items()} == {name: said(each) for name, each in before.items()}
    for name, each in before.items():
        for kept in ("title", "created_at", "updated_at", "model", "settings", "draft", "pinned_at", "folder"):
            assert getattr(after[name].chat, kept) == getattr(each.chat, kept), kept
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_prompts_and_memory_come_along_and_none_is_replaced(
    tokamac: Run, home: Callable[[str], Path], tmp_path: Path
) -> None:
    texts = {"prompts/review.md": "Review: $ARGUMENTS\n", "prompts/form.json": "{}\n", "memory.md": "- I use Linux\n",
             "memory/at%2Fwork.md": "- Be brief\n"}  # fmt: skip
    (own := settings.default_path().parent).mkdir(parents=True)
    for name, text in {**texts, "prompts/.hidden.md": "x", "prompts/x.txt": "x"}.items():
        write(own / name, text)
    tokamac("backup", tmp_path / "b.zip")
    home("second")
    other = settings.default_path().parent
    write(other / "memory.md", "- Mine\n")
    for taken in (sorted({*texts} - {"memory.md"}), []):
        done = result(tokamac("restore", tmp_path / "b.zip", "--json"))["settings"]
        assert (sorted(done["taken"]), done["kept"]) == (taken, ["memory.md"])
        assert {name: (other / name).read_text() for name in texts} == {**texts, "memory.md": "- Mine\n"}
    assert not (other / "prompts" / "x.txt").exists()
    for name in ("prompts/../x.md", "memory/.x.md", "prompts/a/b.md", "other.md", "/etc/x.md"):
        assert not NAME.fullmatch(name), name


def test_nothing_secret_is_in_a_backup(tokamac: Run, home: Callable[[str], Path], tmp_path: Path) -> None:
    filled()
    done = tokamac("backup", tmp_path / "b.zip")
    assert "left out: tokens, MCP servers, permissions of tools" in done.err
    with ZipFile(tmp_path / "b.zip") as archive:
        for name in archive.namelist():
            assert SECRET.encode() not in archive.read(name), name
            assert b"deleted" not in archive.read(name).replace(b"deleted_at", b""), (
                "what was deleted is not brought along"
            )


def test_restoring_again_changes_nothing(tokamac: Run, home: Callable[[str], Path], tmp_path: Path) -> None:
    filled()
    file = tmp_path / "b.zip"
    tokamac("backup", file)
    with Store.open() as store:
        first, second = (chat.id for chat in store.chats())
        store.add_message(first, store.chat(first).head, "user", "said since")
        store.delete(second)
    settings.save(
        settings.default_path(), Settings(model="mine", system_prompts={"brief": "Mine.", "long": "At length."})
    )
    before, text = stored(), settings.default_path().read_text(encoding="utf-8")
    for _ in range(2):
        done = result(tokamac("restore", file, "--json"))
        assert done["chats"] == {"new": 0, "extended": 0, "same": 2, "deleted": 1}
        assert done["settings"] == {"taken": [], "kept": ["model", "system_prompts.brief"]}
        assert (stored(), settings.default_path().read_text(encoding="utf-8")) == (before, text)


def test_a_chat_that_lost_its_end_gets_it_back(tokamac: Run, home: Callable[[str], Path], tmp_path: Path) -> None:
    with Store.open() as store:
        chat = talk(store, "one")
        shutil.copytree(store.file.parent, tmp_path / "earlier")
        store.add_message(chat, store.chat(chat).head, "user", "the end")
    tokamac("backup", tmp_path / "b.zip")
    shutil.rmtree(home("first") / "data" / "chats")
    shutil.copytree(tmp_path / "earlier", home("first") / "data" / "chats")
    assert result(tokamac("restore", tmp_path / "b.zip", "--json"))["chats"]["extended"] == 1
    with Store.open() as store:
        assert [message.text for message in store.path(chat)] == ["one", "another version", "the end"]


def test_no_file_is_replaced_and_a_full_disk_leaves_none(
    tokamac: Run, home: Callable[[str], Path], tmp_path: Path
) -> None:
    filled()
    (tmp_path / "taken.zip").write_text("mine")
    assert refused(tokamac("backup", tmp_path / "taken.zip"), "exists")
    assert (tmp_path / "taken.zip").read_text() == "mine"
    assert refused(tokamac("backup", tmp_path / "no folder" / "b.zip"), "can't be written: No such file")
    disk = tmp_path / "disk"
    disk.mkdir()
    script = 'mount -t tmpfs -o size=40k none "$1" || exit 77; "$2" -m tokamac.app.cli backup "$1/b.zip"; echo $?; ls -A "$1"'
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    command = ["unshare", "--mount", "sh", "-c", script, "sh", disk, sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("mounting is not permitted here")
    assert (done.stdout, done.stderr.count("\n")) == ("1\n", 1), done.stderr
    assert "disk is full" in done.stderr or "No space left" in done.stderr


# Files that are no backups, or lie.


@pytest.fixture
def members(tokamac: Run, home: Callable[[str], Path], tmp_path: Path) -> dict[str, bytes]:
    """The members of a good backup; the machine is another one by now, on which there is something already."""
    filled()
    tokamac("backup", tmp_path / "good.zip")
    home("second")
    with Store.open() as store:
        store.add_message(store.new_chat().id, None, "user", "here before")
    with ZipFile(tmp_path / "good.zip") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(path: Path, members: dict[str, bytes], *, honest: bool = True) -> Path:
    """Write a backup; honest: its manifest has the sums of what is in it."""
    if honest:
        manifest = json.loads(members["manifest.json"])
        for key, name in (("chats", "chats.db"), ("settings", "settings.toml")):
            data = members.get(name, b"")
            manifest[key] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        members = {**members, "manifest.json": json.dumps(manifest).encode()}
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def worked(*scripts: str) -> Callable[[dict[str, bytes], Path], dict[str, bytes]]:
    """Return what somebody makes of a backup who knows SQLite."""

    def work(members: dict[str, bytes], folder: Path) -> dict[str, bytes]:
        file = folder / "worked.db"
        file.write_bytes(members["chats.db"])
        for script in ("PRAGMA journal_mode = DELETE", *scripts):  # a changed schema is read anew
            with closing(sqlite3.connect(file)) as connection:
                connection.executescript(script)
        return {**members, "chats.db": file.read_bytes()}

    return work


def given(**changed: bytes) -> Callable[[dict[str, bytes], Path], dict[str, bytes]]:
    names = {"chats": "chats.db", "settings": "settings.toml", "manifest": "manifest.json", "other": "../../evil"}
    return lambda members, _: {**members, **{names[key]: data for key, data in changed.items()}}


VIEW = """
PRAGMA legacy_alter_table = ON;
ALTER TABLE messages RENAME TO hidden;
CREATE VIEW messages AS WITH RECURSIVE r (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r) SELECT hidden.* FROM hidden, r;
"""
COMPUTED = "ALTER TABLE messages ADD COLUMN more TEXT AS (hex(zeroblob(1000000000)))"
LOOSE = """
PRAGMA writable_schema = ON;
UPDATE sqlite_master SET sql = replace(sql, 'STRICT', '') WHERE name IN ('chats', 'messages');
DELETE FROM sqlite_master WHERE type = 'trigger';
"""
WRONG = "PRAGMA ignore_check_constraints = ON; UPDATE "


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (given(chats=b"not a database" * 999), "can't be used"),
        (lambda members, _: {**members, "chats.db": members["chats.db"][:9000]}, "can't be used"),
        (worked("PRAGMA application_id = 1"), "another program"), (worked("PRAGMA user_version = 99"), "newer tokamac"),
        (worked(VIEW), "can't be used"), (worked("DROP TABLE attachments"), "can't be used"),
        (worked(COMPUTED), "can't be used"), (worked(LOOSE, f"{WRONG} messages SET role = 'root'"), "is no backup"),
        (worked(LOOSE, f"{WRONG} messages SET text = x'00ff'"), "is no backup"),
        (worked(LOOSE, f"{WRONG} messages SET created_at = 'noon'"), "is no backup"),
        (worked(LOOSE, f"{WRONG} messages SET created_at = 1e300"), "is no backup"),
        (worked(LOOSE, f"{WRONG} messages SET metrics = '['"), "is no backup"),
        (worked(LOOSE, f"{WRONG} chats SET draft = x'00ff'"), "is no backup"),
        (worked(LOOSE, f"{WRONG} chats SET id = '../' || id"), ""), (given(settings=b"model = "), "is no backup"),
        (given(settings=b"\xff"), "is no backup"), (given(settings=b"a" * (5 << 20)), "too large"),
        (given(other=b"x"), "which no backup does"), (given(manifest=b"["), "is no backup"),
        (given(manifest=b'{"format": "other"}'), "tokamac-backup"),
        (given(manifest=b'{"format": "tokamac-backup", "version": 3}'), "Update tokamac"),
        (given(manifest=b" " * (1 << 20)), "too large"),
        (lambda members, _: {name: members[name] for name in ("manifest.json", "settings.toml")}, "missing"),
    ],
)  # fmt: skip
def test_a_damaged_or_foreign_backup_is_one_line(
    tokamac: Run, tmp_path: Path, members: dict[str, bytes], change: Callable[[dict[str, bytes], Path], Any], why: str
) -> None:
    before, changed = stored(), change(members, tmp_path)
    path = packed(tmp_path / "bad.zip", changed, honest=changed["manifest.json"] == members["manifest.json"])
    done = tokamac("restore", path)
    if why:
        assert refused(done, why), done
        assert stored() == before
        assert not settings.default_path().exists()
    else:
        assert done.status == 0, done
        assert all(len(name) == 8 for name in stored())
    assert not list(tmp_path.glob("**/evil"))
    assert not list(tmp_path.glob("**/.restore-*"))


def test_members_longer_than_they_say_are_not_read(tokamac: Run, tmp_path: Path, members: dict[str, bytes]) -> None:
    bomb = {**members, "chats.db": bytes(100 << 20)}  # 100 kB in the file
    assert refused(tokamac("restore", packed(tmp_path / "bomb.zip", bomb, honest=False)), "not what was backed up")
    manifest = json.loads(members["manifest.json"])
    manifest["chats"]["bytes"] = 1 << 60
    huge = {**members, "manifest.json": json.dumps(manifest).encode()}
    assert refused(tokamac("restore", packed(tmp_path / "huge.zip", huge, honest=False)), "are free")
    twice = packed(tmp_path / "twice.zip", members)
    with pytest.warns(UserWarning, match="Duplicate"), ZipFile(twice, "a") as archive:
        archive.writestr("settings.toml", b"")
    assert refused(tokamac("restore", twice), "there twice")


def test_a_changed_backup_is_refused_or_whole(tokamac: Run, tmp_path: Path, members: dict[str, bytes]) -> None:
    chance, good, here = random.Random(1), (tmp_path / "good.zip").read_bytes(), stored()
    for number in range(150):
        data = bytearray(good)
        for _ in range(chance.choice((1, 3))):
            data[chance.choice((chance.randrange(len(data)), -chance.randrange(1, 400)))] = chance.randrange(256)
        if number % 5 == 0:
            del data[chance.randrange(len(data)) :]
        (tmp_path / "bad.zip").write_bytes(data)
        done = tokamac("restore", tmp_path / "bad.zip")
        assert done.status == 0 or refused(done, "Nothing was restored") or refused(done, "Update tokamac"), done
        assert here.items() <= stored().items()


def test_a_backup_starts_no_program_and_lets_no_tool_in(
    tokamac: Run, tmp_path: Path, members: dict[str, bytes]
) -> None:
    path = packed(tmp_path / "worked.zip", {**members, "settings.toml": MINE.encode()})
    assert result(tokamac("restore", path, "--json"))["settings"]["taken"] == ["model", "system_prompts.brief"]
    read = settings.load(settings.default_path()).settings
    assert (read.mcp, read.tools) == ({}, Settings().tools)
