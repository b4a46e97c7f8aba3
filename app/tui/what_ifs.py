"""Questions "what if" between the screen that asks them and the engine's process. An answer is known by its question's number."""

from textual.app import App

from tokamac.app.backend.whatif import Question
from tokamac.app.backend.wire import AskWhatIf, WhatIf
from tokamac.app.tui.bridge import Bridge
from tokamac.app.tui.session import Session


class WhatIfs:
    """Opens the screen over ``app``, sends what it asks, and hands it what comes."""

    def __init__(self, session: Session, bridge: Bridge) -> None:
        self._session = session
        self._bridge = bridge
        self._asked = 0

    def open(self, app: App[int], model: str) -> None:
        """Ask about ``model``, which need not be here."""
        # plotext takes a tenth of a second to import: not before it is wanted.
        from tokamac.app.tui.screens.whatif import WhatIfScreen
        from tokamac.app.tui.whatif_form import first_question, known_names

        start, names = first_question(self._session, model), known_names(model)
        app.push_screen(WhatIfScreen(self._ask, start, names, busy=lambda: self._session.busy))

    def take(self, app: App[int], answer: WhatIf | None) -> None:
        """Give an answer to the screen that asked. None: the engine is new, and has to be asked again."""
        if len(app.screen_stack) < 2:
            return
        from tokamac.app.tui.screens.whatif import WhatIfScreen

        for screen in app.screen_stack:
            if isinstance(screen, WhatIfScreen):
                screen.ask(again=True) if answer is None else screen.take(answer)

    def _ask(self, question: Question) -> int:
        self._asked += 1
        self._bridge.ask(AskWhatIf(self._asked, question))
        return self._asked
