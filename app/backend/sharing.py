"""One engine shared by several programs of one user: a socket, a card that describes it, and guests."""

#     server or chat ─ stdin ─▶ engine process ◀─ socket ─ guests: other chats, the server of /serve
#
# Socket and card lie in a folder only the user can enter; nothing listens on a network. Guests speak the
# owner's protocol but can't load or unload. Whoever finds a card without a living process removes it.

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

from ..text.strict_json import build
from .client import BackendEvent, Died, EngineLink, EngineProcess, Outbox
from .protocol import EngineMessage, EngineNotice, Join, Load, Request, Share

LONGEST_PATH = 100  # bytes of a socket's path: macOS takes 103
LONGEST_CARD = 2**16
BACKLOG = 16
CONNECT_S = 2.0
BEGIN_S = 5.0  # how long a process may take from making its socket to listening at it
STUCK_S = 5  # how long a guest may take to read what its socket holds; then it is let go, so that it holds up nobody


class SharingError(TokamacError):
    """An engine can't be shared or reached."""


def sharing_folder() -> Path:
    """Return (create) the folder of sockets and cards. Raises SharingError if others could enter it."""
    # XDG_RUNTIME_DIR where set and short enough for a socket path, else the temporary folder.
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
    """Raises SharingError."""
    return sharing_folder() / f"chat-{os.getpid()}.sock"


@dataclass(frozen=True, slots=True)
class EngineCard:
    """Describes a shareable engine. pid: its owner; url: the owner's HTTP server. load: how it was loaded."""

    pid: int
    url: str
    load: Load
    socket: str

    @property
    def path(self) -> Path:
        return Path(self.socket).with_suffix(".json")

    def write(self) -> None:
        """Write it with owner-only permissions. Raises OSError."""
        draft = self.path.with_suffix(".new")
        with suppress(FileNotFoundError):
            draft.unlink()
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
        draft.replace(self.path)

    def remove(self) -> None:
        for each in (self.path, Path(self.socket)):
            with suppress(OSError):
                each.unlink()

    @property
    def stale(self) -> bool:
        try:
            connected(Path(self.socket)).close()
        except SharingError:
            return True
        return False


def cards() -> Iterator[EngineCard]:
    """Yield cards of live engines; removes stale cards and sockets."""
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
    """Raises SharingError."""
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
    """Accepts guests, one thread each. Raises OSError or SharingError where it can't listen."""

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
    """Writes to a guest; one that stops reading is disconnected."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection.fileno())
        self._connection = connection
        self._gone = False

    def disconnect(self) -> None:
        self._gone = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Disconnect, and return once no write is in progress: the file descriptor may be reused."""
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
    """A guest's link to another program's engine.

    Args:
        follows: accept any model loaded there; else only the one that ``Load`` names.
    """

    def __init__(self, path: Path, on_event: Callable[[BackendEvent], object], *, follows: bool = False) -> None:
        self._connection = connected(path)
        self._follows = follows
        super().__init__(self._connection.makefile("wb"), self._connection.makefile("rb"), on_event)

    def send(self, request: Request) -> None:
        """Queue ``request``; a ``Load`` must match the model that is there."""
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
    """Finds an engine that already has a model. off: finds none."""

    def __init__(self, *, off: bool = False) -> None:
        self._off = off
        self._lost: set[str] = set()

    def find(self, load: Load) -> EngineCard | None:
        """Return the card of an engine loaded this way, except a lost one."""
        if self._off:
            return None
        fit = (each for each in cards() if each.pid != os.getpid() and each.load.same_engine(load))
        return next((card for card in fit if card.socket not in self._lost), None)

    def lose(self, card: EngineCard) -> None:
        """Ignore this card from now on: its engine ended but may seem alive for a moment."""
        self._lost.add(card.socket)


class ChatEngine:
    """A chat's engine: its own process, or a guest place at a server's engine; each ``Load`` decides anew.

    Same methods as ``EngineLink``. finder: None: never shares.
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
        """Send to the engine that ``request`` needs; never blocks long, never raises."""
        if isinstance(request, Load):
            self._choose(request)
        elif self._link is None:
            self._start_own()
        if self._link is not None:
            self._link.send(request)

    def set_busy(self, busy: bool) -> None:
        self._busy = busy
        if self._link is not None:
            self._link.set_busy(busy)

    def share(self, path: Path) -> None:
        self._share = path
        if self._link is not None and self.card is None:
            self._link.send(Share(str(path)))

    def kill(self) -> None:
        if self._link is not None:
            self._link.kill()

    def close(self) -> None:
        if self._link is not None:
            self._link.close()

    @property
    def alive(self) -> bool:
        return self._link is None or self._link.alive

    @property
    def server_url(self) -> str:
        """URL of the server whose engine is used; "" for the chat's own engine."""
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
            self._link = EngineGuest(Path(card.socket), self._passing(card))
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
            self._link = EngineProcess(self._command, self._log, self._passing(None))
            if self._share is not None:
                self._link.send(Share(str(self._share)))
        except OSError as error:
            self._link = None
            self._on_event(Died(f"it could not be started: {error}", ""))

    def _passing(self, card: EngineCard | None) -> Callable[[BackendEvent], object]:
        """Return an event filter: passes events only while this engine is the one in use."""

        def hear(event: BackendEvent) -> None:
            if card is not None and isinstance(event, Died):
                self._finder.lose(card)
            if self.card is card:
                self._on_event(event)

        return hear
