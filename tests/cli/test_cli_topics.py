"""``tokamac help TOPIC``: every topic is listed and true; what there is no help on is wrong usage."""

import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.test_guide_product import FLAG, KEY, keys_of_lists, options_of
from tokamac.app import help as texts
from tokamac.app import output, parser, settings
from tokamac.app.chat.actions import ACTIONS
from tokamac.app.cli import COMMANDS

ROOT = Path(__file__).parent.parent.parent
TOPICS = texts.topics()
FOREIGN_KEYS = {"Alt+Enter", "Ctrl+C", "Ctrl+End", "Esc"}


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
        ("kvv", "kv"),
        ("memmory", "memory"),
        ("exit-codes", "exit"),
        ("env", "environment"),
        ("bnech", "bench"),
        ("qqqq", None),
    ],
)
def test_an_unknown_topic_is_one_line_with_the_nearest(tokamac: Run, word: str, meant: str | None) -> None:
    done = tokamac("help", word)
    question = f"; did you mean tokamac help {meant}?" if meant else "."
    assert (done.status, done.out) == (output.WRONG_USAGE, "")
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
    assert set(FLAG.findall(text)) <= set().union(*flags.values())
    for command, rest in re.findall(r"tokamac ([a-z]+)((?: [^\s`]+| \"[^\"]*\")*)", text):
        if command != "help":
            assert set(FLAG.findall(rest)) <= flags[command], command
    keys = {name.strip() for action in ACTIONS for name in action.key_names.split(",")} | keys_of_lists() | FOREIGN_KEYS
    assert set(KEY.findall(text)) <= keys
    slashes = {action.slash for action in ACTIONS}
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
    plain = {f"{name} = " for name in settings.VALUES} | {f"[{name}]" for name in (*settings.OPTIONS, *settings.MAPS)}
    options = {each.name for name in settings.OPTIONS for each in fields(getattr(settings.Settings(), name))}
    assert {name for name in plain | options if name not in text} == set()
    assert settings.loads("\n".join(re.findall(r"^  ((?:\[|[a-z_\"/]+ = ).*)$", text, re.MULTILINE))).warnings == ()


def test_the_environment_has_every_variable_of_ours() -> None:
    code = "".join(file.read_text() for area in ("app", "engine", "quant") for file in (ROOT / area).rglob("*.py"))
    used = set(re.findall(r"\bTOKAMAC_[A-Z_]+\b", code))
    assert used == set(re.findall(r"\bTOKAMAC_[A-Z_]*[A-Z]\b", texts.topic("environment")))


def test_the_exit_statuses_are_those_of_the_program() -> None:
    listed = re.findall(r"^ +(\d+)  ", texts.topic("exit"), re.MULTILINE)
    assert listed == ["0", "1", *map(str, (output.WRONG_USAGE, output.INTERRUPTED, output.PIPE_CLOSED))]
