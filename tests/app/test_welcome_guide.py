"""Where the embedded guide is the model, the welcome says what it is for, and where one for all else comes from."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.app.conftest import Chat
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.tui.widgets.transcript import ALONE, ELSE, HINTS, TOUR, Welcome

Start = Callable[..., Any]
WIDTH = 36  # cells that the welcome has in the smallest window


def shown(welcome: Welcome, width: int) -> list[str]:
    return [" ".join(each.row.content.plain.split()) for each in welcome.rows(width)]


def lines(c: Chat) -> list[str]:
    return [" ".join(line.split()) for line in c.screen_text().splitlines()]


@pytest.mark.parametrize("tour", [False, True])
def test_what_the_guide_is_for_stands_above_the_keys_or_gives_way_to_them_and_one_of_those_says_it(tour: bool) -> None:
    keys = len(TOUR if tour else HINTS)
    assert shown(Welcome(keys + 2, tour=tour, guide=True), WIDTH)[:2] == [ALONE, ""]
    rows = shown(Welcome(keys + 1, tour=tour, guide=True), WIDTH)
    assert rows[0] == ALONE
    assert len(rows) == keys + 1
    for height in (keys, keys + 1):
        rows = shown(Welcome(height, tour=tour, guide=True), WIDTH)
        assert any(text in row for row in rows for text in ELSE.values())
        assert ALONE not in shown(Welcome(height, tour=tour), WIDTH)


def test_what_is_said_otherwise_of_a_key_is_a_key_of_either_welcome() -> None:
    assert set(ELSE) <= {text for _, text in (*HINTS, *TOUR)}


async def test_it_is_said_of_the_guide_and_of_no_other_model(chat: Start) -> None:
    async with chat("guide", size=(40, 13)) as c:
        await c.phase(EnginePhase.IDLE)
        await c.until(lambda: ALONE in lines(c), "what the guide is for")
        assert "Ctrl+O get a model for real chats" in lines(c)
        c.session.engine.load = replace(c.session.engine.load, model="fast")  # as when another is chosen
        c.app.chat.show()
        await c.until(lambda: ALONE not in lines(c), "the welcome of another model")
        assert "Ctrl+O choose or get a model" in lines(c)
