"""What stands below a reply in the transcript: a row, two where the window is narrow, and not the paragraph that explains it."""

import pytest

from tests.app.test_verdict import METRICS, PACKED, found
from tokamac.app.chat.conversation import Reply
from tokamac.app.tui.markdown.turns import VERDICT, ReplyMessage
from tokamac.app.tui.screens.figure import explanation
from tokamac.app.verdict import sentence

SLOW = found("prefill", 2.4, PACKED, bound="overhead", of_ceiling=0.003, of_expected=0.004)
REPLY = Reply("Yes.", metrics=METRICS, diagnosis=SLOW)


@pytest.mark.parametrize(("cells", "rows"), [(100, 1), (78, 1), (39, 2)])
def test_the_answer_is_not_outweighed_by_what_it_cost(cells: int, rows: int) -> None:
    message = ReplyMessage("guide")
    message.end(REPLY)
    shown = [row for row in message.rows(cells) if row.frame is VERDICT]
    assert len(shown) == rows
    text = " ".join(row.row.content.plain.strip() for row in shown)
    assert text == "2.4 of 3.1 s in prefill, bound by overhead, unusually slow · /explain"


def test_the_whole_is_in_the_explanation() -> None:
    said = " ".join(explanation(REPLY, 60).plain.split())
    assert said.startswith(sentence(METRICS, SLOW))
    assert "prefill 2.4 s 99%" in said
    assert "0%" not in said
    assert "wait 10 ms under 1%" in said
