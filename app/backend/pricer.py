"""Prices, asked aside: the engine tells them when it is free, and the child's main thread must not wait for that.

A price asked for while something is read ahead comes when that is done, which is how the screen learns of it.
"""

import queue
import threading
import traceback

from tokamac.app.backend.outbox import Outbox
from tokamac.app.backend.port import EnginePort
from tokamac.app.backend.wire import AskPrice, Priced
from tokamac.engine.errors import TokamacError


class Pricer:
    """A thread that answers ``AskPrice``: of the questions that wait, the last alone."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._asked: queue.SimpleQueue[tuple[EnginePort, AskPrice]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="pricer", daemon=True).start()

    def ask(self, engine: EnginePort, request: AskPrice) -> None:
        """Have ``request`` answered by ``engine``. Returns at once."""
        self._asked.put((engine, request))

    def _run(self) -> None:
        while True:
            self._answer(*self._last())

    def _last(self) -> tuple[EnginePort, AskPrice]:
        asked = self._asked.get()
        while not self._asked.empty():
            asked = self._asked.get()
        return asked

    def _answer(self, engine: EnginePort, request: AskPrice) -> None:
        price = None
        try:
            price = engine.price(request.messages, continues=request.continues)
        except TokamacError:
            pass  # too long, or closed meanwhile: that is told when the prompt is sent
        except Exception:
            traceback.print_exc()
        self._outbox.put(Priced(request.id, price))
