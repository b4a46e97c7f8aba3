"""A conversation: a tree of messages with one active path, and the running reply."""

# Edits and regenerated replies are kept as siblings; every send carries the whole path.
#
# prompt ─ reply ─ prompt ─ reply        the active path
#               └─ prompt ─ reply        an edit: another prompt after the same reply
#                         └ reply        regenerated: another reply to the same prompt

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from tokamac.engine.events import (
    CacheUse,
    Event,
    Finished,
    Live,
    LoopFound,
    Message,
    PrefillProgress,
    StepToken,
    TextChunk,
    TextKind,
    ToolCall,
    ToolCallDelta,
    Truncated,
    whole_characters,
)
from tokamac.engine.lab.passes import PassLog
from tokamac.engine.metrics import Metrics, Outlier
from tokamac.engine.options import Sampling, TemplateOptions, ToolSpec
from tokamac.engine.perf.diagnosis import Diagnosis

from ..store.values import Attachment, ToolResult, pictures_of
from .attachments import Draft, whole

Ending = Literal["stop", "length", "full", "loop", "cancelled", "lost", "failed", "tool_calls"]
# What a model is told of a call that nobody answered.
NOT_RUN = "This call has no result: it was not run, or did not end."


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply and its ending: ``lost`` with the engine, ``failed`` with an error, ``full`` context, or the engine's.

    model: "" if unknown. reason: error and hint on one line. thinking_ended_at: the token budget that cut the
    thinking. passes: recorded steps. edited: the user's text, so no figures. compared: the setting that
    differs from other versions; not stored.
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
    calls: tuple[ToolCall, ...] = ()
    passes: PassLog | None = None
    edited: bool = False
    compared: str = ""
    cache: CacheUse | None = None

    @property
    def as_message(self) -> Message:
        return Message("assistant", self.text, self.thinking, self.calls)

    @property
    def is_said(self) -> bool:
        return bool(self.text or self.calls)


EDITED = "edited by you"  # shown with a reply that the user edited


def cut_here(reply: Reply) -> Reply:
    """Return a reply's start for continuing, without a partial character at the cut."""
    said = whole_characters(Message("assistant", reply.text, reply.thinking))
    return Reply(said.content, said.thinking, reply.thinking_s)


class ReplyBuilder:
    """A growing reply and its thinking time. begun: what it continues."""

    def __init__(self, begun: Reply | None = None) -> None:
        begun = begun or Reply("")
        self._text: dict[TextKind, list[str]] = {"answer": [begun.text], "thinking": [begun.thinking]}
        self._thinking_from: float | None = None
        self._thinking_s = begun.thinking_s

    def add(self, text: str, kind: TextKind, now: float) -> None:
        self._text[kind].append(text)
        if kind == "thinking" and self._thinking_from is None:
            self._thinking_from = now - (self._thinking_s or 0.0)
            self._thinking_s = None
        elif kind == "answer":
            self._stop_thinking(now)

    def end(self, ending: Ending, now: float) -> Reply:
        self._stop_thinking(now)
        return replace(self.so_far(), ending=ending)

    def so_far(self) -> Reply:
        answer, thinking = ("".join(self._text[kind]) for kind in ("answer", "thinking"))
        return Reply(answer, thinking, self._thinking_s)

    def _stop_thinking(self, now: float) -> None:
        if self._thinking_from is not None and self._thinking_s is None:
            self._thinking_s = now - self._thinking_from


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt and its reply, if any.

    key, reply_key: tree keys; 0 is none. place, reply_place: (index from 1, count) among siblings.
    system, between: system messages before the prompt and before the reply. results: tool results for the
    previous reply's calls; such a turn has no prompt unless the model never replied to them.
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
    results: tuple[ToolResult, ...] = ()
    result_keys: tuple[int, ...] = ()

    @property
    def asked(self) -> str:
        return whole(self.prompt, self.attachments)

    @property
    def question(self) -> Message:
        return Message("user", self.asked, images=pictures_of(self.attachments))


def prompts_of(turns: Iterable[Turn]) -> list[int]:
    """Return the key of each turn's prompt, across tool calls; 0 is none."""
    keys: list[int] = []
    for turn in turns:
        keys.append(turn.key or (keys[-1] if turn.results and keys else 0))
    return keys


def messages(system: str, turns: Iterable[Turn]) -> tuple[Message, ...]:
    # A turn whose reply never began is left out: templates refuse two prompts in a row.
    turns = tuple(turns)
    out = _system((system,))
    for turn in turns[:-1]:
        replied = turn.reply is not None and turn.reply.is_said
        asked = [turn.question] if replied and (turn.asked or turn.question.images) else []
        out += [*_told(turn.results), *_system(turn.system), *asked, *_system(turn.between)]
        if turn.reply is not None and replied:
            out.append(turn.reply.as_message)
    for turn in turns[-1:]:
        asked = [] if turn.results and not turn.key else [turn.question]
        out += [*_told(turn.results), *_system(turn.system), *asked, *_system(turn.between)]
    return tuple(_with_all_results(out))


def _told(results: Iterable[ToolResult]) -> list[Message]:
    return [each.as_message for each in results]


def _with_all_results(messages: Sequence[Message]) -> list[Message]:
    """Add missing tool results: templates refuse unanswered calls."""
    out: list[Message] = []
    waiting: list[ToolCall] = []
    for message in messages:
        if message.role == "tool":
            waiting = [call for call in waiting if call.id != message.tool_call_id]
        else:
            out += _told(ToolResult(call, NOT_RUN, "refused") for call in waiting)
            waiting = list(message.tool_calls)
        out.append(message)
    return [*out, *_told(ToolResult(call, NOT_RUN, "refused") for call in waiting)]


def _system(texts: Iterable[str]) -> list[Message]:
    return [Message("system", text) for text in texts if text.strip()]


@dataclass(frozen=True, slots=True)
class MessageNode:
    """A message node. parent: None at the start.

    Exactly one of prompt, reply, system and result is set; a reply being made has none.
    """

    key: int
    parent: int | None
    prompt: str | None = None
    reply: Reply | None = None
    attachments: tuple[Attachment, ...] = ()
    system: str | None = None
    result: ToolResult | None = None

    @property
    def is_reply(self) -> bool:
        return self.prompt is None and self.system is None and self.result is None


@dataclass(slots=True)
class Tree:
    """All messages by increasing key; ``head``: the last one of the active path."""

    nodes: dict[int, MessageNode] = field(default_factory=dict)
    head: int | None = None
    _children: dict[int | None, list[int]] = field(default_factory=dict)
    _taken: dict[int | None, int] = field(default_factory=dict)  # the child that was on the path last

    def ask(self, prompt: str, parent: int | None, attachments: tuple[Attachment, ...] = ()) -> MessageNode:
        """Add a prompt after ``parent`` and make it the head."""
        return self._add(MessageNode(self._next(), parent, prompt=prompt, attachments=attachments))

    def answer(self, parent: int) -> MessageNode:
        """Add an empty reply after ``parent`` (a prompt or system message); it becomes the head."""
        return self._add(MessageNode(self._next(), parent))

    def add_result(self, parent: int, result: ToolResult) -> MessageNode:
        """Add a tool result after ``parent`` (the reply or the previous result); it becomes the head."""
        return self._add(MessageNode(self._next(), parent, result=result))

    def add_reply(self, parent: int | None, reply: Reply) -> MessageNode:
        return self._add(MessageNode(self._next(), parent, reply=reply))

    def copy(self, node: MessageNode, parent: int) -> MessageNode:
        """Add ``node`` again after ``parent``; the figures of a reply are those of its first place."""
        reply = node.reply
        if reply is not None:
            reply = replace(reply, metrics=None, outliers=(), diagnosis=None, passes=None, cache=None)
        return self._add(replace(node, key=self._next(), parent=parent, reply=reply))

    def end(self, key: int, reply: Reply) -> None:
        self.nodes[key] = replace(self.nodes[key], reply=reply)

    def add(self, node: MessageNode) -> None:
        """Add a loaded message: parent present, key new."""
        self._add(node)

    def path_to(self, key: int | None) -> list[MessageNode]:
        found = []
        while key is not None:
            found.append(self.nodes[key])
            key = self.nodes[key].parent
        return found[::-1]

    def turns(self) -> list[Turn]:
        return self.turns_to(self.head)

    def turns_to(self, key: int | None) -> list[Turn]:
        turns: list[Turn] = []
        for node in self.path_to(key):
            self._add_to(turns, node)
        return turns

    def _add_to(self, turns: list[Turn], node: MessageNode) -> None:
        """Add ``node`` to the last turn if that has no reply, else begin one."""
        # Imports may begin with a reply, have two in a row, or system messages anywhere.
        place = self.place(node.key)
        turn = turns.pop() if turns and not turns[-1].reply_key else Turn("")
        if node.system is not None:
            turn = _with_system(turn, node.key, node.system)
        elif node.result is not None:
            results, keys = (*turn.results, node.result), (*turn.result_keys, node.key)
            turn = replace(turn, results=results, result_keys=keys)
        elif node.prompt is not None:
            if turn.key:  # it was never answered
                turns.append(turn)
                turn = Turn("")
            turn = replace(turn, prompt=node.prompt, key=node.key, place=place, attachments=node.attachments)
        else:
            turn = replace(turn, reply=node.reply, reply_key=node.key, reply_place=place)
        turns.append(turn)

    def siblings(self, key: int) -> list[int]:
        return self._children[self.nodes[key].parent]

    def beside(self, key: int, by: int) -> int | None:
        """Return the sibling ``by`` places on (cyclic) of ``key`` or its nearest ancestor with several; None if none."""
        several = next((node.key for node in reversed(self.path_to(key)) if len(self.siblings(node.key)) > 1), None)
        if several is None:
            return None
        siblings = self.siblings(several)
        return siblings[(siblings.index(several) + by) % len(siblings)]

    def place(self, key: int) -> tuple[int, int]:
        """Return (index from 1, count) among siblings."""
        siblings = self.siblings(key)
        return siblings.index(key) + 1, len(siblings)

    def children(self, key: int | None) -> list[int]:
        return self._children.get(key, [])

    def go(self, key: int) -> None:
        """Go to the end of the path through ``key``, by the branches last taken."""
        for node in self.path_to(key):
            self._taken[node.parent] = node.key
        self.head = self.end_of(key)

    def end_of(self, key: int) -> int:
        while (after := self._taken.get(key)) is not None:
            key = after
        return key

    def leaves(self) -> Iterator[int]:
        return (key for key in self.nodes if key not in self._children)

    def _add(self, node: MessageNode) -> MessageNode:
        self.nodes[node.key] = node
        self._children.setdefault(node.parent, []).append(node.key)
        self._taken[node.parent] = self.head = node.key
        return node

    def _next(self) -> int:
        return max(self.nodes, default=0) + 1


def _with_system(turn: Turn, key: int, text: str) -> Turn:
    """Attach a system message: before the reply if there is a prompt, else before the prompt to come."""
    if turn.key:
        return replace(turn, between=(*turn.between, text), between_keys=(*turn.between_keys, key))
    return replace(turn, system=(*turn.system, text), system_keys=(*turn.system_keys, key))


ENDINGS: dict[Ending, str] = {
    "stop": "",
    "length": "stopped: the token limit",
    "full": "stopped: the context is full",
    "loop": "stopped: it repeats itself",
    "cancelled": "stopped",
    "lost": "engine crashed here",
    "failed": "failed",
    "tool_calls": "",
}
# What helps after a reply that ended so.
REMEDIES: dict[Ending, str] = {
    "length": "/continue",
    "full": "/undo drops it · /shorter rewrites it · /compact · /set on_full roll",
    "loop": "/continue",
    "lost": "/continue",
}


@dataclass(frozen=True, slots=True)
class ReplySettings:
    system: str
    sampling: Sampling
    template: TemplateOptions
    tools: tuple[ToolSpec, ...] = ()


@dataclass(slots=True)
class ReplyProgress:
    """Progress of a conversation's running or last reply.

    left_out: prompt tokens dropped. called: the tool whose call is being written. loop: a repetition found.
    """

    prefill: PrefillProgress | None = None
    live: Live | None = None
    metrics: Metrics | None = None
    diagnosis: Diagnosis | None = None
    outliers: tuple[Outlier, ...] = ()
    left_out: int = 0
    called: str = ""
    loop: LoopFound | None = None

    def update(self, event: Event | Live) -> None:
        match event:
            case PrefillProgress():
                self.prefill = event
            case Live():
                self.live, self.metrics, self.outliers = event, event.metrics, event.outliers
            case Truncated():
                self.left_out = event.tokens
            case ToolCallDelta(name):
                self.called = name
            case LoopFound():
                self.loop = None if event.ends_at is None else event
            case TextChunk() | ToolCall():
                self.called = ""
            case Finished():
                self.called = ""
                self.metrics, self.outliers, self.diagnosis = event.metrics, event.outliers, event.diagnosis
            case _:
                pass


def ending_of(finished: Finished) -> Ending:
    return "full" if finished.cut_by == "context" else finished.reason


def ended_reply(  # noqa: PLR0917
    builder: ReplyBuilder,
    progress: ReplyProgress,
    ending: Ending,
    now: float,
    model: str,
    finished: Finished | None = None,
    reason: str = "",
) -> Reply:
    """Build a reply from the text and figures so far, or from ``finished``. reason: of a failure, or ""."""
    reply = replace(builder.end(ending, now), model=model, reason=reason)
    if finished is None:
        return replace(reply, metrics=progress.metrics, outliers=progress.outliers)
    return replace(
        reply,
        text=finished.text,
        thinking=finished.thinking,
        metrics=finished.metrics,
        outliers=finished.outliers,
        diagnosis=finished.diagnosis,
        thinking_ended_at=finished.thinking_ended_at,
        calls=finished.tool_calls,
        passes=finished.passes,
        cache=finished.cache,
    )


class Conversation:
    """A conversation and its running reply.

    Attributes:
        progress: of the running or last reply.
        pruned: kept but not sent: (prompt key, "" for the whole turn or a file's name).
        pinned: prompts whose turns compaction keeps word for word.
        allowed: tools allowed while it is open.
    """

    def __init__(
        self, tree: Tree | None = None, pruned: Iterable[tuple[int, str]] = (), pinned: Iterable[int] = ()
    ) -> None:
        self.tree = Tree() if tree is None else tree
        self.progress = ReplyProgress()
        self.pruned = set(pruned)
        self.pinned = set(pinned)
        self.allowed: set[str] = set()
        self.looked: dict[int, tuple[StepToken, ...]] = {}  # of replies whose likely tokens were computed, by key
        self._builder = ReplyBuilder()
        self._reply: int | None = None

    @property
    def turns(self) -> list[Turn]:
        return self.tree.turns()

    @property
    def partial(self) -> Reply:
        return self._builder.so_far()

    def ask(self, draft: Draft, parent: int | None) -> Turn:
        return self.answer(self.tree.ask(draft.text, parent, draft.attachments).key)

    def answer(self, prompt: int, begun: Reply | None = None) -> Turn:
        """Add an empty reply to ``prompt`` (or a tool result); begun: text to continue."""
        asked = self.tree.nodes[prompt]
        self._builder = ReplyBuilder(begun)
        self._reply = self.tree.answer(prompt if asked.result is not None else self.end_of_prompt(prompt)).key
        return self.turns[-1]

    def revise(self, key: int, text: str) -> None:
        old = self.tree.nodes[key]
        said = old.reply or Reply("")
        made = self.tree.add_reply(old.parent, Reply(text, said.thinking, model=said.model, edited=True))
        self.tree.go(made.key)

    def grow(self, text: str, kind: TextKind, now: float) -> None:
        self._builder.add(text, kind, now)

    def end(
        self, ending: Ending, now: float, model: str, finished: Finished | None = None, *, reason: str = ""
    ) -> Reply:
        """Close the running reply with the text so far or ``finished``. reason: of a failure, or ""."""
        reply = ended_reply(self._builder, self.progress, ending, now, model, finished, reason)
        assert self._reply is not None
        self.tree.end(self._reply, reply)
        return reply

    def prompt_of(self, key: int) -> MessageNode | None:
        """Return the prompt ``key``, or the one reply ``key`` answers, across tool calls."""
        node = at = self._spoken(key)
        while at is not None and at.prompt is None:
            if at is not node and at.result is None and not (at.reply is not None and at.reply.calls):
                return None
            at = self._spoken(at.parent)
        return at

    def result_before(self, key: int) -> int | None:
        """Return the tool result that reply ``key`` follows; None if it answers a prompt."""
        parent = self.tree.nodes[key].parent
        return parent if parent is not None and self.tree.nodes[parent].result is not None else None

    def calls_before(self, key: int) -> int | None:
        """Return the reply whose calls result ``key`` answers."""
        at: int | None = key
        while at is not None and self.tree.nodes[at].result is not None:
            at = self.tree.nodes[at].parent
        return at

    def reply_at(self, key: int | None) -> MessageNode | None:
        """Return reply ``key``, or the reply to prompt ``key``, on the path; None: the last."""
        replies = [node for node in reversed(self.tree.path_to(self.tree.head)) if node.is_reply]
        if key is None:
            return replies[0] if replies else None
        at = self._spoken(key)
        if at is None or at.is_reply:  # which another reply may follow
            return next((node for node in replies if node is at), None)
        asked = self.prompt_of(at.key)
        return next((node for node in replies if asked is not None and self.prompt_of(node.key) is asked), None)

    def end_of_prompt(self, prompt: int) -> int:
        """Return the parent for a reply to ``prompt``: the last system message after it, or itself."""
        asked = self.tree.nodes[prompt]
        path = reversed(self.tree.path_to(self.tree.head))
        return next((node.key for node in path if self._spoken(node.key) is asked), prompt)

    def _spoken(self, key: int | None) -> MessageNode | None:
        """Return message ``key``, or the last non-system one before it."""
        while key is not None and self.tree.nodes[key].system is not None:
            key = self.tree.nodes[key].parent
        return None if key is None else self.tree.nodes[key]

    def partial_reply(self, key: int) -> Reply | None:
        """Return the reply at or after ``key``; None if unanswered or without a whole character."""
        node = self.reply_at(key)
        reply = None if node is None else node.reply
        if reply is None or (reply.ending in ("stop", "tool_calls") and not reply.edited):
            return reply
        said = cut_here(reply)
        return reply if said.text or said.thinking else None

    def request(
        self, system: str, draft: str | None = None, attachments: tuple[Attachment, ...] = ()
    ) -> tuple[Message, ...]:
        more: Sequence[Turn] = () if draft is None else (Turn(draft, attachments=attachments),)
        return messages(system, [*self.sent(self.turns), *more])

    def sent(self, turns: Sequence[Turn]) -> list[Turn]:
        """Drop pruned turns and files; the prompt being answered is never dropped."""
        if not self.pruned:
            return list(turns)
        prompts = prompts_of(turns)
        answered = prompts[-1] if turns and turns[-1].reply is None else None
        return [
            self._sent(turn, whole=prompt == answered or (prompt, "") not in self.pruned)
            for turn, prompt in zip(turns, prompts, strict=True)
        ]

    def _sent(self, turn: Turn, *, whole: bool) -> Turn:
        if not whole:
            return replace(turn, prompt="", attachments=(), reply=None, results=())
        return replace(turn, attachments=tuple(a for a in turn.attachments if (turn.key, a.name) not in self.pruned))
