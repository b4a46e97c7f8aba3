"""Short names of models: one row of the catalogue, one model on this disk, or the names that were meant."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tokamac.app.models.local import LocalModels, OnDisk, resolve
from tokamac.engine.errors import ModelNotFoundError

MLX = "mlx-community/"


def disk(*models: str) -> Callable[[], LocalModels]:
    return lambda: LocalModels(tuple(OnDisk(model, "cache", Path(model), 1) for model in models))


@pytest.mark.parametrize(
    ("written", "model"),
    [
        ("qwen3:8b", MLX + "Qwen3-8B-4bit"),
        ("Qwen3-8B-4bit", MLX + "Qwen3-8B-4bit"),
        ("llama3.2:3b", MLX + "Llama-3.2-3B-Instruct-4bit"),
        ("llama3.1:8b", MLX + "Meta-Llama-3.1-8B-Instruct-4bit"),
        ("phi4", MLX + "phi-4-4bit"),  # not phi-4-mini, which begins so
        ("qwen3-coder:30b", MLX + "Qwen3-Coder-30B-A3B-Instruct-4bit"),
        ("qwen3-next", MLX + "Qwen3-Next-80B-A3B-Instruct-4bit"),  # not Qwen3-Coder-Next of the same row
        ("gemma4:e2b", MLX + "gemma-4-e2b-it-4bit"),
        ("guide", "guide"),
        ("org/name", "org/name"),
        ("./mine", "./mine"),
    ],
)
def test_a_name_of_one_row_is_its_repository(written: str, model: str) -> None:
    assert resolve(written, disk()) == model


@pytest.mark.parametrize(
    ("written", "here", "model"),
    [
        ("llama3.2", (MLX + "Llama-3.2-3B-Instruct-4bit",), MLX + "Llama-3.2-3B-Instruct-4bit"),
        ("qwen3:8b", (MLX + "Qwen3-8B-8bit",), MLX + "Qwen3-8B-8bit"),  # rather than download another packing
        ("qwen3:8b-4bit", (MLX + "Qwen3-8B-8bit",), MLX + "Qwen3-8B-4bit"),
        ("phi4", (MLX + "phi-4-mini-instruct-4bit",), MLX + "phi-4-4bit"),
        ("mine", ("/home/me/Models/mine-4bit",), "/home/me/Models/mine-4bit"),
    ],
)
def test_what_is_on_this_disk_comes_first(written: str, here: tuple[str, ...], model: str) -> None:
    assert resolve(written, disk(*here)) == model


@pytest.mark.parametrize(
    ("written", "here", "listed"),
    [
        ("llama3.2", (), "matches several models: Llama-3.2-1B, Llama-3.2-3B"),
        ("qwen3:8b", (MLX + "Qwen3-8B-4bit", MLX + "Qwen3-8B-8bit"), f"{MLX}Qwen3-8B-4bit, {MLX}Qwen3-8B-8bit"),
        ("mine", ("/a/mine-4bit", "/b/mine-8bit"), "several models: /a/mine-4bit, /b/mine-8bit"),
        ("qwen3", (), "and 1 more"),
        ("qwen3.6:3b", (), "there is no model"),  # 3b is neither 35b nor a3b
        ("quen3:8b", (), "the nearest are Qwen3-8B"),
        ("lama", ("/a/llama-mine",), "llama-mine"),
    ],
)
def test_one_of_several_is_never_taken_in_silence(written: str, here: tuple[str, ...], listed: str) -> None:
    with pytest.raises(ModelNotFoundError) as raised:
        resolve(written, disk(*here))
    assert listed in raised.value.message
