"""Engine process (``python -m tokamac.app.backend.child``): requests on stdin, messages on stdout."""

#     stdin ─ reader thread ─▶ queue ─ main thread ─▶ a thread per reply ─▶ Engine ─▶ events ─ outbox ─▶ stdout
#                 └── Cancel: straight to that reply                pulse ─▶ text batches, measurements, heartbeat
#
# The main thread waits for replies only before a load, an unload or the end; prices and counts have their own
# threads (engine_client.py). The process owns a private copy of stdout, so a stray print of a library lands in
# the log and can't break the protocol. It ends when stdin closes.

import faulthandler
import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from tokamac.engine.errors import DeviceLostError, EngineClosedError, OptionError, TokamacError, panic_error
from tokamac.engine.events import Event, Finished, LoadProgress, Message, ModelNote, ModelSpec, Piece, Price, TextChunk
from tokamac.engine.files import FLUSH_S, raise_open_files
from tokamac.engine.hub.names import GUIDE
from tokamac.engine.options import KVSpec, PromptCacheSpec, Speculation, TemplateOptions
from tokamac.engine.perf.memory import SOURCES

from .. import settings
from ..guide import with_offers, without_offers
from ..reports.verdict import poor_quality
from .client import Outbox
from .engine_client import EngineClient, OpenReply
from .protocol import (
    LONGEST_LINE,
    AnotherModelError,
    AskCount,
    AskEmbeddings,
    AskPrice,
    AskTokens,
    AskWhatIf,
    Cancel,
    EngineMessage,
    EngineNotice,
    Generate,
    GoOn,
    GuestRequest,
    Guests,
    Hold,
    Join,
    KeepGoing,
    LimitMemory,
    Load,
    Loaded,
    Loading,
    LookAgain,
    MachineMeasured,
    MemoryUse,
    Quit,
    ReplyEvent,
    Request,
    RequestFailed,
    SetPace,
    Share,
    StopLooking,
    Warm,
    Warmed,
    WireError,
    decode_request,
)
from .sharing import EngineListener, GuestOutbox

if TYPE_CHECKING:
    from tokamac.engine import Engine

T = TypeVar("T")
Loader = Callable[[Load, Callable[[LoadProgress], None]], "tuple[Engine, ModelSpec]"]

CLOSE_S = FLUSH_S + 2.0  # how long the engine gets to end its reply and close once the screen is gone
TELLING_S = 0.5  # how long replies get to tell that a node is gone
TROUBLE_S = 2.0  # the prompt cache is written in idle time: how often an idle process asks whether that went well


def load_engine(request: Load, progress: Callable[[LoadProgress], None]) -> "tuple[Engine, ModelSpec]":
    """Load the model that ``request`` names. Raises TokamacError."""
    # The stored group size holds for all models: where this one can't have it, the default and a note replace it.
    from tokamac.engine import Engine

    cache = PromptCacheSpec(disk=not request.private) if request.prompt_cache else None

    def load(kv: KVSpec) -> "Engine":
        if not kv.rolls:
            kv = replace(kv, keep=KVSpec().keep)  # a chat names it for the day when something rolls
        engine = Engine.load(
            request.model,
            kv=kv,
            prompt_cache=cache,
            memory=request.memory,
            unchecked=request.unchecked,
            adapter=request.adapter,
            parallel=request.parallel,
            speculation=Speculation(draft=request.draft) if request.speculation else None,
            cpu_exact=request.cpu_exact,
            wired=request.wired,
            pace=request.pace,
            pace_on_battery=request.pace_on_battery,
            nodes=request.nodes,
            progress=progress,
        )
        if request.forms:
            with suppress(TokamacError):  # which the reply that asks for a form gets
                engine.tokenizer.prepare_forms()
        return engine

    try:
        engine = load(request.kv)
        return engine, _spec_of(engine)
    except OptionError as refused:
        usual = replace(request.kv, group_size=KVSpec().group_size)
        if usual == request.kv:
            raise
        engine = load(usual)
        return engine, _spec_of(engine, f"{refused.message}; the default is used")


def _spec_of(engine: "Engine", *notes: str) -> ModelSpec:
    """Return the engine's spec, with notes on changed settings and on quality before its own."""
    worse = poor_quality(engine.spec.path)
    first = (*map(ModelNote, notes), *([ModelNote(worse, "quality")] if worse else []))
    return replace(engine.spec, model_notes=(*first, *engine.spec.model_notes))


def _memory_use(engine: "Engine") -> MemoryUse:
    memory = engine.memory()
    source = "" if memory.budget_source is None else SOURCES[memory.budget_source]
    return MemoryUse(memory.active, memory.peak, memory.budget, budget_source=source, total_bytes=memory.device_total)


class Child:
    """Main loop of the process: at most one engine, and the replies of all clients."""

    def __init__(self, load: Loader, outbox: Outbox) -> None:
        self._load = load
        self._engine: Engine | None = None
        self._loaded: Loaded | None = None
        self._loads = 0
        self._wanted: Load | None = None  # the last that was asked for
        self._guide = False
        self._requests: queue.SimpleQueue[tuple[EngineClient, Request]] = queue.SimpleQueue()
        self._told_trouble = False
        self._trouble_lock = threading.Lock()
        self._unloaded = threading.Lock()
        self._owner = EngineClient(outbox, self)
        self._clients = [self._owner]
        self._clients_lock = threading.Lock()
        self._guests_lock = threading.Lock()  # held while their number is told
        self._listener: EngineListener | None = None

    def run(self, stdin: BinaryIO) -> None:
        threading.Thread(target=self._read, args=(stdin,), name="reader", daemon=True).start()
        while True:
            client, request = self._next()
            if isinstance(request, Quit):
                break
            try:
                self._answer(client, request)
            finally:
                client.pulse.stop()
        if self._listener is not None:
            self._listener.close()
        for guest in self._guests():
            guest.leave()
        self._wait_for_replies()
        self._close()

    def _next(self) -> tuple[EngineClient, Request]:
        """Wait for a request; check the prompt cache's health now and then."""
        for client in self._everybody():
            client.forget_cancels(self._requests.empty)
        while True:
            watched = self._engine is not None and not self._told_trouble
            try:
                return self._requests.get(timeout=TROUBLE_S if watched else None)
            except queue.Empty:
                self._tell_trouble()

    def _answer(self, client: EngineClient, request: Request) -> None:
        with self._telling_failures(client, request):
            match request:
                case Load():
                    for guest in self._guests():
                        guest.outbox.put(Loading())
                    self._wait_for_replies()
                    self._load_model(request, client)
                case Join():
                    self._join(client, request)
                case Generate():
                    self._begin_reply(client, request)
                case Warm():
                    self._warm(client, request)
                case AskPrice():
                    client.prices.ask(self._engine, request)
                case AskCount():
                    client.counts.ask(self._engine, request)
                case AskTokens():
                    client.tokens.ask(self._engine, request)
                case AskEmbeddings():
                    client.embeddings.ask(self._engine, request)
                case AskWhatIf():
                    client.advisor.ask(self._between_replies, request)
                case LookAgain():
                    client.looker.ask(self._engine, request)
                case StopLooking():
                    client.looker.stop()
                case LimitMemory(memory):
                    self._limit_memory(memory)
                case SetPace(percent, on_battery):
                    if self._engine is not None:
                        self._engine.pace(percent, on_battery)
                case _:
                    pass  # what is for a reply that runs never waits in the queue, and Quit ends the loop

    @contextmanager
    def _telling_failures(self, client: EngineClient, request: Request) -> Iterator[None]:
        """Report any failure inside the block: whatever a model's code raises must not end the process."""
        try:
            yield
        except BaseException as error:
            known = error if isinstance(error, TokamacError) else panic_error(error)
            if known is None:
                traceback.print_exc()
                known = TokamacError(f"the engine failed: {type(error).__name__}: {error}", "The log has the details.")
            failed = request.id if isinstance(request, Generate) else None
            told = RequestFailed(failed, known.message, known.hint, type(known).__name__)
            for each in self._everybody() if isinstance(request, Load) else (client,):
                each.outbox.put(told)
            if isinstance(known, DeviceLostError):
                self._lost(known)  # the chat starts another process

    def _load_model(self, request: Load, client: EngineClient) -> None:
        """Load for ``client``; guests that expect another model are disconnected, others notified."""
        self._close()
        self._wanted = request
        for guest in self._guests():
            if guest.joined is not None and not guest.joined.same_engine(request):
                self._disconnect(guest)
        with self._unloaded:
            self._owner.advisor.limit = request.memory
            self._engine, info = self._load(request, client.outbox.put)
        self._guide = request.model == GUIDE
        self._told_trouble = False
        engine = self._engine
        limits, memory = engine.limits(1), _memory_use(engine)
        told = (limits.ceiling_tps, limits.bandwidth_gbs, memory, limits.bandwidth_condition)
        self._loads += 1
        self._loaded = Loaded(info, *told, load=self._loads)
        self._owner.text_every_s = request.text_every_s
        for each in self._everybody():
            self._tell_loaded(each)
        engine.call_when_measured(lambda: self._tell_limits(engine))
        engine.call_when_lost(self._lost)
        if info.advice is not None and settings.is_new(info.advice):
            self._tell_all(EngineNotice(info.advice))

    def _tell_loaded(self, client: EngineClient) -> None:
        assert self._loaded is not None
        client.outbox.suit(self._loaded.info.device, client.text_every_s)
        client.advisor.limit = self._owner.advisor.limit
        client.outbox.put(self._loaded)

    def _limit_memory(self, memory: int | None) -> None:
        """Set the limit on a thread once the engine is free, so that the next request doesn't wait."""
        if (engine := self._engine) is not None:

            def limit() -> None:
                with suppress(EngineClosedError):
                    engine.limit_memory(memory)

            threading.Thread(target=limit, name="limit", daemon=True).start()

    def _lost(self, error: TokamacError) -> None:
        """A node, or the device, is gone: fail all replies and end the process."""
        # MLX can join a group only once per process, so only a restart can rejoin.
        threading.Event().wait(TELLING_S)
        print(error.message, file=sys.stderr, flush=True)  # at the very end: MLX's link complains in the same log
        os._exit(1)

    def _tell_limits(self, engine: "Engine") -> None:
        """Send the limits measured in idle time. Called on the engine thread."""
        limits = engine.limits(1)
        told = (limits.ceiling_tps, limits.bandwidth_gbs, limits.bandwidth_condition)
        if self._loaded is not None:
            ceiling_tps, bandwidth_gbs, bandwidth_note = told
            self._loaded = replace(
                self._loaded, ceiling_tps=ceiling_tps, bandwidth_gbs=bandwidth_gbs, bandwidth_note=bandwidth_note
            )
        self._tell_all(MachineMeasured(*told))

    # Guests ---------------------------------------------------------------------------------------------------------------

    def _share(self, path: Path) -> None:
        if self._listener is None:
            try:
                self._listener = EngineListener(path, self._welcome)
            except (OSError, TokamacError) as error:
                self._owner.outbox.put(EngineNotice(f"The engine can't be shared: {error}"))

    def _welcome(self, connection: socket.socket) -> None:
        """Serve a guest until it leaves; runs on its own thread."""
        outbox = GuestOutbox(connection)
        guest = EngineClient(outbox, self)
        with self._clients_lock:
            self._clients.append(guest)
        self._tell_guests()
        try:
            with connection.makefile("rb") as lines:
                while line := lines.readline(LONGEST_LINE + 1):
                    request = self._decoded(guest, line)
                    if isinstance(request, Quit):
                        break
                    if isinstance(request, GuestRequest):
                        self._sort(guest, request)
        except OSError:
            pass
        finally:
            with self._clients_lock:
                self._clients.remove(guest)
            outbox.close()  # replies that end, and what waits in the line, still tell
            guest.close()
            self._tell_guests()

    def _tell_guests(self) -> None:
        with self._guests_lock:  # else an older number may be told last
            self._owner.outbox.put(Guests(len(self._guests())))

    def _join(self, guest: EngineClient, request: Join) -> None:
        """Admit a guest, reloading a model that was given up. Raises TokamacError if another one is loaded."""
        guest.joined, guest.text_every_s = request.load, request.text_every_s
        wanted = self._wanted
        if wanted is None:
            return  # it hears of the first that is
        if request.load is not None and not request.load.same_engine(wanted):
            raise TokamacError(
                f"this engine runs {wanted.model}, or runs it with other settings", "Start another engine."
            )
        if self._engine is None:
            self._load_model(wanted, guest)
        else:
            self._tell_loaded(guest)

    def _disconnect(self, guest: EngineClient) -> None:
        if isinstance(guest.outbox, GuestOutbox):
            guest.outbox.disconnect()

    def _guests(self) -> list[EngineClient]:
        return self._everybody()[1:]

    def _everybody(self) -> list[EngineClient]:
        with self._clients_lock:
            return list(self._clients)

    def _tell_all(self, message: EngineMessage) -> None:
        for each in self._everybody():
            each.outbox.put(message)

    # Replies --------------------------------------------------------------------------------------------------------------

    def _begin_reply(self, client: EngineClient, request: Generate) -> None:
        if (engine := self._engine) is None:
            raise TokamacError("no model is loaded", "Choose one with /model.")
        if request.load not in (0, self._loads):
            raise AnotherModelError("another model was loaded meanwhile", "Ask again.")
        if not request.background:
            client.end_warming()
            for each in self._everybody():
                each.looker.stop()
        messages = self.accept(request.messages)
        stream = engine.generate(
            request.tokens or messages,
            request.sampling,
            continues=request.continues,
            template=request.template,
            background=request.background,
            kv_bits=request.kv_bits,
        )
        events = with_offers(stream, messages) if self._guide else stream
        may_go_on = threading.Event()
        may_go_on.set()
        given = (client, engine, request, events, may_go_on)
        reader = threading.Thread(target=self._reply, args=given, name=f"reply-{request.id}", daemon=True)
        client.began(OpenReply(request, stream, reader, may_go_on))

    def _reply(
        self,
        client: EngineClient,
        engine: "Engine",
        request: Generate,
        events: Iterator[Event],
        may_go_on: threading.Event,
    ) -> None:
        """Relay a reply; runs on its own thread."""
        try:
            with self._telling_failures(client, request):
                end = self._send_events(client, request, events, may_go_on)
                if end is None:
                    return
                if not request.watched:
                    end = replace(end, passes=None, diagnosis=None, outliers=())
                elif not request.background:
                    client.outbox.put(replace(_memory_use(engine), predicted_peak_bytes=end.predicted_peak_bytes))
                client.outbox.put(ReplyEvent(request.id, end))
                if not request.background:
                    self._reread(client, engine, request, end)
                self._tell_trouble()
        finally:
            client.ended(request.id)

    def _send_events(
        self, client: EngineClient, request: Generate, events: Iterator[Event], may_go_on: threading.Event
    ) -> Finished | None:
        """Relay all events but ``Finished``, which is returned: it is sent once the memory use is known."""
        end: Finished | None = None
        begun = False
        for event in events:
            may_go_on.wait()
            if isinstance(event, Finished):
                end = event
                continue
            told: Event = event
            if isinstance(event, TextChunk) and event.guessed and not request.shows_guesses:
                told = replace(event, guessed=())
            client.outbox.put(ReplyEvent(request.id, told))
            if isinstance(event, Piece) and not begun:
                begun = True
                client.outbox.flush()  # whose first text it is waits for nobody's next
        return end

    def _wait_for_replies(self) -> None:
        for running in self._replies():
            running.reader.join()

    def wait_for_foreground(self) -> None:
        for running in self._replies():
            if not running.request.background:
                running.reader.join()

    def _replies(self) -> list[OpenReply]:
        return [reply for client in self._everybody() for reply in client.replies()]

    def _reread(self, client: EngineClient, engine: "Engine", request: Generate, end: Finished) -> None:
        # Templates drop earlier thinking, so the cached tokens differ from the next prompt: without this the
        # next turn pays for the prefill.
        if end.text and not end.tool_calls and (end.thinking or request.template.thinking is not None):
            before = request.messages[:-1] if request.continues else request.messages
            turn = (Message("assistant", end.text, end.thinking), Message("user", ""))
            self._warm_ahead(client, engine, [*before, *turn], request.template)

    def _warm(self, client: EngineClient, request: Warm) -> None:
        def then(price: Price | None) -> None:
            client.outbox.put(Warmed(request.id, price))

        if self._engine is None:
            then(None)
        else:
            self._warm_ahead(client, self._engine, request.messages, request.template, then)

    def _warm_ahead(
        self,
        client: EngineClient,
        engine: "Engine",
        messages: Sequence[Message],
        template: TemplateOptions,
        then: Callable[[Price | None], None] = lambda _: None,
    ) -> None:
        """Replace a client's warm-up. Failures are ignored: they recur, and are reported, when the prompt is sent."""
        client.end_warming()
        try:
            client.warming = engine.warm_ahead(self.accept(messages), template=template, then=then)
        except Exception as error:
            if not isinstance(error, TokamacError):
                traceback.print_exc()
            then(None)

    def accept(self, messages: Sequence[Message]) -> list[Message]:
        return without_offers(messages) if self._guide else list(messages)

    def _between_replies(self, work: Callable[[], T]) -> T:
        """Run ``work``, which may touch MLX for longer than a token; with no model loaded, a load waits for it."""
        self.wait_for_foreground()
        if (engine := self._engine) is not None:
            return engine.between(work)
        with self._unloaded:
            return work()

    def _tell_trouble(self) -> None:
        with self._trouble_lock:
            if self._engine is None or self._told_trouble or (trouble := self._engine.cache_trouble()) is None:
                return
            self._told_trouble = True
            self._tell_all(EngineNotice(trouble))

    def _close(self) -> None:
        for each in self._everybody():
            each.looker.stop()
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    # What is read ---------------------------------------------------------------------------------------------------------

    def _read(self, stdin: BinaryIO) -> None:
        while line := stdin.readline(LONGEST_LINE + 1):
            if (request := self._decoded(self._owner, line)) is not None:
                self._sort(self._owner, request)
        self._requests.put((self._owner, Quit()))
        self._owner.leave()
        threading.Event().wait(CLOSE_S)
        os._exit(0)  # a load or a kernel that does not end must not outlive the screen

    @staticmethod
    def _decoded(client: EngineClient, line: bytes) -> Request | None:
        try:
            return decode_request(line)
        except WireError as error:
            client.outbox.put(RequestFailed(None, f"the engine was sent {error.message}", error.hint))
            return None

    def _sort(self, client: EngineClient, request: Request) -> None:
        """Act immediately on requests for a running reply; queue the rest."""
        match request:
            case Cancel(id):
                client.cancel(id)
            case KeepGoing(id):
                client.keep_going(id)
            case Hold(id) | GoOn(id):
                client.hold(id, held=isinstance(request, Hold))
            case Share(path):
                self._share(Path(path))  # guests wait in the line, for a load that may take long
            case _:
                if not isinstance(request, Quit):
                    client.pulse.start()  # until it was answered: there may be a load in the line before it
                self._requests.put((client, request))


def serve(load: Loader = load_engine) -> None:
    faulthandler.enable(sys.stderr)
    raise_open_files()
    out = os.dup(1)
    os.dup2(2, 1)
    Child(load, Outbox(out)).run(sys.stdin.buffer)
    sys.stderr.flush()
    os._exit(0)  # the reader still waits for stdin, and Python aborts when it is torn down around such a thread


if __name__ == "__main__":
    serve()
