"""Questions "what if" between the screens that ask them and the engine's process. An answer is known by its question's number."""

from collections.abc import Callable

from textual.app import App

from tokamac.app.backend.client import BackendEvent
from tokamac.app.backend.whatif import Question
from tokamac.app.backend.wire import AskWhatIf, Loaded, WhatIf
from tokamac.app.tui.bridge import Bridge
from tokamac.app.tui.session import Session


class WhatIfs:
    """Opens the screen over ``app``, sends what it asks, and hands it what comes.

    listeners: told every answer, and when a model was loaded: the process may be new then, and has to be asked again.
    """

    def __init__(self, session: Session, bridge: Bridge) -> None:
        self._session = session
        self._bridge = bridge
        self._asked = 0
        self._own_life: int | None = None
        self.listeners: list[Callable[[WhatIf | Loaded], None]] = []

    def open(self, app: App[int], model: str) -> None:
        """Ask about ``model``, which need not be here."""
        # plotext takes a tenth of a second to import: not before it is wanted.
        from tokamac.app.tui.screens.whatif import WhatIfScreen
        from tokamac.app.tui.whatif_form import first_question, known_names

        start, names = first_question(self._session, model), known_names(model)
        app.push_screen(
            WhatIfScreen(self.ask, start, names, busy=lambda: self._session.busy), lambda _: self.asked_enough()
        )

    def take(self, app: App[int], event: BackendEvent) -> None:
        """Give an answer to who asked, or say that the engine is new; other events are none of its business."""
        if not isinstance(event, WhatIf | Loaded):
            return
        for listener in self.listeners:
            listener(event)
        if len(app.screen_stack) < 2:
            return
        from tokamac.app.tui.screens.whatif import WhatIfScreen

        for screen in app.screen_stack:
            if isinstance(screen, WhatIfScreen):
                screen.ask(again=True) if isinstance(event, Loaded) else screen.take(event)

    def ask(self, question: Question) -> int:
        """Send a question, and return the number that its answers will have.

        Where no process runs, since no model is loaded, one is started for this alone.
        """
        if not self._bridge.running:
            self._bridge.start()
            self._own_life = self._bridge.life
        self._asked += 1
        self._bridge.ask(AskWhatIf(self._asked, question))
        return self._asked

    def asked_enough(self) -> None:
        """End a process that was started for questions alone."""
        if self._own_life is not None and self._bridge.life == self._own_life:
            self._bridge.end()
        self._own_life = None
