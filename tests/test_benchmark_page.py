"""BENCHMARKS.md where only some sections are measured again: what stays says what it was measured on, whatever the head says."""

from pathlib import Path

import pytest

from tests.benchmarks.report import ELSEWHERE, Row, Section, block, merged, page

ROOT = Path(__file__).parent.parent
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
