"""Questions answered aside: the engine answers once it is free, and the child's main thread must not wait for that."""

import queue
import threading
import traceback
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from tokamac.app.backend.outbox import Outbox
from tokamac.app.backend.port import EnginePort
from tokamac.app.backend.wire import AskCount, AskPrice, Counted, Priced, Reply
from tokamac.engine.errors import TokamacError, panic_error

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
        lambda engine, asked: Priced(asked.asker, asked.id, engine.price(asked.messages, continues=asked.continues)),
        lambda asked: Priced(asked.asker, asked.id, None),
        replaces=lambda asked: asked.asker,
    )
