"""Answers "what if" aside: on the engine's thread while that is free, a step at a time, so that no prompt waits for it long.

Each kind of question has a thread of its own: the catalogue takes seconds to weigh, and a table is asked for meanwhile. Of the
questions of one kind that wait, the last alone is answered.
"""

import queue
import threading
import traceback
from collections.abc import Callable
from typing import Protocol, TypeVar, get_args

from tokamac.app.backend.outbox import Outbox
from tokamac.app.backend.whatif import Answer, Wanted, Weighing
from tokamac.app.backend.whatif_answer import answers
from tokamac.app.backend.wire import AskWhatIf, WhatIf
from tokamac.engine.errors import TokamacError

T = TypeVar("T")


class Between(Protocol):
    """Runs work where MLX may be touched, once nothing else does."""

    def __call__(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns."""


class Advisor:
    """Answers ``AskWhatIf``. limit: bytes that may be used of this machine; None is the system's limit."""

    def __init__(self, outbox: Outbox) -> None:
        self.limit: int | None = None
        self._kinds: dict[Wanted, _Kind] = {wanted: _Kind(wanted, outbox) for wanted in get_args(Wanted)}

    def ask(self, between: Between, request: AskWhatIf) -> None:
        """Have ``request`` answered. Returns at once."""
        self._kinds[request.question.wanted].ask(between, request, self.limit)


class _Kind:
    """A thread that answers questions of one kind."""

    def __init__(self, wanted: Wanted, outbox: Outbox) -> None:
        self._outbox = outbox
        self._latest: AskWhatIf | None = None
        self._asked: queue.SimpleQueue[tuple[Between, AskWhatIf, int | None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"advisor-{wanted}", daemon=True).start()

    def ask(self, between: Between, request: AskWhatIf, limit: int | None) -> None:
        self._latest = request
        self._asked.put((between, request, limit))

    def _run(self) -> None:
        while True:
            self._answer(*self._asked.get())

    def _answer(self, between: Between, request: AskWhatIf, limit: int | None) -> None:
        try:
            self._tell(between, request, limit)
        except TokamacError as error:
            self._outbox.put(WhatIf(request.id, None, error.one_line()))
        except Exception as error:  # a config may hold anything: it must not end this thread
            traceback.print_exc()
            why = f"It can't be said: {type(error).__name__}. The log has the details."
            self._outbox.put(WhatIf(request.id, None, why))

    def _tell(self, between: Between, request: AskWhatIf, limit: int | None) -> None:
        """Send the answer, and before it how far it has come; nothing more once a later question is there."""
        left = answers(request.question, limit)
        while self._latest is request:
            match between(lambda: next(left)):
                case Weighing(done, total, line):
                    self._outbox.put(WhatIf(request.id, None, done=done, total=total, line=line))
                case Answer() as found:
                    self._outbox.put(WhatIf(request.id, found))
                    return
