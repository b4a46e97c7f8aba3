"""The same prompt to several models, one after the other, in the chat and for scripts."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.app.commands.conftest import Run
from tests.app.plain.plain_chat import last_path, piped
from tests.scripted_engine import model_spec
from tokamac.app.backend.protocol import Cancel, Generate, Load, Loaded, ReplyEvent, RequestFailed
from tokamac.app.chat.session import Session
from tokamac.app.chat.steps import Ask, EnginePhase, Step
from tokamac.app.chat.versions import NoVariantsError, of_models
from tokamac.engine.events import Finished
from tokamac.engine.metrics import Metrics
from tokamac.engine.options import Sampling

METRICS = Metrics(5, 0, 5, 40, 0.5, 0.4, 11.0, 12.5, 4.0, None, None, None, None, None, None, None, 310_000_000)
A, B, C = (Load(name) for name in "abc")


def requests(steps: Sequence[Step]) -> list[object]:
    return [step.request for step in steps if isinstance(step, Ask)]


def loaded(session: Session) -> list[Step]:
    return session.on_event(Loaded(model_spec(session.engine.load.model)))


def done(session: Session, steps: Sequence[Step], reason: str = "stop") -> list[Step]:
    request = next(each for each in requests(steps) if isinstance(each, Generate))
    name = session.engine.load.model
    return session.on_event(ReplyEvent(request.id, Finished(reason, f"by {name}", METRICS)))  # type: ignore[arg-type]


@pytest.fixture
def session() -> Session:
    made = Session(A, Sampling(), "", lambda: 0.0)
    made.start()
    loaded(made)
    done(made, made.submit("why"))
    return made


def replies(session: Session) -> list[tuple[str, str, str]]:
    versions = session.versions
    return [(v.reply.text, v.reply.model, v.reply.ending) for v in versions.all if v.reply is not None]


def test_each_model_writes_in_turn_and_the_chats_own_comes_back(session: Session) -> None:
    steps = session.write_versions(of_models([A, B, C], session.settings))
    steps = done(session, steps)  # a was loaded
    assert requests(steps)[-1] == B
    steps = loaded(session)
    prompts = [each.messages for each in requests(steps) if isinstance(each, Generate)]
    assert prompts == [session.prompt_before(session.versions.all[0].key)] if session.versions else False
    steps = done(session, steps)
    assert requests(steps)[-1] == C
    steps = session.on_event(RequestFailed(None, "it does not fit", "Free memory."))
    assert requests(steps)[-1] == A
    assert [text for text, _, _ in replies(session)] == ["by a", "by b", ""]
    assert [ending for _, _, ending in replies(session)] == ["stop", "stop", "failed"]
    assert session.versions.all[1].state == "4.00 tok/s, 310 MB"
    assert session.versions.caution == ""
    loaded(session)
    assert session.engine.phase is EnginePhase.IDLE
    assert not session.asking
    session.keep_version(1)
    assert (session.turns[-1].reply.text, session.turns[-1].reply.model) == ("by b", "b")
    (request,) = requests(session.submit("and"))
    assert isinstance(request, Generate)
    assert request.messages[-2].content == "by b"


@pytest.mark.parametrize("loading", [True, False])
def test_a_stop_ends_all_and_brings_the_model_back(session: Session, loading: bool) -> None:
    session.write_versions(of_models([B, C], session.settings))
    assert session.engine.phase is EnginePhase.LOADING
    if loading:
        steps = session.stop()
    else:
        steps = loaded(session)
        stopped = session.stop()
        assert all(isinstance(each, Cancel) for each in requests(stopped))
        steps = done(session, steps, "cancelled")
    assert requests(steps)[-1] == A
    assert [ending for _, _, ending in replies(session)] == ["cancelled"] * 2
    loaded(session)
    assert session.engine.phase is EnginePhase.IDLE


def test_a_comparison_takes_two(session: Session) -> None:
    with pytest.raises(NoVariantsError):
        of_models([A], session.settings)


def test_the_plain_chat_compares_models_and_keeps_its_own(data: Path) -> None:
    status, out, err = piped("hi\n/compare model list entitles\n/show model\nho\n/compare\n", "fast")
    assert status == 0, err
    assert "with one model after the other" in err
    assert "Version 2 of 2 · entitles" in out
    models = [message.model for message in last_path(data) if message.role == "assistant"]
    assert models == ["list", "fast"]
    assert "you kept list 1 of 1 times, entitles 0 of 1 times." in err


def test_ask_compares_with_a_table(tokamac: Run, tiny: Path, tmp_path: Path) -> None:
    other = shutil.copytree(tiny, tmp_path / "other")
    asked = ("--temp", "0", "--max-tokens", "3")
    done = tokamac("ask", "Hello", "--compare", f"{tiny},{other}", *asked)
    assert done.status == 0, done.err
    alone = tokamac("ask", "Hello", "-m", tiny, *asked).out.strip()
    assert done.out.count(alone) == 2
    assert [line.split()[0] for line in done.out.splitlines()[-3:]] == ["model", str(tiny), str(other)]
    lines = tmp_path / "prompts.txt"
    lines.write_text("Hello\nBye\n")
    each = tokamac("ask", "--each", lines, "--compare", f"{tiny},{other}", *asked)
    results = [json.loads(line) for line in each.out.splitlines()]
    assert [(result["model"], result["index"]) for result in results] == [
        (str(m), n) for m in (tiny, other) for n in (0, 1)
    ]
    assert f"{tiny}" in each.err.splitlines()[-2]
    for flags in (
        ("--compare", "one"),
        ("--compare", f"{tiny},{other}", "-n", "2"),
        ("--each", "-", "--compare", "a/b,c/d"),
    ):
        assert tokamac("ask", *(() if "--each" in flags else ("Hello",)), *flags).status == 2
