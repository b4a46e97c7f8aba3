"""Compaction: a summary begins a branch, pinned turns and files stay whole, and a nearly full chat goes on from it."""

from collections.abc import Sequence
from pathlib import Path

from tests.app.plain.plain_chat import piped
from tests.scripted_engine import model_spec
from tokamac.app.backend.protocol import (
    AskPrice,
    Cancel,
    Counted,
    Generate,
    Load,
    Loaded,
    Priced,
    ReplyEvent,
    RequestFailed,
    Warm,
)
from tokamac.app.chat.compaction import INSTRUCTION, once
from tokamac.app.chat.session import Session
from tokamac.app.chat.steps import Ask, Notice, Revised, Step, TurnBegun
from tokamac.app.store.store import Store
from tokamac.app.store.values import Attachment
from tokamac.engine.events import Finished, Price
from tokamac.engine.metrics import Metrics
from tokamac.engine.options import KVSpec, Sampling

CAPACITY = 1000
NOTES = Attachment("notes.md", "keys and values", "markdown")


def used(tokens: int) -> Metrics:
    return Metrics(tokens - 10, 0, 5, 10, 0.5, 0.4, 1.0, 12.5, 4.0, None, None, None, None, None, None, None, None)


def chat(on_full: str | None = None) -> Session:
    session = Session(Load("m", KVSpec(on_full=on_full)), Sampling(), "Be brief.", lambda: 0.0)  # type: ignore[arg-type]
    session.start()
    session.on_event(Loaded(model_spec("m", capacity=CAPACITY)))
    return session


def requests(steps: Sequence[Step], kind: type = Generate) -> list[Generate]:
    return [step.request for step in steps if isinstance(step, Ask) and isinstance(step.request, kind)]


def say(session: Session, prompt: str, tokens: int = 20, *files: Attachment) -> list[Step]:
    (asked,) = requests(session.submit(prompt, files))
    return session.on_event(ReplyEvent(asked.id, Finished("stop", f"to {prompt}", used(tokens))))


def finish(session: Session, request: Generate, text: str = "the summary") -> list[Step]:
    return session.on_event(ReplyEvent(request.id, Finished("stop" if text else "cancelled", text, used(50))))


def told(steps: Sequence[Step]) -> str:
    return " ".join(step.text for step in steps if isinstance(step, Notice))


def test_the_chat_goes_on_from_the_summary_and_one_key_goes_back() -> None:
    session = chat()
    assert "nothing to compact" in told(session.price_compaction())
    say(session, "one", 20, NOTES)
    say(session, "two")
    say(session, "three")
    say(session, "four")
    tree = session.conversation.tree
    whole, second = tree.head, next(node for node in tree.nodes.values() if node.prompt == "two")
    session.pin(second.key)
    (request,) = requests(session.compact())
    assert request.background
    assert [m.content for m in request.messages[-2:]] == [
        "to three",
        INSTRUCTION,
    ]  # what was read, and that: the prefix is cached
    assert request.messages[0].content == "Be brief."
    steps = finish(session, request)
    assert any(isinstance(step, Revised) for step in steps)
    assert "3 turns are a summary now, 2 are kept whole" in told(steps)
    (warm,) = requests(steps, Warm)  # the branch is read before the next prompt
    path = [node.prompt or (node.reply.text if node.reply else "") for node in tree.path_to(tree.head)]
    assert path == [INSTRUCTION, "the summary", "two", "to two", "four", "to four"]
    (next_,) = requests(session.submit("five"))
    sent = [message.content for message in next_.messages]
    assert sent[0] == "Be brief."
    assert "keys and values" in sent[1]  # the file is whole
    assert sent[1].endswith(INSTRUCTION)
    assert sent[2:] == ["the summary", "two", "to two", "four", "to four", "five"]
    assert warm.messages[:-1] == next_.messages[:-1]
    finish(session, next_, "to five")
    back = tree.beside(tree.head or 0, -1)
    assert back is not None
    session.show_path(back)
    assert tree.head == whole
    assert [turn.prompt for turn in session.turns] == ["one", "two", "three", "four"]
    assert [turn.key in session.conversation.pinned for turn in session.turns] == [False, True, False, False]


def test_its_price_is_told_before() -> None:
    session = chat()
    say(session, "one", 20, NOTES)
    say(session, "two")
    steps = session.price_compaction()
    (ask,) = requests(steps, AskPrice)
    for number, step in enumerate(steps[:-1], 1):
        assert isinstance(step, Ask)
        session.on_event(Counted(number, 7))
    said = told(session.on_event(Priced("quote", ask.id, Price(900, 38, 0, 1.0))))
    assert "It reads 38 tokens and writes up to 64, 17 s at most." in said
    assert "1 turns become a summary; 21 tokens are kept whole" in said


def test_a_chat_that_fills_up_has_its_summary_ready_and_sends_the_next_prompt_after_it() -> None:
    session = chat("compact")
    say(session, "one", 300)
    assert not requests(say(session, "two", 690))
    (request,) = requests(say(session, "three", 710))  # 70 %
    assert request.background
    finish(session, request)
    assert not any(isinstance(step, Revised) for step in say(session, "four", 800))  # there is room yet
    steps = say_and_see(session, "five", 849)
    assert "three" not in session.turns[0].prompt
    assert not any(isinstance(step, Revised) for step in steps)
    steps = session.submit("x" * 80)
    assert [type(step) for step in steps if isinstance(step, Revised | TurnBegun)] == [Revised, TurnBegun]
    assert [turn.prompt[:5] for turn in session.turns] == [INSTRUCTION[:5], "three", "four", "five", "xxxxx"]


def say_and_see(session: Session, prompt: str, tokens: int) -> list[Step]:
    steps = session.submit(prompt)
    (asked,) = requests(steps)
    return [*steps, *session.on_event(ReplyEvent(asked.id, Finished("stop", f"to {prompt}", used(tokens))))]


def test_a_prompt_waits_for_the_summary_where_none_was_prepared_and_goes_on_without_one() -> None:
    session = chat("compact")
    say(session, "one", 100)
    (request,) = requests(say(session, "two", 900))
    assert session.submit("three") == []
    assert session.compacting
    assert session.stop()[0] == Ask(Cancel(request.id))
    (request,) = requests(session.submit("three"))
    assert len(request.messages) == 4  # system, one, its reply, the instruction
    (shorter,) = requests(session.on_event(RequestFailed(request.id, "too long", ""))) or [None]
    steps = [] if shorter is None else session.on_event(RequestFailed(shorter.id, "too long", ""))
    assert session.turns[-1].prompt == "three" or any(isinstance(step, TurnBegun) for step in steps)


def test_a_summary_that_repeats_itself_is_taken_once() -> None:
    assert once("Ada is 7. Ada is 7. Bo is 8.\nBo is 8.\nBo is 8.\nBo") == "Ada is 7. Bo is 8.\nBo"
    session = chat()
    say(session, "one")
    say(session, "two")
    (request,) = requests(session.compact())
    session.on_event(ReplyEvent(request.id, Finished("loop", "a line\n" * 9, used(50))))
    assert session.turns[0].reply.text == "a line"


def test_what_took_another_way_meanwhile_is_left_alone() -> None:
    session = chat()
    for prompt in ("one", "two", "three"):
        say(session, prompt)
    (request,) = requests(session.compact())
    first = min(session.conversation.tree.nodes)
    (edited,) = requests(session.edit(first, "another"))
    assert not any(isinstance(step, Revised) for step in finish(session, request))  # a reply runs
    steps = finish(session, edited, "to another")
    assert "took another way" in told(steps)
    assert [turn.prompt for turn in session.turns] == ["another"]


def test_the_branch_and_pins_are_kept(data: Path) -> None:
    lines = "one\ntwo\n/pinturn\nthree\nfour\n/compact\n/compact now\n/context\n/fork\nfive\n"
    status, out, err = piped(lines, "fast")
    assert status == 0
    assert "/compact now does it" in err
    assert "Compacted: 3 turns are a summary now, 2 are kept whole." in err
    assert ", pinned: two" in out
    with Store.open(data) as store:
        for stored in store.chats():
            archive = store.archive(stored.id)
            pinned = {key for key, _ in stored.settings["pinned_turns"]}
            assert {m.text for m in archive.messages if m.id in pinned} == {"two"}
            roots = [m.text for m in archive.messages if m.parent is None]
            assert roots[-1] == INSTRUCTION
