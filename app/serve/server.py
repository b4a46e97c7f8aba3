"""The HTTP server: its socket, signals and connection limits."""

import asyncio
import errno
import math
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tokamac.engine.errors import TokamacError
from tokamac.engine.events import LoadProgress
from tokamac.engine.options import Sampling, TemplateOptions
from tokamac.engine.perf.memory import map_large_blocks

from ..backend.client import CHILD_COMMAND
from ..backend.keep_awake import KeepAwake
from ..backend.protocol import Load
from .engine import ServedEngine
from .gate import LOOPBACK_NAMES, Gate, is_loopback
from .model_pool import CardMaker, ModelPool, Offer
from .request import ServedModel
from .routes import CROWDED, LONGEST_HEADERS, MOST_CONNECTIONS, ServerApp

# The socket is bound before the model is loaded, so a used port fails early; clients that connect meanwhile
# wait. The first Ctrl-C ends streams with an error and writes what was computed; the second ends immediately.


SIGNALS = (signal.SIGINT, signal.SIGTERM)
BACKLOG = 128
HEADERS_S = 15.0  # how long a connection may take to say what it asks
IDLE_S = 75  # how long a connection stays open between two requests
LOOK_S = 0.25  # how often it is looked whether the number of replies has changed, where somebody wants to know
STOP_S = 5  # how long replies may take to end once the server is stopped


class ListenError(TokamacError):
    """The server can't listen."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of a server.

    hosts, origins: allowed beyond loopback's. card: builds the announcement of the engine to the user's other
    programs; None: not announced. engine: socket of a running chat's engine, used instead of an own one. idle_s: how long a model
    stays in memory unused; inf for ever. fetches: pictures named by a web address.
    """

    offer: Offer
    sampling: Sampling = Sampling()  # noqa: RUF009  # frozen
    template: TemplateOptions = TemplateOptions()  # noqa: RUF009
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    token: str | None = None
    card: CardMaker | None = None
    engine: Path | None = None
    idle_s: float = math.inf
    fetches: bool = False
    log: Path = field(default_factory=Path)
    command: tuple[str, ...] = CHILD_COMMAND


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises ListenError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a name"
        raise ListenError(f"--host {host:.80}: {why}", "Give an address of this machine, such as 127.0.0.1.") from error
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise ListenError(
                f"port {port} is in use", f"Stop what listens there, or take another: --port {port + 1}."
            ) from error
        raise ListenError(
            f"{host:.80}:{port} can't be listened to: {error.strerror}", "Check --host and --port."
        ) from error
    listening.setblocking(False)
    return listening


class BoundedConnection(H11Protocol):
    """A connection whose request must arrive within ``HEADERS_S``, and is refused in JSON where there are too many."""

    # uvicorn limits only the pause after an answer, and says in plain text that there are too many.

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.app_state = {**self.app_state, CROWDED: len(self.connections) > MOST_CONNECTIONS}
        self._wait()

    def data_received(self, data: bytes) -> None:
        waits = self.cycle is None or self.cycle.response_complete
        if waits and self._deadline is None:
            self._wait()
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._deadline = self.loop.call_later(HEADERS_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class QuietServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    listening: socket.socket,
    host: str,
    options: ServerOptions,
    *,
    note: Callable[[str], None],
    progress: Callable[[LoadProgress], None] = lambda _: None,
    ready: Callable[[ServedModel], None] = lambda _: None,
    stop: asyncio.Event | None = None,
    keeper: KeepAwake | None = None,
    activity: Callable[[int, int], None] | None = None,
) -> bool:
    """Serve until a signal or ``stop``; return whether Ctrl-C ended it.

    Args:
        note: receives log lines.
        ready: called once requests are answered.
        keeper: keeps the machine awake during replies.
        activity: called with the numbers of running and waiting replies when they change.

    Raises RequestError where the model can't be loaded.
    """
    map_large_blocks()  # bodies
    ending = _Ending(stop or asyncio.Event())

    def make_engine(load: Load, log: Path, share: Path | None) -> ServedEngine:
        engine = ServedEngine(load, log, note, options.command, keeper=keeper, share=share, join=options.engine)
        engine.on_lost = ending.stopping.set
        engine.on_progress = progress
        return engine

    pool = ModelPool(
        options.offer,
        make_engine,
        options.log,
        note,
        sampling=options.sampling,
        template=options.template,
        card=options.card,
        idle_s=options.idle_s,
    )
    try:
        with ending.by_signals():
            loaded, stopped = asyncio.ensure_future(pool.start()), asyncio.ensure_future(ending.stopping.wait())
            await asyncio.wait((loaded, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not loaded.done():
                loaded.cancel()
                return ending.interrupted
            model = loaded.result()
            hosts = (*LOOPBACK_NAMES, host, *options.hosts) if is_loopback(host) else None
            app = ServerApp(pool, Gate(hosts, options.origins, options.token), note, fetches=options.fetches)
            server = ending.server = QuietServer(_config(app))
            serving = asyncio.ensure_future(server.serve(sockets=[listening]))
            ready(model)
            telling = asyncio.ensure_future(_tell(pool, activity))
            await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
            app.stopping.set()
            server.should_exit = True
            await serving
            telling.cancel()
    finally:
        await pool.close()
    return ending.interrupted


@dataclass
class _Ending:
    stopping: asyncio.Event
    server: QuietServer | None = None
    interrupted: bool = False

    @contextmanager
    def by_signals(self) -> Iterator[None]:
        """Handle signals, in the main thread only. A background shell job ignores Ctrl-C."""
        loop, main = asyncio.get_running_loop(), threading.current_thread() is threading.main_thread()
        heard = [each for each in SIGNALS if main and signal.getsignal(each) is not signal.SIG_IGN]
        for number in heard:
            loop.add_signal_handler(number, self._stop, number)
        try:
            yield
        finally:
            for number in heard:
                loop.remove_signal_handler(number)

    def _stop(self, number: int) -> None:
        self.interrupted = self.interrupted or number == signal.SIGINT
        if self.stopping.is_set() and self.server is not None:
            self.server.force_exit = True
        self.stopping.set()


async def _tell(pool: ModelPool, activity: Callable[[int, int], None] | None) -> None:
    before = None
    while activity is not None:
        if (now := pool.busy) != before:
            activity(*now)
            before = now
        await asyncio.sleep(LOOK_S)


def _config(app: ServerApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=BoundedConnection,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=LONGEST_HEADERS,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=STOP_S,
    )
