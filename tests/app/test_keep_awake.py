"""caffeinate: begins with the work, ends with it, and never twice. A script stands in for it, which keeps to its arguments."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until
from tokamac.app import settings
from tokamac.app.backend import keep_awake
from tokamac.app.backend.keep_awake import KeepAwake, awake
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.settings import Settings

LASTING = 3600.0


class Caffeinate:
    """A program that writes down its arguments and id, and waits for the process of ``-w``, as caffeinate does."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "caffeinate"
        self._log = folder / "caffeinate.log"
        self._log.touch()
        self.path.write_text(
            f'#!/bin/sh\necho "$$ $*" >> {self._log}\nwhile kill -0 "$3" 2>/dev/null; do sleep 0.05; done\n'
        )
        self.path.chmod(0o755)

    @property
    def started(self) -> list[tuple[int, str]]:
        """The ids of those that were started, and their arguments."""
        lines = [line.split(" ", maxsplit=1) for line in self._log.read_text().splitlines()]
        return [(int(process), arguments) for process, arguments in lines]

    @property
    def running(self) -> list[int]:
        return [process for process, _ in self.started if _runs(process)]


def _runs(process: int) -> bool:
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True, check=False
    ).stdout
    return bool(state.strip()) and not state.strip().startswith("Z")


@pytest.fixture
def caffeinate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Caffeinate:
    """What this machine is kept awake by."""
    made = Caffeinate(tmp_path)
    monkeypatch.setattr(keep_awake, "program", lambda: str(made.path))
    return made


def test_it_runs_while_anybody_works_and_is_started_once(caffeinate: Caffeinate) -> None:
    keeper = KeepAwake(str(caffeinate.path), linger_s=0.0)
    for busy in (True, True, True):
        keeper.tell("engine", busy=busy)
    until(lambda: caffeinate.started)
    with keeper.working():
        keeper.tell("engine", busy=False)
        time.sleep(0.1)
        assert caffeinate.running
    until(lambda: not caffeinate.running)
    assert [arguments for _, arguments in caffeinate.started] == [f"-i -w {os.getpid()}"]
    keeper.close()


def test_a_conversation_does_not_start_one_a_reply(caffeinate: Caffeinate) -> None:
    keeper = KeepAwake(str(caffeinate.path), linger_s=LASTING)
    for busy in (True, False, True, False, True):
        keeper.tell("engine", busy=busy)
    until(lambda: caffeinate.started)
    keeper.tell("engine", busy=False)
    keeper.close()
    until(lambda: not caffeinate.running)
    assert len(caffeinate.started) == 1


def test_after_a_rest_or_a_signal_the_next_work_starts_another(caffeinate: Caffeinate) -> None:
    keeper = KeepAwake(str(caffeinate.path), linger_s=0.0)
    for count, ends in ((1, False), (2, True), (3, False)):
        keeper.tell("engine", busy=True)
        until(lambda count=count: len(caffeinate.running) == 1 and len(caffeinate.started) == count)
        if ends:
            os.kill(caffeinate.running[0], signal.SIGINT)  # Ctrl-C in the terminal
        else:
            keeper.tell("engine", busy=False)
        until(lambda: not caffeinate.running)
        keeper.tell("engine", busy=False)
    keeper.close()


@pytest.mark.parametrize("text", [None, "#!/bin/sh\nexit 1\n", "#!/bin/sh\nexit 0\n"])
def test_what_can_not_be_started_or_gives_up_is_not_tried_again(tmp_path: Path, text: str | None) -> None:
    program, tries = tmp_path / "caffeinate", []
    if text is not None:
        program.write_text(text)
        program.chmod(0o755)
    keeper = KeepAwake(str(program), lambda: not tries.append(1), linger_s=LASTING)
    keeper.tell("engine", busy=True)
    if (process := keeper._process) is not None:
        until(lambda: process.poll() is not None)
    for busy in (False, True, False, True):
        keeper.tell("engine", busy=busy)
    assert tries == [1]
    keeper.close()


def test_it_ends_with_the_process_that_works_however_that_ends(caffeinate: Caffeinate) -> None:
    code = "import sys, time; from tokamac.app.backend.keep_awake import KeepAwake; k = KeepAwake(sys.argv[1]); "
    code += "k.tell(1, busy=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code, caffeinate.path]) as worker:
        until(lambda: caffeinate.running)
        worker.kill()
    until(lambda: not caffeinate.running)


def test_elsewhere_nothing_is_started() -> None:
    keeper = KeepAwake(None, lambda: pytest.fail("asked"))
    with keeper.working():
        assert keeper._process is None


def test_only_a_mac_has_it(on: Callable[[str], None]) -> None:
    on("linux")
    assert keep_awake.program() is None
    on("darwin")
    assert keep_awake.program() == "/usr/bin/caffeinate"


@pytest.mark.parametrize(("text", "wanted"), [("", 1), ("keep_awake = false\n", 0), ("keep_awake = [", 1)])
def test_a_command_keeps_awake_until_its_end_unless_the_settings_say_otherwise(
    caffeinate: Caffeinate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, wanted: int
) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    monkeypatch.setattr(settings, "default_path", lambda: path)

    @awake
    def work(result: int) -> int:
        until(lambda: len(caffeinate.running) == wanted)
        return result

    assert work(7) == 7
    assert not caffeinate.running
    assert len(caffeinate.started) == wanted
    assert path.read_text() == text  # what is wrong with it is for others to tell


@pytest.mark.parametrize("name", ["ask", "bench", "convert", "quality"])
def test_every_command_that_takes_long_is_one_of_these(name: str) -> None:
    command = __import__(f"tokamac.app.commands.{name}", fromlist=["run"])
    assert command.run.__wrapped__.__name__ == "run"


def test_a_download_is_one_too() -> None:
    from tokamac.app.commands import models

    assert models.pull.__wrapped__.__name__ == "pull"  # type: ignore[attr-defined]


async def test_in_the_chat_it_runs_while_a_reply_is_made(chat: Callable[..., Any], caffeinate: Caffeinate) -> None:
    async with chat("prose", ready=False) as c:
        c.app.chat.bridge._keep_awake._linger_s = 0.0
        await c.ready()
        await c.until(lambda: not caffeinate.running, "rest")
        await c.send("write on")
        await c.phase(EnginePhase.DECODING)
        await c.until(lambda: caffeinate.running, "caffeinate")
        c.app.view.do("stop")
        await c.phase(EnginePhase.IDLE)
        await c.until(lambda: not caffeinate.running, "rest")


async def test_settings_hold_from_the_next_work_on(chat: Callable[..., Any], caffeinate: Caffeinate) -> None:
    async with chat("fast") as c:
        loaded = len(caffeinate.started)
        c.app.chat.preferences.settings = Settings(keep_awake=False)
        c.app.chat.bridge._keep_awake.close()
        await c.ask("one")
        assert len(caffeinate.started) == loaded
        assert not caffeinate.running
