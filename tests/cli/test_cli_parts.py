"""The pieces: flags, the prompt, what is written where."""

import io
import json
import os
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tokamac.app import output, units
from tokamac.app.commands import ask
from tokamac.app.commands.ask import compose
from tokamac.app.options import SAMPLING_FLAGS, kv_bits, kv_spec, sampling
from tokamac.engine.events import Finished, PrefillProgress, TextChunk
from tokamac.engine.metrics import Gaps, Metrics, Outlier
from tokamac.engine.options import KVSpec, Sampling

NOTHING = Metrics(3, 0, 3, 0, *[None] * 13)  # type: ignore[arg-type]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def flags(*arguments: str) -> tuple[Sampling, KVSpec]:
    parser = ask.parser()
    options = parser.parse_args(["hi", *arguments])
    return sampling(parser, options), kv_spec(parser, options)


def test_what_is_not_given_is_left_to_the_model() -> None:
    assert flags() == (Sampling(), KVSpec())


def test_every_generation_and_kv_flag_arrives() -> None:
    given = (
        "--max-tokens 9 --temp 0 --top-p 0.5 --top-k 3 --min-p 0.1 --repetition-penalty 1.1 --seed 4 --stop a --stop b"
    )
    wanted = Sampling(0, 0.5, 3, 0.1, 1.1, 4, 9, ("a", "b"))
    assert flags(*given.split())[0] == wanted
    kv = flags(*["--kv-bits", "8,4", "--kv-group-size", "32", "--kv-window", "99", "--kv-keep", "system"])[1]
    assert kv == KVSpec(8, 4, 32, 99, "system")


def test_every_option_of_sampling_has_a_flag() -> None:
    assert {*SAMPLING_FLAGS.values(), "logprobs"} == {each.name for each in fields(Sampling)}


def test_flags_of_penalties_and_endings_arrive() -> None:
    given = (
        "--stop-token-id 5 --stop-token-id 6 --min-tokens 4 --logit-bias 9=-100 --logit-bias 3=2.5 --presence-penalty 0.5 "
        "--frequency-penalty -0.25 --xtc-probability 0.5 --xtc-threshold 0.2 --dry-multiplier 0.8 --dry-base 2 "
        "--dry-allowed-length 3 --dry-sequence-breaker | --sampler-order dry,penalties,top_k,top_p,min_p,xtc,temperature"
    )
    assert flags(*given.split())[0] == Sampling(
        stop_token_ids=(5, 6), min_tokens=4, logit_bias={9: -100, 3: 2.5}, presence_penalty=0.5, frequency_penalty=-0.25,
        xtc_probability=0.5, xtc_threshold=0.2, dry_multiplier=0.8, dry_base=2.0, dry_allowed_length=3,
        dry_sequence_breakers=("|",), order=("dry", "penalties", "top_k", "top_p", "min_p", "xtc", "temperature"),
    )  # fmt: skip


def test_how_a_stage_works_may_be_changed_where_the_settings_turn_it_on() -> None:
    parser = ask.parser()
    options = parser.parse_args(["hi", "--dry-base", "2"])
    assert sampling(parser, options, Sampling(dry_multiplier=0.5)) == Sampling(dry_multiplier=0.5, dry_base=2)


def test_flags_change_a_base_one_by_one() -> None:
    parser = ask.parser()
    options = parser.parse_args(["hi", "--temp", "0", "--kv-keep", "9"])
    assert sampling(parser, options, Sampling(top_k=5)) == Sampling(temperature=0, top_k=5)
    assert kv_spec(parser, options, KVSpec(window=100)) == KVSpec(window=100, keep=9)


@pytest.mark.parametrize(("text", "bits"), [("16", (16, 16)), ("4", (4, 4)), ("8,4", (8, 4)), ("16,8", (16, 8))])
def test_kv_bits(text: str, bits: tuple[int, int]) -> None:
    assert kv_bits(text) == bits


def piped(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_the_files_then_the_pipe_then_the_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    piped(monkeypatch, "café\n".encode())
    text = compose("Review this", [str(tmp_path / "a.py")])
    assert text == f"File {tmp_path}/a.py:\n```\nx = 1\n```\n\nInput:\n```\ncafé\n```\n\nReview this"


@pytest.mark.parametrize("argument", [None, "-", "", " "])
def test_a_pipe_alone_is_the_prompt_itself(monkeypatch: pytest.MonkeyPatch, argument: str | None) -> None:
    piped(monkeypatch, b"  What is KV?\n")
    assert compose(argument, []) == "What is KV?"


def test_text_can_not_end_its_own_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    piped(monkeypatch, b"")
    (tmp_path / "a.md").write_text("```\ncode\n```\n")
    assert compose(None, [str(tmp_path / "a.md")]).endswith(":\n````\n```\ncode\n```\n````")


def test_no_standard_input_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert compose("hi", []) == "hi"
    monkeypatch.setattr(sys, "stdin", Terminal("typed"))
    assert compose("hi", []) == "hi"
    assert compose("-", []) == "typed"


def test_model_text_in_a_pipe_is_as_safe_as_on_a_terminal_and_what_is_replaced_is_seen() -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w", encoding="utf-8") as stream:
        text = output.ModelText(stream)
        text.write("a\tb\x1b[31mc\x07")
        text.write("é\u202e zero\u200bwidth 👩\u200d🚀\n\n")
        text.end()
    with os.fdopen(read, encoding="utf-8") as stream:
        assert stream.read() == "a\tb\ufffdc\ufffdé\ufffd zero\u200bwidth 👩\u200d🚀\n\n"


def test_model_text_in_a_file_is_what_the_model_wrote(tmp_path: Path) -> None:
    written = "a\tb\x1b[31mc\x07\x9b\x7f é\u202e\u2028\n\n"
    with (tmp_path / "answer.txt").open("w", encoding="utf-8", newline="") as stream:
        text = output.ModelText(stream)
        for char in written:
            text.write(char)
        text.end()
    assert (tmp_path / "answer.txt").read_bytes() == written.encode()


def test_model_text_on_a_terminal_passes_the_sanitiser_and_ends_its_line() -> None:
    stream = Terminal()
    text = output.ModelText(stream)
    for piece in ("a\x1b", "]52;c;aGk", "=\x07b\u202e"):
        text.write(piece)
    text.end()
    assert stream.getvalue() == "a\ufffdb\ufffd\n"


def test_progress_is_one_line_that_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    bar = output.Progress("loading")
    bar.update(0, 100)
    bar.update(100, 100, "model.layers.0.self_attn.q_proj.weight\x1b[2J")
    bar.clear()
    lines = [line.removeprefix("\x1b[K") for line in screen.getvalue().split("\r")]
    assert len(lines) == 4
    assert all(len(line) < 20 and "\n" not in line for line in lines)
    assert lines[-1] == ""


def test_progress_without_a_terminal_is_a_plain_line_a_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    bar = output.Progress("downloading")
    for done in range(101):
        bar.update(done, 100)
    bar.clear()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[5] == "downloading 50 % (50 B of 100 B)"
    quiet = output.Progress("loading", plain=False)
    quiet.update(1, 2)
    assert capsys.readouterr().err == ""


def test_thinking_goes_to_stderr_where_a_person_looks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reply = [
        PrefillProgress(3, 3, 0),
        TextChunk("let me see\x1b[2J", "thinking"),
        TextChunk("Yes."),
        Finished("stop", "Yes.", NOTHING, "let me see"),
    ]
    assert ask.write(iter(reply), ask.TextWriter(verbose=False)) == 0
    assert capsys.readouterr() == ("Yes.\n", "")
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    ask.write(iter(reply), ask.TextWriter(verbose=False))
    assert "let me see" in screen.getvalue()
    assert "\x1b[2J" not in screen.getvalue()


def test_unknown_metrics_are_said_to_be_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ask.describe(NOTHING)
    assert all("None" not in line and "inf" not in line for line in lines)
    assert "decode unknown" in lines[1]


def test_verbose_metrics_say_everything(capsys: pytest.CaptureFixture[str]) -> None:
    known = Metrics(10, 4, 6, 5, 0.1, 0.08, 0.5, 75.0, 10.0, Gaps(1, 2, 3, 4), 1000, 2000, 300, 0.1, 20.0, None, 9000)
    text = "\n".join(ask.describe(known))
    for said in (
        "10 tokens, 4 of them cached",
        "75.0 tok/s",
        "10.0 tok/s",
        "p95 2.00 ms",
        "20.0 tok/s at most",
        "9.00 kB",
    ):
        assert said in text


def test_gaps_that_stand_out_are_told_with_their_causes(capsys: pytest.CaptureFixture[str]) -> None:
    end = Finished("stop", "", NOTHING, outliers=(Outlier(257, 41.2, ("pool cleared",)), Outlier(9, 20.0)))
    ask.write(iter([end]), ask.TextWriter(verbose=True))
    told = capsys.readouterr().err.splitlines()
    assert told[-3:-1] == [
        "slow gap  41.2 ms at token 257: pool cleared",
        "slow gap  20.0 ms at token 9: cause unknown",
    ]
    ask.write(iter([end]), ask.JsonWriter())
    assert json.loads(capsys.readouterr().out)["outliers"] == [
        {"token": 257, "gap_ms": 41.2, "causes": ["pool cleared"]},
        {"token": 9, "gap_ms": 20.0, "causes": []},
    ]


def test_models_without_a_cache(tokamac: Run) -> None:
    listed = tokamac("models")
    assert listed.status == 0
    assert "models pull" in listed.out


NAME = "x" * 10_000


@pytest.mark.parametrize(
    "arguments",
    [
        (NAME,),
        (f"--{NAME}",),
        ("ask", "hi", "-m", NAME),
        ("ask", "hi", "-m", f"/{NAME}"),
        ("ask", "hi", "-f", NAME),
        ("ask", "hi", f"--{NAME}"),
        ("inspect", "a b " * 3000),
        ("convert", "y/" * 5000),
        ("models", "pull", f"org/{NAME}"),
        ("models", "remove", NAME),
        ("chats", "show", NAME),
    ],
    ids=lambda arguments: " ".join(word[:12] for word in arguments),
)
def test_a_name_of_thousands_of_characters_is_not_printed_whole(tokamac: Run, arguments: tuple[str, ...]) -> None:
    done = tokamac(*arguments)
    assert done.status in (1, 2)
    assert 20 < len(done.err) < 3000
    assert done.out == ""


def test_sizes_that_differ_are_told_apart() -> None:
    assert units.sizes(1_500_000, 2_500_000) == ("1.50 MB", "2.50 MB")
    assert units.sizes(2_000_100, 2_000_200) == ("2,000,100 B", "2,000,200 B")
    assert units.sizes(5, 5) == ("5 B", "5 B")
