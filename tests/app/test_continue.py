"""Going on with a reply that was cut: a copy beside it that begins with what was said, in the session, the store and the chat."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.app.conftest import Chat
from tests.app.test_session import LOADED, METRICS, Clock, asked, done, kinds
from tests.scripted_engine import SCENARIOS
from tokamac.app.backend.protocol import AskPrice, Cancel, Generate, Load, Loaded, ModelInfo, Priced, ReplyEvent
from tokamac.app.chat.conversation import Reply, Tree
from tokamac.app.chat.session import Session
from tokamac.app.chat.steps import Ask, EnginePhase, Moved, Notice, Step, TurnBegun
from tokamac.app.store.store import Store
from tokamac.engine.events import Message, Price, TextChunk
from tokamac.engine.options import Sampling

Start = Callable[..., Any]


@pytest.fixture
def ready() -> Session:
    session = Session(Load("guide"), Sampling(), "Be brief.", Clock())
    session.start()
    session.on_event(LOADED)
    return session


def sent(steps: list[Step]) -> Generate:
    (request,) = asked(steps)
    assert isinstance(request, Generate)
    return request


def said(steps: list[Step]) -> str:
    return " ".join(step.text for step in steps if isinstance(step, Notice))


def test_a_reply_that_was_cut_goes_on_in_a_copy_that_begins_with_it(ready: Session) -> None:
    ready.submit("one")
    ready.on_event(done(1, "the beginn", "length"))
    steps = ready.continue_reply()
    assert kinds(steps) == [TurnBegun, Ask]
    assert sent(steps) == Generate(
        2,
        (Message("system", "Be brief."), Message("user", "one"), Message("assistant", "the beginn")),
        Sampling(),
        continues=True,
    )
    assert ready.conversation.partial.text == "the beginn"
    ready.on_event(ReplyEvent(2, TextChunk("ing")))
    assert ready.conversation.partial.text == "the beginning"
    ready.on_event(done(2, "the beginning"))
    (turn,) = ready.turns
    assert (turn.reply_place, turn.reply.text if turn.reply else "") == ((2, 2), "the beginning")
    assert ready.conversation.tree.nodes[2].reply == Reply(
        "the beginn", ending="length", model="guide", metrics=ready.metrics
    )


def test_what_was_lost_keeps_what_it_began_with(ready: Session) -> None:
    ready.submit("one")
    ready.on_event(done(1, "so far", "cancelled"))
    ready.continue_reply()
    ready.on_event(ReplyEvent(2, TextChunk(" and")))
    assert [type(request) for request in asked(ready.stop())] == [Cancel]
    ready.open(Tree())
    ready.submit("two")
    assert ready.conversation.partial.text == ""


def test_thinking_goes_on_and_its_time_is_added_up(ready: Session) -> None:
    session = ready
    session.on_event(Loaded(ModelInfo("guide", thinks=True)))
    session.engine.info = ModelInfo("guide", thinks=True)
    session.submit("one")
    session.on_event(ReplyEvent(1, TextChunk("hm", "thinking")))
    session._clock.now += 2  # type: ignore[attr-defined]
    session.stop()
    ended = done(1, "", "cancelled")
    session.on_event(ReplyEvent(1, TextChunk("", "thinking")))
    steps = session.on_event(ReplyEvent(1, replace(ended.event, thinking="hm")))
    assert kinds(steps)
    assert session.turns[-1].reply == Reply("", "hm", 2.0, ending="cancelled", model="guide", metrics=METRICS)
    session.continue_reply()
    session.on_event(ReplyEvent(2, TextChunk(" yes", "thinking")))
    session._clock.now += 3  # type: ignore[attr-defined]
    session.on_event(ReplyEvent(2, TextChunk("so", "answer")))
    assert session.conversation.partial == Reply("so", "hm yes", 5.0)


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (Reply("all of it"), "whole"),
        (Reply(""), "whole"),
        (Reply("", "hm", ending="length"), "does not think"),
    ],
)
def test_what_can_not_be_continued_is_said_and_nothing_is_sent(ready: Session, reply: Reply, why: str) -> None:
    tree = Tree()
    tree.end(tree.answer(tree.ask("one", None).key).key, reply)
    ready.open(tree)
    steps = ready.continue_reply()
    assert why in said(steps)
    assert kinds(steps) == [Notice]
    assert ready.engine.phase is EnginePhase.IDLE


@pytest.mark.parametrize(
    "reply",
    [None, Reply("", ending="cancelled"), Reply("", ending="failed"), Reply("\ufffd", ending="length")],
)
def test_a_prompt_that_was_never_answered_is_answered(ready: Session, reply: Reply | None) -> None:
    tree = Tree()
    tree.end(tree.answer(tree.ask("zero", None).key).key, Reply("cut h", ending="length"))
    asked_last = tree.ask("one", tree.head).key
    if reply is not None:
        tree.end(tree.answer(asked_last).key, reply)
    ready.open(tree)
    steps = ready.continue_reply()
    assert kinds(steps) == [TurnBegun, Ask]
    send = sent(steps)
    assert (send.continues, send.messages[-1]) == (False, Message("user", "one"))
    ready.on_event(done(send.id, "one it is"))
    assert [turn.prompt for turn in ready.turns] == ["zero", "one"]
    assert ready.turns[-1].reply is not None
    assert ready.turns[-1].reply.text == "one it is"


def test_without_a_reply_there_is_nothing_to_go_on_with(ready: Session) -> None:
    assert "no reply" in said(ready.continue_reply())


def test_an_earlier_reply_goes_on_where_it_stands(ready: Session) -> None:
    ready.submit("one")
    ready.on_event(done(1, "first", "length"))
    ready.submit("two")
    ready.on_event(done(2, "second"))
    for key in (1, 2):  # the prompt, or its reply
        steps = ready.continue_reply(key)
        assert kinds(steps) == [Moved, TurnBegun, Ask]
        assert sent(steps).messages[-1] == Message("assistant", "first")
        ready.on_event(done(sent(steps).id, "first and more"))
        ready.show_path(2)


def test_pointing_at_a_message_asks_what_each_action_would_take_one_after_the_other(ready: Session) -> None:
    ready.submit("one")
    ready.on_event(done(1, "cut he", "length"))
    known = []
    (question,) = asked(ready.select(2))
    while isinstance(question, AskPrice):
        known.append((question.messages[-1].role, question.messages[-1].content, question.continues))
        requests = asked(ready.on_event(Priced("actions", question.id, Price(9, 1, 0, 0.01))))
        question = requests[0] if requests else None  # type: ignore[assignment]
    assert known == [
        ("user", "one", False),
        ("assistant", "cut he", True),
        ("user", "~ one", False),
        ("user", "", False),
    ]
    assert [each.question.id for each in ready.prices.known] == ["again", "continue", "edit", "fork"]
    ready.select(None)
    assert not ready.prices.known


def test_a_price_of_a_message_that_is_not_pointed_at_any_more_is_forgotten(ready: Session) -> None:
    ready.submit("one")
    ready.on_event(done(1, "whole"))
    (first,) = asked(ready.select(2))
    (second,) = asked(ready.select(1))
    assert isinstance(first, AskPrice)
    assert isinstance(second, AskPrice)
    assert not ready.on_event(Priced("actions", first.id, Price(1, 1, 0, None)))
    assert not ready.prices.known
    ready.on_event(Priced("actions", second.id, None))
    ready.on_event(Priced("actions", second.id + 1, Price(3, 2, 0, None)))
    assert [each.question.id for each in ready.prices.known] == ["edit"]  # what has no price is left out


async def test_a_stopped_reply_goes_on_by_g_and_both_versions_are_kept(chat: Start, tmp_path: Any) -> None:
    whole = SCENARIOS["fast"].answer
    cut = Sampling(max_tokens=12)
    async with chat("fast", sampling=cut) as c:
        await c.phase(EnginePhase.IDLE)
        await c.ask("Why?")
        begun = c.session.turns[-1].reply
        assert begun is not None
        assert begun.ending == "length"
        await c.pilot.press("tab")
        await c.until(lambda: "continue: " in c.screen_text(), "prices")
        c.session.sampling = Sampling()
        await c.pilot.press("g")
        await c.until(lambda: c.session.engine.phase is EnginePhase.IDLE and c.session.turns[-1].reply_place == (2, 2))
        assert c.session.turns[-1].reply is not None
        assert c.session.turns[-1].reply.text == whole
        assert "Decode reads" in c.shown(c.replies[-1])
        await c.pilot.press("tab", "[")  # the box has had the keys since
        await c.until(lambda: c.session.turns[-1].reply_place == (1, 2))
        await c.send("/continue")
        await c.until(lambda: c.session.engine.phase is EnginePhase.IDLE and c.session.turns[-1].reply_place == (3, 3))
    with Store.open(tmp_path / "chats" / "chats.db") as store:
        latest = store.latest()
        assert latest is not None
        texts = [message.text for message in store.archive(latest.id).messages if message.role == "assistant"]
    assert texts == [begun.text, whole, whole]


async def test_what_is_continued_is_stored_with_its_beginning_before_anything_new_comes(
    chat: Start, tmp_path: Any
) -> None:
    async with chat("slow", sampling=Sampling(max_tokens=2)) as c:
        await c.phase(EnginePhase.IDLE)
        await c.ask("Why?")
        c.session.sampling = Sampling()
        await c.send("/continue")
        await c.until(lambda: c.session.engine.replying)
        with Store.open(tmp_path / "chats" / "chats.db") as other:
            latest = other.latest()
            assert latest is not None
            *_, stored = other.archive(latest.id).messages
        assert stored.text.startswith("Decode r")
        assert stored.state == "partial"


async def test_the_embedded_guide_goes_on_word_for_word(chat: Start) -> None:
    async with chat("guide", scripted=False, sampling=Sampling(temperature=0)) as c:
        await _loaded(c)
        await c.ask("Why is decode memory-bound?")
        whole = c.session.turns[-1].reply
        assert whole is not None
        assert whole.ending == "stop"
        c.session.sampling = Sampling(temperature=0, max_tokens=6)
        c.app.chat.do("regenerate")
        await c.until(lambda: c.session.engine.phase is EnginePhase.IDLE and c.session.turns[-1].reply_place == (2, 2))
        c.session.sampling = Sampling(temperature=0)
        c.app.chat.do("continue")
        await c.until(lambda: c.session.engine.phase is EnginePhase.IDLE and c.session.turns[-1].reply_place == (3, 3))
        went_on = c.session.turns[-1].reply
        assert went_on is not None
        assert went_on.text == whole.text
        assert went_on.metrics is not None
        assert went_on.metrics.prefill_tokens <= 2


async def _loaded(c: Chat) -> None:
    await c.until(lambda: c.session.engine.phase is EnginePhase.IDLE, "the guide is loaded")
