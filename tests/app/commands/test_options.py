"""Flags and settings: parsing, thinking, adapters and memory limits."""

import io
import json
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import TextIO

import pytest

from tests.app.commands.conftest import Run
from tests.app.plain.plain_chat import OBEYED, last_path
from tests.app.plain.plain_chat import piped as plain_chat_piped
from tests.engine.helpers import as_mlx, write_model, write_peft
from tests.engine.inside import replies_of, runtime_of
from tokamac.app import settings
from tokamac.app.backend.child import _memory_use, load_engine
from tokamac.app.backend.protocol import Load
from tokamac.app.chat.start import ChatOptions, begin
from tokamac.app.commands import ask
from tokamac.app.commands.bench.runs import message_ids
from tokamac.app.commands.loading import COMPILING, MEASURING, tell_loading
from tokamac.app.commands.prompts import compose
from tokamac.app.options import SAMPLING_FLAGS, default_model, kv_spec, sampling
from tokamac.app.settings import Settings
from tokamac.app.text import terminal
from tokamac.engine import Engine, Message, OptionError, TemplateOptions
from tokamac.engine.events import Finished, LoadProgress, PrefillProgress, TextChunk
from tokamac.engine.metrics import Gaps, Metrics, Outlier, PromptBeside
from tokamac.engine.model.adapters import read_adapter
from tokamac.engine.options import KVSpec, Sampling

# The pieces: flags, the prompt, what is written where.

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
    own = {"logprobs", "json_schema", "loop_grace"}
    assert {*SAMPLING_FLAGS.values(), *own} == {each.name for each in fields(Sampling)}


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


def piped(monkeypatch: pytest.MonkeyPatch, data: bytes | None, stdin: TextIO | None = None) -> None:
    monkeypatch.setattr(sys, "stdin", stdin if data is None else io.TextIOWrapper(io.BytesIO(data)))


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
    piped(monkeypatch, None)
    assert compose("hi", []) == "hi"
    piped(monkeypatch, None, Terminal("typed"))
    assert compose("hi", []) == "hi"
    assert compose("-", []) == "typed"


def test_model_text_in_a_pipe_is_as_safe_as_on_a_terminal_and_what_is_replaced_is_seen() -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w", encoding="utf-8") as stream:
        text = terminal.ModelText(stream)
        text.write("a\tb\x1b[31mc\x07")
        text.write("é\u202e zero\u200bwidth 👩\u200d🚀\n\n")
        text.end()
    with os.fdopen(read, encoding="utf-8") as stream:
        assert stream.read() == "a\tb\ufffdc\ufffdé\ufffd zero\u200bwidth 👩\u200d🚀\n\n"


def test_model_text_in_a_file_is_what_the_model_wrote(tmp_path: Path) -> None:
    written = "a\tb\x1b[31mc\x07\x9b\x7f é\u202e\u2028\n\n"
    with (tmp_path / "answer.txt").open("w", encoding="utf-8", newline="") as stream:
        text = terminal.ModelText(stream)
        for char in written:
            text.write(char)
        text.end()
    assert (tmp_path / "answer.txt").read_bytes() == written.encode()


def test_model_text_on_a_terminal_passes_the_sanitiser_and_ends_its_line() -> None:
    stream = Terminal()
    text = terminal.ModelText(stream)
    for piece in ("a\x1b", "]52;c;aGk", "=\x07b\u202e"):
        text.write(piece)
    text.end()
    assert stream.getvalue() == "a\ufffdb\ufffd\n"


def test_a_load_says_once_what_it_waits_for_twice(capsys: pytest.CaptureFixture[str]) -> None:
    bar = terminal.Progress("loading", plain=False)
    for stage in ("weights", "compile", "rounding", "compile", "weights", "compile"):
        tell_loading(LoadProgress(stage, 0, None), bar)
    assert capsys.readouterr().err.splitlines() == [COMPILING, MEASURING, COMPILING]


def test_progress_is_one_line_that_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    bar = terminal.Progress("loading")
    bar.update(0, 100)
    bar.update(100, 100, "model.layers.0.self_attn.q_proj.weight\x1b[2J")
    bar.clear()
    lines = [line.removeprefix("\x1b[K") for line in screen.getvalue().split("\r")]
    assert len(lines) == 4
    assert all(len(line) < 20 and "\n" not in line for line in lines)
    assert lines[-1] == ""


def test_progress_without_a_terminal_is_a_plain_line_a_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    bar = terminal.Progress("downloading")
    for done in range(101):
        bar.update(done, 100)
    bar.clear()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[5] == "downloading 50 % (50 B of 100 B)"
    quiet = terminal.Progress("loading", plain=False)
    quiet.update(1, 2)
    assert capsys.readouterr().err == ""


def test_thinking_goes_to_a_persons_stderr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reply = [
        PrefillProgress(3, 3, 0),
        TextChunk("let me see\x1b[2J", "thinking"),
        TextChunk("Yes."),
        Finished("stop", "Yes.", NOTHING, "let me see"),
    ]
    assert ask.write_reply(iter(reply), ask.TextWriter(verbose=False)) is reply[-1]
    assert capsys.readouterr() == ("Yes.\n", "")
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    ask.write_reply(iter(reply), ask.TextWriter(verbose=False))
    assert "let me see" in screen.getvalue()
    assert "\x1b[2J" not in screen.getvalue()


def test_unknown_metrics_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [*ask.describe(NOTHING)]
    assert all("None" not in line and "inf" not in line and "unknown" not in line for line in lines)
    assert "no token was made" in lines[1]
    assert lines[2] == "limit     speed limit of this machine: not measured yet"


def test_verbose_metrics_say_everything(capsys: pytest.CaptureFixture[str]) -> None:
    known = Metrics(
        160, 10, 150, 41, 2.1, 2.0, 6.1, 75.0, 10.0, Gaps(1, 2, 3, 4), 1000, 2000, 300, 0.1, 20.0, None, 9000
    )
    text = "\n".join(ask.describe(known))
    for said in (
        "160 tokens, 10 of them cached",
        "75.0 tok/s",
        "10.0 tok/s",
        "time per token: median 1.00 ms, slowest 5 % above 2.00 ms",
        "20.0 tok/s at most",
        "9.00 kB",
    ):
        assert said in text


def test_gaps_that_stand_out_are_told_with_their_causes(capsys: pytest.CaptureFixture[str]) -> None:
    beside = Outlier(31, 30.0, ("another prompt",), PromptBeside(2013))
    end = Finished("stop", "", NOTHING, outliers=(Outlier(257, 41.2, ("pool cleared",)), beside, Outlier(9, 20.0)))
    ask.write_reply(iter([end]), ask.TextWriter(verbose=True))
    told = capsys.readouterr().err.splitlines()
    assert told[-4:-1] == [
        "slow gap  41.2 ms at token 257: pool cleared",
        "slow gap  30.0 ms at token 31: another prompt of 2,013 tokens",
        "slow gap  20.0 ms at token 9: cause unknown",
    ]
    ask.write_reply(iter([end]), ask.JsonWriter())
    assert json.loads(capsys.readouterr().out)["outliers"] == [
        {"token": 257, "gap_ms": 41.2, "causes": ["pool cleared"], "prompt": None},
        {"token": 31, "gap_ms": 30.0, "causes": ["another prompt"], "prompt": {"tokens": 2013, "background": False}},
        {"token": 9, "gap_ms": 20.0, "causes": [], "prompt": None},
    ]


NAME = "x" * 10_000


@pytest.mark.parametrize(
    "arguments",
    [
        (NAME,), (f"--{NAME}",), ("ask", "hi", "-m", NAME), ("ask", "hi", "-m", f"/{NAME}"), ("ask", "hi", "-f", NAME),
        ("ask", "hi", f"--{NAME}"), ("inspect", "a b " * 3000), ("convert", "y/" * 5000),
        ("models", "pull", f"org/{NAME}"), ("models", "remove", NAME), ("chats", "show", NAME),
    ],
    ids=lambda arguments: " ".join(word[:12] for word in arguments),
)  # fmt: skip
def test_a_name_of_thousands_of_characters_is_not_printed_whole(tokamac: Run, arguments: tuple[str, ...]) -> None:
    done = tokamac(*arguments)
    assert done.status in (1, 2)
    assert 20 < len(done.err) < 3000
    assert done.out == ""


# What of the settings can't be used is said by every command that reads them, on stderr, once.

DAMAGED = "theme = [\x1b]0;x\x07"


@pytest.fixture
def path() -> Path:
    found = settings.default_path()
    found.parent.mkdir(parents=True, exist_ok=True)
    return found


def test_a_command_that_takes_the_last_model_says_it_on_a_line_each(tokamac: Run, path: Path, tiny: Path) -> None:
    path.write_text(f'model = "{tiny}"\nfuture = 1\nunload_after_min = "\\u001b[2J\\n"\n')
    done = tokamac("ask", "Hello", "--max-tokens", "2")
    assert done.status == 0
    first, second = done.err.splitlines()
    assert first == "warning: settings.toml: unknown key 'future'; it is kept but not used."
    assert second.startswith("warning: settings.toml: unload_after_min is ")
    assert not OBEYED.search(done.err)


def test_a_damaged_file_is_not_moved_aside_in_silence(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text(DAMAGED)
    assert default_model() == "guide"
    said = capsys.readouterr().err
    assert said.startswith("warning: ")
    assert "it is now settings.damaged.toml" in said
    assert said.count("\n") == 1
    assert not OBEYED.search(said)
    assert default_model() == "guide"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "arguments",
    [["ask", "Hello", "-m", "guide", "--max-tokens", "1"], ["ask", "Hello", "--profile", "none"], ["doctor"]],
    ids=["ask a model", "ask with a profile", "doctor"],
)
def test_nor_by_a_command_that_is_told_its_model(tokamac: Run, path: Path, arguments: list[str]) -> None:
    path.write_text(DAMAGED)
    done = tokamac(*arguments)
    assert " ".join(f"{done.err} {done.out}".split()).count("it is now settings.damaged.toml") == 1


@pytest.mark.parametrize(("flags", "status", "why"), [
    (("--temp", "99"), 2, "--temp"), (("--temp", "0.5", "--chat", "nosuch"), 1, "nosuch"),
])  # fmt: skip
def test_nor_where_no_chat_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], status: int, why: str
) -> None:
    monkeypatch.setenv("TOKAMAC_DATA_DIR", str(tmp_path / "data"))
    file = tmp_path / "settings.toml"
    file.write_text(DAMAGED)
    ended, _, err = plain_chat_piped("", "fast", *flags, env={**os.environ, "TEST_SETTINGS": str(file)})
    assert ended == status
    assert err.count("it is now settings.damaged.toml") == 1
    assert why in err


def test_a_plain_chat_says_what_a_setting_is_now_or_is_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKAMAC_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("TEST_SETTINGS", str(tmp_path / "settings.toml"))
    written = (
        "unload_after_min 7",
        "unload_after_min 7",
        f"unload_after_min {'1' * 5000}",
        "key_bits 8",
        "key_bits 8",
        "window",
    )
    status, out, err = plain_chat_piped("".join(f"/settings {each}\n" for each in written), "fast")
    assert status == 0
    assert err.splitlines() == [
        "unload_after_min is 7; it was auto.",
        "unload_after_min is 7.",
        f"Unload after: '{'1' * 59} is not valid (minutes; 0 never, auto 30 if large).",
        "key_bits is 8; it was 16. The model is reloading with it.",
        "key_bits is 8.",
    ]
    assert out.startswith("window: not set")
    assert "unload_after_min = 7" in (tmp_path / "settings.toml").read_text()


# Flags that say what the chat template is told: of ask, bench and the chat; what they can't do is an error that
# says why.

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ style }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
GREEDY = ("--temp", "0", "--max-tokens", "12", "--json")


@pytest.fixture(scope="module")
def thinks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("thinks") / "thinks", template=TEMPLATE, thinking=True)


def asked(tokamac: Run, model: Path, *flags: str) -> list[dict[str, object]]:
    said = tokamac("ask", "Hello", "-m", model, *GREEDY, *flags)
    assert said.status == 0, said.err
    return [json.loads(line) for line in said.out.splitlines()]


def kinds(events: list[dict[str, object]]) -> set[object]:
    return {event["kind"] for event in events if event["event"] == "text"}


def test_thinking_is_turned_off_and_on(tokamac: Run, thinks: Path) -> None:
    assert kinds(asked(tokamac, thinks)) == {"thinking"}
    assert kinds(asked(tokamac, thinks, "--thinking", "on")) == {"thinking"}
    assert kinds(asked(tokamac, thinks, "--thinking", "off")) == {"answer"}
    assert kinds(asked(tokamac, thinks, "--template-option", "enable_thinking=false")) == {"answer"}


def test_a_line_of_many_has_its_thinking_in_its_result(tokamac: Run, thinks: Path) -> None:
    def one(*flags: str) -> dict[str, str]:
        (line,) = tokamac("ask", "--each", "-", "-m", thinks, *GREEDY, *flags, stdin=b"Hello\n").out.splitlines()
        return dict(json.loads(line))

    alone = "".join(str(event["text"]) for event in asked(tokamac, thinks) if event["event"] == "text")
    assert (one()["thinking"], one()["text"]) == (alone, "")
    assert "thinking" not in one("--thinking", "off")


def test_steps_are_written_as_json_lines(tokamac: Run, thinks: Path, tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    finished = asked(tokamac, thinks, "--steps", str(file))[-1]
    steps = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    tokens = [step for step in steps if step["kind"] == "step"]
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert len(tokens) == finished["metrics"]["generated_tokens"]  # type: ignore[index]
    assert [step["token"] for step in tokens] == list(range(1, len(tokens) + 1))
    for step in tokens:
        assert 0 <= step["probability"] <= 1
        assert len(step["others"]) == 5
        assert step["ms"] > 0
        assert step["weight_bytes"] > 0
    said = tokamac("ask", "Hello", "-m", thinks, *GREEDY[:-1], "--steps", "-")
    assert [json.loads(line)["kind"] for line in said.err.splitlines() if line.startswith("{")].count("step") == len(
        tokens
    )
    refused = tokamac("ask", "Hello", "-m", thinks, *GREEDY[:-1], "--steps", str(tmp_path / "no" / "file"))
    assert refused.status == 1
    assert "can't be written" in refused.err


def test_other_keywords_reach_the_template(tokamac: Run, thinks: Path) -> None:
    def read(*flags: str) -> int:
        metrics = asked(tokamac, thinks, *flags)[-1]["metrics"]
        assert isinstance(metrics, dict)
        return int(metrics["prompt_tokens"])

    assert read("--template-option", "style=brief") == read() + len("brief")
    assert read("--template-option", 'style="a b"', "--template-option", "enable_thinking=true") == read() + 3


def test_a_budget_ends_thinking_and_is_said(tokamac: Run, thinks: Path) -> None:
    events = asked(tokamac, thinks, "--thinking-budget", "3")
    assert kinds(events) == {"thinking", "answer"}
    assert events[-1]["thinking_ended_at"] == 3
    assert "thinking_ended_at" not in asked(tokamac, thinks)[-1]
    plain = tokamac("ask", "Hello", "-m", thinks, *GREEDY[:-1], "--thinking-budget", "3")
    assert "note: thinking ended at its budget of 3 tokens" in plain.err


@pytest.mark.parametrize(
    ("flags", "status", "why"),
    [
        (("--thinking", "low"), 1, "has no thinking mode low"),
        (("--template-option", "colour=red"), 1, "does not read colour"),
        (("--template-option", "colour"), 2, "--template-option: template option 'colour' has no value"),
        (("--template-option", "a=1", "--template-option", "a=2"), 2, "given twice"),
        (("--thinking", "loud"), 2, "invalid choice"),
        (("--thinking-budget", "-1"), 2, "--thinking-budget: a thinking budget of -1 tokens is negative"),
        (("--thinking", "off", "--thinking-budget", "5"), 2, "--thinking-budget has no effect with --thinking off"),
    ],
)
def test_the_impossible_is_an_error(tokamac: Run, thinks: Path, flags: tuple[str, ...], status: int, why: str) -> None:
    refused = tokamac("ask", "Hello", "-m", thinks, *flags)
    assert refused.status == status
    assert why in refused.err


def test_bench_reads_prompts_as_the_template_writes_them(tokamac: Run, thinks: Path) -> None:
    run = tokamac("bench", thinks, "--prompt", "40", "--max-tokens", "4", "--runs", "1", "--json", "--thinking", "off")
    assert run.status == 0, run.err
    assert json.loads(run.out)["runs"][0]["prompt_tokens"] == 40
    assert tokamac("bench", thinks, "--thinking", "low").status == 1
    short = tokamac("bench", thinks, "--prompt", "8", "--runs", "1", "--thinking", "off")
    assert "has no room for a message" in short.err
    for flags in (("--machine",), ("--kv-quality",)):
        refused = tokamac("bench", thinks, *flags, "--thinking", "off")
        assert (refused.status, f"--thinking has no effect with {flags[0]}" in refused.err) == (2, True)
    assert "so --compare can't be fair" in tokamac("bench", thinks, "--compare", "mlx-lm", "--thinking-budget", "4").err


def test_a_benchs_prompt_is_a_message_of_that_many_tokens(thinks: Path) -> None:
    with Engine.load(thinks, prompt_cache=None) as engine:
        for mode in ("on", "off"):
            told = TemplateOptions(mode)
            ids = message_ids(engine, 60, 1, told)
            empty = engine.tokenizer.using(told).render([Message("user", "")])
            begin, _, end = empty.partition("<end>")
            assert len(ids) == 60
            assert ids[: len(engine.tokenizer.encode(begin))] == engine.tokenizer.encode(begin)
            assert ids[-len(engine.tokenizer.encode(f"<end>{end}")) :] == engine.tokenizer.encode(f"<end>{end}")
            assert ids != message_ids(engine, 60, 2, told)
        with pytest.raises(OptionError, match="no room for a message"):
            message_ids(engine, 5, 1, TemplateOptions("off"))


def test_token_ids_that_open_thinking_begin_with_thinking(thinks: Path) -> None:
    with Engine.load(thinks, prompt_cache=None) as engine:
        told = engine.tokenizer.using(TemplateOptions("on"))
        ids = told.encode(told.render([Message("user", "Hello")]))
        *_, finished = engine.generate(ids, template=TemplateOptions(thinking_budget=0))
        assert finished.thinking_ended_at == 0  # type: ignore[union-attr]


# `--adapter` and `--unchecked` on the command line, and an adapter that the settings have for a model.

ASK = ("--max-tokens", "16", "--temp", "0")


@pytest.fixture
def adapter(tmp_path: Path, tiny: Path) -> Path:
    return write_peft(tmp_path / "adapter", tiny)


def test_ask_answers_with_the_adapter_and_says_so(tokamac: Run, tiny: Path, adapter: Path, tmp_path: Path) -> None:
    bare = tokamac("ask", "Hello", "-m", tiny, *ASK)
    done = tokamac("ask", "Hello", "-m", tiny, *ASK, "--adapter", adapter)
    assert (bare.status, done.status) == (0, 0)
    assert done.out != bare.out
    assert done.err == f"note: adapter {adapter}: 6 matrices of rank 4, trained on org/base\n"
    mlx = tokamac("ask", "Hello", "-m", tiny, *ASK, "--adapter", as_mlx(tmp_path / "mlx", adapter))
    assert mlx.out == done.out


def test_settings_give_a_model_its_adapter_and_a_flag_takes_it_away(tokamac: Run, tiny: Path, adapter: Path) -> None:
    bare = tokamac("ask", "Hello", "-m", tiny, *ASK)
    settings.save(settings.default_path(), Settings(adapters={str(tiny): str(adapter)}))
    assert tokamac("ask", "Hello", "-m", tiny, *ASK).out != bare.out
    assert tokamac("ask", "Hello", "-m", tiny, *ASK, "--adapter", "none") == bare


def test_bench_records_the_adapter_and_what_is_doubted(tokamac: Run, tmp_path: Path) -> None:
    model = write_model(tmp_path / "doubtful", logits_scaling=2.0)
    adapter = write_peft(tmp_path / "peft", model)
    flags = ("--prompt", "8", "--max-tokens", "4", "--runs", "1", "--json")
    assert tokamac("bench", model, *flags).status == 1
    done = tokamac("bench", model, *flags, "--unchecked", "--adapter", adapter)
    record = json.loads(done.out)
    assert record["adapter"] == {"name": str(adapter), "digest": read_adapter(adapter, "x").digest}
    assert "logits_scaling" in record["doubts"][0]
    assert "unchecked: config.json sets logits_scaling" in done.err
    refused = tokamac("bench", model, *flags, "--unchecked", "--adapter", adapter, "--compare", "mlx-lm")
    assert refused.status == 2
    assert "--adapter none" in refused.err


def test_inspect_counts_what_the_loaded_adapter_costs(tokamac: Run, tiny: Path, adapter: Path) -> None:
    from tokamac.engine import Engine

    bare, added = (
        json.loads(tokamac("inspect", tiny, "--json", "--context", "64", *more).out)
        for more in ((), ("--adapter", adapter))
    )
    with Engine.load(tiny, prompt_cache=None, adapter=adapter) as engine:
        work = runtime_of(engine).work
    assert added["bytes_per_step"] == work.step_bytes(64)
    assert added["bytes_per_step"] - bare["bytes_per_step"] == 4 * read_adapter(adapter, "x").parameters
    assert added["adapter"] == {"name": str(adapter), "digest": read_adapter(adapter, "x").digest}
    assert added["memory"]["weights"] > bare["memory"]["weights"]
    assert tokamac("inspect", tiny, "--adapter", adapter, "--table").status == 2


def test_the_plain_chat_takes_an_adapter_and_says_which_it_has(home: Path, data: Path) -> None:
    status, out, err = plain_chat_piped("/adapter\n/adapter org/letters\n/adapter\nhi\n", "fast")
    assert status == 0
    assert "This model has no adapter." in out
    assert "org/letters" in out
    assert "The model is reloading with it." in err
    assert settings.load(home / "settings.toml").settings.adapters == {"fast": "org/letters"}
    assert last_path(data)[-1].settings["adapter"]["name"] == "org/letters"


# `--draft` and the table `drafts` of the settings: a model that guesses, and changes no text.


def test_ask_guesses_with_a_draft_model_says_so_and_answers_the_same(tokamac: Run, tiny: Path) -> None:
    bare = tokamac("ask", "Hello", "-m", tiny, *ASK)
    done = tokamac("ask", "Hello", "-m", tiny, *ASK, "--draft", tiny)
    assert (done.status, done.out) == (0, bare.out)
    assert done.err.startswith(f"note: draft model {tiny}: ")
    assert len(done.err.splitlines()) == 1
    settings.save(settings.default_path(), Settings(drafts={str(tiny): str(tiny)}, speculation=False))
    assert tokamac("ask", "Hello", "-m", tiny, *ASK) == bare
    assert tokamac("ask", "Hello", "-m", tiny, *ASK, "--speculation", "auto") == done
    assert tokamac("ask", "Hello", "-m", tiny, *ASK, "--speculation", "auto", "--draft", "none") == bare


def test_a_draft_model_of_another_tokenizer_is_one_line(tokamac: Run, tiny: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other")
    done = tokamac("ask", "Hello", "-m", tiny, "--draft", other)
    assert done.status == 1
    assert len(done.err.splitlines()) == 1
    assert "whose tokenizer is another: its token 0 is" in done.err
    assert "tokenizer is another" in tokamac("inspect", tiny, "--draft", other).err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("ask", "Hello", "--speculation", "off"), "--draft has no effect with --speculation off"),
        (("serve", "--speculation", "off"), "--draft has no effect with --speculation off"),
        (("chat", "--speculation", "off"), "--draft has no effect with --speculation off"),
        (("bench", "--speculation", "off"), "--draft has no effect with --speculation off"),
        (("bench", "--parallel", "1,2"), "--draft has no effect with --parallel"),
        (("bench", "--machine"), "--draft has no effect with --machine"),
        (("bench", "--compare", "mlx-lm"), "runs without a draft model"),
        (("inspect", "guide", "--chips"), "does not go with --draft"),
    ],
)
def test_a_draft_model_that_would_have_no_effect_is_refused(tokamac: Run, words: tuple[str, ...], why: str) -> None:
    done = tokamac(*words, "--draft", "guide")
    assert done.status == 2
    assert why in done.err


@pytest.mark.parametrize("command", ["chat", "serve", "bench", "inspect"])
def test_a_model_is_named_once_by_its_place_or_with_m(tokamac: Run, command: str) -> None:
    done = tokamac(command, "guide", "-m", "guide")
    assert (done.status, "give MODEL once, with -m or without" in done.err) == (2, True)


def test_bench_records_the_draft_model(tokamac: Run, tiny: Path) -> None:
    flags = ("--prompt", "8", "--max-tokens", "12", "--runs", "1", "--json")
    record = json.loads(tokamac("bench", "-m", tiny, *flags, "--draft", tiny).out)
    assert record["draft"]["name"] == str(tiny)
    assert "draft" not in json.loads(tokamac("bench", tiny, *flags).out)


def test_inspect_counts_the_memory_of_both(tokamac: Run, tiny: Path) -> None:
    flags = ("inspect", tiny, "--json", "--context", "64")
    bare, both = json.loads(tokamac(*flags).out), json.loads(tokamac(*flags, "--draft", tiny).out)
    for part in ("weights", "kv"):
        assert both["memory"][part] == 2 * bare["memory"][part]
    assert both["draft"] == {
        "name": bare["model"],
        "weight_bytes": bare["memory"]["weights"],
        "kv_bytes": bare["memory"]["kv"],
        "step": pytest.approx(1.0),
    }
    assert "with the draft model" in tokamac("inspect", tiny, "--draft", tiny).err


# `--memory` and the setting `memory_gb`: the limit that a person sets, in every command that loads a model or
# judges one.

LITTLE = ("--memory", "0.0001")
LOADING = (
    ("ask", "Hello", "--max-tokens", "1", "-m"),
    ("bench", "--prompt", "8", "--runs", "1", "--max-tokens", "1"),
    ("bench", "--kv-quality", "--depths", "8"),
    ("cache", "check"),
)


@pytest.mark.parametrize("command", LOADING, ids=lambda command: " ".join(command[:2]))
def test_a_flag_sets_the_limit(tokamac: Run, tiny: Path, command: tuple[str, ...]) -> None:
    done = tokamac(*command, tiny, *LITTLE)
    assert (done.status, done.out) == (1, "")
    assert "and 100 kB may be used" in done.err
    assert "--memory " in done.err  # the way on
    assert "Traceback" not in done.err


def test_a_setting_sets_it_and_a_flag_goes_before_that(tokamac: Run, tiny: Path) -> None:
    settings.save(settings.default_path(), Settings(memory_gb=0.0001))
    refused = tokamac(*LOADING[0], tiny)
    assert refused.status == 1
    assert "100 kB may be used" in refused.err
    assert tokamac(*LOADING[0], tiny, "--memory", "2").status == 0


@pytest.mark.parametrize("value", ["0", "-1", "nan", "much"])
def test_what_is_no_size_is_wrong_usage(tokamac: Run, tiny: Path, value: str) -> None:
    done = tokamac("ask", "Hello", "-m", tiny, "--memory", value)
    assert done.status == 2
    assert "--memory" in done.err


def test_a_cache_that_is_not_checked_takes_no_limit(tokamac: Run) -> None:
    done = tokamac("cache", "show", "--memory", "2")
    assert (done.status, done.out) == (2, "")
    assert "--memory" in done.err


def test_models_are_judged_by_it(tokamac: Run, tiny: Path) -> None:
    budget, fits = (
        json.loads(tokamac("inspect", tiny, "--memory", gb, "--json").out)["memory"][name]
        for gb, name in (("3", "budget"), ("0.0001", "fits"))
    )
    assert (budget, fits) == (3_000_000_000, False)
    settings.save(settings.default_path(), Settings(memory_gb=0.0001))
    assert "does not fit" in tokamac("inspect", tiny).out


def test_the_engines_process_gets_it_with_the_model(tiny: Path) -> None:
    engine, _ = load_engine(Load(str(tiny), prompt_cache=False, memory=3 * 10**9), lambda _: None)
    with engine:
        memory = _memory_use(engine)
        assert (memory.budget_bytes, memory.budget_source) == (3 * 10**9, "as set by --memory or the memory setting")
        assert memory.total_bytes


# `--parallel` and the setting `parallel`: replies at once.


def test_a_flag_or_a_setting_says_how_many_replies_are_made_at_once(tokamac: Run, tiny: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text("Hello\n" * 6)

    def widths(*flags: str) -> list[float]:
        done = tokamac("ask", "--each", prompts, "-m", tiny, "--max-tokens", "40", "--temp", "0", *flags)
        return [json.loads(line)["metrics"]["batch_width"] for line in done.out.splitlines()]

    assert max(widths()) > 2
    assert 1 < max(widths("--parallel", "2")) <= 2
    settings.save(settings.default_path(), Settings(parallel=1))
    assert widths() == [1.0] * 6
    assert max(widths("--parallel", "2")) > 1


def test_the_chat_has_it_by_flag_or_setting_and_its_engine_gets_it(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    settings.save(path, Settings(parallel=5))
    assert begin(ChatOptions(settings_path=path)).session.engine.load.parallel == 5
    assert begin(ChatOptions(settings_path=path, parallel=3)).session.engine.load.parallel == 3
    engine, _ = load_engine(Load(str(tiny), prompt_cache=False, parallel=3), lambda _: None)
    with engine:
        assert replies_of(engine).schedule.width == 3


def test_ask_takes_a_profile_and_flags_beside_it_win(tokamac: Run) -> None:
    file = settings.default_path()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('[profiles.cut]\nmodel = "guide"\nmax_tokens = 2\n[profiles.away]\nmodel = "org/none"\n')
    counts = [
        json.loads(tokamac("ask", "What is TTFT?", "--json", "--profile", "cut", *flags).out.splitlines()[-1])[
            "metrics"
        ]
        for flags in ((), ("--max-tokens", "3"))
    ]
    assert [each["generated_tokens"] for each in counts] == [2, 3]
    missing = tokamac("ask", "hi", "--profile", "away")
    assert (missing.status, missing.err) == (
        1,
        "tokamac: The profile away needs org/none, which is not on this disk. tokamac models pull org/none downloads it.\n",
    )
    unknown = tokamac("ask", "hi", "--profile", "cat")
    assert (unknown.status, "there is no profile 'cat'; did you mean cut?" in unknown.err) == (2, True)
