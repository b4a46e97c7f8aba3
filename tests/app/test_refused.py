"""What is said, in the words of where the engine is, to a wish that it can't fulfil now."""

from collections.abc import Callable

import pytest

from tokamac.app.backend.protocol import Failed, Load, Loaded, ModelInfo, ReplyEvent
from tokamac.app.chat.actions import keymap
from tokamac.app.chat.session import Session
from tokamac.app.chat.steps import EnginePhase, Notice, Step
from tokamac.engine.events import Finished
from tokamac.engine.metrics import Metrics
from tokamac.engine.options import Sampling

METRICS = Metrics(5, 0, 5, 3, 0.5, 0.4, 1.0, 12.5, 4.0, None, None, None, None, None, None, None, None)


@pytest.fixture
def talked() -> Session:
    """One turn, and a model that is loaded; other keys than the registry's."""
    session = Session(Load("guide"), Sampling(), "", lambda: 1.0)
    session.keymap = keymap({"choose_model": ("ctrl+y",), "stop": ("f9",)})
    session.start()
    session.on_event(Loaded(ModelInfo("guide")))
    session.submit("one")
    session.on_event(ReplyEvent(1, Finished("length", "answer", METRICS)))
    assert session.engine.phase is EnginePhase.IDLE
    return session


COMMANDS: list[Callable[[Session], list[Step]]] = [
    Session.regenerate,
    lambda session: session.continue_reply(2),
    lambda session: session.edit(1, "other"),
]


def told(steps: list[Step]) -> str:
    (notice,) = steps
    assert isinstance(notice, Notice)
    return notice.text


@pytest.mark.parametrize("wish", COMMANDS)
def test_while_the_model_loads(talked: Session, wish: Callable[[Session], list[Step]]) -> None:
    talked.choose(Load("other"))
    assert talked.engine.phase is EnginePhase.LOADING
    said = told(wish(talked))
    assert "The model is still loading" in said
    assert "F9" not in said  # which would end the loading


@pytest.mark.parametrize("wish", COMMANDS)
def test_where_no_model_is_loaded(talked: Session, wish: Callable[[Session], list[Step]]) -> None:
    talked.choose(Load("other"))
    talked.stop()
    assert talked.engine.phase is EnginePhase.FAILED
    said = told(wish(talked))
    assert "No model is loaded" in said
    assert "Ctrl+Y" in said
    assert "F9" not in said


@pytest.mark.parametrize("wish", COMMANDS)
def test_while_a_reply_is_written(talked: Session, wish: Callable[[Session], list[Step]]) -> None:
    talked.submit("two")
    assert told(wish(talked)) == "The engine is not ready: wait, or stop the reply with F9."


def test_a_model_that_fails_to_load_is_no_reason_to_wait(talked: Session) -> None:
    talked.choose(Load("guide"))
    talked.on_event(Failed(None, "no such model", "Check it."))
    assert "No model is loaded" in told(talked.regenerate())
