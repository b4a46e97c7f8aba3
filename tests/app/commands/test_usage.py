"""Exit codes, help, wrong usage, mistyped words; Ctrl-C, closed pipes and full disks."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TextIO

import pytest

from tests.app.commands.conftest import Run
from tests.test_docs import FLAG, KEY, keys_of_lists, options_of
from tests.waiting import PATIENCE_S
from tokamac.app import INTERRUPTED, PIPE_CLOSED, WRONG_USAGE, cli, parser, settings
from tokamac.app import help as texts
from tokamac.app.chat.actions import ACTIONS
from tokamac.app.cli import COMMANDS
from tokamac.app.commands.prompts import InputError, compose

HEAVY = "{'mlx', 'mlx_lm', 'textual', 'transformers', 'huggingface_hub', 'numpy', 'rich', 'tomlkit'}"


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["ask", "--help"], ["chat", "--help"], ["convert", "--help"]]
)
def test_what_needs_no_model_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        f"import sys; from tokamac.app import cli; status = cli.main({arguments}); loaded = {HEAVY} & set(sys.modules)"
    )
    code += "; print(loaded, status, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "set() 0\n"
    assert done.stdout


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_help_has_an_example(tokamac: Run, command: str) -> None:
    shown = tokamac(command, "--help")
    assert shown.status == 0
    assert f"  tokamac {command}" in shown.out.split("examples:")[1]
    assert shown.err == ""


def test_the_general_help_lists_every_command(tokamac: Run) -> None:
    shown = tokamac("--help")
    assert shown.status == 0
    assert all(f"  {command}" in shown.out for command in cli.COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["frobnicate"], "no command 'frobnicate'"),
        (["ask", "hi", "--frobnicate"], "--frobnicate"),
        (["ask", "hi", "--temp", "hot"], "--temp"),
        (["ask", "hi", "--temp", "nan"], "--temp"),
        (["ask", "hi", "--top-p", "0"], "--top-p"),
        (["ask", "hi", "--stop", ""], "--stop"),
        (["ask", "hi", "--kv-bits", "7"], "--kv-bits"),
        (["ask", "hi", "--kv-group-size", "48", "--kv-bits", "8"], "--kv-group-size"),
        (["ask", "hi", "--kv-group-size", "32"], "without --kv-bits"),
        (["ask", "hi", "--kv-keep", "8"], "without --kv-window"),
        (["ask", "hi", "--kv-keep", "some", "--kv-window", "64"], "--kv-keep"),
        (["ask", "hi", "--logprobs"], "without --json"),
        (["ask", "--json", "--logprobs", "hi"], "PROMPT stands before --logprobs"),
        (["ask", "hi", "--logit-bias", "5"], "'5' is not a token id with a bias"),
        (["ask", "hi", "--min-tokens", "9", "--max-tokens", "4"], "--min-tokens"),
        (["ask", "hi", "--xtc-threshold", "0.2"], "without --xtc-probability"),
        (["ask", "hi", "--temp", "0", "--xtc-probability", "0.2"], "temperature 0"),
        (["ask", "hi", "--dry-base", "2"], "without --dry-multiplier"),
        (["ask", "hi", "--sampler-order", "top_k,top_p"], "leaves out penalties"),
        (["bench", "--dry-multiplier", "1", "--compare", "mlx-lm"], "--dry-multiplier has no effect with --compare"),
        (["ask"], "prompt is empty"),
        (["ask", "  "], "prompt is empty"),
        (["convert"], "SOURCE"),
        (["convert", "x", "--bits", "7"], "--bits"),
        (["inspect"], "MODEL"),
        (["inspect", "guide", "--context", "0"], "--context"),
        (["bench", "--runs", "0"], "--runs"),
        (["bench", "--machine", "--temp", "0"], "--temp has no effect with --machine"),
        (["bench", "--kv-quality", "--plot", "a.svg"], "--plot has no effect with --kv-quality"),
        (["bench", "--prompt", "many"], "--prompt"),
        (["models", "eat"], "'eat'"),
        (["ask", "hi", "-m", "gpt2"], "the nearest are gpt-oss-20b"),
        (["ask", "hi", "-m", "llama3.2"], "several models: Llama-3.2-1B, Llama-3.2-3B"),
        (["chat", "-m", "guide", "guide"], "MODEL once"),
        (["models", "pull", "qwen3"], "several models: Qwen3-0.6B, "),
        (["models", "pull"], "needs an ID"),
        (["models", "list", "org/name"], "takes no ID"),
        (["chat", "--continue", "--chat", "k3v7q2ab"], "--chat"),
        (["chat", "--temp", "99"], "--temp"),
        (["--temp", "-1"], "--temp"),
    ],
)
def test_wrong_usage_is_one_line_that_names_the_mistake(tokamac: Run, arguments: list[str], said: str) -> None:
    result = tokamac(*arguments)
    assert result.status == 2
    assert said in result.err
    assert result.err.count("\n") == 1
    assert result.out == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ask", "hi", "-m", "./nothing"], "no folder"), (["ask", "hi", "-f", "missing.txt"], "no file missing.txt"),
        (["ask", "hi", "-f", "."], "is a folder"),
        (["ask", "hi", "-f", "~nobody-of-that-name/x"], "no file ~nobody-of-that-name/x"),
        (["ask", "hi", "--adapter", "~nobody-of-that-name/x"], "no folder"),
        (["convert", "guide", "-o", "~nobody-of-that-name/x"], "no home folder for ~nobody-of-that-name/x"),
        (["convert", "guide", "--into", "~nobody-of-that-name"], "no home folder for ~nobody-of-that-name"),
        (["inspect", "./nothing"], "no folder"), (["inspect", "org/name"], "models pull"),
        (["convert", "./nothing"], "no folder"), (["bench", "./nothing"], "no folder"),
        (["models", "remove", "org/name"], "not on this disk"),
    ],
)  # fmt: skip
def test_a_failure_is_one_line_and_exit_1(tokamac: Run, arguments: list[str], said: str) -> None:
    result = tokamac(*arguments)
    assert result.status == 1
    assert result.err.startswith("tokamac: ")
    assert said in result.err
    assert result.err.count("\n") == 1
    assert result.out == ""


def test_binary_files_and_input_are_refused(tokamac: Run, tmp_path: Path) -> None:
    (tmp_path / "picture").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\xff")
    (tmp_path / "nul").write_bytes(b"a\0b")
    for result in (
        tokamac("ask", "hi", "-f", tmp_path / "picture"),
        tokamac("ask", "hi", "-f", tmp_path / "nul"),
        tokamac("ask", "hi", stdin=b"\xff\xfe\xfa"),
    ):
        assert result.status == 1
        assert "text" in result.err


def test_a_file_is_read_as_an_attachment_is(tmp_path: Path, no_stdin: None) -> None:
    (tmp_path / "wide.txt").write_bytes("Häuser".encode("utf-16"))
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbfplain")
    assert "Häuser" in compose("sum up", [str(tmp_path / "wide.txt")])
    assert "\nplain\n" in compose("sum up", [str(tmp_path / "marked.txt")])
    (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.4 nothing")
    with pytest.raises(InputError, match=r"broken\.pdf can't be read"):
        compose("sum up", [str(tmp_path / "broken.pdf")])


def test_a_model_of_no_name_in_a_hostile_path(tokamac: Run) -> None:
    result = tokamac("ask", "hi", "-m", "./\x1b]0;owned\x07")
    assert result.status == 1
    assert "\x1b" not in result.err


def ends_with(raises: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `tokamac ask` raise."""
    module = ModuleType("tokamac.app.commands.ask")

    def run(parser: object, options: object) -> int:
        raise raises

    class Anything:
        def parse_args(self, arguments: list[str]) -> None:
            pass

    module.parser = Anything  # type: ignore[attr-defined]
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokamac.app.commands.ask", module)


def test_the_unexpected_is_a_line_and_a_traceback_on_request(tokamac: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    ends_with(ZeroDivisionError("by zero"), monkeypatch)
    result = tokamac("ask")
    assert result.status == 1
    assert "ZeroDivisionError: by zero" in result.err
    assert "TOKAMAC_DEBUG=1" in result.err
    assert result.err.count("\n") == 1
    monkeypatch.setenv("TOKAMAC_DEBUG", "1")
    assert "Traceback" in tokamac("ask").err


@pytest.mark.parametrize(("raises", "status"), [(KeyboardInterrupt(), 130), (BrokenPipeError(), 141)])
def test_how_others_end_it(tokamac: Run, monkeypatch: pytest.MonkeyPatch, raises: BaseException, status: int) -> None:
    ends_with(raises, monkeypatch)
    result = tokamac("ask")
    assert (result.status, result.err) == (status, "")


# Help: of the program, of a command, of one of its actions; as wide as the terminal and no wider than can be read.


@pytest.mark.parametrize("asked", [("help",), ("--help",), ("-h",)])
def test_help_of_a_command_is_that_commands_own(tokamac: Run, asked: tuple[str, ...]) -> None:
    own = tokamac("bench", "--help")
    assert own.out.startswith("usage: tokamac bench")
    assert tokamac(*asked, "bench") == own


def test_help_of_help_is_the_programs(tokamac: Run) -> None:
    assert tokamac("help", "help") == tokamac("help") == tokamac("--help")


def test_help_of_what_is_no_command_is_wrong_usage(tokamac: Run) -> None:
    done = tokamac("help", "bnech")
    assert (done.status, done.out) == (2, "")
    assert done.err == "tokamac: there is no help on 'bnech'; did you mean tokamac help bench? See `tokamac help`.\n"


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_version_takes_nothing_else(tokamac: Run, flag: str) -> None:
    assert tokamac(flag).status == 0
    done = tokamac(flag, "foo")
    assert (done.status, done.out) == (2, "")
    assert f"{flag} takes no other arguments" in done.err


@pytest.mark.parametrize("command", cli.COMMANDS)
@pytest.mark.parametrize(("columns", "widest"), [(80, 78), (300, 98)])
def test_no_line_is_wider_than_the_terminal_or_than_can_be_read(
    tokamac: Run, monkeypatch: pytest.MonkeyPatch, command: str, columns: int, widest: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    before_examples = tokamac(command, "--help").out.split("examples:")[0].splitlines()
    assert max(map(len, before_examples)) <= widest


def test_a_terminal_of_no_width_is_no_reason_to_fail(tokamac: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1")
    assert tokamac("chats", "--help").status == 0


@pytest.mark.parametrize(
    ("action", "has", "has_not"),
    [
        ("cache clear", ["delete everything", "--json"], ["--kv-bits", "MODEL", "cache check", "ACTION"]),
        ("cache check", ["recompute what is stored", "--kv-bits", "MODEL", "cache check guide"], ["cache clear"]),
        (
            "models pull",
            ["download or update a model", "ID", "models pull mlx-community"],
            ["--chip", "--unfinished", "suggest"],
        ),
        ("models suggest", ["--chip", "--context"], ["--unfinished", "ID", "models pull"]),
        ("chats export", ["--output", ".html or .svg"], ["--deleted", "--set-aside", "chats show"]),
        ("chats list", ["--deleted"], ["--output", "ID|FILE"]),
    ],
)
def test_help_of_an_action_has_what_goes_with_it(tokamac: Run, action: str, has: list[str], has_not: list[str]) -> None:
    done = tokamac(*action.split(), "--help")
    assert done.status == 0
    assert done.out.startswith(f"usage: tokamac {action} [-h]")
    assert all(text in done.out for text in has)
    assert not [text for text in has_not if text in done.out]


@pytest.mark.parametrize("command", ["cache", "chats", "models"])
def test_help_of_a_command_with_actions_says_what_each_does(tokamac: Run, command: str) -> None:
    shown = tokamac(command, "--help").out
    listed = shown.split("actions:\n")[1].split("\n\n")[0]
    usual = tokamac(command, "nosuch").err.split("is none of ")[1]
    actions = usual.split(". See ")[0].split("; did")[0].split(", ")
    assert len(actions) > 2
    assert all(f"\n  {action} " in f"\n{listed}" for action in actions)


# `tokamac help TOPIC`: every topic is listed and true; what there is no help on is wrong usage.

ROOT = Path(__file__).parents[3]
TOPICS = texts.topics()
FOREIGN_KEYS = {"Alt+Enter", "Ctrl+C", "Ctrl+End", "Esc"}
FOREIGN_FLAGS = {"--auto-setup", "--hosts", "--over"}


def test_the_topics_that_everybody_looks_for_are_there(tokamac: Run) -> None:
    wanted = "kv cache context memory convert keys chat models speed python settings environment exit sampling thinking"
    assert set(wanted.split()) <= set(TOPICS)
    listed = tokamac("help").out
    assert all(
        re.search(rf"^  {name} +{re.escape(summary)}$", listed, re.MULTILINE) for name, summary in TOPICS.items()
    )


@pytest.mark.parametrize("topic", TOPICS)
@pytest.mark.parametrize("asked", ["help", "--help"])
def test_a_topic_is_printed_and_fits_a_terminal(tokamac: Run, topic: str, asked: str) -> None:
    shown = tokamac(asked, topic)
    assert (shown.status, shown.err) == (0, "")
    text = shown.out[shown.out.index(f"{topic}: {TOPICS[topic]}\n") :]
    assert max(map(len, text.splitlines())) <= texts.WIDTH
    assert not re.search(r"\{[a-z]+\}", text), "every placeholder is filled"


@pytest.mark.parametrize("topic", sorted(set(TOPICS) & set(COMMANDS)))
def test_where_a_command_has_the_name_too_its_own_help_comes_first(tokamac: Run, topic: str) -> None:
    shown = tokamac("help", topic).out
    assert shown == f"{tokamac(topic, '--help').out}\n{texts.topic(topic)}\n"


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("kvv", "kv"), ("memmory", "memory"), ("exit-codes", "exit"), ("env", "environment"), ("bnech", "bench"),
        ("qqqq", None),
    ],
)  # fmt: skip
def test_an_unknown_topic_is_one_line_with_the_nearest(tokamac: Run, word: str, meant: str | None) -> None:
    done = tokamac("help", word)
    question = f"; did you mean tokamac help {meant}?" if meant else "."
    assert (done.status, done.out) == (WRONG_USAGE, "")
    assert done.err == f"tokamac: there is no help on {word!r}{question} See `tokamac help`.\n"


def test_with_more_words_it_is_the_help_of_a_command(tokamac: Run) -> None:
    assert tokamac("help", "models", "pull") == tokamac("models", "pull", "--help")
    assert "which model" not in tokamac("help", "models", "pull").out


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_names_topics_that_exist(tokamac: Run, command: str) -> None:
    (named,) = re.findall(r"^more: tokamac help (.+)$", tokamac(command, "--help").out, re.MULTILINE)
    assert set(named.split(", ")) <= set(TOPICS)


def test_what_a_topic_sends_to_exists() -> None:
    named = {(topic, word) for topic in TOPICS for line in re.findall(r"tokamac help ([a-z, ]+)", texts.topic(topic))
             for word in line.split(", ")}  # fmt: skip
    assert len(named) > len(TOPICS)
    assert {(topic, word) for topic, word in named if word not in TOPICS} == set()
    assert set(parser.TOPICS) == set(COMMANDS)


@pytest.mark.parametrize("topic", TOPICS)
def test_every_flag_command_key_and_slash_command_of_a_topic_exists(topic: str) -> None:
    text = texts.topic(topic)
    flags = {name: set(options_of(import_module(f"tokamac.app.commands.{name}").parser())) for name in COMMANDS}
    assert set(FLAG.findall(text)) <= set().union(FOREIGN_FLAGS, *flags.values())
    for command, rest in re.findall(r"tokamac ([a-z]+)((?: [^\s`]+| \"[^\"]*\")*)", text):
        if command != "help":
            assert set(FLAG.findall(rest)) <= flags["chat" if command == cli.RUN else command], command
    keys = {name.strip() for action in ACTIONS for name in action.key_names.split(",")} | keys_of_lists() | FOREIGN_KEYS
    assert set(KEY.findall(text)) <= keys
    slashes = {name for action in ACTIONS for name in (action.slash, *action.also)} | {"metrics"}  # of the server
    slashes |= set(re.findall(r"/prompts edit ([a-z]+)", text))  # a prompt's own, once it is written
    assert set(re.findall(r"(?<![\w./~\"])/([a-z]+)\b(?![/.])", text)) <= slashes


def test_every_flag_is_named_in_a_topic_or_in_the_help_of_its_command(tokamac: Run) -> None:
    for name in COMMANDS:
        shown = tokamac(name, "--help").out
        options = set(options_of(import_module(f"tokamac.app.commands.{name}").parser()))
        assert {flag for flag in options if flag not in shown} == set()


def test_the_keys_have_every_action() -> None:
    text = texts.topic("keys")
    assert [action.id for action in ACTIONS if action.help.split()[0] not in text] == []
    assert [action.slash for action in ACTIONS if action.slash and f"/{action.slash}" not in text] == []


def test_the_settings_have_every_setting() -> None:
    text = texts.topic("settings")
    tables = {f"[{name}]" for name in settings.OPTIONS} | {f"[{name}" for name in settings.MAPS}  # or [profiles.NAME]
    plain = {f"{name} = " for name in settings.VALUES} | tables
    options = {each.name for name in settings.OPTIONS for each in fields(getattr(settings.Settings(), name))}
    assert {name for name in plain | options if name not in text} == set()
    assert settings.loads("\n".join(re.findall(r"^  ((?:\[|[a-z_\"/]+ = ).*)$", text, re.MULTILINE))).warnings == ()


def test_the_environment_has_every_variable_of_ours() -> None:
    code = "".join(file.read_text() for area in ("app", "engine", "quant") for file in (ROOT / area).rglob("*.py"))
    used = set(re.findall(r"\bTOKAMAC_[A-Z_]+\b", code))
    assert used == set(re.findall(r"\bTOKAMAC_[A-Z_]*[A-Z]\b", texts.topic("environment")))


def test_the_exit_statuses_are_those_of_the_program() -> None:
    listed = re.findall(r"^ +(\d+)  ", texts.topic("exit"), re.MULTILINE)
    assert listed == ["0", "1", *map(str, (WRONG_USAGE, INTERRUPTED, PIPE_CLOSED))]


# What is said where a word is mistyped, a model is called by a part of its name, or something is elsewhere.

SHORT = ("--prompt", "16", "--max-tokens", "4")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("chta", "tokamac chat"), ("askk", "tokamac ask"), ("Bench", "tokamac bench"), ("version", "tokamac --version"),
        ("settings", "/settings in the chat"), ("pull", "tokamac models pull"), ("qwen3:8b", "tokamac chat qwen3:8b"),
        ("guide", "tokamac chat guide"), ("mlx-community/Qwen3-8B-4bit", "tokamac chat mlx-community/Qwen3-8B-4bit"),
    ],
)  # fmt: skip
def test_a_word_that_is_no_command(tokamac: Run, written: str, meant: str) -> None:
    done = tokamac(written)
    said = f"tokamac: there is no command {written!r}; did you mean {meant}? See `tokamac --help`.\n"
    assert (done.status, done.out, done.err) == (2, "", said)


def test_a_word_that_is_like_nothing_gets_no_guess(tokamac: Run) -> None:
    said = tokamac("frobnicate").err
    assert "did you mean" not in said
    assert "tokamac chat MODEL" in said


@pytest.mark.parametrize(
    ("arguments", "piped"),
    [
        (["What is decode?", "-m", "guide"], b""), (["-m", "guide", "--temp", "0", "What is decode?"], b""),
        (["run", "guide", "What", "is", "decode?", "--temp", "0"], b""),
        (["run", "guide", "--temp", "0"], b"What is decode?"), (["summarise", "-m", "guide"], b"decode"),
        (["-m", "guide"], b"What is decode?"), ([], b"What is decode?"),
    ],
)  # fmt: skip
def test_a_question_or_a_pipe_is_answered_without_a_command(tokamac: Run, arguments: list[str], piped: bytes) -> None:
    """stdin is a pipe, or a file that nobody can take for one."""
    with pipe_of(piped) if piped else Path(os.devnull).open() as stdin:
        done = tokamac(*arguments, stdin=stdin)
    assert done.status == 0, done.err
    assert done.out.strip()
    assert "you>" not in done.out


def test_a_pipe_makes_no_question_of_a_mistyped_command(tokamac: Run) -> None:
    with pipe_of(b"hi") as stdin:
        done = tokamac("aks", stdin=stdin)
    assert (done.status, done.out) == (2, "")
    assert "did you mean tokamac ask?" in done.err


def pipe_of(text: bytes) -> TextIO:
    """Return the end of a pipe that gives this and no more."""
    read, write = os.pipe()
    with os.fdopen(write, "wb") as writer:
        writer.write(text)
    return os.fdopen(read)


def test_run_is_chat(tokamac: Run) -> None:
    assert tokamac("run", "--help") == tokamac("chat", "--help")
    assert tokamac("help", "run") == tokamac("help", "chat")


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("ask hi --jsno", "--json"), ("chat --plian", "--plain"), ("inspect guide --contxt=512", "--context"),
        ("cache check --kv-bit 8", "--kv-bits"), ("models lst", "list"), ("cache --json claer", "clear"),
        ("chats exprot k3v7", "export"),
    ],
)  # fmt: skip
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
    [("ask hi -m guid", "guide"), ("models pull qwen3-8b-4bt", "Qwen3-8B-4bit"), ("bench qwen3:7b", "Qwen3-8B")],
)
def test_a_model_that_is_called_nearly_so(tokamac: Run, arguments: str, meant: str) -> None:
    *_, name = words = arguments.split()
    done = tokamac(*words)
    assert (done.status, done.out) == (2, "")
    assert f"there is no model {name!r}; the nearest are " in done.err
    assert meant in done.err.split("the nearest are ")[1].split(". ")[0].split(", ")


def test_the_embedded_model_is_always_here(tokamac: Run) -> None:
    pulled = tokamac("models", "pull", "guide", "--json")
    assert pulled.status == 0
    assert json.loads(pulled.out)["event"] == "pulled"
    assert "guide is embedded" in pulled.err
    for flags in ((), ("--unfinished",)):
        kept = tokamac("models", "remove", "guide", *flags)
        assert kept.status == 1
        assert kept.err == "tokamac: guide is embedded. It is always here, and can't be removed.\n"


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


def test_a_model_that_is_here_is_measured_and_a_config_alone_is_not(tokamac: Run, tiny: Path, tmp_path: Path) -> None:
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
    assert note.startswith("note: a model this small waits for the processor")
    drawn = done.out.split("roofline, TFLOP/s")[1]
    legend, axes = drawn[: drawn.index("PP prefill")], drawn[drawn.index("PP prefill") + 2 :]
    assert "DD decode, waits for memory" in legend
    assert sum("D" in line for line in axes.splitlines()) == 1


# Ctrl-C, closed pipes and full disks, on the program as a whole.

Start = Callable[..., "subprocess.Popen[str]"]
ASK = ("ask", "Hello", "--temp", "1", "--seed", "1")  # the same text each time: nonsense may hold no letter for long


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    return process.returncode, out, err


def test_ctrl_c_keeps_the_partial_answer(start: Start, endless: Path) -> None:
    process = start(*ASK, "-m", endless)
    begun = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    status, rest, err = finish(process)
    assert (status, err) == (130, "")
    assert (begun + rest).endswith("\n")


def test_ctrl_c_with_json_ends_with_a_result(start: Start, endless: Path) -> None:
    process = start(*ASK, "-m", endless, "--json")
    begun = process.stdout.readline()
    while '"text"' not in begun:
        begun = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    status, rest, _ = finish(process)
    last = json.loads(rest.splitlines()[-1])
    assert status == 130
    assert (last["event"], last["reason"]) == ("finished", "cancelled")
    assert last["metrics"]["generated_tokens"] > 0


def has_computed(process: "subprocess.Popen[str]", seconds: float) -> None:
    """Wait until it has: a busy machine may take all that time, by the clock, to come to the first line of the program."""
    stat = Path(f"/proc/{process.pid}/stat")
    if not stat.exists():
        time.sleep(seconds)
        return
    while sum(map(int, stat.read_text().rpartition(")")[2].split()[11:13])) < seconds * os.sysconf("SC_CLK_TCK"):
        assert process.poll() is None, "it ended by itself"
        time.sleep(0.01)


@pytest.mark.parametrize("delay_s", [0.3, 0.8])
def test_ctrl_c_while_it_starts(start: Start, endless: Path, delay_s: float) -> None:
    process = start(*ASK, "-m", endless, "--json")
    has_computed(process, delay_s)
    process.send_signal(signal.SIGINT)
    status, out, err = finish(process)
    assert (status, err) == (130, "")
    if out:
        assert json.loads(out.splitlines()[-1])["reason"] == "cancelled"


# The program, by `python -m`, with Ctrl-C at a chosen moment.
INTERRUPTED_IN_EXEC = """
from tokamac.app import cli

def run(arguments):
    exec("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    raise AssertionError("not interrupted")

cli._run = run
cli.entry()
"""


def test_ctrl_c_while_a_dataclass_is_made_is_the_same_status(start: Start, tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text(INTERRUPTED_IN_EXEC)
    process = start(module="interrupted", cwd=tmp_path)
    assert finish(process) == (130, "", "")


def test_a_reader_that_leaves_is_no_error(start: Start, endless: Path) -> None:
    process = start(*ASK, "-m", endless)
    process.stdout.read(4)
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == ""
    assert process.wait(PATIENCE_S) == 141


ENDS_COMMANDS: dict[str, tuple[str, ...]] = {
    "version": ("--version",),
    "help": ("--help",),
    "help of a command": ("help", "convert"),
    "ask": ("ask", "hello", "-m", "MODEL", "--max-tokens", "4"),
    "ask --json": ("ask", "hello", "-m", "MODEL", "--max-tokens", "4", "--json"),
    "inspect": ("inspect", "MODEL"),
    "inspect --json": ("inspect", "MODEL", "--json"),
    "models": ("models", "list"),
    "models --json": ("models", "list", "--json"),
    "cache": ("cache", "show"),
    "cache --json": ("cache", "show", "--json"),
    "chats": ("chats", "list"),
    "chats --json": ("chats", "list", "--json"),
    "bench": ("bench", "MODEL", "--prompt", "16", "--max-tokens", "4", "--runs", "1"),
    "quality": ("quality", "MODEL", "MODEL", "--json"),
    "convert": ("convert", "MODEL", "-o", "OUT", "--method", "round", "--no-verify"),
    "convert --json": ("convert", "MODEL", "-o", "OUT", "--method", "round", "--no-verify", "--json"),
    "convert --dry-run": ("convert", "MODEL", "-o", "OUT", "--dry-run"),
}


@pytest.fixture(params=ENDS_COMMANDS.values(), ids=ENDS_COMMANDS)
def command(request: pytest.FixtureRequest, tiny: Path, tmp_path: Path) -> list[str]:
    places = {"MODEL": str(tiny), "OUT": str(tmp_path / "packed")}
    return [places.get(word, word) for word in request.param]


def complaints(err: str) -> list[str]:
    """What is said beside the progress, and notes about the machine."""
    return [line for line in err.splitlines() if line.startswith("tokamac")]


FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def check_full(status: int, err: str) -> None:
    (said,) = complaints(err)
    assert (status, "output: No space left" in said) == (1, True), err
    assert "packed" not in said


def without_reader() -> int:
    """Return the end of a pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    return write


@FULL
def test_a_full_disk_under_stdout_is_one_line_and_blames_nothing_else(tokamac: Run, command: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = tokamac(*command, stdout=full)
    check_full(done.status, done.err)


def test_a_reader_who_has_left_is_no_trouble_of_any_command(tokamac: Run, command: list[str]) -> None:
    with os.fdopen(without_reader(), "w") as pipe:
        done = tokamac(*command, stdout=pipe)
    assert (done.status, complaints(done.err)) == (141, []), done.err


@pytest.mark.parametrize("kind", ["help", "ask", "models --json"])
def test_nor_of_the_interpreter_at_its_end(start: Start, tiny: Path, kind: str) -> None:
    """As processes: what is printed at once, streamed, and a line of JSON."""
    command = [str(tiny) if word == "MODEL" else word for word in ENDS_COMMANDS[kind]]
    write = without_reader()
    process = start(*command, stdout=write)
    os.close(write)
    status, _, err = finish(process)
    assert (status, complaints(err)) == (141, []), err
    if Path("/dev/full").exists():
        with Path("/dev/full").open("w") as full:
            status, _, err = finish(start(*command, stdout=full))
        check_full(status, err)


def test_a_conversion_goes_on_where_it_was_when_its_reader_left(start: Start, tiny: Path, tmp_path: Path) -> None:
    command = ("convert", tiny, "-o", tmp_path / "packed", "--json")
    process = start(*command)
    process.stdout.readline()
    process.stdout.close()
    with process.stderr:
        assert complaints(process.stderr.read()) == []
    assert process.wait(PATIENCE_S) == 141
    status, out, _ = finish(start(*command))
    assert status == 0
    assert json.loads(out.splitlines()[-1])["event"] == "converted"


def test_no_stdout_and_no_stderr_at_all(start: Start) -> None:
    process = start("--version", preexec_fn=lambda: (os.close(1), os.close(2)), stdout=None, stderr=None)
    assert process.wait(PATIENCE_S) == 0


def test_on_a_terminal_progress_leaves_no_trace_and_text_is_safe(start: Start, tiny: Path) -> None:
    leader, follower = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "20", "LINES": "5"}
    process = start(
        "ask", "Hello", "-m", tiny, "--max-tokens", "30", "--temp", "1", "--seed", "1",
        stdin=follower, stdout=follower, stderr=follower, text=False, env=env,
    )  # fmt: skip
    os.close(follower)
    shown = b""
    try:
        while piece := os.read(leader, 4096):
            shown += piece
    except OSError:
        pass  # the last writer has left
    os.close(leader)
    assert process.wait(PATIENCE_S) == 0
    answer = shown.decode().rpartition("\r\x1b[K")[2]
    assert "\x1b" not in answer
    assert len(answer.strip()) > 4
