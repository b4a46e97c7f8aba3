"""``tokamac chat --plain``: Ctrl-C while something else than a reply, or a line, is waited for."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.cli.plain_chat import PATIENCE_S, Terminal, last_path, spawn, until
from tokamac.app.backend.subprocess import Ended, LineProcess
from tokamac.app.chat.jobs import ConversionJob, ConversionPhase
from tokamac.app.output import INTERRUPTED
from tokamac.app.plain.console import heard, noticed, unbroken
from tokamac.app.plain.processes import run_aside
from tokamac.app.plain.repl import HEARD_S, Meanwhile
from tokamac.app.store.store import Store

pytestmark = pytest.mark.usefixtures("data")

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


def test_ctrl_c_while_an_editor_has_the_terminal_is_the_editors(
    terminal: Callable[..., Terminal], data: Path, tmp_path: Path
) -> None:
    editor = script(tmp_path / "editor", EDITOR)
    chat = terminal("fast", "--plain", EDITOR=str(editor), VISUAL="")
    chat.until("you> ")
    chat.type("/editor\n")
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


def test_ctrl_c_stops_a_command_and_the_chat_goes_on(
    terminal: Callable[..., Terminal], data: Path, slow_tool: Path
) -> None:
    chat = terminal("fast", "--plain")
    for text in ("one\n", "/copy\n"):
        chat.until("you> ")
        chat.type(text)
    until(slow_tool.exists)
    chat.type(CTRL_C)
    chat.until("Stopped.")
    chat.until("you> ")
    chat.type("two\n")
    chat.until("every weight once per token")
    assert chat.leave() == 0
    assert asked(data) == ["one", "two"]
    assert b"Copied" not in chat.shown


def test_a_prompt_that_was_given_back_is_discarded_by_an_empty_line(
    terminal: Callable[..., Terminal], data: Path
) -> None:
    chat = terminal("slow-load", "--plain")
    chat.until("you> ")
    chat.type("one\n")
    time.sleep(0.3)  # the model takes seconds to load
    chat.type(CTRL_C)
    chat.until("Loading was stopped.")
    chat.until("you> one")
    chat.type(f"{KILL_LINE}\n")
    chat.until("you> ")
    chat.type("two\n")
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
    assert process.stdin is not None
    process.stdin.write(lines)
    process.stdin.flush()


def test_through_a_pipe_it_ends_the_chat_during_a_command(pipe: Pipe, data: Path, slow_tool: Path) -> None:
    process = pipe("fast")
    said(process, "one\n/copy\ntwo\n")
    until(slow_tool.exists)
    assert interrupted(process) == (INTERRUPTED, "")
    assert asked(data) == ["one"]


def test_through_a_pipe_it_ends_the_chat_though_the_guide_heard_it(pipe: Pipe, data: Path) -> None:
    process = pipe("fast")
    said(process, "/guide What is prefill?\none\n")
    assert process.stdout is not None
    process.stdout.read(4)
    assert interrupted(process) == (INTERRUPTED, "The guide was stopped.\n")
    with Store.open(data) as store:
        assert store.chats() == []


def test_through_a_pipe_it_ends_the_chat_while_a_model_loads(pipe: Pipe, data: Path) -> None:
    process = pipe("slow-load")
    said(process, "one\n/settings key_bits 8\ntwo\n")
    assert process.stderr is not None
    assert process.stderr.readline() == "The model is reloading with it.\n"
    time.sleep(0.3)  # of the seconds that takes
    status, err = interrupted(process)
    assert status == INTERRUPTED
    assert err.startswith("Loading was stopped.")
    assert asked(data) == ["one"]


# The parts ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
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


def test_a_process_is_asked_to_stop_once_and_its_own_status_is_of_no_account() -> None:
    lines: list[str] = []

    def take(line: str) -> None:
        lines.append(line)
        if line == "begun":
            twice()

    end, told = aside(LineProcess([sys.executable, "-c", SLOW_TO_END], text), take)
    assert (end.status, told, lines) == (INTERRUPTED, 1, ["begun", "heard"])


def test_a_stop_that_comes_before_the_process_is_not_lost() -> None:
    process = Early([sys.executable, "-c", f"import time; time.sleep({PATIENCE_S})"], text)
    end, told = aside(process, lambda _: None)
    assert (end.status, told) == (INTERRUPTED, 1)


def test_what_was_done_before_the_stop_is_done() -> None:
    end, _ = aside(
        LineProcess([sys.executable, "-c", SLOW_TO_END.replace("exit(3)", "exit()")], text), lambda _: twice()
    )
    assert end.status == 0


def test_a_conversion_that_is_stopped_twice_can_go_on() -> None:
    standing = ConversionJob(time.monotonic)
    for dry_run, said in ((False, "Stopped. The same conversion resumes from here."), (True, "Stopped.")):
        standing.begin(dry_run=dry_run)
        standing.stop()
        standing.stop()
        assert standing.phase is ConversionPhase.STOPPING
        standing.ended(Ended(INTERRUPTED, ""))
        assert standing.problem == said


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
    with heard(lambda: made.append("heard")), unbroken():
        signal.raise_signal(signal.SIGINT)
        made.append("three")
    assert made == ["one", "two", "three", "heard"]


def test_ctrl_c_is_noticed_whoever_hears_it() -> None:
    with noticed() as came:
        assert not came()
        with heard(lambda: None):
            signal.raise_signal(signal.SIGINT)
        assert came()
        assert not came()


def test_ctrl_c_is_not_sent_again_while_another_program_has_the_terminal() -> None:
    heard_at: list[float] = []
    other = Meanwhile(PATIENCE_S, lambda: None)
    try:
        with heard(lambda: heard_at.append(time.monotonic())):
            with other.waiting():
                signal.raise_signal(signal.SIGINT)
            with other.working():
                time.sleep(3 * HEARD_S)
                signal.raise_signal(signal.SIGINT)
                time.sleep(3 * HEARD_S)
    finally:
        other.close()
    assert len(heard_at) == 2
