"""`convert`: its flags, the plan, progress and result for people and for programs, and how it ends when it is interrupted."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tokamac.app.backend.subprocess import ConvertedLine, Expected, Planned, Refused, StageLine, TensorWritten, decode
from tokamac.app.commands import convert
from tokamac.app.commands.convert import ConversionProgress, DiskSpace, plan_text
from tokamac.app.verdict import closeness
from tokamac.quant import Conversion, TensorDone
from tokamac.quant import convert as quant_convert
from tokamac.quant.report import Outcome, Quality, StageDone

GOOD = Quality(0.02, 0.001, 0.95, 9.0, 0.5, 9.1, 0.5, 1.011, 0.004, 255)
BAD = Quality(3.21, 0.01, 0.31, 9.0, 0.5, 90.0, 5.0, 10.0, 0.4, 255)


def asked(*words: str) -> dict[str, Any]:
    parser = convert.parser()
    return convert.requested(parser, parser.parse_args(["source", *words]))


def lines(text: str) -> list[Any]:
    return [decode(line.encode()) for line in text.splitlines()]


# Flags --------------------------------------------------------------------------------------------------------------------


def test_every_flag_of_the_contract_is_an_option_of_a_conversion() -> None:
    assert asked() == {
        "bits": None, "group_size": None, "mode": "affine", "method": None, "recipe": None, "target_bpw": None, "calibration": None,
        "dtype": None, "embed_bits": None, "dequantize": False, "verify": True, "adapter": None, "unchecked": False,
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
    assert asked("--calibration", "~/notes.txt")["calibration"] == Path("~/notes.txt").expanduser()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--bits", "7"), "--bits"),
        (("--bits", "4", "--target-bpw", "4.5"), "contradict"),
        (("--recipe", "mixed_4_6", "--target-bpw", "4.5"), "contradict"),
        (("--mode", "mxfp4", "--bits", "8"), "mxfp4 has 4 bits"),
        (("--mode", "mxfp8", "--method", "search"), "affine"),
        (("--mode", "mxfp4", "--method", "gptq"), "affine"),
        (("--dequantize", "--bits", "4"), "--dequantize"),
        (("--method", "round", "--calibration"), "looks at no text"),
        (("--target-bpw", "1"), "out of range"),
        (("--target-bpw", "four"), "--target-bpw"),
    ],
)
def test_flags_that_contradict_each_other_are_wrong_usage(tokamac: Run, flags: tuple[str, ...], said: str) -> None:
    done = tokamac("convert", "source", *flags)
    assert (done.status, done.out) == (2, "")
    assert said in done.err
    assert done.err.count("\n") == 1


def test_the_help_is_grouped_and_has_examples(tokamac: Run) -> None:
    shown = tokamac("convert", "--help").out
    for said in (
        "how weights are packed:",
        "how the packed values are found:",
        "the run:",
        "examples:",
        "--target-bpw 4.5",
    ):
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
    assert isinstance(plan, Planned)
    assert sum(part.parameters for part in plan.parts) == plan.parameters
    assert sum(part.nbytes for part in plan.parts) == plan.weight_bytes
    assert plan.seconds is not None
    assert plan.disk.fits
    assert plan.disk.needed > plan.output_bytes


def test_a_plan_that_does_not_fit_or_whose_time_is_unknown_says_so(tiny: Path, tmp_path: Path) -> None:
    plan = quant_convert(tiny, tmp_path / "out", dry_run=True, method="round")
    shown = plan_text(plan, tmp_path / "out", DiskSpace(needed=2_000_000, free=1_000_000), None)
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
    assert "unknown → unknown expected here" in done.out  # nobody has measured this machine with such a model
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


def test_a_bad_result_is_loud_and_still_a_result(
    tokamac: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokamac.quant.convert", Ran(Outcome(4.5, 0.3, BAD)), raising=False)
    done = tokamac("convert", tiny, "-o", tmp_path / "out")
    assert done.status == 0
    assert done.err.count("warning: ") == 2
    assert "note: a note" in done.err
    assert "31.0 % of 255 places" in done.out
    result = lines(tokamac("convert", tiny, "-o", tmp_path / "out", "--json").out)[-1]
    assert isinstance(result, ConvertedLine)
    assert result.quality is not None
    assert len(result.quality.concerns) == 2


def test_a_result_that_was_not_compared_says_so(tiny: Path, tmp_path: Path) -> None:
    speeds = convert.Speeds(10.0, 30.0)
    unable = Ran(Outcome(4.5, 0.08, unable="there is no tokenizer"))(tiny, tmp_path)
    assert "no text was compared: there is no tokenizer" in convert.summary(unable, speeds)
    assert "not compared with the source" in convert.summary(Ran(None)(tiny, tmp_path), speeds)
    assert "10.0 tok/s → 30.0 tok/s expected here" in convert.summary(Ran(None)(tiny, tmp_path), speeds)


def test_quality_in_a_sentence() -> None:
    assert closeness(GOOD, 0.081) == (
        "its likeliest next token is the source's at 95.0 % of 255 places of a text; perplexity is 1.1 % higher; "
        "KL divergence 0.02 ± 0.001 nats a token; relative error of its weights 8.1 %"
    )
    same = Quality(0.0, None, None, None, None, None, None, 1.0, None, 2)
    assert closeness(same, None) == "perplexity is the same; KL divergence 0 nats a token"
    assert closeness(None, None) == "unknown"


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_an_interruption_says_that_the_same_command_goes_on(
    start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    source = _large(tmp_path)
    process = start("convert", source, "-o", tmp_path / "out", "--method", "round", *flags)
    stream = process.stdout if flags else process.stderr
    assert stream.readline()  # the first tensors are written
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "The same command continues from here." in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def _large(folder: Path) -> Path:
    """A model of so many tensors that one can interrupt it."""
    from tests.quant.quant_models import make_source

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
    assert "31.0 % of 255 places" in shown.out
    assert "expect clearly worse answers" in shown.out
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
