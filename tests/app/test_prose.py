"""Markdown to blocks to rows: the shapes, the widths, and that streaming ends where the whole would."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokamac.app.tui.markdown.page import Tail
from tokamac.app.tui.markdown.parse import Block, Code, Flow, HorizontalRule, Table, parse
from tokamac.app.tui.markdown.rows import rows

PIECES = st.sampled_from(
    [
        "word ",
        "**bold** ",
        "`code`",
        "\n",
        "\n\n",
        "- ",
        "1. ",
        "  ",
        "```py\n",
        "```\n",
        "> ",
        "# ",
        "| a | b |\n",
        "| --- | --- |\n",
        "---\n",
        "<b>",
        "é🦊 ",
        "\t",
    ]
)
MARKDOWN = st.lists(PIECES, max_size=40).map("".join)


def blocks(source: str) -> list[Block]:
    return [block for section in parse(source) for block in section.blocks]


def plain(source: str, width: int = 40) -> list[str]:
    return [row.content.plain for block in blocks(source) for row in rows(block, width)]


def test_paragraph_wraps_at_words() -> None:
    assert plain("one two three", 8) == ["one two", "three"]


def test_list_hangs() -> None:
    assert plain("- one two three\n- four\n  - five\n", 9) == ["• one two", "  three", "• four", "  ◦ five"]


def test_ordered_list_keeps_its_start_and_aligns() -> None:
    assert plain("9. a\n10. b\n") == [" 9. a", "10. b"]


def test_loose_list_keeps_its_space() -> None:
    assert plain("- a\n\n- b\n") == ["• a", "", "• b"]


def test_quote_and_rule() -> None:
    assert plain("> a\n>\n> b\n\n---\n", 4) == ["▎ a", "▎", "▎ b", "────"]


def test_code_is_verbatim_and_folds() -> None:
    (code,) = blocks("```python\nx = [1,\n\n  2]\n```\n")
    assert code == Code("x = [1,\n\n  2]", "python")
    assert plain("```\nabcdef\n```", 4) == ["abcd", "ef"]


def test_an_open_fence_is_not_closed() -> None:
    assert blocks("```python\nx = 1\n") == [Code("x = 1", "python", closed=False)]
    assert blocks("```python\nx = 1\n```") == [Code("x = 1", "python", closed=True)]


def test_table_fits_or_becomes_records() -> None:
    source = "| name | what it does |\n| --- | ---: |\n| a | some long words here |\n"
    assert all(len(line) <= 24 for line in plain(source, 24))
    assert plain(source, 9)[0] == "name: a"


def column_widths(lengths: tuple[int, ...], room: int) -> list[int]:
    """The widths of a table's columns whose cells need so many, where they have so much room together."""
    row = "|".join("x " * (length // 2) + "x" * (length % 2) for length in lengths)
    source = f"|{row}|\n|{'-|' * len(lengths)}\n"
    rule = plain(source, room + 3 * (len(lengths) - 1))
    return [len(part) for part in next(line for line in rule if "─" in line).split("─┼─")]


@pytest.mark.parametrize(
    ("lengths", "room", "widths"),
    [
        ((61, 61), 200, [61, 61]),
        ((61, 61), 80, [40, 40]),
        ((61, 61), 81, [40, 41]),
        ((21, 61, 61), 90, [21, 34, 35]),
        ((61, 21, 61), 48, [16, 16, 16]),
        ((61, 41, 21), 92, [35, 36, 21]),
        ((61, 41, 21), 116, [54, 41, 21]),
    ],
)
def test_all_of_the_widest_columns_are_shortened_together(
    lengths: tuple[int, ...], room: int, widths: list[int]
) -> None:
    assert column_widths(lengths, room) == widths


@given(st.lists(st.integers(4, 40).map(lambda half: 2 * half + 1), min_size=2, max_size=5), st.data())
def test_a_column_that_needs_more_gets_no_less_and_no_room_is_left(lengths: list[int], data: st.DataObject) -> None:
    room = data.draw(st.integers(4 * len(lengths), sum(lengths)))
    widths = column_widths(tuple(lengths), room)
    assert sum(widths) == room
    cut = [width for width, length in zip(widths, lengths, strict=True) if width < length]
    assert max(cut, default=0) - min(cut, default=0) <= 1
    assert all(width <= min(cut, default=width) + 1 for width in widths)


def test_html_and_markup_are_text() -> None:
    assert plain("<b>x</b> [bold]y[/bold]") == ["<b>x</b> [bold]y[/bold]"]


def test_links_are_shown() -> None:
    assert plain("[here](http://e.x) <http://f.x>", 60) == ["here (http://e.x) http://f.x"]


@settings(max_examples=150, deadline=None)
@given(MARKDOWN, st.integers(2, 60))
def test_rows_fit(source: str, width: int) -> None:
    for block in blocks(source):
        assert all(row.content.cell_length <= width for row in rows(block, width))


@settings(max_examples=150, deadline=None)
@given(MARKDOWN, st.lists(st.integers(1, 30), max_size=10))
def test_streaming_ends_where_the_whole_would(source: str, steps: list[int]) -> None:
    tail, shown, open_blocks, at = Tail(), list[Block](), tuple[Block, ...](), 0
    for step in [*steps, len(source)]:
        tail.add(source[at : at + step])
        at += step
        look = tail.look()
        shown += look.blocks[: look.settled]
        open_blocks = look.blocks[look.settled :]
    assert [*shown, *open_blocks] == blocks(source)


@pytest.mark.parametrize("kind", [Flow, Code, Table, HorizontalRule])
def test_equal_text_gives_equal_blocks(kind: type) -> None:
    source = "a\n\n```\nb\n```\n\n|c|\n|-|\n|d|\n\n---\n"
    assert [block for block in blocks(source) if isinstance(block, kind)] == [
        block for block in blocks(source) if isinstance(block, kind)
    ]


def test_a_long_list_settles_as_it_grows_and_looks_the_same() -> None:
    source = "".join(f"{i}. item {i}\n" for i in range(1, 101))
    tail, shown, longest = Tail(), list[Block](), 0
    for at in range(0, len(source), 7):
        tail.add(source[at : at + 7])
        look = tail.look()
        shown += look.blocks[: look.settled]
        longest = max(longest, sum(len(rows(block, 40)) for block in look.blocks[look.settled :]))
    assert longest < 30
    flows = [*shown, *look.blocks[look.settled :]]
    assert [row.content.plain.strip() for block in flows for row in rows(block, 40)] == source.strip().splitlines()


def test_a_fence_is_open_until_its_mark_whatever_blank_lines_it_ends_with() -> None:
    def closed(source: str) -> list[bool]:
        return [block.closed for section in parse(source) for block in section.blocks if isinstance(block, Code)]

    assert closed("```python\nif a:\n    ") == closed("```python\nif a:\n\n  \n") == closed("```") == [False]
    assert closed("```python\nif a:\n```") == closed("> ```\n> a\n\nb") == closed("- ```\n  a\n- b") == [True]
