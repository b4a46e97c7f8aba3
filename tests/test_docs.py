"""The documents say what is true: links lead somewhere, figures have a script behind them, and the guide names what
exists."""

import argparse
import ast
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tests.bench import long_child
from tests.bench.report import ELSEWHERE, SHORT, Row, Section, block, merged, page
from tests.bench.texts import SHOWN_PROSE
from tests.guide.dataset import read_corpus
from tokamac import engine, quant
from tokamac.app import help as texts
from tokamac.app.backend.protocol import Load
from tokamac.app.chat.actions import ACTIONS
from tokamac.app.cli import COMMANDS
from tokamac.app.tui.screens.chats import ChatsScreen
from tokamac.app.tui.screens.model import ModelScreen
from tokamac.app.tui.screens.settings import SystemScreen
from tokamac.engine.events import Message
from tokamac.engine.options import Sampling

# The guide tells the truth about the product: every command, flag, key and make target in its corpus exists.

ROOT = Path(__file__).parent.parent
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
COMMAND = re.compile(r"`tokamac ([a-z]+)")
TOPIC = re.compile(r"`tokamac help ([a-z]+)")
SLASH = re.compile(r"`/([a-z]+)(?=[ `])")
KEY = re.compile(r"\b(?:Ctrl|Shift|Alt)\+[A-Z][a-z]*\b|\bF\d{1,2}\b|\bEsc\b|\bPage(?:Up|Down)\b")
TARGET = re.compile(r"`make ([a-z]+)")
NOT_FLAGS = {"--config-settings"}
NOT_SLASHES: set[str] = set()
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
    assert {(name, entry) for name, entry in named(COMMAND, answers) if name not in {*COMMANDS, "help"}} == set()


def test_every_help_topic_exists(answers: list[tuple[str, str]]) -> None:
    topics = {path.stem for path in (ROOT / "app" / "help").glob("*.txt")}
    assert {(topic, entry) for topic, entry in named(TOPIC, answers) if topic not in topics} == set()


def test_every_slash_command_exists(answers: list[tuple[str, str]]) -> None:
    slashes = {action.slash for action in ACTIONS} | NOT_SLASHES
    assert {(slash, entry) for slash, entry in named(SLASH, answers) if slash not in slashes} == set()


def test_every_flag_exists(answers: list[tuple[str, str]]) -> None:
    flags = {"--version", "--help"} | NOT_FLAGS
    for name in COMMANDS:
        flags |= set(options_of(import_module(f"tokamac.app.commands.{name}").parser()))
    assert {(flag, entry) for flag, entry in named(FLAG, answers) if flag not in flags} == set()


def test_flags_are_told_of_commands_that_have_them(answers: list[tuple[str, str]]) -> None:
    wrong = set()
    for entry, answer in answers:
        for command, rest in re.findall(r"`tokamac (?!help)([a-z]+)([^`]*)`", answer):
            flags = set(options_of(import_module(f"tokamac.app.commands.{command}").parser())) | {"--help"}
            wrong |= {(entry, command, flag) for flag in FLAG.findall(rest) if flag not in flags}
    assert wrong == set()


def test_every_key_exists(answers: list[tuple[str, str]]) -> None:
    keys = {name.strip() for action in ACTIONS for name in action.key_names.split(",")}
    keys |= keys_of_lists() | FOREIGN_KEYS
    assert {(key, entry) for key, entry in named(KEY, answers) if key not in keys} == set()


def test_every_make_target_exists(answers: list[tuple[str, str]]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {(target, entry) for target, entry in named(TARGET, answers) if target not in targets} == set()


def test_the_check_would_notice() -> None:
    lies = [("lie", "Press Ctrl+Y or F12, run `tokamac fly --fast`, or `make tea`.")]
    assert named(KEY, lies) == {("Ctrl+Y", "lie"), ("F12", "lie")}
    assert named(COMMAND, lies) == {("fly", "lie")}
    assert named(FLAG, lies) == {("--fast", "lie")}
    assert named(TARGET, lies) == {("tea", "lie")}


# The documents say what is true: links lead somewhere, every figure has a script behind it.

DOCUMENTS = (
    "README.md", "docs/architecture.md", "docs/first-hour.md", "docs/python.md", "docs/server.md", "CONTRIBUTING.md",
    "CHANGELOG.md", "BENCHMARKS.md", "assets/guide/MODEL_CARD.md",
)  # fmt: skip


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_to_files(name: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", read(name))
    missing = [target for target in targets if "://" not in target and not ((ROOT / name).parent / target).exists()]
    assert missing == []


def test_every_file_that_a_document_of_the_code_names_exists() -> None:
    pattern = r"`((?:app|engine|quant|assets|tests)/[\w./]+)`"
    named = {path for name in ("docs/architecture.md", "CONTRIBUTING.md") for path in re.findall(pattern, read(name))}
    assert len(named) > 30
    assert {path for path in named if not (ROOT / path).exists()} == set()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_no_document_names_a_folder_of_the_machine_it_was_made_on(name: str) -> None:
    assert re.findall(r"(?<![\w.~])/(?:root|home|work|tmp|Users)/\S+", read(name)) == []


FOR_USERS = ("README.md", "docs/first-hour.md", "docs/python.md", "docs/server.md")


def test_every_flag_that_a_document_for_users_names_exists() -> None:
    flags = {flag for name in COMMANDS for flag in options_of(import_module(f"tokamac.app.commands.{name}").parser())}
    assert {flag for name in FOR_USERS for flag in FLAG.findall(read(name))} <= flags | {
        "--help",
        "--version",
        "--json",
    }


def test_every_topic_a_document_names_exists() -> None:
    topics = {topic for name in DOCUMENTS for topic in re.findall(r"tokamac help ([a-z]+)", read(name))}
    assert "kv" in topics
    assert topics <= texts.topics().keys()


@pytest.mark.parametrize("code", [
    re.findall(r"```python\n(.*?)```", read("README.md"), re.DOTALL)[0],
    textwrap.dedent("".join(re.findall(r"^(?:  .*)?\n", texts.topic("python").partition("Stop")[0], re.MULTILINE))),
])  # fmt: skip
def test_the_python_of_the_documents_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(code, {})
    *answer, rate = capsys.readouterr().out.splitlines()
    assert "decode" in " ".join(answer).lower()
    assert re.fullmatch(r" [\d.]+ tok/s", rate)


def python_of(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", read(name), re.DOTALL)


@pytest.mark.parametrize("code", [code for code in python_of("docs/python.md") if '"guide"' in code])
def test_the_python_of_the_page_on_it_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(code, {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("code", [*python_of("docs/python.md"), *python_of("docs/server.md")])
def test_all_python_of_the_documents_can_be_read(code: str) -> None:
    imported = {
        alias.name for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported <= {*engine.__all__, *quant.__all__, "OpenAI"}


def test_documents_are_as_short_as_they_are_meant_to_be() -> None:
    assert len(read("README.md").splitlines()) <= 130
    assert sum(len(path.read_text(encoding="utf-8").split()) for path in (ROOT / "docs").glob("*.md")) <= 12_000


def test_every_make_target_the_documents_name_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    named = {target for name in DOCUMENTS for target in re.findall(r"(?:^|`)make ([a-z-]+)", read(name), re.MULTILINE)}
    assert named
    assert named <= targets


def test_pictures_are_real_and_free_of_scripts() -> None:
    pictures = sorted((ROOT / "assets" / "pictures").glob("*.svg"))
    assert pictures
    for picture in pictures:
        text = picture.read_text(encoding="utf-8").lower()
        assert "<script" not in text
        assert "url(" not in text.replace("url(#", ""), "looking at a picture must not fetch anything"


# BENCHMARKS.md where only some sections are measured again: what stays says what it was measured on, whatever the
# head says.

HERE = [("system", "Linux-6"), ("versions", "Python 3.11.7, mlx 0.32.4"), ("MLX computes on", "cpu")]
NEWER = [("system", "Linux-7"), ("versions", "Python 3.11.7, mlx 0.32.4"), ("MLX computes on", "cpu")]
NEWEST = [("system", "Linux-8"), ("versions", "Python 3.11.7, mlx 0.33.0"), ("MLX computes on", "cpu")]


def section(title: str, *, met: bool = True, when: str = "first") -> str:
    return block(Section(title, [Row("speed", "41 tok/s", "≥ 40 tok/s", met)], "How it was measured."), f"*{when}*")


def of(text: str, title: str) -> str:
    """The section of this title, its note included."""
    found = [f"## {each}".rstrip() for each in text.split("\n## ") if each.startswith(f"{title}\n")]
    assert len(found) == 1
    return found[0]


def note(text: str, title: str) -> str:
    """What the section says of where it was measured; nothing where that is as in the head."""
    _, _, said = of(text, title).partition(ELSEWHERE)
    return said.removesuffix(".*")


@pytest.fixture
def old() -> str:
    """A page of three sections, all measured at once."""
    return page([section("Decode"), section("Memory"), section("Start", met=False)], HERE)


def test_a_section_measured_again_stands_in_its_old_place_and_a_new_one_at_the_end(old: str) -> None:
    again, new = section("Memory", when="second"), section("Search", when="second")
    text = merged(old, [again, new], HERE)
    assert text == page([section("Decode"), again, section("Start", met=False), new], HERE)
    assert "Targets met: 3 of 4." in text


def test_the_page_begins_with_figures_of_its_sections() -> None:
    words, title, row = SHORT[0]
    blocks = [block(Section(title, [Row(row, "0.4 s"), Row("else", "1")], "How."), "*first*"), section("Memory")]
    text = merged("", blocks, HERE)
    assert f"| {words} | 0.4 s |" in text.partition("## ")[0]
    assert merged(text, [], HERE) == text
    assert note(merged(text, [section("Memory")], NEWER), title) == "system Linux-6"


def test_every_figure_in_short_was_measured() -> None:
    head, *sections = read("BENCHMARKS.md").split("\n## ")
    rows = {(each.partition("\n")[0], line.split(" | ")[0][2:]) for each in sections for line in each.splitlines()}
    assert [words for words, title, row in SHORT if (title, row) not in rows] == []
    assert [words for words, *_ in SHORT if f"| {words} |" not in head] == []


def test_where_nothing_is_measured_again_nothing_changes(old: str) -> None:
    assert merged(old, [], HERE) == old
    assert merged("", [section("Decode")], HERE) == page([section("Decode")], HERE)


def test_what_stays_names_what_it_was_measured_on_where_the_head_says_otherwise_now(old: str) -> None:
    text = merged(old, [section("Memory", when="second")], NEWER)
    assert [note(text, title) for title in ("Decode", "Memory", "Start")] == ["system Linux-6", "", "system Linux-6"]
    assert of(text, "Memory") == section("Memory", when="second")


def test_a_note_stays_while_the_head_does(old: str) -> None:
    text = merged(old, [section("Memory")], NEWER)
    assert merged(text, [section("Memory")], NEWER) == text


def test_a_note_names_more_once_the_head_differs_in_more(old: str) -> None:
    text = merged(merged(old, [section("Memory")], NEWER), [section("Start")], NEWEST)
    assert note(text, "Decode") == "system Linux-6; versions Python 3.11.7, mlx 0.32.4"
    assert note(text, "Memory") == "system Linux-7; versions Python 3.11.7, mlx 0.32.4"
    assert note(text, "Start") == ""


def test_a_note_is_gone_once_the_head_says_the_same_again(old: str) -> None:
    text = merged(merged(old, [section("Memory")], NEWER), [section("Start")], HERE)
    assert of(text, "Decode") == section("Decode")
    assert note(text, "Memory") == "system Linux-7"


def test_a_fact_without_a_value_is_one_too(old: str) -> None:
    unknown = page([section("Decode")], [*HERE, ("model", "")])
    assert note(merged(unknown, [], [*HERE, ("model", "guide")]), "Decode") == "model "


@pytest.mark.parametrize(
    ("was", "broken"),
    [("| system | Linux-6 |", "| system | Linux-6 | of 2020 |"), ("| system | Linux-6 |", "| system |")],
)
def test_a_head_that_can_not_be_read_is_told(old: str, was: str, broken: str) -> None:
    assert was in old
    with pytest.raises(ValueError, match="the value of a fact"):
        merged(old.replace(was, broken), [], HERE)


def test_a_note_that_can_not_be_read_is_told(old: str) -> None:
    text = merged(old, [section("Memory")], NEWER).replace("differs: system", "differs: planet")
    with pytest.raises(ValueError, match="where a section was measured"):
        merged(text, [], NEWER)


# What the benchmarks run besides the product itself still runs: nobody else does, until figures are renewed.


def test_the_child_of_long_replies_recites_as_many_tokens_as_are_asked_for() -> None:
    engine, _ = long_child.load(Load("guide", prompt_cache=False), lambda _: None)
    try:
        *_, finished = engine.generate([Message("user", "What is decode?")], Sampling(temperature=0.0, max_tokens=300))
    finally:
        engine.close()
    assert finished.metrics.generated_tokens == 300
    assert finished.text == SHOWN_PROSE[: 300 * long_child.CHARACTERS]
