"""`tokamac bench`: runs, sweeps, spread, the machine's own figures, and the comparison with mlx-lm."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.app.commands.conftest import Result, Run
from tests.tiny import make_tiny
from tests.waiting import PATIENCE_S, until
from tokamac.app.commands.bench import parallel, report
from tokamac.app.commands.bench.parallel import MeasuredWidth, SharedRun, shared_run, times_one
from tokamac.app.commands.bench.peer import PeerError, PeerProcess, PeerRun, check_memory, run_from_times
from tokamac.app.commands.bench.report import (
    Chart,
    Dot,
    Spread,
    linear_axis,
    log_axis,
    medians,
    pair_ratios,
    render,
    spread,
)
from tokamac.app.commands.bench.runs import BenchPoint, MeasuredPoint, measure, points
from tokamac.engine import Engine, Sampling
from tokamac.engine.events import Event
from tokamac.engine.metrics import Metrics, share
from tokamac.engine.perf.roofline import Limits

METRICS = {field.name for field in fields(Metrics)}
CONTRACT = {"runs", "median", "ceiling_tps", "expected_tps", "peer"}
UNKNOWN_RUN = Metrics(40, 0, 40, 8, *[None] * 13)  # type: ignore[arg-type]
SVG = "{http://www.w3.org/2000/svg}"
SHORT = ("--max-tokens", "8", "--runs", "3")


def found_in(done: Result) -> dict[str, Any]:
    assert done.status == 0, done.err
    (line,) = done.out.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def measured(*decode_tps: float | None, ceiling: float | None = None, expected: float | None = None) -> MeasuredPoint:
    limits = Limits(44, 1, 1, 2, None, "unknown", ceiling, expected)
    return MeasuredPoint(
        BenchPoint(40, True, False), tuple(replace(UNKNOWN_RUN, decode_tps=tps) for tps in decode_tps), limits
    )


def test_json_is_the_contracts_object(tokamac: Run, tiny: Path) -> None:
    found = found_in(tokamac("bench", tiny, "--prompt", "40", *SHORT, "--json"))
    assert found.keys() == CONTRACT
    assert found["peer"] is None
    assert len(found["runs"]) == 3
    assert all(run.keys() == METRICS for run in [*found["runs"], found["median"]])
    assert all(run["prompt_tokens"] == run["prefill_tokens"] == 40 for run in found["runs"])  # nothing was cached
    assert found["median"]["ttft_s"] == sorted(run["ttft_s"] for run in found["runs"])[1]


def test_that_nothing_is_reused_needs_no_flag_and_one_that_asks_for_it_is_told_so(tokamac: Run, tiny: Path) -> None:
    done = tokamac("bench", tiny, "--prompt", "40", *SHORT, "--no-prompt-cache", "--json")
    assert "--no-prompt-cache has no effect" in done.err
    assert all(run["cached_tokens"] == 0 for run in found_in(done)["runs"])
    assert "--no-prompt-cache" not in tokamac("bench", tiny, "--prompt", "40", *SHORT, "--json").err


def test_one_prompt_for_people(tokamac: Run, tiny: Path) -> None:
    shown = tokamac("bench", tiny, "--prompt", "40", *SHORT)
    assert shown.status == 0, shown.err
    heading, *rows = shown.out.splitlines()
    assert "40 prompt tokens, 8 new; medians of 3 runs (smallest–largest)" in heading
    assert [row.split()[0] for row in rows] == ["TTFT", "prefill", "decode", "ceiling", "expected", "gaps", "memory"]
    assert "–" in rows[2]
    alone = tokamac("bench", tiny, "--prompt", "40", "--max-tokens", "2", "--runs", "1").out.splitlines()
    assert "one run, so no spread is known" in alone[0]
    assert "–" not in alone[3]


def test_a_sweep_is_a_row_for_each_length_and_the_first_keeps_the_contracts_names(tokamac: Run, tiny: Path) -> None:
    flags = ("bench", tiny, "--prompt", "32,64", "--depth", "64,200", *SHORT)
    found = found_in(tokamac(*flags, "--json"))
    assert found.keys() == CONTRACT | {"sweep"}
    sweep = found["sweep"]
    assert [(row["prompt"], row["depth"]) for row in sweep] == [(32, None), (64, 64), (None, 200)]
    for row, tokens in zip(sweep, (32, 64, 200), strict=True):
        assert [(run["prompt_tokens"], run["generated_tokens"]) for run in row["runs"]] == [(tokens, 8)] * 3
        rates = [run["decode_tps"] for run in row["runs"]]
        wanted = {"median": row["median"]["decode_tps"], "min": min(rates), "max": max(rates)}
        assert row["spread"]["decode_tps"] == wanted
        assert row["share_of_ceiling"] == row["median"]["decode_tps"] / row["ceiling_tps"]
    assert {name: found[name] for name in CONTRACT} == {name: sweep[0][name] for name in CONTRACT}
    ceilings = [row["ceiling_tps"] for row in sweep]
    assert ceilings == sorted(ceilings, reverse=True)  # more context is never faster
    shown = tokamac(*flags).out.splitlines()
    assert shown[2].split()[:4] == ["TTFT", "prefill", "decode", "min–max"]
    assert [row.split("  ")[0] for row in shown[3:]] == ["prompt 32", "prompt and depth 64", "depth 200"]


def test_depths_alone_measure_no_prompt_length_of_ours(tokamac: Run, tiny: Path) -> None:
    found = found_in(tokamac("bench", tiny, "--depth", "50", "--max-tokens", "2", "--runs", "1", "--json"))
    assert found["median"]["prompt_tokens"] == 50


@pytest.mark.parametrize("flag", ["--depth", "--prompt"])
def test_what_the_context_can_not_hold_is_refused_before_measuring(tokamac: Run, tiny: Path, flag: str) -> None:
    done = tokamac("bench", tiny, flag, "64,505", *SHORT, "--compare", "mlx-lm")
    assert (done.status, done.out) == (1, "")
    assert f"{flag[2:]} 505 with 8 new tokens needs 513 tokens of context" in done.err
    assert "holds 512. Ask for 504 at most" in done.err
    assert done.err.count("\n") == 1  # neither was mlx-lm started


def test_a_rolling_context_holds_any_depth(tokamac: Run, tiny: Path) -> None:
    flags = ("--kv-window", "64", "--on-full", "roll", "--max-tokens", "2", "--runs", "1", "--json")
    assert found_in(tokamac("bench", tiny, "--depth", "600", *flags))["median"]["prompt_tokens"] == 600


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--prompt", "64,0"], "--prompt"),
        (["--depth", "64,"], "--depth"),
        (["--plot", "picture.png"], "must end in .svg"),
        (["--compare", "llama.cpp"], "--compare"),
        (["--compare", "mlx-lm", "--temp", "0.7"], "--temp has no effect with --compare"),
        (["--compare", "mlx-lm", "--stop", "x"], "--stop has no effect with --compare"),
        (["--kv-quality", "--depth", "64"], "--depth has no effect with --kv-quality"),
        (["--kv-quality", "--plot", "a.svg"], "--plot has no effect with --kv-quality"),
        (["--kv-quality", "--compare", "mlx-lm"], "--compare has no effect with --kv-quality"),
        (["--kv-quality", "--parallel", "2"], "--parallel has no effect with --kv-quality"),
        (["--machine", "--parallel", "2"], "--parallel has no effect with --machine"),
        (["--parallel", "1,0"], "'0' is not a number of parallel replies"),
        (["--parallel", "2", "--depth", "64"], "--depth has no effect with --parallel"),
        (["--parallel", "2", "--plot", "a.svg"], "--plot has no effect with --parallel"),
        (["--parallel", "2", "--prompt", "16,32"], "one prompt length"),
    ],
)
def test_a_flag_that_is_wrong_or_idle_is_wrong_usage(tokamac: Run, flags: list[str], said: str) -> None:
    result = tokamac("bench", "guide", *flags)
    assert (result.status, result.out) == (2, "")
    assert said in result.err
    assert result.err.count("\n") == 1


def test_points_are_each_size_once_prompts_first() -> None:
    assert points((64, 32, 64), (16, 32)) == [
        BenchPoint(64, True, False),
        BenchPoint(32, True, True),
        BenchPoint(16, False, True),
    ]


def test_medians_are_field_by_field_of_what_is_known() -> None:
    runs = [
        {"ttft_s": 3.0, "decode_tps": None, "itl_ms": {"p50": 1.0}, "kv_bytes": 10, "expected_tps": None},
        {"ttft_s": 1.0, "decode_tps": 8.0, "itl_ms": None, "kv_bytes": 30, "expected_tps": None},
        {"ttft_s": 2.0, "decode_tps": 4.0, "itl_ms": {"p50": 3.0}, "kv_bytes": 20, "expected_tps": None},
    ]
    assert medians(runs) == {
        "ttft_s": 2.0,
        "decode_tps": 6.0,
        "itl_ms": {"p50": 2.0},
        "kv_bytes": 20,
        "expected_tps": None,
    }


def test_spread_and_ratios_of_pairs_worked_by_hand() -> None:
    assert spread([4.0, None, 1.0, 3.0]) == Spread(3.0, 1.0, 4.0)
    assert spread([None]) is None
    # Medians would give 3 ÷ 2 = 1.5; the pairs are 4, 0.5 and 1, so their middle is 1.
    assert pair_ratios([8.0, 1.0, 3.0], [2.0, 2.0, 3.0]) == Spread(1.0, 0.5, 4.0)
    assert pair_ratios([8.0, None], [2.0, 2.0]) == Spread(4.0, 4.0, 4.0)
    assert (share(30.0, 40.0), share(None, 40.0), share(30.0, None)) == (0.75, None, None)


def test_a_run_above_the_ceiling_is_said_to_prove_the_bandwidth_wrong() -> None:
    sentence = "above the ceiling: the bandwidth figure must be wrong"
    for each, told in (
        (measured(80, 101, ceiling=100), True),  # the median is below; one run is enough
        (measured(80, 100, ceiling=100), False),
        (measured(80, 101), False),
        (measured(None, ceiling=100), False),
    ):
        assert (sentence in report.text("m", [each], None)) is told
        assert (sentence in " ".join(report.warnings([each, each]))) is told
    assert "(101 tok/s measured, 100 tok/s the ceiling)" in report.text("m", [measured(101, ceiling=100)], None)


def test_what_is_unknown_is_null_and_says_so() -> None:
    nothing = measured(None, None)
    found = report.to_json([nothing], None)
    assert (found["ceiling_tps"], found["expected_tps"], found["median"]["decode_tps"]) == (None, None, None)
    assert found["runs"][0]["prompt_tokens"] == 40
    for shown in (report.text("m", [nothing], None), report.text("m", [nothing, nothing], None)):
        assert "unknown" in shown
        assert "None" not in shown
    known = report.text("m", [measured(50, ceiling=100, expected=80)], None)
    assert "expected  80.0 tok/s; decode reached 62% of it" in known


def test_the_picture_shows_every_point_and_the_ceiling(tokamac: Run, tiny: Path, tmp_path: Path) -> None:
    picture = tmp_path / "pictures" / "out.svg"
    picture.parent.mkdir()
    picture.write_text("an older one")
    done = tokamac("bench", tiny, "--depth", "32,64,128", *SHORT, "--plot", picture, "--json")
    assert len(found_in(done)["sweep"]) == 3
    assert list(picture.parent.iterdir()) == [picture]  # nothing else is left
    root = ElementTree.parse(picture).getroot()
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert texts[0] == f"Decode rate over context: {tiny.name}"
    assert {"context (tokens)", "measured", "ceiling"} <= set(texts)
    assert any(str(text).startswith("decode (tokens per second") for text in texts)
    assert len(root.findall(f"{SVG}circle")) == 3 + 1  # and the legend's
    assert len(root.findall(f"{SVG}path[@class='line ceiling']")) == 1
    assert "prefers-color-scheme: dark" in (root.findtext(f"{SVG}style") or "")
    assert "script" not in picture.read_text()


@pytest.mark.parametrize("place", ["missing/out.svg", "folder.svg"])
def test_a_picture_that_can_not_be_written_fails_before_loading(tokamac: Run, tmp_path: Path, place: str) -> None:
    (tmp_path / "folder.svg").mkdir()
    done = tokamac("bench", "./nothing", "--plot", tmp_path / place)
    assert (done.status, done.out) == (1, "")
    assert f"--plot: {tmp_path / place}" in done.err
    assert done.err.count("\n") == 1


def test_a_picture_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = tmp_path / "pictures" / "out.svg"
    picture.parent.mkdir()
    picture.write_text("an older one")

    def fail(chart: Chart) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(report, "render", fail)
    with pytest.raises(ZeroDivisionError):
        report.write(picture, Chart("t", "s", (), (), ()))
    assert [(path.name, path.read_text()) for path in picture.parent.iterdir()] == [("out.svg", "an older one")]


def test_names_in_a_picture_are_text_and_unknown_curves_are_named() -> None:
    name = "<script>&\x1b[31m\x00\ud800\ufffe"
    root = ElementTree.fromstring(render(Chart(name, "s", (), (), (), peer=name)))
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert texts[0].startswith("<script>&")
    assert {"ceiling: unknown", "expected: unknown"} <= set(texts)
    assert root.find(f".//{SVG}script") is None


@given(
    st.lists(st.tuples(st.integers(1, 200_000), st.floats(0.01, 1e6), st.floats(0, 0.5)), min_size=1, max_size=4),
    st.floats(1.0, 1e4),
)
def test_everything_drawn_lies_inside_the_field(runs: list[tuple[int, float, float]], above: float) -> None:
    dots = [Dot(context, Spread(tps, tps * (1 - part), tps * (1 + part))) for context, tps, part in runs]
    ceiling = [(context, above * tps * 1.5) for context, tps, _ in runs]
    root = ElementTree.fromstring(render(Chart("t", "s", dots, ceiling, ())))
    for circle in root.findall(f"{SVG}circle")[1:]:
        assert 96 <= float(circle.attrib["cx"]) <= 736
        assert 96 <= float(circle.attrib["cy"]) <= 400
    for line in root.findall(f"{SVG}line[@class='measured']"):
        assert all(96 <= float(line.attrib[name]) <= 400 for name in ("y1", "y2"))


@given(st.floats(1e-3, 1e7), st.floats(1.0, 1e5))
def test_axes_are_monotone_and_have_a_few_round_ticks(lowest: float, factor: float) -> None:
    highest = lowest * factor
    for axis, most in ((linear_axis(highest, 400, 96, 6), 7), (log_axis(lowest, highest, 400, 96), 12)):
        places = [axis.scale(tick) for tick in axis.ticks]
        assert places == sorted(places, reverse=True)
        assert all(96 <= place <= 400 for place in places)
        assert 1 <= len(places) <= most or axis.log
        assert 96 <= axis.scale(highest) < axis.scale(lowest) + 1e-6 <= 400 + 1e-6


# `tokamac bench --machine`: what the machine reaches, beside its table, and a model's pace on it.


def test_it_measures_the_machine_and_then_expects_a_speed(tokamac: Run, tiny: Path) -> None:
    done = tokamac("bench", tiny, "--machine", "--json")
    assert done.status == 0, done.err
    (line,) = done.out.splitlines()
    found = json.loads(line)
    measured = found["measured"]
    assert 0.1 < measured["copy_gbs"] < 20_000
    assert 0.1 < measured["read_gbs"] < 20_000
    assert 1e-4 < measured["tflops"] < 10_000
    assert found["chip"]["bandwidth_gbs"] is None  # a CPU's name stands for boards of very different memory
    assert [each["context"] for each in found["expected"]] == [
        64
    ]  # of 64, 1,024 and 4,096 its context of 512 holds one
    (row,) = found["expected"]
    assert 0 < row["expected_tps"] <= row["ceiling_tps"]
    assert row["ttft_s"] > 0


@pytest.mark.parametrize(
    "flags", [("--runs", "3"), ("--prompt", "64"), ("--temp", "0"), ("--compare", "mlx-lm"), ("--stop", "x")]
)
def test_flags_without_an_effect_are_refused(tokamac: Run, tiny: Path, flags: tuple[str, str]) -> None:
    done = tokamac("bench", tiny, "--machine", *flags)
    assert done.status == 2
    assert f"{flags[0]} has no effect with --machine" in done.err


def test_beside_kv_quality_it_is_refused(tokamac: Run, tiny: Path) -> None:
    done = tokamac("bench", tiny, "--kv-quality", "--machine")
    assert done.status == 2
    assert "--machine has no effect with --kv-quality" in done.err


# `tokamac bench --compare mlx-lm`: the real mlx-lm on tiny models, and what happens when its process fails.

Start = Callable[..., "subprocess.Popen[str]"]
READY = 'import sys; print(\'{"ready": {"version": "1"}}\', flush=True); sys.stdin.readline(); '


def running(folder: Path) -> list[str]:
    """Return the processes of mlx-lm that hold this folder."""
    listed = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,args="], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if "commands.bench.peer" in line and str(folder) in line]


def until_gone(folder: Path) -> None:
    until(lambda: not running(folder), often_s=0.1)


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
    until_gone(tiny)


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
    monkeypatch.setattr("tokamac.app.commands.bench.peer.GRACE_S", 0.2)
    script = READY + "import time; time.sleep(600)"
    peer = PeerProcess(tmp_path, [sys.executable, "-c", script, "commands.bench.peer"])
    assert running(Path("time.sleep(600)"))
    peer.close()
    until_gone(Path("time.sleep(600)"))


def test_weights_that_do_not_fit_twice_are_refused_with_the_numbers() -> None:
    check_memory(held=40, wanted=24, budget=64)
    check_memory(held=40, wanted=25, budget=None)
    with pytest.raises(PeerError, match=r"40.0 GB are held here, mlx-lm needs 25.0 GB more, and the budget is 64.0 GB"):
        check_memory(held=40 * 10**9, wanted=25 * 10**9, budget=64 * 10**9)


@pytest.mark.parametrize("after", ["loading the model in mlx-lm", "warming up"])
def test_ctrl_c_ends_both(start: Start, tmp_path: Path, after: str) -> None:
    folder = make_tiny(tmp_path / "long", context=1_000_000)
    process = start("bench", folder, "--max-tokens", "500000", "--compare", "mlx-lm")
    while after not in (line := process.stderr.readline()):
        assert line
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    until_gone(folder)


def test_the_child_ends_when_the_other_side_is_gone(start: Start, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "long", context=1_000_000)
    process = start("bench", folder, "--max-tokens", "500000", "--compare", "mlx-lm")
    while "warming up" not in (line := process.stderr.readline()):
        assert line
    assert running(folder)
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    until_gone(folder)


# `tokamac bench --parallel`: replies at once.


def test_rates_of_replies_at_once_worked_by_hand() -> None:
    # Two are written together from 2 s (the second one's first token) to 5 s (the first one's end): tokens at 3, 4, 5, and 4.
    run = shared_run([[1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 4.0, 8.0]], 9)
    assert run == SharedRun(8, together_tps=4 / 3, each_tps=(1 + 1 / 3) / 2, overall_tps=1.0, ttft_s=1.5, total_s=8.0,
                            peak_memory_bytes=9)  # fmt: skip
    assert shared_run([[1.0, 2.0], [3.0, 4.0]], None).together_tps is None  # one after another
    assert shared_run([[1.0, 2.0], []], None).together_tps is None
    assert shared_run([[]], None) == SharedRun(0, *[None] * 6)  # type: ignore[arg-type]
    alone = shared_run([[1.0, 1.5, 2.0]], None)
    assert alone.together_tps == alone.each_tps == 2.0


def test_a_width_is_compared_with_one_reply_alone() -> None:
    def at(width: int, *rates: float | None) -> MeasuredWidth:
        return MeasuredWidth(width, [SharedRun(0, each, None, None, None, None, None) for each in rates])

    alone, four = at(1, 100.0, 110.0, 90.0), at(4, 250.0, 300.0, 310.0)
    assert times_one(four, [four, alone]) == 3.0
    assert times_one(four, [four]) is None
    assert times_one(at(2, None), [alone]) is None
    assert parallel.remarks([alone, four]) == []
    (said,) = parallel.remarks([alone, at(2, None), at(8, None)])
    assert said.startswith("2, 8 in parallel: the replies never all ran at the same time")


def test_every_width_is_measured_beside_the_peers_batches(tokamac: Run, tiny: Path) -> None:
    flags = ("--prompt", "24", "--max-tokens", "20", "--runs", "2", "--parallel", "1,3", "--compare", "mlx-lm")
    found = found_in(tokamac("bench", tiny, *flags, "--json"))
    assert found.keys() == CONTRACT | {"parallel"}
    assert [run["prompt_tokens"] for run in found["runs"]] == [24, 24]
    assert [row["width"] for row in found["parallel"]] == [1, 3]
    for row in found["parallel"]:
        assert (row["ceiling_tps"], row["expected_tps"]) == (None, None) or row["ceiling_tps"] > 0
        assert row["peer"].keys() == {"name", "version", "median", "ratio", "runs"}
        for side in (row, row["peer"]):
            assert [run["generated_tokens"] for run in side["runs"]] == [20 * row["width"]] * 2
            assert all(run["overall_tps"] > 0 and run["ttft_s"] > 0 for run in side["runs"])
        pairs = [
            ours["overall_tps"] / theirs["overall_tps"]
            for ours, theirs in zip(row["runs"], row["peer"]["runs"], strict=True)
        ]
        assert row["peer"]["ratio"]["overall_tps"]["median"] == pytest.approx(sum(pairs) / 2)
    assert found["parallel"][0]["times_one"] == 1.0
    until_gone(tiny)


def test_the_prediction_is_of_that_width(tiny: Path) -> None:
    with Engine.load(tiny, prompt_cache=None, parallel=2) as engine:
        wanted = parallel.Replies(16, Sampling(temperature=0, max_tokens=4))
        found = parallel.measure(engine, (1, 2), 1, wanted, None)
        for each in found:
            assert each.prediction == engine.predict(16, 18, batch=each.parallel)
            assert each.prediction.batch == each.parallel
