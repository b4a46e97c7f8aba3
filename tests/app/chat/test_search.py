"""Find again: words in messages and attached files, and their meaning by a tiny seeded embedding model of its own process."""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.widgets import Input, Static

from tests.app.plain.plain_chat import piped
from tests.engine.test_embedding import build
from tokamac.app import cli
from tokamac.app.backend import embedding_process  # noqa: F401  # before the plain chat's scripted engine takes the command's place
from tokamac.app.chat.listing import LARGE_PASSAGES, MeaningSearch, beside
from tokamac.app.models.local import embedding_model, embedding_models
from tokamac.app.store.passages import LONGEST, cut
from tokamac.app.store.store import Store
from tokamac.app.store.values import Attachment, Hit
from tokamac.app.tui.screens.chats import ChatsScreen
from tokamac.engine import Engine
from tokamac.engine.errors import ModelNotFoundError

NOTES = "decoding reads every weight for every token\n\n" * 40
TEXTS = ("why is decoding slow", "a boat on the lake", "the memory is too narrow")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKAMAC_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "data" / "chats" / "chats.db"


@pytest.fixture
def model(data: Path) -> Path:
    """The embedding model, where the app finds it."""
    build("qwen3", folder := data.parents[1] / "models" / "small-embedding")
    return folder


def fill(file: Path) -> list[int]:
    """Write three prompts in one chat, each a branch of its own, the first with a file and a picture; return their ids."""
    files = (Attachment("notes.md", NOTES), Attachment("boat.png", "aGVsbG8=", "picture"))
    with Store.open(file) as store:
        chat = store.new_chat().id
        return [store.add_message(chat, None, "user", text, attachments=files[: 2 * (not at)]).id
                for at, text in enumerate(TEXTS)]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("decoding", [("notes.md", 0), ("", 0)]), ("boat", [("", 1), ("boat.png", 0)]), ("every token", [("notes.md", 0)]),
        ("notes weight", [("notes.md", 0)]), (".md", [("notes.md", 0)]), ("aGVs", []), ("->", []),
    ],
)  # fmt: skip
def test_words_are_found_in_messages_and_files(data: Path, words: str, found: list[tuple[str, int]]) -> None:
    ids = fill(data)
    with Store.open(data) as store:
        hits = store.search(words)
        assert sorted((hit.file, hit.message) for hit in hits) == sorted((file, ids[at]) for file, at in found)
        for hit in hits:
            assert {hit.snippet[begin:end].lower() for begin, end in hit.marks} <= {*words.split(), words}
        store.repair_search()
        assert store.search(words) == hits


@given(st.text(st.sampled_from("ab .\n漢"), max_size=4 * LONGEST))
def test_passages_are_the_text(text: str) -> None:
    parts = list(cut(text))
    assert all(text[begin : begin + len(part)] == part and 0 < len(part) <= LONGEST for begin, part in parts)
    assert "".join("".join(part for _, part in parts).split()) == "".join(text.split())


def test_the_order_is_the_models_and_nothing_is_read_twice(data: Path, model: Path) -> None:
    fill(data)
    with Engine.load(model, prompt_cache=None) as engine:
        parts = [*TEXTS, *dict.fromkeys(part for _, part in cut(NOTES))]
        near = (
            engine.embed(parts, prompt="document", truncate=True).vectors
            @ engine.embed("slow memory", prompt="query").vectors[0]
        )
    best = [max(near[at] for at in each) for each in ([0], [1], [2], range(3, len(parts)))]
    search = MeaningSearch(data, embedding_model("", data.parent, model.parent))
    try:
        assert (search.price().passages, search.price().unread) == (len(parts), len(parts))
        told: list[tuple[int, int]] = []
        hits = search.find("slow memory", lambda *read: told.append(read))
        assert told == [(0, len(parts))]
        names = [*TEXTS, "notes.md"]
        assert [hit.file or hit.snippet for hit in hits] == [names[at] for at in np.argsort(-np.array(best))]
        assert [hit.likeness for hit in hits] == pytest.approx(sorted(map(float, best), reverse=True), abs=2e-3)
        assert search.price().unread == 0
        with Store.open(data) as store:  # the same words once more, in a fork
            store.fork(hits[0].chat, hits[0].message)
            assert search.find("slow memory", lambda *_: pytest.fail("it is read")) != []
            for chat in store.chats():
                store.delete(chat.id)
            assert search.find("slow memory", lambda *_: pytest.fail("it is read")) == []
            store.purge(-1)
    finally:
        search.close()
    with closing(sqlite3.connect(data)) as connection:
        assert connection.execute("SELECT count(*) FROM vectors").fetchone() == (0,)


def test_a_model_is_found_named_or_missed(data: Path, model: Path) -> None:
    (found,) = embedding_models(data.parent, (), model.parent)
    assert (found.model, found.nbytes > 0) == (str(model), True)
    assert embedding_model(str(model), data.parent, data.parent).path == model
    for wanted, says in (("", "no embedding model is here"), ("org/other", "org/other is not on this disk")):
        with pytest.raises(ModelNotFoundError, match=says) as caught:
            embedding_model(wanted, data.parent, data.parent)
        assert "tokamac models pull" in caught.value.hint


def test_the_command_prints_where_a_message_is(data: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, *_ = fill(data)

    def run(*arguments: str) -> tuple[int, str, str]:
        return cli.main(["chats", *arguments]), *capsys.readouterr()

    assert run("search", "--meaning", "slow")[2].startswith(f"{model.name} reads ")
    status, out, err = run("search", "--json", "--meaning", "slow")
    assert (status, err) == (0, "")
    hits = json.loads(out)["messages"]
    assert {hit["message"] for hit in hits if hit["file"]} == {first}
    assert all(-1 <= hit["likeness"] <= 1 for hit in hits)
    place = f"{hits[0]['chat']}:{first}"
    assert place in run("search", "notes")[1]
    assert TEXTS[0] in run("show", place)[1]
    assert run("show", f"{hits[0]['chat']}:99")[:2] == (1, "")
    assert run("list", "--meaning")[0] == 2


@pytest.mark.usefixtures("model")
def test_the_plain_chat_goes_to_the_message(data: Path) -> None:
    ids = fill(data)
    status, out, err = piped("/meaning\n/meaning slow\n/chats slow\n/open 2\n", "fast")
    assert status == 0
    assert "/meaning why is" in err
    assert "small-embedding reads" in err
    assert ", notes.md: " in out
    assert out.count(f":{ids[0]})") >= 3
    assert out.endswith(f"you (version 1 of 3): {TEXTS[0]}\nattached: notes.md\nattached: boat.png\n")


async def test_the_list_tells_the_price_first_and_goes_to_the_branch(
    chat: Callable[..., Any], model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "chats" / "chats.db"
    ids = fill(file)
    with Store.open(file) as store:
        name = store.chats()[0].id
        for number in range(LARGE_PASSAGES):
            store.add_message(name, ids[2], "user", f"number {number}")
    async with chat("fast", size=(120, 40)) as c:
        await c.ready()
        await c.send("/meaning")
        screen = await c.on(ChatsScreen)

        def says(text: str) -> bool:
            return text in str(screen.query_one("#state", Static).content)

        await c.until(lambda: says("Write what you look for"))
        screen.query_one(Input).value = "boat"
        await c.pilot.press("ctrl+g")
        await c.until(lambda: says(f"{model.name} reads"))
        await c.pilot.press("ctrl+g")
        await c.until(lambda: "by meaning" in c.screen_text() and not screen.workers, "hits by meaning")
        await c.pilot.press("down", "up", "enter")  # what was found by words stands above
        await c.until(lambda: c.transcript.selected is not None)
        assert [turn.prompt for turn in c.session.turns] == [TEXTS[0]]


def test_what_words_found_is_not_listed_again() -> None:
    hits = [Hit("c", "t", at, "user", 0.0, "s", (), 0, 1, file) for at, file in ((1, ""), (1, "a"), (2, ""))]
    assert beside(hits[:1], hits) == tuple(hits)
