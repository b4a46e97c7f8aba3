"""Tables and long lists that grow: a frame's work does not depend on how much there is already, and the end looks the same."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.app.test_prose import blocks
from tokamac.app.tui.markdown import page as tails
from tokamac.app.tui.markdown.page import PageRow, Prose, Tail
from tokamac.app.tui.markdown.parse import Block, Section, Table
from tokamac.app.tui.markdown.rows import SHORT, Grid, Row, rows

HEAD = "| # | what it does |\n| --: | --- |\n"
PIECES = st.sampled_from(
    [
        "word ",
        "`code`",
        "**b",
        "**",
        "é🦊",
        "|",
        " | ",
        "|\n| ",
        "\n",
        "\n\n",
        "\\|",
        "- ",
        "> ",
        "# ",
        "```\n",
        "&#10;",
        "  ",
    ]
)
TABLES = st.lists(PIECES, max_size=40).map(lambda pieces: HEAD + "| " + "".join(pieces))


def long_table(count: int, wide: int | None = None) -> str:
    """Return a table of ``count`` rows; the one numbered ``wide`` is wider than the others."""
    return HEAD + "".join(f"| {i} | some `words`{' and more' * 4 if i == wide else ''} |\n" for i in range(count))


def table(source: str) -> Table:
    (block,) = blocks(source)
    assert isinstance(block, Table)
    return block


def text(laid: list[Row]) -> list[str]:
    return [row.content.plain for row in laid]


def longest_parsed(source: str, step: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the most lines that one look parses at once while ``source`` comes ``step`` characters at a time."""
    lines: list[int] = []

    def noting(source: str) -> tuple[Section, ...]:
        lines.append(source.count("\n"))
        return parse(source)

    parse = tails.parse
    monkeypatch.setattr(tails, "parse", noting)
    tail = Tail()
    for at in range(0, len(source), step):
        tail.add(source[at : at + step])
        tail.look()
    return max(lines)


def test_a_long_table_is_parsed_a_row_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert longest_parsed(long_table(300), 9, monkeypatch) <= 4


def test_a_long_list_with_space_between_its_items_is_parsed_by_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "".join(f"{number}. item\n\n" for number in range(1, 201))
    assert longest_parsed(source, 9, monkeypatch) <= 2 * tails.LONGEST_OPEN_LIST + 4


def test_a_long_table_is_laid_out_a_row_at_a_time_and_as_a_whole_when_it_is_final() -> None:
    source = table(long_table(300, wide=250))
    grid, laid, work = Grid(source.right, 60), list[Row](), list[int]()
    for count in range(1, 302):
        growth = grid.grow(Table(source.rows[:count], source.right), final=False)
        laid = [*laid[: growth.kept], *growth.rows]
        work.append(len(growth.rows))
    assert max(work[SHORT:]) <= 5  # the wide one, wrapped
    assert sum(work) < 2 * 301
    assert text(laid)[:5] == text(rows(Table(source.rows[:200], source.right), 60))[:5]
    growth = grid.grow(source, final=True)
    assert text([*laid[: growth.kept], *growth.rows]) == text(rows(source, 60)) != text(laid)
    assert grid.grow(source, final=True).rows == []


def test_a_wider_cell_moves_the_columns_of_a_long_table_at_most_when_it_has_doubled() -> None:
    rows_of = table(
        HEAD + "".join(f"| {'9' * (4 + number)} | a |\n" for number in range(40)) + "| 1 | b |\n" * 200
    ).rows
    grid, moved = Grid((True, False), 90), list[int]()
    for count in range(1, len(rows_of) + 1):
        growth = grid.grow(Table(rows_of[:count], (True, False)), final=False)
        if len(growth.rows) > 2 and count > SHORT:
            moved.append(count)
    assert moved == [2 * SHORT]


def test_a_row_that_is_still_being_written_does_not_move_the_columns_of_a_long_table() -> None:
    source = table(long_table(3 * SHORT, wide=2 * SHORT))
    grid, kept = Grid(source.right, 60), list[int]()
    for last in (SHORT - 2, 2 * SHORT - 1, 2 * SHORT, 2 * SHORT + 1):
        growth = grid.grow(Table(source.rows[: last + 2], source.right), final=False)
        kept.append(growth.kept)
    assert kept == [0, SHORT + 1, 2 * SHORT + 2, 0]  # the header has a line beneath it


@settings(max_examples=60, deadline=None)
@given(TABLES, st.lists(st.integers(1, 20), max_size=12))
def test_a_table_that_is_read_in_parts_is_what_it_would_be_at_once(source: str, steps: list[int]) -> None:
    tail, settled, at = Tail(), list[Block](), 0
    for step in [*steps, len(source)]:
        tail.add(source[at : at + step])
        at += step
        look = tail.look()
        shown = [*settled, *look.blocks]
        settled += look.blocks[: look.settled]
        assert shown == blocks(source[:at])


@settings(max_examples=40, deadline=None)
@given(TABLES, st.lists(st.integers(1, 20), max_size=12), st.integers(4, 40))
def test_a_table_that_grew_looks_as_if_it_had_come_at_once(source: str, steps: list[int], width: int) -> None:
    def at_once() -> list[PageRow]:
        prose = Prose()
        prose.add(source[:at])
        prose.look()
        return prose.rows(width)

    grown, at = Prose(), 0
    for step in [*steps, len(source)]:
        grown.add(source[at : at + step])
        at += step
        grown.look()
        assert all(a.is_same(b) for a, b in zip(grown.rows(width), at_once(), strict=True))


def test_a_table_is_final_when_something_else_begins_and_when_the_reply_ends() -> None:
    source = long_table(60, wide=59)
    ended, followed, whole = Prose(), Prose(), [*text(rows(table(source), 60)), ""]
    for at in range(0, len(source), 50):
        for prose in (ended, followed):
            prose.add(source[at : at + 50])
            prose.look()
            shown = prose.rows(60)
    assert [row.row.content.plain for row in shown] != whole
    for line in ("\n", "That was it.\n", "\n", "| a |\n", "| - |\n"):
        followed.add(line)
        followed.look()
    assert [row.row.content.plain for row in followed.rows(60)] == [*whole, "That was it.", "", "a   ", "────", ""]
    ended.finish(source)
    assert [row.row.content.plain for row in ended.rows(60)] == whole


def test_what_is_defined_above_a_table_holds_in_all_its_rows() -> None:
    source = "[a]: http://e.x\n\n| here |\n| --- |\n" + "| [it][a] |\n" * 30
    tail = Tail()
    for at in range(0, len(source), 7):
        tail.add(source[at : at + 7])
        look = tail.look()
    assert list(look.blocks) == blocks(source)


def test_a_list_with_space_between_its_items_looks_the_same_however_it_came() -> None:
    source = "".join(f"- item **{number}**\n\n  with more\n\n" for number in range(60))
    grown, whole = Prose(), Prose()
    for at in range(0, len(source), 11):
        grown.add(source[at : at + 11])
        grown.look()
        grown.rows(40)
    whole.finish(source)
    assert all(a.is_same(b) for a, b in zip(grown.rows(40), whole.rows(40), strict=True))
