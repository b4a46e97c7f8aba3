"""What is said where a word is mistyped, a model is called by a part of its name, or something is elsewhere."""

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Run

SHORT = ("--prompt", "16", "--max-tokens", "4")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("chta", "tokamac chat"),
        ("askk", "tokamac ask"),
        ("Bench", "tokamac bench"),
        ("version", "tokamac --version"),
        ("settings", "/settings in the chat"),
        ("pull", "tokamac models pull"),
        ("guide", "tokamac chat guide"),
        ("mlx-community/Qwen3-8B-4bit", "tokamac chat mlx-community/Qwen3-8B-4bit"),
    ],
)
def test_a_word_that_is_no_command(tokamac: Run, written: str, meant: str) -> None:
    done = tokamac(written)
    said = f"tokamac: there is no command {written!r}; did you mean {meant}? See `tokamac --help`.\n"
    assert (done.status, done.out, done.err) == (2, "", said)


def test_a_word_that_is_like_nothing_gets_no_guess(tokamac: Run) -> None:
    said = tokamac("frobnicate").err
    assert "did you mean" not in said
    assert "tokamac chat MODEL" in said


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("ask hi --jsno", "--json"),
        ("chat --plian", "--plain"),
        ("inspect guide --contxt=512", "--context"),
        ("cache check --kv-bit 8", "--kv-bits"),
        ("models lst", "list"),
        ("cache --json claer", "clear"),
        ("chats exprot k3v7", "export"),
    ],
)
def test_a_flag_or_an_action_that_is_mistyped(tokamac: Run, arguments: str, meant: str) -> None:
    command, *_ = words = arguments.split()
    done = tokamac(*words)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(f"tokamac {command}: ")
    assert done.err.endswith(f"; did you mean {meant}? See `tokamac {command} --help`.\n")


@pytest.mark.parametrize(
    ("written", "meant"), [("--hepl", "--help"), ("--verson", "--version"), ("--plian", "--plain")]
)
def test_without_a_command_the_program_complains_and_not_the_chat(tokamac: Run, written: str, meant: str) -> None:
    done = tokamac(written)
    said = f"tokamac: unrecognized arguments: {written}; did you mean {meant}? See `tokamac --help` and `tokamac chat --help`.\n"
    assert (done.status, done.err) == (2, said)


def test_what_is_mistyped_does_not_reach_the_terminal_as_it_is(tokamac: Run) -> None:
    for arguments in (("ask", "hi", "--\x1b[2J"), ("\x1b]0;x\x07",), ("models", "\x1b[2J")):
        done = tokamac(*arguments)
        assert done.status == 2
        assert "\x1b" not in done.err


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("ask hi -m guid", "guide"),
        ("bench Qwen3-8B-4bit", "mlx-community/Qwen3-8B-4bit"),
        ("models pull qwen3-8b-4bt", "mlx-community/Qwen3-8B-4bit"),
        ("bench --machine Qwen3-8B-4bit", "mlx-community/Qwen3-8B-4bit"),
    ],
)
def test_a_model_that_is_called_nearly_so(tokamac: Run, arguments: str, meant: str) -> None:
    *_, name = words = arguments.split()
    done = tokamac(*words)
    assert (done.status, done.out) == (1, "")
    assert (
        done.err == f"tokamac: there is no model {name!r}. Did you mean {meant}?\n"
    )  # and nothing was measured before


def test_a_model_that_is_on_disk_is_found_by_its_name(
    tokamac: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--someone--frobnicator-9b").mkdir()
    assert "Did you mean someone/frobnicator-9b?" in tokamac("ask", "hi", "-m", "Frobnicator-9B").err


def test_the_embedded_model_is_always_here(tokamac: Run) -> None:
    pulled = tokamac("models", "pull", "guide", "--json")
    assert pulled.status == 0
    assert json.loads(pulled.out)["event"] == "pulled"
    assert "guide is the embedded model" in pulled.err
    for flags in ((), ("--unfinished",)):
        kept = tokamac("models", "remove", "guide", *flags)
        assert kept.status == 1
        assert kept.err == "tokamac: guide is the embedded model. It is always here, and can't be removed.\n"


def test_a_folder_is_not_pulled_and_not_removed(tokamac: Run, tiny: Path) -> None:
    for action in ("pull", "remove"):
        done = tokamac("models", action, tiny)
        assert done.status == 1
        assert "is a folder, not a Hugging Face id" in done.err
    assert (tiny / "config.json").exists()


def test_what_is_only_predicted_says_how_to_measure_that_model(tokamac: Run) -> None:
    done = tokamac("inspect", "Qwen3-8B-4bit", "--prompt", "64")
    whole = "mlx-community/Qwen3-8B-4bit"
    assert done.status == 0
    assert f"tokamac models pull {whole}, then tokamac bench {whole} --machine" in done.err


def test_a_model_that_is_here_is_measured_at_once_and_a_config_alone_is_not(
    tokamac: Run, tiny: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "my model"
    shutil.copytree(tiny, folder)
    said = tokamac("inspect", folder).err
    assert not said or f"; measure it: tokamac bench '{folder}' --machine" in said
    (folder / "model.safetensors").unlink()
    assert "measure it" not in tokamac("inspect", folder).err


def test_json_names_the_model_that_was_found(tokamac: Run) -> None:
    done = tokamac("inspect", "qwen3-8b-4bit", "--chip", "M3", "--gpu-cores", "10", "--json")
    assert json.loads(done.out)["model"] == "mlx-community/Qwen3-8B-4bit"


def test_one_run_is_one_run_and_where_the_picture_is_is_said(tokamac: Run, tiny: Path, tmp_path: Path) -> None:
    picture = tmp_path / "decode.svg"
    done = tokamac("bench", tiny, *SHORT, "--runs", "1", "--plot", picture)
    assert done.status == 0
    assert "warming up, then one run of 16 prompt tokens" in done.err
    assert done.err.splitlines()[-1] == f"note: the picture is in {picture}"
    assert picture.stat().st_size > 0


def test_the_roofline_of_a_small_model_is_drawn_with_both_phases_on_it(tokamac: Run) -> None:
    done = tokamac("inspect", "guide", "--chip", "M4 Max", "--gpu-cores", "40", "--plot")
    assert done.status == 0
    (note,) = done.err.splitlines()
    assert note.startswith("note: so small a model waits for the processor")
    drawn = done.out.split("roofline, TFLOP/s")[1]
    legend, axes = drawn[: drawn.index("PP prefill")], drawn[drawn.index("PP prefill") + 2 :]
    assert "DD decode, waits for memory" in legend
    assert sum("D" in line for line in axes.splitlines()) == 1
