"""Whose keys and values are whose: every byte of the weights counts, whatever they are read from."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.tiny import make_tiny
from tokamac.engine import Engine, Finished, PromptCacheSpec, Sampling
from tokamac.engine.prompt_cache import folder
from tokamac.engine.prompt_cache.folder import FILE, digest, identify

PROMPT = [int(token) for token in np.random.default_rng(5).integers(10, 200, 400)]


def edit_unseen(file: Path) -> None:
    """Change bytes in the middle of a file, keep its size and the time that programs may set."""
    at = file.stat()
    with file.open("r+b") as opened:
        opened.seek(at.st_size * 3 // 5)
        data = opened.read(400)
        opened.seek(at.st_size * 3 // 5)
        opened.write(bytes(byte ^ 1 for byte in data))
    os.utime(file, ns=(at.st_atime_ns, at.st_mtime_ns))


def answer(model: Path, root: Path) -> Finished:
    with Engine.load(model, prompt_cache=PromptCacheSpec(folder=root)) as engine:
        *_, last = engine.generate(PROMPT, Sampling(temperature=0, max_tokens=4))
        assert isinstance(last, Finished)
        return last


@pytest.mark.usefixtures("all_worth_storing")
def test_a_model_that_differs_in_a_few_bytes_is_another_model(tmp_path: Path) -> None:
    model, other, root = make_tiny(tmp_path / "model"), tmp_path / "other", tmp_path / "prompts"
    shutil.copytree(model, other)
    edit_unseen(other / "model.safetensors")
    assert answer(model, root).metrics.cached_tokens == 0
    assert answer(model, root).metrics.cached_tokens > 250
    assert answer(other, root).metrics.cached_tokens == 0


@pytest.mark.usefixtures("all_worth_storing")
def test_weights_that_are_edited_in_place_are_another_model(tmp_path: Path) -> None:
    model, root = make_tiny(tmp_path / "model"), tmp_path / "prompts"
    answer(model, root)
    edit_unseen(model / "model.safetensors")
    assert answer(model, root).metrics.cached_tokens == 0


def test_a_file_is_read_once_and_one_of_the_hub_never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, file = tmp_path / "root", tmp_path / "a.safetensors"
    file.write_bytes(b"weights")
    first = digest([file], root)
    blob = tmp_path / "blobs" / ("ab" * 32)
    blob.parent.mkdir()
    blob.write_bytes(b"weights")
    link = tmp_path / "b.safetensors"
    link.symlink_to(blob)
    monkeypatch.setattr(folder, "_read", lambda _: pytest.fail("read again"))
    assert digest([file], root) == first
    assert digest([link], root) == digest([link], tmp_path / "nowhere")


def test_the_names_and_the_number_of_files_count(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"same")
    a, b = tmp_path / "a", tmp_path / "b"
    assert len({digest(files, tmp_path / "root") for files in ([a], [b], [a, b], [])}) == 4


@pytest.mark.parametrize("damage", ["[]", "{", '{"1 2": 3}', "\x00"])
def test_a_damaged_memory_of_digests_is_none(tmp_path: Path, damage: str) -> None:
    file, root = tmp_path / "a.safetensors", tmp_path / "root"
    file.write_bytes(b"weights")
    right = digest([file], root)
    (root / FILE).write_text(damage)
    assert digest([file], root) == right
    assert (root / FILE).read_text() != damage


def test_large_files_are_read_beside_and_a_folder_that_can_not_be_written_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "root").write_text("a file where a folder should be")
    monkeypatch.setattr(folder, "AT_ONCE_BYTES", 3)
    told: list[str] = []
    thread = identify(tmp_path, tmp_path / "root", told.append)
    assert thread is not None
    thread.join(30)
    assert told == [digest([tmp_path / "model.safetensors"], tmp_path / "other")]


@pytest.mark.usefixtures("all_worth_storing")
def test_until_its_weights_are_known_nothing_of_a_model_is_stored_and_then_all_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    model, root, go = make_tiny(tmp_path / "model"), tmp_path / "prompts", threading.Event()
    read = folder._read

    def slow(file: Path) -> str:
        assert go.wait(60)
        return read(file)

    monkeypatch.setattr(folder, "AT_ONCE_BYTES", 3)
    monkeypatch.setattr(folder, "_read", slow)
    with Engine.load(model, prompt_cache=PromptCacheSpec(folder=root)) as engine:
        list(engine.generate(PROMPT, Sampling(temperature=0, max_tokens=4)))
        assert not list(root.rglob("*.kv"))
        go.set()
        for thread in threading.enumerate():
            if thread.name == "tokamac-weights":
                thread.join(30)
    assert list(root.rglob("*.kv"))
    assert answer(model, root).metrics.cached_tokens > 250
