"""Idle-time engine work: draft warm-up, prices, token counts, titles. Pure, like the session."""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Literal

from tokamac.engine.events import Event, Finished, Live, Message, ModelSpec, Price
from tokamac.engine.options import KVSpec, Sampling, TemplateOptions, ToolSpec
from tokamac.engine.vision.cost import PicturePrice

from ..backend.protocol import AskCount, AskPrice, Cancel, Counted, Generate, Priced, Warm, Warmed
from ..store.values import Attachment, pictures_of
from ..system_files import SystemPart
from ..text import units
from ..text.sanitise import REPLACEMENT, sanitise, sanitise_line
from ..tools.calls import call_line
from .attachments import Draft, whole
from .conversation import Conversation, Reply, Turn, cut_here, messages, prompts_of
from .steps import Ask, Step, Titled

#     pause in a long draft ──▶ AskPrice ──▶ Priced: much to read? ──▶ Warm ──▶ Warmed: ready
#     message selected      ──▶ AskPrice ──▶ Priced ──▶ AskPrice for the next action ──▶ …
#     first whole reply     ──▶ WANTED ── idle ──▶ Generate in background ──▶ WRITING ── Finished ──▶ Titled
#                                 ▲──── chat left, or another model chosen: Cancel ───┘
#
# Replies come first: warm-ups and titles use at most a tenth of the time while one runs.


LEAST_CHARACTERS = 200  # some fifty tokens: fewer are read in a moment once they are sent
READY_TOKENS = 32  # a template's end, and last words that may still change, can't be read ahead


def is_ready(price: Price) -> bool:
    return price.tokens <= READY_TOKENS and price.disk_bytes == 0


class DraftWarmup:
    """Prefills the draft while the user pauses.

    price: as of the last pause; None if unknown or the draft is short.
    """

    def __init__(self) -> None:
        self.price: Price | None = None
        self.template = TemplateOptions()
        self._messages: tuple[Message, ...] = ()  # what the draft would send; empty for a short one
        self._id = 0

    def draft_paused(self, draft: str, messages: Sequence[Message]) -> list[Step]:
        shows = bool(messages and messages[-1].images)
        wanted = tuple(messages) if shows or len(draft) >= LEAST_CHARACTERS else ()
        if wanted == self._messages:
            return []
        self._messages = wanted
        if not wanted:
            self.price = None
            return []
        self._id += 1
        return [Ask(AskPrice("draft", self._id, wanted, template=self.template))]

    def history_changed(self, messages: Sequence[Message]) -> list[Step]:
        """Return the steps for a conversation new to the engine; ``messages`` end with an empty draft."""
        return self._warm(tuple(messages)) if len(messages) > 1 else []

    def priced(self, event: Priced) -> list[Step]:
        if (event.asker, event.id) != ("draft", self._id) or not self._messages:
            return []
        self.price = event.price
        return [] if event.price is None or is_ready(event.price) else self._warm(self._messages)

    def warmed(self, event: Warmed) -> list[Step]:
        if event.id == self._id and self._messages:
            self.price = event.price
        return []

    def reset(self) -> None:
        self.price = None
        self._messages = ()

    def _warm(self, messages: tuple[Message, ...]) -> list[Step]:
        self._id += 1
        return [Ask(Warm(self._id, messages, self.template))]


# What tokens are counted of: an attachment, a text, or the definitions of tools.
Countable = Attachment | str | tuple[ToolSpec, ...]


class TokenCounts:
    """Token counts of attachments (name and fences included) and texts, for one model at a time."""

    def __init__(self) -> None:
        self._model: ModelSpec | None = None
        self._known: dict[Countable, int | None] = {}
        self._pictures: dict[Countable, PicturePrice] = {}
        self._asked: dict[int, Countable] = {}
        self._id = 0

    def look_up(self, model: ModelSpec | None, counted: Countable) -> int | None:
        return self._known.get(counted) if model is not None and model == self._model else None

    def picture(self, model: ModelSpec | None, counted: Countable) -> PicturePrice | None:
        return self._pictures.get(counted) if model is not None and model == self._model else None

    def ask(self, model: ModelSpec | None, wanted: Iterable[Countable]) -> list[Step]:
        if model != self._model:
            self._model = model
            self._known.clear()
            self._pictures.clear()
            self._asked.clear()
        pending = set(self._asked.values())
        new = dict.fromkeys(each for each in wanted if each not in self._known and each not in pending)
        return [self._ask(each) for each in new] if model is not None else []

    @property
    def pending(self) -> bool:
        return bool(self._asked)

    def awaits(self, wanted: Iterable[Countable]) -> bool:
        pending = set(self._asked.values())
        return any(each in pending for each in wanted)

    def counted(self, event: Counted) -> None:
        if (counted := self._asked.pop(event.id, None)) is not None:
            self._known[counted] = event.tokens
            if event.picture is not None:
                self._pictures[counted] = event.picture

    def reset(self) -> None:
        """Drop pending answers; uncounted items will be asked for again."""
        self._asked.clear()
        self._known = {each: tokens for each, tokens in self._known.items() if tokens is not None}

    def _ask(self, wanted: Countable) -> Ask:
        self._id += 1
        self._asked[self._id] = wanted
        if isinstance(wanted, tuple):
            return Ask(AskCount(self._id, "", wanted))
        if isinstance(wanted, Attachment) and (shown := pictures_of((wanted,))):
            return Ask(AskCount(self._id, "", picture=shown[0]))
        return Ask(AskCount(self._id, wanted if isinstance(wanted, str) else whole("", (wanted,))))


def context_limit(model: ModelSpec | None, kv: KVSpec) -> int | None:
    """Return the exclusive token limit of a prompt; None if unknown, or if the engine evicts or truncates."""
    if model is None or kv.when_full in ("roll", "truncate-middle"):
        return None
    return model.capacity


IDLE_S = 5.0  # how long nobody must have used the chat
EXCERPT = 400  # characters of the prompt, and of the reply, by which a title is found; some hundred tokens each
MOST_WORDS, MOST_CHARACTERS = 8, 60  # models count badly; what is longer is a sentence, not a title
SYSTEM = (
    "You give a conversation its title: at most six words that name its subject, in the language of the conversation. "
    "Write the title alone, without quotation marks and without a full stop."
)
BEGUN = "Title:"  # the reply begins with it: the model neither thinks first nor greets
GREEDY = Sampling(temperature=0.0, max_tokens=16)

_MARKS = re.compile(r"[`*_#<>|\[\]{}\\]+")
_ENDS = " \t\"'“”„‟«»‹›‘’‚「」『』.:;,-–—"
# How models begin to say no. In another language, too, a refusal is a sentence, and mostly too long.
_DECLINED = re.compile(
    r"(?:i['’]m|i (?:am|can|cannot|could|do|don|will|would)|sorry|as an ai|unfortunately)\b", re.IGNORECASE
)


class _TitleState(Enum):
    NONE = auto()  # there is no whole reply yet, or no other title will come
    WANTED = auto()
    WRITING = auto()


class TitleRequest:
    """Asks the model once for a title; after a bad answer the chat keeps its first words.

    Runs in the background beside replies; its request ids are negative, the session's positive.
    """

    def __init__(self) -> None:
        self._state = _TitleState.NONE
        self._id = 0

    @property
    def wanted(self) -> bool:
        return self._state is _TitleState.WANTED

    def opened(self) -> None:
        self._state = _TitleState.NONE

    def ended(self, replies: Iterable[Reply]) -> None:
        whole_ones = sum(1 for reply in replies if reply.ending in ("stop", "length", "full") and reply.text)
        if whole_ones == 1 and self._state is not _TitleState.WRITING:
            self._state = _TitleState.WANTED

    def ask(self, turn: Turn) -> list[Step]:
        self._state = _TitleState.WRITING
        self._id -= 1
        asked = (*question(turn), Message("assistant", BEGUN))
        return [Ask(Generate(self._id, asked, GREEDY, continues=True, background=True))]

    def on_reply(self, id: int, event: Event | Live) -> list[Step]:
        """Handle an event of a reply that isn't the session's; return the title if it brings one."""
        if id != self._id or self._state is not _TitleState.WRITING or not isinstance(event, Finished):
            return []
        self._state = _TitleState.NONE
        title = title_of(event.text, whole=event.reason == "stop")
        return [Titled(title)] if title else []

    def failed(self, id: int) -> list[Step]:
        if id == self._id and self._state is _TitleState.WRITING:
            self._state = _TitleState.NONE
        return []

    def stop(self) -> list[Step]:
        """Cancel it; in the same chat it is asked for again once idle."""
        if self._state is not _TitleState.WRITING:
            return []
        self._state = _TitleState.WANTED
        return [Ask(Cancel(self._id))]

    def reset(self) -> None:
        """The engine was replaced: forget the request and don't repeat it, as it may have caused the crash."""
        if self._state is _TitleState.WRITING:
            self._state = _TitleState.NONE


def question(turn: Turn) -> tuple[Message, ...]:
    """Return the title prompt: the conversation's beginning, cut, under its own system prompt."""
    asked = turn.prompt or ", ".join(each.name for each in turn.attachments)
    said = turn.reply.text if turn.reply is not None else ""
    begins = f"The user wrote:\n{_cut(asked)}\n\nThe assistant replied:\n{_cut(said)}\n\nWhat is the title?"
    return (Message("system", SYSTEM), Message("user", begins))


def title_of(said: str, *, whole: bool) -> str:
    """Return a one-line plain title, or "". whole: the answer was not cut."""
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


OTHER = "~ "  # put before a prompt, it makes all of it another text: what an edit takes at most
INSTANT_S = 0.1
READY = "nothing to re-read"  # of a path that can be gone on with at once: nothing of it is to be read again
PATH = "branches"  # the `id` of a question about a path, which stands in the tree of all paths


@dataclass(frozen=True, slots=True)
class PriceQuestion:
    """What an action would have the model read. most: an upper bound, for edits.

    id: the action's; ``other`` of two versions covers ``older`` and ``newer``. key: for a path that would be read
    from then on, its message; None for other actions.
    """

    id: str
    messages: tuple[Message, ...]
    continues: bool = False
    most: bool = False
    key: int | None = None


@dataclass(frozen=True, slots=True)
class KnownPrice:
    question: PriceQuestion
    price: Price


class ActionPrices:
    """Prices of actions on the selected message, or of paths, asked one after another.

    unpriced: answered without a price. waiting: not answered yet.
    """

    def __init__(self) -> None:
        self.known: tuple[KnownPrice, ...] = ()
        self.unpriced: tuple[PriceQuestion, ...] = ()
        self.waiting: tuple[PriceQuestion, ...] = ()
        self.template = TemplateOptions()
        self._id = 0

    def ask(self, asked: Sequence[PriceQuestion]) -> list[Step]:
        self.reset()
        self.waiting = tuple(asked)
        return self._next()

    def priced(self, event: Priced) -> list[Step]:
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
        self.known = ()
        self.unpriced = self.waiting = ()

    def _next(self) -> list[Step]:
        if not self.waiting:
            return []
        self._id += 1
        first = self.waiting[0]
        return [Ask(AskPrice("actions", self._id, first.messages, first.continues, self.template))]


class Quote:
    """Asks one price, and tells it."""

    def __init__(self) -> None:
        self._id = 0
        self._told: Callable[[Price | None], list[Step]] | None = None

    def ask(
        self, messages: Sequence[Message], template: TemplateOptions, told: Callable[[Price | None], list[Step]]
    ) -> list[Step]:
        self._id += 1
        self._told = told
        return [Ask(AskPrice("quote", self._id, tuple(messages), template=template))]

    @property
    def waiting(self) -> bool:
        return self._told is not None

    def reset(self) -> None:
        self._told = None

    def priced(self, event: Priced) -> list[Step]:
        told = self._told
        if (event.asker, event.id) != ("quote", self._id) or told is None:
            return []
        self._told = None
        return told(event.price)


def questions(conversation: Conversation, system: str, key: int, info: ModelSpec | None) -> list[PriceQuestion]:
    """Return the questions for regenerate, continue, edit, fork and other versions of message ``key``."""
    if key not in conversation.tree.nodes:
        return []
    return [
        *_answers(conversation, system, key, info),
        _fork(conversation, system, key),
        *_versions(conversation, system, key),
    ]


def _answers(conversation: Conversation, system: str, key: int, info: ModelSpec | None) -> list[PriceQuestion]:
    if (prompt := conversation.prompt_of(key)) is None:
        return []
    asked = messages(system, conversation.sent(conversation.tree.turns_to(conversation.end_of_prompt(prompt.key))))
    *before, written = messages(system, conversation.sent(conversation.tree.turns_to(prompt.key)))
    edit = PriceQuestion("edit", (*before, replace(written, content=OTHER + written.content)), most=True)
    return [PriceQuestion("again", asked), *_continuing(conversation.partial_reply(key), asked, info), edit]


def _continuing(said: Reply | None, asked: tuple[Message, ...], info: ModelSpec | None) -> list[PriceQuestion]:
    """Price continuing ``said``; None: answering ``asked``."""
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
    """Price of the next prompt once the path through ``key`` is active."""
    return PriceQuestion(name, _next_prompt(conversation, system, conversation.tree.end_of(key)), key=key)


def _next_prompt(conversation: Conversation, system: str, end: int) -> tuple[Message, ...]:
    return messages(system, [*conversation.sent(conversation.tree.turns_to(end)), Turn("")])


def of_path(price: Price) -> str:
    """Describe a path's price: ``1,204 tokens to read again, about 3.0 s``."""
    if is_ready(price):
        return READY
    return amount(price, " to read again")


def amount(price: Price, what: str = "", *, brief: bool = False) -> str:
    """Describe a price: ``240 tokens, 1.2 MB from disk, about 0.4 s``; no seconds if instant.

    brief: three significant figures, and either tokens or bytes.
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
    """Whether disk reads dominate the compute of ``price``."""
    return price.tokens <= READY_TOKENS and price.disk_bytes > 0


def why_whole(reply: Reply, *, thinks: bool) -> str:
    """Return why a reply can't be continued, or "". thinks: whether the loaded model does."""
    if reply.ending in ("stop", "tool_calls") and not reply.edited:
        return "This reply is complete."
    if not cut_here(reply).text and not thinks:
        return "This reply stopped while thinking, and this model does not think. Regenerate it."
    return ""


#     system │ tools │ file │ prompt │ reply │ file │ prompt │ reply │ result │ reply │ … │ draft │ free
#
# The engine counts each part; template overhead is not counted (except for tools), so the sum is a lower bound:
# a prompt over the limit even then is refused before it is sent.


Kind = Literal["system", "project", "memory", "tools", "file", "prompt", "reply", "result", "draft"]
TEMPLATE_SHARE = 8  # a chat template writes a tool's definition in fewer bytes than these times its own
Count = Callable[[Countable], int | None]  # returns the tokens of a part; None while they are unknown


_NAMES: dict[Kind, str] = {
    "system": "the system prompt", "project": "the project's file", "memory": "the memory", "tools": "the list of tools",
    "prompt": "a prompt", "reply": "a reply", "result": "the result of a tool", "draft": "the message",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ContextPart:
    """A part of the next prompt. counted: its text or tools. key: its turn's prompt; 0 is none."""

    kind: Kind
    counted: Countable
    key: int = 0

    @property
    def name(self) -> str:
        if isinstance(self.counted, Attachment):
            return sanitise_line(self.counted.name)
        return _NAMES.get(self.kind, "")

    @property
    def most_tokens(self) -> int:
        """Upper bound of tokens: a token is at least one byte."""
        match self.counted:
            case str():
                text = self.counted
            case Attachment():
                text = self.counted.text
            case tools:
                text = TEMPLATE_SHARE * "".join(map(repr, tools))
        return len(text.encode("utf-8", "replace"))


def parts(
    system: str,
    turns: Sequence[Turn],
    draft: Draft | None = None,
    *,
    tools: tuple[ToolSpec, ...] = (),
    beside: Sequence[SystemPart] = (),
) -> list[ContextPart]:
    found = _texts("system", (system,))
    found += [ContextPart(part.kind, part.whole) for part in beside] + ([ContextPart("tools", tools)] if tools else [])
    for turn, key in zip(turns, prompts_of(turns), strict=True):
        found += _texts("result", [each.text for each in turn.results], key)
        found += _texts("system", turn.system)
        said = turn.reply is not None and turn.reply.is_said  # else neither the prompt is sent again
        found += _prompt("prompt", turn.prompt, turn.attachments, key) if said else []
        found += _texts("system", turn.between)
        if turn.reply is not None and said:
            found += _texts("reply", ("\n".join([turn.reply.text, *map(call_line, turn.reply.calls)]).strip(),), key)
    return found if draft is None else [*found, *_prompt("draft", draft.text, draft.attachments, 0)]


def _prompt(kind: Kind, text: str, attachments: Sequence[Attachment], key: int) -> list[ContextPart]:
    return [*(ContextPart("file", each, key) for each in attachments), *_texts(kind, (text,), key)]


def _texts(kind: Kind, texts: Sequence[str], key: int = 0) -> list[ContextPart]:
    return [ContextPart(kind, text, key) for text in texts if text.strip()]


def refusal(found: Sequence[ContextPart], count: Count, limit: int) -> str:
    """Return why these parts can't be sent, or "" as far as counted."""
    known = [(count(each.counted) or 0, each) for each in found]
    total = sum(tokens for tokens, _ in known)
    if total < limit:
        return ""
    most, largest = max(known, key=lambda each: each[0])
    context = f"the context holds {units.count(limit)}"
    if most >= limit:
        said = f"{_beginning(largest)} alone is {units.count(most)} tokens; {context}. "
        return said + _advice(largest)
    said = f"This prompt is {units.count(total)} tokens; {context}. "
    return (
        f"{said}The largest part is {largest.name} with {units.count(most)}. /context leaves parts out; "
        "/compact summarises the chat; /undo takes the last turn back; /set on_full roll drops the oldest tokens."
    )


def _advice(part: ContextPart) -> str:
    match part.kind:
        case "file" if not part.key:
            return f"/detach {part.name} removes it; @{part.name}:1-200 attaches some of its lines."
        case "draft":
            return "Shorten it."
        case "system":
            return "Shorten it with /system."
        case "project":
            return "/project off leaves it out."
        case "memory":
            return "/remember edit shortens it."
        case "tools":
            return "/tools turns them off."
        case _:
            return "/context leaves it out; /new starts a new chat."


def _beginning(part: ContextPart) -> str:
    return part.name if part.kind == "file" else part.name[:1].upper() + part.name[1:]


@dataclass(frozen=True, slots=True)
class ContextRow:
    """A row of the context list. tokens: None if unknown. key, file: for ``Session.prune``; 0 can't be left out."""

    kind: Kind
    name: str
    tokens: int | None
    left_out: bool = False
    key: int = 0
    file: str = ""
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class ContextUse:
    """Contents of the next prompt, in order. capacity: tokens; None is unknown."""

    rows: tuple[ContextRow, ...]
    capacity: int | None

    @property
    def used(self) -> int:
        return sum(row.tokens or 0 for row in self.rows if not row.left_out)

    @property
    def free(self) -> int | None:
        return None if self.capacity is None else max(0, self.capacity - self.used)

    def by_kind(self) -> dict[str, int]:
        named = {
            "system": "system", "project": "project", "memory": "memory", "tools": "tools", "file": "files",
            "prompt": "prompts", "reply": "replies", "result": "results", "draft": "draft",
        }  # fmt: skip
        found = dict.fromkeys(named.values(), 0)
        for row in self.rows:
            if not row.left_out:
                found[named[row.kind]] += row.tokens or 0
        return found

    def consequence(self, index: int) -> str:
        """Return the effect of toggling a row: everything after it leaves the prompt cache."""
        row = self.rows[index]
        if row.kind == "tools":
            return "This is what the model is told of its tools. /tools turns them off."
        if row.kind in ("project", "memory"):
            how = "/project off leaves it out." if row.kind == "project" else "/remember edit changes it."
            return f"This file is part of the system prompt. {how}"
        if not row.key:
            return "This part is always sent."
        moved = [each for each in self.rows if each.key == row.key and row.file in ("", each.file)]
        behind = self.rows[self.rows.index(moved[0]) :]
        kept = [each for each in behind if each not in moved and not each.left_out and each.kind != "draft"]
        tokens, again = _sum(moved), _sum(kept) + (_sum(moved) if row.left_out else 0)
        verb = "Sending it again takes" if row.left_out else "Leaving it out frees"
        recomputed = f"{units.count(again)} tokens" if again else "nothing"
        return f"{verb} {units.count(tokens)} tokens; the next prompt recomputes {recomputed}."


def _sum(rows: Iterable[ContextRow]) -> int:
    return sum(row.tokens or 0 for row in rows)


def list_parts(
    system: str,
    turns: Sequence[Turn],
    draft: Draft,
    pruned: set[tuple[int, str]],
    count: Count,
    *,
    tools: tuple[ToolSpec, ...] = (),
    beside: Sequence[SystemPart] = (),
    pinned: Collection[int] = (),
) -> list[ContextRow]:
    """Return the rows of the next prompt, pruned ones included. tools: those offered to the model."""
    rows: list[ContextRow] = []
    for part in parts(system, turns, draft, tools=tools, beside=beside):
        file = part.counted.name if isinstance(part.counted, Attachment) and part.key else ""
        left_out = (part.key, "") in pruned or (bool(file) and (part.key, file) in pruned)
        row = ContextRow(part.kind, _said(part.counted), count(part.counted), left_out, part.key, file)
        rows.append(replace(row, pinned=part.key in pinned))
    return rows


def _said(counted: Countable) -> str:
    match counted:
        case str():
            return sanitise_line(" ".join(counted[:200].split()))
        case Attachment():
            return sanitise_line(counted.name)
        case tools:
            return sanitise_line(", ".join(each.name for each in tools))
