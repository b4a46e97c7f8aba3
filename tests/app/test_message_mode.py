"""Messages pointed at: their keys are shown, and go to the box again with what begins a reply or another chat."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.app.conftest import Chat
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.settings import Settings, dumps

Start = Callable[..., Any]


async def pointing(c: Chat) -> None:
    """Ask something, and point at the reply."""
    await c.ready()
    await c.ask("hello")
    await c.phase(EnginePhase.IDLE)
    await c.pilot.press("tab")
    await c.until(lambda: c.transcript.selected == c.session.turns[-1].reply_key, "the pointer")
    await c.until(lambda: ": ready" in c.screen_text(), "the prices")


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


# The keys go back to the box ----------------------------------------------------------------------------------------------


async def test_after_a_reply_is_made_again_one_writes_on(chat: Start) -> None:
    async with chat("fast") as c:
        await pointing(c)
        first = c.session.turns[-1].reply_key
        await c.pilot.press("r")
        await c.until(lambda: c.session.turns[-1].reply_key != first and c.session.turns[-1].reply, "another reply")
        await is_written(c)


async def test_after_a_fork_one_writes_on(chat: Start) -> None:
    async with chat("fast") as c:
        await pointing(c)
        before = c.held
        await c.pilot.press("f")
        await c.until(lambda: c.held != before, "the copy")
        await is_written(c)


async def test_after_another_chat_is_opened_from_the_list_one_writes_on(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ready()
        await c.ask("one")
        c.app.chat.do("new_chat")
        await pointing(c)
        await c.pilot.press("ctrl+l")
        await c.until(lambda: c.app.screen is not c.app.chat and "one" in c.screen_text(), "the list")
        await c.pilot.press("down", "down", "enter")
        await c.until(lambda: c.prompts == ["one"], "the other chat")
        await is_written(c)


async def test_what_is_refused_leaves_the_pointer_where_it_is(chat: Start) -> None:
    async with chat("fast") as c:
        await pointing(c)
        await c.pilot.press("g")  # the reply is whole: there is no going on with it
        await c.until(lambda: c.notices, "why")
        assert c.transcript.has_focus
        assert c.transcript.selected == c.session.turns[-1].reply_key


async def test_a_prompt_that_waited_begins_and_what_is_pointed_at_stays(chat: Start) -> None:
    async with chat("slow") as c:
        await c.ready()
        await c.send("one")
        await c.send("two")
        await c.until(lambda: c.session.queued, "a prompt that waits")
        await c.pilot.press("tab", "up")
        chosen = c.session.turns[0].key
        await c.until(lambda: c.transcript.selected == chosen, "the pointer at the prompt")
        await c.until(lambda: len(c.session.turns) == 2, "the second prompt")
        assert c.transcript.has_focus
        assert c.transcript.selected == chosen
        c.app.chat.do("stop")
        await c.phase(EnginePhase.IDLE)


# What can be done is shown ------------------------------------------------------------------------------------------------


async def test_the_last_line_has_the_keys_of_a_message_while_one_is_pointed_at(chat: Start) -> None:
    async with chat("fast", size=(80, 24)) as c:
        await pointing(c)
        assert last_row(c).endswith("r again  e edit  f fork  y copy  Esc back  [ older  ] newer")
        await c.pilot.press("escape")
        await c.until(lambda: "F1 help" in last_row(c), "the usual keys")
        assert "r again" not in last_row(c)


async def test_in_the_smallest_window_the_first_keys_and_all_prices_are_seen(chat: Start) -> None:
    async with chat("fast", size=(40, 12)) as c:
        await pointing(c)
        assert last_row(c).endswith("r again  e edit  f fork")
        assert re.fullmatch(r"r: \d+ · e: ≤\d+ · f: ready", above_the_box(c))


async def test_the_keys_are_those_that_the_user_has_chosen(chat: Start, tmp_path: Path) -> None:
    kept = replace(Settings(), keys={"again": ("x",), "fork": ("ctrl+y",)})
    (tmp_path / "settings.toml").write_text(dumps(kept), encoding="utf-8")
    async with chat("fast", size=(80, 24)) as c:
        await pointing(c)
        assert "x again  e edit  Ctrl+Y fork" in last_row(c)


async def test_while_a_reply_runs_the_first_key_stops_it(chat: Start) -> None:
    async with chat("slow", size=(80, 24)) as c:
        await c.ready()
        await c.send("hello")
        await c.phase(EnginePhase.DECODING)
        await c.pilot.press("tab")
        await c.until(lambda: "r again" in last_row(c), "the keys of a message")
        assert "Esc stop  r again" in last_row(c)
        assert "back" not in last_row(c)
        c.app.chat.do("stop")
        await c.phase(EnginePhase.IDLE)


async def test_prices_come_when_the_reply_that_is_pointed_at_has_ended(chat: Start) -> None:
    async with chat("prefill") as c:
        await c.ready()
        await c.send("hello")
        await c.until(lambda: c.session.turns, "the turn")
        await c.pilot.press("tab")
        await c.until(lambda: c.transcript.selected is not None, "the pointer")
        await c.phase(EnginePhase.IDLE)
        await c.until(lambda: "regenerate: " in c.screen_text(), "the prices")


@pytest.mark.parametrize("size", [(40, 12), (80, 24)])
async def test_the_welcome_names_the_key_that_points_at_messages(chat: Start, tmp_path: Path, size: Any) -> None:
    (tmp_path / "settings.toml").write_text(dumps(replace(Settings(), toured=True)), encoding="utf-8")
    async with chat("fast", size=size) as c:
        await c.ready()
        await c.pilot.pause()
        lines = [line.strip() for line in c.screen_text().splitlines()]
        assert "Tab  selects a message" in lines
