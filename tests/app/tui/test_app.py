"""What a user sees and does in the chat, from its first moment and its tour on, with a real child process behind it."""

import asyncio
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from textual._xterm_parser import XTermParser
from textual.events import Key
from textual.geometry import Offset
from textual.selection import Selection
from textual.widgets import Input, OptionList

from tests.app.chat.test_session import METRICS
from tests.app.conftest import Chat, Start
from tests.families import walked
from tests.scripted_engine import ANSWER, SCENARIOS, SCRIPTED, model_spec
from tests.tiny import make_tiny
from tokamac.app import settings
from tokamac.app.backend.client import Died
from tokamac.app.backend.processes import Ended, Serving
from tokamac.app.backend.protocol import Generate, Load, Loaded, ReplyEvent, RequestFailed
from tokamac.app.chat import external_programs
from tokamac.app.chat.actions import ACTIONS, Keymap, by_slash
from tokamac.app.chat.connection import GuideChat
from tokamac.app.chat.start import ChatOptions
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.models import local
from tokamac.app.tui.run import build
from tokamac.app.tui.screens import help as screens_help
from tokamac.app.tui.screens.chat import ChatScreen
from tokamac.app.tui.screens.help import (
    GROUPS,
    KEY_COLUMN,
    GuideScreen,
    HelpScreen,
    KeyPress,
    KeysScreen,
    ThemeScreen,
    help_text,
)
from tokamac.app.tui.screens.model import ModelScreen
from tokamac.app.tui.screens.settings import SettingsScreen
from tokamac.app.tui.widgets.transcript import ALONE, ELSE, HINTS, TOUR, Welcome, with_keys
from tokamac.engine.events import Finished, Message, TextChunk
from tokamac.engine.options import Sampling


async def test_it_paints_before_the_model_is_loaded(chat: Start) -> None:
    async with chat("slow-load", ready=False) as c:
        assert "Nothing leaves it" in c.screen_text()
        await c.until(lambda: c.session.engine.loading is not None)
        await c.until(lambda: "loading slow-load" in c.screen_text(), "progress")
        await c.phase(EnginePhase.IDLE)


async def test_a_prompt_gets_a_reply_with_a_verdict(chat: Start) -> None:
    async with chat("fast") as c:
        text = await c.ask("Why is decode slow?")
        assert "every weight once per token" in text
        assert re.match(r"([\d.,]+ tok/s · )?\d+ tokens .*· first token ", text.splitlines()[-1].strip())
        assert "Took " not in text
        assert "Nothing leaves it" not in c.screen_text()
        assert c.prompt.text == ""
        second = await c.ask("And then?")
        assert second.count("first token") == 1
        assert len(c.replies) == 2


async def test_esc_stops_the_reply_and_keeps_the_text(chat: Start) -> None:
    async with chat("slow", ready=False) as c:
        await c.send("hi")
        await c.until(lambda: c.session.progress.live and c.session.progress.live.metrics.generated_tokens > 3)
        await c.pilot.press("escape")
        await c.phase(EnginePhase.IDLE)
        text = c.shown(c.replies[-1])
        assert "stopped" in text
        assert "Deco" in text
        assert "first question" not in text


async def test_newline_keys(chat: Start) -> None:
    async with chat("fast", ready=False) as c:
        for keys in (["shift+enter"], ["ctrl+j"], ["alt+enter"], ["backslash", "enter"]):
            await c.pilot.press("a", *keys, "b")
            assert c.prompt.text == "a\nb", keys
            assert not c.session.turns
            c.prompt.clear()


async def test_escape_and_what_is_typed_right_after_it_are_heard(chat: Start, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text('keys.explain = "alt+e"\n')
    async with chat("fast"):
        for sent, keys in {
            "a\x1b\rb": ["a", "alt+enter", "b"],
            "\x1bhello": ["escape", *"hello"],
            "\x1bWhy?": ["escape", *"Why", "question_mark"],
            "\x1b/\x1bx": ["escape", "/", "escape", "x"],
            "\x1bex": ["alt+e", "x"],  # which was bound
            "\x1bf\x1bOP\x1b[A\x1b[1;3D": ["ctrl+right", "f1", "up", "alt+left"],
        }.items():
            heard = [event for event in XTermParser().feed(sent) if isinstance(event, Key)]
            assert [event.key for event in heard] == keys
            assert all(event.character == event.key for event in heard if len(event.key) == 1)


async def test_what_is_typed_right_after_enter_is_kept(chat: Start) -> None:
    async with chat("fast") as c:
        await c.pilot.press("a", "enter", "b", "ctrl+j", "c")
        await c.until(lambda: c.session.turns and c.session.turns[-1].reply)
        assert c.prompt.text == "b\nc"


async def test_the_prompt_grows_and_stops_growing(chat: Start) -> None:
    async with chat("fast", ready=False) as c:
        height = c.prompt.outer_size.height
        await c.type("a\nb\nc")
        assert c.prompt.outer_size.height == height + 2
        await c.type("\n" * 30)
        assert c.prompt.outer_size.height == 10


async def test_an_empty_prompt_is_not_sent(chat: Start) -> None:
    async with chat("fast") as c:
        await c.type("  \n ")
        await c.pilot.press("enter")
        assert not c.session.turns
        assert "Write a message first" in c.notices


async def test_a_prompt_typed_while_a_reply_runs_waits_and_is_sent(chat: Start) -> None:
    async with chat("steady", ready=False) as c:
        await c.send("one")
        await c.phase(EnginePhase.DECODING)
        await c.send("two")
        await c.until(lambda: [draft.text for draft in c.session.queued] == ["two"])
        await c.until(lambda: "1 prompt queued" in c.screen_text())
        c.prompt.insert("draft")
        await c.until(lambda: len(c.session.turns) == 2 and c.session.turns[1].reply)
        assert c.prompt.text == "draft"


async def test_thinking_is_open_while_live_and_folded_after(chat: Start) -> None:
    async with chat("thinking", size=(100, 48), ready=False) as c:
        await c.send("hi")
        await c.until(lambda: "The user asks" in c.screen_text(), "open thinking")
        await c.until(lambda: c.session.turns[-1].reply)
        await c.until(lambda: "▸ thought for" in c.screen_text(), "folded thinking")
        assert "The user asks" not in c.screen_text()
        await c.pilot.press("tab", "enter")
        await c.until(lambda: "▾ thought for" in c.screen_text(), "unfolded thinking")
        assert "The user asks" in c.screen_text()


async def test_prefill_shows_how_much_is_left(chat: Start) -> None:
    async with chat("prefill", ready=False) as c:
        await c.send("hi")
        await c.until(lambda: c.session.progress.prefill and c.session.progress.prefill.done > 2000)
        await c.until(lambda: "tokens ·" in c.screen_text() and " s left" in c.screen_text(), "an ETA")
        await c.pilot.press("escape")
        await c.phase(EnginePhase.IDLE)


async def test_the_readers_scroll_is_not_moved(chat: Start) -> None:
    async with chat("list", size=(80, 20), ready=False) as c:
        await c.send("list")
        await c.until(lambda: c.transcript.max_scroll_y > 30)
        await c.pilot.press("pageup")
        await c.pilot.pause()
        place = c.transcript.scroll_y
        grown = c.transcript.max_scroll_y
        await c.until(lambda: c.transcript.max_scroll_y > grown + 20)
        assert c.transcript.scroll_y == place
        assert not c.transcript.following
        while not c.transcript.following:  # again, once the reader is back at the end
            await c.pilot.press("pagedown")
        await c.until(lambda: c.session.turns[-1].reply)
        await c.until(lambda: c.transcript.scroll_y == c.transcript.max_scroll_y, "the end")
        assert "item 299" in c.screen_text()


async def test_a_dead_engine_is_a_message_and_a_restart(chat: Start) -> None:
    async with chat("dies-decoding", ready=False) as c:
        await c.send("hi")
        await c.until(lambda: "Restarting it" in c.notices, "a notice")
        assert "scripted: the engine dies" in c.notices
        await c.phase(EnginePhase.IDLE)
        text = c.shown(c.replies[-1])
        assert "engine crashed here" in text
        assert "Deco" in text
        await c.send("again")
        await c.phase(EnginePhase.FAILED)
        assert "when you send a prompt" in c.notices
        assert [turn.prompt for turn in c.session.turns] == ["hi", "again"]


async def test_a_model_that_is_missing_is_said_and_another_can_be_chosen(chat: Start) -> None:
    async with chat("missing", ready=False) as c:
        await c.until(lambda: "no model is called" in c.notices, "a notice")
        await c.type("draft")
        await c.pilot.press("ctrl+o")
        await c.pilot.pause()
        assert isinstance(c.app.screen, ModelScreen)
        await c.pilot.press("escape")
        c.app.view.library.choose("fast")  # as the list does with a row, or /model with a name
        await c.phase(EnginePhase.IDLE)
        assert c.prompt.text == "draft"


async def test_a_chosen_model_is_remembered_once_it_loads(chat: Start, tmp_path: Path) -> None:
    async with chat("fast") as c:
        for model, kept in (("missing", False), ("steady", True)):
            await c.pilot.press("ctrl+o")
            await c.pilot.pause()
            assert c.app.screen.query_one(OptionList).option_count >= 2
            await c.pilot.press("escape")
            c.app.view.library.choose(model)
            await c.until(lambda: not c.session.engine.busy and isinstance(c.app.screen, type(c.app.view)))
            assert (f'model = "{model}"' in (tmp_path / "settings.toml").read_text()) is kept
        assert c.session.engine.info.name == "steady"


async def test_settings_are_checked_and_kept(chat: Start, tmp_path: Path) -> None:
    async with chat("fast") as c:
        screen = await c.opened("ctrl+t", SettingsScreen)
        assert len(screen.query("*")) < 10, "each of a hundred settings is a row, none is a widget"
        await c.write_setting("temperature", "hot")
        await c.until(lambda: "'hot' is not valid" in c.screen_text())
        assert screen.query_one("#value").has_focus
        screen.query_one("#value", Input).value = "99"
        await c.pilot.press("enter")
        await c.until(lambda: "out of range" in c.screen_text())
        screen.query_one("#value", Input).value = "0.5"
        await c.pilot.press("enter")
        await c.find_setting("key_bits")
        await c.pilot.press("right")
        await c.until(lambda: "● Key bits            8 " in c.screen_text(), "the next choice")
        assert c.session.engine.load.kv.key_bits == 16, "what reloads the model waits until the list is closed"
        await c.close_settings()
        await c.until(lambda: "Saved: temperature 0.5, key_bits 8." in c.notices)
        await c.until(lambda: c.session.engine.load.kv.key_bits == 8 and c.session.engine.phase is EnginePhase.IDLE)
        assert c.session.sampling.temperature == 0.5
        written = (tmp_path / "settings.toml").read_text()
        assert "temperature = 0.5" in written
        assert "key_bits = 8" in written


async def test_copied_text_has_no_line_breaks_of_the_screen(chat: Start) -> None:
    async with chat("guide", size=(50, 40), ready=False) as c:
        await c.ask("hi")
        rows = c.transcript._page
        first = next(y for y in range(rows.height) if rows.row(y).row.content.plain.startswith("Decode reads"))
        last = next(y for y in range(first, rows.height) if not rows.row(y).row.content.plain)
        assert last > first + 1
        copied, _ = c.transcript.get_selection(Selection(Offset(0, first), Offset(0, last)))
        said = "Decode reads every weight once per token, so its speed is set by memory, not by arithmetic."
        assert copied.rstrip() == said


async def test_copying_says_what_it_did(chat: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_programs, "_tool", lambda: None)
    async with chat("fast", ready=False) as c:
        await c.type("some words")
        c.prompt.select_all()
        await c.pilot.press("ctrl+c")
        await c.until(lambda: "Copied 10 characters. Nothing to paste?" in c.notices)
        assert c.app.clipboard == "some words"


async def test_ctrl_c_stops_a_reply_then_asks_once_and_quits_when_pressed_again(chat: Start) -> None:
    async with chat("slow") as c:
        await c.send("hi")
        await c.phase(EnginePhase.DECODING)
        await c.type("a draft")
        await c.pilot.press("ctrl+c")
        await c.phase(EnginePhase.IDLE)
        assert c.session.turns[-1].reply.ending == "cancelled"
        assert "again to quit" not in c.notices
        await c.pilot.press("ctrl+c")
        assert c.notices.count("Press Ctrl+C again to quit. Your draft is kept.") == 1
        assert c.app.return_value is None
        await c.pilot.press("ctrl+c")
        await c.until(lambda: c.app.return_value == 130)
        assert c.prompt.text == "a draft"


async def test_ctrl_c_closes_a_dialog_and_the_palette_unless_text_is_selected_there(chat: Start) -> None:
    async with chat("fast", ready=False) as c:
        for key in ("f1", "ctrl+t", "ctrl+l", "ctrl+x", "ctrl+p"):
            await c.pilot.press(key)
            await c.until(lambda: c.app.screen is not c.app.view, key)
            await c.pilot.press("ctrl+c")
            await c.until(lambda: c.app.screen is c.app.view, key)
        screen = await c.opened("f1", HelpScreen)
        await c.pilot.press(*"model")
        screen.query_one(Input).action_select_all()
        await c.pilot.press("ctrl+c")
        assert (c.app.screen, c.app.clipboard) == (screen, "model")


async def test_the_leader_and_a_letter_do_what_a_key_does_and_cut_what_is_selected(chat: Start) -> None:
    async with chat("fast", ready=False) as c:
        await c.pilot.press("ctrl+x", "h")
        await c.until(lambda: isinstance(c.app.screen, HelpScreen))
        await c.pilot.press("escape", "ctrl+x", "ctrl+b")
        await c.until(lambda: not c.app.view.query_one("#panel").display)
        await c.pilot.press("ctrl+x")
        await c.until(lambda: "W  What if" in c.screen_text())
        await c.pilot.press("q")
        await c.until(lambda: c.app.screen is c.app.view)
        await c.type("some words")
        c.prompt.select_all()
        await c.pilot.press("ctrl+x")
        assert (c.prompt.text, c.app.clipboard) == ("", "some words")
        await c.pilot.press("ctrl+underscore")
        assert c.prompt.text == "some words"


async def test_keys_are_changed_in_the_app_conflicts_are_named_and_moved_and_reset(chat: Start, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("# mine\n[keys] # of actions\n")
    async with chat("fast", size=(110, 40)) as c:
        await c.send("/keys")
        screen = await c.on(KeysScreen)
        await c.pilot.press(*"explain", "enter")
        await c.until(lambda: isinstance(c.app.screen, KeyPress))
        await c.pilot.press("ctrl+q")  # the app's own keys come through too
        await c.until(lambda: "Ctrl+Q is already a key of Quit (leave)." in c.screen_text())
        await c.pilot.press("ctrl+q")
        await c.until(lambda: c.app.screen is screen and "explain (Explain): Ctrl+Q, F2, Ctrl+X E" in c.screen_text())
        assert settings.load(file).settings.keys == {"leave": (), "explain": ("ctrl+q", "f2", "ctrl+x e")}
        await c.pilot.press("ctrl+d", "ctrl+d")
        assert settings.load(file).settings.keys["explain"] == ("ctrl+x e",)
        await c.opened("enter", KeyPress)
        await c.pilot.press("ctrl+x", "y")
        await c.until(lambda: c.app.chat.session.keymap.key("explain") == "Ctrl+X Y")
        await c.pilot.press("ctrl+r")
        assert settings.load(file).settings.keys == {"leave": ()}
        assert "# of actions" in file.read_text()
        await c.pilot.press("escape", "ctrl+q")
        await c.until(lambda: c.app.screen is c.app.view)
        await c.send("/keys leave default")
        await c.until(lambda: "leave (Quit): Ctrl+Q" in c.notices)
        await c.send("/keys leve f8")
        await c.until(lambda: "there is no such action; the nearest: leave" in c.notices)


async def test_themes_are_previewed_and_kept_only_when_chosen(chat: Start, tmp_path: Path) -> None:
    async with chat("fast", ready=False) as c:
        before = c.app.theme
        await c.send("/theme")
        await c.on(ThemeScreen)
        await c.pilot.press("down")
        await c.until(lambda: c.app.theme != before)
        await c.pilot.press("escape")
        await c.until(lambda: c.app.theme == before)
        assert settings.load(tmp_path / "settings.toml").settings.theme in ("", before)
        await c.opened("ctrl+t", SettingsScreen)
        await c.find_setting("theme")
        await c.pilot.press("enter")
        await c.on(ThemeScreen)
        await c.pilot.press("down", "enter")
        await c.on(SettingsScreen)
        assert settings.load(tmp_path / "settings.toml").settings.theme == c.app.theme != before


async def test_the_help_is_searched_as_one_types(chat: Start) -> None:
    async with chat("fast", size=(60, 20), ready=False) as c:
        await c.opened("f1", HelpScreen)
        await c.pilot.press(*"quantize")
        await c.until(lambda: "Quantize a model" in c.screen_text() and "Ctrl+N" not in c.screen_text())
        await c.pilot.press("escape", "down", "pagedown", "f9")
        await c.until(lambda: c.app.screen.query_one("#help-scroll").scroll_y > 10)
        await c.pilot.press(*"zzzz")
        await c.until(lambda: "Nothing here has these words" in c.screen_text())
        await c.pilot.press("escape", "escape")
        await c.until(lambda: c.app.screen is c.app.view)


async def test_an_engine_that_cannot_be_started_is_said(chat: Start, tmp_path: Path) -> None:
    async with chat("fast", engine=(str(tmp_path / "nothing"),), ready=False) as c:
        await c.until(lambda: "could not be started" in c.notices)
        await c.phase(EnginePhase.FAILED)


async def test_the_panel_hides_and_the_status_line_takes_over(chat: Start) -> None:
    async with chat("guide", size=(100, 30), ready=False) as c:
        await c.ask("hi")
        assert "LAST REPLY" in c.screen_text()
        await c.pilot.press("ctrl+b")
        await c.pilot.pause()
        assert "LAST REPLY" not in c.screen_text()
        assert "first token" in c.screen_text()


@pytest.mark.parametrize("size", walked([(20, 5), (1, 1), (40, 12), (80, 24), (200, 60)], [(20, 5), (1, 1), (200, 60)]))
async def test_any_size_works(chat: Start, size: tuple[int, int]) -> None:
    async with chat("guide", size=size, ready=False) as c:
        c.app.chat.perform(c.session.submit("hi"))
        await c.until(lambda: c.session.turns and c.session.turns[-1].reply)
        for key in ("f1", "ctrl+s", "ctrl+t", "ctrl+o"):
            await c.pilot.press(key)
            await c.until(lambda: c.app.screen is not c.app.view, key)
            await c.closed()


async def test_a_server_on_the_chats_engine_is_told_with_and_without_a_panel(chat: Start) -> None:
    async with chat("fast", size=(140, 40)) as c:
        server = c.app.chat.server
        server.job.begin()
        server._changed()
        await c.until(lambda: c.screen_text().count("server: starting") == 1)
        server.job.receive(Serving("http://127.0.0.1:11435", 1, 0))
        server._changed()
        for size in ((140, 40), (80, 24), (60, 16)):
            await c.pilot.resize_terminal(*size)
            await c.until(lambda: c.screen_text().count("http://127.0.0.1:11435") == 1)
            assert "1 request" in c.screen_text()
        server.job.ended(Ended(0, ""))
        server._changed()
        await c.until(lambda: "11435" not in c.screen_text())


async def test_resizing_while_a_reply_streams(chat: Start) -> None:
    async with chat("steady", size=(120, 40), ready=False) as c:
        await c.send("hi")
        await c.phase(EnginePhase.DECODING)
        for size in ((20, 5), (60, 15), (200, 50), (90, 24)):
            await c.pilot.resize_terminal(*size)
        await c.until(lambda: c.session.turns[-1].reply)
        await c.pilot.press("x")
        assert c.prompt.text == "x"
        assert "first question" in c.shown(c.replies[-1])


async def test_quit_ends_the_child(chat: Start) -> None:
    async with chat("steady", ready=False) as c:
        await c.send("hi")
        await c.phase(EnginePhase.DECODING)
        await c.pilot.press("ctrl+q")
        assert c.app.return_code == 0


async def test_the_real_engine_behind_the_screen(chat: Start, tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "tiny", context=100_000)  # it is stopped long before it could come to that
    async with chat(str(model), scripted=False, sampling=Sampling(temperature=0.0, max_tokens=40), ready=False) as c:
        await c.ask("hi")
        first = c.session.turns[0].reply
        assert first.ending == "length"
        assert first.metrics.generated_tokens == 40
        await c.ask("again")
        assert c.session.turns[1].reply.metrics.cached_tokens > 0
        c.session.sampling = Sampling(temperature=0.0)
        await c.send("on and on")
        await c.phase(EnginePhase.DECODING)
        c.app.view.do("stop")
        await c.phase(EnginePhase.IDLE)
        assert c.session.turns[2].reply.ending == "cancelled"


# The first moment of the screen: who leaves at once leaves in order, and what is sent at once is answered and kept.


@pytest.mark.parametrize("turns", walked(range(12), (0, 1, 2, 4, 7, 11)))
async def test_leaving_as_it_begins_is_no_error(tmp_path: Path, turns: int, capsys: pytest.CaptureFixture[str]) -> None:
    """turns: of the event loop until the user leaves; the parts of the screen are made meanwhile."""
    paths = {"settings_path": tmp_path / "s.toml", "log_path": tmp_path / "log", "store_path": tmp_path / "c" / "c.db"}
    app, bridge = build(ChatOptions(model="fast", engine=SCRIPTED, **paths))

    async def leave() -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        app.exit(0)

    leaving = asyncio.get_running_loop().create_task(leave())
    try:
        assert await app.run_async(headless=True, size=(100, 30)) == 0
    finally:
        bridge.close()
    await leaving
    assert "Traceback" not in capsys.readouterr().err
    assert app.return_code == 0


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """What begins after the first drawing waits until this is called, as on a very busy machine."""
    waiting: list[Callable[[], object]] | None = []
    real = ChatScreen.call_after_refresh

    def later(self: ChatScreen, callback: Callable[..., object], *arguments: Any) -> bool:
        if waiting is None:
            return real(self, callback, *arguments)
        waiting.append(partial(real, self, callback, *arguments))
        return True

    def now() -> None:
        nonlocal waiting
        begins, waiting = waiting or [], None
        for each in begins:
            each()

    monkeypatch.setattr(ChatScreen, "call_after_refresh", later)
    return now


async def test_what_is_sent_before_the_engine_starts_is_kept(begin: Callable[[], None], chat: Start) -> None:
    async with chat("fast", ready=False) as c:
        await c.send("one")
        await c.send("two")
        assert c.app.chat.bridge.process_number == 0
        begin()
        await c.until(lambda: len(c.session.turns) == 2 and c.session.turns[-1].reply, "both replies")
        assert c.prompts == ["one", "two"]
        assert c.app.chat.bridge.process_number == 2  # one process: ending none counts as well
        assert kept(c) == ["one", "two"]


async def test_an_early_command_is_done(
    begin: Callable[[], None], chat: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "resolve", str)  # scenarios are in no catalogue
    async with chat("fast", ready=False) as c:
        await c.send("/model steady")
        begin()
        await c.until(lambda: c.session.engine.load.model == "steady")
        await c.ready()


def kept(c: Chat) -> list[str]:
    assert c.held is not None
    return [message.text for message in c.recording.store.path(c.held) if message.role == "user"]


# What must hold before the first screen: how often it may be drawn, and how seldom Python looks for garbage.

DRAWN = """
import sys
from pathlib import Path
from tokamac.app.chat.start import ChatOptions
from tokamac.app.tui.run import FRAMES_PER_S, build
assert "textual" not in sys.modules
build(ChatOptions(settings_path=Path(sys.argv[1]) / "settings.toml", log_path=Path(sys.argv[1]) / "log"))
from textual.screen import UPDATE_PERIOD
print(UPDATE_PERIOD == 1 / FRAMES_PER_S)
"""
BEFORE_THE_FIRST_FRAME = """
import sys
import tokamac.app.tui.app
later = "markdown_it", "jinja2", "numpy", "tokamac.app.text.latex", "tokamac.engine.model.config", "tomlkit", "mcp"
print(*(name for name in later if name in sys.modules))
"""
GARBAGE = """
import gc
from tokamac.app.tui.run import look_for_garbage_rarely
before = gc.get_threshold()
look_for_garbage_rarely()
print(gc.get_freeze_count() > 0 and gc.isenabled() and before[:2] == gc.get_threshold()[:2] and before[2] < gc.get_threshold()[2])
"""


def said(program: str, *given: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program, *given], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_textual_is_told_how_often_to_draw_before_it_is_imported(tmp_path: Path) -> None:
    assert said(DRAWN, str(tmp_path)) == "True"


def test_what_the_first_frame_does_not_need_is_imported_later() -> None:
    assert said(BEFORE_THE_FIRST_FRAME) == ""


def test_garbage_is_looked_for_rarely_but_looked_for() -> None:
    assert said(GARBAGE) == "True"


# The first start shows a tour of five lines, once; F1 has every action in a group; the guide answers aside.


def test_the_tour_is_five_lines_on_what_to_press_and_fits_the_smallest_window() -> None:
    actions = ["help", "choose_model", "chats", "explain", "settings"]
    assert [key for key, _ in TOUR] == [f"{{{action}}}" for action in actions]
    keys = {action.id: action.key_names for action in ACTIONS}
    for action, (key, text) in zip(actions, with_keys(TOUR, Keymap()), strict=True):
        assert keys[action].startswith(key)
        assert 0 < len(text) <= 27
    assert Keymap().key("ask_guide") in with_keys(TOUR, Keymap())[0][1]
    rows = Welcome(12, tour=True).rows(36)
    assert len(rows) <= 12
    below = [row.row.content.cell_length for row in rows[-len(TOUR) :]]
    assert max(below) <= 36


async def test_the_tour_is_shown_at_the_first_start_alone(chat: Start, tmp_path: Path) -> None:
    async with chat("fast") as c:
        assert all(text in c.screen_text() for _, text in with_keys(TOUR, Keymap()))
        assert "F2, Ctrl+X E  how fast it was, and why" in c.screen_text()
    assert tomllib.loads((tmp_path / "settings.toml").read_text())["toured"] is True
    async with chat("fast") as c:
        assert not any(text in c.screen_text() for _, text in with_keys(TOUR, Keymap()))
        assert all(text in c.screen_text() for hint in with_keys(HINTS, Keymap()) for text in hint)


# F1 -----------------------------------------------------------------------------------------------------------------------


def test_every_action_is_named_in_a_group_and_every_group_in_the_help() -> None:
    named = [name for names in GROUPS.values() for name in names.split()]
    assert len(named) == len(set(named))
    text = help_text().plain
    assert all(title in text.splitlines() for title in GROUPS)
    assert all(text.count(action.help) == 1 for action in ACTIONS)


def test_what_mac_terminals_do_with_keys_is_said_first_on_a_mac_and_last_elsewhere() -> None:
    on_mac, elsewhere = (help_text(mac=mac).plain for mac in (True, False))
    said = on_mac.split("\n\n")[0].replace("\n", " ")
    assert said.startswith("On a Mac keyboard, F1 to F10 need fn; Ctrl+X and a letter does the same.")
    assert "palette (Ctrl+P)" in said
    assert all(by_slash(word.removeprefix("/")) for word in re.findall(r"/[a-z]+", said))
    assert elsewhere.split("\n\n")[-2].replace("\n", " ") == said
    assert on_mac.count("On a Mac") == elsewhere.count("On a Mac") == 1


async def test_the_help_begins_with_it_on_a_mac(chat: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screens_help, "MAC", True)
    async with chat("fast", ready=False) as c:
        await c.opened("f1", HelpScreen)
        await c.until(lambda: "On a Mac keyboard" in c.screen_text(), "what is said first")


def test_an_action_that_no_group_names_is_in_the_last() -> None:
    other = replace(ACTIONS[0], id="other", help="Do something else.")
    text = help_text([*ACTIONS, other]).plain
    assert text.index("Other") < text.index("Do something else.")


@pytest.mark.parametrize("width", [44, 35, 28, 24])
def test_a_narrow_help_keeps_its_columns_or_puts_keys_above(width: int) -> None:
    lines = help_text(width=width).plain.splitlines()
    assert max(map(len, lines)) <= width
    stop = next(line for line in lines if line.startswith("Esc"))
    assert stop.startswith(f"{'Esc':{KEY_COLUMN}}Stop the reply") if width == 44 else stop.strip() == "Esc"


async def test_the_help_hands_on_to_the_guide(chat: Start) -> None:
    async with chat("fast", ready=False) as c:
        await c.opened("f1", HelpScreen)
        await c.opened("f7", GuideScreen)


# The guide ----------------------------------------------------------------------------------------------------------------


def test_a_question_waits_for_the_guide_and_what_was_said_before_goes_with_the_next() -> None:
    guidance = GuideChat()
    assert guidance.start() == [Load("guide")]
    assert guidance.ask("one?") == []
    (first,) = guidance.on_event(Loaded(model_spec("guide")))
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
        (RequestFailed(None, "no guide", "Install it."), "no guide. Install it."),
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
    async with chat("steady", ready=False) as c:
        await c.send("Why?")
        await c.until(lambda: c.session.engine.phase is EnginePhase.DECODING)
        life = c.app.chat.bridge.process_number
        await c.opened("f7", GuideScreen)
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
        assert c.app.chat.bridge.process_number == life
        assert [turn.prompt for turn in c.session.turns] == ["Why?"]
        assert c.session.engine.load.model == "steady"


async def test_the_command_asks_at_once_and_the_embedded_guide_answers(chat: Start) -> None:
    async with chat("guide", scripted=False) as c:
        await c.send("/guide How do I choose another model?")
        await c.until(lambda: isinstance(c.app.screen, GuideScreen) and screen(c).guide_chat.said)
        await c.until(lambda: screen(c).guide_chat.said[-1].over, "an answer")
        assert not screen(c).guide_chat.problem
        assert "Ctrl+O" in screen(c).guide_chat.said[-1].answer
        assert not c.session.turns


# Where the embedded guide is the model, the welcome says what it is for, and where one for all else comes from.

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
        await c.until(lambda: ALONE in lines(c), "what the guide is for")
        assert "Ctrl+O get a model for real chats" in lines(c)
        c.session.engine.load = replace(c.session.engine.load, model="fast")  # as when another is chosen
        c.app.view.redraw()
        await c.until(lambda: ALONE not in lines(c), "the welcome of another model")
        assert "Ctrl+O choose or get a model" in lines(c)


# A reply that repeats itself, a context that is full, a prompt that fails.


async def test_a_reply_that_repeats_itself_goes_on_by_a_key_and_ends_without_it(chat: Start) -> None:
    async with chat("loops", ready=False) as c:
        await c.send("one")
        await c.until(lambda: c.session.loop is not None, "a loop")
        told = "repeats itself: 256 tokens left · Ctrl+K keeps it going"
        await c.until(lambda: told in c.screen_text(), "what is told of it")
        await c.pilot.press("ctrl+k")
        await c.phase(EnginePhase.IDLE)
        assert ANSWER.splitlines()[-1] in c.session.turns[-1].reply.text
        await c.send("two")
        await c.until(lambda: c.session.loop is not None, "a loop")
        await c.pilot.press("escape")
        await c.phase(EnginePhase.IDLE)
        await c.type("left right")
        for key in ("ctrl+a", "ctrl+k"):  # with no loop the key is the input box's
            await c.pilot.press(key)
        assert c.prompt.text == ""


async def test_at_a_full_context_what_helps_stands_below_the_reply_and_works(chat: Start) -> None:
    async with chat("fills", ready=False) as c:
        await c.ask("one")
        assert c.session.turns[-1].reply.ending == "full"
        told = "stopped: the context is full · /undo drops it · /shorter rewrites it"
        await c.until(lambda: told in c.shown(c.replies[-1]), "what helps")
        await c.send("/shorter 10")
        await c.until(
            lambda: c.session.turns[-1].reply and c.session.turns[-1].reply.ending == "length", "a shorter one"
        )
        assert c.session.turns[-1].reply.metrics.generated_tokens == 10
        await c.send("/undo")
        await c.until(lambda: not c.session.turns, "the turn taken back")
        assert c.prompt.text == "one"
        c.prompt.clear()
        await c.send("/set on_full roll")
        await c.until(lambda: c.session.engine.load.kv.on_full == "roll", "the policy")


async def test_a_failed_prompt_comes_back_into_an_empty_box_alone_and_is_replaced_when_sent_again(chat: Start) -> None:
    async with chat("fails", ready=False) as c:
        await c.type("meanwhile")
        c.app.chat.perform(c.session.submit("one"))
        await c.until(lambda: c.session.turns and c.session.turns[-1].reply, "the failure")
        assert c.prompt.text == "meanwhile"
        c.prompt.clear()
        await c.send("two")
        await c.until(lambda: c.prompt.text == "two", "the prompt")
        assert c.prompts == ["one", "two"]
        c.prompt.submit()
        await c.until(lambda: c.session.turns[-1].reply and c.session.turns[-1].reply.ending == "stop", "a reply")
        assert c.prompts == ["one", "two"]
        assert c.prompt.text == ""
