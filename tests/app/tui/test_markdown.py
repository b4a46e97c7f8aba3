"""Markdown to blocks to rows: shapes, widths, copying, and that streaming costs no more as a reply grows."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textual.content import Content
from textual.style import Style

from tokamac.app.chat.conversation import Reply
from tokamac.app.text.markdown import links
from tokamac.app.tui.markdown import page as tails
from tokamac.app.tui.markdown.page import BLANK, Page, PageRow, Prose, Tail
from tokamac.app.tui.markdown.parse import parse
from tokamac.app.tui.markdown.rows import SHORT, Block, Code, Flow, Grid, HorizontalRule, Row, Section, Table, wrapped
from tokamac.app.tui.markdown.rows import rows as markdown_rows
from tokamac.app.tui.markdown.turns import ReplyMessage, Thinking, UserMessage

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
        "\\(a^2\\) ",
        "\\[",
        "x_1\\]",
        "$$\n",
        "$a$",
        "- [ ] ",
        "👩‍💻🇩🇪👍🏽 ",
    ]
)
MARKDOWN = st.lists(PIECES, max_size=40).map("".join)


def blocks(source: str) -> list[Block]:
    return [block for section in parse(source) for block in section.blocks]


def plain(source: str, width: int = 40) -> list[str]:
    return [row.content.plain for block in blocks(source) for row in markdown_rows(block, width)]


@pytest.mark.parametrize(
    ("source", "shown", "emphasised"),
    [
        # products and powers, as they were typed
        ("3*4 = 12 and 2*3*4", "3*4 = 12 and 2*3*4", []),
        ("x**2 + y**2, 2*(3+4)*5*x", "x**2 + y**2, 2*(3+4)*5*x", []),
        ("f(*args, **kwargs) and g(*args)", "f(*args, **kwargs) and g(*args)", []),
        ("**area: a*b*c**", "area: a*b*c", [("strong", "area: a*b*c")]),
        # a marker beside a space, or at the wrong side of punctuation
        ("4 * 5 * 6", "4 * 5 * 6", []),
        ("*open and closed *", "*open and closed *", []),
        ('left*"quoted"*', 'left*"quoted"*', []),
        ("\\*literal\\*", "*literal*", []),
        # underscores inside words
        ("max_token_count and _private_name_", "max_token_count and private_name", [("em", "private_name")]),
        ("well-_(known)_", "well-(known)", [("em", "(known)")]),
        # nesting, and a run of three
        ("*one **two** three*", "one two three", [("strong", "two"), ("em", "one two three")]),
        ("***both***", "both", [("strong", "both"), ("em", "both")]),
        ("*(*inner*)*", "(inner)", [("em", "inner"), ("em", "(inner)")]),
        # the end of a run inside a word; scripts without spaces
        ("**Haus**tür", "Haustür", [("strong", "Haus")]),
        ("这是**重点**内容", "这是重点内容", [("strong", "重点")]),
    ],
)
def test_emphasis(source: str, shown: str, emphasised: list[tuple[str, str]]) -> None:
    (block,) = blocks(source)
    inline = block.lines[0].inline
    assert inline.text == shown
    assert [(span.style, inline.text[span.start : span.end]) for span in inline.spans] == emphasised


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


@given(st.lists(st.integers(4, 40).map(lambda half: 2 * half + 1), min_size=2, max_size=5), st.data())
def test_a_column_that_needs_more_gets_no_less_and_no_room_is_left(lengths: list[int], data: st.DataObject) -> None:
    room = data.draw(st.integers(4 * len(lengths), sum(lengths)))
    widths = column_widths(tuple(lengths), room)
    assert sum(widths) == room
    cut = [width for width, length in zip(widths, lengths, strict=True) if width < length]
    assert max(cut, default=0) - min(cut, default=0) <= 1
    assert all(width <= min(cut, default=width) + 1 for width in widths)


def test_the_links_that_can_be_opened() -> None:
    source = "[a *b*](https://a.b/c) https://a.b/c, https://d.e. <f@g.h> ![i](http://i.j) [k](k.md) `https://l.m` n.o/p"
    assert links(source) == [
        ("a b", "https://a.b/c"),
        ("https://d.e", "https://d.e"),
        ("f@g.h", "mailto:f@g.h"),
        ("i", "http://i.j"),
    ]


def test_html_and_markup_are_text() -> None:
    assert plain("<b>x</b> [bold]y[/bold]") == ["<b>x</b> [bold]y[/bold]"]


def test_a_box_to_tick_is_a_box() -> None:
    source = "- [ ] a\n- [x] b\n  1. [X] c\n- [y] d\n- [ ]e\n"
    assert plain(source) == ["☐ a", "☑ b", "  1. ☑ c", "• [y] d", "• [ ]e"]


def test_columns_are_aligned_as_they_were_written() -> None:
    source = "| a | b | c |\n| --- | :-: | --: |\n| left | in the mid | 1 |\n| l | mid | 12345 |\n"
    assert plain(source)[2:] == ["left │ in the mid │     1", "l    │    mid     │ 12345"]


# Formulas -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (r"so \(E = mc^2\), and", "so E = mc², and"), ("$a^2+b^2=c^2$.", "a² + b² = c²."),
        (r"\[ \frac{1}{2} \] inside, $$x_i$$ too", "½ inside, xᵢ too"),
        (r"**bold \(a_1 * b * c_2\)**", "bold a₁ * b * c₂"), (r"`\(a^2\)` and `$x$`", r"\(a^2\) and $x$"),
        (r"\(\unheard{x}\)", r"\(\unheard{x}\)"), (r"it is \(a^2 + *b", r"it is \(a^2 + *b"),
        ("$5 and $6", "$5 and $6"), ("$5-$10, US$20 or 5$ and 6$", "$5-$10, US$20 or 5$ and 6$"),
        ("$5 or so, and 6$", "$5 or so, and 6$"), ("set $HOME/$USER", "set $HOME/$USER"),
        (r"\(see below\) and \[1, two\]", "(see below) and [1, two]"), (r"\\(a\\)", r"\(a\)"),
        ("| $x^2$ |\n|---|\n| 1 |", "x²  "),
    ],
)  # fmt: skip
def test_formulas_in_a_line_are_seen_before_markdown_eats_them(source: str, shown: str) -> None:
    assert plain(source, 60)[0] == shown


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("so\n\\[\nx^2\n\\]\nthen", ["so", "  x²", "then"]),
        ("$$\nx\n\n+ y\n$$", ["  x + y"]),
        ("$$x$$.\n", ["  x."]),
        ("$$x$$ and more\n", ["x and more"]),
        ("\\begin{align*}\na &= b \\\\\nc + d &= e\n\\end{align*}", ["      a = b", "  c + d = e"]),
        ("1. a\n   \\[\n   x_1\n   \\]\n2. b", ["1. a", "     x₁", "2. b"]),
        ("- $$x^2$$\n", ["• x²"]),
        ("> $$\n> x^2\n> $$\n", ["▎   x²"]),
        ("$$\n\\unheard{x}\n- y\n$$", ["  $$", "  \\unheard{x}", "  - y", "  $$"]),
        ("\\[\n- y\n# 1", ["  \\[", "  - y", "  # 1"]),
        ("$$ is the shell's id\n\nand *more*", ["$$ is the shell's id", "and more"]),
        ("```\n$$\nx\n$$\n```", ["$$", "x", "$$"]),
    ],
)
def test_formulas_on_lines_of_their_own(source: str, shown: list[str]) -> None:
    assert plain(source) == shown


def test_a_formula_that_never_ends_is_none_after_a_while() -> None:
    blocks_of = blocks("$$\n" + "- item\n" * 100)
    assert [row.content.plain for row in markdown_rows(blocks_of[1], 40)][:2] == ["• item", "• item"]


@pytest.mark.parametrize(
    "source",
    [r"so \(E = mc^2\) is", "so\n\n\\[\nE = \\begin{cases} 1 \\\\ 2 \\end{cases}\n\\]\n\nit is", "- \\(a_1\\)"],
)
@pytest.mark.parametrize("width", [10, 60])
def test_formulas_are_copied_as_they_were_written(source: str, width: int) -> None:
    prose = Prose()
    prose.finish(source)
    page = Page(width)
    page.append(ReplyMessage("m"))
    page.messages[0]._prose.finish(source)  # type: ignore[attr-defined]
    page.update(page.messages[0])
    copied = page.copy(lambda y: (0, -1) if y else None).strip()
    assert copied.replace("• ", "- ").replace("\n\n", "\n") == source.replace("\n\n", "\n")


def test_part_of_a_formula_is_copied_as_all_of_it() -> None:
    (row,) = markdown_rows(blocks(r"so \(E = mc^2\) is")[0], 60)
    assert row.copied(5, 7, first=True) == r"\(E = mc^2\)"
    assert row.copied(0, 2, first=True) == "so"


# Code ---------------------------------------------------------------------------------------------------------------------


def framed(source: str, width: int = 30) -> list[str]:
    prose = Prose()
    prose.finish(source)
    return [(row.frame.lead + row.row.content).plain.rstrip() for row in prose.rows(width)]


def test_code_says_its_language_and_how_to_copy_it_and_keeps_its_place() -> None:
    source = "1. a\n\n   ```py\n   x = 1\n   ```\n\n> ```\n> y\n> ```\n"
    assert [line for line in framed(source) if line] == [
        " 1. a",
        "    ▏py           copy: /code",
        "    ▏x = 1",
        " ▎ ▏              copy: /code",
        " ▎ ▏y",
    ]
    assert framed("```averylongname\nx\n```", 12)[0] == " ▏…ylongname"


def test_a_diff_is_in_colours_while_it_is_written_too() -> None:
    for end in ("", "```"):
        (code,) = blocks(f"```diff\n@@ 1 @@\n-old\n+new\n same\n{end}")
        styles = [[str(span.style) for span in row.content.spans] for row in markdown_rows(code, 40)][:4]
        assert styles == [["$text-primary"], ["$text-error"], ["$text-success"], []]


def test_what_is_copied_of_code_has_nothing_of_its_frame() -> None:
    message = ReplyMessage("/home/me/models/m.gguf")
    assert message.rows(40)[0].row.content.plain.strip() == "m"
    message.end(Reply("so\n\n```py\nx = 1\ny = 2\n```\n"))
    page = Page(40)
    page.append(message)
    assert page.copy(lambda y: (0, -1) if y else None).strip() == "so\n\nx = 1\ny = 2"
    (head,) = (row for y in range(page.height) if (row := page.row(y)) and row.code)
    assert head.code.code == "x = 1\ny = 2"


def test_links_are_shown() -> None:
    assert plain("[here](http://e.x) <http://f.x>", 60) == ["here http://f.x"]
    assert plain("[e.x](http://f.x) [file](a/b.py)", 60) == ["e.x (http://f.x) file (a/b.py)"]


@settings(max_examples=150, deadline=None)
@given(MARKDOWN, st.integers(2, 60))
def test_rows_fit(source: str, width: int) -> None:
    for block in blocks(source):
        assert all(row.content.cell_length <= width for row in markdown_rows(block, width))


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
        longest = max(longest, sum(len(markdown_rows(block, 40)) for block in look.blocks[look.settled :]))
    assert longest < 30
    flows = [*shown, *look.blocks[look.settled :]]
    assert [
        row.content.plain.strip() for block in flows for row in markdown_rows(block, 40)
    ] == source.strip().splitlines()


def test_a_fence_is_open_until_its_mark_whatever_blank_lines_it_ends_with() -> None:
    def closed(source: str) -> list[bool]:
        return [block.closed for section in parse(source) for block in section.blocks if isinstance(block, Code)]

    assert closed("```python\nif a:\n    ") == closed("```python\nif a:\n\n  \n") == closed("```") == [False]
    assert closed("```python\nif a:\n```") == closed("> ```\n> a\n\nb") == closed("- ```\n  a\n- b") == [True]


# The conversation as rows: what stands where, what is copied, and that nothing that stays the same is made anew.


class Lines:
    """A message of so many rows, whatever the width."""

    def __init__(self, *texts: str) -> None:
        self.all = [PageRow(Row(Content(text))) for text in texts]

    def rows(self, width: int) -> list[PageRow]:
        return self.all


def plain_page(page: Page) -> list[str]:
    return [row.row.content.plain for y in range(page.height) if (row := page.row(y)) is not None]


def everything(y: int) -> tuple[int, int]:
    return 0, -1


def test_messages_stand_below_each_other_with_a_blank_row_after_each() -> None:
    page = Page(40)
    page.append(Lines("a", "b"))
    page.append(Lines("c"))
    assert plain_page(page) == ["a", "b", "", "c", ""]
    assert [page.locate(y) for y in range(5)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert page.row(-1) is page.row(5) is None


def test_a_message_that_grows_moves_what_is_below_it() -> None:
    page, first = Page(40), Lines("a")
    page.append(first)
    page.append(Lines("z"))
    first.all = Lines("a", "b", "c").all
    page.update(first)
    assert plain_page(page) == ["a", "b", "c", "", "z", ""]
    assert page.start(1) == 4


def test_taking_the_last_message_away_and_all() -> None:
    page = Page(40)
    page.append(Lines("a"))
    page.append(Lines("b"))
    page.pop()
    assert plain_page(page) == ["a", ""]
    page.clear()
    assert page.height == 0


def test_copying_begins_and_ends_where_the_selection_does() -> None:
    page = Page(40)
    page.append(Lines("first", "second", "third"))
    spans = {0: (2, -1), 1: (0, -1), 2: (0, 3)}
    assert page.copy(spans.get) == "rst\nsecond\nthi"


def test_copied_prose_has_the_breaks_of_the_text_and_no_others() -> None:
    prose = Prose()
    prose.finish("one two three four\n\n- five six seven\n\n```\nabcdefghij\n```\n")
    page = Page(9)
    page.append(prose)
    assert page.copy(everything).rstrip() == "one two three four\n\n• five six seven\n\nabcdefghij"


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("ab \n🦊é\t-"), max_size=60), st.integers(2, 20))
def test_wrapping_loses_no_word(text: str, width: int) -> None:
    rows = list(wrapped(Content(text), width))
    copied = rows[0].content.plain + "".join(row.joint + row.content.plain for row in rows[1:])
    assert copied.split() == text.split()
    assert all(row.content.cell_length <= width for row in rows)


@settings(max_examples=100, deadline=None)
@given(MARKDOWN, st.lists(st.integers(1, 30), max_size=10), st.integers(4, 60))
def test_a_streamed_text_has_the_rows_of_the_whole(source: str, steps: list[int], width: int) -> None:
    streamed, whole, at = Prose(), Prose(), 0
    for step in [*steps, len(source)]:
        streamed.add(source[at : at + step])
        at += step
        streamed.look()
        streamed.rows(width)
    whole.finish(source)
    assert all(a.is_same(b) for a, b in zip(streamed.rows(width), whole.rows(width), strict=True))


def test_rows_that_look_the_same_stay_the_same_objects() -> None:
    prose = Prose()
    prose.add("first paragraph\n\nsecond one has words")
    prose.look()
    before = prose.rows(12)
    prose.add(" and more")
    prose.look()
    after = prose.rows(12)
    assert [row is was for row, was in zip(after, before, strict=False)][:4] == [True] * 4
    prose.finish("first paragraph\n\nsecond one has words and more")
    assert all(row is was for row, was in zip(prose.rows(12), after, strict=True))


def test_another_style_is_another_row() -> None:
    bold, faint = (PageRow(Row(Content.styled("same", style))) for style in ("bold", "dim"))
    assert bold.row.content == faint.row.content
    assert not bold.is_same(faint)


# What was guessed of a reply, marked in its rendered text.

# Textual puts tabs elsewhere after wide characters where a text has any style.
PARTS = st.lists(st.tuples(PIECES.filter(lambda piece: piece != "\t"), st.booleans()), max_size=40)
TINT = "$text-success"


def tinted(prose: Prose | ReplyMessage, width: int = 60) -> list[str]:
    """The parts of rows that are marked."""
    return [
        row.row.content.plain[span.start : span.end]
        for row in prose.rows(width)
        for span in row.row.content.spans
        if span.style == TINT
    ]


def grown(*parts: tuple[str, bool]) -> Prose:
    prose = Prose(tinted=True)
    for text, guessed in parts:
        prose.add(text, guessed=guessed)
        prose.look()
        prose.rows(60)
    return prose


MARKED = (
    ("# A **hea", False), ("ding**\n\n", True),
    ("See [the page](https://example.org/a/long/way?to=it) for", False), (" *one* thing", True), (", and `co", False),
    ("de`", True), (".\n\n- first", False), ("\n- second item\n\n", True),
    ("| a | b |\n|---|--:|\n| x |", False), (" 12 |\n", True), ("\n```py\nreturn", False), (" x + 1\n```\n", True),
    ("\nWhere $x^2$ is", False), (" $y^2$ twice", True), ("!", False),
)  # fmt: skip


def test_what_was_guessed_is_marked_in_prose_lists_tables_code_and_formulas() -> None:
    prose = grown(*MARKED)
    found = ["ding", "one thing", "de", "second item", "12", "x + 1", "y² twice"]
    assert tinted(prose) == found
    prose.finish("".join(text for text, _ in MARKED))
    assert tinted(prose) == found
    prose.finish("another text, one thing")  # nobody knows what was guessed of it
    assert tinted(prose) == []


@given(PARTS, st.integers(10, 60))
def test_marks_change_no_character_and_without_them_nothing(parts: list[tuple[str, bool]], width: int) -> None:
    plainly, marked, unused = Prose(), Prose(tinted=True), Prose()
    for text, guessed in parts:
        for prose, is_guess in ((plainly, False), (marked, guessed), (unused, guessed)):
            prose.add(text, guessed=is_guess)
            prose.look()
        rows = [prose.rows(width) for prose in (plainly, marked, unused)]
        assert [row.row.content.plain for row in rows[0]] == [row.row.content.plain for row in rows[1]]
        assert [row.row.joint for row in rows[0]] == [row.row.joint for row in rows[1]]
        assert [row.row for row in rows[0]] == [row.row for row in rows[2]]
    if not any(guessed for _, guessed in parts):
        assert tinted(marked, width) == []
    elif all(guessed for text, guessed in parts if text.strip()):
        words = [part for part in tinted(marked, width) if "word" in part]
        assert sum(part.count("word") for part in words) == sum(
            row.row.content.plain.count("word") for row in marked.rows(width)
        )


@given(st.lists(st.tuples(st.sampled_from(["one ", "two, ", "(three) ", "4 ", "the ", "the end. "]), st.booleans())))
def test_in_plain_text_exactly_what_was_guessed_is_marked(parts: list[tuple[str, bool]]) -> None:
    prose = grown(*parts)
    prose.finish("".join(text for text, _ in parts))
    marked = "".join(tinted(prose, 10_000))
    assert marked.replace(" ", "") == "".join(text for text, guessed in parts if guessed).replace(" ", "")


def test_a_reply_takes_what_was_guessed_by_characters_of_each_piece_of_text() -> None:
    message = ReplyMessage("model", tinted=True)
    message.add("one two thr", "answer", ((0, 3), (8, 11)))
    message.add("ee\x1b[31m four", "answer", ((0, 2),))
    message.add("thought", "thinking", ((0, 7),))
    assert tinted(message) == ["one", "three"]
    message.end(Reply("one two three four"))


def test_what_the_user_wrote_is_verbatim_and_safe() -> None:
    rows = UserMessage("a **b**\n\n[red]c[/red]\x1b[2J").rows(60)
    assert [row.row.content.plain for row in rows][:2] == ["a **b**", ""]
    assert rows[2].row.content.plain.startswith("[red]c[/red]")
    assert "\x1b" not in rows[2].row.content.plain


def test_thinking_folds_when_the_answer_begins_and_unfolds_again() -> None:
    now = 0.0
    reply = ReplyMessage("model", clock=lambda: now)
    reply.add("let me see", "thinking")
    assert [row.row.content.plain for row in reply.rows(40)] == ["model", "thinking …", "let me see", ""]
    now = 2.0
    reply.add("so", "answer")
    assert [row.row.content.plain for row in reply.rows(40)] == ["model", "▸ thought for 2.0 s", "", "so", ""]
    assert [reply.is_thinking(row) for row in range(4)] == [False, True, False, False]
    reply.thinking.toggle()
    assert [row.row.content.plain for row in reply.rows(40)][1:3] == ["▾ thought for 2.0 s", "let me see"]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.text(st.sampled_from("ab \n"), min_size=1, max_size=12), min_size=1, max_size=12), st.integers(12, 30)
)
def test_thinking_that_grew_looks_like_thinking_that_came_at_once(pieces: list[str], width: int) -> None:
    grown, whole = Thinking(), Thinking()
    for piece in pieces:
        grown.add(piece)
        grown.rows(width)
    whole.add("".join(pieces))
    assert [row.row.content.plain for row in grown.rows(width)] == [row.row.content.plain for row in whole.rows(width)]


def test_a_reply_ends_with_why_it_did() -> None:
    reply = ReplyMessage("model")
    reply.add("half", "answer")
    reply.end(Reply("half", ending="cancelled"))
    assert [row.row.content.plain for row in reply.rows(40)] == ["model", "half", "", "stopped"]
    assert reply.rows(40)[2] is BLANK


def test_a_link_defined_after_its_use_is_right_in_the_end() -> None:
    reply = ReplyMessage("model")
    text = "see [it][a]\n\nmore\n\n[a]: http://e.x\n"
    reply.add(text, "answer")
    reply.rows(60)
    reply.end(Reply(text))
    (row,) = (row for row in reply.rows(60) if row.row.content.plain == "see it")
    assert [span.style.link for span in row.row.content.spans if isinstance(span.style, Style)] == ["http://e.x"]


class Counting(Lines):
    """Lines that know how often they were laid out."""

    laid = 0

    def rows(self, width: int) -> list[PageRow]:
        self.laid += 1
        return self.all


def long_page(heights: list[int], guesses: list[int]) -> tuple[Page, list[Counting]]:
    messages = [Counting(*(f"{number}.{line}" for line in range(height))) for number, height in enumerate(heights)]
    page = Page(40)
    for message, rows in zip(messages, guesses, strict=True):
        page.append_later(message, rows)
    return page, messages


def view(page: Page, top: int, height: int) -> list[str | None]:
    return [None if (row := page.row(y)) is None else row.row.content.plain for y in range(top, top + height)]


def test_only_what_is_in_view_is_laid_out() -> None:
    page, messages = long_page([2] * 100, [5] * 100)
    page.settle_end(9)
    assert [message.laid for message in messages] == [0] * 97 + [1] * 3
    assert view(page, page.height - 9, 9) == ["97.0", "97.1", "", "98.0", "98.1", "", "99.0", "99.1", ""]
    assert page.height == 97 * 6 + 3 * 3


def test_what_is_in_view_stays_there_when_what_is_above_it_proves_higher_or_lower() -> None:
    for real in (1, 4, 9):
        page, _ = long_page([real] * 9, [4] * 9)
        page.settle_end(6)
        top = page.height - 6
        below = view(page, top, 6)
        settled = page.settle(top - 3, 6)
        assert view(page, settled + 3, 3) == below[:3]
        assert None not in view(page, settled, 6)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=20),
    st.lists(st.integers(0, 400), max_size=8),
    st.integers(1, 25),
)
def test_nothing_in_view_is_guessed_anywhere(sizes: list[tuple[int, int]], places: list[int], height: int) -> None:
    page, _ = long_page([real for real, _ in sizes], [guessed for _, guessed in sizes])
    page.settle_end(height)
    for place in places:
        page.settle(top := page.settle(min(place, max(0, page.height - height)), height), height)
        shown = [row for row in view(page, top, height) if row is not None]
        whole, _ = long_page([real for real, _ in sizes], [real for real, _ in sizes])
        whole.settle(0, whole.height)
        every = view(whole, 0, whole.height)
        assert any(every[at : at + len(shown)] == shown for at in range(len(every)))
    assert page.copy(everything) == whole_text(sizes)


def whole_text(sizes: list[tuple[int, int]]) -> str:
    page = Page(40)
    for number, (real, _) in enumerate(sizes):
        page.append(Lines(*(f"{number}.{line}" for line in range(real))))
    return page.copy(everything)


def test_another_width_lays_out_what_is_in_view_alone() -> None:
    page, messages = long_page([6] * 50, [6] * 50)
    page.settle_end(20)
    page.fit(20)
    assert page.row(page.height - 2) is BLANK
    page.settle_end(20)
    assert sum(message.laid for message in messages) == 6
    assert view(page, page.height - 2, 2) == ["49.5", ""]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(st.sampled_from("ab \n🦊\t"), min_size=1, max_size=12), max_size=12), st.integers(4, 20))
def test_code_that_grew_looks_like_code_that_came_at_once(pieces: list[str], width: int) -> None:
    grown, source = Prose(), "```python\n"
    grown.add(source)
    for piece in pieces:
        grown.add(piece)
        source += piece
        grown.look()
        at_once = Prose()
        at_once.add(source)
        at_once.look()
        assert all(a.is_same(b) for a, b in zip(grown.rows(width), at_once.rows(width), strict=True))


# Tables and long lists that grow: a frame's work does not depend on how much there is already, and the end looks
# the same.

HEAD = "| # | what it does |\n| --: | --- |\n"
GROWING_PIECES = st.sampled_from(
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
TABLES = st.lists(GROWING_PIECES, max_size=40).map(lambda pieces: HEAD + "| " + "".join(pieces))


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
    grid, laid, work = Grid(source.align, 60), list[Row](), list[int]()
    for count in range(1, 302):
        growth = grid.grow(Table(source.rows[:count], source.align), final=False)
        laid = [*laid[: growth.kept], *growth.rows]
        work.append(len(growth.rows))
    assert max(work[SHORT:]) <= 5  # the wide one, wrapped
    assert sum(work) < 2 * 301
    assert text(laid)[:5] == text(markdown_rows(Table(source.rows[:200], source.align), 60))[:5]
    growth = grid.grow(source, final=True)
    assert text([*laid[: growth.kept], *growth.rows]) == text(markdown_rows(source, 60)) != text(laid)
    assert grid.grow(source, final=True).rows == []


def test_a_wider_cell_moves_the_columns_of_a_long_table_at_most_when_it_has_doubled() -> None:
    rows_of = table(
        HEAD + "".join(f"| {'9' * (4 + number)} | a |\n" for number in range(40)) + "| 1 | b |\n" * 200
    ).rows
    grid, moved = Grid((True, False), 90), list[int]()
    for count in range(1, len(rows_of) + 1):
        growth = grid.grow(Table(rows_of[:count], ("right", "left")), final=False)
        if len(growth.rows) > 2 and count > SHORT:
            moved.append(count)
    assert moved == [2 * SHORT]


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
    ended, followed, whole = Prose(), Prose(), [*text(markdown_rows(table(source), 60)), ""]
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
