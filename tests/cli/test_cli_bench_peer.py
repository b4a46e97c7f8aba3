"""`tokamac bench --compare mlx-lm`: the real mlx-lm on tiny models, and what happens when its process fails."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.tiny import make_tiny
from tokamac.app.commands.bench_runs import measure, points
from tokamac.app.commands.peer import PeerError, PeerProcess, PeerRun, check_memory, run_from_times
from tokamac.engine import Engine, Sampling
from tokamac.engine.events import Event

Start = Callable[..., "subprocess.Popen[str]"]
READY = 'import sys; print(\'{"ready": {"version": "1"}}\', flush=True); sys.stdin.readline(); '


def running(folder: Path) -> list[str]:
    """Return the processes of mlx-lm that hold this folder."""
    listed = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,args="], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if "peer_child" in line and str(folder) in line]


def gone(folder: Path) -> bool:
    end = time.monotonic() + 20
    while running(folder) and time.monotonic() < end:
        time.sleep(0.1)
    return not running(folder)


def test_both_answer_every_prompt_and_ratios_are_of_pairs(tokamac: Run, tiny: Path) -> None:
    flags = (
        "bench",
        tiny,
        "--prompt",
        "40",
        "--depth",
        "90",
        "--max-tokens",
        "6",
        "--runs",
        "3",
        "--compare",
        "mlx-lm",
    )
    done = tokamac(*flags, "--json")
    assert done.status == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    assert found["peer"] == found["sweep"][0]["peer"]
    for row, tokens in zip(found["sweep"], (40, 90), strict=True):
        peer = row["peer"]
        assert list(peer) == ["name", "version", "median", "ratio", "runs"]
        assert (peer["name"], peer["version"]) == ("mlx-lm", metadata.version("mlx-lm"))
        assert peer["median"].keys() == peer["ratio"].keys() == {"ttft_s", "prefill_tps", "decode_tps"}
        for side in (row["runs"], peer["runs"]):
            assert [(run["prompt_tokens"], run["generated_tokens"]) for run in side] == [(tokens, 6)] * 3
        pairs = sorted(
            ours["decode_tps"] / theirs["decode_tps"] for ours, theirs in zip(row["runs"], peer["runs"], strict=True)
        )
        assert peer["ratio"]["decode_tps"] == {"median": pairs[1], "min": pairs[0], "max": pairs[2]}
    assert gone(tiny)


def test_for_people_the_peer_has_a_table_of_its_own_and_a_place_in_the_picture(tokamac: Run, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "ends")
    config = json.loads((folder / "config.json").read_text())
    ends = {"eos_token_id": list(range(config["vocab_size"]))}  # every token is an end mark, and none is obeyed
    (folder / "config.json").write_text(json.dumps({**config, **ends}))
    (folder / "generation_config.json").write_text(json.dumps(ends))
    flags = ("--prompt", "40", "--max-tokens", "4", "--runs", "2", "--compare", "mlx-lm", "--plot", tmp_path / "p.svg")
    done = tokamac("bench", folder, *flags)
    assert done.status == 0, done.err
    assert "40 prompt tokens, 4 new" in done.out
    table = done.out.split("\n\n")[1].splitlines()
    title = f"mlx-lm {metadata.version('mlx-lm')}"
    assert table[0].startswith(title)
    assert table[1].startswith("prompt 40")
    assert "ours ÷ its" in table[2]
    assert title in (tmp_path / "p.svg").read_text()
    assert f"{title}: decode" in done.err


def test_who_begins_changes_every_round(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []

    class Scripted:
        title = "scripted"

        def reply(self, ids: Sequence[int], new: int) -> PeerRun:
            turns.append("peer")
            return run_from_times(len(ids), 0.0, [float(i + 1) for i in range(new)], None)

    with Engine.load(tiny, prompt_cache=None) as engine:
        answer = engine.generate

        def generate(prompt: list[int], sampling: Sampling, **_: object) -> Iterator[Event]:
            turns.append("engine")
            return answer(prompt, sampling)

        monkeypatch.setattr(engine, "generate", generate)
        (found,) = measure(engine, points((20,), ()), 4, Sampling(temperature=0, max_tokens=3), Scripted())
    assert turns[2:] == ["engine", "peer", "peer", "engine"] * 2  # after a warm-up of each
    assert sorted(turns[:2]) == ["engine", "peer"]
    assert [len(found.runs), len(found.peer_runs)] == [4, 4]


def test_the_peers_rates_are_the_products_worked_by_hand() -> None:
    # 12 prompt tokens; asked at 10 s, tokens at 13, 14 and 17 s.
    run = run_from_times(12, 10.0, [13.0, 14.0, 17.0], 7)
    assert run == PeerRun(12, 3, ttft_s=3.0, prefill_tps=4.0, decode_tps=0.5, peak_memory_bytes=7)
    assert run_from_times(12, 10.0, [13.0], None).decode_tps is None


def test_a_model_that_mlx_lm_refuses_is_one_line_and_its_code_is_not_run(tokamac: Run, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "coded")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "own.py"}))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    done = tokamac("bench", folder, "--prompt", "20", "--max-tokens", "2", "--compare", "mlx-lm")
    assert (done.status, done.out) == (1, "")
    last = done.err.splitlines()[-1]
    assert last.startswith("tokamac: mlx-lm failed: ValueError")
    assert last.endswith("Run without --compare to measure the engine alone.")
    assert "Traceback" not in done.err
    assert not (tmp_path / "ran").exists()


def test_a_process_that_is_killed_is_one_clear_error(tiny: Path) -> None:
    with PeerProcess(tiny) as peer:
        assert peer.reply([1, 2, 3], 2).generated_tokens == 2
        (line,) = running(tiny)
        os.kill(int(line.split()[0]), signal.SIGKILL)
        with pytest.raises(PeerError, match="was killed by SIGKILL"):
            peer.reply([1, 2, 3], 2)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("raise SystemExit('first\\nlast \\x1b[31mwords')", "ended with status 1: last "),
        ("print('hello')", "not JSON"),
        ("print('[]')", "no object"),
        ("print('{}')", "which version"),
        ('print(\'{"error": "no \\\\u001b[2Jroom"}\')', "mlx-lm failed: no "),
        (READY + "print('{}')", "without time stamps"),
        (READY + 'print(\'{"began_s": 0, "token_times_s": [1], "peak_memory_bytes": null}\')', "1 of 2 tokens"),
    ],
)
def test_whatever_the_process_answers_is_one_clear_error(script: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(PeerError) as caught, PeerProcess(tmp_path, [sys.executable, "-c", script]) as peer:
        peer.reply([1], 2)
    assert said in caught.value.message
    assert caught.value.message.isprintable()
    assert caught.value.hint


def test_a_process_that_does_not_leave_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokamac.app.commands.peer.GRACE_S", 0.2)
    script = READY + "import time; time.sleep(600)"
    peer = PeerProcess(tmp_path, [sys.executable, "-c", script, "peer_child"])
    assert running(Path("time.sleep(600)"))
    peer.close()
    assert gone(Path("time.sleep(600)"))


def test_weights_that_do_not_fit_twice_are_refused_with_the_numbers() -> None:
    check_memory(held=40, wanted=24, budget=64)
    check_memory(held=40, wanted=25, budget=None)
    with pytest.raises(PeerError, match=r"40.0 GB are held here, mlx-lm needs 25.0 GB more, and the budget is 64.0 GB"):
        check_memory(held=40 * 10**9, wanted=25 * 10**9, budget=64 * 10**9)


@pytest.mark.parametrize("after", ["loading the model in mlx-lm", "warming up"])
def test_ctrl_c_ends_both(start: Start, tmp_path: Path, after: str) -> None:
    folder = make_tiny(tmp_path / "long", context=1_000_000)
    process = start("bench", folder, "--max-tokens", "500000", "--compare", "mlx-lm")
    assert process.stderr is not None
    while after not in (line := process.stderr.readline()):
        assert line
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert gone(folder)


def test_the_child_ends_when_the_other_side_is_gone(start: Start, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "long", context=1_000_000)
    process = start("bench", folder, "--max-tokens", "500000", "--compare", "mlx-lm")
    assert process.stderr is not None
    while "warming up" not in (line := process.stderr.readline()):
        assert line
    assert running(folder)
    process.kill()
    process.communicate(timeout=60)
    assert gone(folder)
