"""A prompt that is refused, one over the context above all: warned of before, told why for good, and given back whole."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokamac.app.backend.protocol import Counted, Failed, Load, Loaded, ModelInfo, ReplyEvent
from tokamac.app.chat.attachments import Draft, whole
from tokamac.app.chat.background import TokenCounts
from tokamac.app.chat.conversation import Ending, Reply
from tokamac.app.chat.recording import measured, tree_of
from tokamac.app.chat.session import LONGEST_REASON, Session, reason
from tokamac.app.chat.steps import Ask, DraftReturned, EnginePhase, Notice, ReplyEnded
from tokamac.app.export.html import entries
from tokamac.app.plain.commands import last_turn
from tokamac.app.store.store import Store
from tokamac.app.store.values import Attachment, FinalState
from tokamac.app.tui.markdown.turns import ReplyMessage
from tokamac.app.tui.screens.chat import History
from tokamac.app.tui.widgets.prompt_input import Chips
from tokamac.engine.events import Finished, TextChunk
from tokamac.engine.metrics import Metrics
from tokamac.engine.options import KVSpec, OnFull, Sampling

Start = Callable[..., Any]
METRICS = Metrics(5, 0, 5, 3, 0.5, 0.4, 1.0, 12.5, 4.0, None, None, None, None, None, None, None, None)
NOTES, CODE = Attachment("notes.md", "some notes", "markdown"), Attachment("a.py", "x = 1", "code")
REFUSED = Failed(1, "the prompt has 8,121 tokens, but the model's context is 4,096", "Shorten it.")
WHY = "The prompt has 8,121 tokens, but the model's context is 4,096. Shorten it."


@pytest.fixture
def ready() -> Session:
    session = Session(Load("guide"), Sampling(), "", lambda: 1.0)
    session.start()
    session.on_event(Loaded(ModelInfo("guide")))
    return session


# Given back -------------------------------------------------------------------------------------------------------------


def test_a_refused_prompt_comes_back_with_what_goes_with_it_before_those_that_wait(ready: Session) -> None:
    ready.submit("one", (NOTES,))
    ready.submit("two", (CODE,))
    assert ready.on_event(REFUSED) == [
        ReplyEnded(Reply("", ending="failed", model="guide", reason=WHY)),
        Notice(WHY, "error"),
        DraftReturned("one\n\ntwo", (NOTES, CODE)),
    ]
    assert ready.queued == []


@pytest.mark.parametrize("kind", ["answer", "thinking"])
def test_a_prompt_to_which_something_was_said_does_not(ready: Session, kind: Any) -> None:
    ready.submit("one", (NOTES,))
    ready.on_event(ReplyEvent(1, TextChunk("some", kind)))
    ended, told = ready.on_event(REFUSED)
    assert isinstance(ended, ReplyEnded)
    assert (ended.reply.reason, told) == (WHY, Notice(WHY, "error"))


def test_a_reply_made_again_gives_nothing_back_and_a_later_prompt_only_itself(ready: Session) -> None:
    ready.submit("one", (NOTES,))
    ready.on_event(REFUSED)
    ready.regenerate()
    assert not [s for s in ready.on_event(Failed(2, "too long")) if isinstance(s, DraftReturned)]
    ready.submit("two")
    assert DraftReturned("two") in ready.on_event(Failed(3, "too long"))
    ready.submit("three")
    ready.on_event(ReplyEvent(4, Finished("stop", "answer", METRICS)))
    assert [turn.reply.reason for turn in ready.turns if turn.reply is not None] == ["Too long.", "Too long.", ""]


def test_what_came_back_to_the_box_is_not_the_first_thing_in_its_history() -> None:
    history, sent = History(), lambda: ["b", "a"]
    assert history.older(Draft("b", (NOTES,)), sent) == Draft("a")
    assert history.newer(Draft("a")) == Draft("b", (NOTES,))
    assert History().older(Draft(), sent) == Draft("b")


# The reason -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "hint", "said"),
    [
        ("the prompt is empty", "Write one.", "The prompt is empty. Write one."),
        ("it failed: ValueError: no.", "The log has it.", "It failed: ValueError: no. The log has it."),
        ("too long", "", "Too long."),
        ("bad \x1b]52;c;ZWNobw==\x07name\x1b[2J\nhere\u202e", "", "Bad \ufffdname\ufffd here\ufffd."),
    ],
)  # fmt: skip
def test_a_reason_is_sentences_on_one_safe_line(error: str, hint: str, said: str) -> None:
    assert reason(error, hint) == said


def test_what_a_models_own_code_says_without_end_is_cut() -> None:
    said = reason("x" * 10_000, "The log has the details.")
    assert (len(said), said[-1]) == (LONGEST_REASON, "…")


def kept(tmp_path: Path, reply: Reply, state: FinalState) -> tuple[Store, str]:
    store = Store.open(tmp_path / "chats.db")
    chat = store.new_chat(model="guide").id
    prompt = store.add_message(chat, None, "user", "one").id
    begun = store.begin_reply(chat, prompt, model="guide").id
    store.finish_reply(begun, reply.text, reply.thinking, state=state, metrics=measured(reply))
    return store, chat


def test_a_reason_is_kept_with_the_reply_and_told_wherever_that_is_read(tmp_path: Path) -> None:
    store, chat = kept(tmp_path, Reply("", ending="failed", model="guide", reason=WHY), "failed")
    archive = store.archive(chat)
    turns = tree_of(archive.messages, archive.chat.head).turns()
    assert turns[-1].reply == Reply("", ending="failed", model="guide", reason=WHY)
    assert f"(failed: {WHY})" in last_turn(turns)
    assert [entry.ending for entry in entries(archive)] == ["", f"failed: {WHY}"]
    store.close()


@pytest.mark.parametrize(("ending", "state"), [("stop", "complete"), ("failed", "failed")])
def test_a_reply_without_one_is_kept_as_before(tmp_path: Path, ending: Ending, state: FinalState) -> None:
    store, chat = kept(tmp_path, Reply("said", ending=ending, model="guide", metrics=METRICS), state)
    message = store.archive(chat).messages[-1]
    assert message.metrics is not None
    assert "reason" not in message.metrics
    assert tree_of([message], None).nodes[message.id].reply == Reply(
        "said", ending=ending, model="guide", metrics=METRICS
    )
    store.close()


def rows(reply: Reply) -> str:
    message = ReplyMessage(reply.model)
    message.end(reply)
    return "\n".join(row.row.content.plain for row in message.rows(80))


def test_the_reason_stands_under_the_reply_and_what_is_foreign_in_it_is_made_safe() -> None:
    assert f"failed · {WHY}" in rows(Reply("", ending="failed", reason=WHY)).replace("\n", " ")
    hostile = rows(Reply("", ending="failed", reason="no \x1b]52;c;ZWNobw==\x07way\u202e\nout [bold]"))
    assert "failed · no \ufffdway\ufffd out [bold]" in hostile


# Before it is sent ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capacity", "on_full", "attached", "exceed"),
    [
        (100, None, (NOTES, CODE), True),  # 60 and 40 leave no token to the reply
        (101, None, (NOTES, CODE), False),
        (60, None, (NOTES,), True),
        (50, "error", (NOTES,), True),
        (50, "roll", (NOTES,), False),
        (50, "truncate-middle", (NOTES,), False),
        (None, None, (NOTES, CODE), False),
        (50, None, (Attachment("new.md", "not counted yet"),), False),
        (50, None, (), False),
    ],
)
def test_attachments_exceed_a_context_that_they_leave_no_token_of(
    capacity: int | None, on_full: OnFull | None, attached: tuple[Attachment, ...], exceed: bool
) -> None:
    model, counts = ModelInfo("guide", capacity=capacity), TokenCounts()
    for step, tokens in zip(counts.ask(model, (NOTES, CODE)), (60, 40), strict=True):
        assert isinstance(step, Ask)
        counts.counted(Counted(step.request.id, tokens))  # type: ignore[union-attr]
    assert counts.exceed(model, KVSpec(on_full=on_full), attached) is exceed
    assert not counts.exceed(None, KVSpec(), attached)


async def test_a_file_over_the_context_is_warned_of_refused_and_back_in_the_box(
    chat: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "Why is decode memory-bound? " * 1200
    (tmp_path / "notes.md").write_text(text)
    monkeypatch.chdir(tmp_path)
    attached = (Attachment("notes.md", text, "markdown"),)
    async with chat("guide", scripted=False, size=(100, 40)) as c:
        await c.ready()
        capacity = c.session.engine.info.capacity
        c.app.chat.do("attach", "notes.md")
        warning = f"over the context of {capacity:,} tokens"
        await c.until(lambda: warning in c.screen_text(), "the warning")
        assert c.session.tokens(attached[0]) >= capacity
        colours = {str(span.style) for span in c.app.chat.query_one(Chips)._shown.spans}
        assert colours == {"$text-error"}
        await c.send("What is it?")
        await c.until(lambda: c.session.turns and c.session.turns[-1].reply, "the refusal")
        await c.phase(EnginePhase.IDLE)
        assert c.prompt.draft == Draft("What is it?", attached)
        await c.until(lambda: warning in c.screen_text(), "the warning, again")
        shown = " ".join(c.shown(c.replies[-1]).split())
        assert "failed · The prompt has" in shown
        assert f"but the model's context is {capacity:,}." in shown
        assert (
            'roll or truncate-middle for --on-full (in Python on_full; in the chat "When full" under /settings).'
            in shown
        )
        assert whole("", attached) not in c.screen_text()
        c.app.chat.do("detach")
        assert "failed" not in await c.ask("")
        assert warning not in c.screen_text()
    async with chat("guide", resume=True) as c:
        await c.ready()
        assert "failed · The prompt has" in c.shown(c.replies[0])
