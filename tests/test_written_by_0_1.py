"""What 0.1 wrote opens: settings, chats, and the prompt cache (tests/fixtures/v0_1/README.md says how they were made)."""

import datetime
import gzip
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokamac.app import settings
from tokamac.app.settings import Settings
from tokamac.app.store.export import parse, to_markdown
from tokamac.app.store.store import Store
from tokamac.engine import Engine, KVSpec, PromptCacheSpec, Sampling
from tokamac.engine.prompt_cache import cache, folder
from tokamac.engine.prompt_cache.disk import Segment, from_bytes
from tokamac.engine.prompt_cache.folder import Folder, Identity

WRITTEN = Path(__file__).parent / "fixtures" / "v0_1"
FINGERPRINT = "84711ea1a61682279f52ad2f2a0afce1"
# What the keys and values were computed by.
FACTS: dict[str, Any] = {
    "kv": {"key_bits": 16, "value_bits": 16, "group_size": 64, "window": None, "keep": 4},
    "more": {"device": "cpu", "dtype": "None", "unpacked": "False", "short_factors": "False"},
    "text": "e185b0786038d835e646dfee99f1485a",
    "versions": {"tokamac": "0.1.0", "mlx": "0.32.4", "mlx-lm": "0.32.2"},
    "weights": "92a48ed4d4269cf5d394b237cbdcc4a6",
}
WRITTEN_AT = datetime.datetime(2026, 11, 23, 14, tzinfo=datetime.UTC).timestamp()
GREEDY = Sampling(temperature=0.0, max_tokens=6)


def test_its_settings_hold_and_survive_a_change(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    shutil.copy(WRITTEN / "settings.toml", path)
    chosen = Settings(
        theme="nord", system="Answer in English.", panel=False, unload_after_min=7, titles="words", toured=True,
        sampling=Sampling(temperature=0.2, top_k=20, seed=7, max_tokens=24, stop=("END",)),
        kv=KVSpec(8, 4, window=2048, keep=64, on_full="roll"),
        system_prompts={"terse": "Be brief.", "Code review": 'Look for "bugs".\nSay where.\n'},
        keys={"explain": ("f8",), "new_chat": ("ctrl+n", "f9")},
    )  # fmt: skip
    assert settings.load(path) == settings.LoadedSettings(chosen)
    assert settings.change(path, chosen, replace(chosen, panel=True)) == ()
    assert settings.load(path) == settings.LoadedSettings(replace(chosen, panel=True))
    assert path.read_text() == (WRITTEN / "settings.toml").read_text().replace("panel = false\n", "")


@pytest.fixture
def chats(tmp_path: Path) -> Iterator[Store]:
    path = tmp_path / "chats.db"
    path.write_bytes(gzip.decompress((WRITTEN / "chats.db.gz").read_bytes()))
    with Store.open(path, clock=lambda: WRITTEN_AT) as store:
        yield store


def test_every_chat_reads_whole(chats: Store) -> None:
    chats.check()
    assert [chat.title for chat in chats.chats()] == ["What is a token? (fork)", "What is a token?", "Two phases"]
    assert [chat.title for chat in chats.chats(deleted=True)] == ["Delete me: what is MLX?"]
    assert {(chat.pinned_at, chat.folder) for chat in chats.chats()} == {(None, "")}
    phases, fork, deleted = chats.chats()[2], chats.chats()[0], chats.chats(deleted=True)[0]
    assert (phases.title_origin, phases.settings) == ("user", {"system": "Answer briefly."})
    assert [(each.text, each.parent) for each in chats.archive(phases.id).messages] == [
        ("What is prefill?", None),
        (
            "Prefill is the first phase of a reply: the model works through the whole prompt at once and fills the KV cache",
            1,
        ),
        (
            "Prefill is the first phase of a reply: the model works through the whole prompt at once and fills the KV cache",
            1,
        ),
        ("What is decode?", None),
        ("Decode is the second phase of a reply: the model makes one token a step, and each new token is fed", 4),
        ("What is the KV cache?", 5),
        ("Without a KV cache each step would recompute every earlier token. Over 14 decode steps that is 105 units", 6),
    ]
    asked = chats.path(phases.id)[2]
    assert [(file.name, file.text) for file in asked.attachments] == [
        ("notes.md", "# Notes\n\nThe cache holds keys and values.\nA second line: ünïcode, 表."),
        ("table.csv", "a,b\n1,2"),
    ]
    assert all(message.metrics for message in chats.path(fork.id) if message.role == "assistant")
    assert chats.path(fork.id)[2].text == "Several lines,\nwhat is a ring?"
    assert [hit.title for hit in chats.search("ring")] == ["What is a token? (fork)"]
    assert chats.undelete(deleted.id).deleted_at is None


def test_what_was_exported_is_imported_and_exported_as_the_conversation_alone(chats: Store) -> None:
    page = (WRITTEN / "two-phases.md").read_text()
    then = chats.archive(chats.chats()[2].id)
    read = parse(page, now=0.0)
    now = to_markdown(then)
    assert to_markdown(parse(page, now=0.0)) == now
    assert len(now) < len(page) / 2
    again = parse(now, now=0.0)
    assert [(each.text, each.attachments) for each in again.messages] == [
        (e.text, e.attachments) for e in read.messages
    ]
    assert all(message.metrics for message in read.messages if message.role == "assistant")
    assert [message.text for message in read.messages] == [message.text for message in chats.path(then.chat.id)]
    assert read.messages[2].attachments == chats.path(then.chat.id)[2].attachments


def test_a_prompt_that_it_computed_is_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the same model computes on the same kind of device; MLX's version is taken for the one of then."""
    known: list[Identity] = []

    def identity(*given: Any, **more: Any) -> Identity:
        known.append(made := folder.identity(*given, **more))
        return made

    monkeypatch.setattr(cache, "identity", identity)
    now = folder.metadata.version
    monkeypatch.setattr(folder.metadata, "version", lambda name: FACTS["versions"].get(name) or now(name))
    stored = tmp_path / "prompts"
    shutil.copytree(WRITTEN / "prompts", stored)
    tokens = [token for segment in segments(stored) for token in segment.tokens]
    assert len(tokens) == 16
    prompt = tokens + tokens[::-1] * 2
    with Engine.load("guide", prompt_cache=PromptCacheSpec(folder=stored)) as engine:
        last = list(engine.generate(prompt, GREEDY))[-1]
    with Engine.load("guide", prompt_cache=None) as engine:
        cold = list(engine.generate(prompt, GREEDY))[-1]
    assert last.text == cold.text
    differing = {name for name in FACTS if known[0].facts[name] != FACTS[name]}
    assert differing <= {"more", "text", "weights"}, (
        "another machine or another guide; nothing else may make it foreign"
    )
    assert (known[0].fingerprint == FINGERPRINT) == (not differing)
    assert last.metrics.cached_tokens == (0 if differing else len(tokens))
    assert len(segments(stored)) >= 2, "what is not used stays"


def test_prompts_of_the_first_format_are_computed_again_and_can_be_cleared(tmp_path: Path) -> None:
    stored = tmp_path / "prompts"
    shutil.copytree(WRITTEN / "prompts_format1", stored)
    (segment,) = segments(stored)
    prompt = segment.tokens + segment.tokens[::-1] * 5
    with Engine.load("guide", prompt_cache=PromptCacheSpec(folder=stored)) as engine:
        last = list(engine.generate(prompt, GREEDY))[-1]
    assert last.metrics.cached_tokens == 0
    assert Folder(stored).models()[-1].label == "guide"
    assert Folder(stored).clear() >= 50_208
    assert list(stored.glob("*/*.kv")) == []


def segments(root: Path) -> list[Segment]:
    """Read what is stored, in order of position, and check that it is whole."""
    stored = Folder(root)
    read = [stored.read(entry) for model in stored.models() for entry in stored.entries(model.fingerprint)]
    assert None not in read
    found = sorted((from_bytes(data) for data in read if data is not None), key=lambda each: each.start)
    for segment in found:
        assert len(segment.tokens) == 8
        assert {array.shape[2] for arrays in segment.piece for array in arrays} == {8}, "(batch, heads, tokens, dims)"
        assert all(np.isfinite(np.asarray(array)).all() for arrays in segment.piece for array in arrays)
    return found
