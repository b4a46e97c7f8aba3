"""`tokamac bench`: runs, sweeps, spread, and the picture, on tiny models."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.conftest import Result, Run
from tokamac.app.commands import bench_report
from tokamac.app.commands.bench_report import (
    Chart,
    Dot,
    Spread,
    linear_axis,
    log_axis,
    medians,
    pair_ratios,
    render,
    span,
    spread,
)
from tokamac.app.commands.bench_runs import BenchPoint, MeasuredPoint, points
from tokamac.app.units import rate, seconds
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
    assert "--no-prompt-cache changes nothing here" in done.err
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
def test_what_the_context_can_not_hold_is_refused_before_anything_is_measured(
    tokamac: Run, tiny: Path, flag: str
) -> None:
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


def test_a_unit_that_both_ends_share_is_written_once() -> None:
    assert span(rate, 20.0, 31.5) == "20.0–31.5 tok/s"
    assert span(seconds, 0.05, 2.0) == "50 ms–2.0 s"
    assert span(seconds, 61.0, 125.0) == "61 s–2 min 05 s"


def test_a_run_above_the_ceiling_is_said_to_prove_the_bandwidth_wrong() -> None:
    sentence = "above the ceiling: the bandwidth figure must be wrong"
    for each, told in (
        (measured(80, 101, ceiling=100), True),  # the median is below; one run is enough
        (measured(80, 100, ceiling=100), False),
        (measured(80, 101), False),
        (measured(None, ceiling=100), False),
    ):
        assert (sentence in bench_report.text("m", [each], None)) is told
        assert (sentence in " ".join(bench_report.warnings([each, each]))) is told
    assert "(101 tok/s measured, 100 tok/s the ceiling)" in bench_report.text("m", [measured(101, ceiling=100)], None)


def test_what_is_unknown_is_null_and_says_so() -> None:
    nothing = measured(None, None)
    found = bench_report.to_json([nothing], None)
    assert (found["ceiling_tps"], found["expected_tps"], found["median"]["decode_tps"]) == (None, None, None)
    assert found["runs"][0]["prompt_tokens"] == 40
    for shown in (bench_report.text("m", [nothing], None), bench_report.text("m", [nothing, nothing], None)):
        assert "unknown" in shown
        assert "None" not in shown
    known = bench_report.text("m", [measured(50, ceiling=100, expected=80)], None)
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
def test_a_picture_that_can_not_be_written_fails_before_the_model_is_loaded(
    tokamac: Run, tmp_path: Path, place: str
) -> None:
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

    monkeypatch.setattr(bench_report, "render", fail)
    with pytest.raises(ZeroDivisionError):
        bench_report.write(picture, Chart("t", "s", (), (), ()))
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
    for axis, most in (
        (linear_axis(highest, 400, 96, 6), 7),
        (log_axis(lowest, highest, 400, 96), 12),
    ):
        places = [axis.at(tick) for tick in axis.ticks]
        assert places == sorted(places, reverse=True)
        assert all(96 <= place <= 400 for place in places)
        assert 1 <= len(places) <= most or axis.log
        assert 96 <= axis.at(highest) < axis.at(lowest) + 1e-6 <= 400 + 1e-6
