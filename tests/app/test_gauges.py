"""The side panel as a user meets it: Tab goes there, Up and Down point at figures, Enter explains one; drawing stays cheap."""

from collections.abc import Callable
from typing import Any

from textual.geometry import Region

from tests.app.conftest import Chat
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.tui.screens.figure import FigureScreen
from tokamac.app.tui.widgets.gauges import POINTER, Gauges
from tokamac.app.tui.widgets.prompt_input import Prompt
from tokamac.app.tui.widgets.transcript import Transcript

Start = Callable[..., Any]
SIZE = (110, 30)


def gauges(c: Chat) -> Gauges:
    return c.app.chat.query_one(Gauges)


async def explained(c: Chat) -> str:
    await c.until(lambda: isinstance(c.app.screen, FigureScreen) and "SOURCE" in c.screen_text(), "an explanation")
    return c.screen_text()


async def test_tab_goes_from_the_prompt_to_the_messages_to_the_gauges_and_back(chat: Start) -> None:
    async with chat("fast", size=SIZE) as c:
        await c.ask("Why?")
        places = []
        for _ in range(4):
            places.append(type(c.app.focused))
            await c.pilot.press("tab")
        assert places == [Prompt, Transcript, Gauges, Prompt]
        await c.pilot.press("tab", "escape")
        assert isinstance(c.app.focused, Prompt)


async def test_enter_explains_the_figure_and_the_arrows_go_to_the_others(chat: Start) -> None:
    async with chat("fast", size=SIZE) as c:
        await c.ask("Why?")
        await c.pilot.press("tab", "tab")
        assert gauges(c).selected == "ttft"
        assert POINTER in c.screen_text()
        await c.pilot.press("down", "enter")
        text = await explained(c)
        assert "prefill rate" in text
        assert "computed tokens ÷ seconds of prefill" in " ".join(text.split())
        await c.pilot.press("down")
        await c.until(lambda: "tokens of the longest prefix" in c.screen_text())
        await c.pilot.press("escape")
        await c.until(lambda: gauges(c).selected == "cached" and gauges(c).has_focus)
        await c.pilot.press("escape")
        assert gauges(c).selected is None
        assert POINTER not in c.screen_text()


async def test_a_figure_below_the_window_is_brought_into_view(chat: Start) -> None:
    async with chat("fast", size=(110, 20)) as c:
        await c.ask("Why?")
        assert "DIAGNOSIS" not in c.screen_text()
        await c.pilot.press("tab", "tab", "end")
        await c.until(lambda: "in all, of which" in c.screen_text().split("DIAGNOSIS")[-1])
        await c.pilot.press("home")
        await c.until(lambda: "4.5 bpw" in c.screen_text())


async def test_a_click_explains(chat: Start) -> None:
    async with chat("fast", size=SIZE) as c:
        await c.ask("Why?")
        await c.pilot.click(Gauges, offset=(3, 3))
        assert "time to first token" in await explained(c)
        assert not gauges(c).has_focus


async def test_the_command_shows_the_panel_and_points_there(chat: Start) -> None:
    async with chat("fast", size=SIZE) as c:
        await c.phase(EnginePhase.IDLE)
        await c.pilot.press("ctrl+b")
        await c.until(lambda: not c.app.chat.query_one("#panel").display)
        await c.send("/gauges")
        await c.until(lambda: gauges(c).has_focus)
        await c.until(lambda: "FIRST TOKEN" in c.screen_text())


async def test_a_window_that_is_too_narrow_says_so(chat: Start) -> None:
    async with chat("fast", size=(80, 24)) as c:
        await c.phase(EnginePhase.IDLE)
        await c.send("/gauges")
        await c.until(lambda: "too narrow for the gauges" in c.notices)


async def test_while_a_reply_streams_only_rows_that_changed_are_drawn_and_nothing_is_laid_out(chat: Start) -> None:
    async with chat("steady", size=SIZE) as c:
        await c.ask("Why?")
        drawn: list[int] = []
        laid_out = 0
        refresh = gauges(c).refresh

        def watched(*regions: Region, layout: bool = False, **more: Any) -> Any:
            nonlocal laid_out
            laid_out += layout
            drawn.extend(region.y for region in regions)
            return refresh(*regions, layout=layout, **more)

        await c.send("And then?")
        await c.until(lambda: c.session.engine.phase is EnginePhase.DECODING and c.session.live is not None)
        gauges(c).refresh = watched  # type: ignore[method-assign]
        await c.until(lambda: c.session.engine.phase is EnginePhase.IDLE)
        assert drawn
        assert not laid_out
        titles = [y for y, row in enumerate(gauges(c)._rows) if row.figure is None]
        assert not set(titles) & set(drawn)
