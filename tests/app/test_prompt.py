"""The box: files by @, long pastes, what was sent before, and the prompts that wait."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.events import Paste

from tests.app.conftest import Chat
from tokamac.app.chat.attachments import Draft
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.store.store import Store
from tokamac.app.tui.screens.chat import History

Start = Callable[..., Any]
LONG = "\n".join(f"line {number} of a long text" for number in range(40))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder the user is in."""
    here = tmp_path / "here"
    (here / "notes").mkdir(parents=True)
    (here / "notes" / "decode.md").write_text("# Decode\nreads every weight")
    (here / "data.csv").write_text("n,tps\n1,40")
    (here / "photo.png").write_bytes(b"\x89PNG\0")
    monkeypatch.chdir(here)
    return here


async def ready(c: Chat) -> None:
    await c.phase(EnginePhase.IDLE)
    await c.until(lambda: c.app.chat.recording is not None)


def names(c: Chat) -> list[str]:
    return [attachment.name for attachment in c.prompt.attachments]


async def pick(c: Chat, typed: str) -> None:
    """Type a part of a path, wait for the offer, and take its first."""
    await c.pilot.press(*typed)
    await c.until(lambda: c.prompt.completions.display, "an offer")
    await c.pilot.press("enter")


async def paste_long(c: Chat) -> None:
    before = len(c.prompt.attachments)
    c.app.post_message(Paste(LONG))
    await c.until(lambda: len(c.prompt.attachments) > before)


async def test_a_file_named_by_a_part_of_its_path_goes_with_the_prompt(chat: Start, folder: Path) -> None:
    async with chat("fast", size=(100, 60)) as c:
        await ready(c)
        await pick(c, "see @deco")
        await c.until(lambda: names(c) == ["notes/decode.md"])
        assert c.prompt.text == "see notes/decode.md "
        block = c.prompt.draft.whole.removesuffix(f"\n\n{c.prompt.text}")
        tokens = -(-len(block) // 4)  # as the scripted engine counts
        await c.until(lambda: f"+ notes/decode.md {tokens} tokens" in c.screen_text(), "the tokens")
        assert not c.session.turns
        await c.pilot.press("enter")
        await c.until(lambda: c.session.turns and c.session.turns[0].reply)
        assert (c.prompt.text, names(c)) == ("", [])
        (turn,) = c.session.turns
        assert turn.prompt == "see notes/decode.md"
        assert turn.asked.startswith("File notes/decode.md:\n```\n# Decode\nreads every weight\n```\n\nsee ")
        assert "+ notes/decode.md" in c.screen_text()


async def test_the_arrows_choose_among_the_files_offered_tab_takes_one_and_escape_none(
    chat: Start, folder: Path
) -> None:
    async with chat("fast") as c:
        await ready(c)
        await c.pilot.press("@", "d")
        await c.until(lambda: c.prompt.completions.option_count == 2)
        assert "data.csv" in c.screen_text()
        await c.pilot.press("escape")
        assert not c.prompt.completions.display
        assert c.prompt.text == "@d"
        await c.pilot.press("a", "backspace")
        await c.until(lambda: c.prompt.completions.display and c.prompt.completions.option_count == 2)
        await c.pilot.press("down", "tab")
        await c.until(lambda: names(c) == ["notes/decode.md"])
        assert c.prompt.has_focus


async def test_a_folder_that_is_chosen_is_looked_into(chat: Start, folder: Path) -> None:
    async with chat("fast") as c:
        await ready(c)
        await pick(c, "@./no")
        await c.until(lambda: c.prompt.text == "@./notes/" and c.prompt.completions.display)
        await c.pilot.press("enter")
        await c.until(lambda: names(c) == ["./notes/decode.md"])


async def test_a_path_that_was_only_pasted_is_not_followed(chat: Start, folder: Path) -> None:
    async with chat("fast") as c:
        await ready(c)
        await c.paste("as it says in @data.csv")
        await asyncio.sleep(0.3)
        assert not c.prompt.completions.display
        await c.pilot.press("enter")
        await c.until(lambda: c.session.turns)
        assert c.session.turns[0].asked == "as it says in @data.csv"


async def test_a_file_is_attached_by_a_command_and_what_is_no_text_is_refused(chat: Start, folder: Path) -> None:
    async with chat("fast") as c:
        await ready(c)
        await c.send("/attach data.csv")
        await c.until(lambda: names(c) == ["data.csv"])
        await c.send("/attach photo.png")
        await c.until(lambda: "photo.png is a binary file" in c.notices)
        assert names(c) == ["data.csv"]
        await c.send("/detach data.csv")
        await c.until(lambda: names(c) == [])


async def test_backspace_in_an_empty_box_lets_the_last_attachment_go(chat: Start, folder: Path) -> None:
    async with chat("fast") as c:
        await ready(c)
        await paste_long(c)
        await paste_long(c)
        assert names(c) == ["pasted text 1", "pasted text 2"]
        await c.pilot.press("x", "backspace")
        assert len(names(c)) == 2
        await c.pilot.press("backspace")
        await c.until(lambda: names(c) == ["pasted text 1"])
        assert "pasted text 2" not in c.screen_text()


async def test_a_long_paste_is_an_attachment_priced_sent_and_titled_by_its_name(chat: Start, tmp_path: Path) -> None:
    async with chat("fast", size=(110, 30)) as c:
        await ready(c)
        await paste_long(c)
        assert c.prompt.text == ""
        await c.until(lambda: c.session.warmup.price is not None or "next:" in c.screen_text(), "its tokens")
        await c.pilot.press("enter")
        await c.until(lambda: c.session.turns and c.session.turns[0].reply)
        assert c.session.turns[0].asked == f"Pasted text 1:\n```\n{LONG}\n```"
    with Store.open(tmp_path / "chats" / "chats.db") as store:
        stored = store.latest()
        assert stored is not None
        assert stored.title == "pasted text 1"
        (attachment,) = store.path(stored.id)[0].attachments
        assert (attachment.name, attachment.text) == ("pasted text 1", LONG)


async def test_a_draft_comes_back_with_what_goes_with_it(chat: Start, folder: Path) -> None:
    async with chat("fast") as c:
        await ready(c)
        await c.ask("hi")
        await pick(c, "about @dat")
        await c.until(lambda: names(c) == ["data.csv"])
    async with chat("fast", resume=True) as c:
        await ready(c)
        await c.until(lambda: names(c) == ["data.csv"])
        assert c.prompt.text == "about data.csv "


async def test_editing_shows_the_users_words_and_files_again_and_gives_the_draft_back_after(
    chat: Start, folder: Path
) -> None:
    async with chat("fast") as c:
        await ready(c)
        await pick(c, "@dat")
        await c.until(lambda: names(c) == ["data.csv"])
        await c.pilot.press(*"why")
        await c.pilot.press("enter")
        await c.until(lambda: c.session.turns and c.session.turns[0].reply)
        await c.type("my next thought")
        await c.pilot.press("tab", "e")
        await c.until(lambda: c.prompt.text == "data.csv why")
        assert names(c) == ["data.csv"]
        await c.pilot.press("escape")
        assert (c.prompt.text, names(c)) == ("my next thought", [])


async def test_up_goes_back_in_what_was_sent_in_any_chat_and_down_returns_to_the_draft(chat: Start) -> None:
    async with chat("fast") as c:
        await ready(c)
        await c.ask("first")
        await c.ask("second\nof two lines")
    async with chat("fast") as c:
        await ready(c)
        await c.type("a draft")
        await c.pilot.press("up")
        await c.until(lambda: c.prompt.text == "second\nof two lines")
        await c.pilot.press("up")
        assert c.prompt.text == "second\nof two lines"  # the cursor moved to its first line
        await c.pilot.press("up")
        await c.until(lambda: c.prompt.text == "first")
        await c.pilot.press("up")
        assert c.prompt.text == "first"
        await c.pilot.press("down", "down")
        await c.until(lambda: c.prompt.text == "a draft")


async def test_prompts_wait_in_their_order_and_up_takes_the_last_back(chat: Start) -> None:
    async with chat("slow", size=(100, 40)) as c:
        await c.send("one")
        await c.phase(EnginePhase.DECODING)
        for text in ("two", "three"):
            await c.send(text)
        await c.until(lambda: "2 prompts queued" in c.screen_text())
        assert "waits  two" in c.screen_text()
        await c.pilot.press("up")
        await c.until(lambda: c.prompt.text == "three")
        assert "waits  three" not in c.screen_text()
        await c.pilot.press(*" and a half", "enter")
        await c.until(lambda: [draft.text for draft in c.session.queued] == ["two", "three and a half"])
        await c.pilot.press("escape")
        await c.phase(EnginePhase.IDLE)
        assert c.prompt.text == "two\n\nthree and a half"


def test_what_was_changed_in_the_history_is_a_draft_of_its_own() -> None:
    history = History()
    sent = lambda: ["b", "a"]  # noqa: E731
    assert history.older(Draft("x"), sent) == Draft("b")
    assert history.older(Draft("b, changed"), sent) == Draft("b")
    assert history.newer(Draft("b")) == Draft("b, changed")
    assert history.newer(Draft("b, changed")) is None
    assert History().older(Draft(), list) is None


async def test_prompts_that_wait_when_the_app_is_left_are_the_draft_of_the_next_time(chat: Start) -> None:
    async with chat("slow") as c:
        await ready(c)
        await c.send("one")
        await c.phase(EnginePhase.DECODING)
        await c.send("two")
        await c.send("three")
        await c.until(lambda: len(c.session.queued) == 2)
        await c.type("and four")
    async with chat("fast", resume=True) as c:
        await ready(c)
        await c.until(lambda: c.prompt.text == "two\n\nthree\n\nand four")
