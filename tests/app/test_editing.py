"""While a message is edited the box is not the draft's: what comes back meanwhile waits, and nothing of either is lost."""

from collections.abc import Callable
from typing import Any

from tests.app.conftest import Chat
from tokamac.app.backend.client import Died
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.tui.bridge import EngineSaid

Start = Callable[..., Any]


async def waiting_and_editing(c: Chat) -> None:
    """A reply runs, a prompt waits, a draft is written, and the prompt that is answered is edited."""
    await c.until(lambda: c.app.chat.recording is not None)
    await c.send("one")
    await c.phase(EnginePhase.DECODING)
    await c.send("queued")
    await c.until(lambda: c.session.queued)
    await c.type("a draft")
    c.app.chat.do("edit")
    await c.until(lambda: c.prompt.text == "one")
    c.prompt.text = "one, but better"


async def test_a_prompt_that_comes_back_waits_for_the_end_of_the_edit(chat: Start) -> None:
    async with chat("slow") as c:
        await waiting_and_editing(c)
        await c.pilot.press("escape")
        await c.phase(EnginePhase.IDLE)
        assert (c.prompt.text, c.session.queued) == ("one, but better", [])
        assert "after the edit" in c.notices
        await c.pilot.press("escape")
        assert c.prompt.text == "queued\n\na draft"


async def test_nor_does_the_death_of_the_engine_mix_them(chat: Start) -> None:
    async with chat("slow") as c:
        await waiting_and_editing(c)
        c.app.chat.post_message(EngineSaid(Died("exit status 7", ""), c.app.chat.bridge.life))
        await c.until(lambda: "Restarting it" in c.notices)
        assert c.prompt.text == "one, but better"
        await c.phase(EnginePhase.IDLE)
        await c.pilot.press("escape")
        assert c.prompt.text == "queued\n\na draft"


async def test_up_takes_no_prompt_back_into_an_edit(chat: Start) -> None:
    async with chat("slow") as c:
        await waiting_and_editing(c)
        c.prompt.focus()
        await c.pilot.press("up")
        await c.until(lambda: "stays queued" in c.notices)
        assert c.prompt.text == "one, but better"
        assert [draft.text for draft in c.session.queued] == ["queued"]


async def test_an_edit_that_was_not_sent_is_a_draft_the_next_time(chat: Start) -> None:
    async with chat("slow") as c:
        await waiting_and_editing(c)
    async with chat("fast", resume=True) as c:
        await c.until(lambda: c.prompt.text == "queued\n\na draft\n\none, but better")


async def test_an_edit_that_changed_nothing_is_none(chat: Start) -> None:
    async with chat("fast") as c:
        await c.phase(EnginePhase.IDLE)
        await c.until(lambda: c.app.chat.recording is not None)
        await c.ask("one")
        await c.type("a draft")
        await c.pilot.press("tab", "e")
        await c.until(lambda: c.prompt.text == "one")
    async with chat("fast", resume=True) as c:
        await c.until(lambda: c.prompt.text)
        assert c.prompt.text == "a draft"


async def two_edits(c: Chat) -> None:
    """A draft is written, the first message edited, and then, before that was sent, the second one."""
    await c.phase(EnginePhase.IDLE)
    await c.until(lambda: c.app.chat.recording is not None)
    await c.ask("one")
    await c.ask("two")
    await c.type("a draft")
    edit(c, 1)
    assert c.prompt.text == "one"
    c.prompt.text = "one, but better"
    edit(c, 3)
    assert c.prompt.text == "two"
    await c.until(lambda: "Your other edit is saved" in c.notices)


def edit(c: Chat, key: int) -> None:
    c.transcript.select_message(key)
    c.app.chat.do("edit")


async def test_an_edit_that_is_left_for_another_one_stays_with_its_message(chat: Start) -> None:
    async with chat("fast") as c:
        await two_edits(c)
        edit(c, 1)
        assert c.prompt.text == "one, but better"
        edit(c, 1)  # which is being edited
        assert c.prompt.text == "one, but better"
        await c.pilot.press("escape")
        assert c.prompt.text == "a draft"
        edit(c, 1)  # it was given up
        assert c.prompt.text == "one"


async def test_sending_the_second_edit_keeps_the_first(chat: Start) -> None:
    async with chat("fast") as c:
        await two_edits(c)
        c.prompt.text = "two, too"
        c.prompt.submit()
        await c.until(lambda: c.session.turns[-1].place == (2, 2) and c.session.engine.phase is EnginePhase.IDLE)
        assert (c.session.turns[-1].prompt, c.prompt.text) == ("two, too", "a draft")
        edit(c, 1)
        assert c.prompt.text == "one, but better"


async def test_all_edits_that_were_not_sent_are_kept_with_the_chat(chat: Start) -> None:
    async with chat("fast") as c:
        await two_edits(c)
        c.prompt.text = "two, too"
    async with chat("fast", resume=True) as c:
        await c.until(lambda: c.prompt.text == "a draft\n\none, but better\n\ntwo, too")
