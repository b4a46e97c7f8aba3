"""What is asked of the engine while no reply runs: a draft computed ahead, prices, token counts, a title. Pure, like the session.

    a pause in a long draft ──▶ AskPrice ──▶ Priced: much to read? ──▶ Warm ──▶ Warmed: ready
    a message is selected   ──▶ AskPrice ──▶ Priced ──▶ AskPrice for the next action ──▶ …
    the first whole reply   ──▶ WANTED ── idle ──▶ Generate in the background ──▶ WRITING ── Finished ──▶ Titled
                                  ▲──── the chat is left, or another model chosen: Cancel ───┘

A reply goes before all of these: what is computed ahead, and a title, take a tenth of the time at most beside it.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from tokamac.engine.events import Event, Finished, Live, Message, Price
from tokamac.engine.options import KVSpec, Sampling, TemplateOptions, ToolSpec

from .. import units
from ..backend.protocol import AskCount, AskPrice, Cancel, Counted, Generate, ModelInfo, Priced, Warm, Warmed
from ..sanitise import REPLACEMENT, sanitise
from ..store.values import Attachment
from .attachments import whole
from .conversation import Conversation, Reply, Turn, cut_here, messages
from .steps import Ask, Step, Titled

LEAST_CHARACTERS = 200  # some fifty tokens: fewer are read in a moment once they are sent
READY_TOKENS = 32  # a template's end, and last words that may still change, can't be read ahead


def is_ready(price: Price) -> bool:
    """Whether there is nothing left that could be read ahead."""
    return price.tokens <= READY_TOKENS and price.disk_bytes == 0


class DraftWarmup:
    """Has the engine compute the draft ahead while the user pauses in it.

    Attributes:
        price: what the draft takes, as of its last pause; None while that is unknown, or the draft is short.
        template: what the chat template is told.
    """

    def __init__(self) -> None:
        self.price: Price | None = None
        self.template = TemplateOptions()
        self._messages: tuple[Message, ...] = ()  # what the draft would send; empty for a short one
        self._id = 0

    def draft_paused(self, draft: str, messages: Sequence[Message]) -> list[Step]:
        """Return what to ask when the user pauses in ``draft``, which would send ``messages``."""
        wanted = tuple(messages) if len(draft) >= LEAST_CHARACTERS else ()
        if wanted == self._messages:
            return []
        self._messages = wanted
        if not wanted:
            self.price = None
            return []
        self._id += 1
        return [Ask(AskPrice("draft", self._id, wanted, template=self.template))]

    def history_changed(self, messages: Sequence[Message]) -> list[Step]:
        """Return what to ask for a conversation that is new to the engine; ``messages`` end with an empty draft."""
        return self._warm(tuple(messages)) if len(messages) > 1 else []

    def priced(self, event: Priced) -> list[Step]:
        """Take a price; return what to ask next."""
        if (event.asker, event.id) != ("draft", self._id) or not self._messages:
            return []
        self.price = event.price
        return [] if event.price is None or is_ready(event.price) else self._warm(self._messages)

    def warmed(self, event: Warmed) -> list[Step]:
        """Take the end of a warm-up, and what the draft takes now."""
        if event.id == self._id and self._messages:
            self.price = event.price
        return []

    def reset(self) -> None:
        """Forget the draft: the engine was asked for something else, or is another."""
        self.price = None
        self._messages = ()

    def _warm(self, messages: tuple[Message, ...]) -> list[Step]:
        self._id += 1
        return [Ask(Warm(self._id, messages, self.template))]


Countable = Attachment | str | tuple[ToolSpec, ...]
"""What tokens are counted of: an attachment, a text, or the definitions of tools."""


class TokenCounts:
    """How many tokens each attachment takes of one model, its name and fences included, or a text; another model counts anew."""

    def __init__(self) -> None:
        self._model: ModelInfo | None = None
        self._known: dict[Countable, int | None] = {}
        self._asked: dict[int, Countable] = {}
        self._id = 0

    def of(self, model: ModelInfo | None, counted: Countable) -> int | None:
        """Return the tokens that ``counted`` takes of ``model``; None while that is unknown."""
        return self._known.get(counted) if model is not None and model == self._model else None

    def ask(self, model: ModelInfo | None, wanted: Iterable[Countable]) -> list[Step]:
        """Return what to ask of ``model`` for attachments and texts that were not counted yet."""
        if model != self._model:
            self._model = model
            self._known.clear()
            self._asked.clear()
        pending = set(self._asked.values())
        new = dict.fromkeys(each for each in wanted if each not in self._known and each not in pending)
        return [self._ask(each) for each in new] if model is not None else []

    @property
    def pending(self) -> bool:
        """Whether any answer is still to come."""
        return bool(self._asked)

    def awaits(self, wanted: Iterable[Countable]) -> bool:
        """Whether the answer for any of ``wanted`` is still to come."""
        pending = set(self._asked.values())
        return any(each in pending for each in wanted)

    def counted(self, event: Counted) -> None:
        """Take an answer."""
        if (counted := self._asked.pop(event.id, None)) is not None:
            self._known[counted] = event.tokens

    def reset(self) -> None:
        """Expect no answer any more: what was not counted, or could not be, is asked again."""
        self._asked.clear()
        self._known = {each: tokens for each, tokens in self._known.items() if tokens is not None}

    def _ask(self, wanted: Countable) -> Ask:
        self._id += 1
        self._asked[self._id] = wanted
        if isinstance(wanted, tuple):
            return Ask(AskCount(self._id, "", wanted))
        return Ask(AskCount(self._id, wanted if isinstance(wanted, str) else whole("", (wanted,))))


def context_limit(model: ModelInfo | None, kv: KVSpec) -> int | None:
    """Return the tokens that a prompt must stay below; None where that is unknown, or the engine makes room by itself.

    It does where the oldest tokens roll out, or the middle is left out.
    """
    if model is None or kv.when_full in ("roll", "truncate-middle"):
        return None
    return model.capacity


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


class _TitleState(Enum):
    NONE = auto()  # there is no whole reply yet, or no other title will come
    WANTED = auto()
    WRITING = auto()


class TitleRequest:
    """Asks the model for the conversation's title, once: a bad one, or none, leaves the chat its first words.

    It is written in the background: a prompt that is sent meanwhile begins at once, and the title goes on beside its reply. Its ids
    are below zero: those above are of the session's replies.
    """

    def __init__(self) -> None:
        self._state = _TitleState.NONE
        self._id = 0

    @property
    def wanted(self) -> bool:
        """Whether the model may be asked."""
        return self._state is _TitleState.WANTED

    def opened(self) -> None:
        """Another conversation is shown."""
        self._state = _TitleState.NONE

    def ended(self, replies: Iterable[Reply]) -> None:
        """A reply has ended, and these are there now: after the first whole one a title is wanted."""
        whole_ones = sum(1 for reply in replies if reply.ending in ("stop", "length") and reply.text)
        if whole_ones == 1 and self._state is not _TitleState.WRITING:
            self._state = _TitleState.WANTED

    def ask(self, turn: Turn) -> list[Step]:
        """Return what to ask for a title of the conversation that begins with ``turn``."""
        self._state = _TitleState.WRITING
        self._id -= 1
        asked = (*question(turn), Message("assistant", BEGUN))
        return [Ask(Generate(self._id, asked, GREEDY, continues=True, background=True))]

    def on_reply(self, id: int, event: Event | Live) -> list[Step]:
        """Take an event of a reply that is not the session's; return the title, if it brings one."""
        if id != self._id or self._state is not _TitleState.WRITING or not isinstance(event, Finished):
            return []
        self._state = _TitleState.NONE
        title = title_of(event.text, whole=event.reason == "stop")
        return [Titled(title)] if title else []

    def failed(self, id: int) -> list[Step]:
        """Take the failure of a reply that is not the session's."""
        if id == self._id and self._state is _TitleState.WRITING:
            self._state = _TitleState.NONE
        return []

    def stop(self) -> list[Step]:
        """End it: the chat is left, or the model goes. Where the chat stays, it is asked for again once nobody uses it."""
        if self._state is not _TitleState.WRITING:
            return []
        self._state = _TitleState.WANTED
        return [Ask(Cancel(self._id))]

    def reset(self) -> None:
        """Forget what was asked: the engine is another. It may have ended the last one, and is not asked again."""
        if self._state is _TitleState.WRITING:
            self._state = _TitleState.NONE


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


OTHER = "~ "
"""Put before a prompt, it makes all of it another text: what an edit takes at most."""
INSTANT_S = 0.1
READY = "instant"
"""Of a path that can be gone on with at once: nothing of it is to be read again."""
PATH = "branches"
"""The ``id`` of a question about a path, which stands in the tree of all paths."""


@dataclass(frozen=True, slots=True)
class PriceQuestion:
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
class KnownPrice:
    """The price of what ``question`` asked about."""

    question: PriceQuestion
    price: Price


class ActionPrices:
    """Prices of what could be done with the selected message, or of paths, asked for one after another.

    known: those that came, in the order they were asked for. unpriced: what was answered, but has no price. waiting: what is not
    answered yet. template: what the chat template is told.
    """

    def __init__(self) -> None:
        self.known: tuple[KnownPrice, ...] = ()
        self.unpriced: tuple[PriceQuestion, ...] = ()
        self.waiting: tuple[PriceQuestion, ...] = ()
        self.template = TemplateOptions()
        self._id = 0

    def ask(self, asked: Sequence[PriceQuestion]) -> list[Step]:
        """Return what to ask in place of what was asked before, which is forgotten with its prices."""
        self.reset()
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
            self.known = (*self.known, KnownPrice(question, event.price))
        return self._next()

    def reset(self) -> None:
        """No message is selected any more, or another engine is asked."""
        self.known = ()
        self.unpriced = self.waiting = ()

    def _next(self) -> list[Step]:
        if not self.waiting:
            return []
        self._id += 1
        first = self.waiting[0]
        return [Ask(AskPrice("actions", self._id, first.messages, first.continues, self.template))]


def questions(conversation: Conversation, system: str, key: int, info: ModelInfo | None) -> list[PriceQuestion]:
    """Return what could be done with the message ``key``: make its reply again, go on with it, write its prompt anew, leave it
    for a copy of what leads to it, or for other versions."""
    if key not in conversation.tree.nodes:
        return []
    return [
        *_answers(conversation, system, key, info),
        _fork(conversation, system, key),
        *_versions(conversation, system, key),
    ]


def _answers(conversation: Conversation, system: str, key: int, info: ModelInfo | None) -> list[PriceQuestion]:
    if (prompt := conversation.prompt_of(key)) is None:
        return []
    asked = messages(system, conversation.sent(conversation.tree.turns_to(conversation.end_of_prompt(prompt.key))))
    *before, written = messages(system, conversation.sent(conversation.tree.turns_to(prompt.key)))
    edit = PriceQuestion("edit", (*before, replace(written, content=OTHER + written.content)), most=True)
    return [PriceQuestion("again", asked), *_continuing(conversation.partial_reply(key), asked, info), edit]


def _continuing(said: Reply | None, asked: tuple[Message, ...], info: ModelInfo | None) -> list[PriceQuestion]:
    """Return the question of going on with what was ``said``; None: there is nothing yet, and ``asked`` is answered."""
    if said is None:
        return [PriceQuestion("continue", asked)]
    if why_whole(said, thinks=info is not None and info.thinks):
        return []
    begun = cut_here(said)
    return [PriceQuestion("continue", (*asked, Message("assistant", begun.text, begun.thinking)), continues=True)]


def _fork(conversation: Conversation, system: str, key: int) -> PriceQuestion:
    return PriceQuestion("fork", _next_prompt(conversation, system, key), key=key)


def _versions(conversation: Conversation, system: str, key: int) -> list[PriceQuestion]:
    older, newer = (conversation.tree.beside(key, by) for by in (-1, 1))
    named = {"older": older, "newer": newer} if older != newer else {"other": newer}
    return [path(conversation, system, at, name) for name, at in named.items() if at is not None]


def path(conversation: Conversation, system: str, key: int, name: str = PATH) -> PriceQuestion:
    """Return the question what the next prompt would find to be read, once the path through ``key`` is the one that is read."""
    return PriceQuestion(name, _next_prompt(conversation, system, conversation.tree.end_of(key)), key=key)


def _next_prompt(conversation: Conversation, system: str, end: int) -> tuple[Message, ...]:
    return messages(system, [*conversation.sent(conversation.tree.turns_to(end)), Turn("")])


def of_path(price: Price) -> str:
    """Return what a path would take before it can be continued: ``instant``, or ``1,204 tokens to read again, about 3.0 s``."""
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


def why_whole(reply: Reply, *, thinks: bool) -> str:
    """Return why there is no going on with a reply that was begun; "" where there is. thinks: whether the loaded model does."""
    if reply.ending in ("stop", "tool_calls") and not reply.edited:
        return "This reply is complete: the model ended it itself."
    if not cut_here(reply).text and not thinks:
        return "The reply was cut off while thinking, and this model does not think: regenerate it."
    return ""
