"""The transcript as a reader uses it: scrolling, resizing, selecting, folding; and what a growing reply may cost."""

from collections.abc import Callable
from typing import Any

from textual.geometry import Offset
from textual.strip import Strip

from tests.app.conftest import Chat
from tokamac.app.chat.conversation import Reply, Turn
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.tui.markdown.page import PageRow
from tokamac.app.tui.widgets.page_view import Painter

Start = Callable[..., Any]
WORDS = "These are the words of a paragraph that is long enough to be wrapped into several rows of the screen. " * 2


async def write(c: Chat, text: str, kind: Any = "answer") -> None:
    """Have the running reply grow, drawn at once."""
    c.transcript.add(text, kind)
    c.transcript.look(now=True)
    await c.pilot.pause()


async def begin(c: Chat, paragraphs: int = 0) -> None:
    """Begin a turn that the engine knows nothing of."""
    await c.phase(EnginePhase.IDLE)
    await c.pilot.pause()
    c.transcript.begin(Turn("hi", key=1, reply_key=2), "model", share=1.0, again=False)
    for number in range(paragraphs):
        c.transcript.add(f"Paragraph {number}. {WORDS}\n\n", "answer")
    await write(c, "The end. ")


def place_of(c: Chat, text: str) -> Offset:
    """Return where on the screen ``text`` begins."""
    y, line = next((y, line) for y, line in enumerate(c.screen_text().splitlines()) if text in line)
    return Offset(line.index(text), y)


async def drag(c: Chat, start: Offset, end: Offset) -> None:
    """Select from the character at ``start`` to the one at ``end``, that one included."""
    await c.pilot.mouse_down(offset=start)
    await c.pilot.hover(offset=end)
    await c.pilot.mouse_up(offset=end)
    await c.pilot.pause()


async def test_a_new_row_lays_no_screen_out(chat: Start) -> None:
    async with chat("fast", size=(100, 24)) as c:
        await begin(c, paragraphs=8)
        await c.until(
            lambda: c.transcript.show_vertical_scrollbar and not c.app.chat._layout_required, "the scroll bar"
        )
        layouts, height = [], c.transcript.virtual_size.height
        c.app.chat.screen_layout_refresh_signal.subscribe(c.app.chat, layouts.append)
        for _ in range(4):
            await write(c, WORDS)
        assert c.transcript.virtual_size.height > height + 4
        assert "the screen." in c.screen_text()
        assert layouts == []


async def test_only_rows_that_changed_are_painted(chat: Start, monkeypatch: Any) -> None:
    painted: list[str] = []
    paint = Painter.strip

    def noting(self: Painter, row: PageRow, selected: Any = None) -> Strip:
        painted.append(row.row.content.plain)
        return paint(self, row, selected)

    async with chat("fast", size=(100, 40)) as c:
        await begin(c, paragraphs=3)
        monkeypatch.setattr(Painter, "strip", noting)
        await write(c, "More.")
        assert painted == ["The end. More."]


async def test_the_end_stays_in_view_and_the_bar_says_so(chat: Start) -> None:
    async with chat("fast", size=(100, 24)) as c:
        await begin(c)
        for number in range(30):
            await write(c, f"Paragraph {number}. {WORDS}\n\n")
            assert c.transcript.scroll_y == c.transcript.max_scroll_y
        text = "".join(f"Paragraph {number}. {WORDS}\n\n" for number in range(30))
        c.transcript.end(Reply(text))
        await c.pilot.pause()
        bar = c.transcript.vertical_scrollbar
        assert bar.window_virtual_size == c.transcript.virtual_size.height
        assert bar.position == c.transcript.max_scroll_y == c.transcript.scroll_y
        assert "Paragraph 29" in c.screen_text()


async def test_resizing_keeps_the_end_in_view_or_the_readers_place(chat: Start) -> None:
    async with chat("fast", size=(120, 24)) as c:
        await begin(c, paragraphs=40)
        for size in ((60, 14), (100, 30), (80, 20)):
            await c.pilot.resize_terminal(*size)
            await c.pilot.pause()
            assert "The end." in c.screen_text()
        top = next(y for y in range(500) if c.transcript._page.row(y).row.content.plain.startswith("Paragraph 20."))
        c.transcript.scroll_to(y=top, animate=False)
        assert not c.transcript.following
        await c.pilot.resize_terminal(50, 20)
        await c.pilot.pause()
        assert any(f"Paragraph {number}." in c.screen_text() for number in (19, 20, 21))
        await write(c, WORDS * 4)
        assert any(f"Paragraph {number}." in c.screen_text() for number in (19, 20, 21))


async def test_dragging_selects_what_copying_takes(chat: Start) -> None:
    async with chat("fast", size=(60, 30)) as c:
        await begin(c)
        await write(c, f"\n\n{WORDS}\n\n- an item")
        await drag(c, place_of(c, "words of a"), place_of(c, "an item") + Offset(7, 0))
        assert c.app.chat.get_selected_text() == f"{WORDS[WORDS.index('words') :].rstrip()}\n\n• an item"
        await c.pilot.click(offset=place_of(c, "The end"))
        assert not c.app.chat.get_selected_text()


async def test_a_selection_from_the_margin_begins_with_the_row(chat: Start) -> None:
    async with chat("fast", size=(100, 30)) as c:
        await begin(c)
        start = place_of(c, "The end")
        await drag(c, Offset(0, start.y), start + Offset(2, 0))
        assert c.app.chat.get_selected_text() == "The"


async def test_a_click_unfolds_thinking_where_it_is(chat: Start) -> None:
    async with chat("fast", size=(80, 24)) as c:
        await begin(c, paragraphs=6)
        c.transcript.end(Reply("first"))
        c.transcript.begin(Turn("again", key=3, reply_key=4), "model", share=1.0, again=False)
        await write(c, WORDS * 8, "thinking")
        await write(c, "So.")
        assert "▸ thought" in c.screen_text()
        before = place_of(c, "▸ thought")
        await c.pilot.click(offset=before)
        await c.pilot.pause()
        assert place_of(c, "▾ thought").y == before.y
        await c.pilot.click(offset=before)
        await c.pilot.pause()
        assert place_of(c, "▸ thought") == before


async def test_thinking_that_nobody_timed_unfolds_too(chat: Start) -> None:
    async with chat("fast", size=(80, 24)) as c:
        c.transcript.begin(Turn("hi", key=1, reply_key=2), "model", share=1.0, again=False)
        c.transcript.end(Reply("answer", "recovered thought", None))
        await c.pilot.pause()
        assert "recovered thought" not in c.screen_text()
        await c.pilot.press("tab", "enter")
        await c.until(lambda: "recovered thought" in c.screen_text(), "the thought")
        assert "▾ thought" in c.screen_text()


async def test_the_keyboard_chooses_among_thoughts(chat: Start) -> None:
    async with chat("fast", size=(80, 30)) as c:
        await c.pilot.pause()
        for number in range(3):
            c.transcript.begin(Turn("hi", key=1, reply_key=2), "model", share=1.0, again=False)
            await write(c, f"thought number {number}", "thinking")
            c.transcript.end(Reply(f"answer {number}", f"thought number {number}", 1.0))
        await c.pilot.press("tab", "up", "up", "enter")
        await c.pilot.pause()
        assert [f"thought number {number}" in c.screen_text() for number in range(3)] == [False, True, False]
        await c.pilot.press("tab")
        assert c.app.focused is c.prompt
        await c.pilot.press("x")
        assert c.prompt.text == "x"


async def test_gauges_that_change_are_the_rows_that_are_drawn(chat: Start) -> None:
    async with chat("guide", size=(120, 36)) as c:
        await c.ask("hi")
        text = c.screen_text()
        assert all(title in text for title in ("FIRST TOKEN", "DECODE", "CEILING", "MEMORY"))
        await drag(c, place_of(c, "FIRST TOKEN"), place_of(c, "FIRST TOKEN") + Offset(4, 0))
        assert c.app.chat.get_selected_text() == "FIRST"
