"""One engine for several programs of one user: a socket of its process, a card beside it that says what is there, and its guests.

    server or chat ─ stdin ─▶ engine's process ◀─ socket ─ guests: other chats, the server that /serve starts

Both lie in a folder that only the user can enter, so whoever reaches the socket is the user; nothing is listened to on a network.
A guest speaks as who started the process does, so it lacks nothing; it can't load or unload. A card whose process does not answer
is removed by who finds it.
"""

import json
import os
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tokamac.engine.errors import TokamacError

from ..strict_json import build
from .client import BackendEvent, Died, EngineLink, EngineProcess
from .outbox import Outbox
from .protocol import EngineMessage, EngineNotice, Join, Load, Request, Share

LONGEST_PATH = 100
"""Bytes of a socket's path: macOS takes 103."""
LONGEST_CARD = 2**16
BACKLOG = 16
CONNECT_S = 2.0
BEGIN_S = 5.0
"""How long a process may take from making its socket to listening at it."""
STUCK_S = 5
"""How long a guest may take to read what its socket holds; then it is let go, so that it holds up nobody."""


class SharingError(TokamacError):
    """An engine can't be shared, or not be reached."""


def sharing_folder() -> Path:
    """Return the folder of sockets and cards, made where there is none. Raises SharingError where others could enter it.

    In XDG_RUNTIME_DIR, where a session has one and its name is short enough for a socket; else among temporary files.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime or "", "tokamac", "engines")
    if not folder.is_absolute() or len(os.fsencode(folder)) > LONGEST_PATH - 24:
        folder = Path(tempfile.gettempdir()) / f"tokamac-{os.getuid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.lstat()
    except OSError as error:
        raise SharingError(f"{folder} can't be used: {error.strerror or error}", "Check its permissions.") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise SharingError(f"{folder} is not yours", "Set XDG_RUNTIME_DIR to a folder of your own.")
    if found.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def chat_socket() -> Path:
    """Return where the engine of this process's chat lets guests in. Raises SharingError."""
    return sharing_folder() / f"chat-{os.getpid()}.sock"


@dataclass(frozen=True, slots=True)
class EngineCard:
    """What is said of an engine that may be shared. pid: who holds it; url: where that answers HTTP. load: how it was loaded."""

    pid: int
    url: str
    load: Load
    socket: str

    @property
    def path(self) -> Path:
        """The file of the card."""
        return Path(self.socket).with_suffix(".json")

    def write(self) -> None:
        """Write it, for the user alone. Raises OSError."""
        draft = self.path.with_suffix(".new")
        with suppress(FileNotFoundError):
            draft.unlink()
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
        draft.replace(self.path)

    def remove(self) -> None:
        """Remove it and the socket."""
        for each in (self.path, Path(self.socket)):
            with suppress(OSError):
                each.unlink()

    @property
    def stale(self) -> bool:
        """Whether nobody answers at its socket any more."""
        try:
            connected(Path(self.socket)).close()
        except SharingError:
            return True
        return False


def cards() -> Iterator[EngineCard]:
    """Yield the cards of engines that answer; those of others are removed, and sockets that were left without one."""
    try:
        folder = sharing_folder()
        files, sockets = sorted(folder.glob("*.json")), sorted(folder.glob("*.sock"))
    except (SharingError, OSError):
        return
    for each in sockets:
        if each.with_suffix(".json") not in files and _is_left(each):
            with suppress(OSError):
                each.unlink()
    for file in files:
        try:
            with file.open("rb") as opened:
                card = build(EngineCard, json.loads(opened.read(LONGEST_CARD)), "card")
        except (OSError, ValueError, TokamacError, RecursionError):
            continue
        if card.path != file:
            continue
        if card.stale:
            card.remove()
        else:
            yield card


def _is_left(path: Path) -> bool:
    """Whether nobody listens at a socket, and nobody is about to."""
    try:
        if time.time() - path.lstat().st_mtime < BEGIN_S:
            return False
        connected(path).close()
    except OSError:
        return False
    except SharingError as error:
        return isinstance(error.__cause__, ConnectionRefusedError)
    return False


def connected(path: Path) -> socket.socket:
    """Return a connection to the engine at ``path``. Raises SharingError."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found = path.lstat()
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.getuid():
            raise SharingError(f"{path} is not a socket of yours", "Start the engine again.")
        made.settimeout(CONNECT_S)
        made.connect(str(path))
        made.settimeout(None)
    except BaseException as error:
        made.close()
        if isinstance(error, OSError):
            raise SharingError(f"no engine answers at {path}", "Its program has ended.") from error
        raise
    return made


class EngineListener:
    """Lets guests in, each on a thread of its own. Raises OSError or SharingError where it can't listen at ``path``."""

    def __init__(self, path: Path, welcome: Callable[[socket.socket], None]) -> None:
        if len(os.fsencode(path)) > LONGEST_PATH:
            raise SharingError(f"{path} is too long for a socket", "Set XDG_RUNTIME_DIR to a shorter folder.")
        self._path, self._welcome = path, welcome
        with suppress(FileNotFoundError):
            path.unlink()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        path.chmod(0o600)
        self._socket.listen(BACKLOG)
        threading.Thread(target=self._run, name="listener", daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more."""
        self._socket.close()
        with suppress(OSError):
            self._path.unlink()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="guest", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", STUCK_S, 0))
            self._welcome(connection)


class GuestOutbox(Outbox):
    """Writes to a guest, as long as it reads; one that does not is let go."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection.fileno())
        self._connection = connection
        self._gone = False

    def disconnect(self) -> None:
        """End the connection; its reader notices."""
        self._gone = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, and return once nothing is written to it: another file may have its descriptor next."""
        self.disconnect()  # frees who waits for the guest to read
        with self._lock:
            pass

    def _write(self, *messages: EngineMessage) -> None:
        if self._gone:
            return
        try:
            super()._write(*messages)
        except OSError:
            self.disconnect()


class EngineGuest(EngineLink):
    """A place at an engine that another program holds.

    Args:
        path: its socket.
        on_event: told what the engine says.
        follows: whether any model is taken that is loaded there, now and later; else the one that ``Load`` names, or none.
    """

    def __init__(self, path: Path, on_event: Callable[[BackendEvent], object], *, follows: bool = False) -> None:
        self._connection = connected(path)
        self._follows = follows
        super().__init__(self._connection.makefile("wb"), self._connection.makefile("rb"), on_event)

    def send(self, request: Request) -> None:
        """Queue ``request``; what is to be loaded is to be there."""
        if isinstance(request, Load):
            request = Join(None if self._follows else request, request.text_every_s)
        super().send(request)

    def _end(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _ended_how(self) -> tuple[str, str]:
        self._connection.close()
        return "the program that shared its engine ended, or took another model", ""


class CardFinder:
    """Finds an engine that has a model already. off: finds none, so that a chat has one of its own."""

    def __init__(self, *, off: bool = False) -> None:
        self._off = off
        self._lost: set[str] = set()

    def find(self, load: Load) -> EngineCard | None:
        """Return the card of an engine that was loaded in this way; not of one that was lost before."""
        if self._off:
            return None
        fit = (each for each in cards() if each.pid != os.getpid() and each.load.same_engine(load))
        return next((card for card in fit if card.socket not in self._lost), None)

    def lose(self, card: EngineCard) -> None:
        """Never find this one again: it ended, and may seem to be there for a moment more."""
        self._lost.add(card.socket)


class ChatEngine:
    """The engine of a chat: a process of its own, or a place at one that a server of the same user has with the same model.

    Which of them, each ``Load`` decides anew. Its methods are those of ``EngineLink``.

    Args:
        command, log, on_event: as of ``EngineProcess``.
        finder: finds an engine to share; None: there is none.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        on_event: Callable[[BackendEvent], object],
        *,
        finder: CardFinder | None = None,
    ) -> None:
        self._command, self._log, self._on_event = command, log, on_event
        self._finder = finder or CardFinder(off=True)
        self._link: EngineLink | None = None
        self._busy = False
        self._share: Path | None = None
        self.card: EngineCard | None = None

    def send(self, request: Request) -> None:
        """Send ``request``, to the engine that it needs. Never waits long, and never raises."""
        if isinstance(request, Load):
            self._choose(request)
        elif self._link is None:
            self._start_own()
        if self._link is not None:
            self._link.send(request)

    def set_busy(self, busy: bool) -> None:
        """As of ``EngineLink``."""
        self._busy = busy
        if self._link is not None:
            self._link.set_busy(busy)

    def share(self, path: Path) -> None:
        """Let other programs of the user ask the chat's own process, whenever there is one."""
        self._share = path
        if self._link is not None and self.card is None:
            self._link.send(Share(str(path)))

    def kill(self) -> None:
        """End the process at once, or leave the one that is shared."""
        if self._link is not None:
            self._link.kill()

    def close(self) -> None:
        """Ask the process to end and wait for it, or leave the one that is shared."""
        if self._link is not None:
            self._link.close()

    @property
    def alive(self) -> bool:
        """Whether there is a process that would hear a request."""
        return self._link is None or self._link.alive

    @property
    def server_url(self) -> str:
        """Where the server answers whose engine is used; "" where the engine is the chat's own."""
        return "" if self.card is None else self.card.url

    def _choose(self, load: Load) -> None:
        if self._link is not None and self._link.alive:
            if self.card is None or self.card.load.same_engine(load):
                return
            self._link.kill()
            self._link = self.card = None
        card = self._finder.find(load)
        if card is None:
            self._start_own()
            return
        try:
            self.card = card
            self._link = EngineGuest(Path(card.socket), self._heard(card))
            where = f"at {card.url}" if card.url else f"(process {card.pid})"
            self._on_event(
                EngineNotice(f"This chat uses the engine of the server {where}, so the model is loaded only once.")
            )
        except (SharingError, OSError):
            self._start_own()
        self.set_busy(self._busy)

    def _start_own(self) -> None:
        self.card = None
        try:
            self._link = EngineProcess(self._command, self._log, self._heard(None))
            if self._share is not None:
                self._link.send(Share(str(self._share)))
        except OSError as error:
            self._link = None
            self._on_event(Died(f"it could not be started: {error}", ""))

    def _heard(self, card: EngineCard | None) -> Callable[[BackendEvent], object]:
        """Return what passes events on while they come from the engine that is used."""

        def hear(event: BackendEvent) -> None:
            if card is not None and isinstance(event, Died):
                self._finder.lose(card)
            if self.card is card:
                self._on_event(event)

        return hear
