"""The engine's process: ``python -m tokamac.app.backend.child``. Requests on stdin, replies on stdout, everything else to stderr.

    stdin ─ reader thread ─▶ queue ─ main thread ─▶ engine ─▶ events ─ outbox ─▶ stdout
                └── Cancel: straight to the engine         pulse ─▶ text batches, measurements, heartbeat

The main thread alone asks the engine for replies; prices and counts are asked on threads of their own (``answerer``). The
file descriptor of stdout is taken away at the start, so that a stray print of any library lands in the log and can't break
the protocol. When stdin closes (the screen is gone, however it went) the process ends.

Questions answered aside: the engine answers once it is free, and the child's main thread must not wait for that.
"""

import argparse
import faulthandler
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import BinaryIO, Generic, TypeVar

from tokamac.app import settings
from tokamac.app.backend.advice import Advisor
from tokamac.app.backend.outbox import Outbox, Pulse
from tokamac.app.backend.port import EnginePort
from tokamac.app.backend.protocol import (
    LONGEST_LINE,
    AskCount,
    AskPrice,
    AskWhatIf,
    Cancel,
    Counted,
    Done,
    Failed,
    LeftOut,
    Load,
    Loading,
    Notice,
    Prefill,
    Priced,
    Quit,
    Reply,
    Request,
    Send,
    ShortOfMemory,
    Stats,
    Unload,
    Unloaded,
    Warm,
    WireError,
    decode_request,
)
from tokamac.engine.errors import TokamacError, panic_error
from tokamac.engine.events import (
    Event,
    Finished,
    LoadProgress,
    MemoryPressure,
    Message,
    PrefillProgress,
    TextChunk,
    Truncated,
)
from tokamac.engine.files import FLUSH_S, raise_open_files
from tokamac.engine.options import TemplateOptions

Asked = TypeVar("Asked")


class Answerer(Generic[Asked]):
    """A thread that answers questions of one kind. unknown: what is said where there is no answer."""

    def __init__(
        self,
        outbox: Outbox,
        answer: Callable[[EnginePort, Asked], Reply],
        unknown: Callable[[Asked], Reply],
        *,
        replaces: Callable[[Asked], Hashable] | None = None,
    ) -> None:
        """Begin the thread. replaces: of the questions that wait and have this in common, only the last is answered."""
        self._outbox = outbox
        self._answer, self._unknown = answer, unknown
        self._replaces = replaces
        self._asked: queue.SimpleQueue[tuple[EnginePort, Asked]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="answerer", daemon=True).start()

    def ask(self, engine: EnginePort | None, question: Asked) -> None:
        """Have ``question`` answered by ``engine``; None: nothing is loaded. Returns at once."""
        if engine is None:
            self._outbox.put(self._unknown(question))
        else:
            self._asked.put((engine, question))

    def _run(self) -> None:
        while True:
            for engine, question in self._waiting():
                self._tell(engine, question)

    def _waiting(self) -> list[tuple[EnginePort, Asked]]:
        """Wait for a question; return those that wait by then, less those that were replaced."""
        asked = [self._asked.get()]
        if self._replaces is None:
            return asked
        while not self._asked.empty():
            asked.append(self._asked.get())
        return list({self._replaces(question): (engine, question) for engine, question in asked}.values())

    def _tell(self, engine: EnginePort, question: Asked) -> None:
        reply = self._unknown(question)
        try:
            reply = self._answer(engine, question)
        except TokamacError:
            pass  # too long, no Unicode, or closed meanwhile: that is told when the prompt is sent
        except BaseException as error:
            if not isinstance(error, Exception) and panic_error(error) is None:
                raise
            traceback.print_exc()
        self._outbox.put(reply)


def counter(outbox: Outbox) -> Answerer[AskCount]:
    """Return what counts texts in tokens, each in its turn."""
    return Answerer(
        outbox,
        lambda engine, asked: Counted(asked.id, engine.count(asked.text)),
        lambda asked: Counted(asked.id, None),
    )


def pricer(outbox: Outbox) -> Answerer[AskPrice]:
    """Return what tells prices, to each asker the last one alone.

    Asked for while something is read ahead, a price comes when that is done, which is how the screen learns of it.
    """
    return Answerer(
        outbox,
        lambda engine, asked: Priced(
            asked.asker, asked.id, engine.price(asked.messages, continues=asked.continues, template=asked.template)
        ),
        lambda asked: Priced(asked.asker, asked.id, None),
        replaces=lambda asked: asked.asker,
    )


T = TypeVar("T")
Loader = Callable[[Load, Callable[[LoadProgress], None]], EnginePort]
CLOSE_S = FLUSH_S + 2.0  # how long a vanished screen's engine gets to end its reply and close
TROUBLE_S = 2.0  # the prompt cache is written in idle time: how often an idle child asks whether that went well


class Child:
    """The loop of the process: one engine at most, one reply at a time."""

    def __init__(self, load: Loader, outbox: Outbox) -> None:
        self._load = load
        self._outbox = outbox
        self._engine: EnginePort | None = None
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._cancelled: set[int] = set()
        self._running: int | None = None
        self._told_trouble = False
        self._pricer = pricer(outbox)
        self._counter = counter(outbox)
        self._advisor = Advisor(outbox)
        self._unloaded = threading.Lock()
        self._pulse = Pulse(outbox, self._stats)

    def run(self, stdin: BinaryIO) -> None:
        """Answer requests until told to quit."""
        threading.Thread(target=self._read, args=(stdin,), name="reader", daemon=True).start()
        while not isinstance(request := self._next(), Quit):
            self._pulse.start()
            try:
                self._answer(request)
            finally:
                self._pulse.stop()
        self._close()

    def _next(self) -> Request:
        """Wait for a request, and see meanwhile whether the prompt cache is well."""
        while True:
            watched = self._engine is not None and not self._told_trouble
            try:
                return self._requests.get(timeout=TROUBLE_S if watched else None)
            except queue.Empty:
                self._tell_trouble()

    def _answer(self, request: Request) -> None:
        try:
            match request:
                case Load():
                    self._close()
                    self._advisor.limit = request.memory
                    with self._unloaded:
                        self._engine = self._load(request, self._progress)
                    self._told_trouble = False
                    loaded = self._engine.loaded()
                    self._outbox.suit(loaded.info.device)
                    self._outbox.put(loaded)
                    if (advice := loaded.info.advice) is not None and settings.is_new(advice):
                        self._outbox.put(Notice(advice))
                case Send():
                    self._reply(request)
                case Warm(messages, template):
                    self._warm(messages, template)
                case AskPrice():
                    self._pricer.ask(self._engine, request)
                case AskCount():
                    self._counter.ask(self._engine, request)
                case AskWhatIf():
                    self._advise(request)
                case Unload():
                    self._close()
                    self._outbox.put(Unloaded())
                case _:
                    pass  # Cancel never waits in the queue, and Quit ends the loop
        except TokamacError as error:
            self._fail(request, error.message, error.hint)
        except Exception as error:  # whatever a model's code raises must not take the process down
            traceback.print_exc()
            self._fail(request, f"the engine failed: {type(error).__name__}: {error}", "The log has the details.")
        except BaseException as error:
            if (known := panic_error(error)) is None:
                raise
            self._fail(request, known.message, known.hint)

    def _fail(self, request: Request, error: str, hint: str) -> None:
        self._outbox.put(Failed(request.id if isinstance(request, Send) else None, error, hint))

    def _reply(self, request: Send) -> None:
        if self._engine is None:
            raise TokamacError("no model is loaded", "Choose one with /model.")
        self._running = request.id
        try:
            events = self._engine.reply(
                request.messages, request.sampling, continues=request.continues, template=request.template
            )
            finished = self._pass_on(request.id, events)
        finally:
            self._running = None
            self._cancelled.discard(request.id)
        if finished is not None:
            end = finished
            memory = replace(self._engine.memory_use(), predicted_peak_bytes=end.predicted_peak_bytes)
            measured = (end.metrics, memory, end.outliers, end.diagnosis)
            self._outbox.put(
                Done(request.id, end.reason, end.text, end.thinking, *measured, thinking_ended_at=end.thinking_ended_at)
            )
            self._reread(request, end)
            self._tell_trouble()

    def _pass_on(self, request: int, events: Iterator[Event]) -> Finished | None:
        """Send the events of a reply on; return the last, which waits until the engine is free to tell its memory."""
        finished = None
        for event in events:
            match event:
                case Truncated(_, tokens):
                    self._outbox.put(LeftOut(request, tokens))
                case MemoryPressure():
                    self._outbox.put(ShortOfMemory(request, event))
                case PrefillProgress(done, total, cached):
                    self._outbox.put(Prefill(request, done, total, cached))
                case TextChunk(text, kind):
                    self._outbox.text(request, text, kind)
                case Finished():
                    finished = event
            # Asked for between two requests, a cancel finds no reply to end: it is repeated here.
            if request in self._cancelled and self._engine is not None:
                self._engine.cancel()
        return finished

    def _warm(self, messages: Sequence[Message], template: TemplateOptions) -> None:
        """Have what is certain of a conversation computed; what fails here fails again, and is told, when the prompt is sent."""
        if self._engine is None:
            return
        try:
            self._engine.warm(messages, template)
        except TokamacError:
            pass
        except Exception:
            traceback.print_exc()

    def _advise(self, request: AskWhatIf) -> None:
        self._advisor.ask(self._alone if self._engine is None else self._engine.between, request)

    def _alone(self, work: Callable[[], T]) -> T:
        """Run what asks of a model's shape alone, while none is loaded; a load waits for it."""
        with self._unloaded:
            return work()

    def _reread(self, request: Send, end: Finished) -> None:
        """Templates drop earlier thinking, or that there was none: read the answer alone while idle, or the next turn must."""
        if end.text and (end.thinking or request.template.thinking is not None):
            asked = request.messages[:-1] if request.continues else request.messages
            self._warm([*asked, Message("assistant", end.text, end.thinking), Message("user", "")], request.template)

    def _tell_trouble(self) -> None:
        if self._engine is None or self._told_trouble or (trouble := self._engine.cache_trouble()) is None:
            return
        self._told_trouble = True
        self._outbox.put(Notice(trouble))

    def _progress(self, progress: LoadProgress) -> None:
        self._outbox.put(Loading(progress.stage, progress.done, progress.total))

    def _stats(self) -> Stats | None:
        engine, running = self._engine, self._running
        if engine is None or running is None or (live := engine.live()) is None:
            return None
        return Stats(running, live)

    def _close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _read(self, stdin: BinaryIO) -> None:
        """Sort requests as they arrive; leave when the screen does."""
        while line := stdin.readline(LONGEST_LINE + 1):
            try:
                request = decode_request(line)
            except WireError as error:
                self._outbox.put(Failed(None, f"the engine was sent {error.message}", error.hint))
                continue
            if isinstance(request, Cancel):
                self._cancel(request.id)
            else:
                self._requests.put(request)
        self._requests.put(Quit())
        if self._running is not None:
            self._cancel(self._running)
        threading.Event().wait(CLOSE_S)
        os._exit(0)  # a load or a kernel that does not end must not outlive the screen

    def _cancel(self, request: int) -> None:
        self._cancelled.add(request)
        engine = self._engine
        if engine is not None and self._running == request:
            engine.cancel()


def _loader(scripted: bool) -> Loader:
    if scripted:
        from tokamac.app.backend.scripted import load_scripted

        return load_scripted
    from tokamac.app.backend.port import load_engine

    return load_engine


def main() -> None:
    """Serve the process's stdin and stdout, then end the process."""
    parser = argparse.ArgumentParser(prog="tokamac-engine", description="The engine's process; the chat starts it.")
    parser.add_argument("--scripted", action="store_true", help="a scripted engine, for tests and demonstrations")
    options = parser.parse_args()
    faulthandler.enable(sys.stderr)
    raise_open_files()
    out = os.dup(1)
    os.dup2(2, 1)
    Child(_loader(options.scripted), Outbox(out)).run(sys.stdin.buffer)
    sys.stderr.flush()
    os._exit(0)  # the reader still waits for stdin, and Python aborts when it is torn down around such a thread


if __name__ == "__main__":
    main()
