"""The conversation as rows: what stands where, what is copied, and that nothing that stays the same is made anew."""

from hypothesis import given, settings
from hypothesis import strategies as st
from textual.content import Content

from tests.app.test_prose import MARKDOWN
from tokamac.app.tui.conversation import Reply
from tokamac.app.tui.prose.messages import ReplyMessage, Thinking, UserMessage
from tokamac.app.tui.prose.page import BLANK, Page, PageRow
from tokamac.app.tui.prose.prose import Prose
from tokamac.app.tui.prose.rows import Row, wrapped


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
