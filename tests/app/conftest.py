"""The chat as a test drives it: Textual's pilot on the app, a real child process with a scripted engine behind it."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from textual import _wait
from textual.events import Paste
from textual.pilot import Pilot, WaitForScreenTimeout
from textual.screen import Screen
from textual.strip import Strip
from textual.widgets import Input, OptionList

from tests.scripted_engine import SCRIPTED
from tests.waiting import PATIENCE_S
from tokamac.app.backend.client import EngineProcess
from tokamac.app.chat.figures import PRIMED
from tokamac.app.chat.recording import Recording
from tokamac.app.chat.session import Session
from tokamac.app.chat.start import ChatOptions
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.settings import is_new
from tokamac.app.store.store import Store
from tokamac.app.tui.app import TokamacApp
from tokamac.app.tui.markdown.page import Page
from tokamac.app.tui.markdown.turns import ReplyMessage
from tokamac.app.tui.run import build
from tokamac.app.tui.widgets.prompt_input import Chips, Prompt
from tokamac.app.tui.widgets.transcript import Transcript

Shown = TypeVar("Shown", bound=Screen[Any])
Start = Callable[..., Any]  # the `chat` fixture

# After each key, Textual waits until its process was idle for so long: at its own 20 ms that is most of these tests' time.
_wait.SLEEP_GRANULARITY, _wait.SLEEP_IDLE = 0.01, 0.0005

# To look at the screen is work too, which what is waited for has to wait for.
OFTEN_S, SOON_S, SELDOM_S = 0.01, 1.0, 0.05


def strips_of(screen: Screen[Any]) -> list[Strip]:
    """Return what is drawn, row by row."""
    return screen._compositor.render_strips(screen.size)


def text_on(screen: Screen[Any]) -> str:
    return "\n".join("".join(segment.text for segment in strip) for strip in strips_of(screen))


def reply_of(session: Session) -> int:
    """Return the id that the engine has for the reply that runs."""
    assert session._id is not None
    return session._id


def refuse_writes(store: Store, *, refused: bool = True) -> None:
    """Let every write of a chat be refused, as on a disk that may not be written; or not any more."""
    store._database._connection.execute(f"PRAGMA query_only = {int(refused)}")


class Chat:
    """A running chat: what a user does, and what they see."""

    def __init__(self, app: TokamacApp, pilot: Pilot[Any]) -> None:
        self.app = app
        self.pilot = pilot

    @property
    def session(self) -> Session:
        return self.app.chat.session

    @property
    def engine(self) -> EngineProcess:
        """The chat's own process."""
        shared = self.app.chat.bridge._process
        assert isinstance(shared._link, EngineProcess)
        return shared._link

    def end_engine(self) -> None:
        """End the engine's process as a crash does: the chat hears of it."""
        os.kill(self.engine.pid, signal.SIGKILL)

    @property
    def prompt(self) -> Prompt:
        return self.app.view.query_one(Prompt)

    @property
    def transcript(self) -> Transcript:
        return self.app.view.query_one(Transcript)

    @property
    def replies(self) -> list[ReplyMessage]:
        return self.transcript.replies

    async def until(self, condition: Callable[[], object], what: str = "", patience_s: float = PATIENCE_S) -> None:
        begun = time.monotonic()
        while not condition():
            waited = time.monotonic() - begun
            assert waited < patience_s, (
                f"never: {what or condition}; {self.session.engine.phase} {self.session.engine.problem}"
            )
            await asyncio.sleep(OFTEN_S if waited < SOON_S else SELDOM_S)
        with suppress(WaitForScreenTimeout):  # a widget that has gone while it was waited for never answers
            await self.pilot.pause()

    async def opened(self, key: str, kind: type[Shown]) -> Shown:
        """Press the key that opens a screen; return the screen."""
        await self.pilot.press(key)
        return await self.on(kind)

    async def closed(self) -> None:
        """Close what is over the chat."""
        await self.pilot.press("escape")
        await self.until(lambda: self.app.screen is self.app.view, "the chat")

    async def on(self, kind: type[Shown]) -> Shown:
        """Wait for a screen, and return it."""
        await self.until(lambda: isinstance(self.app.screen, kind), kind.__name__)
        screen = self.app.screen
        assert isinstance(screen, kind)
        return screen

    async def phase(self, phase: EnginePhase) -> None:
        await self.until(lambda: self.session.engine.phase is phase, phase.name)

    async def ready(self) -> None:
        """Wait until the model is loaded and the chats are open."""
        await self.phase(EnginePhase.IDLE)
        await self.until(lambda: self.app.chat.recording is not None, "the chats")

    @property
    def recording(self) -> Recording:
        """What keeps the chats, once they are open."""
        assert self.app.chat.recording is not None
        return self.app.chat.recording

    @property
    def held(self) -> str | None:
        """The id of the chat that is held."""
        return self.recording.chat

    @property
    def prompts(self) -> list[str]:
        return [turn.prompt for turn in self.session.turns]

    def refuse_writes(self, *, refused: bool = True) -> None:
        refuse_writes(self.recording.store, refused=refused)

    async def type(self, text: str) -> None:
        self.prompt.insert(text)
        await self.pilot.pause()

    async def paste(self, text: str) -> None:
        self.app.post_message(Paste(text))  # as a terminal's driver does
        await self.until(lambda: text in self.prompt.text, "the pasted text")

    async def find_setting(self, name: str) -> None:
        """Search the open list of settings, so that it points at this one."""
        self.app.screen.query_one("#search", Input).value = name
        await self.pilot.pause()
        listed = self.app.screen.query_one(OptionList)
        await self.until(lambda: listed.highlighted_option and listed.highlighted_option.id == name, name)

    async def write_setting(self, name: str, text: str) -> None:
        """Give a setting of the open list this text."""
        await self.find_setting(name)
        await self.pilot.press("enter")
        self.app.screen.query_one("#value", Input).value = text
        await self.pilot.press("enter")

    async def close_settings(self) -> None:
        """Close the list of settings, whose search is not empty."""
        await self.pilot.press("escape")
        await self.closed()

    async def send(self, text: str) -> None:
        # Not by the pilot's keys: it waits for an idle screen, which a running reply may keep from it.
        self.prompt.insert(text)
        self.prompt.submit()
        await asyncio.sleep(0)

    async def ask(self, text: str) -> str:
        """Send, wait for the whole reply, and return what is shown of it."""
        before = len(self.session.turns)
        await self.send(text)
        await self.until(lambda: len(self.session.turns) > before and self.session.turns[-1].reply, "a reply")
        return self.shown(self.replies[-1])

    def shown(self, reply: ReplyMessage) -> str:
        """The text of ``reply``, in view or not, as copying would take it."""
        page = Page(self.transcript.size.width)
        page.append(reply)
        return page.copy(lambda _: (0, -1))

    def screen_text(self) -> str:
        """Everything on the screen, row by row."""
        return text_on(self.app.screen)

    @property
    def notices(self) -> str:
        """What is told beside the text, in the chat and over a dialog."""
        told = [notice.text for notice in self.app.view.query_one(Chips).notices]
        return "\n".join([*told, *(notice.message for notice in self.app._notifications)])


@pytest.fixture(autouse=True, scope="session")
def primed() -> None:
    """This machine was told what figures mean: it is a chat's first reply that says so, and tests come in any order."""
    is_new(PRIMED)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have the system be another."""
    return lambda platform: monkeypatch.setattr(sys, "platform", platform)


@pytest.fixture
def chat(tmp_path: Path) -> Start:
    @asynccontextmanager
    async def start(
        model: str = "fast",
        size: tuple[int, int] = (100, 30),
        *,
        scripted: bool = True,
        ready: bool = True,
        **options: Any,
    ) -> AsyncIterator[Chat]:
        chosen = {
            "settings_path": tmp_path / "settings.toml",
            "log_path": tmp_path / "engine.log",
            "store_path": tmp_path / "chats" / "chats.db",
        }
        app, bridge = build(ChatOptions(model=model, **{**chosen, "engine": SCRIPTED if scripted else None, **options}))
        try:
            async with app.run_test(size=size, notifications=True) as pilot:
                running = Chat(app, pilot)
                if ready:
                    await running.ready()
                yield running
        finally:
            bridge.close()

    return start
