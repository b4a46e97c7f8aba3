"""A system prompt that is written and not used: it stays with its chat, and it is told once where it is."""

from collections.abc import Callable
from typing import Any

from textual.widgets import Input, Static, TextArea

from tests.app.conftest import Chat
from tokamac.app.chat.preferences import SystemDrafts, Written
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.tui.model_library import load_model
from tokamac.app.tui.screens.dialog import Tick
from tokamac.app.tui.screens.settings import NOT_USED, SettingsScreen, SystemScreen

Start = Callable[..., Any]
KEPT = "Not applied. Your text stays in this chat as a draft until you quit tokamac. Ctrl+S shows it."


def text(screen: SystemScreen) -> str:
    return screen.query_one("#system", TextArea).text


async def left(c: Chat) -> None:
    await c.pilot.press("escape")
    await c.until(lambda: c.app.screen is c.app.chat)


async def seen(c: Chat) -> str:
    """What the dialog shows when it is opened; it is closed again."""
    shown = text(await c.opened("ctrl+s", SystemScreen))
    await left(c)
    return shown


async def test_what_was_written_is_there_again_after_esc_and_it_is_told_once(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ready()
        screen = await c.opened("ctrl+s", SystemScreen)
        assert not screen.query("#draft")
        await c.pilot.press(*"Be brief.")
        screen.query_one("#own", Tick).value = True
        await left(c)
        assert KEPT in c.notices
        assert c.session.system == ""
        c.app.clear_notifications()
        screen = await c.opened("ctrl+s", SystemScreen)
        assert (text(screen), screen.query_one("#own", Tick).value) == ("Be brief.", True)
        assert str(screen.query_one("#draft", Static).render()) == NOT_USED
        await left(c)
        assert c.notices == ""
        await c.opened("ctrl+s", SystemScreen)
        await c.pilot.press("ctrl+s")
        await c.until(lambda: c.session.system == "Be brief.")
        screen = await c.opened("ctrl+s", SystemScreen)
        assert (text(screen), len(screen.query("#draft"))) == ("Be brief.", 0)
        await left(c)
        assert KEPT not in c.notices


async def test_a_draft_belongs_to_its_chat_and_another_model_leaves_it(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ready()
        await c.ask("about apples")
        first = c.held
        await c.opened("ctrl+s", SystemScreen)
        await c.pilot.press(*"apples")
        await left(c)
        await c.pilot.press("ctrl+n")
        assert await seen(c) == ""
        await c.opened("ctrl+s", SystemScreen)
        await c.pilot.press(*"pears")
        await left(c)
        await c.ask("about pears")  # from here on it is a chat of its own
        assert await seen(c) == "pears"
        load_model(c.app.chat, "slow")
        await c.until(lambda: c.session.engine.load.model == "slow" and c.session.engine.phase is EnginePhase.IDLE)
        assert await seen(c) == "pears"
        await c.pilot.press("ctrl+n")
        assert await seen(c) == ""
        await c.send(f"/open {first}")
        await c.until(lambda: c.prompts == ["about apples"])
        assert await seen(c) == "apples"


async def test_a_draft_can_be_discarded_for_what_holds(chat: Start) -> None:
    async with chat("fast", system="Shout.") as c:
        await c.ready()
        screen = await c.opened("ctrl+s", SystemScreen)
        screen.query_one("#system", TextArea).text = "Whisper."
        await left(c)
        screen = await c.opened("ctrl+s", SystemScreen)
        assert text(screen) == "Whisper."
        screen.query_one("#discard").press()
        await c.until(lambda: text(screen) == "Shout.")
        assert not screen.query_one("#draft").display
        await left(c)
        screen = await c.opened("ctrl+s", SystemScreen)
        assert (text(screen), len(screen.query("#draft"))) == ("Shout.", 0)


async def test_without_a_store_it_stays_too(chat: Start, tmp_path: Any) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    async with chat("fast", store_path=blocked / "chats.db") as c:
        await c.until(lambda: "Chats are not saved" in c.notices)
        await c.opened("ctrl+s", SystemScreen)
        await c.pilot.press(*"terse")
        await left(c)
        assert await seen(c) == "terse"


def test_what_was_written_in_a_new_chat_goes_with_it_once_it_is_kept() -> None:
    drafts, one, other = SystemDrafts(), Written("one", own=True), Written("other", own=False)
    drafts.keep("a", one)
    drafts.keep(None, other)
    drafts.begun("b")
    assert (drafts.of("a"), drafts.of("b"), drafts.of(None)) == (one, other, None)
    drafts.begun("c")
    drafts.keep("a", None)
    assert (drafts.of("a"), drafts.of("b"), drafts.of("c")) == (None, other, None)


async def test_settings_that_were_changed_and_not_saved_are_said_to_be_as_they_were(chat: Start) -> None:
    said = "Your changes were not saved. Enter saves them."
    async with chat("fast") as c:
        await c.ready()
        for value in ("", "0.25"):
            await c.pilot.press("ctrl+t")
            await c.until(lambda: isinstance(c.app.screen, SettingsScreen))
            box = c.app.screen.query_one("#temperature", Input)
            box.value = value or box.value
            before = c.session.sampling
            await left(c)
            assert (said in c.notices, c.session.sampling) == (bool(value), before)
