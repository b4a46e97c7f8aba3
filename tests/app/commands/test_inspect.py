"""`inspect`, `models list` and `models suggest`: machines, cases, tables and pictures."""

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from tests.app.commands.conftest import Run
from tests.engine.gguf.written import write as write_gguf
from tests.engine.helpers import write_model
from tests.engine.speculation.checkpoints import write_mtp
from tests.tiny import make_tiny
from tokamac.engine.perf import footprint
from tokamac.quant.report import RECORD, Outcome, Quality

M4_MAX = ("--chip", "Apple M4 Max", "--gpu-cores", "40", "--memory", "64")
QWEN = "mlx-community/Qwen3-0.6B-4bit"


def found(tokamac: Run, *arguments: str | Path) -> dict[str, Any]:
    done = tokamac("inspect", *arguments, "--json")
    assert (done.status, done.err) == (0, "")
    result: dict[str, Any] = json.loads(done.out)
    return result


def test_elsewhere_every_figure_of_the_contract_is_known(tokamac: Run) -> None:
    plain = found(tokamac, QWEN, *M4_MAX, "--context", "512", "--prompt", "256")
    assert plain["chip"] == {"name": "Apple M4 Max", "gpu_cores": 40, "bandwidth_gbs": 546.0, "fp16_tflops": 16.16}
    assert 0 < plain["expected_tps"] <= plain["ceiling_tps"]
    assert plain["ttft_s"] == pytest.approx(256 / plain["prefill_tps"])
    assert plain["memory"]["fits"] is True


def test_a_gguf_file_tells_what_became_of_its_types_and_of_a_projector(tokamac: Run, tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", {"architecture": "llama", "case": "llama"}, GGMLQuantizationType.Q8_0)
    (tmp_path / "mmproj-a.gguf").write_bytes(b"GGUF")
    told = found(tokamac, tmp_path / "a.gguf")["gguf"]
    (kept,) = (each for each in told["types"] if each["kind"] == "Q8_0")
    assert (kept["error"], kept["bits_on_disk"], kept["bits_in_memory"]) == (0, 8.5, 9)
    assert Path(told["projector"]).name == "mmproj-a.gguf"
    shown = tokamac("inspect", tmp_path / "a.gguf").out
    assert "mmproj-a.gguf beside it is a vision projector" in shown
    assert "8 bits in groups of 32, the same codes, exact; 8.5 bits" in shown
    assert "quality            that of the file's own numbers" in shown


def test_a_model_that_was_not_downloaded_is_predicted_and_that_is_said(tokamac: Run) -> None:
    plain = found(tokamac, QWEN, *M4_MAX)
    assert plain["model"] == QWEN
    assert plain["parameters"] == 596_049_920
    shown = tokamac("inspect", QWEN, *M4_MAX)
    assert "not downloaded" in shown.out
    assert "waits for memory" in shown.out
    assert "waits for arithmetic" in shown.out


def test_heads_for_further_tokens_are_named_counted_and_of_unknown_gain(tokamac: Run, tmp_path: Path) -> None:
    folder = write_mtp(tmp_path / "model", "glm4_moe")
    heads = found(tokamac, folder)["heads"]
    assert [(each["kind"], each["count"], each["trouble"], each["gain"]) for each in heads] == [("mtp", 1, None, None)]
    without = found(tokamac, write_model(tmp_path / "other"))
    assert "heads" not in without
    shown = tokamac("inspect", folder)
    assert "its own draft heads: a layer for multi-token prediction" in shown.err
    assert "unknown until a reply measures it" in shown.err
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "named").mkdir()
    (tmp_path / "named" / "config.json").write_text(json.dumps(config))
    with_them = found(tokamac, folder)["memory"]["weights"]
    assert with_them - found(tokamac, tmp_path / "named")["memory"]["weights"] == heads[0]["bytes"]


def test_a_prompt_longer_than_the_usual_context_lengthens_it(tokamac: Run) -> None:
    plain = found(tokamac, QWEN, *M4_MAX, "--prompt", "10000")
    assert plain["memory"]["kv"] == 10_000 * plain["kv_bytes_per_token"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--chip", "Apple M4 Max"), "32 or 40"), (("--chip", "M4 Mox"), "M4 Max"),
        (("--chip", "M4 Max", "--gpu-cores", "20"), "32, 40"), (("--gpu-cores", "40"), "without --chip"),
        (("--memory", "0"), "--memory"), (("--memory", "nan"), "--memory"), (("--group-size", "32"), "without --bits"),
        (("--bits", "16", "--group-size", "32"), "without --bits"), (("--bits", "7"), "--bits"),
        (("--context", "100", "--prompt", "101"), "--prompt"), (("--plot", "--json"), "--plot"),
        (("--parallel", "0"), "--parallel"), (("--acceptance", "0.7,1.2"), "'1.2' is not an acceptance rate"),
        (("--acceptance", "most"), "such as 0.7 or 70%"),
    ],
)  # fmt: skip
def test_wrong_usage_says_what_to_do(tokamac: Run, flags: tuple[str, ...], said: str) -> None:
    done = tokamac("inspect", "guide", *flags)
    assert done.status == 2
    assert said in done.err
    assert done.err.count("\n") == 1


QWEN_8B = "mlx-community/Qwen3-8B-4bit"


def test_what_guessing_ahead_gains_is_told_at_each_share_with_formula_and_source_of_timings(tokamac: Run) -> None:
    shown = tokamac("inspect", QWEN_8B, *M4_MAX, "--acceptance", "50%,0.7")
    assert shown.status == 0
    for said in ("looked up", "50%", "70%", "1 + a + a² + … + aᵏ", "Apple M4 Pro, 4 bits", "mlx/issues/3852"):
        assert said in shown.out
    assert f"draft model: {QWEN}" in shown.out  # which is known to have the same tokenizer
    low, high = found(tokamac, QWEN_8B, *M4_MAX, "--acceptance", "50%,0.7")["speculation"]
    assert (low["acceptance"], high["acceptance"]) == (0.5, 0.7)
    for one, other in zip(low["guessers"], high["guessers"], strict=True):
        assert other["gain"] > one["gain"] > 1
        assert one["expected_tps"] == pytest.approx(one["gain"] * low["plain_tps"])


def test_a_draft_model_that_is_named_takes_the_place_of_the_known_one_and_none_of_all(tokamac: Run) -> None:
    asked = (QWEN_8B, *M4_MAX, "--acceptance", "0.7")
    for flags, names in ((("--draft", "Qwen3-1.7B"), ["mlx-community/Qwen3-1.7B-4bit"]), (("--draft", "none"), [])):
        (gained,) = found(tokamac, *asked, *flags)["speculation"]
        assert [each["name"] for each in gained["guessers"] if each["source"] == "draft"] == names


def test_the_table_has_a_row_for_each_case(tokamac: Run) -> None:
    plain = found(tokamac, QWEN, *M4_MAX, "--table")
    rows = plain["table"]
    assert {row["bits"] for row in rows} == {None, 16, 8, 6, 5, 3}  # as it is, it has 4
    assert {(row["key_bits"], row["value_bits"]) for row in rows} == {(16, 16), (8, 8), (8, 4), (4, 4)}
    assert rows[0]["expected_tps"] == plain["expected_tps"]
    assert plain["known_by"] == "catalogue"
    shown = tokamac("inspect", QWEN, *M4_MAX, "--table").out
    assert "8,4" in shown
    assert "16 bits" in shown
    assert "40,960" in shown


def test_what_a_cache_is_worth(tokamac: Run) -> None:
    flags = (*M4_MAX, "--no-cache", "--prompt", "64", "--context", "77")
    worth = found(tokamac, QWEN, *flags)["without_cache"]
    assert (worth["total"]["units_with"], worth["total"]["units_without"]) == (64 + 12, sum(range(64, 77)))
    assert len(worth["sizes"]) == 12
    assert {figure["said"] for figure in worth["known_figures"]} >= {"4.78", "209", "9.62", "83.9"}
    shown = tokamac("inspect", QWEN, *flags).out
    assert "STEP BY STEP (times to expect here)" in shown
    assert "window 4,096, 4 sinks" in shown
    assert "DeepSeek V4 Pro, 1M tokens" in shown


def test_how_many_replies_at_once(tokamac: Run) -> None:
    flags = (QWEN, *M4_MAX, "--context", "8192", "--prompt", "2048", "--parallel", "1,2,4,64")
    plain = found(tokamac, *flags)
    several = plain["parallel"]
    widths = {each["replies"]: each for each in several["widths"]}
    assert widths.keys() == {1, 2, 4, 64, several["fitting"]}
    assert widths[1]["expected_tps"] == plain["expected_tps"] == widths[1]["each_tps"]
    assert widths[1]["memory"] == plain["memory"]
    assert widths[1]["newcomer_ttft_s"] == plain["ttft_s"]
    assert widths[4]["each_tps"] == pytest.approx(widths[4]["expected_tps"] / 4)
    assert several["or_more"]
    shown = tokamac("inspect", *flags).out
    said = f"At least {several['fitting']} replies of 8,192 tokens fit at once on Apple M4 Max with 64 GB. 4 give"
    assert said in " ".join(shown.split())
    assert "TTFT" in shown


def test_every_chip_of_the_table(tokamac: Run) -> None:
    rows = found(tokamac, QWEN, *M4_MAX, "--chips")["chips"]
    assert len(rows) > 40
    by_name = {(row["chip"]["name"], row["chip"]["gpu_cores"]): row for row in rows}
    assert by_name["Apple M4 Max", 40]["ceiling_tps"] > by_name["Apple M4 Max", 32]["ceiling_tps"]
    assert by_name["NVIDIA H200", None]["expected_tps"] is None
    shown = tokamac("inspect", QWEN, "--chips").out
    assert "Apple M2 Ultra, 76-core GPU" in shown
    assert "unknown" in shown


def test_memory_beside_every_chip_is_that_of_every_mac(tokamac: Run) -> None:
    model = "mlx-community/Qwen3-8B-4bit"  # some 6 GB with its context
    here = json.loads(tokamac("inspect", model, "--chips", "--json").out)
    for memory, fits in (("4", False), ("16", True)):
        named = json.loads(tokamac("inspect", model, "--chips", "--memory", memory, "--json").out)
        assert named["chip"]["name"] == here["chip"]["name"]  # this machine is as it is
        assert named["memory"]["fits"] == here["memory"]["fits"]
        apple = [row["chip"]["name"].startswith("Apple") for row in named["chips"]]
        assert {row["memory"]["fits"] for row, mac in zip(named["chips"], apple, strict=True) if mac} == {fits}
        assert {row["memory"]["fits"] for row, mac in zip(named["chips"], apple, strict=True) if not mac} == {True}
    shown = tokamac("inspect", model, "--chips", "--memory", "4").out.splitlines()
    assert next(line for line in shown if line.startswith("Apple M1 Max")).endswith("does not fit")
    refused = tokamac("inspect", model, "--chips", "--gpu-cores", "40")
    assert (refused.status, "without --chip" in refused.err) == (2, True)


def test_the_plots_fit_the_terminal_and_can_have_no_colours(tokamac: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (60, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        shown = tokamac("inspect", QWEN, *M4_MAX, "--plot").out
        drawn = shown[shown.index("decode over context") :].splitlines()
        assert max(map(len, drawn)) <= columns
        assert "\x1b" not in shown
        assert "roofline" in shown
        assert "DD decode, waits for memory" in shown
        assert "PP prefill, waits for arithmetic" in shown


def test_a_roofline_that_is_not_known_is_said_not_drawn(tokamac: Run) -> None:
    shown = tokamac("inspect", QWEN, "--chip", "NVIDIA GeForce RTX 3090", "--plot")
    assert shown.status == 0
    assert "roofline: unknown" in shown.out
    assert "ceiling, tok/s" in shown.out


@pytest.fixture(scope="module")
def weighed_once() -> Iterator[None]:
    """The whole catalogue is weighed by the first test that asks for it, and stays on the scales."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(footprint, "_weigh_again", cache(footprint._weigh_again.__wrapped__))
        yield


@pytest.mark.usefixtures("weighed_once")
def test_suggestions_are_best_first_with_their_numbers(tokamac: Run) -> None:
    done = tokamac(
        "models", "suggest", "--chip", "M3", "--gpu-cores", "10", "--memory", "16", "--context", "2048", "--json"
    )
    assert (done.status, done.err) == (0, "")
    answer = json.loads(done.out)
    best, last = answer["suggestions"][0], answer["suggestions"][-1]
    assert (answer["context"], best["verdict"], last["verdict"]) == (2048, "runs well", "does not fit")
    assert best["memory"]["total"] < best["memory"]["budget"]
    assert best["expected_tps"] >= 10
    assert [best["group"], last["group"]] == ["recommended", "does not fit"]
    start = answer["start_here"]
    (chosen,) = (each for each in answer["suggestions"] if each["id"] == start["model"])
    assert chosen["group"] == "recommended"
    assert start["expected_tps"] == chosen["expected_tps"] >= 15
    assert start["download_s"] == pytest.approx(chosen["download_bytes"] / 12.5e6)
    assert (start["download_bps"], answer["note"]) == (None, None)


@pytest.mark.usefixtures("weighed_once")
def test_a_model_whose_draft_model_is_known_is_suggested_with_its_memory_and_gain(tokamac: Run) -> None:
    done = tokamac("models", "suggest", *M4_MAX, "--context", "2048", "--json")
    found = {each["id"]: each for each in json.loads(done.out)["suggestions"]}
    draft = found[QWEN_8B]["draft"]
    assert (draft["id"], draft["download_bytes"], draft["acceptance"]) == (QWEN, 351_383_618, 0.7)
    assert draft["memory"]["total"] > found[QWEN_8B]["memory"]["total"] + 335e6
    assert draft["memory"]["fits"] is True
    assert draft["expected_tps"] == pytest.approx(draft["gain"] * found[QWEN_8B]["expected_tps"])
    assert found[QWEN]["draft"] is found["mlx-community/gemma-3-27b-it-qat-4bit"]["draft"] is None
    shown = tokamac("models", "suggest", *M4_MAX)
    (row,) = [line for line in shown.out.splitlines() if line.startswith(f"{QWEN_8B} ") and QWEN in line]
    assert "fits" in row
    assert "×" in row
    slow = tokamac("models", "suggest", "--chip", "M1", "--gpu-cores", "8", "--memory", "16").out
    (row,) = [line for line in slow.splitlines() if line.startswith(f"{QWEN_8B} ") and QWEN in line]
    assert "none" in row  # there each row of a pass costs a step
    unknown = tokamac("models", "suggest", "--chip", "NVIDIA H100 80GB HBM3").out
    (row,) = [line for line in unknown.splitlines() if line.startswith(f"{QWEN_8B} ") and QWEN in line]
    assert row.count("unknown") == 2


def test_suggestions_for_people(tokamac: Run) -> None:
    shown = tokamac("models", "suggest", "--chip", "M3", "--memory", "16")
    assert shown.status == 0
    assert "runs well" in shown.out
    assert "does not fit" not in shown.out
    headings = [shown.out.index(text) for text in ("Start here: mlx-community/", "Recommended, best first", "\nSlow\n")]
    assert headings == sorted(headings)
    assert "to download" in shown.out[: headings[1]]
    assert "do not fit" in shown.err
    assert "two thirds" in shown.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("pull", "org/name", "--memory", "8"), "pull takes no --context"),
        (("pull", "org/name", "--unfinished"), "pull takes no --unfinished"),
        (("suggest", "org/name"), "suggest takes no ID"),
        (("suggest", "--chip", "M3 Max"), "30 or 40"),
    ],
)
def test_flags_go_with_suggest_alone(tokamac: Run, arguments: tuple[str, ...], said: str) -> None:
    done = tokamac("models", *arguments)
    assert done.status == 2
    assert said in done.err


# `tokamac models list`: sizes, and what this machine makes of each, with a cache of the test's own.


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in the cache that the conftest's environment names."""
    from huggingface_hub import constants

    cache = Path(os.environ["HF_HOME"], "hub")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))  # the client reads the environment when it is imported
    repository = cache / "models--org--tiny"
    make_tiny(repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    return repository


def test_the_list_has_size_bits_fit_and_speed(tokamac: Run, on_disk: Path) -> None:
    done = tokamac("models", "list", "--json")
    guide, model = json.loads(done.out)["models"]
    assert (guide["id"], guide["whole"], guide["last_used_s"]) == ("guide", True, None)
    assert (model["id"], model["whole"], model["fits"], model["bits_per_weight"]) == ("org/tiny", True, True, 32.0)
    assert model["bytes"] == sum(path.stat().st_size for path in (on_disk / "snapshots").rglob("*") if path.is_file())
    assert model["memory_bytes"] > 0


def test_the_list_for_people_says_it_in_words(tokamac: Run, on_disk: Path) -> None:
    shown = tokamac("models")
    assert shown.status == 0
    assert "org/tiny" in shown.out
    assert shown.out.splitlines()[1].startswith("guide ")
    assert "32.00" in shown.out
    assert "fits" in shown.out or "runs well" in shown.out
    assert "worse" not in shown.out + shown.err


def test_the_list_says_which_model_answers_worse_than_its_source(tokamac: Run, on_disk: Path) -> None:
    bad = Outcome(4.5, 0.1, Quality(3.21, 0.01, 0.31, 9.0, 0.5, 90.0, 5.0, 10.0, 0.4, 255)).to_json()
    made = {"format": 1, "bits_per_weight": 4.5, "options": {}, "quality": bad}
    (on_disk / "snapshots" / ("a" * 40) / RECORD).write_text(json.dumps(made))
    shown = tokamac("models")
    assert "worse answers" in next(line for line in shown.out.splitlines() if line.startswith("org/tiny"))
    assert (
        "note: org/tiny: Its answers are clearly worse than its source's: convert it again with --group-size 32"
        in shown.err
    )
    assert "for 8,192 tokens of context" in shown.out
