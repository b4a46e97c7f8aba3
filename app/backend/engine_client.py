"""One of those who ask the engine's process: its own outbox, its replies by its own ids, and threads for its questions.

The first is who started the process, over stdin; the others are guests, over a socket. None sees what another one asks.
"""

import queue
import threading
import traceback
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from tokamac.engine.errors import TokamacError, panic_error
from tokamac.engine.events import Message
from tokamac.engine.options import TemplateOptions
from tokamac.engine.text import continuation
from tokamac.engine.text.tools import as_text, has_calls

from .advice import Advisor
from .looking import Looker
from .outbox import Outbox, Pulse
from .protocol import (
    AskCount,
    AskPrice,
    AskTokens,
    Counted,
    EngineMessage,
    Generate,
    Load,
    Priced,
    PromptTokens,
    ReplyEvent,
)

if TYPE_CHECKING:
    from tokamac.engine import Engine, ReplyStream
    from tokamac.engine.schedule.stream import ReplyControl

T = TypeVar("T")
Question = TypeVar("Question", bound=AskCount | AskPrice | AskTokens)


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
        self._questions: queue.SimpleQueue[tuple[Engine, Question] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="answerer", daemon=True).start()

    def ask(self, engine: "Engine | None", question: Question) -> None:
        """Have ``question`` answered by ``engine`` (None: nothing is loaded). Returns at once."""
        if engine is None:
            self._outbox.put(self._unknown(question))
        else:
            self._questions.put((engine, question))

    def close(self) -> None:
        """End the thread, after the answer it is at."""
        self._questions.put(None)

    def _run(self) -> None:
        while (first := self._questions.get()) is not None:
            waiting = {self._replaces(first[1]): first}
            while not self._questions.empty():
                if (more := self._questions.get()) is None:
                    return
                waiting[self._replaces(more[1])] = more
            for engine, question in waiting.values():
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


KEPT_CANCELS = 1000
"""Numbers of replies that were cancelled while they did not run: most had ended, and one may still be asked for."""
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
            told, messages = engine.tokenizer.using(ask.template), accept(ask.messages)
            if ask.continues:
                return told.encode(continuation.render(told, messages[:-1], continuation.unfinished(messages)))
            return told.encode(told.render(messages))

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


class AskedProcess(Protocol):
    """What a client needs of the process that it asks."""

    def accept(self, messages: Sequence[Message]) -> list[Message]:
        """Return what the model's chat template takes."""

    def wait_for_foreground(self) -> None:
        """Wait until no reply runs that anybody waits for."""


class EngineClient:
    """Who asks, and what it has asked.

    Attributes:
        joined: what a guest expects to be loaded; None is whatever is, and of who started the process.
        text_every_s: how long text may wait for more of it; None is as suits a screen.
        warming: what it had computed ahead last.
    """

    def __init__(self, outbox: Outbox, process: AskedProcess) -> None:
        self.outbox = outbox
        self.joined: Load | None = None
        self.text_every_s: float | None = None
        self.warming: ReplyControl | None = None
        self.prices = pricer(outbox, process.accept)
        self.counts = counter(outbox)
        self.tokens = tokenizing(outbox, process.accept)
        self.advisor = Advisor(outbox)
        self.looker = Looker(outbox, process.accept, process.wait_for_foreground)
        self.pulse = Pulse(outbox, self._measurements)
        self._running: dict[int, OpenReply] = {}
        self._cancelled: dict[int, None] = {}  # of which no reply runs, in order: it may still be asked for
        self._leaving = False
        self._lock = threading.Lock()  # held for these three

    def began(self, running: OpenReply) -> None:
        """Have a reply told by its thread. One that was cancelled already, or of who is leaving, ends at once."""
        id = running.request.id
        self.pulse.start()
        with self._lock:
            self._running[id] = running
            if id in self._cancelled or self._leaving:
                running.cancel()
            self._cancelled.pop(id, None)
            running.reader.start()  # before others see it, who may wait for its end

    def ended(self, reply: int) -> None:
        """A reply is over."""
        with self._lock:
            del self._running[reply]
        self.pulse.stop()

    def cancel(self, reply: int) -> None:
        """End a reply, whether it was begun or not."""
        with self._lock:
            if reply in self._running:
                self._running[reply].cancel()
            else:
                self._cancelled[reply] = None

    def forget_cancels(self, nothing_waits: Callable[[], bool]) -> None:
        """Forget the oldest cancels, of replies that had ended. nothing_waits: whether none is of a request that was read."""
        with self._lock:
            if len(self._cancelled) > KEPT_CANCELS and nothing_waits():
                for each in list(self._cancelled)[:-KEPT_CANCELS]:
                    del self._cancelled[each]

    def hold(self, reply: int, *, held: bool) -> None:
        """Tell no more of a reply for now, or more again."""
        with self._lock:
            if (running := self._running.get(reply)) is not None:
                running.hold(held=held)

    def replies(self) -> list[OpenReply]:
        """Return those that run."""
        with self._lock:
            return list(self._running.values())

    def end_warming(self) -> None:
        """Compute nothing more ahead of what it asks next."""
        warming, self.warming = self.warming, None
        if warming is not None:
            warming.cancel()

    def leave(self) -> None:
        """End what runs, and what will be begun."""
        self.end_warming()
        with self._lock:
            self._leaving = True
            for each in self._running.values():
                each.cancel()

    def close(self) -> None:
        """End the threads, of a guest that has left."""
        self.leave()
        for each in (self.prices, self.counts, self.tokens, self.advisor, self.looker, self.pulse):
            each.close()

    def _measurements(self) -> list[ReplyEvent]:
        """Return what is measured of each reply that somebody waits for."""
        watched = [each for each in self.replies() if each.request.watched and not each.request.background]
        measured = [(each.request.id, each.stream.live()) for each in watched]
        return [ReplyEvent(reply, live) for reply, live in measured if live is not None]
