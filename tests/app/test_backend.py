"""The engine's process, really started, and the wire: every message survives it, and nothing else gets through."""

import asyncio
import dataclasses
import gc
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from tests.engine.helpers import within
from tests.scripted_engine import SCRIPTED
from tests.tiny import make_tiny
from tests.waiting import PATIENCE_S, until
from tokamac.app.backend import client, processes, protocol
from tokamac.app.backend.child import Child, Loader, load_engine
from tokamac.app.backend.client import CHILD_COMMAND, GRACE_S, BackendEvent, Died, EngineProcess, Garbled, Outbox
from tokamac.app.backend.engine_client import KEPT_CANCELS, EngineClient
from tokamac.app.backend.processes import LineProcess
from tokamac.app.backend.protocol import (
    Answer,
    AskCount,
    Asker,
    AskPrice,
    AskTokens,
    Cancel,
    CaseLine,
    Change,
    ChipLine,
    CurvePoint,
    EngineMessage,
    EngineNotice,
    Figures,
    Generate,
    GoOn,
    Guests,
    Heartbeat,
    Hold,
    Load,
    Loaded,
    LookAgain,
    LookedAt,
    ModelLine,
    Priced,
    PromptTokens,
    Question,
    Quit,
    ReplyEvent,
    RequestFailed,
    Roof,
    Spot,
    Wanted,
    Warm,
    Warmed,
    Where,
    decode_message,
    encode,
)
from tokamac.app.backend.sharing import GuestOutbox
from tokamac.engine.errors import GrammarError, OptionError
from tokamac.engine.events import (
    Alternative,
    Event,
    Finished,
    Live,
    LoadProgress,
    LoopFound,
    MemoryPressure,
    Message,
    ModelSpec,
    PrefillProgress,
    Price,
    PromptText,
    StepToken,
    StepTokens,
    TextChunk,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Truncated,
)
from tokamac.engine.files import FLUSH_S
from tokamac.engine.lab.passes import PassCost, PassLog, PromptPiece
from tokamac.engine.metrics import Cause, DraftCount, Gaps, Metrics, Outlier, Throttle
from tokamac.engine.options import PARALLEL, STAGES, KVSpec, Sampling, TemplateOptions
from tokamac.engine.perf.diagnosis import Concern, Diagnosis, Remedy, RemedyName, Term, TimePart, Unit, Waits
from tokamac.engine.perf.memory import MemoryFit
from tokamac.engine.perf.roofline import Attention, KVUse
from tokamac.engine.schedule.capacity import Capacity, WidthOutcome
from tokamac.engine.text import grammar

# The engine's process, really started: replies, cancelling, crash, freeze, garbage, and its end with the screen's.


class Talk:
    """A started process and the events it sent."""

    def __init__(self, log: Path, command: list[str], silence_s: float = PATIENCE_S) -> None:
        self.events: queue.Queue[BackendEvent] = queue.Queue()
        self.log = log
        self.process = EngineProcess(command, log, self.events.put, silence_s=silence_s)

    def until(self, kind: type, *also: type) -> list[object]:
        """Return what came up to one of these kinds; of replies, their events."""
        seen: list[object] = []
        deadline = time.monotonic() + PATIENCE_S
        while not seen or not isinstance(seen[-1], (kind, *also)):
            event = self.events.get(timeout=max(0.01, deadline - time.monotonic()))
            seen.append(event.event if isinstance(event, ReplyEvent) else event)
        return seen

    def told(self, ends: int) -> dict[int, list[object]]:
        """Return what came of each reply until so many have ended; a failure is the end of one, too."""
        seen: dict[int, list[object]] = {}
        deadline = time.monotonic() + PATIENCE_S
        while ends:
            event = self.events.get(timeout=max(0.01, deadline - time.monotonic()))
            if isinstance(event, ReplyEvent | RequestFailed):
                assert event.id is not None
                seen.setdefault(event.id, []).append(event.event if isinstance(event, ReplyEvent) else event)
                ends -= isinstance(seen[event.id][-1], Finished | RequestFailed)
            else:
                assert not isinstance(event, Died)
        return seen

    def load(self, model: str, *, prompt_cache: bool = True, parallel: int = PARALLEL) -> list[object]:
        self.process.send(Load(model, prompt_cache=prompt_cache, parallel=parallel))
        return self.until(Loaded, RequestFailed, Died)

    def price(self, text: str, request: int) -> Priced:
        self.process.send(AskPrice("draft", request, (Message("user", text),)))
        priced = self.until(Priced)[-1]
        assert isinstance(priced, Priced)
        assert priced.id == request
        return priced

    def say(self, text: str = "hello", request: int = 1, **options: object) -> None:
        self.process.send(Generate(request, (Message("user", text),), Sampling(**options)))  # type: ignore[arg-type]


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Callable[..., Talk]]:
    talks: list[Talk] = []

    def start(command: list[str] | None = None, silence_s: float = PATIENCE_S) -> Talk:
        talks.append(Talk(tmp_path / "log" / "engine.log", command or SCRIPTED, silence_s))
        return talks[-1]

    yield start
    for each in talks:
        each.process.close(0.5)


def text_of(events: list[object]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextChunk))


def test_a_reply_from_load_to_finish(talk: Callable[..., Talk]) -> None:
    child = talk()
    loaded = child.load("slow")[-1]
    assert isinstance(loaded, Loaded)
    assert loaded.info.context_length
    child.say(max_tokens=16)  # which takes longer than from one beat to the next
    events = child.until(Finished)
    done = events[-1]
    assert done.reason == "length"
    assert text_of(events) == done.text
    assert done.metrics.generated_tokens == 16
    prefills = [event for event in events if isinstance(event, PrefillProgress)]
    assert prefills[-1].done == prefills[-1].total
    assert any(isinstance(event, Live) for event in events)
    assert any(isinstance(event, Heartbeat) for event in events)


def test_cancel_ends_the_reply_and_the_next_one_runs(talk: Callable[..., Talk]) -> None:
    child = talk()
    child.load("slow")
    child.say()
    child.until(TextChunk)
    child.process.send(Cancel(1))
    done = child.until(Finished)[-1]
    assert done.reason == "cancelled"
    assert done.text
    child.say(request=2, max_tokens=2)
    assert isinstance(child.until(Finished)[-1], Finished)


def test_replies_run_at_once_and_each_is_told_measured_and_ended_by_itself(talk: Callable[..., Talk]) -> None:
    child = talk()
    child.load("steady")
    for request in (1, 2, 3):
        child.process.send(Generate(request, (Message("user", "hello"),), background=request == 3))
    begun: set[int] = set()
    while begun != {1, 2, 3}:  # before any has ended
        event = child.events.get(timeout=PATIENCE_S)
        if isinstance(event, ReplyEvent):
            assert not isinstance(event.event, Finished)
            begun |= {event.id} if isinstance(event.event, TextChunk) else set()
    child.process.send(Cancel(2))
    first = child.told(1)
    assert first[2][-1].reason == "cancelled"  # type: ignore[attr-defined]
    assert not any(isinstance(event, Finished) for event in [*first.get(1, []), *first.get(3, [])])
    others = child.told(2)
    assert {others[request][-1].reason for request in (1, 3)} == {"stop"}  # type: ignore[attr-defined]
    assert any(isinstance(event, Live) for event in others[1])
    assert not any(isinstance(event, Live) for event in others[3])  # nobody waits for it


def test_the_engine_is_told_which_bits_and_that_nobody_waits(talk: Callable[..., Talk]) -> None:
    child = talk()
    child.load("fast")
    child.process.send(Generate(1, (Message("user", "hi"),), background=True, kv_bits=(8, 4)))
    child.until(Finished)
    assert "reply kv_bits=(8, 4) background=True" in child.log.read_text()
    child.load("unpackable")
    child.process.send(Generate(2, (Message("user", "hi"),), kv_bits=(8, 4)))
    failed = child.until(RequestFailed)[-1]
    assert isinstance(failed, RequestFailed)
    assert (failed.id, "can't be packed" in failed.error) == (2, True)


def test_a_cancel_that_overtakes_one_of_two_requests_ends_that_one(talk: Callable[..., Talk]) -> None:
    child = talk()
    child.load("steady")
    child.process.send(Cancel(2))
    child.say(request=1, max_tokens=9)
    child.say(request=2, max_tokens=9)
    ended = {request: events[-1].reason for request, events in child.told(2).items()}  # type: ignore[attr-defined]
    assert ended == {1: "length", 2: "cancelled"}


def test_a_reply_that_fails_ends_alone(talk: Callable[..., Talk]) -> None:
    child = talk()
    child.load("tiny-context")
    child.say("hi", request=1)
    child.say("a prompt that is longer than eight tokens of four characters", request=2)
    seen = child.told(2)
    assert isinstance(seen[1][-1], Finished)
    assert isinstance(seen[2][-1], RequestFailed)


@pytest.mark.parametrize("background", [False, True])
def test_likely_tokens_wait_for_a_reply_that_somebody_waits_for(talk: Callable[..., Talk], background: bool) -> None:
    child = talk()
    child.load("steady")
    question = (Message("user", "hello"),)
    child.process.send(Generate(1, question, Sampling(max_tokens=20), background=background))
    child.process.send(LookAgain(7, question, Message("assistant", "Memory.")))
    seen = child.until(LookedAt if background else Finished)
    assert any(isinstance(event, LookedAt) for event in seen) is background
    assert any(isinstance(event, Finished) for event in seen) is not background
    child.until(Finished if background else LookedAt)


def test_another_model_waits_for_the_replies_that_run(talk: Callable[..., Talk]) -> None:
    child = talk()
    child.load("slow")
    child.say(request=1, max_tokens=5)
    child.say(request=2, max_tokens=5)
    child.process.send(Load("fast"))
    seen = child.until(Loaded)
    assert [event.reason for event in seen if isinstance(event, Finished)] == ["length", "length"]


def test_failures_are_events_and_the_process_goes_on(talk: Callable[..., Talk]) -> None:
    child = talk()
    child.say()
    assert child.until(RequestFailed)[-1] == RequestFailed(
        1, "no model is loaded", "Choose one with /model.", "TokamacError"
    )
    assert isinstance(child.load("missing")[-1], RequestFailed)
    assert any(isinstance(event, LoadProgress) for event in child.load("slow-load"))
    child.load("tiny-context")
    child.say("a prompt that is longer than eight tokens of four characters")
    failed = child.until(RequestFailed)[-1]
    assert isinstance(failed, RequestFailed)
    assert "context" in failed.error
    child.load("fast")
    child.say(request=2)
    assert child.until(Finished)


LONG = "a question with many words " * 40


def test_what_is_read_ahead_is_not_computed_again(talk: Callable[..., Talk]) -> None:
    child = talk()
    assert child.price(LONG, 1) == Priced("draft", 1, None)  # there is no model
    child.load("fast")
    before = child.price(LONG, 2).price
    child.process.send(Warm(1, (Message("user", LONG),)))
    after = child.price(LONG, 3).price
    assert before.tokens == before.prompt_tokens == after.prompt_tokens > 10 * after.tokens
    child.say(LONG)
    done = child.until(Finished)[-1]
    assert done.metrics.cached_tokens == after.prompt_tokens - after.tokens


def test_the_answer_is_read_again_after_thinking(talk: Callable[..., Talk]) -> None:
    child = talk()
    for model, read in (("fast", 0), ("thinking", 1)):
        child.load(model)
        child.say("hello")
        done = child.until(Finished)[-1]
        assert child.price("hello", 1).price  # asked after the reading
        said = f"warm [('user', 5), ('assistant', {len(done.text)}), ('user', 0)]"
        assert child.log.read_text().count(said) == read


def test_trouble_with_the_prompt_cache_is_told_once_after_a_reply(talk: Callable[..., Talk]) -> None:
    child = talk()
    child.load("full-disk")
    child.say()
    child.until(Finished)
    notice = child.until(EngineNotice)[-1]
    assert isinstance(notice, EngineNotice)
    assert "disk full" in notice.text
    for request in (2, 3):
        child.say(request=request)
        assert not any(isinstance(event, EngineNotice) for event in child.until(Finished))


@pytest.mark.parametrize("scenario", ["dies-loading", "dies-idle", "dies-sending", "dies-decoding"])
def test_death_is_reported_with_the_last_log_line(talk: Callable[..., Talk], scenario: str) -> None:
    child = talk()
    died = child.load(scenario)[-1]
    if not isinstance(died, Died):
        child.say()
        died = child.until(Died)[-1]
    assert isinstance(died, Died)
    assert died.why == "exit status 7"
    assert died.last_line.startswith("scripted: the engine dies")


def test_a_process_whose_gpu_takes_no_more_work_says_so_and_ends(talk: Callable[..., Talk]) -> None:
    child = talk()
    child.load("loses-gpu")
    child.say()
    *_, failed, died = child.until(Died)
    assert isinstance(failed, RequestFailed)
    assert failed.kind == "DeviceLostError"
    assert isinstance(died, Died)
    assert died.last_line.startswith("macOS takes no more GPU work")


def test_a_frozen_process_is_killed(talk: Callable[..., Talk]) -> None:
    child = talk(silence_s=1.5)
    child.load("freezes")
    child.process.set_busy(True)
    child.say()
    died = child.until(Died)[-1]
    assert isinstance(died, Died)
    assert "did not answer" in died.why


@pytest.mark.parametrize("refusal", [PermissionError, ProcessLookupError])
def test_where_its_group_can_not_be_signalled_the_process_itself_is(
    talk: Callable[..., Talk], monkeypatch: pytest.MonkeyPatch, refusal: type[OSError]
) -> None:
    def refuse(*_: int) -> None:
        raise refusal

    monkeypatch.setattr(os, "killpg", refuse)
    child = talk([sys.executable, "-c", "import time; time.sleep(600)"])
    child.process.kill()
    until(lambda: not child.process.alive)

    monkeypatch.setattr(child.process._process, "poll", lambda: None)  # as while another thread waits for it
    monkeypatch.setattr(os, "kill", refuse)
    child.process.kill()  # of what is a zombie by now, nobody complains


@pytest.mark.parametrize("temporary", [True, False])
def test_an_unwritable_log_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temporary: bool) -> None:
    (tmp_path / "file").touch()
    if not temporary:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    child = Talk(tmp_path / "file" / "log" / "engine.log", SCRIPTED)
    (notice,) = child.until(EngineNotice)
    assert isinstance(notice, EngineNotice)
    assert notice.text == f"The engine's log is not kept: {child.log} can't be written (Not a directory)."
    child.load("dies-sending")
    child.say()
    died = child.until(Died)[-1]
    assert isinstance(died, Died)
    assert died.last_line.startswith("scripted: the engine dies") is temporary


def test_garbage_is_an_event_and_what_follows_is_read(talk: Callable[..., Talk]) -> None:
    line = encode(Heartbeat()).decode().strip()
    child = talk([sys.executable, "-c", f"print('\\x1b[31mgarbage'); print('{line}', flush=True); input()"])
    garbled, beat = child.until(Heartbeat)
    assert isinstance(garbled, Garbled)
    assert "\x1b" not in garbled.error
    assert beat == Heartbeat()


def test_the_process_ends_when_the_screen_is_gone(tmp_path: Path) -> None:
    with (
        (tmp_path / "err").open("wb") as err,
        subprocess.Popen(SCRIPTED, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err) as child,
    ):
        child.stdin.write(encode(Load("slow-load")))
        child.stdin.close()
        assert child.wait(PATIENCE_S) == 0


def test_a_stray_print_goes_to_the_log(tmp_path: Path) -> None:
    # File descriptor 1 of the child is the log: what a C library prints can't reach the protocol either.
    code = f"import os, sys; sys.path.insert(0, {str(Path(SCRIPTED[1]).parent)!r}); import scripted_engine\n"
    code += "real = scripted_engine.load_scripted\n"
    code += "def load(*a):\n    os.write(1, b'stray\\n'); print('py', flush=True); return real(*a)\n"
    code += "scripted_engine.serve(load)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        input=encode(Load("fast")) + b'{"type":"quit"}\n',
        capture_output=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert b"stray" in run.stderr
    assert all(line.startswith(b'{"type"') for line in run.stdout.splitlines())


def test_who_is_cancelled_twice_has_seen_the_end_of_the_process_that_it_ran() -> None:
    """As a loop cancels what is left when it closes, which may be cancelled already."""

    async def run() -> tuple[int, int | None]:
        command, told = LineProcess(["sh", "-c", "echo; exec sleep 60"], lambda line: line), asyncio.Event()
        running = asyncio.create_task(command.run([], lambda _: told.set()))
        await asyncio.wait_for(told.wait(), PATIENCE_S)
        process = command._process
        for _ in range(2):
            running.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await running
        return process.pid, process.returncode

    pid, status = asyncio.run(run())
    assert status == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_cancelled_command_closes_its_transport_though_a_child_of_its_holds_the_pipes() -> None:
    started = asyncio.Event()
    command = LineProcess(["sh", "-c", "sleep 5 & echo; wait"], lambda line: line)
    run = asyncio.create_task(command.run([], lambda _: started.set()))
    await started.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    # By type: torch has objects that warn when their class is asked for.
    transports = [each for each in gc.get_objects() if issubclass(type(each), asyncio.SubprocessTransport)]
    assert transports
    assert all(each.is_closing() for each in transports)


def test_cancels_that_came_too_late_are_forgotten_and_one_that_came_too_early_waits() -> None:
    child = mute_child()
    for late in range(KEPT_CANCELS + 7):
        child._owner.cancel(late)
    child._owner.cancel(-1)
    child._requests.put((child._owner, protocol.LimitMemory(None)))
    child._next()  # more waits to be read: what is cancelled may be asked for there
    assert len(child._owner._cancelled) == KEPT_CANCELS + 8
    waiting = threading.Thread(target=child._next, daemon=True)
    waiting.start()
    until(lambda: len(child._owner._cancelled) == KEPT_CANCELS)
    child._requests.put((child._owner, Quit()))
    within(waiting.join)
    assert -1 in child._owner._cancelled


# Guests of the process, by its own parts.


def mute_child(load: Loader = load_engine) -> Child:
    """A process's loop whose owner hears nothing."""
    return Child(load, Outbox(os.open(os.devnull, os.O_WRONLY)))


def test_what_a_guest_that_left_would_be_told_goes_to_no_file_that_has_its_descriptor_next(tmp_path: Path) -> None:
    child, (ours, theirs) = mute_child(), socket.socketpair()
    with ours:
        theirs.sendall(encode(Warm(1, ())))
        theirs.close()
        within(lambda: child._welcome(ours))
        guest, _ = child._requests.get()
        with (tmp_path / "next").open("wb") as file:
            os.dup2(file.fileno(), ours.fileno())
        guest.outbox.put(Warmed(1, None))
    assert (tmp_path / "next").read_bytes() == b""


def test_a_guests_descriptor_is_given_back_once_nobody_writes_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    write, begun = os.write, threading.Event()
    order: list[str] = []
    ours, theirs = socket.socketpair()

    def slowly(fd: int, data: memoryview) -> int:
        if fd != ours.fileno():
            return write(fd, data)
        begun.set()
        try:
            return write(fd, data)
        finally:
            time.sleep(0.1)
            order.append("written")

    monkeypatch.setattr(os, "write", slowly)
    with ours, theirs:
        outbox = GuestOutbox(ours)
        writer = threading.Thread(target=outbox.put, args=(EngineNotice("x" * 2**24),), daemon=True)  # nobody reads it
        writer.start()
        assert begun.wait(PATIENCE_S)
        within(outbox.close)
        order.append("closed")
        within(writer.join)
    assert order[-1] == "closed" != order[0]


def test_the_threads_of_a_guest_that_left_end_though_it_waits_for_answers_and_a_reply(pipe: tuple[int, int]) -> None:
    child, before = mute_child(), set(threading.enumerate())
    may_answer, asked = threading.Event(), threading.Event()

    def tokens(*_: object, **__: object) -> list[int]:
        asked.set()
        may_answer.wait()
        return []

    engine: Any = types.SimpleNamespace(tokens=tokens)
    guest = EngineClient(Outbox(pipe[1]), child)
    own = set(threading.enumerate()) - before
    guest.tokens.ask(engine, AskTokens(1))
    assert asked.wait(PATIENCE_S)
    guest.tokens.ask(engine, AskTokens(2))
    guest.pulse.start()
    assert decode_message(os.read(pipe[0], 1 << 16)) == Heartbeat()
    guest.close()
    guest.pulse.stop()  # the reply ends
    may_answer.set()
    until(lambda: not any(each.is_alive() for each in own))


def test_the_number_of_guests_that_is_told_last_is_the_number_that_there_is() -> None:
    told, first, second = [], threading.Event(), threading.Event()

    class SlowOutbox(Outbox):
        def put(self, message: EngineMessage) -> None:
            if not first.is_set():
                first.set()
                second.wait(0.5)  # it comes only if it overtakes the first
            else:
                second.set()
            told.append(message)

    nowhere = os.open(os.devnull, os.O_WRONLY)
    child = Child(load_engine, SlowOutbox(nowhere))
    leaving = threading.Thread(target=child._tell_guests, daemon=True)
    leaving.start()
    assert first.wait(PATIENCE_S)
    child._clients.append(EngineClient(Outbox(nowhere), child))
    within(child._tell_guests)
    within(leaving.join)
    assert told == [Guests(0), Guests(1)]


class OpenInput:
    """A process's input of which nothing comes, and that never ends."""

    def readline(self, limit: int) -> bytes:
        threading.Event().wait()
        return b""


def test_a_guest_that_waits_for_a_load_hears_that_the_process_is_at_work() -> None:
    may_load = threading.Event()

    def load(*_: object) -> typing.NoReturn:
        assert may_load.wait(PATIENCE_S)
        raise OptionError("nothing is loaded", "")

    child, (ours, theirs) = mute_child(load), socket.socketpair()
    running = threading.Thread(target=child.run, args=(OpenInput(),), daemon=True)
    running.start()
    child._sort(child._owner, Load("large"))
    threading.Thread(target=child._welcome, args=(ours,), daemon=True).start()
    theirs.settimeout(PATIENCE_S)
    with ours, theirs, theirs.makefile("rb") as heard:
        theirs.sendall(encode(Generate(1, ())))
        assert decode_message(heard.readline()) == Heartbeat()
        may_load.set()
        failed: list[int | None] = []
        while len(failed) < 2:
            if isinstance(message := decode_message(heard.readline()), RequestFailed):
                failed.append(message.id)
        assert failed == [None, 1]  # the load, and what it asked of that
    child._sort(child._owner, Quit())
    within(running.join)


def test_close_reaps(tmp_path: Path) -> None:
    child = Talk(tmp_path / "l", SCRIPTED)
    child.load("fast")
    child.process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child.process.pid, 0)


def test_a_process_that_does_not_read_any_more_is_only_dead(tmp_path: Path) -> None:
    events: queue.Queue[BackendEvent] = queue.Queue()
    others = threading.enumerate()
    deaf = "import os, time; os.close(0); os.write(2, b'deaf'); time.sleep(2)"
    process = EngineProcess([sys.executable, "-c", deaf], tmp_path / "log", events.put)
    while (tmp_path / "log").read_bytes() != b"deaf":
        time.sleep(0.01)
    process.send(Cancel(1))
    assert isinstance(events.get(timeout=PATIENCE_S), Died)
    for thread in threading.enumerate():
        if thread.name == "engine-_write" and thread not in others:
            thread.join(PATIENCE_S)  # what it raises is an error of this test


SLOW_DISK = """
import sys, time
from tokamac.engine import files
files.FLUSH_S *= {factor}
from tokamac.app.backend import child
from tokamac.engine.prompt_cache.folder import Folder
write = Folder.write
def slowly(*arguments):
    time.sleep({seconds})
    return write(*arguments)
Folder.write = slowly
sys.argv = ["child"]
child.serve()
"""


EASE = 20  # times as long as the product gives a process to end: a slow machine's own time is not what is tried


@pytest.mark.parametrize("leaving", ["close", "kill"])
def test_what_was_computed_is_written_to_a_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaving: str
) -> None:
    monkeypatch.setenv("TOKAMAC_CACHE_DIR", str(tmp_path / "cache"))
    model = make_tiny(tmp_path / "model")
    slow = SLOW_DISK.format(seconds=FLUSH_S, factor=EASE)
    child = Talk(tmp_path / "log", [sys.executable, "-c", slow])
    assert isinstance(child.load(str(model))[-1], Loaded)
    child.say("x" * 300, max_tokens=2)
    assert isinstance(child.until(Finished, RequestFailed)[-1], Finished)
    if leaving == "close":
        child.process.close(GRACE_S * EASE)
    else:  # the screen is killed: all that the process sees is the end of its input
        child.process._outgoing.put(None)
        assert child.process._ended.wait(PATIENCE_S)
    assert not child.process.alive
    assert list((tmp_path / "cache").rglob("*.kv"))


def test_a_library_that_panics_costs_a_reply_and_not_the_process(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model")
    file = model / "tokenizer.json"
    # Found out only once a text is long enough for it: the regex engine gives up, which its caller takes for impossible.
    pattern = {"type": "Split", "pattern": {"Regex": "^(([a-z])+.)+[A-Z]([a-z])+$"}, "behavior": "Isolated"}
    told = json.loads(file.read_text())
    file.write_text(json.dumps({**told, "pre_tokenizer": {**pattern, "invert": False}}))
    child = Talk(tmp_path / "log", CHILD_COMMAND)
    try:
        assert isinstance(child.load(str(model))[-1], Loaded)
        child.say("a" * 400 + "!")
        failed = child.until(RequestFailed, Died)[-1]
        assert isinstance(failed, RequestFailed)
        assert "retry-limit" in failed.error
        assert failed.hint
        child.process.send(AskCount(7, "a" * 400 + "!"))
        child.say("A", request=2, max_tokens=2)
        assert isinstance(child.until(Finished, Died)[-1], Finished)
    finally:
        child.process.close()


def test_a_prompt_begins_at_once_while_another_reply_is_written_in_the_background(tmp_path: Path) -> None:
    child = Talk(tmp_path / "log", CHILD_COMMAND)
    try:
        assert isinstance(child.load(str(make_tiny(tmp_path / "model", context=4096)), parallel=1)[-1], Loaded)
        child.process.send(Generate(-1, (Message("user", "x" * 300),), Sampling(temperature=0), background=True))
        child.until(TextChunk)
        child.say(max_tokens=9)
        seen = child.told(1)
        assert isinstance(seen[1][-1], Finished)
        assert not any(isinstance(event, Finished) for event in seen.get(-1, []))
        child.process.send(Cancel(-1))
        assert child.told(1)[-1][-1].reason == "cancelled"  # type: ignore[attr-defined]
    finally:
        child.process.close()


# What a program asks that is not a chat: a prompt of tokens, no figures on the way, and a reader that is behind.


def test_a_prompt_of_tokens_is_told_and_answered_without_what_only_a_screen_shows(tmp_path: Path) -> None:
    child = Talk(tmp_path / "log", CHILD_COMMAND)
    try:
        assert isinstance(child.load(str(make_tiny(tmp_path / "model", context=4096)))[-1], Loaded)
        child.process.send(AskTokens(1, "Hello"))
        child.process.send(AskTokens(2, messages=(Message("user", "Hello"),)))
        child.process.send(AskTokens(3, messages=(Message("user", "Hello"),), template=TemplateOptions(thinking="on")))
        begun = (Message("user", "Hello"), Message("assistant", "Hi"))
        child.process.send(AskTokens(4, messages=begun, continues=True))
        child.process.send(AskTokens(5, messages=begun[:1], continues=True))
        answers = [child.until(PromptTokens)[-1] for _ in range(5)]  # each has a thread of its own
        text, written, refused, continued, none = sorted(answers, key=lambda answer: answer.id)
        assert isinstance(text, PromptTokens)
        assert isinstance(written, PromptTokens)
        assert len(text.tokens) == len("Hello")
        assert len(written.tokens) == len("Hello") + len(("<|user|>", "<|end|>", "<|assistant|>"))
        assert isinstance(refused, PromptTokens)
        assert (refused.tokens, "thinking" in refused.error) == ((), True)
        assert isinstance(continued, PromptTokens)
        assert len(continued.tokens) == len(written.tokens) + len("Hi")
        assert isinstance(none, PromptTokens)
        assert "only a reply can be continued" in none.error
        sampling = Sampling(max_tokens=200, temperature=0)
        child.process.send(Generate(6, (), sampling, tokens=text.tokens, watched=False))
        *events, ended = child.told(1)[6]
        assert (ended.metrics.prompt_tokens, ended.metrics.generated_tokens) == (5, 200)
        assert (ended.passes, ended.diagnosis, ended.outliers) == (None, None, ())
        assert not any(isinstance(event, Live) for event in events)
    finally:
        child.process.close()


def test_a_reply_that_is_held_rests_goes_on_and_can_be_cancelled(talk: Callable[..., Talk]) -> None:
    child = talk()
    child.load("steady")
    for request in (1, 2):
        child.say(request=request)
    begun: set[int] = set()
    while begun != {1, 2}:
        event = child.events.get(timeout=PATIENCE_S)
        begun |= {event.id} if isinstance(event, ReplyEvent) and isinstance(event.event, TextChunk) else set()
    for request in (1, 2):
        child.process.send(Hold(request))
    child.say(request=3)
    told = child.told(1)
    assert isinstance(told[3][-1], Finished)  # longer than the two had still to go
    assert not {1, 2} & {id for id, events in told.items() if isinstance(events[-1], Finished)}
    child.process.send(Cancel(1))
    child.process.send(Hold(1))
    child.process.send(GoOn(2))
    ended = child.told(2)
    assert ended[1][-1].reason == "cancelled"  # type: ignore[attr-defined]
    assert ended[2][-1].reason == "stop"  # type: ignore[attr-defined]


# A group size that the settings hold for all models, and a model that can't have it: it loads, and a note says so.


def notes_of(request: Load) -> tuple[str, ...]:
    engine, info = load_engine(request, lambda _: None)
    engine.close()
    return tuple(note.text for note in info.model_notes)


def test_a_stored_group_size_gives_way_with_a_note(tmp_path: Path) -> None:
    folder = str(make_tiny(tmp_path / "model"))
    first, *_ = notes_of(Load(folder, KVSpec(8, 8, group_size=128), prompt_cache=False))
    assert (
        first
        == "this model can't use KV groups of 128: its head dimension is not a multiple of it; the default is used"
    )
    assert not any("KV groups" in note for note in notes_of(Load(folder, KVSpec(8, 8, 64), prompt_cache=False)))


def test_what_else_can_not_be_had_is_still_refused(tmp_path: Path) -> None:
    folder = str(make_tiny(tmp_path / "model", head_size=80))
    for group_size in (64, 128):
        with pytest.raises(OptionError, match="can't be packed"):
            notes_of(Load(folder, KVSpec(8, 8, group_size), prompt_cache=False))


# Every message survives the wire; nothing else gets through it.

NUMBERS = st.integers(0, 2**60)
FLOATS = st.floats(0, 1e12, allow_nan=False)
TEXT = st.text(st.characters(exclude_categories=()), max_size=30)
GAPS = st.builds(Gaps, FLOATS, FLOATS, FLOATS, FLOATS)


def _field(hint: Any) -> st.SearchStrategy[Any]:
    optional = st.none() if type(None) in typing.get_args(hint) else st.nothing()
    if Gaps in (hint, *typing.get_args(hint)):
        return optional | GAPS
    if str in typing.get_args(hint):
        return optional | st.text(max_size=5)
    return optional | (FLOATS if float in (hint, *typing.get_args(hint)) else NUMBERS)


HINTS = typing.get_type_hints(Metrics)
COUNTS = st.none() | st.lists(st.builds(DraftCount, TEXT, NUMBERS, NUMBERS), min_size=1, max_size=3).map(tuple)
METRICS = st.builds(
    Metrics,
    **{field.name: _field(HINTS[field.name]) for field in dataclasses.fields(Metrics) if field.name != "drafts"},
    drafts=COUNTS,
)
OUTLIER = st.builds(Outlier, NUMBERS, FLOATS, st.lists(st.sampled_from(typing.get_args(Cause)), max_size=3).map(tuple))
OUTLIERS = st.lists(OUTLIER, max_size=3).map(tuple)
LIVE = st.builds(
    Live, METRICS, NUMBERS, st.lists(FLOATS, max_size=5).map(tuple), st.none() | NUMBERS, st.none() | FLOATS, OUTLIERS
)
MESSAGE = st.builds(Message, st.sampled_from(["system", "user", "assistant"]), TEXT, TEXT)
SAMPLING = st.builds(
    Sampling,
    temperature=st.floats(0, 10),
    seed=st.none() | NUMBERS,
    stop=st.lists(TEXT.filter(bool), max_size=3).map(tuple),
    stop_token_ids=st.lists(NUMBERS, max_size=3).map(tuple),
    logit_bias=st.dictionaries(NUMBERS, st.floats(-100, 100), max_size=3),
    presence_penalty=st.floats(-2, 2),
    dry_multiplier=st.floats(0, 5),
    dry_sequence_breakers=st.lists(TEXT.filter(bool), max_size=3).map(tuple),
    order=st.permutations(STAGES),
    logprobs=st.none() | st.integers(0, 9),
)
KV = st.builds(
    KVSpec,
    key_bits=st.sampled_from([16, 8, 4]),
    keep=st.just("system") | st.integers(0, 9),
    window=st.none() | st.just(99),
)
WHERE = st.builds(Where, TEXT, st.none() | NUMBERS, st.none() | FLOATS)
QUESTION = st.builds(
    Question, st.sampled_from(typing.get_args(Wanted)), TEXT, st.none() | st.just(4), KV, NUMBERS, NUMBERS, WHERE
)
FIGURES = st.builds(
    Figures, st.none() | NUMBERS, st.none() | NUMBERS, st.none() | st.booleans(), *[st.none() | FLOATS] * 3, TEXT
)
SPOT = st.builds(
    Spot, st.sampled_from(["decode", "prefill"]), FLOATS, st.sampled_from([None, "memory"]), FLOATS, st.none()
)
MAYBE = st.none() | FLOATS
MEMORY_FIT = st.builds(
    MemoryFit, NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.none() | NUMBERS, st.none() | st.booleans(), NUMBERS
)
WIDTH = st.builds(
    WidthOutcome, NUMBERS, MAYBE, MAYBE, st.none() | st.sampled_from(typing.get_args(Waits)), MEMORY_FIT, MAYBE
)
CAPACITY = st.builds(
    Capacity, TEXT, st.booleans(), st.none() | NUMBERS, NUMBERS, NUMBERS, st.lists(WIDTH, max_size=2).map(tuple),
    st.none() | NUMBERS, st.booleans(), MAYBE, st.none() | NUMBERS, st.none() | NUMBERS, st.lists(TEXT, max_size=2).map(tuple),
)  # fmt: skip
ANSWER = st.builds(
    Answer,
    TEXT,
    TEXT,
    TEXT,
    st.none() | NUMBERS,
    st.lists(
        st.builds(CaseLine, st.sampled_from(typing.get_args(Change)), st.none(), NUMBERS, NUMBERS, NUMBERS, FIGURES),
        max_size=2,
    ).map(tuple),
    st.lists(st.builds(CurvePoint, NUMBERS, FLOATS, st.none()), max_size=2).map(tuple),
    st.none() | st.builds(Roof, FLOATS, FLOATS, FLOATS, st.lists(SPOT, max_size=2).map(tuple)),
    st.lists(st.builds(ChipLine, TEXT, FLOATS, FIGURES), max_size=2).map(tuple),
    st.lists(st.builds(ModelLine, TEXT, NUMBERS, st.none(), NUMBERS, TEXT, FIGURES), max_size=2).map(tuple),
    at_once=st.none() | CAPACITY,
)
PARTS = st.tuples(
    st.builds(TimePart, st.just("wait"), FLOATS),
    st.builds(
        TimePart, st.just("prefill"), FLOATS, st.sampled_from([None, *typing.get_args(Waits)]), FLOATS, st.none()
    ),
)
REMEDY = st.builds(Remedy, st.sampled_from(typing.get_args(RemedyName)), FLOATS, st.none() | NUMBERS, FLOATS, st.none())
TERM = st.builds(
    Term,
    TEXT,
    st.sampled_from(typing.get_args(Concern)),
    TEXT,
    TEXT,
    st.none() | FLOATS,
    st.sampled_from(typing.get_args(Unit)),
)
DIAGNOSIS = st.builds(
    Diagnosis,
    PARTS,
    st.lists(REMEDY, max_size=3).map(tuple),
    st.lists(TERM, max_size=3).map(tuple),
    st.lists(st.sampled_from(typing.get_args(Throttle)), max_size=2).map(tuple),
)
KV_USE = st.builds(KVUse, NUMBERS, st.none() | NUMBERS, NUMBERS)
PASS_COST = st.builds(
    PassCost,
    NUMBERS,
    NUMBERS,
    st.none() | FLOATS,
    st.none() | NUMBERS,
    NUMBERS,
    st.lists(st.tuples(NUMBERS, KV_USE), max_size=2).map(tuple),
    st.lists(st.tuples(NUMBERS, st.builds(Attention, NUMBERS, st.none() | NUMBERS)), max_size=2).map(tuple),
    st.none() | FLOATS,
    st.none() | FLOATS,
)
PIECES = st.lists(st.builds(PromptPiece, NUMBERS, FLOATS), max_size=3).map(tuple)
PASSES = st.none() | st.builds(PassLog, PIECES, NUMBERS, TEXT, PASS_COST, st.booleans())
ALTERNATIVES = st.lists(st.builds(Alternative, NUMBERS, TEXT, FLOATS), max_size=2).map(tuple)
STEP_TOKENS = st.lists(
    st.builds(StepToken, NUMBERS, TEXT, FLOATS, ALTERNATIVES, NUMBERS, NUMBERS, st.booleans()), max_size=2
).map(tuple)
ASKER = st.sampled_from(typing.get_args(Asker))
REQUESTS = st.one_of(
    st.builds(protocol.Load, TEXT, KV, st.booleans()),
    st.builds(
        protocol.Generate,
        NUMBERS,
        st.lists(MESSAGE, max_size=4).map(tuple),
        SAMPLING,
        background=st.booleans(),
        kv_bits=st.none() | st.tuples(NUMBERS, NUMBERS),
    ),
    *(st.builds(kind, NUMBERS) for kind in (protocol.Cancel, protocol.KeepGoing, protocol.Hold, protocol.GoOn)),
    st.builds(protocol.Warm, NUMBERS, st.lists(MESSAGE, max_size=4).map(tuple)),
    st.builds(protocol.AskPrice, ASKER, NUMBERS, st.lists(MESSAGE, max_size=4).map(tuple)),
    st.builds(protocol.AskCount, NUMBERS, TEXT),
    st.builds(
        protocol.AskEmbeddings, NUMBERS, st.lists(TEXT, max_size=2).map(tuple), st.none() | TEXT, st.none() | NUMBERS
    ),
    st.builds(protocol.AskTokens, NUMBERS, TEXT, st.lists(MESSAGE, max_size=2).map(tuple), continues=st.booleans()),
    st.builds(protocol.AskWhatIf, NUMBERS, QUESTION),
    st.builds(
        protocol.LookAgain, NUMBERS, st.lists(MESSAGE, max_size=2).map(tuple), MESSAGE, PASSES, st.none() | NUMBERS
    ),
    st.just(protocol.StopLooking()),
    st.builds(protocol.Share, TEXT),
    st.builds(protocol.Join, st.none() | st.builds(protocol.Load, TEXT, KV), st.none() | FLOATS),
    st.builds(protocol.LimitMemory, st.none() | NUMBERS),
    st.builds(protocol.SetPace, NUMBERS, st.none() | NUMBERS),
    st.just(protocol.Quit()),
)
PRICE = st.builds(Price, NUMBERS, NUMBERS, NUMBERS, st.none() | FLOATS)
LOGPROB = st.builds(
    TokenLogprob, NUMBERS, TEXT, FLOATS, st.lists(st.builds(Alternative, NUMBERS, TEXT, FLOATS), max_size=2).map(tuple)
)
EVENT = {
    Truncated: st.builds(Truncated, NUMBERS, NUMBERS),
    MemoryPressure: st.builds(MemoryPressure, NUMBERS, st.none() | NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    LoopFound: st.builds(LoopFound, NUMBERS, st.none() | NUMBERS),
    PrefillProgress: st.builds(PrefillProgress, NUMBERS, NUMBERS, NUMBERS),
    TextChunk: st.builds(
        TextChunk,
        TEXT,
        st.sampled_from(["answer", "thinking"]),
        st.lists(NUMBERS, max_size=3).map(tuple),
        st.lists(LOGPROB, max_size=2).map(tuple),
    ),
    ToolCallDelta: st.builds(ToolCallDelta, TEXT, TEXT, TEXT),
    ToolCall: st.builds(ToolCall, TEXT, st.just('{"a": 1}'), TEXT, TEXT),
    Live: LIVE,
    Finished: st.builds(
        Finished,
        st.sampled_from(["stop", "length", "cancelled"]),
        TEXT,
        METRICS,
        TEXT,
        outliers=OUTLIERS,
        diagnosis=st.none() | DIAGNOSIS,
        stopped_by=st.none() | TEXT | NUMBERS,
        passes=PASSES,
    ),
}
MESSAGES = st.one_of(
    st.builds(LoadProgress, st.sampled_from(["download", "weights"]), NUMBERS, st.none() | NUMBERS),
    st.builds(protocol.MachineMeasured, st.none() | FLOATS, st.none() | FLOATS, TEXT),
    st.builds(
        protocol.Loaded,
        st.builds(ModelSpec, TEXT, TEXT.map(Path), recommended=st.just(Sampling()), bits_per_weight=st.none() | FLOATS),
        st.none() | FLOATS,
    ),
    st.builds(protocol.Loading),
    st.builds(protocol.ReplyEvent, NUMBERS, st.one_of(*EVENT.values())),
    st.builds(protocol.MemoryUse, NUMBERS, st.none() | NUMBERS, NUMBERS, st.none() | NUMBERS, TEXT),
    st.builds(protocol.Warmed, NUMBERS, st.none() | PRICE),
    st.builds(protocol.Counted, NUMBERS, st.none() | NUMBERS),
    st.builds(
        protocol.Embedded,
        NUMBERS,
        st.lists(TEXT, max_size=2).map(tuple),
        st.lists(NUMBERS, max_size=2).map(tuple),
        TEXT,
    ),
    st.builds(protocol.PromptTokens, NUMBERS, st.lists(NUMBERS, max_size=3).map(tuple), TEXT),
    st.builds(protocol.Priced, ASKER, NUMBERS, st.none() | PRICE),
    st.builds(protocol.WhatIf, NUMBERS, st.none() | ANSWER, TEXT, NUMBERS, NUMBERS),
    st.builds(protocol.LookedAt, NUMBERS, st.none() | st.builds(PromptText, NUMBERS, st.just(("a",)))),
    st.builds(protocol.LookedAt, NUMBERS, st.none(), st.builds(StepTokens, NUMBERS, NUMBERS, STEP_TOKENS)),
    st.builds(protocol.EngineNotice, TEXT),
    st.builds(protocol.Guests, NUMBERS),
    st.just(protocol.Heartbeat()),
    st.builds(protocol.RequestFailed, st.none() | NUMBERS, TEXT, TEXT, TEXT),
)


@settings(max_examples=60, deadline=None)
@given(REQUESTS)
def test_requests_round_trip(request: protocol.Request) -> None:
    line = protocol.encode(request)
    assert line.count(b"\n") == 1
    assert protocol.decode_request(line) == request


@settings(max_examples=100, deadline=None)
@given(MESSAGES)
def test_replies_round_trip(reply: protocol.EngineMessage) -> None:
    assert protocol.decode_message(protocol.encode(reply)) == reply


@pytest.mark.parametrize("kind", [*typing.get_args(Event), Live])
@settings(max_examples=20, deadline=None)
@given(drawn=st.data())
def test_every_event_of_the_engine_crosses_as_it_is(kind: type, drawn: st.DataObject) -> None:
    event = drawn.draw(EVENT[kind])
    line = protocol.encode(protocol.ReplyEvent(7, event))
    assert json.loads(line)["event"]["type"] == kind.__name__.lower()
    assert protocol.decode_message(line) == protocol.ReplyEvent(7, event)


@pytest.mark.parametrize("event", ["null", "7", "{}", '{"type":"heartbeat"}', '{"type":["live"]}', '{"type":"truncated"}',
    '{"type":"truncated","messages":1,"tokens":2,"more":3}'])  # fmt: skip
def test_what_is_no_event_of_the_engine_is_refused(event: str) -> None:
    with pytest.raises(protocol.WireError):
        protocol.decode_message(b'{"type":"replyevent","id":1,"event":%s}' % event.encode())


@pytest.mark.parametrize("kind", typing.get_args(protocol.Request) + typing.get_args(protocol.EngineMessage))
def test_every_kind_is_among_what_is_tried_above(kind: type) -> None:
    tried = REQUESTS if kind in typing.get_args(protocol.Request) else MESSAGES
    first = settings(max_examples=5000, phases=(Phase.generate,), deadline=None)  # any will do: it is not made smaller
    assert isinstance(find(tried, lambda message: isinstance(message, kind), settings=first), kind)


@settings(max_examples=100, deadline=None)
@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | TEXT | NUMBERS, lambda x: st.lists(x) | st.dictionaries(TEXT, x), max_leaves=5).map(
        lambda v: json.dumps(v).encode()
    )
)
def test_garbage_is_a_wire_error(line: bytes) -> None:
    with pytest.raises(protocol.WireError):
        protocol.decode_message(line)


@pytest.mark.parametrize(
    "line",
    [
        b'{"type":"prefill","id":1,"done":1,"total":2}',
        b'{"type":"prefill","id":1,"done":1,"total":2,"cached":0,"extra":1}',
        b'{"type":"prefill","id":true,"done":1,"total":2,"cached":0}',
        b'{"type":"prefill","id":1.5,"done":1,"total":2,"cached":0}', b'{"type":"text","id":1,"text":"a","kind_":"x"}',
        b'{"type":"text","id":1,"text":null}',
        b'{"type":"priced","asker":"draft","id":1,"price":{"prompt_tokens":1,"tokens":1,"disk_bytes":0}}',
        b'{"type":"priced","asker":"someone","id":1,"price":null}', b'{"type":"notice"}',
        b'{"type":"loading","stage":"else","done":0,"total":1}',
        b'{"type":"loaded","info":{"name":"x"},"ceiling_tps":NaN}', b'{"type":"send","id":1,"messages":[]}',
        b'{"type":["text"]}', b"[" * 100_000, b'{"type":"loaded","info":{"name":"x"},"ceiling_tps":1e999}',
    ],
)  # fmt: skip
def test_almost_messages_are_wire_errors(line: bytes) -> None:
    with pytest.raises(protocol.WireError):
        protocol.decode_message(line)


def test_options_out_of_range_are_wire_errors() -> None:
    line = protocol.encode(Generate(1, (), Sampling(temperature=0.7))).replace(
        b'"temperature":0.7', b'"temperature":-1'
    )
    with pytest.raises(protocol.WireError, match="temperature"):
        protocol.decode_request(line)


@pytest.mark.parametrize("bias", ["[[1]]", "[[1,2,3]]", "[[1.5,2]]", '[["1",2]]', "[1,2]", '{"1":2}'])
def test_a_bias_that_is_no_pairs_is_a_wire_error(bias: str) -> None:
    line = protocol.encode(Generate(1, (), Sampling(logit_bias={7: 0.5}))).replace(b"[[7,0.5]]", bias.encode())
    with pytest.raises(protocol.WireError, match="bias"):
        protocol.decode_request(line)


def test_a_line_over_the_limit_is_a_wire_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LONGEST_LINE", 100)
    with pytest.raises(protocol.WireError, match="too long"):
        protocol.decode_message(b" " * 101)


# Text leaves the engine's process in batches: the first piece at once, then as often as the device can spare.


def lines(fd: int) -> list[object]:
    os.set_blocking(fd, False)
    try:
        return [decode_message(line) for line in os.read(fd, 1 << 16).splitlines(keepends=True)]
    except BlockingIOError:
        return []


@pytest.fixture
def pipe() -> tuple[int, int]:
    return os.pipe()


def test_the_first_text_goes_at_once_and_what_follows_waits(pipe: tuple[int, int]) -> None:
    out, outbox = pipe[0], Outbox(pipe[1])
    outbox.suit("cpu")
    for piece in ("a", "b", "c"):
        outbox.put(ReplyEvent(1, TextChunk(piece)))
    assert lines(out) == [ReplyEvent(1, TextChunk("a"))]
    outbox.flush()
    assert lines(out) == [ReplyEvent(1, TextChunk("bc"))]


def test_text_of_several_replies_waits_together_and_goes_in_one_piece(pipe: tuple[int, int]) -> None:
    out, outbox = pipe[0], Outbox(pipe[1])
    outbox.flush_s = 60.0
    outbox.put(ReplyEvent(1, TextChunk("a")))
    lines(out)
    for piece in ("b", "c"):
        outbox.put(ReplyEvent(1, TextChunk(piece)))
        outbox.put(ReplyEvent(2, TextChunk(piece, "thinking")))
    outbox.put(ReplyEvent(2, TextChunk("d")))
    outbox.put(ReplyEvent(2, TextChunk("e", "thinking")))
    assert lines(out) == []
    outbox.put(ReplyEvent(1, PrefillProgress(1, 2, 0)))
    assert lines(out) == [
        ReplyEvent(1, TextChunk("bc")),
        ReplyEvent(2, TextChunk("bc", "thinking")),
        ReplyEvent(2, TextChunk("d")),
        ReplyEvent(2, TextChunk("e", "thinking")),
        ReplyEvent(1, PrefillProgress(1, 2, 0)),
    ]


def test_pieces_of_a_call_wait_as_text_does_and_never_for_those_of_another(pipe: tuple[int, int]) -> None:
    out, outbox = pipe[0], Outbox(pipe[1])
    outbox.flush_s = 60.0
    whole = ToolCall("f", '{"a": 1}', "x")
    outbox.put(ReplyEvent(1, TextChunk("a")))
    lines(out)
    for piece in ('{"a"', ": ", "1}"):
        outbox.put(ReplyEvent(1, ToolCallDelta("f", piece, "x")))
    assert lines(out) == []
    outbox.put(ReplyEvent(1, whole))
    outbox.put(ReplyEvent(1, ToolCallDelta("g", "{", "x2")))
    outbox.put(ReplyEvent(1, TextChunk("b")))
    outbox.flush()
    assert lines(out) == [
        ReplyEvent(1, ToolCallDelta("f", '{"a": 1}', "x")),
        ReplyEvent(1, whole),
        ReplyEvent(1, ToolCallDelta("g", "{", "x2")),
        ReplyEvent(1, TextChunk("b")),
    ]


def test_beside_a_model_on_the_cpu_the_screen_is_woken_more_rarely(pipe: tuple[int, int]) -> None:
    outbox = Outbox(pipe[1])
    assert outbox.flush_s == client.TEXT_FLUSH_S
    outbox.suit("cpu")
    assert outbox.flush_s > client.TEXT_FLUSH_S
    outbox.suit("metal")
    assert outbox.flush_s == client.TEXT_FLUSH_S


def test_a_batch_keeps_every_token_of_its_chunks_and_one_kind_of_text(pipe: tuple[int, int]) -> None:
    out, outbox = pipe[0], Outbox(pipe[1])
    outbox.flush_s = 60.0
    a, b = TokenLogprob(7, "b", -0.5, (Alternative(8, "c", -1.0),)), TokenLogprob(9, "d", -0.25)
    outbox.put(ReplyEvent(1, TextChunk("a", ids=(6,))))
    outbox.put(ReplyEvent(1, TextChunk("b", ids=(7,), logprobs=(a,))))
    outbox.put(ReplyEvent(1, TextChunk("d", ids=(9,), logprobs=(b,))))
    outbox.put(ReplyEvent(1, TextChunk("e", "thinking")))
    outbox.put(ReplyEvent(2, TextChunk("f", "thinking")))
    outbox.flush()
    assert lines(out) == [
        ReplyEvent(1, TextChunk("a", ids=(6,))),
        ReplyEvent(1, TextChunk("bd", ids=(7, 9), logprobs=(a, b))),
        ReplyEvent(1, TextChunk("e", "thinking")),
        ReplyEvent(2, TextChunk("f", "thinking")),
    ]


def test_a_batch_says_which_of_its_characters_were_guessed(pipe: tuple[int, int]) -> None:
    out, outbox = pipe[0], Outbox(pipe[1])
    outbox.flush_s = 60.0
    for text, guessed in (("ab", ((0, 2),)), ("c", ((0, 1),)), ("de", ()), ("fgh", ((1, 2),)), ("i", ((0, 1),))):
        outbox.put(ReplyEvent(1, TextChunk(text, guessed=guessed)))
    outbox.flush()
    at_once, batch = TextChunk("ab", guessed=((0, 2),)), TextChunk("cdefghi", guessed=((0, 1), (4, 5), (6, 7)))
    assert lines(out) == [ReplyEvent(1, at_once), ReplyEvent(1, batch)]


# The user's own shell: real processes, which leave nothing behind.


def run_shell(text: str, folder: Path, **options: float) -> processes.ShellOutput:
    return processes.ShellCommand(text, folder, **options).run()


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{process}/stat")
    return not (stat.exists() and " Z " in stat.read_text())  # nobody waits for an orphan in a container


@pytest.fixture(autouse=True)
def _usual_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/bin/sh")


def test_a_command_runs_in_its_folder_and_both_its_outputs_come_in_order(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    done = run_shell("pwd; echo oh >&2; echo end; exit 3", tmp_path / "here")
    assert (done.text, done.status, done.how) == (f"{(tmp_path / 'here').resolve()}\noh\nend", 3, "exit status 3")
    assert run_shell("true", tmp_path).how == ""
    assert run_shell("kill -SEGV $$", tmp_path).how == "killed by SIGSEGV"


def test_a_command_has_no_terminal_and_nothing_to_read(tmp_path: Path) -> None:
    done = run_shell("cat; test -t 0 || test -t 1 || echo none; (: </dev/tty) 2>/dev/null || echo no tty", tmp_path)
    assert done.text == "none\nno tty"


def test_nothing_that_a_terminal_obeys_is_left_of_its_output(tmp_path: Path) -> None:
    done = run_shell(r"printf 'a\033[31mred\033[0m\007 \033]52;c;ZWNobw==\007b\r\nc'", tmp_path)
    assert done.text == "ared b\nc"


def test_of_a_large_output_both_ends_are_kept_and_what_is_left_out_is_said(tmp_path: Path) -> None:
    done = run_shell("seq 1 100000", tmp_path)
    assert done.text.startswith("1\n2\n")
    assert done.text.endswith("99999\n100000")
    assert f"[… {done.left_out:,} bytes were left out]" in done.text
    assert len(done.text) < processes.KEPT_BYTES + 100


def test_a_command_that_never_ends_its_output_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MOST_BYTES", 1_000_000)
    assert run_shell("yes", tmp_path).ending is processes.ShellEnding.TOO_MUCH
    assert run_shell("sleep 60", tmp_path, deadline_s=0.1).ending is processes.ShellEnding.DEADLINE


@pytest.mark.parametrize("deaf", [False, True])
def test_stopping_ends_the_whole_group(tmp_path: Path, deaf: bool) -> None:
    trap = "trap '' TERM; " if deaf else ""
    command = processes.ShellCommand(f"{trap}echo begun; sleep 60 & echo $! > child; wait", tmp_path)
    work = threading.Thread(target=lambda: ended.append(command.run()))
    ended: list[processes.ShellOutput] = []
    work.start()
    child = tmp_path / "child"
    until(lambda: child.exists() and child.read_text().strip())
    command.stop()
    work.join(PATIENCE_S)
    assert (ended[0].ending, ended[0].text) == (processes.ShellEnding.STOPPED, "begun")
    until(lambda: not is_running(int(child.read_text())))


def test_what_a_command_leaves_in_the_background_ends_with_it(tmp_path: Path) -> None:
    done = run_shell("sleep 60 & echo $!", tmp_path)
    assert done.ending is processes.ShellEnding.ITSELF
    until(lambda: not is_running(int(done.text)))


def test_a_command_that_was_stopped_before_it_ran_never_runs(tmp_path: Path) -> None:
    command = processes.ShellCommand("touch made", tmp_path)
    command.stop()
    assert command.run().ending is processes.ShellEnding.STOPPED
    assert not (tmp_path / "made").exists()


def test_a_shell_that_is_not_there_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", str(tmp_path / "nosuch"))
    with pytest.raises(processes.ShellError, match="could not be started"):
        run_shell("true", tmp_path)


def test_what_holds_replies_to_a_form_is_made_at_load_for_one_who_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """llguidance reads a vocabulary without letting anything else run, which the replies of others would wait for."""
    request = Load("guide", prompt_cache=False, forms=True)
    engine, _ = load_engine(request, lambda _: None)
    monkeypatch.setattr(grammar, "GrammarTokens", None)  # makes no more of them
    with engine:
        held = Sampling(temperature=0, max_tokens=30, json_schema='{"const": "yes"}')
        *_, end = engine.generate([Message("user", "Hello")], held)
        assert end.text == '"yes"'
        plain, _ = load_engine(dataclasses.replace(request, forms=False), lambda _: None)
        with plain, pytest.raises(TypeError):
            list(plain.generate([Message("user", "Hello")], held))
    assert request.same_engine(dataclasses.replace(request, forms=False))


class Unread:
    """What llguidance says of a tokenizer that it can't read."""

    def __init__(self, *_: object, **__: object) -> None:
        raise ValueError("error loading tokenizer:\nunsupported")


@pytest.mark.parametrize(
    ("library", "said"),
    [(None, "needs llguidance"), (types.SimpleNamespace(LLTokenizer=Unread), "tokenizer: unsupported")],
)
def test_a_server_loads_a_model_that_no_form_can_hold(
    monkeypatch: pytest.MonkeyPatch, library: object, said: str
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", library)
    engine, info = load_engine(Load("guide", prompt_cache=False, forms=True), lambda _: None)
    with engine, pytest.raises(GrammarError, match=said):
        engine.generate([Message("user", "Hello")], Sampling(json_schema="{}")).send(None)
    assert info.name == "guide"
