"""The chat as it is drawn from its first start on: the tour, a reply that is read for and written, loading, no model.

The engine is not asked: what it would say is said by hand, and the clock stands still, so that every figure is the same each time.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

from tests.app.album import SIZES, THEMES, Album, StillClock, figures, nothing_of_this_machine, written
from tests.app.conftest import Chat
from tests.scripted_engine import KV_BYTES_PER_TOKEN, WEIGHT_BYTES
from tokamac.app.backend.protocol import Failed, Load, Reply, ReplyEvent
from tokamac.app.chat.figures import FIGURES, explain
from tokamac.app.chat.steps import Ask, EnginePhase, StartEngine, Step
from tokamac.app.tui.bridge import EngineSaid
from tokamac.app.tui.markdown.turns import ReplyMessage
from tokamac.app.tui.screens.figure import FigureScreen
from tokamac.engine.events import Finished, Live, LoadProgress, PrefillProgress, TextChunk
from tokamac.engine.metrics import Outlier

Start = Callable[..., Any]
THOUGHT = "They ask about decode. Each step reads all weights, so that bandwidth is the limit."
SAID = """Decode reads **every weight once per token**, so its speed is set by memory.

1. Prefill: *bound by arithmetic*.
2. Decode: *bound by"""


def unheard(c: Chat, steps: list[Step]) -> None:
    """Do what the session asks, but for what the engine would be asked."""
    c.app.chat.perform([step for step in steps if not isinstance(step, Ask | StartEngine)])


def said(c: Chat, *events: Reply) -> None:
    """Let the engine say this."""
    for event in events:
        c.app.chat.on_engine_said(EngineSaid(event, c.app.chat.bridge.life))


def live() -> Live:
    """A reply of which 42 tokens are written."""
    metrics = replace(figures(), generated_tokens=42, total_s=None, decode_tps=50.0)
    gaps = (19.0, 20.0, 21.0, 20.0, 41.0, 19.0, 20.0, 20.0)
    kv = metrics.prompt_tokens * KV_BYTES_PER_TOKEN
    outliers = (Outlier(17, 41.0, ("pool cleared",)),)
    return Live(metrics, 1242, gaps, WEIGHT_BYTES + kv, achieved_gbs=122.0, outliers=outliers)


@pytest.mark.parametrize("theme", THEMES)
async def test_every_state_of_the_chat_is_drawn_as_before(
    chat: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theme: str
) -> None:
    nothing_of_this_machine(tmp_path, monkeypatch)
    clock = StillClock()
    monkeypatch.setattr("tokamac.app.chat.start.time", clock)
    monkeypatch.setattr("tokamac.app.tui.screens.chat.time", clock)
    monkeypatch.setattr(ReplyMessage, "__init__", partialmethod(ReplyMessage.__init__, clock=clock.monotonic))
    written(theme, tmp_path / "settings.toml", toured=False)
    album = Album(theme)
    async with chat("fast", size=SIZES[0]) as c:
        await c.phase(EnginePhase.IDLE)
        await album.take_at(c, "chat-tour")
        await c.app.push_screen(FigureScreen([explain(each, c.session) for each in FIGURES], FIGURES.index("gaps")))
        await album.take_at(c, "figure-unknown")
        await c.app.pop_screen()
        unheard(c, c.session.submit("Why is decode slow?"))
        unheard(c, c.session.submit("And what would help?"))
        said(c, ReplyEvent(c.session._id, PrefillProgress(1000, 1200, 1000)))
        clock.now_s += 2.0
        said(c, ReplyEvent(c.session._id, PrefillProgress(1100, 1200, 1000)))
        await album.take_at(c, "chat-reading")
        said(c, ReplyEvent(c.session._id, TextChunk(THOUGHT, "thinking")), ReplyEvent(c.session._id, live()))
        await album.take_at(c, "chat-thinking")
        clock.now_s += 1.5
        said(c, ReplyEvent(c.session._id, TextChunk(SAID)), ReplyEvent(c.session._id, live()))
        await album.take_at(c, "chat-writing")
        unheard(c, c.session.stop())
        await album.take_at(c, "chat-stopping")
        said(c, ReplyEvent(c.session._id, Finished("cancelled", SAID, live().metrics, THOUGHT)))
        unheard(c, c.session.choose(Load("org/another")))
        said(c, LoadProgress("weights", WEIGHT_BYTES // 3, WEIGHT_BYTES))
        await album.take_at(c, "chat-loading")
        c.session._working = None  # else it goes back to the one before
        said(c, Failed(None, "org/another is not whole on this disk", "Download it."))
        await album.take_at(c, "chat-failed")
    album.check()
