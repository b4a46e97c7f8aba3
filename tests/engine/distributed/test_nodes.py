"""One model on two processes of this machine: the same as on one, and a clear end when one of them goes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from tests.engine.helpers import write_tokenizer
from tests.engine.kv.models import config_of, seeded
from tests.waiting import PATIENCE_S, until
from tokamac.engine.distributed.team import allowed_by
from tokamac.engine.model.loader import skeleton_model

ROOT = Path(__file__).parents[3]
SHAPE = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 272,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
KINDS = ("llama", "qwen3", "qwen3_moe")


def write(folder: Path, kind: str, bits: int | None = None) -> Path:
    """Write a tiny seeded model of this kind."""
    folder.mkdir()
    config: dict[str, Any] = {**config_of(kind), **SHAPE}
    model = seeded(skeleton_model(config, 4, unchecked=True))
    if bits is not None:
        nn.quantize(model, 32, bits)
        config["quantization"] = {"group_size": 32, "bits": bits}
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


class Rank0:
    """The process that tests drive."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.distributed.rank0"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, model: Path, split: str | None, do: str, **kv: Any) -> dict[str, Any]:
        self.process.stdin.write(json.dumps({"model": str(model), "split": split, "do": do, "kv": kv}) + "\n")
        self.process.stdin.flush()
        told: dict[str, Any] = json.loads(self.process.stdout.readline())
        return told


@contextmanager
def rank0() -> Iterator[Rank0]:
    driven = Rank0()
    try:
        yield driven
    finally:
        driven.process.kill()
        driven.process.wait()
        for stream in (driven.process.stdin, driven.process.stdout):
            stream.close()


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Rank0, Rank0]]:
    """One process alone, and one of two."""
    with rank0() as alone, rank0() as together:
        yield alone, together


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: write(folder / kind, kind) for kind in KINDS} | {"packed": write(folder / "packed", "llama", 4)}


def is_there(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for has ended, too."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


@pytest.mark.parametrize(
    ("kind", "split", "kv"),
    [
        ("llama", "tensor", {}),
        ("packed", "tensor", {"key_bits": 8, "value_bits": 4, "group_size": 32}),
        ("qwen3", "tensor", {"window": 48}),
        ("qwen3_moe", "tensor", {}),
        ("qwen3_moe", "pipeline", {"key_bits": 8, "value_bits": 8, "group_size": 32, "window": 48}),
    ],
)
def test_two_nodes_answer_as_one(
    both: tuple[Rank0, Rank0], models: dict[str, Path], kind: str, split: str, kv: dict[str, Any]
) -> None:
    alone, together = (
        each.ask(models[kind], how, "answer", **kv) for each, how in zip(both, (None, split), strict=True)
    )
    assert together["texts"] == alone["texts"]
    assert together["cached"] == alone["cached"]
    assert together["cached"][2] > 0
    np.testing.assert_allclose(together["rows"], alone["rows"], atol=2e-3)
    assert any("nodes hold the model" in note for note in together["notes"])
    assert together["weights"] < alone["weights"]
    assert together["stored"] == alone["stored"]  # of all of it


def test_a_reply_that_is_cancelled_leaves_both_in_step(both: tuple[Rank0, Rank0], models: dict[str, Path]) -> None:
    alone, together = (
        each.ask(models["llama"], how, "cancel") for each, how in zip(both, (None, "tensor"), strict=True)
    )
    assert together["reason"] == "cancelled"
    assert together["text"] == alone["text"]


def test_the_node_with_the_least_room_for_its_tokens_bounds_all() -> None:
    others = [{"room": 600, "token_bytes": 20}, {"room": 900, "token_bytes": 60}, {"said": "alive"}]
    assert allowed_by(others, 5000, 40) == 5000 + 15 * 40  # the second has room for 15 tokens
    assert allowed_by([{"room": -5, "token_bytes": 2}], 5000, 40) == 5000
    assert allowed_by([{}], 5000, 40) is None


def test_a_prompt_another_node_can_not_hold_is_refused(both: tuple[Rank0, Rank0], models: dict[str, Path]) -> None:
    _, together = both
    told = together.ask(models["llama"], "tensor", "bound")
    assert 0 < told["others"] <= 2 * told["own"]  # two processes of one machine
    assert "memory" in told["error"]
    assert "texts" in together.ask(models["llama"], "tensor", "answer")


def test_what_a_class_or_its_shape_forbids_is_refused(both: tuple[Rank0, Rank0], models: dict[str, Path]) -> None:
    _, together = both
    assert "llama can't give layers" in together.ask(models["llama"], "pipeline", "answer")["refused"]
    assert "texts" in together.ask(models["llama"], "tensor", "answer")  # and the next load is none the worse


@pytest.mark.parametrize("how", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.exhaustive), "stall"])
def test_a_node_that_goes_ends_in_one_error_and_no_process_stays(models: dict[str, Path], how: str) -> None:
    with rank0() as driven:
        told = driven.ask(models["llama"], "tensor", how)
        assert told["type"] == "DeviceError"
        assert "node" in told["error"]
        assert ("stalls" in told["error"]) == (how == "stall")
        again = driven.ask(models["llama"], "tensor", "answer")
        assert "can't go on" in again["refused"]  # MLX joins a group once for a process
        driven.process.stdin.close()
        driven.process.wait(PATIENCE_S)
        until(lambda: not is_there(told["pid"]))


def test_followers_end_with_rank_0(models: dict[str, Path]) -> None:
    with rank0() as driven:  # started again after those that went, all is well
        assert "texts" in driven.ask(models["llama"], "tensor", "answer")
        pids = driven.ask(models["llama"], "tensor", "wait")["pids"]
        assert len(pids) == 1
        assert all(map(is_there, pids))
        os.kill(driven.process.pid, signal.SIGKILL)
        until(lambda: not any(map(is_there, pids)))


def test_a_command_that_is_interrupted_leaves_nothing(models: dict[str, Path]) -> None:
    command = [sys.executable, "-m", "tokamac.app.cli", "ask", "Hello", "-m", str(models["llama"])]
    with subprocess.Popen(
        [
            *command,
            "--unchecked",
            "--nodes",
            "2",
            "--kv-window",
            "256",
            "--max-tokens",
            "20000",
        ],  # it doesn't end by itself
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as running:
        running.stdout.read(1)
        (child,) = children(running.pid)
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait(PATIENCE_S) == 130
        until(lambda: not is_there(child))  # one that did not leave in time was killed, which takes its own time


def children(pid: int) -> list[int]:
    """Return the processes that one has started."""
    found = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in found.splitlines()]
    return [child for child, parent in pairs if parent == pid and child_is_follower(child)]


def child_is_follower(pid: int) -> bool:
    shown = subprocess.run(["ps", "-o", "args=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return "distributed.follower" in shown
