"""The server as a service of the user. launchctl is played: nothing here ran on a Mac."""

import os
import plistlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.app.serve.serving import HOST, Served
from tokamac.app.serve.service import (
    LABEL,
    UNIT,
    Launchd,
    ServiceError,
    ServiceState,
    Systemd,
    command_of,
    install,
    uninstall,
)

PRINTED = (Path(__file__).parent / "launchctl_print.txt").read_text()
SHOWN = "LoadState=loaded\nActiveState=active\nSubState=running\nMainPID=12\n"
ODD = ("--alias", 'a "b" $HOME %h \\', "--port", "8000")


class Tool:
    """Notes what is run, and answers from a table by the second or third word."""

    def __init__(self, **told: tuple[int, str]) -> None:
        self.told, self.run_words = told, list[Sequence[str]]()

    def __call__(self, words: Sequence[str]) -> tuple[int, str]:
        self.run_words.append(words)
        word = words[2] if words[1] == "--user" else words[1]
        return self.told.get(word, (0, ""))


def test_the_command_installs_tells_and_removes(tmp_path: Path, guide: Served) -> None:
    """With a systemctl that knows a unit while its file is there, and the log of another time."""
    unit = tmp_path / "systemd" / "user" / UNIT
    shown = SHOWN.replace("\n", "\\n")
    for name, script in (
        ("systemctl", f'[ "$2" != show ] || [ ! -e {unit} ] || printf "{shown}"'),
        ("journalctl", 'printf "served\\033[2J\\n"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    homes = dict.fromkeys(("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME"), str(tmp_path))
    environment = {**os.environ, **homes, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def said(*flags: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "tokamac.app.cli", "serve", "guide", "--port", str(guide.port), *flags]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    assert said("--status") == (1, "the service is not installed: tokamac serve --install\n")
    assert said("--install", "--top-p", "9")[0] == 2
    assert not unit.exists()
    assert said("--install", "--idle", "5")[0] == 0
    assert f'"serve" "guide" "--port" "{guide.port}" "--idle" "5"\n' in unit.read_text()
    told = f"service: active (running), pid 12\n{HOST}:{guide.port}: ok; guide; 0 replies\n"
    assert said("--status") == (0, told)
    status, log = said("--logs")
    assert (status, log.startswith("served"), "\033" in log) == (0, True, False)
    assert [said("--uninstall") for _ in range(2)] == [(0, "removed\n"), (0, "there is no such service\n")]
    assert not unit.exists()


def test_an_agent_is_written_for_its_user_alone_and_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    tool = Tool(print=(113, "Could not find service"))
    agent, log = Launchd(tmp_path, tool), tmp_path / "log" / "serve.log"
    install(agent, command_of(ODD, log))
    assert agent.file.stat().st_mode & 0o777 == 0o600
    written = plistlib.loads(agent.file.read_bytes())
    assert tuple(written["ProgramArguments"][4:]) == ODD
    assert Path(written["ProgramArguments"][0]).is_absolute()
    assert written["EnvironmentVariables"]["HF_HOME"] == str(tmp_path)
    assert b"secret" not in agent.file.read_bytes()
    assert [words[1] for words in tool.run_words] == ["bootout", "print", "bootstrap"]
    assert agent.state() == ServiceState(None)
    assert (uninstall(agent), uninstall(agent), agent.file.exists()) == (True, False, False)


@pytest.mark.parametrize(
    ("printed", "state"),
    [
        ((0, PRINTED), ServiceState(True, "state running, pid 4711, last exit code 78: EX_CONFIG")),
        (
            (0, "\tstate = not running\n\tlast exit code = 1\n"),
            ServiceState(False, "state not running, last exit code 1"),
        ),
        ((113, f'Bad request.\nCould not find service "{LABEL}" in domain for user gui: 501'), ServiceState(None)),
    ],
)
def test_launchctl_tells_the_state_of_an_agent(tmp_path: Path, printed: tuple[int, str], state: ServiceState) -> None:
    assert Launchd(tmp_path, Tool(print=printed)).state() == state


def test_a_unit_is_one_that_systemd_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    tool = Tool(show=(0, SHOWN))
    unit = Systemd(tmp_path, tool)
    install(unit, command_of(ODD, tmp_path / "log"))
    assert unit.file.stat().st_mode & 0o777 == 0o600
    assert '"a \\"b\\" $$HOME %%h \\\\"' in unit.file.read_text()
    assert [words[2] for words in tool.run_words] == ["daemon-reload", "enable", "restart"]
    assert unit.state() == ServiceState(True, "active (running), pid 12")
    assert Systemd(tmp_path, Tool(show=(0, "LoadState=not-found\n"))).state() == ServiceState(None)
    with pytest.raises(ServiceError, match="no bus"):
        install(Systemd(tmp_path, Tool(enable=(1, "no bus"))), command_of((), tmp_path / "log"))
    if shutil.which("systemd-analyze"):
        done = subprocess.run(
            ["systemd-analyze", "--user", "verify", unit.file], capture_output=True, text=True, check=False
        )
        assert UNIT not in done.stderr, done.stderr
