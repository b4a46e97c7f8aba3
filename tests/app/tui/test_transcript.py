"""The transcript as a reader uses it: scrolling, folding, messages pointed at, and what drawing may cost."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual.events import Key
from textual.geometry import Offset
from textual.strip import Strip
from textual.widgets import OptionList

from tests.app.conftest import Chat, Start
from tokamac.app.chat.conversation import Reply, Turn
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.settings import Settings, dumps
from tokamac.app.store.values import Attachment
from tokamac.app.tui.markdown.page import PageRow, Painter
from tokamac.app.tui.markdown.turns import LEFT_OUT, ReplyMessage, UserMessage
from tokamac.app.tui.screens.chat import ChatScreen
from tokamac.app.tui.screens.dialog import ContextScreen, LinksScreen
from tokamac.app.tui.screens.help import LeaderScreen
from tokamac.app.tui.widgets.transcript import SHARE_BESIDE_GPU, SLOWEST_S, FramePacer, share_on

WORDS = "These are the words of a paragraph that is long enough to be wrapped into several rows of the screen. " * 2


def shown_by(box: Any) -> Any:
    """Return the rows that a transcript shows."""
    return box._shown


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
    async with chat("fast", size=(100, 24), ready=False) as c:
        await begin(c, paragraphs=8)
        await c.until(
            lambda: c.transcript.show_vertical_scrollbar and not c.app.view._layout_required, "the scroll bar"
        )
        layouts, height = [], c.transcript.virtual_size.height
        c.app.view.screen_layout_refresh_signal.subscribe(c.app.view, layouts.append)
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

    async with chat("fast", size=(100, 40), ready=False) as c:
        await begin(c, paragraphs=3)
        monkeypatch.setattr(Painter, "strip", noting)
        await write(c, "More.")
        assert painted == ["The end. More."]


async def test_the_end_stays_in_view_and_the_bar_says_so(chat: Start) -> None:
    async with chat("fast", size=(100, 24), ready=False) as c:
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
    async with chat("fast", size=(120, 24), ready=False) as c:
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
    async with chat("fast", size=(60, 30), ready=False) as c:
        await begin(c)
        await write(c, f"\n\n{WORDS}\n\n- an item")
        await drag(c, place_of(c, "words of a"), place_of(c, "an item") + Offset(7, 0))
        assert c.app.view.get_selected_text() == f"{WORDS[WORDS.index('words') :].rstrip()}\n\n• an item"
        await c.pilot.click(offset=place_of(c, "The end"))
        assert not c.app.view.get_selected_text()


async def test_a_selection_from_the_margin_begins_with_the_row(chat: Start) -> None:
    async with chat("fast", size=(100, 30), ready=False) as c:
        await begin(c)
        start = place_of(c, "The end")
        await drag(c, Offset(0, start.y), start + Offset(2, 0))
        assert c.app.view.get_selected_text() == "The"


async def test_a_click_unfolds_thinking_where_it_is(chat: Start) -> None:
    async with chat("fast", size=(80, 24), ready=False) as c:
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


async def test_the_keyboard_chooses_among_thoughts(chat: Start) -> None:
    async with chat("fast", size=(80, 30), ready=False) as c:
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
    async with chat("guide", size=(120, 36), ready=False) as c:
        await c.ask("hi")
        await c.pilot.press("f5")
        await c.until(
            lambda: all(title in c.screen_text() for title in ("FIRST TOKEN", "DECODE", "CEILING", "CONTEXT"))
        )
        await drag(c, place_of(c, "FIRST TOKEN"), place_of(c, "FIRST TOKEN") + Offset(4, 0))
        assert c.app.view.get_selected_text() == "FIRST"


# Messages pointed at: their keys are shown, and go to the box again with what begins a reply or another chat.


async def pointing(c: Chat) -> None:
    """Ask something, and point at the reply."""
    await c.ready()
    await c.ask("hello")
    await c.phase(EnginePhase.IDLE)
    await c.pilot.press("tab")
    await c.until(lambda: c.transcript.selected == c.session.turns[-1].reply_key, "the pointer")
    await c.until(lambda: c.session.prices.known and not c.session.prices.waiting, "the prices")
    await c.pilot.pause()


def last_row(c: Chat) -> str:
    return c.screen_text().splitlines()[-1].strip()


def above_the_box(c: Chat) -> str:
    return c.screen_text().splitlines()[c.prompt.region.y - 1].strip()


async def is_written(c: Chat) -> None:
    """What is typed now stands in the box, and no message is pointed at."""
    await c.until(lambda: c.app.focused is c.prompt, "the box")
    await c.until(lambda: "▸" not in "".join(line[:4] for line in c.screen_text().splitlines()), "no pointer")
    await c.pilot.press(*"yes")
    assert c.prompt.text == "yes"
    assert c.transcript.selected is None


async def test_one_letter_only_chooses_and_two_are_a_text(chat: Start) -> None:
    async with chat("fast", ready=False) as c:
        await pointing(c)
        await c.pilot.press("r")
        await c.until(lambda: "Enter: regenerate this" in c.screen_text())
        await c.pilot.press(*"egards")
        assert c.prompt.text == "regards"
        assert c.prompt.has_focus
        await c.pilot.press("tab", "right", "left", "backspace", "Q", "[")
        assert c.prompt.text == "regardsQ["
        assert [turn.reply_place for turn in c.session.turns] == [(1, 1)]


async def test_what_is_chosen_with_the_arrows_is_done_with_enter(chat: Start) -> None:
    async with chat("fast", ready=False) as c:
        await pointing(c)
        while c.transcript.chosen is None or c.transcript.chosen.id != "copy_message":
            await c.pilot.press("right")
        await c.pilot.press("enter")
        await c.until(lambda: "Copied" in c.notices)
        assert c.transcript.chosen is None


async def test_selecting_in_a_long_reply_leaves_the_place(chat: Start) -> None:
    async with chat("list", size=(80, 20)) as c:
        await c.ask("list")
        await c.pilot.press("pageup")
        place = c.transcript.scroll_y
        await c.pilot.press("tab")
        assert (c.transcript.scroll_y, c.transcript.selected) == (place, c.session.turns[-1].reply_key)
        assert all(line.startswith("  ▎") for line in c.screen_text().splitlines()[2:10])
        await c.pilot.press("ctrl+home")
        await c.until(lambda: c.transcript.scroll_y == 0)
        await c.pilot.press("ctrl+end")
        await c.until(lambda: c.transcript.scroll_y == c.transcript.max_scroll_y)


# The keys go back to the box ----------------------------------------------------------------------------------------------


async def test_after_a_reply_is_made_again_one_writes_on(chat: Start) -> None:
    async with chat("fast", ready=False) as c:
        await pointing(c)
        first = c.session.turns[-1].reply_key
        await c.pilot.press("r", "enter")
        await c.until(lambda: c.session.turns[-1].reply_key != first and c.session.turns[-1].reply, "another reply")
        assert [type(message) for message in c.transcript.messages] == [UserMessage, ReplyMessage]
        await is_written(c)


async def test_after_another_chat_is_opened_from_the_list_one_writes_on(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ask("one")
        c.app.view.do("new_chat")
        await pointing(c)
        await c.pilot.press("ctrl+l")
        await c.until(lambda: c.app.screen is not c.app.view and "one" in c.screen_text(), "the list")
        await c.pilot.press("down", "down", "enter")
        await c.until(lambda: c.prompts == ["one"], "the other chat")
        await is_written(c)


async def test_what_is_refused_leaves_the_pointer_where_it_is(chat: Start) -> None:
    async with chat("fast", ready=False) as c:
        await pointing(c)
        await c.pilot.press("g", "enter")  # the reply is whole: there is no going on with it
        await c.until(lambda: c.notices, "why")
        assert c.transcript.has_focus
        assert c.transcript.selected == c.session.turns[-1].reply_key


async def test_a_prompt_that_waited_begins_and_what_is_pointed_at_stays(chat: Start) -> None:
    async with chat("slow") as c:
        await c.send("one")
        await c.send("two")
        await c.until(lambda: c.session.queued, "a prompt that waits")
        await c.pilot.press("tab", "up")
        chosen = c.session.turns[0].key
        await c.until(lambda: c.transcript.selected == chosen, "the pointer at the prompt")
        await c.until(lambda: len(c.session.turns) == 2, "the second prompt")
        assert c.transcript.has_focus
        assert c.transcript.selected == chosen
        c.app.view.do("stop")
        await c.phase(EnginePhase.IDLE)


# What can be done is shown ------------------------------------------------------------------------------------------------


async def test_the_last_line_has_the_keys_of_a_message_while_one_is_pointed_at(chat: Start) -> None:
    async with chat("fast", size=(80, 24), ready=False) as c:
        await pointing(c)
        assert last_row(c).endswith("r again  e edit  f fork  y copy  Esc back  [ older  ] newer")
        await c.pilot.press("escape")
        await c.until(lambda: "F1 help" in last_row(c), "the usual keys")
        assert "r again" not in last_row(c)


async def test_in_the_smallest_window_the_first_keys_and_all_prices_are_seen(chat: Start) -> None:
    async with chat("fast", size=(40, 12), ready=False) as c:
        await pointing(c)
        assert last_row(c).endswith("r again  e edit  f fork")
        assert above_the_box(c) == "nothing to re-read: starts at once"


async def test_the_keys_are_those_that_the_user_has_chosen(chat: Start, tmp_path: Path) -> None:
    kept = replace(Settings(), keys={"again": ("x",), "fork": ("ctrl+y",)})
    (tmp_path / "settings.toml").write_text(dumps(kept), encoding="utf-8")
    async with chat("fast", size=(80, 24), ready=False) as c:
        await pointing(c)
        assert "x again  e edit  Ctrl+Y fork" in last_row(c)


async def test_while_a_reply_runs_the_first_key_stops_it(chat: Start) -> None:
    async with chat("slow", size=(80, 24)) as c:
        await c.send("hello")
        await c.phase(EnginePhase.DECODING)
        await c.pilot.press("tab")
        await c.until(lambda: "r again" in last_row(c), "the keys of a message")
        assert "Esc stop  r again" in last_row(c)
        assert "back" not in last_row(c)
        c.app.view.do("stop")
        await c.phase(EnginePhase.IDLE)


async def test_prices_come_when_the_reply_that_is_pointed_at_has_ended(chat: Start) -> None:
    async with chat("prefill") as c:
        await c.send("hello")
        await c.until(lambda: c.session.turns, "the turn")
        await c.pilot.press("tab")
        await c.until(lambda: c.transcript.selected is not None, "the pointer")
        await c.phase(EnginePhase.IDLE)
        await c.until(lambda: "nothing to re-read: starts at once" in c.screen_text(), "the prices")


@pytest.mark.parametrize("size", [(40, 12), (80, 24)])
async def test_the_welcome_names_the_key_that_points_at_messages(chat: Start, tmp_path: Path, size: Any) -> None:
    (tmp_path / "settings.toml").write_text(dumps(replace(Settings(), toured=True)), encoding="utf-8")
    async with chat("fast", size=size) as c:
        await c.pilot.pause()
        lines = [line.strip() for line in c.screen_text().splitlines()]
        assert "Tab  selects a message" in lines


# Drawing takes its share of a core, and no more.


def drawn(cost_s: float, share: float, ticks: int = 1500) -> tuple[int, float]:
    """Run a pace at 15 ticks a second over drawings that cost so much; return their number, and the CPU seconds spent."""
    now = spent = 0.0
    pace, count = FramePacer(share, clock=lambda: now, cpu=lambda: spent), 0
    for tick in range(ticks):
        now = tick / 15
        if pace.is_due():
            count += 1
            spent += cost_s
    return count, spent


@pytest.mark.parametrize(("cost_ms", "share"), [(1, 0.03), (5, 0.03), (10, 0.03), (50, 0.3)])
def test_drawing_stays_within_its_share(cost_ms: float, share: float) -> None:
    count, spent = drawn(cost_ms / 1000, share)
    assert spent <= share * 100 + 2 * cost_ms / 1000
    assert count > 0.6 * min(1500, share * 100 / (cost_ms / 1000))


def test_what_costs_little_is_drawn_at_every_tick() -> None:
    assert drawn(0.0001, 0.03)[0] == 1500


def test_what_costs_too_much_is_drawn_all_the_same() -> None:
    assert drawn(1.0, 0.03)[0] == pytest.approx(100 / SLOWEST_S, rel=0.15)  # by whole ticks


def test_beside_a_gpu_there_is_more_to_spare() -> None:
    assert share_on("metal") == share_on("cuda") == SHARE_BESIDE_GPU > share_on("cpu")


def test_what_is_drawn_with_something_else_counts_as_drawn() -> None:
    now = spent = 0.0
    pace = FramePacer(0.03, clock=lambda: now, cpu=lambda: spent)
    assert pace.is_due()
    now, spent = 0.01, 0.02
    assert not pace.is_due()
    assert pace.is_due(now=True)
    now, spent = 0.02, 0.03
    assert not pace.is_due()


# Links, and code to copy --------------------------------------------------------------------------------------------------


async def test_a_link_says_where_it_leads_and_a_click_copies(chat: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "here and there")  # where a browser would open on the other machine
    async with chat("fast", size=(100, 30), ready=False) as c:
        await begin(c)
        await write(c, "see [this place](https://a.b/c?d=e).\n\n```py\nx = 1\n```\n")
        place = place_of(c, "this place")
        style = c.app.screen.get_style_at(place.x + 1, place.y)
        assert style.link == "https://a.b/c?d=e"
        await c.pilot.click(offset=place + Offset(1, 0))
        await c.until(lambda: "https://a.b/c?d=e\nCtrl+click" in c.notices, "where it leads")
        await c.pilot.click(offset=place + Offset(1, 0), control=True)
        await c.until(lambda: "https://a.b/c?d=e\nCopied" in c.notices, "its copy")
        await c.pilot.click(offset=place_of(c, "copy: /code"))
        await c.until(lambda: "Copied 5 characters" in c.notices, "the code's copy")


async def test_links_of_a_message_are_listed_and_copied(chat: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "here and there")
    async with chat("fast", size=(100, 30)) as c:
        c.app.view.do("links")
        await c.until(lambda: "There is no link here." in c.notices, "none")
        await c.ask("read [one](https://one.example/a) and https://two.example")
        await c.pilot.press("tab", "up", "l", "enter")
        await c.until(lambda: isinstance(c.app.screen, LinksScreen), "the links")
        await c.pilot.pause()
        assert "https://one.example/a" in c.screen_text()
        await c.pilot.press("down", "c")
        await c.until(lambda: "https://two.example\nCopied" in c.notices, "the copy")


async def test_what_is_left_out_of_the_context_says_so_until_it_is_sent_again(chat: Callable[..., Any]) -> None:
    async with chat("fast", size=(100, 40)) as c:
        c.prompt.attach(Attachment("notes.md", "milk", "markdown"))
        await c.ask("first")
        await c.ask("second")
        first, second = (turn.key for turn in c.session.turns)
        chip = f"+ notes.md  {LEFT_OUT}"

        def marked() -> list[bool]:
            return [
                message.left_out for message in c.transcript.messages if isinstance(message, UserMessage | ReplyMessage)
            ]

        c.app.chat.perform(c.session.prune(first, "notes.md"))
        await c.until(lambda: chip in copied(c), "the mark of the file")
        assert marked() == [False] * 4
        c.transcript.focus()
        c.transcript.select_message(first)
        await c.opened("ctrl+x", LeaderScreen)
        await c.pilot.press("i")
        shown = await c.on(ContextScreen)
        await c.until(lambda: shown_by(shown) is not None)
        pointed = shown.query_one(OptionList).highlighted
        assert shown_by(shown) is not None
        assert pointed is not None
        assert shown_by(shown).rows[pointed].key == first
        await c.pilot.press("enter", "escape")
        assert marked() == [True, True, False, False]
        assert copied(c).count(LEFT_OUT) == 2
        held = c.held
        c.app.view.do("new_chat")
        c.app.chat.open_chat(held)
        assert marked() == [True, True, False, False]
        c.app.chat.perform([*c.session.prune(first), *c.session.prune(first, "notes.md"), *c.session.prune(second)])
        assert marked() == [False, False, True, True]
        assert copied(c).count(LEFT_OUT) == 2


def copied(c: Chat) -> str:
    """All rows of the conversation, in view or not."""
    rows = [row for message in c.transcript.messages for row in message.rows(80)]
    return "\n".join(row.row.content.plain for row in rows)


async def test_keys_that_come_at_once_close_a_dialog_once(chat: Start) -> None:
    async with chat("fast", ready=False) as c:
        screen = await c.opened("ctrl+x", LeaderScreen)
        for key in "zlh":
            screen.post_message(Key(key, key))
        await c.until(lambda: isinstance(c.app.screen, ChatScreen), "the chat")
        await c.pilot.press("!")
        await c.until(lambda: c.prompt.text == "!", "the prompt")
