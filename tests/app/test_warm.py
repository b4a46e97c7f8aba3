"""Reading ahead as a user meets it: when it begins, what the screen says of it, and what the next reply saves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.events import Paste

from tests.app.conftest import Chat
from tokamac.app.backend.protocol import AskPrice, Generate, Load, Request, Warm
from tokamac.app.chat.background import is_ready
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.tui.widgets import prompt_input
from tokamac.engine.events import Message, Price
from tokamac.engine.options import Sampling

Start = Callable[..., Any]
LONG = "a question with many words " * 40
NEVER_S = 3600.0


def watch(chat: Chat) -> list[Request]:
    """What the screen asks of the engine from here on."""
    asked: list[Request] = []
    send = chat.app.chat.bridge.ask

    def ask(request: Request) -> None:
        asked.append(request)
        send(request)

    chat.app.chat.bridge.ask = ask  # type: ignore[method-assign]
    return asked


async def test_a_pause_has_the_draft_read_once_and_the_screen_says_so(chat: Start, tmp_path: Path) -> None:
    async with chat("fast") as c:
        await c.phase(EnginePhase.IDLE)
        asked = watch(c)
        await c.type(LONG)
        await c.until(lambda: "next: ready" in c.screen_text(), "ready")
        draft = (Message("user", LONG.strip()),)
        assert asked == [AskPrice("draft", 1, draft), Warm(2, draft)]
        assert f"warm [('user', {len(LONG) - 1})]" in (tmp_path / "engine.log").read_text()
        c.prompt.submit()
        await c.until(lambda: c.session.turns and c.session.turns[-1].reply)
        metrics = c.session.turns[-1].reply.metrics
        assert metrics.cached_tokens > metrics.prompt_tokens / 2
        assert "next:" not in c.screen_text()


class Clock:
    """Timers that end when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.seconds: set[float] = set()

    def set_timer(self, seconds: float, then: Callable[[], None]) -> "Clock":
        self.seconds.add(seconds)
        self.waiting.append(then)
        return self

    def stop(self) -> None:
        self.waiting.pop()


async def test_every_key_begins_the_pause_anew(chat: Start) -> None:
    async with chat("fast") as c:
        await c.phase(EnginePhase.IDLE)
        await c.until(lambda: c.prompt._rest is not None, "the pause after loading")
        c.prompt._rest.stop()
        asked, clock = watch(c), Clock()
        c.prompt._rest, c.prompt.set_timer = None, clock.set_timer
        for _ in range(3):
            await c.type(LONG)
        assert len(clock.waiting) == 1
        assert clock.seconds == {prompt_input.PAUSE_S}
        assert asked == []
        clock.waiting[0]()
        await c.until(
            lambda: AskPrice("draft", 1, (Message("user", (LONG * 3).strip()),)) in asked, "the price of the whole"
        )


async def test_a_long_paste_is_read_without_waiting_for_a_pause(chat: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_input, "PAUSE_S", NEVER_S)
    async with chat("fast") as c:
        await c.phase(EnginePhase.IDLE)
        asked = watch(c)
        await c.type(LONG)
        await c.paste("x" * (prompt_input.LONG_PASTE - 1))
        assert asked == []
        await c.paste(LONG)
        await c.until(lambda: any(isinstance(request, Warm) for request in asked), "reading")


async def test_a_short_draft_is_left_alone(chat: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_input, "PAUSE_S", 0.01)
    async with chat("fast") as c:
        await c.phase(EnginePhase.IDLE)
        asked = watch(c)
        await c.type("a few words")
        await c.pilot.pause(0.1)
        assert asked == []


async def test_a_draft_written_while_a_reply_runs_is_read_after_it(chat: Start) -> None:
    async with chat("slow") as c:
        await c.send("hi")
        await c.phase(EnginePhase.DECODING)
        asked = watch(c)
        await c.paste(LONG)
        assert c.session.engine.replying
        assert asked == []
        c.app.chat.do("stop")
        await c.until(lambda: any(isinstance(request, Warm) for request in asked), "reading")
        (warm,) = (request for request in asked if isinstance(request, Warm))
        assert [message.role for message in warm.messages] == ["user", "assistant", "user"]
        assert warm.messages[-1].content == LONG.strip()
        assert c.prompt.text == LONG


async def test_without_a_prompt_cache_nothing_is_read(chat: Start, tmp_path: Path) -> None:
    async with chat("thinking", prompt_cache=False, system="Be brief.") as c:
        asked = watch(c)
        await c.phase(EnginePhase.IDLE)
        await c.paste(LONG)
        await c.ask("hi")
        assert [type(request) for request in asked] == [Load, Generate]
        assert "warm" not in (tmp_path / "engine.log").read_text()


async def test_a_system_prompt_is_read_once_the_model_is_there(chat: Start, tmp_path: Path) -> None:
    async with chat("fast", system="Be brief.") as c:
        await c.phase(EnginePhase.IDLE)
        log = tmp_path / "engine.log"
        await c.until(lambda: "warm [('system', 9), ('user', 0)]" in log.read_text(), "reading")
        assert "next:" not in c.screen_text()


@pytest.mark.parametrize(
    ("width", "said"), [(120, "to read, 310 MB from disk, about 2.1 s"), (80, "about 2.1 s"), (40, "1.24k")]
)
async def test_the_price_fits_the_line(chat: Start, width: int, said: str) -> None:
    async with chat("fast", size=(width, 24)) as c:
        await c.phase(EnginePhase.IDLE)
        c.session.warmup.price = Price(3_000, 1_240, 310_000_000, 2.1)
        c.app.chat.perform([])
        await c.pilot.pause()
        (line,) = (line for line in c.screen_text().splitlines() if "next: " in line)
        assert said in line
        assert "2.1 s" in line


async def test_trouble_with_the_prompt_cache_is_said_once(chat: Start) -> None:
    async with chat("full-disk") as c:
        for prompt_text in ("one", "two"):
            await c.ask(prompt_text)
        await c.until(lambda: "disk full" in c.notices, "the notice")
        (notice,) = (n for n in c.app._notifications if "disk full" in n.message)
        assert notice.severity == "warning"
        assert "\x1b" not in notice.message
        assert "every weight" in await c.ask("three")
        assert c.notices.count("disk full") == 1


@pytest.mark.e2e
async def test_the_real_engine_has_read_a_pasted_text_before_it_is_sent(chat: Start) -> None:
    text = " ".join(f"The tokamak {i} holds a plasma of hydrogen in a strong magnetic field." for i in range(116))
    assert len(text.split()) > 1_500
    async with chat("guide", scripted=False, sampling=Sampling(temperature=0.0, max_tokens=4)) as c:
        await c.phase(EnginePhase.IDLE)
        c.app.post_message(Paste(text))  # so long that it is attached
        await c.until(lambda: c.session.warmup.price and is_ready(c.session.warmup.price), "ready", patience_s=180)
        c.prompt.submit()
        await c.until(lambda: c.session.turns and c.session.turns[-1].reply)
        metrics = c.session.turns[-1].reply.metrics
        assert metrics.cached_tokens > metrics.prompt_tokens / 2
        assert metrics.prompt_tokens > 1_500
