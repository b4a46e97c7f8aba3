"""Attachments counted in tokens: the state machine's part, the child's, and the chip over the prompt box."""

from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from tests.app.test_session import Clock
from tests.scripted_engine import SCENARIOS, ScriptedEngine
from tokamac.app.backend.child import counter
from tokamac.app.backend.outbox import Outbox
from tokamac.app.backend.protocol import AskCount, Counted, Load, Loaded, ModelInfo, Reply
from tokamac.app.chat.attachments import whole
from tokamac.app.chat.session import Session
from tokamac.app.chat.steps import Ask, EnginePhase, Step
from tokamac.app.store.values import Attachment
from tokamac.engine import Engine
from tokamac.engine.errors import EngineClosedError
from tokamac.engine.options import Sampling

Start = Callable[..., Any]
NOTES, CODE = Attachment("notes.md", "some notes"), Attachment("a.py", "x = 1", "code")


@pytest.fixture
def ready() -> Session:
    session = Session(Load("guide"), Sampling(), "", Clock())
    session.start()
    session.on_event(Loaded(ModelInfo("guide")))
    return session


def counts(steps: Sequence[Step]) -> list[AskCount]:
    return [step.request for step in steps if isinstance(step, Ask) and isinstance(step.request, AskCount)]


def test_each_attachment_is_counted_once_as_it_stands_in_the_prompt(ready: Session) -> None:
    first, second = counts(ready.draft_paused("", (NOTES, CODE)))
    assert [first.text, second.text] == [whole("", (NOTES,)), whole("", (CODE,))]
    assert ready.tokens(NOTES) is None
    ready.on_event(Counted(second.id, 9))
    ready.on_event(Counted(first.id, 12))
    assert (ready.tokens(NOTES), ready.tokens(CODE)) == (12, 9)
    assert counts(ready.draft_paused("and words", (NOTES, CODE))) == []
    ready.submit("and words", (NOTES, CODE))
    assert ready.tokens(NOTES) == 12


def test_what_is_being_counted_is_not_asked_for_again_unless_the_engine_is_another(ready: Session) -> None:
    (asked,) = counts(ready.draft_paused("", (NOTES,)))
    assert counts(ready.draft_paused("x", (NOTES,))) == []
    ready.start()
    ready.on_event(Loaded(ModelInfo("guide")))
    (again,) = counts(ready.draft_paused("x", (NOTES,)))
    ready.on_event(Counted(asked.id, 5))  # of the engine that is no more
    assert ready.tokens(NOTES) is None
    ready.on_event(Counted(again.id, 6))
    assert ready.tokens(NOTES) == 6


def test_another_model_counts_anew(ready: Session) -> None:
    (asked,) = counts(ready.draft_paused("", (NOTES,)))
    ready.on_event(Counted(asked.id, 12))
    ready.choose(Load("other"))
    assert ready.tokens(NOTES) is None
    assert counts(ready.draft_paused("", (NOTES,))) == []  # nothing can count while it loads
    ready.on_event(Loaded(ModelInfo("other")))
    assert len(counts(ready.draft_paused("", (NOTES,)))) == 1


def test_what_can_not_be_counted_is_asked_for_once(ready: Session) -> None:
    (asked,) = counts(ready.draft_paused("", (NOTES,)))
    ready.on_event(Counted(asked.id, None))
    assert ready.tokens(NOTES) is None
    assert counts(ready.draft_paused("x", (NOTES,))) == []


class Told(Outbox):
    """An outbox that keeps what is put into it."""

    def __init__(self) -> None:
        self._said: SimpleQueue[Reply] = SimpleQueue()

    def put(self, reply: Reply) -> None:
        self._said.put(reply)

    def next(self) -> Reply:
        return self._said.get(timeout=60)


class Closed(ScriptedEngine):
    """Was closed before it could count."""

    def between(self, work: Callable[[], Any]) -> Any:
        raise EngineClosedError("the engine is closed", "Load it again.")


def test_an_engine_that_was_closed_counts_nothing_and_the_next_question_is_answered() -> None:
    told = Told()
    asked = counter(told)
    asked.ask(Closed(SCENARIOS["fast"]), AskCount(1, "some text"))
    asked.ask(ScriptedEngine(SCENARIOS["fast"]), AskCount(2, "some text"))
    assert [told.next(), told.next()] == [Counted(1, None), Counted(2, 3)]


def test_where_no_engine_is_loaded_nothing_is_counted() -> None:
    told = Told()
    counter(told).ask(None, AskCount(1, "some text"))
    assert told.next() == Counted(1, None)


async def test_the_chip_tells_characters_while_nothing_can_count_then_tokens(
    chat: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.md").write_text("word " * 500)
    monkeypatch.chdir(tmp_path)
    tokens = -(-len(whole("", (Attachment("notes.md", "word " * 500, "markdown"),))) // 4)
    async with chat("slow") as c:
        await c.phase(EnginePhase.IDLE)
        await c.send("hi")
        await c.phase(EnginePhase.DECODING)
        c.app.chat.do("attach", "notes.md")
        await c.until(lambda: "+ notes.md 2,500 characters" in c.screen_text(), "the characters")
        assert c.session.engine.phase is EnginePhase.DECODING
        c.app.chat.perform(c.session.stop())
        await c.until(lambda: f"+ notes.md {tokens:,} tokens" in c.screen_text(), "the tokens")


async def test_a_real_engine_counts_what_its_tokenizer_makes_of_it(
    chat: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "Why is decode memory-bound? " * 400  # more than the context holds
    (tmp_path / "notes.md").write_text(text)
    monkeypatch.chdir(tmp_path)
    with Engine.load("guide", prompt_cache=None) as engine:
        tokens = len(engine.tokenizer.encode(whole("", (Attachment("notes.md", text.strip("\n"), "markdown"),))))
    async with chat("guide", scripted=False) as c:
        await c.phase(EnginePhase.IDLE)
        c.app.chat.do("attach", "notes.md")
        await c.until(lambda: f"+ notes.md {tokens:,} tokens" in c.screen_text(), "the tokens")
