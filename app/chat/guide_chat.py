"""Questions to the guide, asked beside the chat, and its answers, as a state machine."""

from dataclasses import dataclass, field

from tokamac.engine.events import Finished, Message, TextChunk
from tokamac.engine.hub.names import GUIDE
from tokamac.engine.options import Sampling

from ..backend.client import BackendEvent, Died, Garbled
from ..backend.protocol import Generate, Load, Loaded, ReplyEvent, Request, RequestFailed
from ..sanitise import Sanitiser, sanitise

LONGEST = Sampling(max_tokens=400)


@dataclass(slots=True)
class GuideExchange:
    """A question, and its answer so far; both safe to show."""

    question: str
    answer: str = ""
    over: bool = False
    _clean: Sanitiser = field(default_factory=Sanitiser)

    def add(self, text: str) -> None:
        """Append to the answer, made safe."""
        self.answer += self._clean.feed(text)


class GuideChat:
    """Questions and answers. loaded: whether the guide is ready. problem: why it is not, or gave no answer."""

    def __init__(self) -> None:
        self.said: list[GuideExchange] = []
        self.loaded = False
        self.problem = ""
        self._id = 0

    @property
    def busy(self) -> bool:
        """Whether the guide loads, or answers."""
        return not self.problem and (not self.loaded or self.answering)

    @property
    def answering(self) -> bool:
        """Whether an answer is still to come, or to end."""
        return bool(self.said) and not self.said[-1].over

    def start(self) -> list[Request]:
        """Return what to ask of a new process."""
        return [Load(GUIDE)]

    def ask(self, question: str) -> list[Request]:
        """Ask, now or as soon as the guide is ready; not while it answers."""
        self.said.append(GuideExchange(sanitise(question)))
        return self._send() if self.loaded else []

    def on_event(self, event: BackendEvent) -> list[Request]:
        """Take what the process said; return what to ask it next."""
        match event:
            case Loaded():
                self.loaded = True
                return self._send() if self.answering else []
            case ReplyEvent(id, TextChunk(text)) if id == self._id and self.answering:
                self.said[-1].add(text)
            case ReplyEvent(id, Finished(_, text)) if id == self._id and self.answering:
                self.said[-1].answer, self.said[-1].over = sanitise(text), True
            case RequestFailed(_, error, hint):
                self._end(sanitise(" ".join(f"{error}. {hint}".split())))
            case Died(why, _):
                self.loaded = False
                self._end(f"The guide stopped ({sanitise(why)}). Your chat is not affected.")
            case Garbled(error):
                self._end(f"The guide's answer is not readable: {error}")
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
        return [Generate(self._id, (*messages, Message("user", self.said[-1].question)), LONGEST)]
