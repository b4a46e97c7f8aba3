"""The engine's process, really started: replies, cancelling, crash, freeze, garbage, and its end with the screen's."""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.scripted_engine import SCRIPTED
from tests.tiny import make_tiny
from tokamac.app.backend.client import CHILD_COMMAND, BackendEvent, Died, EngineProcess, Garbled
from tokamac.app.backend.protocol import (
    AskCount,
    AskPrice,
    Cancel,
    EngineNotice,
    Failed,
    Generate,
    Heartbeat,
    Load,
    Loaded,
    Priced,
    ReplyEvent,
    Unload,
    Unloaded,
    Warm,
    encode,
)
from tokamac.engine.events import Finished, Live, LoadProgress, Message, PrefillProgress, TextChunk
from tokamac.engine.files import FLUSH_S
from tokamac.engine.options import Sampling

PATIENCE_S = 20.0


class Talk:
    """A started process and the events it sent."""

    def __init__(self, log: Path, command: list[str], silence_s: float = 10.0) -> None:
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

    def load(self, model: str, *, prompt_cache: bool = True) -> list[object]:
        self.process.send(Load(model, prompt_cache=prompt_cache))
        return self.until(Loaded, Failed, Died)

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

    def start(command: list[str] | None = None, silence_s: float = 10.0) -> Talk:
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
    child.say(max_tokens=8)
    events = child.until(Finished)
    done = events[-1]
    assert isinstance(done, Finished)
    assert done.reason == "length"
    assert text_of(events) == done.text
    assert done.metrics.generated_tokens == 8
    prefills = [event for event in events if isinstance(event, PrefillProgress)]
    assert prefills[-1].done == prefills[-1].total
    assert any(isinstance(event, Live) for event in events)
    assert any(isinstance(event, Heartbeat) for event in events)


def test_text_is_batched(talk: Callable[..., Talk]) -> None:
    child = talk()
    child.load("list")
    child.say()
    events = child.until(Finished)
    texts = [event for event in events if isinstance(event, TextChunk)]
    done = events[-1]
    assert isinstance(done, Finished)
    assert text_of(events) == done.text
    assert len(texts) < done.metrics.generated_tokens / 3


def test_cancel_ends_the_reply_and_the_next_one_runs(talk: Callable[..., Talk]) -> None:
    child = talk()
    child.load("slow")
    child.say()
    child.until(TextChunk)
    child.process.send(Cancel(1))
    done = child.until(Finished)[-1]
    assert isinstance(done, Finished)
    assert done.reason == "cancelled"
    assert done.text
    child.say(request=2, max_tokens=2)
    assert isinstance(child.until(Finished)[-1], Finished)


def test_a_cancel_that_overtakes_its_request_still_counts(talk: Callable[..., Talk]) -> None:
    child = talk()
    child.load("slow")
    child.process.send(Cancel(1))
    child.say()
    done = child.until(Finished)[-1]
    assert isinstance(done, Finished)
    assert done.reason == "cancelled"


def test_failures_are_events_and_the_process_goes_on(talk: Callable[..., Talk]) -> None:
    child = talk()
    child.say()
    assert child.until(Failed)[-1] == Failed(1, "no model is loaded", "Choose one with /model.")
    assert isinstance(child.load("missing")[-1], Failed)
    assert any(isinstance(event, LoadProgress) for event in child.load("slow-load"))
    child.load("tiny-context")
    child.say("a prompt that is longer than eight tokens of four characters")
    failed = child.until(Failed)[-1]
    assert isinstance(failed, Failed)
    assert "context" in failed.error
    child.process.send(Unload())
    assert child.until(Unloaded)


LONG = "a question with many words " * 40


def test_what_is_read_ahead_is_not_computed_again(talk: Callable[..., Talk]) -> None:
    child = talk()
    assert child.price(LONG, 1) == Priced("draft", 1, None)  # there is no model
    child.load("fast")
    before = child.price(LONG, 2).price
    child.process.send(Warm(1, (Message("user", LONG),)))
    after = child.price(LONG, 3).price
    assert before is not None
    assert after is not None
    assert before.tokens == before.prompt_tokens == after.prompt_tokens > 10 * after.tokens
    child.say(LONG)
    done = child.until(Finished)[-1]
    assert isinstance(done, Finished)
    assert done.metrics.cached_tokens == after.prompt_tokens - after.tokens


def test_the_answer_is_read_again_after_thinking(talk: Callable[..., Talk]) -> None:
    child = talk()
    for model, read in (("fast", 0), ("thinking", 1)):
        child.load(model)
        child.say("hello")
        done = child.until(Finished)[-1]
        assert isinstance(done, Finished)
        assert child.price("hello", 1).price  # asked after the reading
        said = f"warm [('user', 5), ('assistant', {len(done.text)}), ('user', 0)]"
        assert child.log.read_text().count(said) == read


def test_without_a_prompt_cache_nothing_is_read_ahead(talk: Callable[..., Talk]) -> None:
    child = talk()
    child.load("thinking", prompt_cache=False)
    child.process.send(Warm(1, (Message("user", LONG),)))
    child.say()
    child.until(Finished)
    priced = child.price(LONG, 1).price
    assert priced is not None
    assert priced.tokens == priced.prompt_tokens
    assert "warm" not in child.log.read_text()


def test_trouble_with_the_prompt_cache_is_told_once_after_a_reply(talk: Callable[..., Talk]) -> None:
    child = talk()
    child.load("full-disk")
    child.say()
    child.until(Finished)
    notice = child.until(EngineNotice)[-1]
    assert isinstance(notice, EngineNotice)
    assert "disk full" in notice.text
    child.say(request=2)
    child.until(Finished)
    child.process.send(Unload())
    assert not any(isinstance(event, EngineNotice) for event in child.until(Unloaded))


def test_trouble_with_the_prompt_cache_is_told_while_idle(talk: Callable[..., Talk]) -> None:
    child = talk()
    child.load("full-disk")
    child.process.send(Warm(1, (Message("user", LONG),)))
    assert child.until(EngineNotice)


def test_advice_on_the_installation_is_told_once_in_all(
    talk: Callable[..., Talk], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    told = []
    for _ in range(2):  # two starts of the chat
        child = talk()
        child.load("old-wheel")
        child.say()
        told.append([event.text for event in child.until(Finished) if isinstance(event, EngineNotice)])
    assert told == [["The installed MLX leaves the accelerators unused."], []]


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
    deadline = time.monotonic() + PATIENCE_S
    while child.process.alive:
        assert time.monotonic() < deadline
        time.sleep(0.01)

    monkeypatch.setattr(child.process._process, "poll", lambda: None)  # as while another thread waits for it
    monkeypatch.setattr(os, "kill", refuse)
    child.process.kill()  # of what is a zombie by now, nobody complains


@pytest.mark.parametrize("temporary", [True, False])
def test_where_the_log_can_not_be_written_the_process_runs_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temporary: bool
) -> None:
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
        assert child.stdin is not None
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


def test_close_reaps(tmp_path: Path) -> None:
    child = Talk(tmp_path / "l", SCRIPTED)
    child.load("fast")
    child.process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child.process.pid, 0)


def test_a_process_that_does_not_read_any_more_is_only_dead(tmp_path: Path) -> None:
    events: queue.Queue[BackendEvent] = queue.Queue()
    deaf = "import os, time; os.close(0); os.write(2, b'deaf'); time.sleep(2)"
    process = EngineProcess([sys.executable, "-c", deaf], tmp_path / "log", events.put)
    while (tmp_path / "log").read_bytes() != b"deaf":
        time.sleep(0.01)
    process.send(Cancel(1))
    assert isinstance(events.get(timeout=PATIENCE_S), Died)
    for thread in threading.enumerate():
        if thread.name == "engine-_write":
            thread.join(PATIENCE_S)  # what it raises is an error of this test


SLOW_DISK = """
import sys, time
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


@pytest.mark.parametrize("leaving", ["close", "kill"])
def test_what_was_computed_is_written_before_the_process_ends_though_the_disk_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaving: str
) -> None:
    monkeypatch.setenv("TOKAMAC_CACHE_DIR", str(tmp_path / "cache"))
    model = make_tiny(tmp_path / "model")
    seconds = FLUSH_S - 0.6  # longer than the process had before it was ended
    child = Talk(tmp_path / "log", [sys.executable, "-c", SLOW_DISK.format(seconds=seconds)])
    assert isinstance(child.load(str(model))[-1], Loaded)
    child.say("x" * 300, max_tokens=2)
    assert isinstance(child.until(Finished, Failed)[-1], Finished)
    if leaving == "close":
        child.process.close()
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
        failed = child.until(Failed, Died)[-1]
        assert isinstance(failed, Failed)
        assert "retry-limit" in failed.error
        assert failed.hint
        child.process.send(AskCount(7, "a" * 400 + "!"))
        child.say("A", request=2, max_tokens=2)
        assert isinstance(child.until(Finished, Died)[-1], Finished)
    finally:
        child.process.close()
