"""What could be done with the message that is pointed at, and what each would take. Pure, like the session.

    a message is pointed at, or versions are in view ──▶ AskPrice ──▶ Priced ──▶ AskPrice for the next ──▶ …

One after the other: of questions that wait, the engine's process answers the last alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokamac.app.backend.wire import AskPrice, ModelInfo, Priced
from tokamac.app.tui import units
from tokamac.app.tui.ahead import is_ready
from tokamac.app.tui.conversation import Reply, Turn, messages
from tokamac.app.tui.steps import Ask, Step
from tokamac.app.tui.talk import Talk
from tokamac.engine.continuation import whole_characters
from tokamac.engine.events import Message
from tokamac.engine.price import Price

OTHER = "~ "
"""Put before a prompt, it makes all of it another text: what an edit takes at most."""
INSTANT_S = 0.1
READY = "ready"
"""Of a path that can be gone on with at once: nothing of it is to be read again."""


@dataclass(frozen=True, slots=True)
class Question:
    """What an action, the registry's ``id``, would have answered. most: editing less takes less.

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
    """Prices of actions on one message. known: those that came, in the order they were asked for."""

    def __init__(self) -> None:
        self.known: tuple[Known, ...] = ()
        self._waiting: list[Question] = []
        self._id = 0  # below zero: those above are of what is read ahead

    def ask(self, asked: Sequence[Question]) -> list[Step]:
        """Return what to ask for another message; the prices of the one before are forgotten."""
        self.forget()
        self._waiting = list(asked)
        return self._next()

    def priced(self, event: Priced) -> list[Step]:
        """Take a price, and return what to ask next."""
        if event.id != self._id or not self._waiting:
            return []
        question = self._waiting.pop(0)
        if event.price is not None:
            self.known = (*self.known, Known(question, event.price))
        return self._next()

    def forget(self) -> None:
        """Nothing is pointed at any more, or another engine is asked."""
        self.known = ()
        self._waiting = []

    def _next(self) -> list[Step]:
        if not self._waiting:
            return []
        self._id -= 1
        return [Ask(AskPrice(self._id, self._waiting[0].messages, self._waiting[0].continues))]


def questions(talk: Talk, system: str, key: int, info: ModelInfo | None) -> list[Question]:
    """Return what could be done with the message ``key``: make its reply again, go on with it, write its prompt anew, leave it
    for a copy of what leads to it, or for other versions."""
    if key not in talk.tree.nodes:
        return []
    return [*_answers(talk, system, key, info), _fork(talk, system, key), *_versions(talk, system, key)]


def _answers(talk: Talk, system: str, key: int, info: ModelInfo | None) -> list[Question]:
    if (prompt := talk.prompt_of(key)) is None:
        return []
    reply = talk.reply_at(key)
    asked = messages(system, talk.tree.turns_to(prompt.key))
    found = [Question("again", asked)]
    said = None if reply is None else reply.reply
    if said is not None and not whole(said, thinks=info is not None and info.thinks):
        begun = cut_here(said)
        found.append(Question("continue", (*asked, Message("assistant", begun.text, begun.thinking)), continues=True))
    edited = replace(asked[-1], content=OTHER + asked[-1].content)
    return [*found, Question("edit", (*asked[:-1], edited), most=True)]


def _fork(talk: Talk, system: str, key: int) -> Question:
    return Question("fork", _gone_on(talk, system, key), key=key)


def _versions(talk: Talk, system: str, key: int) -> list[Question]:
    older, newer = (talk.tree.beside(key, by) for by in (-1, 1))
    named = {"older": older, "newer": newer} if older != newer else {"other": newer}
    return [path(talk, system, at, name) for name, at in named.items() if at is not None]


def path(talk: Talk, system: str, key: int, name: str = "branches") -> Question:
    """Return the question what the next prompt would find to be read, once the path through ``key`` is the one that is read."""
    return Question(name, _gone_on(talk, system, talk.tree.end_of(key)), key=key)


def _gone_on(talk: Talk, system: str, end: int) -> tuple[Message, ...]:
    return messages(system, [*talk.tree.turns_to(end), Turn("")])


def of_path(price: Price) -> str:
    """Return what a path would take before it can be gone on with: ``ready``, or ``1,204 tokens to read again, about 3.0 s``."""
    if is_ready(price):
        return READY
    return amount(price, " to read again" if price.tokens else "")


def amount(price: Price, what: str = "") -> str:
    """Return what ``price`` is, of ``what``: ``240 tokens, 1.2 MB from disk, about 0.4 s``. What is instant needs no seconds."""
    tokens = f"{units.count(price.tokens)} token{'' if price.tokens == 1 else 's'}{what}"
    disk = f", {units.size(price.disk_bytes)} from disk" if price.disk_bytes else ""
    instant = price.seconds is None or price.seconds < INSTANT_S
    return tokens + disk + ("" if instant else f", about {units.seconds(price.seconds)}")


def whole(reply: Reply, *, thinks: bool) -> str:
    """Return why there is no going on with a reply; "" where there is. thinks: whether the model that is loaded does."""
    if reply.ending == "stop":
        return "This reply is whole: the model ended it by itself."
    begun = cut_here(reply)
    if not (begun.text or begun.thinking):
        return "Nothing was said yet that could be continued: make the reply again."
    if not begun.text and not thinks:
        return "The reply was cut in its thinking, and this model does not think: make it again."
    return ""


def cut_here(reply: Reply) -> Reply:
    """Return what a reply that goes on begins with: without what was left of a character where it was cut."""
    said = whole_characters(Message("assistant", reply.text, reply.thinking))
    return Reply(said.content, said.thinking, reply.thinking_s)
