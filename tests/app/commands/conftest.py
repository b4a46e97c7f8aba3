import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import pytest

from tests.app.plain.plain_chat import Terminal
from tests.tiny import make_tiny
from tokamac.app import cli
from tokamac.engine.perf import bandwidth


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that goes on writing until it is stopped."""
    return make_tiny(tmp_path_factory.mktemp("models") / "endless", context=1_000_000)


@pytest.fixture(autouse=True)
def _own_settings(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, bandwidth_file: Path
) -> None:
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))  # not in what a test may list
    if bandwidth_file.exists():  # or each of the commands that a test starts would measure it
        own = bandwidth.store_file()
        own.parent.mkdir(parents=True)
        shutil.copy(bandwidth_file, own)
    monkeypatch.delenv("TOKAMAC_DEBUG", raising=False)
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def tokamac(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process."""

    def run(*arguments: str | Path, stdin: bytes | TextIO = b"", stdout: TextIO | None = None) -> Result:
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)) if isinstance(stdin, bytes) else stdin)
            if stdout is not None:
                patched.setattr(sys, "stdout", stdout)
            status = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    return run


@pytest.fixture
def start() -> Callable[..., "subprocess.Popen[str]"]:
    """Start the command line as a program of its own."""

    def run(*arguments: str | Path, module: str = "tokamac.app.cli", **options: object) -> "subprocess.Popen[str]":
        settings: dict[str, object] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            # Whoever runs the tests in the background ignores Ctrl-C, and children inherit that.
            "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            "env": {**os.environ, "PYTHONUNBUFFERED": ""},
        }
        command = [sys.executable, "-m", module, *map(str, arguments)]
        return subprocess.Popen(command, **{**settings, **options})  # type: ignore[call-overload,no-any-return]

    return run


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the chats of a test are kept."""
    monkeypatch.setenv("TOKAMAC_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data" / "chats" / "chats.db"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the settings of a chat with the scripted engine are, on whatever system."""
    monkeypatch.setenv("TEST_SETTINGS", str(tmp_path / "home" / "settings.toml"))
    return tmp_path / "home"


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """A file to attach."""
    path = tmp_path / "notes.md"
    path.write_text("keys and values")
    return path


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Starts the chat on a terminal of its own: ``terminal("fast", "--plain", NO_COLOR="1")``."""
    made: list[Terminal] = []

    def start(*arguments: str, **environment: str) -> Terminal:
        made.append(Terminal(*arguments, **environment))
        return made[-1]

    yield start
    for each in made:
        each.end()
