"""A model that nobody uses gives its memory back, and comes back when the user writes; memory that was short is told."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.app.test_chat import Start
from tests.app.test_session import DIED, LOADED, Clock, done
from tokamac.app import settings
from tokamac.app.backend.protocol import Generate, Load, MemoryUse, ReplyEvent
from tokamac.app.chat.session import Session
from tokamac.app.chat.steps import Ask, DraftReturned, EndEngine, EnginePhase, Notice, StartEngine
from tokamac.app.settings import Settings
from tokamac.app.tui.screens.settings import SettingsScreen
from tokamac.app.verdict import pressure_sentence
from tokamac.engine.errors import OptionError
from tokamac.engine.events import MemoryPressure
from tokamac.engine.options import Sampling

MINUTE = 60.0
SQUEEZED = MemoryPressure(3_000_000, 64, 0, 900_000_000, 1_000_000_000)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def resting(clock: Clock) -> Session:
    """A session whose model is unloaded after five minutes, ready since now."""
    session = Session(Load("guide"), Sampling(), "", clock)
    session.idle.after_min = 5
    session.start()
    session.on_event(LOADED)
    return session


def test_an_unused_model_is_unloaded_after_its_time_and_not_before(resting: Session, clock: Clock) -> None:
    clock.now += 5 * MINUTE - 1
    assert resting.unload_if_idle() == []
    clock.now += 1
    assert resting.unload_if_idle() == [EndEngine()]
    assert resting.engine.phase is EnginePhase.UNLOADED
    assert resting.unload_if_idle() == []


def test_never_unless_the_user_says_when(resting: Session, clock: Clock) -> None:
    resting.idle.after_min = 0
    clock.now += 1e6
    assert resting.unload_if_idle() == []


@pytest.mark.parametrize(("share", "unloaded"), [(0.3, False), (0.4, True)])
def test_where_the_user_says_nothing_a_heavy_model_goes_after_half_an_hour(
    clock: Clock, share: float, unloaded: bool
) -> None:
    session = Session(Load("guide"), Sampling(), "", clock)
    session.start()
    total = 16 * 10**9
    session.on_event(replace(LOADED, memory=MemoryUse(active_bytes=round(share * total), total_bytes=total)))
    clock.now += 30 * MINUTE - 1
    assert session.unload_if_idle() == []
    clock.now += 1
    assert (session.engine.phase is EnginePhase.IDLE, session.unload_if_idle()) == (
        True,
        [EndEngine()] if unloaded else [],
    )


def test_what_loading_costs_other_programs_is_told(clock: Clock) -> None:
    session = Session(Load("guide"), Sampling(), "", clock)
    session.start()
    info = replace(LOADED.info, memory_notes=("to make room for this model, others give way",))
    told = session.on_event(replace(LOADED, info=info))
    assert told[0] == Notice("To make room for this model, others give way.", "warning")


def test_who_writes_is_not_idle(resting: Session, clock: Clock) -> None:
    clock.now += 4 * MINUTE
    resting.draft_paused("a draft")
    clock.now += 4 * MINUTE
    assert resting.unload_if_idle() == []
    clock.now += MINUTE
    assert resting.unload_if_idle() == [EndEngine()]


def test_a_reply_is_never_cut_off_by_it(resting: Session, clock: Clock) -> None:
    resting.submit("a question")
    clock.now += 60 * MINUTE
    assert resting.unload_if_idle() == []
    resting.on_event(done(1))
    assert resting.unload_if_idle() == []  # it is idle since now
    clock.now += 5 * MINUTE
    assert resting.unload_if_idle() == [EndEngine()]


def test_a_prompt_loads_the_model_again_and_the_conversation_goes_on(resting: Session, clock: Clock) -> None:
    resting.submit("first")
    resting.on_event(done(1, "one"))
    clock.now += 5 * MINUTE
    resting.unload_if_idle()
    assert resting.submit("second") == [StartEngine(), Ask(Load("guide"))]
    sent = [step.request for step in resting.on_event(LOADED) if isinstance(step, Ask)]
    assert isinstance(sent[0], Generate)
    assert [message.content for message in sent[0].messages] == ["first", "one", "second"]


def test_a_pause_in_a_draft_loads_it_too_but_an_empty_box_does_not(resting: Session, clock: Clock) -> None:
    clock.now += 5 * MINUTE
    resting.unload_if_idle()
    assert resting.draft_paused("  ") == []
    assert resting.draft_paused("I was") == [StartEngine(), Ask(Load("guide"))]
    assert resting.engine.phase is EnginePhase.LOADING


def test_while_unloaded_all_else_works(resting: Session, clock: Clock) -> None:
    resting.submit("first")
    resting.on_event(done(1, "one"))
    clock.now += 5 * MINUTE
    resting.unload_if_idle()
    assert resting.stop() == []
    assert StartEngine() in resting.regenerate()
    resting.on_event(DIED)
    assert [turn.prompt for turn in resting.turns] == ["first"]


def test_loading_that_is_stopped_gives_the_prompt_back(resting: Session, clock: Clock) -> None:
    clock.now += 5 * MINUTE
    resting.unload_if_idle()
    resting.submit("a prompt")
    assert DraftReturned("a prompt") in resting.stop()


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (SQUEEZED, ("3.00 MB of unused buffers", "64 tokens at a time", "900 MB of 1.00 GB")),
        (MemoryPressure(0, None, 0, 1, 2, fused_bytes=5_000_000), ("attention runs fused", "5.00 MB less")),
        (
            MemoryPressure(0, 128, 0, 1, None, failed=True),
            ("did not fit and is computed again", "128 tokens", "1 B are expected"),
        ),
        (
            MemoryPressure(0, None, 0, 10**9, 9 * 10**8, ended=True),
            ("the reply ends here", "would take 1.00 GB of 900 MB"),
        ),
        (
            MemoryPressure(0, None, 0, 1, 2, 4_100_000_000),
            ("swap out about 4.1 GB of other programs; ", "are expected"),
        ),
        (MemoryPressure(0, None, 5_000_000, 1, 2), ("5.00 MB of earlier prompts were let go of",)),
    ],
)
def test_what_was_done_in_one_sentence(event: MemoryPressure, words: tuple[str, ...]) -> None:
    said = pressure_sentence(event)
    assert said.startswith("memory is short: ")
    assert all(word in said for word in words), said


def test_memory_that_was_short_is_told(resting: Session) -> None:
    resting.submit("a question")
    assert resting.on_event(ReplyEvent(1, SQUEEZED)) == [Notice(pressure_sentence(SQUEEZED), "warning")]
    assert resting.on_event(ReplyEvent(7, SQUEEZED)) == []  # of a reply that is over


def test_the_setting_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    settings.save(path, Settings(unload_after_min=20))
    assert settings.load(path).settings.unload_after_min == 20


@pytest.mark.parametrize("value", ["-1", '"soon"', "1.5", "true"])
def test_a_setting_that_is_no_number_of_minutes_is_named(tmp_path: Path, value: str) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(f"unload_after_min = {value}\n")
    read = settings.load(path)
    assert "unload_after_min" in read.warnings[0]
    assert read.settings == Settings()


def test_negative_minutes_make_no_settings() -> None:
    with pytest.raises(OptionError):
        Settings(unload_after_min=-1)


async def test_the_whole_way(chat: Start, tmp_path: Path) -> None:
    """Set on the settings screen; the process is gone, the status says so; typing brings it back with the conversation."""
    async with chat() as it:
        await it.phase(EnginePhase.IDLE)
        await it.ask("one")
        it.app.chat.do("settings")
        await it.until(lambda: isinstance(it.app.screen, SettingsScreen))
        box = it.app.screen.query_one("#unload_after_min")
        box.value = "soon"  # type: ignore[attr-defined]
        it.app.screen.action_save()  # type: ignore[attr-defined]
        await it.until(lambda: "is not valid" in it.screen_text())
        box.value = "5"  # type: ignore[attr-defined]
        it.app.screen.action_save()  # type: ignore[attr-defined]
        await it.until(lambda: it.session.idle.after_min == 5)
        assert "unload_after_min = 5" in (tmp_path / "settings.toml").read_text()
        it.session.idle._seen_s -= 5 * MINUTE
        it.session.engine.phase_since -= 5 * MINUTE
        it.app.chat._rest()
        await it.until(lambda: "model unloaded; it reloads when you write" in it.screen_text())
        assert it.app.chat.bridge._process is None
        await it.type("two")
        await it.phase(EnginePhase.IDLE)  # the pause after typing loads it
        assert it.prompt.text == "two"
        it.prompt.submit()
        await it.until(lambda: len(it.session.turns) == 2 and it.session.turns[-1].reply)
