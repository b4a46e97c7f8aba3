"""`tokamac bench --machine`: what the machine reaches, beside its table, and a model's pace on it."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run


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


def test_for_people_the_unknown_is_said(tokamac: Run, tiny: Path) -> None:
    done = tokamac("bench", tiny, "--machine")
    assert done.status == 0, done.err
    assert "unknown" in next(line for line in done.out.splitlines() if line.startswith("matrix × vector, read"))
    assert "expected decode" in done.out
    assert "computing on cpu" in done.out.splitlines()[0]


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
