"""The guide tells the truth about the product: every command, flag, key and make target in its corpus exists."""

import argparse
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tests.guide.dataset import read_corpus
from tokamac.app.chat.actions import ACTIONS
from tokamac.app.cli import COMMANDS
from tokamac.app.tui.screens.chats import ChatsScreen
from tokamac.app.tui.screens.model import ModelScreen
from tokamac.app.tui.screens.settings import SystemScreen

ROOT = Path(__file__).parent.parent
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
COMMAND = re.compile(r"`tokamac ([a-z]+)")
KEY = re.compile(r"\b(?:Ctrl|Shift|Alt)\+[A-Z][a-z]*\b|\bF\d{1,2}\b|\bEsc\b|\bPage(?:Up|Down)\b")
TARGET = re.compile(r"`make ([a-z]+)")
NOT_FLAGS = {"--config-settings"}
# Keys of the terminal or of other programs, which the corpus may name as such.
FOREIGN_KEYS = {"Ctrl+C", "Shift+Enter"}


@pytest.fixture(scope="module")
def answers() -> list[tuple[str, str]]:
    return [(entry.id, turn.answer) for entry in read_corpus() if not entry.out_of_scope for turn in entry.turns]


def options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from options_of(child)


def keys_of_lists() -> set[str]:
    """Keys of the screens that a list or a text is worked on in, as a person reads them."""
    bound = (binding.key for screen in (ChatsScreen, ModelScreen, SystemScreen) for binding in screen.BINDINGS)
    return {"+".join(part.capitalize() for part in key.split("+")) for keys in bound for key in keys.split(",")}


def named(pattern: re.Pattern[str], answers: list[tuple[str, str]]) -> set[tuple[str, str]]:
    return {(found, entry) for entry, answer in answers for found in pattern.findall(answer)}


def test_every_command_exists(answers: list[tuple[str, str]]) -> None:
    assert {(name, entry) for name, entry in named(COMMAND, answers) if name not in COMMANDS} == set()


def test_every_flag_exists(answers: list[tuple[str, str]]) -> None:
    flags = {"--version", "--help"} | NOT_FLAGS
    for name in COMMANDS:
        flags |= set(options_of(import_module(f"tokamac.app.commands.{name}").parser()))
    assert {(flag, entry) for flag, entry in named(FLAG, answers) if flag not in flags} == set()


def test_flags_are_told_of_commands_that_have_them(answers: list[tuple[str, str]]) -> None:
    wrong = set()
    for entry, answer in answers:
        for command, rest in re.findall(r"`tokamac ([a-z]+)([^`]*)`", answer):
            flags = set(options_of(import_module(f"tokamac.app.commands.{command}").parser())) | {"--help"}
            wrong |= {(entry, command, flag) for flag in FLAG.findall(rest) if flag not in flags}
    assert wrong == set()


def test_every_key_exists(answers: list[tuple[str, str]]) -> None:
    keys = {name.strip() for action in ACTIONS for name in action.key_names.split(",")}
    keys |= keys_of_lists() | FOREIGN_KEYS
    assert {(key, entry) for key, entry in named(KEY, answers) if key not in keys} == set()


def test_every_make_target_exists(answers: list[tuple[str, str]]) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {(target, entry) for target, entry in named(TARGET, answers) if target not in targets} == set()


def test_the_check_would_notice() -> None:
    lies = [("lie", "Press Ctrl+Y or F12, run `tokamac fly --fast`, or `make tea`.")]
    assert named(KEY, lies) == {("Ctrl+Y", "lie"), ("F12", "lie")}
    assert named(COMMAND, lies) == {("fly", "lie")}
    assert named(FLAG, lies) == {("--fast", "lie")}
    assert named(TARGET, lies) == {("tea", "lie")}
