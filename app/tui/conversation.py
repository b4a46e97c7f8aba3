"""A conversation as the screen keeps it: turns of a prompt and its reply. Plain values; every send carries all of it."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from tokamac.app.store.values import Attachment
from tokamac.app.tui.attachments import whole
from tokamac.engine.continuation import whole_characters
from tokamac.engine.events import Message, TextKind
from tokamac.engine.limits.diagnosis import Diagnosis
from tokamac.engine.limits.gaps import Outlier
from tokamac.engine.limits.metrics import Metrics

Ending = Literal["stop", "length", "cancelled", "lost", "failed"]


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model said, and why it ended: ``lost`` with the engine, ``failed`` with an error, or as the engine says.

    model: its name; "" is not known. reason: why it failed, and what to do, in sentences on one line; "" where it did not.
    thinking_ended_at: the budget of tokens that ended the thinking; None where none did.
    """

    text: str
    thinking: str = ""
    thinking_s: float | None = None
    ending: Ending = "stop"
    model: str = ""
    metrics: Metrics | None = None
    outliers: tuple[Outlier, ...] = ()
    diagnosis: Diagnosis | None = None
    reason: str = ""
    thinking_ended_at: int | None = None


def cut_here(reply: Reply) -> Reply:
    """Return what a reply that goes on begins with: without what was left of a character where it was cut."""
    said = whole_characters(Message("assistant", reply.text, reply.thinking))
    return Reply(said.content, said.thinking, reply.thinking_s)


class Growing:
    """A reply while it is made: what was said so far, and how long the thinking took. begun: what it goes on from."""

    def __init__(self, begun: Reply | None = None) -> None:
        begun = begun or Reply("")
        self._text: dict[TextKind, list[str]] = {"answer": [begun.text], "thinking": [begun.thinking]}
        self._thinking_from: float | None = None
        self._thinking_s = begun.thinking_s

    def add(self, text: str, kind: TextKind, now: float) -> None:
        """Append ``text``, which came at the time ``now``."""
        self._text[kind].append(text)
        if kind == "thinking" and self._thinking_from is None:
            self._thinking_from = now - (self._thinking_s or 0.0)
            self._thinking_s = None
        elif kind == "answer":
            self._stop_thinking(now)

    def end(self, ending: Ending, now: float) -> Reply:
        """Return the reply as far as it came."""
        self._stop_thinking(now)
        return replace(self.so_far(), ending=ending)

    def so_far(self) -> Reply:
        """Return the reply as if it ended here."""
        answer, thinking = ("".join(self._text[kind]) for kind in ("answer", "thinking"))
        return Reply(answer, thinking, self._thinking_s)

    def _stop_thinking(self, now: float) -> None:
        if self._thinking_from is not None and self._thinking_s is None:
            self._thinking_s = now - self._thinking_from


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt, and its reply unless that is still to come.

    key, reply_key: of the messages in their tree; 0 is of none. place, reply_place: which of how many stand there, from 1.
    attachments: what goes with the prompt. system, between: what system messages before the prompt say, and before its reply;
    system_keys, between_keys: of these messages.
    """

    prompt: str
    reply: Reply | None = None
    key: int = 0
    reply_key: int = 0
    place: tuple[int, int] = (1, 1)
    reply_place: tuple[int, int] = (1, 1)
    attachments: tuple[Attachment, ...] = ()
    system: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    system_keys: tuple[int, ...] = ()
    between_keys: tuple[int, ...] = ()

    @property
    def asked(self) -> str:
        """The prompt as the model is given it, attachments and all."""
        return whole(self.prompt, self.attachments)


def messages(system: str, turns: Iterable[Turn]) -> tuple[Message, ...]:
    """Return the conversation as the engine takes it.

    A turn whose reply never began is left out: templates refuse two prompts in a row. The last turn, unanswered, is the one asked.
    System messages stay where they stand.
    """
    turns = tuple(turns)
    out = _system((system,))
    for turn in turns[:-1]:
        replied = turn.reply is not None and bool(turn.reply.text)
        asked = [Message("user", turn.asked)] if replied and turn.asked else []
        out += [*_system(turn.system), *asked, *_system(turn.between)]
        if turn.reply is not None and replied:
            out.append(Message("assistant", turn.reply.text, turn.reply.thinking))
    for turn in turns[-1:]:
        out += [*_system(turn.system), Message("user", turn.asked), *_system(turn.between)]
    return tuple(out)


def _system(texts: Iterable[str]) -> list[Message]:
    return [Message("system", text) for text in texts if text.strip()]
