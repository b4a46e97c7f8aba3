"""Ctrl-C, closed pipes and full disks, on the program as a whole."""

import json
import os
import pty
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

Start = Callable[..., "subprocess.Popen[str]"]
ASK = ("ask", "Hello", "--temp", "1", "--seed", "1")  # the same text each time: nonsense may hold no letter for long


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    return process.returncode, out, err


def test_ctrl_c_keeps_the_partial_answer(start: Start, endless: Path) -> None:
    process = start(*ASK, "-m", endless)
    assert process.stdout is not None
    begun = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    status, rest, err = finish(process)
    assert (status, err) == (130, "")
    assert (begun + rest).endswith("\n")


def test_ctrl_c_with_json_ends_with_a_result(start: Start, endless: Path) -> None:
    process = start(*ASK, "-m", endless, "--json")
    assert process.stdout is not None
    begun = process.stdout.readline()
    while '"text"' not in begun:
        begun = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    status, rest, _ = finish(process)
    last = json.loads(rest.splitlines()[-1])
    assert status == 130
    assert (last["event"], last["reason"]) == ("finished", "cancelled")
    assert last["metrics"]["generated_tokens"] > 0


def has_computed(process: "subprocess.Popen[str]", seconds: float) -> None:
    """Wait until it has: a busy machine may take all that time, by the clock, to come to the first line of the program."""
    stat = Path(f"/proc/{process.pid}/stat")
    if not stat.exists():
        time.sleep(seconds)
        return
    while sum(map(int, stat.read_text().rpartition(")")[2].split()[11:13])) < seconds * os.sysconf("SC_CLK_TCK"):
        assert process.poll() is None, "it ended by itself"
        time.sleep(0.01)


@pytest.mark.parametrize("delay_s", [0.3, 0.8])
def test_ctrl_c_while_it_starts(start: Start, endless: Path, delay_s: float) -> None:
    process = start(*ASK, "-m", endless, "--json")
    has_computed(process, delay_s)
    process.send_signal(signal.SIGINT)
    status, out, err = finish(process)
    assert (status, err) == (130, "")
    if out:
        assert json.loads(out.splitlines()[-1])["reason"] == "cancelled"


# The program, by `python -m`, with Ctrl-C at a chosen moment.
INTERRUPTED_IN_EXEC = """
from tokamac.app import cli

def run(arguments):
    exec("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    raise AssertionError("not interrupted")

cli._run = run
cli.entry()
"""


def test_ctrl_c_while_a_dataclass_is_made_is_the_same_status(start: Start, tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text(INTERRUPTED_IN_EXEC)
    process = start(module="interrupted", cwd=tmp_path)
    assert finish(process) == (130, "", "")


def test_a_reader_that_leaves_is_no_error(start: Start, endless: Path) -> None:
    process = start(*ASK, "-m", endless)
    assert process.stdout is not None
    process.stdout.read(4)
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == ""
    assert process.wait(60) == 141


def test_help_into_a_closed_pipe(start: Start) -> None:
    read, write = os.pipe()
    os.close(read)
    process = start("ask", "--help", stdout=write)
    os.close(write)
    _, err = process.communicate(timeout=60)
    assert err == ""
    assert process.returncode == 141


COMMANDS: dict[str, tuple[str, ...]] = {
    "version": ("--version",),
    "help": ("--help",),
    "help of a command": ("help", "convert"),
    "ask": ("ask", "hello", "-m", "MODEL", "--max-tokens", "4"),
    "ask --json": ("ask", "hello", "-m", "MODEL", "--max-tokens", "4", "--json"),
    "inspect": ("inspect", "MODEL"),
    "inspect --json": ("inspect", "MODEL", "--json"),
    "models": ("models", "list"),
    "models --json": ("models", "list", "--json"),
    "cache": ("cache", "show"),
    "cache --json": ("cache", "show", "--json"),
    "chats": ("chats", "list"),
    "chats --json": ("chats", "list", "--json"),
    "bench": ("bench", "MODEL", "--prompt", "16", "--max-tokens", "4", "--runs", "1"),
    "quality": ("quality", "MODEL", "MODEL", "--json"),
    "convert": ("convert", "MODEL", "-o", "OUT", "--method", "round", "--no-verify"),
    "convert --json": ("convert", "MODEL", "-o", "OUT", "--method", "round", "--no-verify", "--json"),
    "convert --dry-run": ("convert", "MODEL", "-o", "OUT", "--dry-run"),
}


@pytest.fixture(params=COMMANDS.values(), ids=COMMANDS)
def command(request: pytest.FixtureRequest, tiny: Path, tmp_path: Path) -> list[str]:
    places = {"MODEL": str(tiny), "OUT": str(tmp_path / "packed")}
    return [places.get(word, word) for word in request.param]


def complaints(err: str) -> list[str]:
    """What is said beside the progress, and notes about the machine."""
    return [line for line in err.splitlines() if line.startswith("tokamac")]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_stdout_is_one_line_and_blames_nothing_else(start: Start, command: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        status, _, err = finish(start(*command, stdout=full))
    (said,) = complaints(err)
    assert (status, "output: No space left" in said) == (1, True), err
    assert "packed" not in said


def test_a_reader_who_has_left_is_no_trouble_of_any_command(start: Start, command: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    process = start(*command, stdout=write)
    os.close(write)
    status, _, err = finish(process)
    assert (status, complaints(err)) == (141, []), err


def test_a_conversion_goes_on_where_it_was_when_its_reader_left(start: Start, tiny: Path, tmp_path: Path) -> None:
    command = ("convert", tiny, "-o", tmp_path / "packed", "--json")
    process = start(*command)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        assert complaints(process.stderr.read()) == []
    assert process.wait(120) == 141
    status, out, _ = finish(start(*command))
    assert status == 0
    assert json.loads(out.splitlines()[-1])["event"] == "converted"


def test_no_stdout_and_no_stderr_at_all(start: Start) -> None:
    process = start("--version", preexec_fn=lambda: (os.close(1), os.close(2)), stdout=None, stderr=None)
    assert process.wait(60) == 0


def test_on_a_terminal_progress_leaves_no_trace_and_text_is_safe(start: Start, tiny: Path) -> None:
    leader, follower = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "20", "LINES": "5"}
    process = start(
        "ask", "Hello", "-m", tiny, "--max-tokens", "30", "--temp", "1", "--seed", "1",
        stdin=follower, stdout=follower, stderr=follower, text=False, env=env,
    )  # fmt: skip
    os.close(follower)
    shown = b""
    try:
        while piece := os.read(leader, 4096):
            shown += piece
    except OSError:
        pass  # the last writer has left
    os.close(leader)
    assert process.wait(60) == 0
    answer = shown.decode().rpartition("\r\x1b[K")[2]
    assert "\x1b" not in answer
    assert len(answer.strip()) > 4
