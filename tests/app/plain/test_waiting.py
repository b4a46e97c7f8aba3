"""``tokamac chat --plain`` while nobody writes, and Ctrl-C whatever is waited for."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.app.plain.plain_chat import PATIENCE_S, Terminal, children, last_path, spawn
from tests.scripted_engine import model_spec
from tests.waiting import until
from tokamac.app import INTERRUPTED
from tokamac.app.backend.processes import Ended, LineProcess
from tokamac.app.backend.protocol import AskCount, Counted, Loaded
from tokamac.app.chat.attachments import Draft
from tokamac.app.chat.start import ChatOptions, begin
from tokamac.app.chat.steps import Ask
from tokamac.app.models.jobs import ConversionJob, ConversionPhase
from tokamac.app.plain.commands import run_aside
from tokamac.app.plain.console import HEARD_S, Console, Meanwhile, interruptible, noticed, unbroken
from tokamac.app.plain.repl import Repl
from tokamac.app.store.store import Store

# `tokamac chat --plain` while nobody writes: the model gives the chat a title; an unused one gives its memory back.

TOLD = "has been unloaded"
TITLE = "Where decode spends its time"


@pytest.fixture
def hasty(tmp_path: Path, data: Path, terminal: Callable[..., Terminal]) -> Callable[..., Terminal]:
    """Starts a chat on a terminal in which an unused minute passes in a tenth of a second; ``folder`` is where it is kept."""

    def start(scenario: str, settings: str, folder: str = "data") -> Terminal:
        path = tmp_path / f"{folder}.toml"
        path.write_text(settings)
        own = {"TOKAMAC_DATA_DIR": str(tmp_path / folder), "TEST_SETTINGS": str(path), "TEST_HASTE": "600"}
        return terminal(scenario, "--plain", TERM="dumb", NO_COLOR="1", **own)

    return start


def test_an_unused_model_is_unloaded_while_a_line_is_waited_for(hasty: Callable[..., Terminal], data: Path) -> None:
    chat = hasty("fast", "unload_after_min = 1\n")
    chat.until("you> ")
    until(lambda: not children(chat.process.pid))  # nothing was asked yet, and nothing was pressed
    chat.type("hi\n")
    chat.until(TOLD)  # not before the line is whole
    chat.until("every weight once per token")
    chat.until("you> ")
    until(lambda: not children(chat.process.pid))
    chat.type("/edit ho\n")
    chat.until("every weight once per token")
    assert chat.leave() == 0
    assert [message.text for message in last_path(data) if message.role == "user"] == ["ho"]


def test_a_server_that_could_not_start_keeps_no_model_in_memory(hasty: Callable[..., Terminal]) -> None:
    chat = hasty("fast", "unload_after_min = 1\n")
    chat.until("you> ")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        chat.type(f"/serve {taken.getsockname()[1]}\n")
        chat.until("is in use")
    until(lambda: not children(chat.process.pid))
    chat.type("hi\n")
    chat.until(TOLD)
    assert chat.leave() == 0


def titled(data: Path) -> tuple[str, str]:
    with Store.open(data) as store:
        (chat,) = store.chats()
        return chat.title, chat.title_origin


def entitled(chat: Terminal, data: Path) -> bool:
    """Whether the chat, which waits for a line, has its title: what came meanwhile is written when the line is whole."""
    chat.type("/stop\n")
    chat.until("you> ")
    return titled(data) == (TITLE, "model")


def test_the_model_gives_a_title_while_a_line_is_waited_for(hasty: Callable[..., Terminal], data: Path) -> None:
    chat = hasty("entitles", "")
    chat.say("hi\n")
    chat.until("you> ")
    assert titled(data) == ("hi", "words")
    until(lambda: entitled(chat, data))
    chat.type("and on\n")
    chat.until("entitles: Title:")
    assert chat.leave() == 0
    assert chat.shown.count(TITLE.encode()) == 2  # both replies; that there is a title interrupts nobody


@pytest.mark.parametrize(
    ("settings", "own", "title"), [('titles = "words"\n', "/stop\n", "hi"), ("", "/title Mine\n", "Mine")]
)
def test_a_chat_that_is_to_keep_its_words_or_has_a_title_of_the_users_gets_none(
    hasty: Callable[..., Terminal], data: Path, tmp_path: Path, *, settings: str, own: str, title: str
) -> None:
    chat = hasty("entitles", settings)
    for text in (f"hi\n{own}", "/stop\n"):
        chat.say(text)
    chat.until("you> ")
    chat.until("you> ")
    another = hasty("entitles", "", "another")  # begun later, which gets one
    another.say("hi\n")
    another.until("you> ")
    until(lambda: entitled(another, tmp_path / "another" / "chats" / "chats.db"))
    chat.type("/stop\n")
    chat.until("you> ")
    assert titled(data)[0] == title
    for each in (chat, another):
        each.type("\x04")
        assert each.left() == 0


def test_a_pipe_that_is_silent_for_long_does_not_keep_the_model(tmp_path: Path, data: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("unload_after_min = 1\n")
    with spawn("fast", env={**os.environ, "TEST_SETTINGS": str(path), "TEST_HASTE": "600"}) as process:
        until(lambda: children(process.pid))
        until(lambda: not children(process.pid))
        out, err = process.communicate("hi\n", timeout=PATIENCE_S)
    assert "every weight once per token" in out
    assert TOLD in err
    assert process.returncode == 0


def test_work_is_done_while_this_thread_waits_and_at_no_other_time() -> None:
    done: list[int] = []
    reader, writer = os.pipe()

    def work() -> None:
        done.append(1)
        if len(done) == 3:
            os.write(writer, b"x")

    other = Meanwhile(0.01, work)
    time.sleep(0.1)
    assert done == []
    with other.waiting():
        assert os.read(reader, 1) == b"x"
    number = len(done)
    assert number >= 3
    time.sleep(0.1)
    assert len(done) == number
    other.close()
    with other.waiting():
        time.sleep(0.1)
    assert len(done) <= number + 1  # one may have waited for its turn
    os.close(reader)
    os.close(writer)


def test_who_goes_on_waits_for_work_that_has_begun() -> None:
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        time.sleep(0.1)
        ended.set()

    other = Meanwhile(0.01, work)
    with other.waiting():
        assert begun.wait(PATIENCE_S)
    assert ended.is_set()
    other.close()


def test_ctrl_c_that_wakes_nobody_is_sent_again() -> None:
    heard: list[float] = []
    other = Meanwhile(PATIENCE_S, lambda: None)
    before = signal.signal(
        signal.SIGINT, lambda *_: heard.append(time.monotonic())
    )  # and goes on waiting, as if it had not come
    try:
        with other.waiting():
            os.kill(os.getpid(), signal.SIGINT)
            deadline = time.monotonic() + PATIENCE_S
            while len(heard) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
        assert len(heard) >= 2
        seen = len(heard)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(3 * HEARD_S)
        assert len(heard) == seen + 1  # nobody waits: whoever runs hears it
    finally:
        signal.signal(signal.SIGINT, before)
        other.close()


# `tokamac chat --plain`: Ctrl-C while something else than a reply, or a line, is waited for.

Pipe = Callable[[str], "subprocess.Popen[str]"]

CTRL_C = "\x03"
KILL_LINE = "\x15"

EDITOR = """
trap 'heard=1; echo heard' INT
echo open
while [ -z "$heard" ]; do sleep 0.1; done
echo words > "$1"
"""

SLOW_TO_END = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: print("heard", flush=True))
print("begun", flush=True)
time.sleep(0.5)
sys.exit(3)
"""


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o700)
    return path


def asked(data: Path) -> list[str]:
    return [message.text for message in last_path(data) if message.role == "user"]


# A person types -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("data", "_ctrl_c_interrupts")
def test_ctrl_c_in_an_editor_is_the_editors(terminal: Callable[..., Terminal], data: Path, tmp_path: Path) -> None:
    editor = script(tmp_path / "editor", EDITOR)
    chat = terminal("fast", "--plain", EDITOR=str(editor), VISUAL="")
    chat.say("/editor\n")
    chat.until("open")
    chat.type(CTRL_C)
    chat.until("heard")
    chat.until("every weight once per token")
    assert chat.leave() == 0
    assert asked(data) == ["words"]


@pytest.fixture
def slow_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that a slow tool for copying writes when it has begun; Ctrl-C does not end that."""
    begun = tmp_path / "begun"
    tool = script(tmp_path / "tools" / "pbcopy", f'trap "" INT\ntouch "{begun}"\nexec sleep 1.5\n')
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SSH_CONNECTION", "")
    return begun


@pytest.mark.usefixtures("data", "_ctrl_c_interrupts")
def test_ctrl_c_stops_a_command_not_the_chat(terminal: Callable[..., Terminal], data: Path, slow_tool: Path) -> None:
    chat = terminal("fast", "--plain")
    for text in ("one\n", "/copy\n"):
        chat.say(text)
    until(slow_tool.exists)
    chat.type(CTRL_C)
    chat.until("Stopped.")
    chat.say("two\n")
    chat.until("every weight once per token")
    assert chat.leave() == 0
    assert asked(data) == ["one", "two"]
    assert b"Copied" not in chat.shown


@pytest.mark.usefixtures("data", "_ctrl_c_interrupts")
def test_ctrl_c_just_before_the_wait_for_a_reply_stops_it_alone(terminal: Callable[..., Terminal], data: Path) -> None:
    chat = terminal("slow", "--plain", TEST_CTRL_C="1")
    chat.until("you> ")
    chat.type("one\n")  # waits for the model first
    chat.say("two\n")
    chat.until("(stopped")
    assert b"Stopped." not in chat.shown  # the reply's own line says it
    assert chat.leave() == 0
    assert asked(data) == ["one", "two"]


@pytest.mark.usefixtures("data", "_ctrl_c_interrupts")
def test_an_empty_line_discards_a_returned_prompt(
    terminal: Callable[..., Terminal], data: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    chat = terminal("fast", "--plain", TEST_GATE=str(gate))
    chat.say("one\n")
    chat.until("loading fast")
    chat.type(CTRL_C)
    chat.until("Loading was stopped.")
    gate.touch()
    chat.until("you> one")
    chat.type(f"{KILL_LINE}\n")
    chat.say("two\n")
    chat.until("every weight once per token")
    assert chat.leave() == 0
    assert asked(data) == ["two"]


# Nobody types -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """Starts the chat with a model behind pipes."""
    made: list[subprocess.Popen[str]] = []

    def start(model: str) -> "subprocess.Popen[str]":
        made.append(spawn(model))
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.communicate()


def interrupted(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Send Ctrl-C; return the status, and what was written to stderr since."""
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in err
    return process.returncode, err


def said(process: "subprocess.Popen[str]", lines: str) -> None:
    process.stdin.write(lines)
    process.stdin.flush()


@pytest.mark.usefixtures("data", "_ctrl_c_interrupts")
def test_through_a_pipe_it_ends_the_chat_during_a_command(pipe: Pipe, data: Path, slow_tool: Path) -> None:
    process = pipe("fast")
    said(process, "one\n/copy\ntwo\n")
    until(slow_tool.exists)
    assert interrupted(process) == (INTERRUPTED, "")
    assert asked(data) == ["one"]


@pytest.mark.usefixtures("data", "_ctrl_c_interrupts")
def test_through_a_pipe_it_ends_the_chat_though_the_guide_heard_it(pipe: Pipe, data: Path) -> None:
    process = pipe("fast")
    said(process, "/guide What is prefill?\none\n")
    process.stdout.read(4)
    assert interrupted(process) == (INTERRUPTED, "The guide was stopped.\n")
    with Store.open(data) as store:
        assert store.chats() == []


@pytest.mark.usefixtures("data", "_ctrl_c_interrupts")
def test_through_a_pipe_it_ends_the_chat(
    pipe: Pipe, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    monkeypatch.setenv("TEST_GATE", str(gate))
    process = pipe("fast")
    said(process, "one\n")
    process.stdout.readline()
    gate.unlink()
    said(process, "/settings key_bits 8\ntwo\n")
    while (line := process.stderr.readline()) != "key_bits is 8; it was 16. The model is reloading with it.\n":
        assert line
    while not (line := process.stderr.readline()).startswith("loading fast"):
        assert line
    status, err = interrupted(process)
    err = "".join(line for line in err.splitlines(keepends=True) if not line.startswith("loading fast"))
    assert status == INTERRUPTED
    assert err.startswith("Loading was stopped.")
    assert asked(data) == ["one"]


# The parts ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def _ctrl_c_interrupts() -> Iterator[None]:
    """Whoever runs the tests in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def twice() -> None:
    for _ in range(2):
        signal.raise_signal(signal.SIGINT)


class Early(LineProcess[str]):
    """One that is stopped before it has begun."""

    async def run(self, arguments: Sequence[str], take: Callable[[str], None]) -> Ended:
        twice()
        return await super().run(arguments, take)


def aside(process: LineProcess[str], take: Callable[[str], None]) -> tuple[Ended, int]:
    """Run ``process``; return how it ended, and how often a stop was told."""
    told: list[str] = []
    end = run_aside(process, [], take, meanwhile=lambda: None, stopping=lambda: told.append("stop"))
    return end, len(told)


def text(line: bytes) -> str:
    return line.decode().strip()


@pytest.mark.usefixtures("data", "_ctrl_c_interrupts")
def test_a_process_is_asked_to_stop_once_and_its_own_status_is_of_no_account() -> None:
    lines: list[str] = []

    def take(line: str) -> None:
        lines.append(line)
        if line == "begun":
            twice()

    end, told = aside(LineProcess([sys.executable, "-c", SLOW_TO_END], text), take)
    assert (end.status, told, lines) == (INTERRUPTED, 1, ["begun", "heard"])


@pytest.mark.usefixtures("data", "_ctrl_c_interrupts")
def test_a_stop_that_comes_before_the_process_is_not_lost() -> None:
    process = Early([sys.executable, "-c", f"import time; time.sleep({PATIENCE_S})"], text)
    end, told = aside(process, lambda _: None)
    assert (end.status, told) == (INTERRUPTED, 1)


async def test_nor_one_that_comes_while_it_is_being_started() -> None:
    process = LineProcess([sys.executable, "-c", f"import time; time.sleep({PATIENCE_S})"], text)
    running = asyncio.ensure_future(process.run([], lambda _: None))
    await asyncio.sleep(0)
    await process.interrupt()
    assert (await asyncio.wait_for(running, PATIENCE_S / 2)).status


@pytest.mark.usefixtures("data", "_ctrl_c_interrupts")
def test_what_was_done_before_the_stop_is_done() -> None:
    end, _ = aside(
        LineProcess([sys.executable, "-c", SLOW_TO_END.replace("exit(3)", "exit()")], text), lambda _: twice()
    )
    assert end.status == 0


@pytest.mark.usefixtures("data", "_ctrl_c_interrupts")
def test_a_conversion_that_is_stopped_twice_can_go_on() -> None:
    standing = ConversionJob(time.monotonic)
    for dry_run, said in ((False, "Stopped. The same conversion resumes from here."), (True, "Stopped.")):
        standing.begin(dry_run=dry_run)
        standing.stop()
        standing.stop()
        assert standing.phase is ConversionPhase.STOPPING
        standing.ended(Ended(INTERRUPTED, ""))
        assert standing.problem == said


@pytest.mark.usefixtures("data", "_ctrl_c_interrupts")
def test_a_change_is_made_whole_and_ctrl_c_comes_after_it() -> None:
    made: list[str] = []

    @unbroken()
    def change() -> None:
        with unbroken():
            signal.raise_signal(signal.SIGINT)
            made.append("one")
        made.append("two")

    with pytest.raises(KeyboardInterrupt):
        change()
    assert made == ["one", "two"]
    with interruptible(lambda: made.append("heard")), unbroken():
        signal.raise_signal(signal.SIGINT)
        made.append("three")
    assert made == ["one", "two", "three", "heard"]


@pytest.mark.usefixtures("data", "_ctrl_c_interrupts")
def test_ctrl_c_is_noticed_whoever_hears_it() -> None:
    with noticed() as came:
        assert not came()
        with interruptible(lambda: None):
            signal.raise_signal(signal.SIGINT)
        assert came()
        assert not came()


@pytest.mark.usefixtures("data", "_ctrl_c_interrupts")
def test_ctrl_c_is_not_sent_again_while_another_program_has_the_terminal() -> None:
    heard_at: list[float] = []
    other = Meanwhile(PATIENCE_S, lambda: None)
    try:
        with interruptible(lambda: heard_at.append(time.monotonic())):
            with other.waiting():
                signal.raise_signal(signal.SIGINT)
            with other.working():
                time.sleep(3 * HEARD_S)
                signal.raise_signal(signal.SIGINT)
                time.sleep(3 * HEARD_S)
    finally:
        other.close()
    assert len(heard_at) == 2


def test_what_a_server_of_tools_tells_is_done_whatever_is_waited_for(tmp_path: Path) -> None:
    options = ChatOptions("guide", settings_path=tmp_path / "settings.toml", log_path=tmp_path / "engine.log")
    repl, done = Repl(begin(options), Console()), list[str]()
    session = repl.chat.session
    session.start()
    session.on_event(Loaded(model_spec("guide", capacity=100)))
    (counted,) = [step.request for step in session.count_context(Draft("how many?")) if isinstance(step, Ask)]
    assert isinstance(counted, AskCount)
    repl.later(lambda: done.append("a server is ready") or [])
    repl._events.put((0, Counted(counted.id, 2)))
    repl.settle_counts()
    assert (done, session.counts.pending) == (["a server is ready"], False)
    repl.close()
