"""A title that the model gives a chat, asked for while nobody uses the engine. Pure, like the session.

    first whole reply ──▶ WANTED ── idle ──▶ Warm, AskPrice ──▶ READING ── Priced ──▶ Send ──▶ WRITING ── Done ──▶ Titled
                            ▲──── something else is asked of the engine: Cancel ───────────────────┘

What the model is asked is short and read ahead, in steps that any request ends; so a prompt waits for a token at most.
"""

import re
from collections.abc import Iterable
from enum import Enum, auto

from tokamac.app.backend import wire
from tokamac.app.backend.client import BackendEvent
from tokamac.app.backend.wire import AskPrice, Cancel, Priced, Send, Warm
from tokamac.app.sanitise import REPLACEMENT, sanitise
from tokamac.app.tui.ahead import is_ready
from tokamac.app.tui.conversation import Reply, Turn
from tokamac.app.tui.steps import Ask, Step, Titled
from tokamac.engine.events import Message
from tokamac.engine.options import Sampling

IDLE_S = 5.0
"""How long nobody must have used the chat."""
EXCERPT = 400
"""Characters of the prompt, and of the reply, by which a title is found; some hundred tokens each."""
MOST_WORDS, MOST_CHARACTERS = 8, 60
"""Models count badly; what is longer is a sentence, not a title."""
SYSTEM = (
    "You give a conversation its title: at most six words that name its subject, in the language of the conversation. "
    "Write the title alone, without quotation marks and without a full stop."
)
BEGUN = "Title:"
"""The reply begins with it: the model neither thinks first nor greets."""
GREEDY = Sampling(temperature=0.0, max_tokens=16)

_MARKS = re.compile(r"[`*_#<>|\[\]{}\\]+")
_ENDS = " \t\"'“”„‟«»‹›‘’‚「」『』.:;,-–—"
_DECLINED = re.compile(
    r"(?:i['’]m|i (?:am|can|cannot|could|do|don|will|would)|sorry|as an ai|unfortunately)\b", re.IGNORECASE
)
"""How models begin to say no. In another language, too, a refusal is a sentence, and mostly too long."""


class _State(Enum):
    NONE = auto()  # there is no whole reply yet, or no other title will come
    WANTED = auto()
    READING = auto()
    WRITING = auto()


class Titles:
    """The title of the conversation that is held, once: a bad one, or none, leaves the chat its first words."""

    def __init__(self) -> None:
        self._state = _State.NONE
        self._messages: tuple[Message, ...] = ()
        self._id = 0  # below zero: those above are of replies
        self._price = 0

    @property
    def wanted(self) -> bool:
        """Whether the model may be asked."""
        return self._state is _State.WANTED

    def opened(self) -> None:
        """Another conversation is held."""
        self._state = _State.NONE

    def ended(self, replies: Iterable[Reply]) -> None:
        """A reply has ended, and these are there now: after the first whole one a title is wanted."""
        if sum(1 for reply in replies if reply.ending in ("stop", "length") and reply.text) == 1:
            self._state = _State.WANTED

    def ask(self, turn: Turn) -> list[Step]:
        """Return what to ask for a title of the conversation that begins with ``turn``."""
        self._state, self._messages = _State.READING, question(turn)
        self._price += 1
        return [Ask(Warm(self._messages)), Ask(AskPrice("title", self._price, self._messages))]

    def priced(self, event: Priced) -> list[Step]:
        """Take the price that comes when the question is read; return what asks it."""
        if (event.asker, event.id) != ("title", self._price) or self._state is not _State.READING:
            return []
        if event.price is None or not is_ready(event.price):  # not read ahead: a prompt might have to wait for it
            self._state = _State.NONE
            return []
        self._state = _State.WRITING
        self._id -= 1
        return [Ask(Send(self._id, (*self._messages, Message("assistant", BEGUN)), GREEDY, continues=True))]

    def take(self, event: BackendEvent) -> list[Step]:
        """Take an event of a reply that is not the chat's; return the title, if it brings one."""
        if self._state is not _State.WRITING:
            return []
        match event:
            case wire.Done(id, reason, text) if id == self._id:
                self._state = _State.NONE
                title = title_of(text, whole=reason == "stop")
                return [Titled(title)] if title else []
            case wire.Failed(id) if id == self._id:
                self._state = _State.NONE
        return []

    def stop(self) -> list[Step]:
        """Make way for what the user wants; it is asked again when nobody uses the chat."""
        was = self._state
        if was in (_State.READING, _State.WRITING):
            self._state = _State.WANTED
        return [Ask(Cancel(self._id))] if was is _State.WRITING else []

    def forget(self) -> None:
        """Be told that the engine is another. What was asked of the last one may have ended it, and is not asked again."""
        if self._state in (_State.READING, _State.WRITING):
            self._state = _State.NONE


def question(turn: Turn) -> tuple[Message, ...]:
    """Return what asks for a title: how the conversation begins, cut short, under a system prompt of its own."""
    asked = turn.prompt or ", ".join(each.name for each in turn.attachments)
    said = turn.reply.text if turn.reply is not None else ""
    begins = f"The user wrote:\n{_cut(asked)}\n\nThe assistant replied:\n{_cut(said)}\n\nWhat is the title?"
    return (Message("system", SYSTEM), Message("user", begins))


def title_of(said: str, *, whole: bool) -> str:
    """Return the title in a model's answer as plain text on one line; "" where it gives none. whole: the answer was not cut."""
    lines = [line.strip() for line in sanitise(said).removeprefix(BEGUN).split("\n")]
    while lines and not lines[0]:
        del lines[0]
    if not lines or not (whole or len(lines) > 1) or REPLACEMENT in lines[0]:
        return ""
    title = " ".join(_MARKS.sub(" ", lines[0]).split()).strip(_ENDS)
    too_long = len(title.split()) > MOST_WORDS or len(title) > MOST_CHARACTERS
    says_nothing = not any(char.isalnum() for char in title) or _DECLINED.match(title) is not None
    return "" if too_long or says_nothing else title


def _cut(text: str) -> str:
    return text if len(text) <= EXCERPT else text[: EXCERPT - 1] + "…"
