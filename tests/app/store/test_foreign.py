"""Chats of other programs: their branches, thinking and pictures' names come along, once; what is hostile costs itself."""

import json
import sqlite3
import zipfile
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokamac.app.export import bring_all
from tokamac.app.store import foreign
from tokamac.app.store.store import Store
from tokamac.app.store.values import StoreError, pictures_of
from tokamac.engine.vision.picture import BYTES


def gpt(role: str, *parts: Any, kind: str = "text", **more: Any) -> dict[str, Any]:
    content = {"content_type": kind, "parts": list(parts)}
    return {"author": {"role": role}, "create_time": 1700000001.25, "content": content, "recipient": "all", **more}


def node(parent: str | None, message: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"parent": parent, "message": message}


PNG = b"\x89PNG\r\n\x1a\n of a sky"
DATA_URL = f"data:image/png;base64,{b64encode(PNG).decode()}"
HUGE = {"content_type": "image_asset_pointer", "asset_pointer": "sediment://file_huge"}
PICTURE = {"content_type": "image_asset_pointer", "asset_pointer": "file-service://file-abc"}
THOUGHTS = gpt("assistant") | {"content": {"content_type": "thoughts", "thoughts": [{"content": "Red scatters less."}]}}
CHATGPT = {
    "conversation_id": "c1", "title": "Sky\x1b", "create_time": 1700000000.5, "current_node": "b2",
    "mapping": {
        "root": node(None), "s": node("root", gpt("system", "", metadata={"is_visually_hidden_from_conversation": True})),
        "a": node("s", gpt("user", "Why red?", PICTURE, HUGE, kind="multimodal_text")), "t": node("a", THOUGHTS),
        "b1": node("t", gpt("assistant", "Dust.", metadata={"model_slug": "gpt-x"})), "b2": node("a", gpt("assistant", "Air.\0")),
        "call": node("b2", gpt("assistant", "search()", recipient="browser")), "tool": node("call", gpt("tool", "found")),
    },
}  # fmt: skip
CLAUDE = {
    "uuid": "u1", "name": "Sea", "created_at": "2024-05-01T10:00:00.5Z", "current_leaf_message_uuid": "m3",
    "chat_messages": [
        {"uuid": "m1", "sender": "human", "text": "Why blue?", "created_at": "2024-05-01T10:00:01Z",
         "files": [{"file_name": "a.png"}], "attachments": [{"extracted_content": "notes"}], "parent_message_uuid": "0000"},
        {"uuid": "m2", "sender": "assistant", "created_at": "2024-05-01T10:00:02Z", "parent_message_uuid": "m1",
         "content": [{"type": "thinking", "thinking": "Water."}, {"type": "text", "text": "It absorbs red."}, {"type": "x"}]},
        {"uuid": "m3", "sender": "assistant", "text": "Sky.", "created_at": "2024-05-01T10:00:03Z", "parent_message_uuid": "m1"},
    ],
}  # fmt: skip
WEBUI = {
    "id": "w1", "title": "Web", "created_at": 1700000000,
    "chat": {"params": {"system": "Be brief."}, "history": {"currentId": "2", "messages": {
        "1": {"parentId": None, "role": "user", "content": "Hi", "timestamp": 1.7e9,
              "files": [{"type": "image", "name": "picture", "url": DATA_URL}, {"type": "image", "url": DATA_URL[:-3] + "*"}]},
        "2": {"parentId": "1", "role": "assistant", "content": "Ho", "timestamp": 1700000002, "model": "llama"},
        "3": {"parentId": "1", "role": "assistant", "content": "Hum", "timestamp": 1700000003},
    }}},
}  # fmt: skip
STEP = {"type": "contentBlock", "content": [{"type": "text", "text": "Hm."}], "style": {"type": "thinking"}}
LM_STUDIO = {
    "name": "Studio", "createdAt": 1700000000123, "systemPrompt": "Rhyme.",
    "messages": [
        {"currentlySelected": 0, "versions": [{"type": "singleStep", "role": "user", "content": [
            {"type": "text", "text": "Sing"}, {"type": "file", "fileIdentifier": "x.png"}]}]},
        {"currentlySelected": 1, "versions": [
            {"type": "multiStep", "role": "assistant", "steps": [{"type": "contentBlock", "content": [{"text": "La"}]}]},
            {"role": "assistant", "steps": [STEP, {"content": [{"text": "Lo"}], "genInfo": {"identifier": "qwen"}}]},
        ]},
    ],
}  # fmt: skip


def ollama(path: Path) -> Path:
    with sqlite3.connect(path) as made:
        made.executescript(
            "CREATE TABLE chats (id TEXT PRIMARY KEY, title TEXT, created_at TIMESTAMP);"
            "CREATE TABLE messages (id INTEGER PRIMARY KEY, chat_id TEXT, role TEXT, content TEXT, thinking TEXT, model_name TEXT,"
            " created_at TIMESTAMP); INSERT INTO chats VALUES ('o', 'Oh', '2025-07-30 12:00:00.5 -0700 PDT m=+1');"
            "INSERT INTO messages VALUES (1, 'o', 'user', 'Hey', '', NULL, '2025-07-30 12:00:01+00:00'),"
            "(2, 'o', 'assistant', 'Yo', 'Short.', 'gemma', '2025-07-30 12:00:02+00:00'), (3, 'o', 'tool', 'x', '', '', '')"
        )
    made.close()
    return path


def zipped(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("export/conversations.json", json.dumps([CHATGPT]))
        made.writestr("../../evil.json", "{}")
        made.writestr("user-1/file-abc-sky.png", PNG)
        made.writestr("file_huge.dat", PNG + bytes(BYTES), zipfile.ZIP_DEFLATED)
    return path


def written(name: str, value: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_text(json.dumps(value))
        return folder if name.endswith(".conversation.json") else folder / name

    return write


FILES: dict[str, Callable[[Path], Path]] = {
    "ChatGPT": lambda folder: zipped(folder / "e.zip"), "Claude": written("c.json", [CLAUDE]),
    "Open WebUI": written("w.json", [WEBUI]), "LM Studio": written("1.conversation.json", LM_STUDIO),
    "Ollama": lambda folder: ollama(folder / "db.sqlite"),
}  # fmt: skip
# Of each: the title, what is said on the active path, and what more the tree holds.
EXPECTED = {
    "ChatGPT": (
        "Sky\x1b",
        ["Why red?\n\n[picture file_huge]", "Air.\ufffd"],
        {("Dust.", "Red scatters less.", "gpt-x")},
    ),
    "Claude": ("Sea", ["Why blue?\n\n[picture a.png]", "Sky."], {("It absorbs red.", "Water.", "")}),
    "Open WebUI": ("Web", ["Hi\n\n[picture picture]", "Ho"], {("Ho", "", "llama"), ("Hum", "", "")}),
    "LM Studio": ("Studio", ["Sing\n\n[picture x.png]", "Lo"], {("La", "", ""), ("Lo", "Hm.", "qwen")}),
    "Ollama": ("Oh", ["Hey", "Yo"], {("Yo", "Short.", "gemma")}),
}
SEEN = ("ChatGPT", "Open WebUI")


@pytest.mark.parametrize("program", FILES)
def test_chats_of_another_program_come_with_their_branches_and_once(tmp_path: Path, program: str) -> None:
    path, (title, said, held) = FILES[program](tmp_path), EXPECTED[program]
    with Store.open(tmp_path / "own" / "chats.db") as store:
        none, told = bring_all(store, path, now=0.0, dry_run=True)
        assert (none, "pictures: 1; pictures by name alone, not in it or unreadable: 1" in told) == (
            [],
            program in SEEN,
        )
        assert store.chats() == []
        (chat,), summary = bring_all(store, path, now=0.0)
        assert (chat.title, f"1 chats of {program}" in summary) == (title, True)
        assert [each.text for each in store.path(chat.id)] == said
        tree = store.archive(chat.id)
        seen = [each.data for message in tree.messages for each in pictures_of(message.attachments)]
        assert seen == ([PNG] if program in SEEN else [])
        assert held <= {(each.text, each.thinking, each.model) for each in tree.messages}
        assert all(each.created_at > 1.6e9 for each in tree.messages)
        again, summary = bring_all(store, path, now=1.0)
        assert (again, "0 new chats, 0 messages" in summary) == ([], True)
        assert store.archive(chat.id) == tree


def test_what_is_hostile_is_one_line_and_costs_itself_alone(tmp_path: Path) -> None:
    loop = {"conversation_id": "l", "mapping": {"a": node("b", gpt("user", "x")), "b": node("a", gpt("user", "y"))}}
    odd = [
        CHATGPT,
        7,
        None,
        {"mapping": 3},
        {"mapping": {"a": []}},
        {"mapping": {"a": node(None, {"content": "x"})}},
        loop,
    ]
    odd += [
        {"mapping": {"a": node(None, gpt("user", "x", create_time=10**400))}},
        {"mapping": {str(n): node(None) for n in range(20_001)}},
    ]
    found = foreign.read(written("odd.json", odd)(tmp_path))
    assert (len(found.archives), found.unread) == (1, 7)
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "broken.zip").write_bytes(b"PK\3\4 no archive")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as made:
        made.writestr("a.txt", "x")
    with sqlite3.connect(tmp_path / "endless.sqlite") as base:
        endless = "WITH RECURSIVE n (id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n) SELECT id, 1 AS title, 0 AS created_at FROM n"
        base.executescript(f"CREATE VIEW chats AS {endless} WHERE id < 0; CREATE TABLE messages (id, chat_id)")
    base.close()
    for name in ("deep.json", "broken.zip", "other.zip", "endless.sqlite"):
        with pytest.raises(StoreError) as refused:
            foreign.read(tmp_path / name, sql_s=0.2)
        assert "\n" not in refused.value.one_line()
