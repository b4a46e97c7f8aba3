"""Programs that use one file of chats at once, as processes of their own: the chat, and the command line.

A test tells each what to do over a pipe and waits for the answer: it counts steps, never seconds.
"""

import io
import os
import sys
import threading
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.app.conftest import reply_of
from tests.scripted_engine import model_spec
from tokamac.app import cli
from tokamac.app.backend.protocol import Load, Loaded, ReplyEvent
from tokamac.app.chat.listing import ChatSearch
from tokamac.app.chat.preferences import Preferences
from tokamac.app.chat.recording import Recording
from tokamac.app.chat.session import Session
from tokamac.app.settings import Settings
from tokamac.app.store.store import Store
from tokamac.engine.events import Finished
from tokamac.engine.metrics import Metrics
from tokamac.engine.options import Sampling

PROCESSES = get_context("forkserver")  # imports once, and begins a process in milliseconds
PROCESSES.set_forkserver_preload([__name__])
METRICS = Metrics(1, 0, 1, 1, *[None] * 13)  # type: ignore[arg-type]


class App:
    """The chat, without its screen and with a made-up engine."""

    def __init__(self, file: Path) -> None:
        self.told: list[str] = []
        self.session = Session(Load("org/model"), Sampling(), "", lambda: 0.0)
        preferences = Preferences(Settings(), file.with_name("settings.toml"))
        self.recording = Recording(self.session, Store.open(file), preferences, self.told.append, lambda: 0.0)
        self.session.start()
        self.session.on_event(Loaded(model_spec("model")))

    def ask(self, text: str) -> None:
        for step in self.session.submit(text):
            self.recording.hear(step)

    def reply(self) -> None:
        text = f"re: {self.session.turns[-1].prompt}"
        for step in self.session.on_event(ReplyEvent(reply_of(self.session), Finished("stop", text, METRICS))):
            self.recording.hear(step)

    def new(self) -> None:
        for step in self.session.new_chat():
            self.recording.hear(step)
        self.recording.let_go()

    def poll(self) -> tuple[bool, list[str]]:
        """Look at the file, as the app does now and then; return whether it changed, and the titles that are listed."""
        changed = self.recording.look()
        return changed, [chat.title for chat in self.recording.store.chats(limit=1000)]

    def listed(self) -> list[str]:
        """List the chats, on another thread and connection, as Ctrl+L does."""
        found: list[str] = []
        search = ChatSearch(self.recording.file)
        thread = threading.Thread(target=lambda: found.extend(chat.title for chat in search.find("").chats))
        thread.start()
        thread.join()
        return found

    def files(self) -> list[str]:
        """The files of chats that this process has open, as the system has them."""
        links = (link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
        return sorted({str(link) for link in links if link.name.startswith("chats.db")})

    def chat(self) -> str | None:
        return self.recording.chat

    def said(self) -> list[str]:
        """What is on the screen."""
        return [
            text
            for turn in self.session.turns
            for text in (turn.prompt, turn.reply.text if turn.reply else None)
            if text
        ]

    def hints(self) -> list[str]:
        return self.told

    def close(self) -> None:
        self.recording.close("")


class Shell:
    """The command line."""

    def __init__(self, _: Path) -> None:
        pass

    def run(self, *arguments: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            status = cli.main(arguments)
        return status, out.getvalue(), err.getvalue()

    def close(self) -> None:
        pass


class Both(App, Shell):
    """The chat, and commands in its process. Notes what Python's own code opens; what SQLite opens is not seen."""

    def watch(self) -> None:
        self._opened: list[str] = []

        def hook(event: str, given: tuple[Any, ...]) -> None:
            if event == "open" and Path(str(given[0])) in (
                self.recording.file,
                *self.recording.file.parent.glob("chats.db-*"),
            ):
                self._opened.append(str(given[0]))

        sys.addaudithook(hook)

    def opened(self) -> list[str]:
        return self._opened


def serve(kind: Callable[[Path], Any], file: Path, environment: dict[str, str], pipe: Connection) -> None:
    """Do what comes over the pipe, until it is ``close``."""
    os.environ |= environment
    actor = kind(file)
    pipe.send(None)
    name = ""
    while name != "close":
        name, given = pipe.recv()
        pipe.send(getattr(actor, name)(*given))


class Actor:
    """A process, and what it answers."""

    def __init__(self, kind: Callable[[Path], Any], file: Path) -> None:
        self._pipe, theirs = PROCESSES.Pipe()
        environment = {"TOKAMAC_DATA_DIR": str(file.parent.parent)}
        self.process = PROCESSES.Process(target=serve, args=(kind, file, environment, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self._pipe.recv()

    def __call__(self, name: str, *given: Any) -> Any:
        self._pipe.send((name, given))
        return self._pipe.recv()

    def end(self) -> None:
        """End as a program does that is quit."""
        self("close")
        self.process.join()

    def kill(self) -> None:
        """End without a chance to do anything (SIGKILL)."""
        self.process.kill()
        self.process.join()
