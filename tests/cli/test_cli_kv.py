"""What a KV setting costs: `bench --kv-quality` and inspect's table, on tiny models."""

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.tiny import make_tiny
from tokamac.app.commands.kv_quality import SETTINGS, sentence, shipped_text
from tokamac.engine import scoring
from tokamac.engine.kv.divergence import Advice, KVDivergence, Speed, Trial

Start = Callable[..., "subprocess.Popen[str]"]
ROWS = ["16", "8", "6", "8,4", "6,4", "4"]


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "STEPS", 4)
    monkeypatch.setattr(scoring, "TIMED_TOKENS", 4 * scoring.ROUNDS)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("To read is one thing, to write another. " * 3)  # a token a byte: 120
    return path


def test_kv_quality_json_has_every_setting_and_one_recommendation(tokamac: Run, tiny: Path, text: Path) -> None:
    done = tokamac(
        *("bench", tiny, "--kv-quality", "--json", "-f", text, "--depths", "4,16"),
        *("--kv-bits", "3", "--kv-window", "32", "--kv-keep", "2", "--kv-group-size", "32"),
    )
    assert done.status == 0, done.err
    (found,) = [json.loads(line) for line in done.out.splitlines()]
    assert list(found) == ["model", "text", "kv", "settings", "recommended"]
    assert found["text"] == {"source": str(text), "tokens": 120}
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


def test_kv_quality_for_people(tokamac: Run, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "short", context=200)
    done = tokamac("bench", folder, "--kv-quality")
    assert done.status == 0, done.err
    heading, _, head, *rows, _, advice = done.out.splitlines()
    assert "a text of our own, 200 tokens; groups of 64" in heading
    assert head.split() == ["bits", "a", "token", "of", "16", "KL,", "nats", "top-1", "at", "128", "at", "188"]
    assert [row.split()[0] for row in rows] == ROWS
    assert rows[0].split()[1:7] == ["2.05", "kB", "100%", "0.00000", "100.0%", rows[0].split()[6]]
    assert advice.startswith("Recommended here: ")
    assert "the model's context takes the first 200" in done.err
    assert "decoding is timed at depth 128, 188" in done.err
    assert "8,4 bits: KL" in done.err


def test_a_setting_the_model_can_not_take_is_a_row_that_says_why(tokamac: Run, tmp_path: Path, text: Path) -> None:
    folder = make_tiny(tmp_path / "odd", head_size=48)
    flags = ("bench", folder, "--kv-quality", "-f", text, "--depths", "4")
    rows = tokamac(*flags).out.splitlines()[3:9]
    assert [row.split()[0] for row in rows] == ROWS
    assert all("48 numbers per head can't be packed" in row for row in rows[1:])
    settings = json.loads(tokamac(*flags, "--json").out)["settings"]
    assert [each["refused"] is None for each in settings] == [True, *[False] * 5]
    assert settings[1]["kl_nats"] is settings[1]["bytes_per_token"] is None


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


def test_a_text_that_can_not_be_read_is_one_line(tokamac: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, said in (("missing", "can't be read"), ("empty", "is empty"), ("binary", "not UTF-8")):
        result = tokamac("bench", "guide", "--kv-quality", "-f", tmp_path / name)
        assert result.status == 1
        assert said in result.err
        assert result.err.count("\n") == 1


def test_ctrl_c_ends_it_at_any_step(start: Start, endless: Path) -> None:
    process = start("bench", endless, "--kv-quality")
    assert process.stderr is not None
    process.stderr.readline()  # it has begun to read
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err


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


def test_the_text_is_long_enough_to_look_back_in() -> None:
    assert 1200 < len(shipped_text()) / 4 < 2000


def table_of(out: str) -> list[list[str]]:
    lines = out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("layers"))
    return [line.split("  ") for line in lines[at:]]


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


def test_inspect_refuses_what_the_engine_would(tokamac: Run, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "odd", head_size=48)
    result = tokamac("inspect", folder, "--kv-bits", "8")
    assert result.status == 1
    assert "48 numbers per head" in result.err
    assert tokamac("inspect", folder, "--kv-group-size", "32").status == 2
