"""Reading ahead while the user writes: what is asked of the engine, and what it says the next prompt would take.

    a pause in a long draft ──▶ AskPrice ──▶ Priced: much to read? ──▶ Warm, AskPrice ──▶ Priced: ready

The second price waits in the engine until the reading is done, and so tells that it is. Pure, like the session.
"""

from collections.abc import Sequence

from tokamac.app.backend.wire import AskPrice, Priced, Warm
from tokamac.app.tui.steps import Ask, Step
from tokamac.engine.events import Message
from tokamac.engine.options import TemplateOptions
from tokamac.engine.price import Price

LEAST_CHARACTERS = 200  # some fifty tokens: fewer are read in a moment once they are sent
READY_TOKENS = 32  # a template's end, and last words that may still change, can't be read ahead


def is_ready(price: Price) -> bool:
    """Whether there is nothing left that could be read ahead."""
    return price.tokens <= READY_TOKENS and price.disk_bytes == 0


class Ahead:
    """What is read ahead. ``price`` is that of the draft at its last pause; None while it is not known, or not worth a word.

    template: what the chat template is told.
    """

    def __init__(self) -> None:
        self.price: Price | None = None
        self._messages: tuple[Message, ...] = ()  # what the draft would send; empty where there is none to speak of
        self._id = 0
        self.template = TemplateOptions()
        self._reading = False  # a Warm was sent, and the price that follows it has not come

    def pause(self, draft: str, messages: Sequence[Message]) -> list[Step]:
        """Return what to ask when the user pauses in ``draft``, which would send ``messages``."""
        given = tuple(messages) if len(draft) >= LEAST_CHARACTERS else ()
        if given == self._messages:
            return []
        self._messages = given
        if not given:
            self.price = None
            return []
        # A price alone would wait until an older draft is read; another Warm ends that.
        return self._warm(given) if self._reading else [self._ask(given)]

    def begin(self, messages: Sequence[Message]) -> list[Step]:
        """Return what to ask of a model that is new to a conversation; ``messages`` end with an empty draft."""
        return self._warm(tuple(messages)) if len(messages) > 1 else []

    def priced(self, event: Priced) -> list[Step]:
        """Take a price; return what to ask next."""
        if (event.asker, event.id) != ("draft", self._id):
            return []
        read, self._reading = self._reading, False
        if not self._messages:
            return []
        self.price = event.price
        if read or event.price is None or is_ready(event.price):
            return []
        return self._warm(self._messages)

    def forget(self) -> None:
        """Be told that the engine was asked for something else, or is another."""
        self.price = None
        self._messages = ()
        self._reading = False

    def _warm(self, messages: tuple[Message, ...]) -> list[Step]:
        self._reading = True
        return [Ask(Warm(messages, self.template)), self._ask(messages)]

    def _ask(self, messages: tuple[Message, ...]) -> Ask:
        self._id += 1
        return Ask(AskPrice("draft", self._id, messages, template=self.template))
