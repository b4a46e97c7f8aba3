"""The server as a service of the user: a launchd agent on a Mac, a systemd user unit on Linux; begins with the session."""

import os
import plistlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tokamac.engine.errors import TokamacError

LABEL, UNIT = "org.tokamac.serve", "tokamac-serve.service"
LINES = 50  # of the log that are shown
AGAIN_S = 5  # before a server that failed is started again
STOP_S = 15.0  # how long an older one may take to end
# What decides where models, settings and caches are. Tokens are no part of it: the file could be copied anywhere.
KEPT = (
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "OMP_NUM_THREADS", "TOKAMAC_CACHE_DIR", "TOKAMAC_DATA_DIR",
    "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME",
)  # fmt: skip

Run = Callable[[Sequence[str]], tuple[int, str]]  # runs a command; returns its exit status and what it printed


class ServiceError(TokamacError):
    """The service can't be installed, or asked for."""


@dataclass(frozen=True, slots=True)
class ServiceState:
    """What the system says. running: None where the service is not installed."""

    running: bool | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ServiceCommand:
    """What the service runs, where, and with which variables."""

    words: tuple[str, ...]
    folder: Path
    variables: Mapping[str, str]
    log: Path


def command_of(flags: Sequence[str], log: Path) -> ServiceCommand:
    """Return the command that serves with these flags, as it would here."""
    words = (sys.executable, "-m", "tokamac.app.cli", "serve", *flags)
    return ServiceCommand(words, Path.cwd(), {name: os.environ[name] for name in KEPT if name in os.environ}, log)


class ServiceManager(Protocol):
    """What starts services on this system. file: the service's description."""

    file: Path

    def text(self, command: ServiceCommand) -> bytes:
        """Return the description."""

    def start(self) -> None:
        """Start the service that ``file`` describes, in place of an older one. Raises ServiceError."""

    def stop(self) -> None:
        """Stop the service for good."""

    def state(self) -> ServiceState:
        """Return how it is."""

    def logs(self, log: Path) -> Sequence[str]:
        """Return the command that shows the log's end."""


class Launchd:
    """https://developer.apple.com/library/archive/documentation/MacOSX/Conceptual/BPSystemStartup."""

    def __init__(self, home: Path, run: Run) -> None:
        self.file = home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
        self._run, self._domain = run, f"gui/{os.getuid()}"

    def text(self, command: ServiceCommand) -> bytes:
        return plistlib.dumps(
            {
                "Label": LABEL,
                "ProgramArguments": list(command.words),
                "WorkingDirectory": str(command.folder),
                "EnvironmentVariables": dict(command.variables),
                "RunAtLoad": True,
                "KeepAlive": {"SuccessfulExit": False},
                "ThrottleInterval": AGAIN_S,
                "ProcessType": "Interactive",  # else its processor time is limited
                "StandardOutPath": str(command.log),
                "StandardErrorPath": str(command.log),
                "Umask": 0o077,
            }
        )

    def start(self) -> None:
        self.stop()
        until_s = time.monotonic() + STOP_S
        while self.state().running is not None and time.monotonic() < until_s:  # it refuses one that still ends
            time.sleep(0.2)
        _done(self._run, "launchctl", "bootstrap", self._domain, str(self.file))

    def stop(self) -> None:
        self._run(("launchctl", "bootout", f"{self._domain}/{LABEL}"))

    def state(self) -> ServiceState:
        status, told = self._run(("launchctl", "print", f"{self._domain}/{LABEL}"))
        if status:
            return ServiceState(None)
        found = dict(re.findall(r"^\t(state|pid|last exit code) = (.*)$", told, re.MULTILINE))
        return ServiceState(found.get("state") == "running", ", ".join(f"{name} {found[name]}" for name in found))

    def logs(self, log: Path) -> Sequence[str]:
        return "tail", "-n", str(LINES), str(log)


class Systemd:
    """systemd.service(5)."""

    def __init__(self, home: Path, run: Run) -> None:
        settings = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
        self.file, self._run = settings / "systemd" / "user" / UNIT, run

    def text(self, command: ServiceCommand) -> bytes:
        lines = [
            "[Unit]",
            "Description=Tokamac, a local model server",
            "[Service]",
            f"ExecStart={' '.join(map(_quoted, command.words))}",
            f"WorkingDirectory={str(command.folder).replace('%', '%%')}",
            *(f"Environment={_quoted(f'{name}={value}', '')}" for name, value in command.variables.items()),
            "Restart=on-failure",
            f"RestartSec={AGAIN_S}",
            "UMask=0077",
            "[Install]",
            "WantedBy=default.target",
        ]
        return ("\n".join(lines) + "\n").encode()

    def start(self) -> None:
        _done(self._run, "systemctl", "--user", "daemon-reload")
        _done(self._run, "systemctl", "--user", "enable", UNIT)
        _done(self._run, "systemctl", "--user", "restart", UNIT)

    def stop(self) -> None:
        self._run(("systemctl", "--user", "disable", "--now", UNIT))

    def state(self) -> ServiceState:
        status, told = self._run(
            ("systemctl", "--user", "show", UNIT, "--property=LoadState,ActiveState,SubState,MainPID")
        )
        found = dict(line.split("=", 1) for line in told.splitlines() if "=" in line)
        if status or found.get("LoadState") != "loaded":
            return ServiceState(None)
        active = found.get("ActiveState", "")
        return ServiceState(active == "active", f"{active} ({found.get('SubState')}), pid {found.get('MainPID')}")

    def logs(self, log: Path) -> Sequence[str]:  # noqa: ARG002
        return "journalctl", "--user", "--unit", UNIT, "--lines", str(LINES), "--no-pager"


def _quoted(text: str, dollar: str = "$$") -> str:
    """Quote as systemd.syntax(7). dollar: what stands for a dollar sign; in variables it is one."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", dollar or "$")
    return f'"{escaped}"'


def _done(run: Run, *words: str) -> None:
    status, told = run(words)
    if status:
        raise ServiceError(
            f"{' '.join(words)}: {' '.join(told.split()) or f'exit status {status}'}", "Is this a session of yours?"
        )


def run_tool(words: Sequence[str]) -> tuple[int, str]:
    """Run a tool of the system. Raises ServiceError where there is none."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise ServiceError(
            f"{words[0]} can't be run: {error.strerror or error}", "This system starts services in another way."
        ) from error
    return done.returncode, done.stdout + done.stderr


def manager(run: Run = run_tool) -> ServiceManager:
    """Return this system's."""
    return (Launchd if sys.platform == "darwin" else Systemd)(Path.home(), run)


def install(service: ServiceManager, command: ServiceCommand) -> None:
    """Write the description, for the user's eyes only, and start the service. Raises ServiceError."""
    try:
        service.file.parent.mkdir(parents=True, exist_ok=True)
        command.log.parent.mkdir(parents=True, exist_ok=True)
        service.file.unlink(missing_ok=True)
        with os.fdopen(os.open(service.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(service.text(command))
    except OSError as error:
        raise ServiceError(
            f"{service.file} can't be written: {error.strerror or error}", "Check the folder."
        ) from error
    service.start()


def uninstall(service: ServiceManager) -> bool:
    """Stop the service and remove its description; return whether there was one."""
    was_there = service.file.exists()
    service.stop()
    service.file.unlink(missing_ok=True)
    return was_there
