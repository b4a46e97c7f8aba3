"""What the session asks of the engine beside replies: drafts read ahead, prices, a title. Pure; a reply goes before them all."""

from collections.abc import Callable

from tokamac.app.backend.wire import Load, Priced
from tokamac.app.store.values import Attachment
from tokamac.app.tui.ahead import Ahead
from tokamac.app.tui.attachments import Draft
from tokamac.app.tui.guidance import MODEL as GUIDE
from tokamac.app.tui.life import Life
from tokamac.app.tui.phase import Phase
from tokamac.app.tui.prices import Prices, questions
from tokamac.app.tui.steps import Step
from tokamac.app.tui.talk import Talk
from tokamac.app.tui.titles import IDLE_S, Titles


class Beside(Life):
    """One conversation and its engine, as far as no reply is asked for."""

    def __init__(self, load: Load, system: str, clock: Callable[[], float]) -> None:
        super().__init__(load, clock)
        self.system = system
        self.talk = Talk()
        self.ahead = Ahead()
        self.prices = Prices()
        self.titles = Titles()

    def pause(self, text: str, attachments: tuple[Attachment, ...] = ()) -> list[Step]:
        """Have the draft, in which the user pauses, read ahead: as ``submit`` would send it, and if nothing else is to do.

        A model that was unloaded is loaded for it.
        """
        self.idle.seen()
        asked = Draft(text.strip(), attachments).whole
        if self.phase is Phase.UNLOADED:
            return self.start() if asked else []
        free = self.phase is Phase.IDLE and self.load.prompt_cache
        return self._before_title(self.ahead.pause(asked, self.talk.request(self.system, asked)) if free else [])

    def point(self, key: int | None) -> list[Step]:
        """Ask what could be done with the message ``key``, at which the user points, and what it would take; None: at none."""
        asked = [] if key is None or self.phase is not Phase.IDLE else questions(self.talk, self.system, key, self.info)
        return self._before_title(self.prices.ask(asked))

    def entitle(self) -> list[Step]:
        """Have the model give the chat a title, if it can have one and nobody uses the chat. To be called now and then.

        The guide can't: it only knows about the app. Nor where prompts are not kept, so that nothing is read ahead.
        """
        able = self.phase is Phase.IDLE and self.load.prompt_cache and self.load.model != GUIDE
        quiet = self.idle.quiet_s(self.phase_since) >= IDLE_S
        return self.titles.ask(self.talk.turns[0]) if able and quiet and self.titles.wanted else []

    def _before_title(self, steps: list[Step]) -> list[Step]:
        """Return ``steps``; where they ask anything, a title is stopped first."""
        return [*self.titles.stop(), *steps] if steps else []

    def _priced(self, event: Priced) -> list[Step]:
        return [*self.prices.priced(event), *self.ahead.priced(event), *self.titles.priced(event)]

    def _begin_ahead(self) -> list[Step]:
        """Have the engine read, in idle time, the conversation that it finds new."""
        ready = self.phase is Phase.IDLE and self.load.prompt_cache
        return self._before_title(self.ahead.begin(self.talk.request(self.system, "")) if ready else [])

    def _forget(self) -> None:
        self.ahead.forget()
        self.prices.forget()
        self.titles.forget()
