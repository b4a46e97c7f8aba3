"""`tokamac quality`: two models on one text, on tiny models."""

import json
import math
import shutil
from dataclasses import fields
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.tiny import make_tiny
from tokamac.app.commands.quality import report
from tokamac.quant.evaluation import Comparison
from tokamac.quant.report import Quality

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
    assert list(found) == ["a", "b", "text", *FIGURES, "layers"]
    assert found["text"] == {"source": "a text of our own", "tokens": 100}
    assert (found["kl"], found["top1"], found["perplexity_ratio"]) == (0.0, 1.0, 1.0)
    assert found["perplexity"] == found["reference_perplexity"] > 1
    assert found["layers"] == [0.0, 0.0]
    assert found["positions"] == 100


def test_a_conversion_is_nearer_to_its_source_than_another_model(
    tokamac: Run, tiny: Path, other: Path, tmp_path: Path
) -> None:
    converted = tmp_path / "converted"
    flags = ("--bits", "8", "--group-size", "32", "--no-verify", "--method", "round")
    assert tokamac("convert", tiny, "-o", converted, *flags).status == 0
    near, far = (json.loads(tokamac("quality", tiny, b, "--json", "--tokens", "64").out) for b in (converted, other))
    assert 0 < near["kl"] < far["kl"] / 20
    assert near["top1"] > far["top1"]
    assert all(0 < error < 0.05 for error in near["layers"])
    assert all(error > 0.5 for error in far["layers"])


def test_the_first_model_is_the_reference(tokamac: Run, tiny: Path, other: Path) -> None:
    one, two = (
        json.loads(tokamac("quality", *pair, "--json", "--tokens", "64").out) for pair in ((tiny, other), (other, tiny))
    )
    assert (one["a"], one["b"]) == (str(tiny), str(other))
    assert one["perplexity"] == pytest.approx(two["reference_perplexity"])
    assert one["perplexity_ratio"] == pytest.approx(1 / two["perplexity_ratio"])
    assert one["perplexity_ratio"] == pytest.approx(one["perplexity"] / one["reference_perplexity"])


def test_a_users_text_is_read_from_its_beginning(
    tokamac: Run, tiny: Path, other: Path, text: Path, tmp_path: Path
) -> None:
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
    ]
    assert said["text"].strip() == "a text of our own, 64 tokens"
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


def test_a_word_more_is_another_tokenizer(tokamac: Run, tiny: Path, tmp_path: Path) -> None:
    grown = tmp_path / "grown"
    shutil.copytree(tiny, grown)
    tokenizer = json.loads((grown / "tokenizer.json").read_text())
    last = {**tokenizer["added_tokens"][-1], "id": tokenizer["added_tokens"][-1]["id"] + 1, "content": "<|more|>"}
    tokenizer["added_tokens"].append(last)
    (grown / "tokenizer.json").write_text(json.dumps(tokenizer))
    done = tokamac("quality", tiny, grown)
    assert done.status == 1
    assert "different tokenizers" in done.err


def test_no_more_than_the_context_is_compared_and_that_is_said(tokamac: Run, tmp_path: Path) -> None:
    short = make_tiny(tmp_path / "short", context=64)
    done = tokamac("quality", short, short, "--json")
    assert json.loads(done.out)["text"]["tokens"] == 64
    assert "the context of a model is 64 tokens" in done.err


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("guide", ""),
        ("guide", "guide", "--tokens", "1"),
        ("guide", "guide", "--tokens", "x"),
        ("a", "b", "c"),
    ],
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


def test_a_long_text_is_compared_in_windows(tokamac: Run, tiny: Path, other: Path, text: Path) -> None:
    flags = ("-f", text, "--tokens", "1200", "--window", "256", "--json")
    done = tokamac("quality", tiny, other, *flags)
    assert done.status == 0
    found = json.loads(done.out)
    assert (found["text"]["tokens"], found["text"]["window"], found["positions"]) == (1200, 256, 1200)
    assert "layers" not in found
    alone = json.loads(tokamac("quality", other, *flags).out)
    assert alone["perplexity"] == pytest.approx(found["perplexity"], rel=1e-4)
    shown = tokamac("quality", tiny, "-f", text)
    assert shown.status == 0
    assert "perplexity" in shown.out
    refused = tokamac("quality", tiny, other, "-f", text, "--window", "4096")
    assert refused.status == 1
    assert "context" in refused.err
    assert tokamac("quality", tiny, other, "--stride", "4").status == 2
