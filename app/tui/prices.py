"""What could be done with the message that is pointed at, and what each would take. Pure, like the session.

    a message is pointed at, or versions are in view ──▶ AskPrice ──▶ Priced ──▶ AskPrice for the next ──▶ …

One after the other: of these questions, those that wait, the engine's process answers the last alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokamac.app.backend.wire import AskPrice, ModelInfo, Priced
from tokamac.app.tui import units
from tokamac.app.tui.ahead import READY_TOKENS, is_ready
from tokamac.app.tui.conversation import Reply, Turn, cut_here, messages
from tokamac.app.tui.steps import Ask, Step
from tokamac.app.tui.talk import Talk
from tokamac.engine.events import Message
from tokamac.engine.options import TemplateOptions
from tokamac.engine.price import Price

OTHER = "~ "
"""Put before a prompt, it makes all of it another text: what an edit takes at most."""
INSTANT_S = 0.1
READY = "ready"
"""Of a path that can be gone on with at once: nothing of it is to be read again."""
PATH = "branches"
"""The ``id`` of a question about a path, which stands in the tree of all paths."""


@dataclass(frozen=True, slots=True)
class Question:
    """What an action would have answered. most: editing less takes less.

    id: the action's in the registry; ``other`` of two versions, which ``older`` and ``newer`` both read.
    key: of a path that is read from then on, the message it was asked for; nothing is answered yet. None: of another action.
    """

    id: str
    messages: tuple[Message, ...]
    continues: bool = False
    most: bool = False
    key: int | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """The price of what ``question`` asked about."""

    question: Question
    price: Price


class Prices:
    """Prices of actions on one message, or of paths.

    known: those that came, in the order they were asked for. unpriced: what was answered, but has no price. waiting: what is not
    answered yet. template: what the chat template is told.
    """

    def __init__(self) -> None:
        self.known: tuple[Known, ...] = ()
        self.unpriced: tuple[Question, ...] = ()
        self.waiting: tuple[Question, ...] = ()
        self.template = TemplateOptions()
        self._id = 0

    def ask(self, asked: Sequence[Question]) -> list[Step]:
        """Return what to ask in place of what was asked before, which is forgotten with its prices."""
        self.forget()
        self.waiting = tuple(asked)
        return self._next()

    def priced(self, event: Priced) -> list[Step]:
        """Take a price, and return what to ask next."""
        if (event.asker, event.id) != ("actions", self._id) or not self.waiting:
            return []
        question, *others = self.waiting
        self.waiting = tuple(others)
        if event.price is None:
            self.unpriced = (*self.unpriced, question)
        else:
            self.known = (*self.known, Known(question, event.price))
        return self._next()

    def forget(self) -> None:
        """Nothing is pointed at any more, or another engine is asked."""
        self.known = ()
        self.unpriced = self.waiting = ()

    def _next(self) -> list[Step]:
        if not self.waiting:
            return []
        self._id += 1
        first = self.waiting[0]
        return [Ask(AskPrice("actions", self._id, first.messages, first.continues, self.template))]


def questions(talk: Talk, system: str, key: int, info: ModelInfo | None) -> list[Question]:
    """Return what could be done with the message ``key``: make its reply again, go on with it, write its prompt anew, leave it
    for a copy of what leads to it, or for other versions."""
    if key not in talk.tree.nodes:
        return []
    return [*_answers(talk, system, key, info), _fork(talk, system, key), *_versions(talk, system, key)]


def _answers(talk: Talk, system: str, key: int, info: ModelInfo | None) -> list[Question]:
    if (prompt := talk.prompt_of(key)) is None:
        return []
    asked = messages(system, talk.tree.turns_to(talk.end_of_prompt(prompt.key)))
    *before, written = messages(system, talk.tree.turns_to(prompt.key))
    edit = Question("edit", (*before, replace(written, content=OTHER + written.content)), most=True)
    return [Question("again", asked), *_going_on(talk.begun(key), asked, info), edit]


def _going_on(said: Reply | None, asked: tuple[Message, ...], info: ModelInfo | None) -> list[Question]:
    """Return the question of going on with what was ``said``; None: there is nothing yet, and ``asked`` is answered."""
    if said is None:
        return [Question("continue", asked)]
    if whole(said, thinks=info is not None and info.thinks):
        return []
    begun = cut_here(said)
    return [Question("continue", (*asked, Message("assistant", begun.text, begun.thinking)), continues=True)]


def _fork(talk: Talk, system: str, key: int) -> Question:
    return Question("fork", _gone_on(talk, system, key), key=key)


def _versions(talk: Talk, system: str, key: int) -> list[Question]:
    older, newer = (talk.tree.beside(key, by) for by in (-1, 1))
    named = {"older": older, "newer": newer} if older != newer else {"other": newer}
    return [path(talk, system, at, name) for name, at in named.items() if at is not None]


def path(talk: Talk, system: str, key: int, name: str = PATH) -> Question:
    """Return the question what the next prompt would find to be read, once the path through ``key`` is the one that is read."""
    return Question(name, _gone_on(talk, system, talk.tree.end_of(key)), key=key)


def _gone_on(talk: Talk, system: str, end: int) -> tuple[Message, ...]:
    return messages(system, [*talk.tree.turns_to(end), Turn("")])


def of_path(price: Price) -> str:
    """Return what a path would take before it can be gone on with: ``ready``, or ``1,204 tokens to read again, about 3.0 s``."""
    if is_ready(price):
        return READY
    return amount(price, " to read again")


def amount(price: Price, what: str = "", *, brief: bool = False) -> str:
    """Return what ``price`` is, of ``what``: ``240 tokens, 1.2 MB from disk, about 0.4 s``. What is instant needs no seconds.

    brief: in three figures, and either tokens or what comes from the disk.
    """
    disk_alone = is_of_disk(price) if brief else price.disk_bytes > 0 and not price.tokens
    parts = []
    if not disk_alone:
        number = units.short(price.tokens) if brief else units.count(price.tokens)
        parts.append(f"{number} token{'' if price.tokens == 1 else 's'}{what}")
    if price.disk_bytes and (disk_alone or not brief):
        parts.append(units.size(price.disk_bytes) + ("" if brief else " from disk"))
    if price.seconds is not None and price.seconds >= INSTANT_S:
        parts.append(f"about {units.seconds(price.seconds)}")
    return ", ".join(parts)


def is_of_disk(price: Price) -> bool:
    """Whether what is computed of ``price`` is nothing beside what comes from the disk."""
    return price.tokens <= READY_TOKENS and price.disk_bytes > 0


def whole(reply: Reply, *, thinks: bool) -> str:
    """Return why there is no going on with a reply that was begun; "" where there is. thinks: whether the loaded model does."""
    if reply.ending == "stop":
        return "This reply is whole: the model ended it by itself."
    if not cut_here(reply).text and not thinks:
        return "The reply was cut in its thinking, and this model does not think: make it again."
    return ""
