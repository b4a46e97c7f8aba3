"""Several replies to one prompt at once: what is asked for, what ends them, and which of them the chat goes on from."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.app.chat.test_recording import Desk
from tests.app.chat.test_session import DIED, LOADED, METRICS, Clock, asked, done, kinds
from tests.scripted_engine import model_spec
from tokamac.app.backend.protocol import Cancel, Generate, Load, ReplyEvent, RequestFailed
from tokamac.app.chat import figures, versions
from tokamac.app.chat.recording import CHECKPOINT_S, tree_of
from tokamac.app.chat.session import Session
from tokamac.app.chat.steps import (
    Ask,
    EnginePhase,
    Moved,
    Notice,
    Opened,
    Step,
    TurnBegun,
    VersionEnded,
    VersionGrew,
    VersionsBegun,
)
from tokamac.app.chat.versions import NoVariantsError
from tokamac.app.store.store import Store
from tokamac.engine.errors import TokamacError
from tokamac.engine.events import Finished, Live, PrefillProgress, TextChunk
from tokamac.engine.options import Sampling, TemplateOptions

WARM = Sampling(temperature=0.9)


@pytest.fixture
def answered() -> Session:
    """A chat with one reply."""
    session = Session(Load("org/model"), WARM, "Be brief.", Clock())
    session.start()
    session.on_event(LOADED)
    session.submit("one")
    session.on_event(done(1, "first"))
    return session


def write(session: Session, count: int = 3) -> list[Step]:
    return session.write_versions(versions.samples(count, session.settings, session.engine.info))


def requests(steps: Sequence[Step]) -> list[Generate]:
    return [each for each in asked(steps) if isinstance(each, Generate)]


def siblings(session: Session) -> list[str]:
    tree = session.conversation.tree
    head = tree.head
    assert head is not None
    replies = [tree.nodes[key].reply for key in tree.siblings(head)]
    return ["…" if each is None else each.text for each in replies]


def test_all_are_asked_for_at_once_with_the_same_messages(answered: Session) -> None:
    steps = write(answered)
    assert kinds(steps) == [VersionsBegun, Ask, Ask, Ask]
    made = requests(steps)
    assert [each.id for each in made] == [2, 3, 4]
    assert {each.messages for each in made} == {requests(answered_request())[0].messages}
    assert {each.sampling for each in made} == {WARM}
    assert answered.engine.phase is EnginePhase.PREFILL
    assert answered.turns[-1].reply.text == "first"


def answered_request() -> list[Step]:
    session = Session(Load("org/model"), WARM, "Be brief.", Clock())
    session.start()
    session.on_event(LOADED)
    return session.submit("one")


def test_each_grows_by_itself_and_all_are_kept_as_siblings(answered: Session) -> None:
    write(answered)
    assert kinds(answered.on_event(ReplyEvent(3, TextChunk("b")))) == [VersionGrew]
    assert answered.engine.phase is EnginePhase.DECODING
    answered.on_event(ReplyEvent(2, TextChunk("a")))
    (grew,) = answered.on_event(ReplyEvent(3, TextChunk("c", "thinking")))
    assert isinstance(grew, VersionGrew)
    assert (grew.version.so_far.text, grew.version.so_far.thinking) == ("b", "c")
    assert kinds(answered.on_event(done(3, "two"))) == [VersionEnded]
    assert kinds(answered.on_event(done(2, "one"))) == [VersionEnded]
    ended = answered.on_event(done(4, "three"))
    assert kinds(ended)[:2] == [VersionEnded, Moved]
    assert answered.engine.phase is EnginePhase.IDLE
    assert siblings(answered) == ["first", "one", "two", "three"]
    assert answered.turns[-1].reply.text == "one"
    assert answered.progress.metrics == METRICS


def at_pace(tps: float) -> Live:
    """A snapshot of a reply that is written so fast, for five seconds by now."""
    written = replace(METRICS, generated_tokens=round(5 * tps), ttft_s=1.0, total_s=6.0, decode_tps=tps)
    return Live(written, 9, (1e3 / tps,) * 2)


def test_the_aggregate_rate_is_the_sum_of_those_that_are_written(answered: Session) -> None:
    write(answered, 2)
    assert answered.versions.tps is None
    answered.on_event(ReplyEvent(2, at_pace(10.0)))
    answered.on_event(ReplyEvent(3, at_pace(20.0)))
    assert answered.versions.tps == pytest.approx(30)
    assert answered.progress.live.gaps_ms == (100.0, 100.0)
    answered.on_event(done(2))
    assert answered.versions.tps == pytest.approx(20)
    assert answered.progress.live.gaps_ms == (50.0, 50.0)


def test_stop_ends_all_and_keeps_what_they_said(answered: Session) -> None:
    write(answered)
    answered.on_event(ReplyEvent(3, TextChunk("half")))
    assert asked(answered.stop()) == [Cancel(2), Cancel(3), Cancel(4)]
    for id in (2, 3, 4):
        answered.on_event(done(id, "half" if id == 3 else "", "cancelled"))
    assert siblings(answered) == ["first", "", "half", ""]
    assert answered.engine.phase is EnginePhase.IDLE


def test_one_that_fails_fails_alone(answered: Session) -> None:
    write(answered)
    assert kinds(answered.on_event(RequestFailed(3, "no memory"))) == [VersionEnded]
    answered.on_event(done(2, "one"))
    answered.on_event(done(4, "three"))
    assert [each.so_far.ending for each in answered.versions.all] == ["stop", "failed", "stop"]
    assert answered.versions.all[1].so_far.reason == "No memory."


def test_where_the_first_failed_the_chat_goes_on_from_a_whole_one(answered: Session) -> None:
    write(answered, 2)
    answered.on_event(RequestFailed(2, "no memory"))
    answered.on_event(done(3, "two"))
    assert answered.turns[-1].reply.text == "two"


def test_a_dead_engine_loses_what_was_not_said_and_nothing_else(answered: Session) -> None:
    write(answered)
    answered.on_event(ReplyEvent(4, TextChunk("begun")))
    answered.on_event(done(2, "whole"))
    steps = answered.on_event(DIED)
    assert answered.engine.phase is EnginePhase.LOADING
    assert sum(isinstance(step, VersionEnded) for step in steps) == 2
    assert not requests(steps)
    assert [each.so_far.ending for each in answered.versions.all] == ["stop", "lost", "lost"]
    assert siblings(answered) == ["first", "whole", "", "begun"]


def test_taking_one_stops_the_others(answered: Session) -> None:
    write(answered)
    assert answered.keep_version(1) == []  # it is still written
    answered.on_event(ReplyEvent(2, TextChunk("half")))
    answered.on_event(done(3, "two"))
    assert asked(answered.keep_version(1)) == [Cancel(2), Cancel(4)]
    answered.on_event(done(2, "half", "cancelled"))
    answered.on_event(done(4, "", "cancelled"))
    assert answered.turns[-1].reply.text == "two"
    assert kinds(answered.keep_version(0))[:1] == [Moved]  # later, too
    assert answered.turns[-1].reply.text == "half"


def test_a_prompt_sent_meanwhile_follows_the_version_that_is_kept(answered: Session) -> None:
    write(answered, 2)
    assert answered.submit("next") == []
    answered.on_event(done(2, "one"))
    steps = answered.on_event(done(3, "two"))
    assert TurnBegun in kinds(steps)
    (request,) = requests(steps)
    assert [each.content for each in request.messages] == ["Be brief.", "one", "one", "next"]


def test_another_chat_may_be_opened_meanwhile(answered: Session) -> None:
    write(answered, 2)
    before = answered.conversation
    answered.new_chat()
    assert not answered.replying
    assert answered.elsewhere is before
    answered.on_event(done(2, "one"))
    assert kinds(answered.show(before)) == [Opened, VersionsBegun]
    assert Moved in kinds(answered.on_event(done(3, "two")))


def test_versions_of_an_earlier_reply_leave_what_followed_on_its_own_path(answered: Session) -> None:
    first = answered.turns[0].reply_key
    answered.submit("two")
    answered.on_event(done(2, "second"))
    steps = answered.write_versions(versions.samples(2, answered.settings, None), first)
    assert [each.content for each in requests(steps)[0].messages] == ["Be brief.", "one"]
    answered.on_event(done(3, "a"))
    answered.on_event(done(4, "b"))
    assert [turn.reply.text for turn in answered.turns if turn.reply] == ["a"]
    answered.show_path(first)
    assert [turn.reply.text for turn in answered.turns if turn.reply] == ["first", "second"]


def test_nothing_is_written_where_nothing_was_said_or_no_reply_can_begin(answered: Session) -> None:
    empty = Session(Load("org/model"), WARM, "", Clock())
    assert kinds(write(empty, 2)) == [Notice]
    write(answered)
    assert kinds(write(answered)) == [Notice]


def test_samples_have_seeds_of_their_own_and_greedy_ones_are_refused(answered: Session) -> None:
    seeded = replace(answered.settings, sampling=Sampling(temperature=1.0, seed=7))
    assert [each.settings.sampling.seed for each in versions.samples(3, seeded, None)] == [7, 8, 9]
    greedy = replace(answered.settings, sampling=Sampling(temperature=0.0))
    with pytest.raises(NoVariantsError, match="all be the same"):
        versions.samples(3, greedy, None)
    with pytest.raises(NoVariantsError, match="all be the same"):  # a model may suggest it
        versions.samples(
            2, replace(greedy, sampling=Sampling()), model_spec("m", recommended=Sampling(temperature=0.0))
        )


def test_each_value_of_a_setting_is_a_variant(answered: Session) -> None:
    asked_for = answered.settings
    by_temperature = versions.compared("temperature 0 0.7 0.7 1.5", asked_for, None)
    assert [each.name for each in by_temperature] == ["temperature 0", "temperature 0.7", "temperature 1.5"]
    assert [each.settings.sampling.temperature for each in by_temperature] == [0.0, 0.7, 1.5]
    assert {each.settings.system for each in by_temperature} == {"Be brief."}
    by_bits = versions.compared("kv-bits 16 8,4", asked_for, None)
    assert [(each.name, each.kv_bits) for each in by_bits] == [("KV 16 bits", (16, 16)), ("KV 8,4 bits", (8, 4))]
    by_thinking = versions.compared("thinking", asked_for, model_spec("m", thinks=True, thinking_modes=("on", "off")))
    assert [each.value for each in (*by_bits, *by_thinking)] == ["16", "8,4", "on", "off"]
    assert [each.settings.template for each in by_thinking] == [TemplateOptions("on"), TemplateOptions("off")]
    assert [each.settings.sampling.top_k for each in versions.compared("TOP_K 1 40", asked_for, None)] == [1, 40]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("temperature 1", "2 to 8"), ("temperature 1 2 3 4 5 6 7 8 9", "2 to 8"),
        ("temperature warm cold", "Temperature"), ("temperature 1 -3", "temperature"), ("kv-bits 16 7", "7"),
        ("order a b", "can't be compared"), ("\x1b[2J a b", "can't be compared"), ("thinking on off", "no switch"),
    ],
)  # fmt: skip
def test_what_can_not_be_compared_is_refused(answered: Session, text: str, why: str) -> None:
    with pytest.raises(TokamacError, match=why) as refused:
        versions.compared(text, answered.settings, model_spec("m"))
    assert "\x1b" not in refused.value.one_line()


def test_the_argument_of_again() -> None:
    assert versions.wanted("") is versions.wanted("1") is None
    assert versions.wanted("4") == 4
    for wrong in ("9", "0", "four"):
        with pytest.raises(NoVariantsError):
            versions.wanted(wrong)


def test_how_they_are_doing_is_said_in_a_word_each_and_in_a_line(answered: Session) -> None:
    answered.write_versions(versions.compared("temperature 0 0.7", answered.settings, None))
    shown = answered.versions
    first, second = shown.all
    assert (first.state, second.state) == ("waiting", "waiting")
    assert shown.summary == "2 versions · reading the prompt"
    answered.on_event(ReplyEvent(2, PrefillProgress(40, 100, 0)))
    assert first.state == "reading 40%"
    answered.on_event(ReplyEvent(2, PrefillProgress(100, 100, 0)))
    answered.on_event(ReplyEvent(2, TextChunk("a")))
    assert first.state == "writing"
    assert (shown.summary, shown.at_once) == ("2 versions · writing · 1 not begun", "2 at once")
    answered.on_event(ReplyEvent(2, at_pace(10.0)))
    answered.on_event(ReplyEvent(3, at_pace(20.0)))
    answered.on_event(ReplyEvent(3, TextChunk("b")))
    assert (first.state, second.state) == ("10.0 tok/s", "20.0 tok/s")
    assert shown.summary == "2 versions · 30.0 tok/s together"
    assert answered.at_once == "2 at once · 30.0 tok/s together"
    assert figures.verdict(answered) == (answered.at_once,)
    answered.on_event(RequestFailed(2, "no memory"))
    assert first.state == "failed"
    assert (shown.summary, shown.at_once) == ("2 versions · 1 done · 20.0 tok/s together", "")
    answered.on_event(done(3, "two"))
    assert second.state == "done", "it was too short for a rate"
    assert shown.summary == "2 versions · 6.0 s"
    assert [shown.heading(each) for each in shown.all] == [
        "Version 1 of 2 · temperature 0",
        "Version 2 of 2 · temperature 0.7",
    ]
    assert second.so_far.compared == "temperature 0.7"


def test_the_panel_says_that_a_reply_is_written_beside_others(answered: Session) -> None:
    answered.submit("two")
    answered.on_event(ReplyEvent(2, TextChunk("a")))
    answered.on_event(ReplyEvent(2, Live(replace(METRICS, batch_width=2.8), 9, (100.0,))))
    assert figures.verdict(answered) == ("3 at once",)
    answered.on_event(ReplyEvent(2, Live(METRICS, 9, (100.0,))))
    assert figures.verdict(answered) == ("Writing …",)
    answered.on_event(done(2))
    assert answered.at_once == ""


# In the store -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    desk = Desk(tmp_path)
    desk.session.sampling = WARM
    desk.say("one")
    return desk


def stored(desk: Desk) -> list[tuple[str, str]]:
    """The replies in the store, with their states."""
    messages = desk.store.archive(desk.recording.chat or "").messages
    return [(each.text, each.state) for each in messages if each.role == "assistant"]


def test_each_version_is_stored_with_what_it_was_asked_for_with(desk: Desk) -> None:
    desk.perform(desk.session.write_versions(versions.compared("kv-bits 16 4", desk.session.settings, None)))
    for id in (3, 2):
        desk.perform(desk.session.on_event(done(id, f"version {id}")))
    assert stored(desk) == [("re: one", "complete"), ("version 2", "complete"), ("version 3", "complete")]
    made = desk.store.archive(desk.recording.chat or "").messages
    assert [each.settings["kv"]["key_bits"] for each in made if each.text.startswith("version")] == [16, 4]
    read_again = [node.reply.compared for node in tree_of(made, None).nodes.values() if node.reply is not None]
    assert read_again == ["", "KV 16 bits", "KV 4 bits"]
    assert desk.texts()[-1] == "version 2"


def test_the_one_that_is_kept_is_read_again_though_another_chat_was_open(desk: Desk) -> None:
    chat = desk.recording.chat or ""
    desk.perform(write(desk.session, 3))
    desk.perform(desk.session.new_chat())
    for id in (4, 3, 2):
        desk.perform(desk.session.on_event(done(id, f"version {id}")))
    assert desk.texts(chat)[-1] == "version 2"


def test_what_is_said_so_far_is_stored_now_and_then(desk: Desk) -> None:
    desk.perform(write(desk.session, 2))
    desk.perform(desk.session.on_event(ReplyEvent(2, TextChunk("so"))))
    desk.clock.now += CHECKPOINT_S
    desk.perform(desk.session.on_event(ReplyEvent(3, TextChunk("far"))))
    assert stored(desk)[1:] == [("so", "partial"), ("far", "partial")]


def test_quitting_stores_all_of_them(desk: Desk) -> None:
    desk.perform(write(desk.session, 2))
    desk.perform(desk.session.on_event(ReplyEvent(2, PrefillProgress(1, 2, 0))))
    desk.perform(desk.session.on_event(ReplyEvent(3, TextChunk("half"))))
    desk.recording.close("")
    with Store.open(desk.file) as desk.store:
        assert stored(desk)[1:] == [("", "stopped"), ("half", "stopped")]


def test_a_store_that_failed_gets_all_of_them_later(desk: Desk) -> None:
    desk.fail(failing=True)
    desk.perform(write(desk.session, 2))
    desk.perform(desk.session.on_event(done(2, "one")))
    desk.fail(failing=False)
    desk.perform(desk.session.on_event(ReplyEvent(3, Finished("stop", "two", METRICS))))
    assert [text for text, _ in stored(desk)] == ["re: one", "one", "two"]
