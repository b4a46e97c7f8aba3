"""A short exchange with the embedded guide, as a state machine. Pure: what its process says in, requests out."""

from dataclasses import dataclass, field

from tokamac.app.backend import wire
from tokamac.app.backend.client import BackendEvent, Died, Garbled
from tokamac.app.backend.wire import Load, Request, Send
from tokamac.app.sanitise import Sanitiser, sanitise
from tokamac.engine.events import Message
from tokamac.engine.hub_names import GUIDE
from tokamac.engine.options import Sampling

LONGEST = Sampling(max_tokens=400)


@dataclass(slots=True)
class Said:
    """A question, and its answer as far as it came; both safe to show."""

    question: str
    answer: str = ""
    over: bool = False
    _clean: Sanitiser = field(default_factory=Sanitiser)

    def add(self, text: str) -> None:
        """Append to the answer, made safe."""
        self.answer += self._clean.feed(text)


class Guidance:
    """What was asked and answered. loaded: whether the guide is there. problem: why it is not, or gave no answer."""

    def __init__(self) -> None:
        self.said: list[Said] = []
        self.loaded = False
        self.problem = ""
        self._id = 0

    @property
    def busy(self) -> bool:
        """Whether the guide loads, or answers."""
        return not self.problem and (not self.loaded or self.answering)

    @property
    def answering(self) -> bool:
        """Whether a question has no whole answer yet."""
        return bool(self.said) and not self.said[-1].over

    def start(self) -> list[Request]:
        """Return what to ask of a process that is new."""
        return [Load(GUIDE)]

    def ask(self, question: str) -> list[Request]:
        """Ask, now or as soon as the guide is there. To be called when nothing is being answered."""
        self.said.append(Said(sanitise(question)))
        return self._send() if self.loaded else []

    def on_event(self, event: BackendEvent) -> list[Request]:
        """Take what the process said; return what to ask it then."""
        match event:
            case wire.Loaded():
                self.loaded = True
                return self._send() if self.answering else []
            case wire.Text(id, text) if id == self._id and self.answering:
                self.said[-1].add(text)
            case wire.Done(id, _, text) if id == self._id and self.answering:
                self.said[-1].answer, self.said[-1].over = sanitise(text), True
            case wire.Failed(_, error, hint):
                self._end(sanitise(" ".join(f"{error}. {hint}".split())))
            case Died(why, _):
                self.loaded = False
                self._end(f"The guide stopped ({sanitise(why)}). The chat is as it was.")
            case Garbled(error):
                self._end(f"The guide can't be understood: {error}")
            case _:
                pass
        return []

    def _end(self, problem: str) -> None:
        self.problem = problem
        if self.said:
            self.said[-1].over = True

    def _send(self) -> list[Request]:
        """Return the whole exchange as a request: the guide remembers nothing."""
        self._id += 1
        messages: list[Message] = []
        for each in self.said[:-1]:
            messages += [Message("user", each.question), Message("assistant", each.answer)] if each.answer else []
        return [Send(self._id, (*messages, Message("user", self.said[-1].question)), LONGEST)]
