"""Help: of the program, of a command, of one of its actions; as wide as the terminal and no wider than can be read."""

import pytest

from tests.cli.conftest import Run
from tokamac.app import cli


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
    assert f"{flag} stands alone" in done.err


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
        ("cache clear", ["remove all of it", "--json"], ["--kv-bits", "MODEL", "cache check", "ACTION"]),
        ("cache check", ["compute what is stored", "--kv-bits", "MODEL", "cache check guide"], ["cache clear"]),
        ("models pull", ["download a model", "ID", "models pull mlx-community"], ["--chip", "--unfinished", "suggest"]),
        ("models suggest", ["--chip", "--context"], ["--unfinished", "ID", "models pull"]),
        ("chats export", ["--output", "HTML or SVG"], ["--deleted", "--set-aside", "chats show"]),
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
