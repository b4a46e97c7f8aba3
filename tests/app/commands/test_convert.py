"""`tokamac convert`, and what it costs: `quality` of two models, and of KV settings."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from tests.app.commands.conftest import Run
from tests.tiny import make_tiny
from tests.waiting import PATIENCE_S
from tokamac.app.backend.processes import ConvertedLine, Expected, Refused, StageLine, TensorWritten, decode_conversion
from tokamac.app.commands import convert
from tokamac.app.commands.bench.kv_quality import SETTINGS, sentence, shipped_text
from tokamac.app.commands.convert import ConversionProgress, DiskSpace, Estimate, plan_text
from tokamac.app.commands.quality import report
from tokamac.app.reports.verdict import closeness
from tokamac.engine.lab import scoring
from tokamac.engine.lab.scoring import Advice, KVDivergence, Speed, Trial
from tokamac.quant import Conversion, TensorDone
from tokamac.quant import convert as quant_convert
from tokamac.quant.evaluation import Comparison
from tokamac.quant.report import Outcome, Quality, StageDone

# `convert`: its flags, the plan, progress and result for people and for programs, and how it ends when it is
# interrupted.

GOOD = Quality(0.02, 0.001, 0.95, 9.0, 0.5, 9.1, 0.5, 1.011, 0.004, 255)
BAD = Quality(3.21, 0.01, 0.31, 9.0, 0.5, 90.0, 5.0, 10.0, 0.4, 255)


def asked(*words: str) -> dict[str, Any]:
    parser = convert.parser()
    return convert.requested(parser, parser.parse_args(["source", *words]))


def lines(text: str) -> list[Any]:
    return [decode_conversion(line.encode()) for line in text.splitlines()]


# Flags --------------------------------------------------------------------------------------------------------------------


def test_every_flag_of_the_contract_is_an_option_of_a_conversion() -> None:
    assert asked() == {
        "bits": None, "group_size": None, "mode": "affine", "method": None, "recipe": None, "target_bpw": None, "target_kl": None,
        "calibration": None, "dtype": None, "embed_bits": None, "dequantize": False, "verify": True, "adapter": None,
        "keep_vision": None, "vision_bits": None,
        "unchecked": False,
    }  # fmt: skip
    found = asked(
        "--bits",
        "3",
        "--group-size",
        "32",
        "--method",
        "gptq",
        "--dtype",
        "float16",
        "--embed-bits",
        "8",
        "--no-verify",
    )
    assert [found[name] for name in ("bits", "group_size", "method", "dtype", "embed_bits", "verify")] == [
        3, 32, "gptq", "float16", 8, False,
    ]  # fmt: skip
    assert asked("--target-bpw", "4.5")["target_bpw"] == 4.5
    assert asked("--mode", "nvfp4")["mode"] == "nvfp4"
    assert asked("--dequantize")["dequantize"] is True


def test_calibration_is_the_shipped_text_or_a_file() -> None:
    assert asked("--calibration")["calibration"] == "shipped"
    assert asked("--calibration=shipped")["calibration"] == Path("shipped")
    assert asked("--calibration", "none")["calibration"] == "none"
    assert asked("--calibration", "~/notes.txt")["calibration"] == Path("~/notes.txt").expanduser()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--bits", "7"), "--bits"), (("--bits", "4", "--target-bpw", "4.5"), "contradict"),
        (("--recipe", "mixed_4_6", "--target-bpw", "4.5"), "contradict"),
        (("--mode", "mxfp4", "--bits", "8"), "mxfp4 has 4 bits"), (("--mode", "mxfp8", "--method", "search"), "affine"),
        (("--mode", "mxfp4", "--method", "gptq"), "affine"), (("--dequantize", "--bits", "4"), "--dequantize"),
        (("--method", "round", "--calibration"), "looks at no text"), (("--target-bpw", "1"), "out of range"),
        (("--target-bpw", "four"), "--target-bpw"),
    ],
)  # fmt: skip
def test_flags_that_contradict_each_other_are_wrong_usage(tokamac: Run, flags: tuple[str, ...], said: str) -> None:
    done = tokamac("convert", "source", *flags)
    assert (done.status, done.out) == (2, "")
    assert said in done.err
    assert done.err.count("\n") == 1


def test_the_help_is_grouped_and_has_examples(tokamac: Run) -> None:
    shown = tokamac("convert", "--help").out
    for said in ("quantization:", "method:", "run:", "examples:", "--target-bpw 4.5"):
        assert said in shown


# The plan -----------------------------------------------------------------------------------------------------------------


def test_the_plan_for_people(tokamac: Run, tiny: Path, tmp_path: Path) -> None:
    done = tokamac("convert", tiny, "-o", tmp_path / "deep" / "out", "--method", "round", "--dry-run")
    assert done.status == 0
    for said in (
        "embedding",
        "4 bits, groups of 64",
        "not packed",
        "5.04 bits per weight",
        "memory",
        "free: fits",
        "about",
    ):
        assert said in done.out
    assert not (tmp_path / "deep").exists()


def test_the_plan_as_json_is_what_the_chat_reads(tokamac: Run, tiny: Path, tmp_path: Path) -> None:
    done = tokamac("convert", tiny, "-o", tmp_path / "out", "--method", "round", "--dry-run", "--json")
    (plan,) = lines(done.out)
    assert sum(part.parameters for part in plan.parts) == plan.parameters
    assert sum(part.nbytes for part in plan.parts) == plan.weight_bytes
    assert plan.seconds is not None
    assert plan.disk.fits
    assert plan.disk.needed > plan.output_bytes


def test_a_plan_that_does_not_fit_or_whose_time_is_unknown_says_so(tiny: Path, tmp_path: Path) -> None:
    plan = quant_convert(tiny, tmp_path / "out", dry_run=True, method="round")
    shown = plan_text(plan, tmp_path / "out", DiskSpace(needed=2_000_000, free=1_000_000), Estimate(None, None))
    assert "2.00 MB needed, 1.00 MB free: does not fit" in shown
    assert "unknown" in shown


# The run ------------------------------------------------------------------------------------------------------------------


def test_stages_are_named_and_every_tensor_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    shown = ConversionProgress(json=True)
    shown.show(StageDone("calibrating", 1, 2))
    shown.show(StageDone("calibrating", 2, 2))
    shown.show(TensorDone("a.weight", 1, 2, 10, 20))
    shown.show(TensorDone("b.weight", 2, 2, 20, 20))
    shown.clear()
    said = lines(capsys.readouterr().out)
    assert [(each.stage, each.done, each.unit) for each in said if isinstance(each, StageLine)] == [
        ("calibrating", 1, "steps"),
        ("calibrating", 2, "steps"),
        ("converting", 10, "bytes"),
        ("converting", 20, "bytes"),
    ]
    assert [each for each in said if isinstance(each, TensorWritten)] == [
        TensorWritten("a.weight", 1, 2),
        TensorWritten("b.weight", 2, 2),
    ]


def test_without_a_terminal_stages_are_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    shown = ConversionProgress(json=False)
    shown.show(StageDone("verifying", 4, 8))
    shown.show(TensorDone("a.weight", 1, 2, 10, 20))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "verifying 50 % (4 of 8 steps)\nconverting 50 % (10 B of 20 B)\n"


def test_the_result_for_people_says_what_to_type_next(tokamac: Run, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "new model"
    done = tokamac("convert", tiny, "-o", out, "--method", "round")
    assert done.status == 0
    assert "1.58 MB → 249 kB, 5.04 bits per weight" in done.out
    assert "speed    unknown (" in done.out  # nobody has measured this machine with such a model
    assert f"next: tokamac chat '{out}'" in done.out
    assert "converting 100 %" in done.err


def test_the_lines_of_a_run_are_those_of_the_contract(tokamac: Run, tiny: Path, tmp_path: Path) -> None:
    done = tokamac("convert", tiny, "-o", tmp_path / "small", "--method", "round", "--json")
    assert done.status == 0
    plain = [json.loads(line) for line in done.out.splitlines()]
    steps = [line for line in plain if line["event"] == "tensor"]
    assert all(step.keys() == {"event", "name", "done", "total"} for step in steps)
    assert [step["done"] for step in steps] == list(range(1, len(steps) + 1))
    assert list(plain[-1]) == [
        "event", "path", "weight_bytes", "bits_per_weight", "source_bytes", "seconds", "peak_memory_bytes", "quality",
    ]  # fmt: skip
    *_, expected, last = lines(done.out)
    assert isinstance(expected, Expected)
    assert isinstance(last, ConvertedLine)


def test_a_failure_is_one_line_for_people_and_one_for_programs(tokamac: Run, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").touch()
    done = tokamac("convert", tiny, "-o", tmp_path / "out", "--json")
    assert done.status == 1
    (said,) = lines(done.out)
    assert isinstance(said, Refused)
    assert "--overwrite" in said.hint
    assert done.err.count("\n") == 1


@dataclass(frozen=True)
class Ran:
    """What a conversion of the library would report."""

    outcome: Outcome | None

    def __call__(self, source: Path, target: Path, **_: Any) -> Conversion:
        return Conversion(target, 10, 4.5, 40, 1.0, 5, self.outcome, ("a note",))  # type: ignore[arg-type]


def test_a_bad_result_is_loud(tokamac: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokamac.quant.convert", Ran(Outcome(4.5, 0.3, BAD, remedy="--bits 6")), raising=False)
    done = tokamac("convert", tiny, "-o", tmp_path / "out")
    assert done.status == 0
    assert done.err.count("warning: ") == 2
    assert "note: a note" in done.err
    assert "31.0 % of 255 positions" in done.out
    assert (
        done.out.splitlines()[-1] == "Its answers are clearly worse than its source's: convert it again with --bits 6."
    )
    result = lines(tokamac("convert", tiny, "-o", tmp_path / "out", "--json").out)[-1]
    assert isinstance(result, ConvertedLine)
    assert len(result.quality.concerns) == 2


def test_a_result_that_was_not_compared_says_so(tiny: Path, tmp_path: Path) -> None:
    speeds = convert.Speeds(10.0, 30.0)
    unable = Ran(Outcome(4.5, 0.08, unable="there is no tokenizer"))(tiny, tmp_path)
    assert "no text was compared: there is no tokenizer" in convert.summary(unable, speeds)
    assert "not compared with the source" in convert.summary(Ran(None)(tiny, tmp_path), speeds)
    assert "10.0 tok/s → 30.0 tok/s expected here" in convert.summary(Ran(None)(tiny, tmp_path), speeds)


def test_a_speed_that_is_unknown_has_its_reason(tiny: Path, tmp_path: Path) -> None:
    done = Ran(None)(tiny, tmp_path)
    said = convert.summary(done, convert.Speeds(None, None, "it was not measured"))
    assert "unknown (it was not measured)" in said
    assert "→ unknown" not in said
    known = convert.expected_speeds(tiny, tiny)
    assert known.before_tps is not None or known.reason


def test_a_plan_names_the_path_and_the_time_of_the_quality_check(tokamac: Run, tiny: Path, tmp_path: Path) -> None:
    plan = lines(tokamac("convert", tiny, "--into", tmp_path / "models", "--dry-run", "--json").out)[-1]
    assert plan.path == str(tmp_path / "models" / f"{tiny.name}-4bit")
    assert plan.quality_seconds > 0
    plan = lines(tokamac("convert", tiny, "--dry-run", "--json", "--no-verify").out)[-1]
    assert plan.path == str(Path.cwd() / f"{tiny.name}-4bit")
    assert plan.quality_seconds is None
    both = tokamac("convert", tiny, "-o", "x", "--into", "y")
    assert both.status == 2
    assert "not allowed with" in both.err


def test_quality_in_a_sentence() -> None:
    assert closeness(GOOD, 0.081, "good") == (
        "good; picks the same next token as the original in 95.0 % of 255 positions; perplexity is 1.1 % higher; "
        "KL divergence 0.02 ± 0.001 nats a token; relative error of the weights 8.1 %"
    )
    same = Quality(0.0, None, None, None, None, None, None, 1.0, None, 2)
    assert closeness(same, None, "good") == "good; perplexity is the same; KL divergence 0 nats a token"
    assert closeness(None, None, "") == "unknown"


def test_fit_finds_a_target_for_this_machine_or_another(tokamac: Run, tiny: Path, tmp_path: Path) -> None:
    asked = ("convert", tiny, "-o", tmp_path / "out", "--dry-run")
    fits = tokamac(*asked, "--fit", "256", "--chip", "M1", "--memory", "8")
    assert fits.err.startswith("note: 8.6 bits per weight leave room for 256 tokens\n")
    assert "at most 8.60 bits per weight" in fits.out
    assert tokamac(*asked, "--fit", "256", "--memory", "0.0001").status == 1
    for clash, said in (
        (("--bits", "4"), "bits and a target"),
        (("--target-kl", "1"), "not allowed with argument --fit"),
    ):
        assert said in tokamac(*asked, "--fit", "256", *clash).err
    assert "no effect without --fit" in tokamac(*asked, "--chip", "M1").err


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_an_interruption_says_that_the_same_command_goes_on(
    start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    source = _large(tmp_path)
    process = start("convert", source, "-o", tmp_path / "out", "--method", "round", *flags)
    stream = process.stdout if flags else process.stderr
    assert stream.readline()  # the first tensors are written
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "The same command continues from here." in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def _large(folder: Path) -> Path:
    """A model of so many tensors that one can interrupt it."""
    from tests.quant.models import make_source

    return make_source(folder, "llama", num_hidden_layers=64, hidden_size=256, intermediate_size=1024)


# inspect ------------------------------------------------------------------------------------------------------------------


def test_inspect_shows_what_was_recorded_or_that_nothing_was(tokamac: Run, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert tokamac("convert", tiny, "-o", out, "--method", "round", "--no-verify").status == 0
    record = out / "conversion.json"
    record.unlink(missing_ok=True)
    assert "quality            unknown: nothing was recorded" in tokamac("inspect", out).out
    record.write_text("{")
    assert "quality            unknown: conversion.json is damaged" in tokamac("inspect", out).out
    record.write_text(json.dumps({"format": 1, "bits_per_weight": 4.5, "quality": Outcome(4.5, 0.1, BAD).to_json()}))
    shown = tokamac("inspect", out)
    assert shown.status == 0
    assert "31.0 % of 255 positions" in shown.out
    assert "clearly worse than its source's: convert it again with --group-size 32" in shown.out
    assert "quality" not in tokamac("inspect", out, "--bits", "8").out
    (plain,) = [json.loads(line) for line in tokamac("inspect", out, "--table", "--json").out.splitlines()]
    assert plain["quality"]["kl"] == 3.21


@pytest.mark.parametrize("command", [["convert", "guide", "--dry-run"], ["quality", "guide", "guide", "--tokens", "4"]])
def test_float32_is_multiplied_as_float32_unless_the_environment_says_otherwise(command: list[str]) -> None:
    """MLX reads the variable before its first product on a GPU; importing our packages must not set it."""
    code = (
        "import os, tokamac.engine, tokamac.quant; name = 'MLX_ENABLE_TF32'; before = os.environ.get(name)\n"
        f"from tokamac.app.cli import main; main({command!r}); print(before, os.environ[name])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "MLX_ENABLE_TF32"}
    for given, wanted in ({}, "None 0"), ({"MLX_ENABLE_TF32": "1"}, "1 1"):
        done = subprocess.run(
            [sys.executable, "-c", code], env={**environment, **given}, capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines()[-1] == wanted


# `tokamac quality`: two models on one text, on tiny models.

FIGURES = [field.name for field in fields(Quality)]
EVEN = Quality(0.0123, 0.0011, 0.951, 12.0, 0.5, 12.6, 0.55, 1.05, 0.004, 512)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A model of the same shape and tokenizer, with other weights."""
    return make_tiny(tmp_path / "other", seed=1)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("To read is one thing, to write another. " * 40)  # a token a byte: 1,600
    return path


def test_a_model_is_no_distance_from_itself(tokamac: Run, tiny: Path) -> None:
    done = tokamac("quality", tiny, tiny, "--json", "--tokens", "100")
    assert done.status == 0, done.err
    (found,) = [json.loads(line) for line in done.out.splitlines()]
    assert list(found) == ["a", "b", "text", *FIGURES, "layers", "changed"]
    assert found["text"] == {"source": "a built-in text", "tokens": 100}
    assert (found["kl"], found["top1"], found["perplexity_ratio"]) == (0.0, 1.0, 1.0)
    assert found["perplexity"] == found["reference_perplexity"] > 1
    assert found["layers"] == [0.0, 0.0]
    assert found["positions"] == 100


def test_a_users_text_is_read_from_its_start(tokamac: Run, tiny: Path, other: Path, text: Path, tmp_path: Path) -> None:
    flags = ("--json", "--tokens", "50")
    found = json.loads(tokamac("quality", tiny, other, "-f", text, *flags).out)
    assert found["text"] == {"source": str(text), "tokens": 50}
    longer = tmp_path / "longer.txt"
    longer.write_text(text.read_text() + "And so on. " * 100)
    assert json.loads(tokamac("quality", tiny, other, "-f", longer, *flags).out)["kl"] == found["kl"]


def test_people_read_every_figure_with_its_error(tokamac: Run, tiny: Path, other: Path) -> None:
    done = tokamac("quality", tiny, other, "--tokens", "64")
    assert done.status == 0, done.err
    said = dict(line.split("  ", 1) for line in done.out.split("\n\n")[0].splitlines())
    assert list(said) == [
        "A",
        "B",
        "text",
        "perplexity of A",
        "perplexity of B",
        "B ÷ A",
        "KL divergence",
        "equal top-1",
        "speed of A → B",
    ]
    assert said["text"].strip() == "a built-in text, 64 tokens"
    assert all("±" in said[name] for name in ("perplexity of A", "perplexity of B", "B ÷ A", "KL divergence"))
    assert said["equal top-1"].endswith("% of 64 places")
    assert "comparing 100 % (4 of 4 layers)" in done.err


def test_layers_are_numbered_by_row_and_what_is_unknown_says_so() -> None:
    layers = (*(0.01 * number for number in range(9)), None)
    shown = report(("a", "b"), "t", Comparison(EVEN, layers)).splitlines()
    assert [row.split() for row in shown[-2:]] == [
        ["0", "0", "0.01", "0.02", "0.03", "0.04", "0.05", "0.06", "0.07"],
        ["8", "0.08", "unknown"],
    ]
    nothing = Quality(None, None, None, None, None, None, None, None, None, 512)
    assert report(("a", "b"), "t", Comparison(nothing, ())).count("unknown") == 5
    assert "layers don't correspond" in report(("a", "b"), "t", Comparison(nothing, ()))
    assert "12.6 ± 0.55" in report(("a", "b"), "t", Comparison(EVEN, ()))


def test_different_tokenizers_are_refused(tokamac: Run, tiny: Path) -> None:
    done = tokamac("quality", "guide", tiny)
    assert (done.status, done.out) == (1, "")
    assert done.err.count("\n") == 1
    assert "different tokenizers" in done.err
    assert "Compare a model with its conversions" in done.err


def test_no_more_than_the_context_is_compared_and_that_is_said(tokamac: Run, tmp_path: Path) -> None:
    short = make_tiny(tmp_path / "short", context=64)
    done = tokamac("quality", short, short, "--json")
    assert json.loads(done.out)["text"]["tokens"] == 64
    assert "the context of a model is 64 tokens" in done.err


@pytest.mark.parametrize(
    "flags",
    [(), ("guide", ""), ("guide", "guide", "--tokens", "1"), ("guide", "guide", "--tokens", "x"), ("a", "b", "c")],
)
def test_wrong_usage_ends_with_2(tokamac: Run, flags: tuple[str, ...]) -> None:
    done = tokamac("quality", *flags)
    assert (done.status, done.out) == (2, "")


def test_what_can_not_be_read_is_one_line(tokamac: Run, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("Too few.")
    for arguments, said in (
        ((tiny, tmp_path / "nothing"), "nothing"),
        ((tiny, tiny, "-f", tmp_path / "missing.txt"), "missing.txt can't be read"),
        ((tiny, tiny, "-f", tmp_path / "few.txt"), "few.txt holds 8 characters"),
    ):
        done = tokamac("quality", *arguments)
        assert (done.status, done.out) == (1, "")
        assert said in done.err
        assert done.err.count("\n") == 1


def test_a_model_of_numbers_that_are_none_is_unknown_not_zero(tokamac: Run, tiny: Path, tmp_path: Path) -> None:
    import mlx.core as mx

    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    arrays = mx.load(str(broken / "model.safetensors"))
    assert isinstance(arrays, dict)
    arrays["model.norm.weight"] = arrays["model.norm.weight"] * math.nan
    mx.save_safetensors(str(broken / "model.safetensors"), arrays)
    found = json.loads(tokamac("quality", tiny, broken, "--json", "--tokens", "32").out)
    assert found["kl"] is found["perplexity"] is found["top1"] is None
    assert found["reference_perplexity"] is not None


# What a KV setting costs: `bench --kv-quality` and inspect's table, on tiny models.

Start = Callable[..., "subprocess.Popen[str]"]
ROWS = ["16", "8", "6", "8,4", "6,4", "4"]


@pytest.fixture
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "STEPS", 4)
    monkeypatch.setattr(scoring, "TIMED_TOKENS", 4 * scoring.ROUNDS)


@pytest.fixture
def kv_text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("To read is one thing, to write another. " * 3)  # a token a byte: 120
    return path


@pytest.mark.usefixtures("_short_runs")
def test_kv_quality_json_has_every_setting_and_one_recommendation(tokamac: Run, tiny: Path, kv_text: Path) -> None:
    done = tokamac(
        *("bench", tiny, "--kv-quality", "--json", "-f", kv_text, "--depths", "4,16"),
        *("--kv-bits", "3", "--kv-window", "32", "--kv-keep", "2", "--kv-group-size", "32"),
    )
    assert done.status == 0, done.err
    (found,) = [json.loads(line) for line in done.out.splitlines()]
    assert list(found) == ["model", "text", "kv", "settings", "recommended"]
    assert found["text"] == {"source": str(kv_text), "tokens": 120}
    assert found["kv"] == {"group_size": 32, "window": 32, "keep": 2}
    settings = found["settings"]
    assert [(each["key_bits"], each["value_bits"]) for each in settings] == [*SETTINGS, (3, 3)]
    assert (settings[0]["kl_nats"], settings[0]["top1_share"]) == (0.0, 1.0)
    assert all(each["kl_nats"] > 0 and each["positions"] == 120 for each in settings[1:])
    assert settings[-1]["kl_nats"] > settings[1]["kl_nats"]
    sizes = [each["bytes_per_token"] for each in settings]
    assert sizes == sorted(sizes, reverse=True)
    for each in settings:
        assert [speed["depth"] for speed in each["decode"]] == [4, 16]
        pinned = 2 * settings[0]["bytes_per_token"] // 2  # the keys of two tokens, as they came
        # The window, what it can be taken back by, and what pinned keys are moved from.
        assert each["context_bytes"] == 96 * each["bytes_per_token"] + pinned
    picked = found["recommended"]
    assert picked.keys() == {"key_bits", "value_bits", "why", "reason"}
    assert (picked["key_bits"], picked["value_bits"]) in SETTINGS


@pytest.mark.usefixtures("_short_runs")
def test_kv_quality_for_people(tokamac: Run, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "short", context=200)
    done = tokamac("bench", folder, "--kv-quality")
    assert done.status == 0, done.err
    heading, _, head, *rows, _, advice = done.out.splitlines()
    assert "a built-in text, 200 tokens; groups of 64" in heading
    assert head.split() == ["bits", "a", "token", "of", "16", "KL,", "nats", "top-1", "at", "128", "at", "188"]
    assert [row.split()[0] for row in rows] == ROWS
    assert rows[0].split()[1:7] == ["2.05", "kB", "100%", "0.00000", "100.0%", rows[0].split()[6]]
    assert advice.startswith("Recommended here: ")
    assert "the model's context takes the first 200" in done.err
    assert "decoding is timed at depth 128, 188" in done.err
    assert "8,4 bits: KL" in done.err


@pytest.mark.usefixtures("_short_runs")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--kv-quality", "--runs", "3"], "--runs has no effect with --kv-quality"),
        (["--kv-quality", "--temp", "0"], "--temp has no effect with --kv-quality"),
        (["--kv-quality", "--on-full", "stop"], "--on-full has no effect with --kv-quality"),
        (["--kv-quality", "--depths", "128,0"], "--depths"),
        (["--kv-quality", "--depths", ""], "--depths"),
        (["--kv-quality", "--kv-keep", "system", "--kv-window", "64"], "no system prompt"),
        (["--kv-quality", "--kv-keep", "8"], "without --kv-window"),
        (["--text", "x"], "--text has no effect without --kv-quality"),
        (["--depths", "4"], "--depths has no effect without --kv-quality"),
    ],
)
def test_a_flag_without_effect_is_wrong_usage(tokamac: Run, flags: list[str], said: str) -> None:
    result = tokamac("bench", "guide", *flags)
    assert (result.status, result.out) == (2, "")
    assert said in result.err


@pytest.mark.usefixtures("_short_runs")
def test_a_text_that_can_not_be_read_is_one_line(tokamac: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, said in (("missing", "can't be read"), ("empty", "is empty"), ("binary", "not UTF-8")):
        result = tokamac("bench", "guide", "--kv-quality", "-f", tmp_path / name)
        assert result.status == 1
        assert said in result.err
        assert result.err.count("\n") == 1


@pytest.mark.usefixtures("_short_runs")
def test_ctrl_c_ends_it_at_any_step(start: Start, endless: Path) -> None:
    process = start("bench", endless, "--kv-quality")
    process.stderr.readline()  # it has begun to read
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err


@pytest.mark.usefixtures("_short_runs")
def test_the_recommendation_is_one_sentence_with_its_reason() -> None:
    def one(bits: int, kl: float, tps: float) -> Trial:
        return Trial(bits, bits, 100 * bits, 100_000 * bits, KVDivergence(kl, 0.99, 9), (Speed(4096, tps),))

    exact, eight, four = one(16, 0, 40), one(8, 0.001, 60), one(4, 0.002, 50)
    for advice, said in (
        (Advice(exact, "exact", four), "leave keys and values at 16 bits: 1.60 MB for the whole context is little"),
        (Advice(four, "smallest", four), "--kv-bits 4: the smallest cache that is good enough"),
        (Advice(eight, "faster", four), "--kv-bits 8: 4 is smaller and good enough"),
        (Advice(exact, "alone", exact), "16 bits: no packed cache is good enough"),
    ):
        shown = sentence(advice)
        assert said in shown
        assert shown.endswith(".")
        assert "\n" not in shown
    assert "decodes 50.0 tok/s at depth 4,096 against 60.0 tok/s" in sentence(Advice(eight, "faster", four))


@pytest.mark.usefixtures("_short_runs")
def test_the_text_is_long_enough_to_look_back_in() -> None:
    assert 1200 < len(shipped_text()) / 4 < 2000


def table_of(out: str) -> list[list[str]]:
    lines = out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("layers"))
    return [line.split("  ") for line in lines[at:]]


@pytest.mark.usefixtures("_short_runs")
def test_inspect_shows_the_caches_that_flags_ask_for(tokamac: Run, tiny: Path) -> None:
    flags = ("--context", "256", "--kv-bits", "8,4", "--kv-group-size", "32", "--kv-window", "64", "--kv-keep", "8")
    shown = tokamac("inspect", tiny, *flags)
    assert shown.status == 0, shown.err
    head, row, whole, note = [" ".join(filter(None, cells)).split() for cells in table_of(shown.out)]
    assert head[:5] == ["layers", "kind", "keys", "values", "window"]
    a_token = 2 * 2 * ((64 + 2 * 8) + (32 + 2 * 8))
    assert row == [*["0-1", "window", "8", "4", "64,", "8", "pinned"], str(a_token), "B", "73.7", "kB"]
    assert whole[0] == "all"
    assert 128 * a_token + 8 * (2 * 2 * 64 * 4) == 73_728  # eight keys as they came, which pinned ones are moved from
    assert note[:5] == ["a", "window", "of", "64", "tokens"]
    plain = tokamac("inspect", tiny, "--context", "256")
    assert "layers" not in plain.out
    assert "KV cache" in plain.out


@pytest.mark.usefixtures("_short_runs")
def test_inspect_json_counts_as_the_table_does_and_keeps_its_fields(tokamac: Run, tiny: Path) -> None:
    def found(*flags: str) -> dict[str, Any]:
        done = tokamac("inspect", tiny, "--json", "--context", "256", *flags)
        assert (done.status, done.err) == (0, "")
        result: dict[str, Any] = json.loads(done.out)
        return result

    plain, windowed = found(), found("--kv-bits", "8", "--kv-window", "64", "--kv-keep", "system")
    assert list(plain) == list(windowed)
    assert windowed["kv_bytes_per_token"] == 2 * 2 * 2 * (64 + 8)
    assert windowed["memory"]["kv"] == 128 * windowed["kv_bytes_per_token"]
