"""F2: a reply's diagnosis on the screen, in windows of every size, with a real child process and a scripted engine behind it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.widgets import Static

from tokamac.app.chat.conversation import Reply
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.tui.screens.figure import ExplainScreen, explanation, shares
from tokamac.app.tui.screens.whatif import WhatIfScreen
from tokamac.engine.metrics import Outlier

Start = Callable[..., Any]


def text_of(chat: Any) -> str:
    """All of the explanation, in view or not."""
    return str(chat.app.screen.query_one("#explanation", Static).render())


async def explain(chat: Any) -> None:
    await chat.pilot.press("f2")
    await chat.until(lambda: isinstance(chat.app.screen, ExplainScreen), "the screen")
    await chat.until(lambda: text_of(chat), "its text")


@pytest.mark.parametrize("size", [(120, 36), (60, 20), (40, 12)])
async def test_it_shows_time_help_phases_and_numbers_at_every_size(chat: Start, size: tuple[int, int]) -> None:
    async with chat("steady", size=size) as c:
        await c.phase(EnginePhase.IDLE)
        await c.ask("Why?")
        await explain(c)
        text = text_of(c)
        for title in ("WHERE THE TIME WENT", "WHAT WOULD HELP", "DECODE", "PREFILL", "THE NUMBERS: DECODE"):
            assert title in text
        assert "800 GB/s ÷" in " ".join(text.split())
        assert "█" in text
        box = c.app.screen.query_one("#explain")
        assert box.max_scroll_y > 0
        assert box.max_scroll_x == 0  # nothing is wider than the window
        await c.pilot.press("pagedown")
        await c.until(lambda: box.scroll_y > 0, "scrolling")
        await c.pilot.press("escape")
        assert not isinstance(c.app.screen, ExplainScreen)


async def test_earlier_replies_are_explained_too(chat: Start) -> None:
    async with chat("fast") as c:
        await c.phase(EnginePhase.IDLE)
        await c.ask("one")
        await c.ask("two")
        await explain(c)
        title = c.app.screen.query_one("#explain")
        assert title.border_title == "Explain · reply 2 of 2"
        await c.pilot.press("left")
        assert title.border_title == "Explain · reply 1 of 2"
        await c.pilot.press("left", "right", "right")
        assert title.border_title == "Explain · reply 2 of 2"


async def test_without_a_reply_it_says_so(chat: Start) -> None:
    async with chat("fast") as c:
        await c.phase(EnginePhase.IDLE)
        await c.pilot.press("f2")
        assert not isinstance(c.app.screen, ExplainScreen)
        assert "no reply to explain" in c.notices


async def test_while_a_reply_runs_the_last_whole_one_is_explained(chat: Start) -> None:
    async with chat("steady") as c:
        await c.phase(EnginePhase.IDLE)
        await c.ask("one")
        await c.send("two")
        await c.until(lambda: c.session.engine.replying, "a second reply")
        await explain(c)
        assert c.app.screen.query_one("#explain").border_title == "Explain · reply 1 of 1"


async def test_f3_leads_on_to_what_if(chat: Start) -> None:
    async with chat("fast") as c:
        await c.phase(EnginePhase.IDLE)
        await c.ask("one")
        await explain(c)
        await c.pilot.press("f3")
        await c.until(lambda: isinstance(c.app.screen, WhatIfScreen), "what if")


async def test_a_chips_name_is_no_markup_and_no_escape_sequence(chat: Start) -> None:
    async with chat("fast") as c:
        await c.phase(EnginePhase.IDLE)
        await c.ask("one")
        reply = c.session.turns[-1].reply
        assert reply is not None
        assert reply.diagnosis is not None
        first, *rest = reply.diagnosis.terms
        hostile = replace(first, formula="[bold]x[/] \x1b[2J {nobody}")
        diagnosis = replace(reply.diagnosis, terms=(hostile, *rest))
        told = explanation(replace(reply, diagnosis=diagnosis, outliers=(Outlier(7, 41.0, ("swap",)),)), 60).plain
        assert "[bold]x[/]" in told
        assert "\x1b" not in told
        assert "41.0 ms at token 7: swap" in told


def test_what_slowed_the_machine_down_is_told_with_what_ends_it() -> None:
    from tests.app.test_verdict import METRICS, SLOWED

    told = explanation(Reply("", metrics=METRICS, diagnosis=SLOWED), 200).plain
    assert (
        "WHAT SLOWED THE MACHINE DOWN\nmacOS slowed the chip down because of its heat.\n  let the machine cool" in told
    )
    assert "Low Power Mode was on, which slows the chip down.\n  System Settings > Battery" in told
    plain = explanation(Reply("", metrics=METRICS, diagnosis=replace(SLOWED, throttles=())), 200).plain
    assert "SLOWED" not in plain


def test_a_reply_without_a_token_is_explained_in_a_sentence() -> None:
    from tests.app.test_verdict import METRICS

    nothing = replace(METRICS, ttft_s=None, total_s=None)
    assert explanation(Reply("", metrics=nothing), 40).plain == "No token was made."


@given(st.lists(st.floats(0, 1e4), min_size=3, max_size=3), st.integers(10, 200))
def test_a_bar_is_as_long_as_there_is_room_and_nothing_that_took_time_is_left_out(
    values: list[float], cells: int
) -> None:
    counts = shares(values, cells)
    assert sum(counts) == (cells if sum(values) > 0 else 0)
    assert all(count >= 1 for count, value in zip(counts, values, strict=True) if value > 0)
