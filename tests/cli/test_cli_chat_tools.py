"""``tokamac chat --plain``: what the full screen has a panel or a dialog for, as lines."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from tests.cli.conftest import Run
from tests.cli.plain_chat import Terminal, children, last_path, piped, until
from tokamac.app.backend import protocol
from tokamac.app.backend.subprocess import LineProcess
from tokamac.app.output import INTERRUPTED
from tokamac.app.plain import processes
from tokamac.app.plain.commands import LISTED_FIGURES
from tokamac.app.plain.processes import MODEL_FIRST, run_aside, words_of
from tokamac.app.store.store import Store
from tokamac.engine.errors import OptionError

pytestmark = pytest.mark.usefixtures("data")

OWN_BITS = ("--kv-bits", "8,4", "--kv-group-size", "32")
OWN_WINDOW = ("--kv-window", "512", "--kv-keep", "64")

STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: (print("heard", flush=True), sys.exit(130)))
print("begun", flush=True)
time.sleep(60)
"""


# The guide --------------------------------------------------------------------------------------------------------------


def test_the_guide_answers_beside_the_chat_which_stays_as_it_is(data: Path) -> None:
    status, out, err = piped("/guide\nhi\n/guide What is prefill?\nho\n", "entitles")
    assert status == 0
    assert err == "Write the question after the command: /guide What does --kv-bits 8,4 do?\n"
    replies = out.split("\n\n")
    assert [reply.partition(" ")[0].strip() for reply in replies if reply.startswith(("Title", "Decode"))] == [
        "Title:",
        "Decode",
        "Title:",
    ]
    assert [m.text for m in last_path(data) if m.role == "user"] == ["hi", "ho"]


def test_ctrl_c_stops_the_guide_and_not_the_chat(terminal: Callable[..., Terminal], data: Path) -> None:
    chat = terminal("fast", "--plain")
    chat.until("you> ")
    chat.type("/guide What is prefill?\n")
    until(lambda: len(children(chat.process.pid)) == 2)
    chat.type("\x03")
    chat.until("The guide was stopped.")
    chat.until("you> ")
    chat.type("hi\n")
    chat.until("fast: Decode reads")
    chat.until("you> ")
    assert len(children(chat.process.pid)) == 1
    chat.type("\x04")
    assert chat.left() == 0
    assert [m.state for m in last_path(data)] == ["complete", "complete"]


def test_the_chats_own_engine_is_heard_however_much_the_guide_says(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, heard_s = 100.0, list[float]()
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now_s))
    said: processes.Events = SimpleQueue()
    for _ in range(10):
        said.put(protocol.Heartbeat())
    told = processes.as_they_come(said, meanwhile=lambda: heard_s.append(now_s))
    for _ in range(10):
        assert next(told) == protocol.Heartbeat()
        now_s += 0.4
    assert [round(each - 100, 1) for each in heard_s] == [1.2, 2.4, 3.6]


@pytest.mark.e2e
def test_the_embedded_guide_answers_a_slash_command() -> None:
    program = [sys.executable, "-m", "tokamac.app.cli", "chat", "guide"]
    done = subprocess.run(program, input="/guide What is prefill?\n", capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "prompt" in done.stdout


# Figures ----------------------------------------------------------------------------------------------------------------


def test_gauges_are_lines_with_names_and_units_and_each_is_explained() -> None:
    _, out, err = piped("hi\n/gauges\n/gauges decode rate\n/gauges KV\n/gauges nosuch\n", "fast")
    lines = out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("weights: "))
    told = dict(line.split(": ", 1) for line in lines[at : at + len(LISTED_FIGURES)])
    assert len(told) == len(LISTED_FIGURES)
    units = {"decode rate": "tok/s", "time to first token": "m?s", "weights": "GB", "achieved bandwidth": "GB/s"}
    assert [name for name, unit in units.items() if not re.search(rf"\d {unit}$", told[name])] == []
    assert told["context"].endswith("tokens (context length 32,768)")
    assert told["share of the ceiling"].endswith("(ceiling 350 tok/s)")
    assert ", p99 " in told["gaps between tokens (ITL)"]
    explained = lines[at + len(LISTED_FIGURES) :]
    assert explained[0] == f"decode rate: {told['decode rate']}"
    assert explained[2] == "How: decode rate = (generated tokens − 1) ÷ (last token − first token)"
    assert any(line.startswith("From: generated tokens: 128 (") for line in explained)
    assert f"KV cache: {told['KV cache']}" in explained
    assert err == "There is no figure nosuch. /gauges lists them.\n"


def test_without_a_reply_a_figure_says_why_it_is_unknown() -> None:
    _, out, _ = piped("/gauges\n", "fast")
    assert "decode rate: unknown (there is no reply yet)\n" in out


# The model --------------------------------------------------------------------------------------------------------------


def test_unload_gives_the_memory_back_and_the_next_prompt_loads_again() -> None:
    status, out, err = piped("/unload\n/unload\nhi\n", "fast")
    assert status == 0
    assert err.splitlines() == [
        "The model is unloaded. It reloads when you send a prompt.",
        "No model is loaded.",
    ]
    assert "every weight once per token" in out


def test_the_minutes_until_it_gives_its_memory_back_are_a_setting(home: Path) -> None:
    _, out, err = piped("/settings unload_after_min 7\n/settings unload_after_min soon\n/settings\n", "fast")
    assert "unload_after_min: 7 (minutes;" in out
    assert "'soon' is not valid" in err
    assert "unload_after_min = 7" in (home / "settings.toml").read_text()


@pytest.mark.parametrize(
    ("written", "asked"),
    [
        ("", ("--context", "4096", "--prompt", "2048", *OWN_BITS, *OWN_WINDOW)),
        (" --context 1024", ("--context", "1024", *OWN_BITS, *OWN_WINDOW)),
        (" --context 1024 --kv-bits 16", ("--context", "1024", "--kv-bits", "16", *OWN_WINDOW)),
        (" --context 1024 --kv-window=32", ("--context", "1024", *OWN_BITS, "--kv-window", "32")),
        (" --context 1024 --kv-keep 8", ("--context", "1024", *OWN_BITS, "--kv-window", "512", "--kv-keep", "8")),
    ],
)
def test_what_if_says_what_the_command_says(tokamac: Run, written: str, asked: tuple[str, ...]) -> None:
    _, out, err = piped(f"/whatif guide{written}\n", "fast", *OWN_BITS, *OWN_WINDOW)
    found = tokamac("inspect", "guide", "--table", *asked)
    budget = re.compile(r" of [0-9.]+ GB: ")  # what this machine has free changes
    assert budget.sub("", out) == budget.sub("", found.out)
    assert found.out.count("as it is") > 1
    assert err == found.err


def test_what_if_says_so_where_it_was_stopped_or_killed(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("fast", "--plain")

    def stop(asked: int) -> None:
        # It could end by itself, which is no stop: there are moments of a program's start at which Python loses Ctrl-C.
        os.kill(asked, signal.SIGSTOP)
        chat.type("\x03")

    for end, said in (
        (stop, "Stopped."),
        (lambda asked: os.kill(asked, signal.SIGKILL), "It can't be said: killed by SIGKILL"),
    ):
        chat.until("you> ")
        until(lambda: children(chat.process.pid))
        engine = set(children(chat.process.pid))
        chat.type("/whatif guide\n")
        until(lambda: len(children(chat.process.pid)) == 2)
        (asked,) = set(children(chat.process.pid)) - engine
        end(asked)
        chat.until(said)
    assert chat.leave() == 0


def test_what_if_refuses_as_the_command_does() -> None:
    status, out, err = piped(
        '/whatif nosuch\n/whatif guide --nosuch\n/whatif "guide\n/whatif --kv-bits 4 guide\n', "fast"
    )
    assert (status, out) == (0, "")
    unknown, flag, quotes, behind, first = err.splitlines()
    assert "nosuch" in unknown
    assert "--nosuch" in flag
    assert quotes.endswith("Close the quotation marks.")
    assert "unrecognized arguments" in behind
    assert first == MODEL_FIRST.format("whatif")


def test_convert_plans_and_alone_does_it(tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "tiny 8"
    asked = f"/convert {tiny} --bits 8 -o '{target}' --no-verify\n"
    status, out, err = piped(asked, "fast")
    assert status == 0
    assert "8 bits" in out
    assert err == "/convert without arguments runs this plan. Ctrl-C stops it; /convert resumes it.\n"
    assert not target.exists()
    _, out, err = piped(f"{asked}/convert\n/convert\n", "fast")
    assert f"/model {target} loads it." in err
    assert "Not compared with the source." in out
    assert (target / "config.json").exists()
    assert "fast" in err.splitlines()[-1]  # what was planned is done: alone, it is the chat's model again


def test_what_needs_the_screen_says_so_and_what_does_the_same() -> None:
    _, out, err = piped("/panel\nhi\n/end\n", "fast")
    assert (
        err == "/panel needs the full screen: quit, and open it with tokamac chat. Here, /gauges prints the figures.\n"
    )
    assert out.count("every weight once per token") == 2
    assert "you: hi\nfast: Decode reads" in out


# Processes --------------------------------------------------------------------------------------------------------------


def test_ctrl_c_asks_a_command_to_stop_and_it_ends_by_itself() -> None:
    said: list[str] = []
    asked: list[str] = []

    def take(line: str) -> None:
        said.append(line)
        if line == "begun":
            os.kill(os.getpid(), signal.SIGINT)

    process = LineProcess([sys.executable, "-c", STUBBORN], lambda line: line.decode().strip())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        end = run_aside(process, [], take, meanwhile=lambda: None, stopping=lambda: asked.append("stop"))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert (end.status, said, asked) == (INTERRUPTED, ["begun", "heard"], ["stop"])


def test_the_model_is_what_is_written_first_or_the_chats() -> None:
    assert words_of("", "org/m") == ("org/m", [])
    assert words_of("--bits 4", "org/m") == ("org/m", ["--bits", "4"])
    assert words_of("'my model' --bits 4", "org/m") == ("my model", ["--bits", "4"])
    with pytest.raises(OptionError, match="quotation"):
        words_of("'my model", "org/m")


def test_nothing_is_kept_of_what_was_asked_of_others(data: Path) -> None:
    piped("/guide hi\n/gauges\n/panel\n", "fast")
    with Store.open(data) as store:
        assert store.chats() == []


PATIENT = """
import pathlib, sys, time
given_up_s = time.monotonic() + 30
while not pathlib.Path(sys.argv[1]).exists():
    if time.monotonic() > given_up_s:
        sys.exit("never")
    time.sleep(0.01)
"""


def test_the_engine_is_heard_while_a_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "HEAR_S", 0.01)
    enough, heard = tmp_path / "enough", 0

    def hear() -> None:
        nonlocal heard
        heard += 1
        if heard == 3:
            enough.touch()

    process = LineProcess([sys.executable, "-c", PATIENT], bytes.decode)
    assert run_aside(process, [str(enough)], print, meanwhile=hear).status == 0
    assert heard >= 3


EDITOR = """#!/bin/sh
engine() { pgrep -P $PPID -f scripted_engine; }
engine > "$0.first"
looks=0
while engine > /dev/null && [ $looks -lt 300 ]; do sleep 0.1; looks=$((looks + 1)); done
echo edited
echo words > "$1"
"""
"""An editor that is open until the chat's engine is gone, or for half a minute."""


def test_the_engine_is_heard_while_an_editor_has_the_terminal(tmp_path: Path) -> None:
    """And an unused one is let go: else it would seem busy, and to hang. What there is to say of it comes after."""
    (tmp_path / "settings.toml").write_text("unload_after_min = 1\n")
    editor = tmp_path / "editor"
    editor.write_text(EDITOR)
    editor.chmod(0o700)
    own = {"EDITOR": str(editor), "VISUAL": "", "TEST_SETTINGS": str(tmp_path / "settings.toml")}
    hasty = {"TEST_HASTE": "30"}  # a minute is two seconds: it is not over before the editor is open
    status, out, err = piped("hi\n/editor\n", "fast", env={**os.environ, **own, **hasty})
    assert status == 0
    assert (tmp_path / "editor.first").read_text().strip().isdecimal()
    assert "is unloaded now" in err
    assert out.count("every weight once per token") == 2
    assert out.index("edited\n") < out.index("words\n")
