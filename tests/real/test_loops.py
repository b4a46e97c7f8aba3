"""No conversation on a real model ends in a full context, and what repeats itself for good reason is no loop."""

import pytest

from tests.real.loops import false_alarms, talks, texts
from tokamac.engine import Engine, Sampling

SHORT = (0, 5, 7, 11)  # of few tokens; a reply of the first repeats itself


@pytest.mark.timeout(900)
def test_every_conversation_has_room_for_the_next_turn(engine: Engine) -> None:
    context = engine.spec.context_length
    for each in talks(engine, SHORT, Sampling()):
        assert context - each.context > 512
        assert {end.reason for end in each.replies} <= {"stop", "loop"}


def test_real_text_is_no_loop(engine: Engine) -> None:
    assert false_alarms(engine.tokenizer, texts()) == 0
