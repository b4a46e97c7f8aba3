"""A prompt that is sent after a stop: it is sent when the reply has ended, by whichever engine hears it."""

import pytest

from tokamac.app.backend.client import Died
from tokamac.app.backend.protocol import Cancel, Generate, Load, Loaded, ModelInfo, ReplyEvent
from tokamac.app.chat.connection import CancelWatchdog
from tokamac.app.chat.session import Session
from tokamac.app.chat.steps import Ask, DraftReturned, EnginePhase, ReplyEnded, StartEngine, Step, TurnBegun
from tokamac.engine.events import Finished, TextChunk
from tokamac.engine.metrics import Metrics
from tokamac.engine.options import Sampling

METRICS = Metrics(5, 0, 5, 3, 0.5, 0.4, 1.0, 12.5, 4.0, None, None, None, None, None, None, None, None)
CANCELLED = ReplyEvent(1, Finished("cancelled", "half", METRICS))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stopping(clock: Clock) -> Session:
    """A reply that was told to stop, and a prompt that was sent after; one that had waited came back."""
    session = Session(Load("guide"), Sampling(), "", clock)
    session.start()
    session.on_event(Loaded(ModelInfo("guide")))
    session.submit("one")
    session.on_event(ReplyEvent(1, TextChunk("half")))
    session.submit("waited")
    assert session.stop() == [Ask(Cancel(1)), DraftReturned("waited")]
    assert session.submit("and now this") == []
    assert session.engine.phase is EnginePhase.STOPPING
    return session


def kinds(steps: list[Step]) -> list[type]:
    return [type(step) for step in steps]


def sent(steps: list[Step]) -> list[str]:
    requests = [step.request for step in steps if isinstance(step, Ask)]
    return [request.messages[-1].content for request in requests if isinstance(request, Generate)]


def test_it_is_sent_when_the_reply_has_ended(stopping: Session) -> None:
    steps = stopping.on_event(CANCELLED)
    assert kinds(steps) == [ReplyEnded, TurnBegun, Ask]
    assert sent(steps) == ["and now this"]
    assert stopping.queued == []


def test_another_stop_gives_it_back(stopping: Session) -> None:
    assert stopping.stop() == [DraftReturned("and now this")]
    assert kinds(stopping.on_event(CANCELLED)) == [ReplyEnded]


def test_an_engine_that_did_not_hear_the_stop_is_not_asked(stopping: Session, clock: Clock) -> None:
    clock.now += 3600.0
    steps = stopping.check_cancel()
    assert StartEngine() in steps
    assert (sent(steps), kinds(steps).count(TurnBegun)) == ([], 0)
    assert sent(stopping.on_event(Loaded(ModelInfo("guide")))) == ["and now this"]


def test_nor_one_that_dies(stopping: Session) -> None:
    steps = stopping.on_event(Died("exit status 7", ""))
    assert DraftReturned("and now this") in steps
    assert sent(stopping.on_event(Loaded(ModelInfo("guide")))) == []


def test_a_stop_that_is_asked_twice_leaves_nothing_in_the_queue(stopping: Session, clock: Clock) -> None:
    clock.now += CancelWatchdog.INSISTING_WRITING_S + 3600.0
    steps = stopping.stop()
    assert DraftReturned("and now this") in steps
    assert StartEngine() in steps
    assert sent(stopping.on_event(Loaded(ModelInfo("guide")))) == []
