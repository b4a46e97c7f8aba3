"""``ask -c`` and ``ask --chat ID``: an answer that goes on from a kept chat, and is kept in it."""

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from tests.app.commands.conftest import Run
from tests.app.plain.plain_chat import last_path
from tokamac.app.chat.attachments import Draft
from tokamac.app.commands.kept_chat import KeptChat
from tokamac.app.settings import Settings
from tokamac.app.store.store import Store
from tokamac.app.store.values import StoredMessage, ToolResult
from tokamac.engine.errors import DeviceError
from tokamac.engine.events import Event, Finished, TextChunk, ToolCall
from tokamac.engine.metrics import Metrics
from tokamac.engine.options import KVSpec, Sampling, TemplateOptions

METRICS = Metrics(**{field.name: None for field in fields(Metrics)})  # type: ignore[arg-type]  # nothing was measured


@pytest.fixture
def chat(data: Path) -> str:
    """A chat of one turn."""
    with Store.open(data) as store:
        made = store.new_chat(model="guide", settings={"system": "Be brief."}).id
        asked = store.add_message(made, None, "user", "What is prefill?")
        store.add_message(made, asked.id, "assistant", "The first phase.", model="guide")
        return made


def said(path: list[StoredMessage]) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in path]


def test_an_answer_goes_on_from_the_chat_and_is_kept_in_it(tokamac: Run, chat: str, data: Path, notes: Path) -> None:
    alone = tokamac("ask", "And decode?", "--json", "--max-tokens", "3")
    done = tokamac("ask", "-c", "And decode?", "-f", notes, "--json", "--max-tokens", "3", stdin=b"piped in")
    end, fresh = (json.loads(each.out.splitlines()[-1]) for each in (done, alone))
    assert end["chat"] == chat
    assert end["metrics"]["prompt_tokens"] > fresh["metrics"]["prompt_tokens"]
    assert "chat" not in fresh
    *_, asked, reply = path = last_path(data)
    assert said(path[:2]) == [("user", "What is prefill?"), ("assistant", "The first phase.")]
    assert (asked.text, [(each.name, each.text) for each in asked.attachments]) == (
        "And decode?",
        [(str(notes), "keys and values"), ("input", "piped in")],
    )
    assert (reply.text, reply.state, reply.model) == (end["text"], "complete", "guide")
    assert reply.metrics is not None
    again = tokamac("ask", "--chat", chat[:5], "Why?", "--max-tokens", "3")
    assert (again.status, again.err) == (0, "")
    assert said(last_path(data))[-2:] == [("user", "Why?"), ("assistant", again.out.strip("\n"))]


@pytest.mark.usefixtures("chat")
def test_two_models_are_compared_on_ones_own_chats_once_one_agrees(tokamac: Run, tiny: Path) -> None:
    refused = tokamac("quality", tiny, tiny, "--chats")
    assert (refused.status, refused.out) == (1, "")
    assert refused.err == "tokamac: your chats are read only if you agree. Add --yes.\n"
    found = json.loads(tokamac("quality", tiny, tiny, "--chats", "--yes", "--json").out)
    assert found["text"]["source"] == "your newest chats"
    assert len("What is prefill?The first phase.") < found["text"]["tokens"] < 200
    assert (found["changed"], found["top1"]) == ([], 1.0)
    alone = json.loads(tokamac("quality", tiny, "--chats", "--yes", "--json").out)
    assert alone["text"] == found["text"]
    assert tokamac("quality", tiny, "--chats", "--text", "x").status == 2


def test_a_chat_that_another_program_writes_is_left_alone(tokamac: Run, chat: str, data: Path) -> None:
    with Store.open(data) as other:
        head = other.chat(chat).head
        asked = other.add_message(chat, head, "user", "And decode?")
        other.begin_reply(chat, asked.id)
        done = tokamac("ask", "-c", "Why?")
        assert (done.status, done.out) == (1, "")
        assert done.err.startswith(f"tokamac: Chat {chat} is being written by another tokamac.")
        assert done.err.count("\n") == 1
        assert len(other.path(chat)) == 4


@pytest.mark.usefixtures("data")
def test_where_there_is_no_such_chat_one_line_says_so(tokamac: Run) -> None:
    for flags, why in ((["-c"], "there is no saved chat yet"), (["--chat", "zzz"], "begins with zzz")):
        done = tokamac("ask", "hi", *flags)
        assert (done.status, done.out, done.err.count("\n")) == (1, "", 1)
        assert why in done.err
    for flags in (["-c", "-n", "2"], ["--chat", "k3v7", "--each", "-"], ["-c", "--chat", "k3v7"]):
        assert tokamac("ask", *(["hi"] if "--each" not in flags else []), *flags).status == 2


def kept(data: Path, chat: str, *replies: Iterator[Event], results: tuple[ToolResult, ...] = ()) -> None:
    """Ask once, and hear ``replies``, with the ``results`` of calls between them."""
    with Store.open(data) as store:
        held = KeptChat(store, chat, Settings())
        held.ask(Draft("And decode?"), "guide", Sampling(), KVSpec(), TemplateOptions())
        for number, events in enumerate(replies):
            if number:
                held.answer(results)
            for _ in held.hear(events):
                pass


def test_an_answer_that_fails_or_is_left_is_kept_as_far_as_it_came(chat: str, data: Path) -> None:
    def failing() -> Iterator[Event]:
        yield TextChunk("The sec")
        raise DeviceError("out of memory", "Close other programs.")

    with pytest.raises(DeviceError):
        kept(data, chat, failing())
    failed = last_path(data)[-1]
    assert (failed.text, failed.state) == ("The sec", "failed")
    kept(data, chat, iter([TextChunk("The second ")]))  # the engine ended without an end
    left = last_path(data)[-1]
    assert (left.text, left.state) == ("The second ", "stopped")


def test_calls_and_their_results_are_kept_between_the_replies(chat: str, data: Path) -> None:
    call = ToolCall("clock", "{}", id="1")
    first = Finished("tool_calls", "", METRICS, tool_calls=(call,))
    kept(data, chat, iter([first]), iter([Finished("stop", "Noon.", METRICS)]), results=(ToolResult(call, "12:00"),))
    assert said(last_path(data))[-3:] == [("assistant", ""), ("tool", "12:00"), ("assistant", "Noon.")]
