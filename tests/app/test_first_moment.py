"""The first moment of the screen: who leaves at once leaves in order, and what is sent at once is answered and kept."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.app.conftest import Chat
from tests.scripted_engine import SCRIPTED
from tokamac.app.chat.start import ChatOptions
from tokamac.app.tui.run import build
from tokamac.app.tui.screens.chat import ChatScreen

Start = Callable[..., Any]


@pytest.mark.parametrize("turns", range(12))
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
    waiting: list[Callable[[], object]] = []
    real = ChatScreen.call_after_refresh

    def later(self: ChatScreen, callback: Callable[..., object], *arguments: Any) -> bool:
        waiting.append(partial(real, self, callback, *arguments))
        return True

    def now() -> None:
        monkeypatch.setattr(ChatScreen, "call_after_refresh", real)
        for each in waiting:
            each()

    monkeypatch.setattr(ChatScreen, "call_after_refresh", later)
    return now


async def test_what_is_sent_before_the_engine_starts_is_answered_and_kept(
    begin: Callable[[], None], chat: Start
) -> None:
    async with chat("fast") as c:
        await c.send("one")
        await c.send("two")
        assert c.app.chat.bridge.life == 0
        begin()
        await c.until(lambda: len(c.session.turns) == 2 and c.session.turns[-1].reply, "both replies")
        assert c.prompts == ["one", "two"]
        assert c.app.chat.bridge.life == 2  # one process: ending none counts as well
        assert kept(c) == ["one", "two"]


async def test_a_command_that_is_given_before_the_engine_starts_is_done(begin: Callable[[], None], chat: Start) -> None:
    async with chat("fast") as c:
        await c.send("/model steady")
        begin()
        await c.until(lambda: c.session.engine.load.model == "steady")
        await c.ready()


def kept(c: Chat) -> list[str]:
    assert c.held is not None
    return [message.text for message in c.recording.store.path(c.held) if message.role == "user"]
