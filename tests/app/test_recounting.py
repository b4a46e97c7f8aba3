"""An attachment that an engine could not count is counted by the next one, though it has the same model."""

from collections.abc import Sequence

from tests.app.test_session import Clock
from tokamac.app.backend.protocol import AskCount, Counted, Load, Loaded, ModelInfo
from tokamac.app.chat.session import Session
from tokamac.app.chat.steps import Ask, Step
from tokamac.app.store.values import Attachment
from tokamac.engine.options import Sampling

NOTES, CODE = Attachment("notes.md", "some notes"), Attachment("a.py", "x = 1", "code")


def asked(steps: Sequence[Step]) -> list[int]:
    return [step.request.id for step in steps if isinstance(step, Ask) and isinstance(step.request, AskCount)]


def test_what_could_not_be_counted_is_asked_for_again_once_the_model_is_loaded_again() -> None:
    session = Session(Load("guide"), Sampling(), "", Clock())
    session.start()
    session.on_event(Loaded(ModelInfo("guide")))
    notes, code = asked(session.draft_paused("", (NOTES, CODE)))
    session.on_event(Counted(notes, None))
    session.on_event(Counted(code, 7))
    assert asked(session.draft_paused("x", (NOTES, CODE))) == []
    session.start()
    session.on_event(Loaded(ModelInfo("guide")))
    assert session.tokens(CODE) == 7
    (again,) = asked(session.draft_paused("x", (NOTES, CODE)))
    session.on_event(Counted(again, 12))
    assert session.tokens(NOTES) == 12
