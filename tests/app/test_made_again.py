"""What a reply that is made again, or goes on, follows; and that what is asked is what has a price."""

import pytest

from tests.app.test_later_system import Said, roles, session
from tests.app.test_session import asked, done
from tokamac.app.backend.protocol import AskPrice, Priced
from tokamac.app.chat.session import Session
from tokamac.app.chat.steps import Moved, TurnBegun
from tokamac.engine.events import Message, Price

BETWEEN: tuple[Said, ...] = (("user", "hi"), ("system", "shout"), ("assistant", "HEL"))
LATER: tuple[Said, ...] = (*BETWEEN, ("user", "why?"), ("assistant", "SO"))
SYSTEM: Said = ("system", "Be brief.")
BRIEF = Message("system", "Be brief.")


def priced(held: Session, key: int) -> dict[str, tuple[Message, ...]]:
    """Point at a message, and answer every question; return what each was about."""
    steps = held.select(key)
    while requests := asked(steps):
        (request,) = requests
        assert isinstance(request, AskPrice)
        steps = held.on_event(Priced("actions", request.id, Price(9, 1, 0, None)))
    return {each.question.id: each.question.messages for each in held.prices.known}


def test_a_system_message_before_a_reply_stays_before_the_one_that_is_made_again() -> None:
    held = session(*BETWEEN, later_system=True)
    steps = held.regenerate()
    assert roles(steps) == [SYSTEM, *BETWEEN[:2]]
    (begun,) = [step for step in steps if isinstance(step, TurnBegun)]
    assert (begun.turn.between, begun.turn.reply_place, begun.again) == (("shout",), (2, 2), True)
    assert not [step for step in steps if isinstance(step, Moved)]
    held.on_event(done(1, "HELLO"))
    assert held.conversation.tree.siblings(3) == [3, 4]


def test_it_stays_before_one_that_goes_on() -> None:
    held = session(*BETWEEN, later_system=True)
    assert roles(held.continue_reply()) == [SYSTEM, *BETWEEN]
    held.on_event(done(1, "HELLO"))
    assert [(turn.between, turn.reply_place) for turn in held.turns] == [(("shout",), (2, 2))]


@pytest.mark.parametrize("key", [1, 2, 3])
def test_so_it_does_in_an_earlier_turn(key: int) -> None:
    held = session(*LATER, later_system=True)
    steps = held.regenerate(key)
    assert roles(steps) == [SYSTEM, *LATER[:2]]
    (begun,) = [step for step in steps if isinstance(step, TurnBegun)]
    assert (begun.turn.between, begun.turn.reply_place, begun.again) == (("shout",), (2, 2), False)


def test_a_prompt_with_one_after_it_is_answered_after_both() -> None:
    held = session(*BETWEEN[:2], later_system=True)
    assert roles(held.continue_reply()) == [SYSTEM, *BETWEEN[:2]]
    held.on_event(done(1, "HELLO"))
    assert [(turn.between, turn.reply_place) for turn in held.turns] == [(("shout",), (1, 1))]


def test_what_is_priced_is_what_would_be_sent() -> None:
    held = session(*BETWEEN, later_system=True)
    found = priced(held, 3)
    assert found["again"] == (BRIEF, Message("user", "hi"), Message("system", "shout"))
    assert found["continue"] == (*found["again"], Message("assistant", "HEL"))
    assert found["edit"] == (BRIEF, Message("user", "~ hi"))


def test_going_on_where_nothing_was_said_takes_what_an_answer_takes() -> None:
    held = session(("user", "hi"), ("assistant", "hello"), ("user", "why?"))
    found = priced(held, 3)
    assert found["continue"] == found["again"]
    assert found["again"][-1] == Message("user", "why?")
    held = session(("user", "hi"), ("assistant", ""))  # cut before a whole character was said
    found = priced(held, 2)
    assert found["continue"] == found["again"] == (BRIEF, Message("user", "hi"))


def test_of_two_replies_in_a_row_each_is_itself() -> None:
    held = session(("user", "hi"), ("assistant", "one"), ("assistant", "two"))
    assert [node and node.key for node in map(held.conversation.reply_at, (1, 2, 3, None))] == [2, 2, 3, 3]
    assert roles(held.continue_reply(2))[-2:] == [("user", "hi"), ("assistant", "one")]
