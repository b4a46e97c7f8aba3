"""The state machine of a chat alone: what it asks for and tells, for every way a chat can go."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.scripted_engine import model_spec
from tokamac.app.backend.client import Died, Garbled
from tokamac.app.backend.protocol import (
    AskCount,
    AskPrice,
    Cancel,
    Counted,
    Generate,
    Heartbeat,
    KeepGoing,
    Load,
    Loaded,
    ReplyEvent,
    RequestFailed,
)
from tokamac.app.chat import figures
from tokamac.app.chat.actions import keymap
from tokamac.app.chat.attachments import Draft
from tokamac.app.chat.connection import CancelWatchdog
from tokamac.app.chat.conversation import Reply, Tree, Turn
from tokamac.app.chat.session import Session
from tokamac.app.chat.steps import (
    Ask,
    DraftReturned,
    Elsewhere,
    EndEngine,
    EnginePhase,
    Moved,
    Notice,
    Opened,
    PromptFailed,
    PromptRefused,
    ReplyEnded,
    ReplyGrew,
    Resumed,
    StartEngine,
    Step,
    TurnBegun,
)
from tokamac.app.store.values import Attachment
from tokamac.engine.events import (
    Finished,
    LoadProgress,
    LoopFound,
    Message,
    ModelNote,
    PrefillProgress,
    TextChunk,
    Truncated,
)
from tokamac.engine.metrics import Metrics
from tokamac.engine.options import KVSpec, Sampling

METRICS = Metrics(5, 0, 5, 3, 0.5, 0.4, 1.0, 12.5, 4.0, None, None, None, None, None, None, None, None)
LOADED = Loaded(model_spec("guide"))

DIED = Died("exit status 7", "last words")
NOTES = Attachment("notes.md", "keys and values " * 20, "markdown")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def loaded_session(clock: Callable[[], float] | None = None, *, system: str = "", **spec: Any) -> Session:
    """Return a session of a chat whose model, of which ``spec`` is known, is loaded."""
    session = Session(Load("guide"), Sampling(), system, clock or Clock())
    session.start()
    session.on_event(Loaded(model_spec("guide", **spec)))
    return session


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ready(clock: Clock) -> Session:
    return loaded_session(clock)


def done(request: int, text: str = "answer", reason: str = "stop") -> ReplyEvent:
    return ReplyEvent(request, Finished(reason, text, METRICS))  # type: ignore[arg-type]


def kinds(steps: Sequence[Step]) -> list[type]:
    return [type(step) for step in steps]


def asked(steps: Sequence[Step]) -> list[object]:
    return [step.request for step in steps if isinstance(step, Ask)]


def test_start_starts_the_engine_and_loads(clock: Clock) -> None:
    session = Session(Load("guide"), Sampling(), "", clock)
    assert session.start() == [StartEngine(), Ask(Load("guide"))]
    session.on_event(LoadProgress("weights", 1, 2))
    assert session.engine.loading == LoadProgress("weights", 1, 2)
    assert session.engine.busy


def test_a_reply_from_send_to_end(ready: Session) -> None:
    assert kinds(ready.submit("hi")) == [TurnBegun, Ask]
    assert ready.engine.phase is EnginePhase.PREFILL
    ready.on_event(ReplyEvent(1, PrefillProgress(2, 5, 0)))
    assert ready.on_event(ReplyEvent(1, TextChunk("he"))) == [ReplyGrew("he", "answer")]
    assert ready.engine.phase is EnginePhase.DECODING
    (ended,) = ready.on_event(done(1, "hello"))
    assert ended == ReplyEnded(Reply("hello", metrics=METRICS, model="guide"))
    assert ready.engine.phase is EnginePhase.IDLE
    assert ready.progress.metrics == METRICS


def test_every_send_carries_the_whole_conversation(ready: Session) -> None:
    ready.system = "Be brief."
    ready.submit("one")
    ready.on_event(done(1, "1"))
    (request,) = asked(ready.submit("two"))
    assert isinstance(request, Generate)
    assert request.messages == (
        Message("system", "Be brief."),
        Message("user", "one"),
        Message("assistant", "1"),
        Message("user", "two"),
    )


def test_a_prompt_sent_while_loading_waits(clock: Clock) -> None:
    session = Session(Load("guide"), Sampling(), "", clock)
    session.start()
    assert session.submit("early") == []
    assert kinds(session.on_event(LOADED)) == [TurnBegun, Ask]


def test_prompts_wait_while_a_reply_runs_and_are_sent_in_their_order(ready: Session) -> None:
    ready.submit("one")
    assert ready.submit("two") == ready.submit("three", (NOTES,)) == []
    assert kinds(ready.on_event(done(1))) == [ReplyEnded, TurnBegun, Ask]
    assert kinds(ready.on_event(done(2))) == [ReplyEnded, TurnBegun, Ask]
    assert kinds(ready.on_event(done(3))) == [ReplyEnded]
    assert [(turn.prompt, turn.attachments) for turn in ready.turns] == [("one", ()), ("two", ()), ("three", (NOTES,))]


def test_the_prompt_that_waits_last_is_taken_back_first(ready: Session) -> None:
    ready.submit("one")
    ready.submit("two")
    ready.submit("three", (NOTES,))
    assert ready.take_back() == [DraftReturned("three", (NOTES,))]
    assert ready.take_back() == [DraftReturned("two")]
    assert ready.take_back() == []


def test_a_stop_gives_all_that_waits_back_as_one(ready: Session) -> None:
    ready.submit("one")
    ready.submit("two", (NOTES,))
    ready.submit("three")
    assert ready.stop() == [Ask(Cancel(1)), DraftReturned("two\n\nthree", (NOTES,))]
    assert ready.queued == []


def test_what_is_attached_stands_before_the_words_and_is_priced_as_it_is_sent(ready: Session) -> None:
    count, price = asked(ready.draft_paused("What is this? ", (NOTES,)))
    (send,) = asked(ready.submit("What is this?", (NOTES,)))
    assert isinstance(count, AskCount)
    assert isinstance(price, AskPrice)
    assert isinstance(send, Generate)
    assert price.messages == send.messages
    assert send.messages[-1].content == f"File notes.md:\n```\n{NOTES.text}\n```\n\nWhat is this?"
    assert ready.turns[-1].prompt == "What is this?"


def test_an_edit_has_attachments_of_its_own(ready: Session) -> None:
    ready.submit("one", (NOTES,))
    ready.on_event(done(1))
    (send,) = asked(ready.edit(ready.turns[0].key, "one, alone"))
    assert isinstance(send, Generate)
    assert [message.content for message in send.messages] == ["one, alone"]
    tree = ready.conversation.tree
    assert [tree.nodes[key].attachments for key in tree.children(None)] == [(NOTES,), ()]


def test_stop_keeps_the_text_and_gives_the_waiting_prompt_back(ready: Session) -> None:
    ready.submit("one")
    ready.submit("two")
    ready.on_event(ReplyEvent(1, TextChunk("par")))
    assert ready.stop() == [Ask(Cancel(1)), DraftReturned("two")]
    assert ready.engine.phase is EnginePhase.STOPPING
    ready.on_event(ReplyEvent(1, TextChunk("tial")))
    (ended,) = ready.on_event(done(1, "partial", "cancelled"))
    assert ended == ReplyEnded(Reply("partial", ending="cancelled", metrics=METRICS, model="guide"))


def test_a_deaf_engine_is_replaced(ready: Session, clock: Clock) -> None:
    ready.submit("one")
    ready.on_event(ReplyEvent(1, TextChunk("par")))
    ready.stop()
    assert ready.check_cancel() == []
    clock.now += CancelWatchdog.WRITING_S + 1
    assert kinds(ready.check_cancel()) == [ReplyEnded, Notice, StartEngine, Ask]
    assert ready.turns[-1].reply == Reply("par", ending="cancelled", model="guide")


def test_a_second_esc_is_patient_for_a_moment(ready: Session, clock: Clock) -> None:
    ready.submit("one")
    ready.on_event(ReplyEvent(1, TextChunk("par")))
    ready.stop()
    assert ready.stop() == []
    clock.now += CancelWatchdog.INSISTING_WRITING_S + 0.1
    assert StartEngine() in ready.stop()


def wait(session: Session, clock: Clock, seconds: float, *, beats: bool = True) -> list[Step]:
    """Let seconds pass, in each of which the engine's pulse beats; return what came of it."""
    steps: list[Step] = []
    until = clock.now + seconds
    while clock.now < until:
        clock.now = min(clock.now + 1, until)
        steps += session.on_event(Heartbeat()) if beats else []
        steps += session.check_cancel()
    return steps


def test_an_engine_that_reads_a_long_piece_of_a_prompt_is_not_killed_for_it(ready: Session, clock: Clock) -> None:
    ready.submit("one")
    ready.on_event(ReplyEvent(1, PrefillProgress(0, 5000, 0)))
    ready.stop()
    assert wait(ready, clock, CancelWatchdog.WRITING_S + 3) == []
    (told,) = ready.stop()
    assert isinstance(told, Notice)
    assert told.text == "Stopping: the engine is still computing a chunk of the prompt."
    assert kinds(ready.on_event(done(1, "", "cancelled"))) == [ReplyEnded]
    assert ready.engine.phase is EnginePhase.IDLE


def test_an_engine_may_take_some_times_as_long_as_its_pieces_took(ready: Session, clock: Clock) -> None:
    ready.submit("one")
    for read in (0, 512, 1024):
        ready.on_event(ReplyEvent(1, PrefillProgress(read, 5000, 0)))
        clock.now += 20
    ready.stop()
    assert wait(ready, clock, 75) == []
    assert StartEngine() in wait(ready, clock, 10)


def test_an_engine_that_never_stops_reading_is_replaced_though_its_pulse_beats(ready: Session, clock: Clock) -> None:
    ready.submit("one")
    ready.stop()
    assert wait(ready, clock, CancelWatchdog.READING_S) == []
    assert StartEngine() in wait(ready, clock, 2)


def test_who_insists_waits_less_for_an_engine_that_reads(ready: Session, clock: Clock) -> None:
    ready.submit("one")
    ready.stop()
    assert wait(ready, clock, CancelWatchdog.INSISTING_READING_S + 1) == []
    assert StartEngine() in ready.stop()


def test_an_engine_without_a_pulse_is_soon_deaf_while_it_reads(ready: Session, clock: Clock) -> None:
    ready.submit("one")
    ready.on_event(ReplyEvent(1, PrefillProgress(0, 5000, 0)))
    ready.stop()
    assert StartEngine() in wait(ready, clock, CancelWatchdog.WRITING_S + 1, beats=False)


def test_a_piece_of_an_earlier_prompt_gives_no_time_to_a_later_reply(ready: Session, clock: Clock) -> None:
    ready.submit("one")
    for read in (0, 512):
        ready.on_event(ReplyEvent(1, PrefillProgress(read, 5000, 0)))
        clock.now += 60
    ready.on_event(done(1))
    ready.submit("two")
    ready.on_event(ReplyEvent(2, TextChunk("a")))
    ready.stop()
    assert StartEngine() in wait(ready, clock, CancelWatchdog.WRITING_S + 1)


def test_esc_while_loading_ends_the_process(clock: Clock) -> None:
    session = Session(Load("big"), Sampling(), "", clock)
    session.start()
    session.submit("early")
    assert kinds(session.stop()) == [EndEngine, DraftReturned, Notice]
    assert session.engine.phase is EnginePhase.FAILED
    assert kinds(session.submit("again")) == [StartEngine, Ask]


def test_death_mid_reply_keeps_the_text_restarts_once_then_on_the_next_send(ready: Session) -> None:
    ready.submit("one")
    ready.on_event(ReplyEvent(1, TextChunk("half")))
    assert kinds(ready.on_event(DIED)) == [ReplyEnded, Notice, StartEngine, Ask]
    assert ready.turns == [Turn("one", Reply("half", ending="lost", model="guide"), 1, 2)]
    ready.on_event(LOADED)
    ready.submit("two")
    steps = ready.on_event(DIED)
    assert kinds(steps) == [ReplyEnded, Notice]
    assert "last words" in ready.engine.problem
    assert kinds(ready.submit("three")) == [StartEngine, Ask]
    assert kinds(ready.on_event(LOADED)) == [TurnBegun, Ask]
    assert [turn.prompt for turn in ready.turns] == ["one", "two", "three"]


def test_death_while_idle_restarts(ready: Session) -> None:
    assert kinds(ready.on_event(DIED)) == [Notice, StartEngine, Ask]


def test_a_process_without_a_model_that_dies_loads_none(ready: Session) -> None:
    ready.unload()
    assert kinds(ready.on_event(DIED)) == [Notice]
    assert ready.engine.phase is EnginePhase.UNLOADED
    assert kinds(ready.submit("one")) == [StartEngine, Ask]


def test_a_reply_forgives_an_earlier_death(ready: Session) -> None:
    ready.on_event(DIED)
    ready.on_event(LOADED)
    ready.submit("one")
    ready.on_event(done(1))
    assert StartEngine() in ready.on_event(DIED)


def test_death_while_loading_gives_the_waiting_prompt_back_at_last(clock: Clock) -> None:
    session = Session(Load("guide"), Sampling(), "", clock)
    session.start()
    session.submit("early")
    assert StartEngine() in session.on_event(DIED)
    assert DraftReturned("early") in session.on_event(DIED)
    assert session.engine.phase is EnginePhase.FAILED


def test_a_model_that_fails_to_load_gives_way_to_the_one_before(ready: Session) -> None:
    ready.choose(Load("missing"))
    steps = ready.on_event(RequestFailed(None, "no such model", "Check it."))
    assert asked(steps) == [Load("guide")]
    assert ready.engine.phase is EnginePhase.LOADING


def test_the_first_model_that_fails_to_load_is_a_problem(clock: Clock) -> None:
    session = Session(Load("missing"), Sampling(), "", clock)
    session.start()
    assert kinds(session.on_event(RequestFailed(None, "no such model", "Check it."))) == [Notice]
    assert session.engine.problem == "no such model. Check it."
    assert asked(session.submit("hi")) == [Load("missing")]


def test_a_failed_reply_is_told_and_the_chat_goes_on(ready: Session) -> None:
    ready.submit("long")
    assert kinds(ready.on_event(RequestFailed(1, "too long", ""))) == [ReplyEnded, PromptFailed]
    assert kinds(ready.submit("short")) == [TurnBegun, Ask]


def test_a_reply_that_repeats_itself_is_told_and_can_be_let_go_on(ready: Session) -> None:
    ready.loop_grace = 100
    (request,) = [each for each in asked(ready.submit("hi")) if isinstance(each, Generate)]
    assert request.sampling.loop_grace == 100
    assert kinds(ready.keep_going()) == [Notice]
    found = LoopFound(3, 612)
    ready.on_event(ReplyEvent(1, TextChunk("Your universe.")))
    ready.on_event(ReplyEvent(1, found))
    assert ready.loop == found
    assert ready.keep_going() == [Ask(KeepGoing(1))]
    assert ready.loop is None
    for told in (found, LoopFound(0, None)):  # another, which ends by itself
        ready.on_event(ReplyEvent(1, told))
    assert ready.loop is None
    (ended,) = ready.on_event(done(1, reason="loop"))
    assert isinstance(ended, ReplyEnded)
    assert ended.reply.ending == "loop"


@pytest.mark.parametrize(
    ("said", "asked_for", "most"), [(4000, None, 512), (400, None, 100), (8, None, 64), (8, 20, 20)]
)
def test_a_reply_is_written_again_shorter(ready: Session, said: int, asked_for: int | None, most: int) -> None:
    ready.sampling = Sampling(temperature=0.3, min_tokens=200)
    ready.submit("hi")
    ready.on_event(ReplyEvent(1, Finished("length", "text", replace(METRICS, generated_tokens=said), cut_by="context")))
    assert ready.turns[-1].reply.ending == "full"
    (request,) = [each for each in asked(ready.shorten(asked_for)) if isinstance(each, Generate)]
    assert request.sampling == Sampling(temperature=0.3, max_tokens=most)
    assert [each.content for each in request.messages] == ["hi"]


def test_another_model_cancels_a_running_reply_and_ignores_what_is_late(ready: Session) -> None:
    ready.submit("one")
    ready.on_event(ReplyEvent(1, TextChunk("par")))
    assert Cancel(1) in asked(ready.choose(Load("other", KVSpec(8, 8))))
    assert ready.on_event(ReplyEvent(1, TextChunk("late"))) == []
    assert ready.on_event(done(1)) == []


def test_a_reply_goes_on_where_its_chat_is_left_and_is_live_when_it_is_shown_again(ready: Session) -> None:
    ready.submit("one")
    ready.on_event(ReplyEvent(1, TextChunk("par")))
    first = ready.conversation
    assert ready.new_chat() == [Opened((), new=True)]
    assert (ready.replying, ready.elsewhere, ready.turns) == (False, first, [])
    assert ready.on_event(ReplyEvent(1, TextChunk("tial"))) == [Elsewhere(first, ReplyGrew("tial", "answer"))]
    second = ready.conversation
    opened, resumed = ready.show(first)
    assert isinstance(opened, Opened)
    assert resumed == Resumed(Turn("one", Reply("partial"), 1, 2))
    assert ready.on_event(ReplyEvent(1, TextChunk("!"))) == [ReplyGrew("!", "answer")]
    ready.show(second)
    (ended,) = ready.on_event(done(1, "partial!"))
    assert ended == Elsewhere(first, ReplyEnded(Reply("partial!", metrics=METRICS, model="guide")))
    assert first.turns[0].reply is not None
    assert (ready.progress.metrics, first.progress.metrics) == (None, METRICS)


def test_prompts_of_two_chats_wait_in_one_queue_each_with_its_own_settings(ready: Session) -> None:
    ready.system = "first"
    ready.submit("one")
    ready.submit("two")
    first = ready.conversation
    ready.new_chat()
    ready.system = "second"
    assert ready.submit("three") == []
    assert (ready.queued, ready.waiting(first)) == ([Draft("three")], [Draft("two")])
    ended, begun, ask = ready.on_event(done(1))
    assert [step.conversation for step in (ended, begun) if isinstance(step, Elsewhere)] == [first, first]
    assert isinstance(ask, Ask)
    assert isinstance(ask.request, Generate)
    assert [message.content for message in ask.request.messages] == ["first", "one", "answer", "two"]
    _, begun, ask = ready.on_event(done(2))
    assert isinstance(begun, TurnBegun)
    assert isinstance(ask, Ask)
    assert isinstance(ask.request, Generate)
    assert [message.content for message in ask.request.messages] == ["second", "three"]


def test_a_stop_from_elsewhere_lets_what_waits_here_follow(ready: Session) -> None:
    ready.submit("one")
    ready.new_chat()
    ready.submit("two")
    assert ready.stop() == [Ask(Cancel(1))]
    assert kinds(ready.on_event(done(1, "", "cancelled"))) == [Elsewhere, TurnBegun, Ask]


def test_an_engine_that_dies_leaves_what_waits_elsewhere_a_draft_there(ready: Session) -> None:
    ready.submit("one")
    ready.submit("two")
    first = ready.conversation
    ready.new_chat()
    ready.submit("three")
    steps = ready.on_event(DIED)
    assert kinds(steps)[:4] == [Elsewhere, DraftReturned, Elsewhere, Notice]
    assert Elsewhere(first, DraftReturned("two")) in steps
    assert steps[1] == DraftReturned("three")
    assert ready.waiting(first) == []


def test_a_prompt_over_the_context_is_counted_refused_and_named(clock: Clock) -> None:
    session = loaded_session(clock, capacity=100)
    big = Attachment("big.txt", "x" * 4000)
    counts = session.submit("why?", (big,))
    assert [type(each) for each in asked(counts)] == [AskCount, AskCount]
    assert session.on_event(Counted(1, 1000)) == []
    (refused,) = session.on_event(Counted(2, 2))
    assert isinstance(refused, PromptRefused)
    assert refused.draft == Draft("why?", (big,))
    assert refused.why.startswith("big.txt alone is 1,000 tokens; the context holds 100.")
    assert (session.turns, session.queued) == ([], [])
    assert kinds(session.submit("why?", (big,))) == [PromptRefused]  # it is known now
    assert session.overfull(Draft("other", (big,)))
    assert session.overfull(Draft("other")) == ""
    session.engine.load = replace(session.engine.load, kv=KVSpec(on_full="truncate-middle"))
    assert session.overfull(Draft("other", (big,))) == ""


def test_what_was_too_long_is_tried_again_in_another_chat_and_with_another_model(clock: Clock) -> None:
    session = loaded_session(clock, capacity=100)
    session.submit("one")
    session.on_event(done(1, "word " * 90))
    draft = Draft("word " * 20)
    asked(session.submit(draft.text))
    for id, tokens in (1, 90), (2, 20), (3, 1):
        session.on_event(Counted(id, tokens))
    assert "This prompt is" in session.overfull(draft)
    first = session.conversation
    session.new_chat()
    assert session.overfull(draft) == ""
    assert TurnBegun in kinds(session.submit(draft.text))
    session.on_event(done(2))
    session.show(first)
    assert kinds(session.submit(draft.text)) == [PromptRefused]
    session.choose(Load("larger"))
    session.on_event(Loaded(model_spec("larger", capacity=1000)))
    assert session.overfull(draft) == ""
    assert TurnBegun in kinds(session.submit(draft.text))


def test_what_may_be_too_long_is_sent_where_it_is_not(clock: Clock) -> None:
    session = loaded_session(clock, capacity=100)
    assert [type(each) for each in asked(session.submit("word " * 30))] == [AskCount]
    assert kinds(session.on_event(Counted(1, 30))) == [TurnBegun, Ask]


def test_regenerate(ready: Session) -> None:
    assert kinds(ready.regenerate()) == [Notice]
    ready.submit("one")
    assert kinds(ready.regenerate()) == [Notice]
    ready.on_event(done(1))
    assert ready.regenerate()[0] == TurnBegun(Turn("one", None, 1, 3, reply_place=(2, 2)), again=True)
    assert len(ready.turns) == 1


def prompts(session: Session) -> list[str]:
    return [turn.prompt for turn in session.turns]


@pytest.fixture
def talked(ready: Session) -> Session:
    """Two turns: prompts 1 and 3, replies 2 and 4."""
    for number, text in enumerate(("one", "two"), start=1):
        ready.submit(text)
        ready.on_event(done(number, f"reply {number}"))
    return ready


def test_an_edited_prompt_stands_beside_the_old_one(talked: Session) -> None:
    moved, begun, ask = talked.edit(3, "other")
    assert isinstance(moved, Moved)
    assert [turn.prompt for turn in moved.turns] == ["one"]
    assert begun == TurnBegun(Turn("other", None, 5, 6, place=(2, 2)))
    assert isinstance(ask, Ask)
    assert isinstance(ask.request, Generate)
    assert [message.content for message in ask.request.messages] == ["one", "reply 1", "other"]
    talked.on_event(done(3, "reply 3"))
    assert prompts(talked) == ["one", "other"]
    assert talked.show_path(3)[0] == Moved(tuple(talked.turns))
    assert prompts(talked) == ["one", "two"]


def test_an_earlier_reply_made_again_leaves_what_followed_the_old_one(talked: Session) -> None:
    moved, begun, _ = talked.regenerate(2)
    assert moved == Moved(())
    assert begun == TurnBegun(Turn("one", None, 1, 5, reply_place=(2, 2)))
    talked.on_event(done(3, "better"))
    assert prompts(talked) == ["one"]
    talked.show_path(2)
    assert prompts(talked) == ["one", "two"]


def test_while_a_reply_is_written_no_other_path_is_gone(talked: Session) -> None:
    talked.submit("three")
    for steps in (talked.show_path(1), talked.edit(1, "no"), talked.regenerate(2)):
        assert kinds(steps) == [Notice]
    assert prompts(talked) == ["one", "two", "three"]


def test_another_conversation_is_opened_and_goes_on(talked: Session) -> None:
    other = Tree()
    asked_before = other.ask("earlier", None)
    other.end(other.answer(asked_before.key).key, Reply("yes", model="old"))
    opened, *_ = talked.open(other)
    assert opened == Opened(tuple(talked.turns))
    (request,) = asked(talked.submit("and now"))
    assert isinstance(request, Generate)
    assert [message.content for message in request.messages] == ["earlier", "yes", "and now"]


def test_thinking_is_timed(ready: Session, clock: Clock) -> None:
    ready.submit("one")
    ready.on_event(ReplyEvent(1, TextChunk("hm", "thinking")))
    clock.now += 3.2
    ready.on_event(ReplyEvent(1, TextChunk("so")))
    ready.on_event(done(1, "so"))
    reply = ready.turns[-1].reply
    assert reply.thinking_s == pytest.approx(3.2)


def test_garbage_is_told(ready: Session) -> None:
    assert kinds(ready.on_event(Garbled("not JSON"))) == [Notice]


def test_what_the_caches_could_not_honour_is_told_to_who_asked(ready: Session) -> None:
    remarked = Loaded(model_spec("guide", model_notes=(ModelNote("groups of 32, not 64"),)))
    ready.choose(Load("guide", KVSpec(8, 8)))
    assert Notice("groups of 32, not 64") in ready.on_event(remarked)
    ready.choose(Load("guide"))
    assert kinds(ready.on_event(remarked)) == []


def test_what_was_asked_for_beside_the_model_is_told_to_everybody(ready: Session) -> None:
    notes = (
        ModelNote("groups of 32, not 64"),
        ModelNote("one", "adapter"),
        ModelNote("two", "draft"),
        ModelNote("three", "heads"),
    )
    ready.choose(Load("other"))
    told = ready.on_event(Loaded(model_spec("other", model_notes=(*notes, ModelNote("four", "alone")))))
    assert told == [Notice("one"), Notice("two"), Notice("three")]


def test_that_a_model_answers_worse_than_its_source_is_told_once(ready: Session) -> None:
    worse = Loaded(model_spec("other", model_notes=(ModelNote("Its answers are worse.", "quality"),)))
    ready.choose(Load("other"))
    assert ready.on_event(worse) == [Notice("Its answers are worse.", "warning")]
    ready.choose(Load("other"))
    assert ready.on_event(worse) == []


def test_an_unchecked_model_is_doubted_with_every_reply(clock: Clock) -> None:
    session = Session(Load("guide", unchecked=True), Sampling(), "", clock)
    session.start()
    session.on_event(Loaded(model_spec("guide", doubts=("it rotates what it should not",))))
    for request in (1, 2):
        session.submit("hi")
        told = [step.text for step in session.on_event(done(request)) if isinstance(step, Notice)]
        assert told == ["Unchecked: it rotates what it should not. This text may be wrong."]


def test_what_is_out_of_sight_is_counted(clock: Clock) -> None:
    session = loaded_session(clock, context_length=100, capacity=40, rolls=True)
    session.submit("hi")
    assert (figures.context_held(session), figures.tokens_out_of_sight(session)) == (None, 0)
    session.on_event(ReplyEvent(1, Truncated(1, 7)))
    session.on_event(ReplyEvent(1, PrefillProgress(30, 30, 0)))
    assert (figures.context_held(session), figures.tokens_out_of_sight(session)) == (30, 7)
    session.on_event(done(1))
    session.conversation.progress.metrics = replace(METRICS, prompt_tokens=50, generated_tokens=9)
    assert (figures.context_held(session), figures.tokens_out_of_sight(session)) == (40, 19 + 7)
    session.submit("more")
    assert figures.tokens_out_of_sight(session) == 0


# A prompt that is sent after a stop: it is sent when the reply has ended, by whichever engine hears it.

CANCELLED = ReplyEvent(1, Finished("cancelled", "half", METRICS))


@pytest.fixture
def stopping(clock: Clock) -> Session:
    """A reply that was told to stop, and a prompt that was sent after; one that had waited came back."""
    session = loaded_session(clock)
    session.submit("one")
    session.on_event(ReplyEvent(1, TextChunk("half")))
    session.submit("waited")
    assert session.stop() == [Ask(Cancel(1)), DraftReturned("waited")]
    assert session.submit("and now this") == []
    assert session.engine.phase is EnginePhase.STOPPING
    return session


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
    assert sent(stopping.on_event(Loaded(model_spec("guide")))) == ["and now this"]


def test_nor_one_that_dies(stopping: Session) -> None:
    steps = stopping.on_event(Died("exit status 7", ""))
    assert DraftReturned("and now this") in steps
    assert sent(stopping.on_event(Loaded(model_spec("guide")))) == []


def test_a_stop_that_is_asked_twice_leaves_nothing_in_the_queue(stopping: Session, clock: Clock) -> None:
    clock.now += CancelWatchdog.INSISTING_WRITING_S + 3600.0
    steps = stopping.stop()
    assert DraftReturned("and now this") in steps
    assert StartEngine() in steps
    assert sent(stopping.on_event(Loaded(model_spec("guide")))) == []


# What is said, in the words of where the engine is, to a wish that it can't fulfil now.


@pytest.fixture
def talked_before() -> Session:
    """One turn, and a model that is loaded; other keys than the registry's."""
    session = Session(Load("guide"), Sampling(), "", lambda: 1.0)
    session.keymap = keymap({"choose_model": ("ctrl+y",), "stop": ("f9",)})
    session.start()
    session.on_event(Loaded(model_spec("guide")))
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
def test_while_the_model_loads(talked_before: Session, wish: Callable[[Session], list[Step]]) -> None:
    talked_before.choose(Load("other"))
    assert talked_before.engine.phase is EnginePhase.LOADING
    said = told(wish(talked_before))
    assert "The model is still loading" in said
    assert "F9" not in said  # which would end the loading


@pytest.mark.parametrize("wish", COMMANDS)
def test_where_no_model_is_loaded(talked_before: Session, wish: Callable[[Session], list[Step]]) -> None:
    talked_before.choose(Load("other"))
    talked_before.stop()
    assert talked_before.engine.phase is EnginePhase.FAILED
    said = told(wish(talked_before))
    assert "No model is loaded" in said
    assert "Ctrl+Y" in said
    assert "F9" not in said


@pytest.mark.parametrize("wish", COMMANDS)
def test_while_a_reply_is_written(talked_before: Session, wish: Callable[[Session], list[Step]]) -> None:
    talked_before.submit("two")
    assert told(wish(talked_before)) == "The engine is not ready: wait, or stop the reply with F9."


def test_a_model_that_fails_to_load_is_no_reason_to_wait(talked_before: Session) -> None:
    talked_before.choose(Load("guide"))
    talked_before.on_event(RequestFailed(None, "no such model", "Check it."))
    assert "No model is loaded" in told(talked_before.regenerate())
