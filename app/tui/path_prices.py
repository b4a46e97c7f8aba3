"""What it would take to go on along each path of the tree that is looked at: asked for as paths come into view, then kept."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from tokamac.app.tui.phase import Phase
from tokamac.app.tui.prices import PATH, Question
from tokamac.app.tui.session import Session
from tokamac.app.tui.steps import Step
from tokamac.engine.price import Price


class PathPrices:
    """The prices of one look at the tree. perform: has the session's steps done."""

    def __init__(self, session: Session, perform: Callable[[list[Step]], None]) -> None:
        self._session = session
        self._perform = perform
        self._asked: set[int] = set()
        self._known: dict[int, Price] = {}
        self._unpriced: set[int] = set()  # there is no price of these: they are not asked about again

    def of(self, keys: Sequence[int]) -> Mapping[int, Price]:
        """Return what is known so far, by message, and have the engine asked, aside, for what is not known of ``keys``.

        While it is at work it is not asked: no other path can be read then either. Nor again for what it was asked already, unless
        that was given up for another question.
        """
        prices = self._session.prices
        self._known |= {key: each.price for each in prices.known for key in self._own([each.question])}
        self._unpriced.update(self._own(prices.unpriced))
        lacking = [key for key in keys if key not in self._known and key not in self._unpriced]
        if self._session.phase is Phase.IDLE and not set(self._own(prices.waiting)).issuperset(lacking):
            self._asked.update(lacking)
            self._perform(self._session.price_paths(lacking))
        return self._known

    def _own(self, questions: Sequence[Question]) -> Iterator[int]:
        """Yield the messages that this look asked ``questions`` for."""
        return (each.key for each in questions if each.id == PATH and each.key is not None and each.key in self._asked)
