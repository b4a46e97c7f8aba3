"""Texts counted aside, in tokens: on the engine's thread once that is free, while the child's main thread goes on."""

import queue
import threading
import traceback

from tokamac.app.backend.outbox import Outbox
from tokamac.app.backend.port import EnginePort
from tokamac.app.backend.wire import AskCount, Counted
from tokamac.engine.errors import TokamacError


class Counter:
    """A thread that answers ``AskCount``, each in its turn."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._asked: queue.SimpleQueue[tuple[EnginePort, AskCount]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="counter", daemon=True).start()

    def ask(self, engine: EnginePort, request: AskCount) -> None:
        """Have ``request`` answered by ``engine``. Returns at once."""
        self._asked.put((engine, request))

    def _run(self) -> None:
        while True:
            self._answer(*self._asked.get())

    def _answer(self, engine: EnginePort, request: AskCount) -> None:
        tokens = None
        try:
            tokens = engine.count(request.text)
        except TokamacError:
            pass  # closed meanwhile, or no Unicode, which is told when it is sent
        except Exception:
            traceback.print_exc()
        self._outbox.put(Counted(request.id, tokens))
