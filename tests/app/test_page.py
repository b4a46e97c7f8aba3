"""The conversation as rows: what stands where, what is copied, and that nothing that stays the same is made anew."""

from hypothesis import given, settings
from hypothesis import strategies as st
from textual.content import Content

from tests.app.test_prose import MARKDOWN
from tokamac.app.chat.conversation import Reply
from tokamac.app.tui.markdown.page import BLANK, Page, PageRow, Prose
from tokamac.app.tui.markdown.rows import Row, wrapped
from tokamac.app.tui.markdown.turns import ReplyMessage, Thinking, UserMessage


class Lines:
    """A message of so many rows, whatever the width."""

    def __init__(self, *texts: str) -> None:
        self.all = [PageRow(Row(Content(text))) for text in texts]

    def rows(self, width: int) -> list[PageRow]:
        return self.all


def plain(page: Page) -> list[str]:
    return [row.row.content.plain for y in range(page.height) if (row := page.row(y)) is not None]


def everything(y: int) -> tuple[int, int]:
    return 0, -1


def test_messages_stand_below_each_other_with_a_blank_row_after_each() -> None:
    page = Page(40)
    page.append(Lines("a", "b"))
    page.append(Lines("c"))
    assert plain(page) == ["a", "b", "", "c", ""]
    assert [page.at(y) for y in range(5)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert page.row(-1) is page.row(5) is None


def test_a_message_that_grows_moves_what_is_below_it() -> None:
    page, first = Page(40), Lines("a")
    page.append(first)
    page.append(Lines("z"))
    first.all = Lines("a", "b", "c").all
    page.update(first)
    assert plain(page) == ["a", "b", "c", "", "z", ""]
    assert page.start(1) == 4


def test_taking_the_last_message_away_and_all() -> None:
    page = Page(40)
    page.append(Lines("a"))
    page.append(Lines("b"))
    page.pop()
    assert plain(page) == ["a", ""]
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
    assert reply.rows(60)[1].row.content.plain == "see it (http://e.x)"


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
def test_wherever_the_reader_goes_nothing_in_view_is_guessed(
    sizes: list[tuple[int, int]], places: list[int], height: int
) -> None:
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
