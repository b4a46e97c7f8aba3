"""The first start shows a tour of five lines, once; F1 has every action in a group; the guide answers aside."""

import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input

from tests.app.conftest import Chat
from tests.app.test_session import METRICS
from tests.scripted_engine import SCENARIOS
from tokamac.app import settings
from tokamac.app.backend.client import Died
from tokamac.app.backend.protocol import Failed, Generate, Load, Loaded, ModelInfo, ReplyEvent
from tokamac.app.chat.actions import ACTIONS, Keymap, by_slash
from tokamac.app.chat.jobs import GuideChat
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.tui.screens import help as screens_help
from tokamac.app.tui.screens.help import GROUPS, KEY_COLUMN, GuideScreen, HelpScreen, help_text
from tokamac.app.tui.widgets.transcript import HINTS, TOUR, Welcome, with_keys
from tokamac.engine.events import Finished, Message, TextChunk

Start = Callable[..., Any]


def test_the_tour_is_five_lines_on_what_to_press_and_fits_the_smallest_window() -> None:
    actions = ["help", "choose_model", "chats", "explain", "settings"]
    assert [key for key, _ in TOUR] == [f"{{{action}}}" for action in actions]
    keys = {action.id: action.key_names for action in ACTIONS}
    for action, (key, text) in zip(actions, with_keys(TOUR, Keymap()), strict=True):
        assert keys[action].startswith(key)
        assert 0 < len(text) <= 27
    assert keys["ask_guide"] in with_keys(TOUR, Keymap())[0][1]
    rows = Welcome(12, tour=True).rows(36)
    assert len(rows) <= 12
    below = [row.row.content.cell_length for row in rows[-len(TOUR) :]]
    assert max(below) <= 36


async def test_the_tour_is_shown_at_the_first_start_alone(chat: Start, tmp_path: Path) -> None:
    async with chat("fast") as c:
        await c.phase(EnginePhase.IDLE)
        assert all(text in c.screen_text() for _, text in with_keys(TOUR, Keymap()))
    assert tomllib.loads((tmp_path / "settings.toml").read_text())["toured"] is True
    async with chat("fast") as c:
        await c.phase(EnginePhase.IDLE)
        assert not any(text in c.screen_text() for _, text in with_keys(TOUR, Keymap()))
        assert all(text in c.screen_text() for hint in with_keys(HINTS, Keymap()) for text in hint)


def test_that_it_was_shown_is_remembered(tmp_path: Path) -> None:
    assert not settings.load(tmp_path / "none.toml").settings.toured
    settings.save(tmp_path / "s.toml", replace(settings.Settings(), toured=True))
    read = settings.load(tmp_path / "s.toml")
    assert read.settings.toured
    assert not read.warnings


# F1 -----------------------------------------------------------------------------------------------------------------------


def test_every_action_is_named_in_a_group_and_every_group_in_the_help() -> None:
    named = [name for names in GROUPS.values() for name in names]
    assert len(named) == len(set(named))
    text = help_text().plain
    assert all(title in text.splitlines() for title in GROUPS)
    assert all(text.count(action.help) == 1 for action in ACTIONS)


def test_what_mac_terminals_do_with_keys_is_said_first_on_a_mac_and_last_elsewhere() -> None:
    on_mac, elsewhere = (help_text(mac=mac).plain for mac in (True, False))
    said = on_mac.split("\n\n")[0].replace("\n", " ")
    assert said.startswith("On a Mac keyboard, F1 to F9 need fn.")
    assert "palette (Ctrl+P)" in said
    assert all(by_slash(word.removeprefix("/")) for word in re.findall(r"/[a-z]+", said))
    assert elsewhere.split("\n\n")[-1].replace("\n", " ") == said
    assert on_mac.count("On a Mac") == elsewhere.count("On a Mac") == 1


async def test_the_help_begins_with_it_on_a_mac(chat: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screens_help, "MAC", True)
    async with chat("fast") as c:
        await c.opened("f1", HelpScreen)
        await c.until(lambda: "On a Mac keyboard" in c.screen_text(), "what is said first")


def test_an_action_that_no_group_names_is_in_the_last() -> None:
    other = replace(ACTIONS[0], id="other", help="Do something else.")
    text = help_text([*ACTIONS, other]).plain
    assert text.index("Also") < text.index("Do something else.")


@pytest.mark.parametrize("width", [44, 35, 28, 24])
def test_a_narrow_help_keeps_its_columns_or_puts_keys_above(width: int) -> None:
    lines = help_text(width=width).plain.splitlines()
    assert max(map(len, lines)) <= width
    stop = next(line for line in lines if line.startswith("Esc"))
    assert stop.startswith(f"{'Esc':{KEY_COLUMN}}Stop the reply") if width == 44 else stop.strip() == "Esc"


async def test_the_help_hands_on_to_the_guide(chat: Start) -> None:
    async with chat("fast") as c:
        await c.pilot.press("f1")
        await c.until(lambda: isinstance(c.app.screen, HelpScreen), "the help")
        await c.pilot.press("f7")
        await c.until(lambda: isinstance(c.app.screen, GuideScreen), "the guide")


# The guide ----------------------------------------------------------------------------------------------------------------


def test_a_question_waits_for_the_guide_and_what_was_said_before_goes_with_the_next() -> None:
    guidance = GuideChat()
    assert guidance.start() == [Load("guide")]
    assert guidance.ask("one?") == []
    (first,) = guidance.on_event(Loaded(ModelInfo("guide")))
    assert isinstance(first, Generate)
    assert guidance.busy
    guidance.on_event(ReplyEvent(first.id, TextChunk("a\x1b[2J")))
    assert guidance.said[-1].answer == "a\ufffd"
    guidance.on_event(ReplyEvent(first.id, Finished("stop", "answer", METRICS)))
    assert not guidance.busy
    (second,) = guidance.ask("two?")
    assert isinstance(second, Generate)
    assert second.messages == (Message("user", "one?"), Message("assistant", "answer"), Message("user", "two?"))


def test_what_goes_wrong_is_said_and_ends_the_exchange() -> None:
    for event, why in (
        (Failed(None, "no guide", "Install it."), "no guide. Install it."),
        (Died("killed", ""), "killed"),
    ):
        guidance = GuideChat()
        guidance.start()
        guidance.ask("one?")
        guidance.on_event(event)
        assert why in guidance.problem
        assert not guidance.answering


def screen(c: Chat) -> GuideScreen:
    assert isinstance(c.app.screen, GuideScreen)
    return c.app.screen


async def test_f7_asks_the_guide_in_a_process_of_its_own_and_leaves_the_chat_alone(chat: Start) -> None:
    async with chat("steady") as c:
        await c.send("Why?")
        await c.until(lambda: c.session.engine.phase is EnginePhase.DECODING)
        life = c.app.chat.bridge.life
        await c.pilot.press("f7")
        await c.until(lambda: isinstance(c.app.screen, GuideScreen))
        box = screen(c).query_one(Input)
        assert box.has_focus
        box.value = "How do I copy?"
        await c.pilot.press("enter")
        await c.until(lambda: screen(c).guide_chat.said and screen(c).guide_chat.said[-1].over)
        assert screen(c).guide_chat.said[-1].answer == SCENARIOS["guide"].answer
        await c.until(lambda: "The first question about a slow reply" in c.screen_text())
        bridge = screen(c)._bridge
        await c.pilot.press("escape")
        await c.until(lambda: not isinstance(c.app.screen, GuideScreen))
        assert bridge._process is None
        await c.phase(EnginePhase.IDLE)
        assert c.app.chat.bridge.life == life
        assert [turn.prompt for turn in c.session.turns] == ["Why?"]
        assert c.session.engine.load.model == "steady"


async def test_the_command_asks_at_once_and_the_embedded_guide_answers(chat: Start) -> None:
    async with chat("guide", scripted=False) as c:
        await c.phase(EnginePhase.IDLE)
        await c.send("/guide How do I choose another model?")
        await c.until(lambda: isinstance(c.app.screen, GuideScreen) and screen(c).guide_chat.said)
        await c.until(lambda: screen(c).guide_chat.said[-1].over, "an answer")
        assert not screen(c).guide_chat.problem
        assert "Ctrl+O" in screen(c).guide_chat.said[-1].answer
        assert not c.session.turns
