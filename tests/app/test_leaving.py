"""What was written and not sent, when another chat is begun or opened: it stays with the chat in which it was written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.app.conftest import Chat
from tokamac.app.chat.recording import SAVED, Recording
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.store.store import Store
from tokamac.app.tui.actions import chats
from tokamac.app.tui.actions.chats import EMPTY, KEPT, STOPPED
from tokamac.app.tui.screens.chat import ChatScreen
from tokamac.app.tui.widgets.prompt_input import Prompt

Start = Callable[..., Any]


async def edit(c: Chat, text: str) -> None:
    """Begin to edit the last prompt, which is ``text``."""
    await c.pilot.press("tab", "e")
    await c.until(lambda: c.prompt.text == text)


async def open_chat(c: Chat, name: str) -> None:
    c.app.chat.do("open", name)
    await c.until(lambda: c.held == name)


def drafts(c: Chat) -> list[str]:
    """The drafts of all chats, as another program reads them."""
    with Store.open(c.recording.store.file) as store:
        return sorted(chat.draft for chat in store.chats())


async def test_a_new_chat_ends_an_edit(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ready()
        await c.ask("one")
        await edit(c, "one")
        await c.pilot.press("ctrl+n")
        assert c.prompt.text == ""
        await c.ask("two")
        assert c.prompts == ["two"]
        assert drafts(c) == ["", ""]  # the edit changed nothing


async def test_an_edit_does_not_reach_the_chat_that_is_opened(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ready()
        await c.ask("one")
        first = c.held
        await c.pilot.press("ctrl+n")
        await c.ask("two")
        second = c.held
        await edit(c, "two")
        c.prompt.text = "two, but better"
        await open_chat(c, first)
        assert c.prompt.text == ""
        await c.ask("three")
        assert c.prompts == ["one", "three"]
        await open_chat(c, second)
        assert (c.prompts, c.prompt.text) == (["two"], "two, but better")


async def test_a_fork_ends_an_edit(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ready()
        await c.ask("one")
        first = c.held
        await edit(c, "one")
        c.app.chat.do("fork")
        await c.until(lambda: c.held != first)
        assert c.prompt.text == ""
        await c.ask("two")
        assert c.prompts == ["one", "two"]


async def test_a_draft_stays_with_its_chat_however_often_one_goes_to_and_fro(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ready()
        await c.ask("one")
        first = c.held
        await c.type("a thought about one")
        await c.pilot.press("ctrl+n")
        assert c.prompt.text == ""
        assert "stays in the previous chat" in c.notices
        await c.ask("two")
        second = c.held
        await c.type("a thought about two")
        for _ in range(2):
            await open_chat(c, first)
            assert c.prompt.text == "a thought about one"
            await open_chat(c, second)
            assert c.prompt.text == "a thought about two"
        assert drafts(c) == ["a thought about one", "a thought about two"]


async def test_prompts_that_wait_stay_with_their_chat_too(chat: Start) -> None:
    async with chat("slow") as c:
        await c.ready()
        await c.send("one")
        await c.phase(EnginePhase.DECODING)
        first = c.held
        await c.send("and this")
        await c.until(lambda: c.session.queued)
        await c.type("and that")
        await c.pilot.press("ctrl+n")
        assert (c.prompt.text, c.session.queued) == ("", [])
        await open_chat(c, first)
        assert c.prompt.text == "and this\n\nand that"


async def running(c: Chat, prompt: str) -> int:
    """Ask, wait for the reply's first words, and return the reply's id in the store."""
    await c.send(prompt)
    await c.until(lambda: c.session.conversation.partial.text and c.session.engine.phase is EnginePhase.DECODING)
    return c.recording.stored(c.session.turns[-1].reply_key)


@pytest.mark.parametrize("how", ["new", "open", "import"])
async def test_a_reply_that_runs_is_stopped_kept_as_far_as_it_was_written_and_that_is_said(
    chat: Start, how: str, tmp_path: Path
) -> None:
    (tmp_path / "other.md").write_text("# Other\n\n## You\n\nsaid elsewhere\n")
    ways = {"new": "/new", "open": "/open {}", "import": f"/import {tmp_path / 'other.md'}"}
    async with chat("slow") as c:
        await c.ready()
        await c.send("one")
        await c.phase(EnginePhase.DECODING)
        await c.pilot.press("escape")
        await c.phase(EnginePhase.IDLE)
        first = c.held
        await c.pilot.press("ctrl+n")
        await c.pilot.pause()
        assert "The reply was stopped" not in c.notices  # none ran
        reply = await running(c, "two")
        said = c.session.conversation.partial.text
        await c.send(ways[how].format(first))
        await c.until(lambda: KEPT in c.notices)
        assert "two" not in c.prompts
        kept = c.recording.store.message(reply)
        assert kept.state == "stopped"
        assert kept.text.startswith(said)


async def test_a_reply_that_has_no_word_yet_leaves_its_prompt(chat: Start) -> None:
    async with chat("prefill") as c:
        await c.ready()
        await c.send("one")
        await c.phase(EnginePhase.PREFILL)
        first = c.held
        await c.pilot.press("ctrl+n")
        await c.until(lambda: EMPTY in c.notices)
        await open_chat(c, first)
        assert (c.prompts, c.session.turns[0].reply.text) == (["one"], "")


async def test_of_a_reply_that_could_not_be_kept_nothing_else_is_said(chat: Start, tmp_path: Path) -> None:
    async with chat("slow") as c:
        await c.ready()
        await running(c, "one")
        c.refuse_writes()
        await c.pilot.press("ctrl+n")
        await c.until(lambda: STOPPED in c.notices)
        assert KEPT not in c.notices
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    async with chat("slow", store_path=blocked / "chats.db") as c:
        await c.phase(EnginePhase.IDLE)
        await c.send("one")
        await c.phase(EnginePhase.DECODING)
        await c.pilot.press("ctrl+n")
        await c.until(lambda: STOPPED in c.notices)


@pytest.mark.parametrize("back", ["at its end", "when the chat is left"])
async def test_a_reply_that_is_kept_at_its_end_only_is_said_to_be_kept(
    chat: Start, monkeypatch: pytest.MonkeyPatch, back: str
) -> None:
    def left(recording: Recording) -> None:
        recording.store._database._connection.execute("PRAGMA query_only = 0")
        leave(recording)

    leave = Recording.left
    async with chat("slow") as c:
        await c.ready()
        c.refuse_writes()
        await c.send("one")
        await c.until(lambda: c.session.conversation.partial.text and c.session.engine.phase is EnginePhase.DECODING)
        assert c.held is None
        if back == "at its end":
            c.refuse_writes(refused=False)
        else:
            monkeypatch.setattr(Recording, "left", left)
        await c.pilot.press("ctrl+n")
        await c.until(lambda: KEPT in c.notices)
        assert SAVED in c.notices
        assert STOPPED not in c.notices
        (kept,) = c.recording.store.chats()
        asked, reply = c.recording.store.path(kept.id)
        assert (asked.text, reply.state) == ("one", "stopped")
        assert reply.text


async def test_where_chats_are_not_kept_the_box_keeps_what_is_written(chat: Start, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    async with chat("fast", store_path=blocked / "chats.db") as c:
        await c.until(lambda: "Chats are not saved" in c.notices)
        await c.ask("one")
        await edit(c, "one")
        c.prompt.text = "one, but better"
        await c.pilot.press("ctrl+n")
        assert c.prompt.text == "one, but better"
        await c.pilot.press("enter")
        await c.until(lambda: c.prompts == ["one, but better"])


async def test_what_is_typed_before_the_last_chat_is_there_goes_into_it(
    chat: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def typed_before(screen: ChatScreen) -> None:
        screen.query_one(Prompt).insert("typed at once")
        open_store(screen)

    open_store = chats._open_store
    async with chat("fast") as c:
        await c.ready()
        await c.ask("one")
        await c.type("half a thought")
    monkeypatch.setattr(chats, "_open_store", typed_before)
    async with chat("fast", resume=True) as c:
        await c.ready()
        await c.until(lambda: c.prompts == ["one"])
        assert c.prompt.text == "half a thought\n\ntyped at once"
        assert len(drafts(c)) == 1
