"""The engine's process: ``python -m tokamac.app.backend.child``. Requests on stdin, messages on stdout, all else to stderr.

    stdin ─ reader thread ─▶ queue ─ main thread ─▶ a thread for each reply ─▶ Engine ─▶ its events ─ outbox ─▶ stdout
                └── Cancel: straight to that reply                     pulse ─▶ text batches, measurements, heartbeat

The main thread begins replies and waits for none, but before it loads or unloads a model, or ends. Prices and counts wait for the
engine, so threads of their own ask for them. The file descriptor of stdout is taken away at the start: a stray print of any library
lands in the log and can't break the protocol. When stdin closes, however the screen went, the process ends.
"""

import faulthandler
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, BinaryIO, Generic, TypeVar

from tokamac.engine.errors import OptionError, TokamacError, panic_error
from tokamac.engine.events import Event, Finished, LoadProgress, Message, Price, TextChunk
from tokamac.engine.files import FLUSH_S, raise_open_files
from tokamac.engine.hub.cache import GUIDE
from tokamac.engine.options import KVSpec, PromptCacheSpec, Sampling, Speculation, TemplateOptions
from tokamac.engine.perf.memory import SOURCES
from tokamac.engine.text.tools import as_text, has_calls

from .. import settings
from ..guide import with_offers, without_offers
from .advice import Advisor
from .looking import Looker
from .outbox import Outbox, Pulse
from .protocol import (
    LONGEST_LINE,
    AskCount,
    AskPrice,
    AskTokens,
    AskWhatIf,
    Cancel,
    Counted,
    EngineMessage,
    EngineNotice,
    Generate,
    GoOn,
    Hold,
    Load,
    Loaded,
    LookAgain,
    MachineMeasured,
    MemoryUse,
    ModelInfo,
    Priced,
    PromptTokens,
    Quit,
    ReplyEvent,
    Request,
    RequestFailed,
    StopLooking,
    Unload,
    Unloaded,
    Warm,
    Warmed,
    WireError,
    decode_request,
)

if TYPE_CHECKING:
    from tokamac.engine import Engine, ReplyStream

T = TypeVar("T")
Question = TypeVar("Question", bound=AskCount | AskPrice | AskTokens)
Loader = Callable[[Load, Callable[[LoadProgress], None]], "tuple[Engine, ModelInfo]"]

CLOSE_S = FLUSH_S + 2.0
"""How long the engine gets to end its reply and close once the screen is gone."""
TELLING_S = 0.5
"""How long replies get to tell that a node is gone."""
TROUBLE_S = 2.0
"""The prompt cache is written in idle time: how often an idle process asks whether that went well."""


def load_engine(request: Load, progress: Callable[[LoadProgress], None]) -> "tuple[Engine, ModelInfo]":
    """Return the engine with the model that ``request`` names, and what the screen shows of it; raise TokamacError.

    A group size is stored for all models: where this one can't have it, the default is used, and a note says so.
    """
    from tokamac.engine import Engine

    cache = PromptCacheSpec() if request.prompt_cache else None

    def load(kv: KVSpec) -> "Engine":
        if not kv.rolls:
            kv = replace(kv, keep=KVSpec().keep)  # a chat names it for the day when something rolls
        return Engine.load(
            request.model,
            kv=kv,
            prompt_cache=cache,
            memory=request.memory,
            unchecked=request.unchecked,
            adapter=request.adapter,
            parallel=request.parallel,
            speculation=Speculation(draft=request.draft) if request.speculation else None,
            cpu_exact=request.cpu_exact,
            nodes=request.nodes,
            progress=progress,
        )

    try:
        engine = load(request.kv)
        return engine, _model_info(engine)
    except OptionError as refused:
        usual = replace(request.kv, group_size=KVSpec().group_size)
        if usual == request.kv:
            raise
        engine = load(usual)
        return engine, _model_info(engine, f"{refused.message}; the default is used")


def _model_info(engine: "Engine", *notes: str) -> ModelInfo:
    """notes: what of the settings was changed for this model, before what the engine says itself."""
    spec, tokenizer = engine.spec, engine.tokenizer
    shared = {each.name for each in fields(ModelInfo)} & {each.name for each in fields(spec)}
    return replace(
        ModelInfo(**{name: getattr(spec, name) for name in shared}),
        path=str(spec.path),
        later_system=tokenizer.has_chat_template and tokenizer.takes_later_system(),
        recommended=Sampling().resolved(spec.recommended),
        notes=(*notes, *spec.notes),
        rounded="" if spec.rounding is None else str(spec.rounding),
    )


def _memory_use(engine: "Engine") -> MemoryUse:
    memory = engine.memory()
    source = "" if memory.budget_source is None else SOURCES[memory.budget_source]
    return MemoryUse(memory.active, memory.peak, memory.budget, budget_source=source, total_bytes=memory.device_total)


class Answerer(Generic[Question]):
    """A thread that answers questions of one kind, each of which waits for the engine."""

    def __init__(
        self,
        outbox: Outbox,
        answer: "Callable[[Engine, Question], EngineMessage]",
        unknown: Callable[[Question], EngineMessage],
        replaces: Callable[[Question], Hashable] = lambda question: question.id,
    ) -> None:
        """Start the thread.

        Args:
            outbox: where answers go.
            answer: asks the engine; may raise.
            unknown: the answer where there is none.
            replaces: of the waiting questions that share this, only the last is answered.
        """
        self._outbox = outbox
        self._answer, self._unknown, self._replaces = answer, unknown, replaces
        self._questions: queue.SimpleQueue[tuple[Engine, Question]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="answerer", daemon=True).start()

    def ask(self, engine: "Engine | None", question: Question) -> None:
        """Have ``question`` answered by ``engine`` (None: nothing is loaded). Returns at once."""
        if engine is None:
            self._outbox.put(self._unknown(question))
        else:
            self._questions.put((engine, question))

    def _run(self) -> None:
        while True:
            waiting = [self._questions.get()]
            while not self._questions.empty():
                waiting.append(self._questions.get())
            for engine, question in {
                self._replaces(question): (engine, question) for engine, question in waiting
            }.values():
                self._outbox.put(self._answered(engine, question))

    def _answered(self, engine: "Engine", question: Question) -> EngineMessage:
        try:
            return self._answer(engine, question)
        except TokamacError:
            pass  # too long, no Unicode, or closed meanwhile: sending the prompt will say so
        except BaseException as error:
            if not isinstance(error, Exception) and panic_error(error) is None:
                raise
            traceback.print_exc()
        return self._unknown(question)


PROBE = (Message("user", "Hello"),)
"""A prompt that is rendered with tools and without, to tell what they add."""


def counter(outbox: Outbox) -> Answerer[AskCount]:
    """Return what counts texts in tokens, and definitions of tools, each in its turn."""

    def count(engine: "Engine", ask: AskCount) -> Counted:
        if ask.tools:
            with_them = engine.price(PROBE, template=TemplateOptions(tools=ask.tools)).prompt_tokens
            return Counted(ask.id, with_them - engine.price(PROBE).prompt_tokens)
        # On the engine's thread: a tokenizer is one thread's at a time.
        return Counted(ask.id, engine.between(lambda: len(engine.tokenizer.encode(ask.text))))

    return Answerer(outbox, count, lambda ask: Counted(ask.id, None))


def pricer(outbox: Outbox, accept: Callable[[Sequence[Message]], list[Message]] = list) -> Answerer[AskPrice]:
    """Return what tells prices, to each asker the last one alone. accept: leaves out what the chat template does not take."""

    def price(engine: "Engine", ask: AskPrice) -> Priced:
        found = engine.price(accept(ask.messages), continues=ask.continues, template=ask.template)
        return Priced(ask.asker, ask.id, found)

    return Answerer(outbox, price, lambda ask: Priced(ask.asker, ask.id, None), replaces=lambda ask: ask.asker)


def tokenizing(outbox: Outbox, accept: Callable[[Sequence[Message]], list[Message]]) -> Answerer[AskTokens]:
    """Return what tells the tokens of prompts, each in its turn. accept: as of ``pricer``."""

    def tokens(engine: "Engine", ask: AskTokens) -> PromptTokens:
        def encoded() -> list[int]:
            if not ask.messages:
                return engine.tokenizer.encode(ask.text, add_special_tokens=True)
            told = engine.tokenizer.using(ask.template)
            return told.encode(told.render(accept(ask.messages)))

        try:
            return PromptTokens(ask.id, tuple(engine.between(encoded)))
        except TokamacError as error:
            return PromptTokens(ask.id, error=error.one_line())

    return Answerer(outbox, tokens, lambda ask: PromptTokens(ask.id, error="the engine can't tell"))


def accepted(messages: Sequence[Message], *, later_system: bool, takes_tools: bool = True) -> list[Message]:
    """Return what the chat template takes: the screen says what is left out of the system messages, and that calls become text."""
    kept = [each for at, each in enumerate(messages) if later_system or at == 0 or each.role != "system"]
    return kept if takes_tools or not has_calls(kept) else as_text(kept)


@dataclass(slots=True)
class OpenReply:
    """A reply that is being made, and the thread that reads it. may_go_on: not set while who asked for it is behind."""

    request: Generate
    stream: "ReplyStream"
    reader: threading.Thread
    may_go_on: threading.Event
    cancelled: bool = False

    def cancel(self) -> None:
        """End it, and tell its end."""
        self.cancelled = True
        self.stream.cancel()
        self.may_go_on.set()

    def hold(self, *, held: bool) -> None:
        """Tell no more of it for now, or more again."""
        if held and not self.cancelled:
            self.may_go_on.clear()
        else:
            self.may_go_on.set()


class Child:
    """The loop of the process: one engine at most, and its replies."""

    def __init__(self, load: Loader, outbox: Outbox) -> None:
        self._load = load
        self._outbox = outbox
        self._engine: Engine | None = None
        self._later_system = self._takes_tools = True
        self._guide = False
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._running: dict[int, OpenReply] = {}
        self._cancelled: set[int] = set()  # of which no reply runs: it may still be asked for
        self._leaving = False
        self._replies_lock = threading.Lock()  # held for these three
        self._told_trouble = False
        self._trouble_lock = threading.Lock()
        self._prices = pricer(outbox, self._accepted)
        self._counts = counter(outbox)
        self._tokens = tokenizing(outbox, self._accepted)
        self._advisor = Advisor(outbox)
        self._looker = Looker(outbox, self._accepted, self._wait_for_foreground)
        self._unloaded = threading.Lock()
        self._pulse = Pulse(outbox, self._measurements)

    def run(self, stdin: BinaryIO) -> None:
        """Answer requests until told to quit."""
        threading.Thread(target=self._read, args=(stdin,), name="reader", daemon=True).start()
        while not isinstance(request := self._next(), Quit):
            self._pulse.start()
            try:
                self._answer(request)
            finally:
                self._pulse.stop()
        self._wait_for_replies()
        self._close()

    def _next(self) -> Request:
        """Wait for a request, and look now and then whether the prompt cache is well."""
        with self._replies_lock:
            if self._requests.empty():  # a reply is asked for before it is cancelled: these have ended
                self._cancelled.clear()
        while True:
            watched = self._engine is not None and not self._told_trouble
            try:
                return self._requests.get(timeout=TROUBLE_S if watched else None)
            except queue.Empty:
                self._tell_trouble()

    def _answer(self, request: Request) -> None:
        with self._telling_failures(request):
            match request:
                case Load():
                    self._wait_for_replies()
                    self._load_model(request)
                case Generate():
                    self._begin_reply(request)
                case Warm():
                    self._warm(request)
                case AskPrice():
                    self._prices.ask(self._engine, request)
                case AskCount():
                    self._counts.ask(self._engine, request)
                case AskTokens():
                    self._tokens.ask(self._engine, request)
                case AskWhatIf():
                    self._advisor.ask(self._between_replies, request)
                case LookAgain():
                    self._looker.ask(self._engine, request)
                case StopLooking():
                    self._looker.stop()
                case Unload():
                    self._wait_for_replies()
                    self._close()
                    self._outbox.put(Unloaded())
                case _:
                    pass  # what is for a reply that runs never waits in the queue, and Quit ends the loop

    @contextmanager
    def _telling_failures(self, request: Request) -> Iterator[None]:
        """Tell what fails inside a with block, whatever a model's code raises: it must not take the process down."""
        try:
            yield
        except BaseException as error:
            known = error if isinstance(error, TokamacError) else panic_error(error)
            if known is None:
                traceback.print_exc()
                known = TokamacError(f"the engine failed: {type(error).__name__}: {error}", "The log has the details.")
            failed = request.id if isinstance(request, Generate) else None
            self._outbox.put(RequestFailed(failed, known.message, known.hint, type(known).__name__))

    def _load_model(self, request: Load) -> None:
        self._close()
        self._advisor.limit = request.memory
        with self._unloaded:
            self._engine, info = self._load(request, self._outbox.put)
        self._guide = request.model == GUIDE
        self._later_system, self._takes_tools, self._told_trouble = info.later_system, info.takes_tools, False
        self._outbox.suit(info.device, request.text_every_s)
        engine = self._engine
        limits, memory = engine.limits(1), _memory_use(engine)
        told = (limits.ceiling_tps, limits.bandwidth_gbs, memory, limits.bandwidth_condition)
        self._outbox.put(Loaded(info, *told))
        engine.call_when_measured(lambda: self._tell_limits(engine))
        engine.call_when_lost(self._lost)
        if info.advice is not None and settings.is_new(info.advice):
            self._outbox.put(EngineNotice(info.advice))

    def _lost(self, error: TokamacError) -> None:
        """A node is gone, and MLX joins a group once: have replies tell it, and end, to be started again."""
        print(error.message, file=sys.stderr, flush=True)
        threading.Event().wait(TELLING_S)
        os._exit(1)

    def _tell_limits(self, engine: "Engine") -> None:
        """Tell what the machine allows, after it was measured in idle time. Called on the engine's thread."""
        limits = engine.limits(1)
        self._outbox.put(MachineMeasured(limits.ceiling_tps, limits.bandwidth_gbs, limits.bandwidth_condition))

    def _begin_reply(self, request: Generate) -> None:
        if (engine := self._engine) is None:
            raise TokamacError("no model is loaded", "Choose one with /model.")
        if not request.background:
            self._looker.stop()
        messages = self._accepted(request.messages)
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
        given = (engine, request, events, may_go_on)
        reader = threading.Thread(target=self._reply, args=given, name=f"reply-{request.id}", daemon=True)
        with self._replies_lock:
            running = self._running[request.id] = OpenReply(request, stream, reader, may_go_on)
            if request.id in self._cancelled or self._leaving:
                running.cancel()
            self._cancelled.discard(request.id)
        self._pulse.start()
        reader.start()

    def _reply(self, engine: "Engine", request: Generate, events: Iterator[Event], may_go_on: threading.Event) -> None:
        """Tell a reply. Runs on a thread of its own."""
        try:
            with self._telling_failures(request):
                end = self._told(request, events, may_go_on)
                if end is None:
                    return
                if not request.watched:
                    end = replace(end, passes=None, diagnosis=None, outliers=())
                elif not request.background:
                    self._outbox.put(replace(_memory_use(engine), predicted_peak_bytes=end.predicted_peak_bytes))
                self._outbox.put(ReplyEvent(request.id, end))
                if not request.background:
                    self._reread(engine, request, end)
                self._tell_trouble()
        finally:
            with self._replies_lock:
                del self._running[request.id]
            self._pulse.stop()

    def _told(self, request: Generate, events: Iterator[Event], may_go_on: threading.Event) -> Finished | None:
        """Tell a reply's events but for its end, which is returned: it is told once the memory that the reply takes is known."""
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
            self._outbox.put(ReplyEvent(request.id, told))
            if isinstance(event, TextChunk) and not begun:
                begun = True
                self._outbox.flush()  # whose first text it is waits for nobody's next
        return end

    def _wait_for_replies(self) -> None:
        """Wait until none runs."""
        for running in self._replies():
            running.reader.join()

    def _wait_for_foreground(self) -> None:
        """Wait until none runs that somebody waits for."""
        for running in self._replies():
            if not running.request.background:
                running.reader.join()

    def _replies(self) -> list[OpenReply]:
        with self._replies_lock:
            return list(self._running.values())

    def _reread(self, engine: "Engine", request: Generate, end: Finished) -> None:
        """Templates drop earlier thinking, or that there was none: read the answer alone while idle, or the next turn must."""
        if end.text and not end.tool_calls and (end.thinking or request.template.thinking is not None):
            before = request.messages[:-1] if request.continues else request.messages
            turn = (Message("assistant", end.text, end.thinking), Message("user", ""))
            self._warm_ahead(engine, [*before, *turn], request.template, lambda _: None)

    def _warm(self, request: Warm) -> None:
        def then(price: Price | None) -> None:
            self._outbox.put(Warmed(request.id, price))

        if self._engine is None:
            then(None)
        else:
            self._warm_ahead(self._engine, request.messages, request.template, then)

    def _warm_ahead(
        self,
        engine: "Engine",
        messages: Sequence[Message],
        template: TemplateOptions,
        then: Callable[[Price | None], None],
    ) -> None:
        """Begin a warm-up. What fails here fails again, and is told, when the prompt is sent."""
        try:
            engine.warm_ahead(self._accepted(messages), template=template, then=then)
        except Exception as error:
            if not isinstance(error, TokamacError):
                traceback.print_exc()
            then(None)

    def _accepted(self, messages: Sequence[Message]) -> list[Message]:
        kept = without_offers(messages) if self._guide else messages
        return accepted(kept, later_system=self._later_system, takes_tools=self._takes_tools)

    def _between_replies(self, work: Callable[[], T]) -> T:
        """Run ``work``, which may touch MLX and take longer than a token; while no model is loaded, a load waits for it."""
        self._wait_for_foreground()
        if (engine := self._engine) is not None:
            return engine.between(work)
        with self._unloaded:
            return work()

    def _tell_trouble(self) -> None:
        with self._trouble_lock:
            if self._engine is None or self._told_trouble or (trouble := self._engine.cache_trouble()) is None:
                return
            self._told_trouble = True
            self._outbox.put(EngineNotice(trouble))

    def _measurements(self) -> list[ReplyEvent]:
        """Return what is measured of each reply that somebody waits for."""
        watched = [each for each in self._replies() if each.request.watched and not each.request.background]
        measured = [(each.request.id, each.stream.live()) for each in watched]
        return [ReplyEvent(reply, live) for reply, live in measured if live is not None]

    def _close(self) -> None:
        self._looker.stop()
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _read(self, stdin: BinaryIO) -> None:
        """Sort requests as they arrive; leave when the screen does."""
        while line := stdin.readline(LONGEST_LINE + 1):
            try:
                request = decode_request(line)
            except WireError as error:
                self._outbox.put(RequestFailed(None, f"the engine was sent {error.message}", error.hint))
                continue
            match request:
                case Cancel():
                    self._cancel(request.id)
                case Hold() | GoOn():
                    with self._replies_lock:
                        if (running := self._running.get(request.id)) is not None:
                            running.hold(held=isinstance(request, Hold))
                case _:
                    self._requests.put(request)
        self._requests.put(Quit())
        with self._replies_lock:
            self._leaving = True
            for each in self._running.values():
                each.cancel()
        threading.Event().wait(CLOSE_S)
        os._exit(0)  # a load or a kernel that does not end must not outlive the screen

    def _cancel(self, reply: int) -> None:
        with self._replies_lock:
            if reply in self._running:
                self._running[reply].cancel()
            else:
                self._cancelled.add(reply)


def serve(load: Loader = load_engine) -> None:
    """Serve the process's stdin and stdout with engines that ``load`` makes, then end the process."""
    faulthandler.enable(sys.stderr)
    raise_open_files()
    out = os.dup(1)
    os.dup2(2, 1)
    Child(load, Outbox(out)).run(sys.stdin.buffer)
    sys.stderr.flush()
    os._exit(0)  # the reader still waits for stdin, and Python aborts when it is torn down around such a thread


if __name__ == "__main__":
    serve()
