"""What this machine makes of models, asked of the engine's process and kept: those on disk, and those of the catalogue, best first.

The answers come a model at a time. A question that another one of its kind displaced (what if asks for the catalogue too), or
whose process is no more, is asked again when the estimates are wanted the next time.
"""

from collections.abc import Callable, Sequence

from tokamac.app.backend.whatif import ModelLine, Question
from tokamac.app.backend.wire import WhatIf
from tokamac.engine.options import KVSpec

CONTEXT = 8192
"""Tokens held while decoding, to reckon with: a long conversation, or a long file to ask about."""


class Estimates:
    """Asks by ``ask``, which returns the number that the answers will have. Attributes are for reading.

    disk, catalogue: what is known, by model. best: the catalogue, best first; () while it is being weighed. place, rule: whose
    estimates these are, and how its budget is known. weighed: how many of how many of the catalogue. problem: why there is no
    answer.
    """

    def __init__(self, ask: Callable[[Question], int]) -> None:
        self._ask = ask
        self._asked: dict[str, int] = {}
        self._kv: KVSpec | None = None
        self._limit: int | None = None
        self.disk: dict[str, ModelLine] = {}
        self.catalogue: dict[str, ModelLine] = {}
        self.best: tuple[str, ...] = ()
        self.place = ""
        self.rule = ""
        self.weighed = (0, 0)
        self.problem = ""

    def want(self, names: Sequence[str], kv: KVSpec, limit: int | None = None) -> None:
        """Ask for what is not known yet of the catalogue, and of the models on disk that are named, with these caches.

        limit: bytes that a model may take, where the user set them.
        """
        if limit != self._limit:
            self._limit, self.best = limit, ()
            for known in (self.disk, self.catalogue, self._asked):
                known.clear()
        if kv != self._kv:
            self._kv = kv
            self.disk.clear()
            self._asked.pop("disk", None)
        unknown = tuple(name for name in names if name not in self.disk)
        if unknown and "disk" not in self._asked:
            question = Question("disk", "", kv=kv, context=CONTEXT, prompt=CONTEXT, names=unknown)
            self._asked["disk"] = self._ask(question)
        if not self.best and "models" not in self._asked:
            self._asked["models"] = self._ask(Question("models", "", context=CONTEXT, prompt=CONTEXT))

    def again(self) -> None:
        """Those who were asked are no more, or may have been asked for something else meanwhile."""
        self._asked.clear()

    def forget(self, model: str) -> None:
        """What is on disk of ``model`` has changed."""
        self.disk.pop(model, None)

    def take(self, event: WhatIf) -> bool:
        """Take an answer, or a part of one; return whether it was asked for here."""
        wanted = next((wanted for wanted, number in self._asked.items() if number == event.id), None)
        if wanted is None:
            return False
        if event.line is not None:
            (self.disk if wanted == "disk" else self.catalogue)[event.line.model] = event.line
        if event.answer is not None or event.error:
            del self._asked[wanted]
            self.problem = event.error
        if event.answer is not None:
            self.place, self.rule = event.answer.place, event.answer.rule
        if wanted == "models":
            self.weighed = (event.done, event.total)
            if event.answer is not None:
                self.best = tuple(line.model for line in event.answer.models)
        return True
