"""What it would take to go on along each path of the tree that is looked at: asked for as paths come into view, then kept."""

from collections.abc import Callable, Mapping, Sequence

from tokamac.app.tui.phase import Phase
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

    def of(self, keys: Sequence[int]) -> Mapping[int, Price]:
        """Return what is known so far, by message, and have the engine asked, aside, for what is not known of ``keys``.

        While it is at work it is not asked: no other path can be read then either.
        """
        known = (each for each in self._session.prices.known if each.question.key is not None)
        self._known |= {each.question.key: each.price for each in known if each.question.key in self._asked}
        lacking = [key for key in keys if key not in self._known]
        if self._session.phase is Phase.IDLE and not self._asked.issuperset(lacking):
            self._asked.update(lacking)
            self._perform(self._session.price_paths(lacking))
        return self._known
