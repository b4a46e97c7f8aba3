"""A conversation: a tree of messages, of which one path is read, and the reply that is being made.

What was edited or made again stays beside what replaced it. A path is turns of a prompt and its reply; every send carries all of
them. Plain values, and where one stands.

prompt ─ reply ─ prompt ─ reply        a path from the first message to where the conversation stands
              └─ prompt ─ reply        an edit: another prompt after the same reply
                        └ reply        made again: another reply to the same prompt
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from tokamac.engine.events import (
    Event,
    Finished,
    Live,
    Message,
    PrefillProgress,
    TextChunk,
    TextKind,
    ToolCall,
    ToolCallDelta,
    Truncated,
)
from tokamac.engine.metrics import Metrics, Outlier
from tokamac.engine.options import Sampling, TemplateOptions, ToolSpec
from tokamac.engine.passes.log import PassLog
from tokamac.engine.perf.diagnosis import Diagnosis
from tokamac.engine.text.continuation import whole_characters

from ..store.values import Attachment, ToolResult
from .attachments import Draft, whole

Ending = Literal["stop", "length", "cancelled", "lost", "failed", "tool_calls"]
NOT_RUN = "This call has no result: it was not run, or did not end."
"""What a model is told of a call that nobody answered."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model said, and why it ended: ``lost`` with the engine, ``failed`` with an error, or as the engine says.

    model: its name; "" is not known. reason: why it failed, and what to do, in sentences on one line; "" where it did not.
    thinking_ended_at: the budget of tokens that ended the thinking; None where none did. calls: of tools, in order.
    passes: what was recorded of its steps. edited: the text is the user's, so that it has no figures. compared: the setting that
    told it from other versions, such as ``temperature 0.7``; it is not stored.
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

    @property
    def as_message(self) -> Message:
        """The reply as the engine takes it."""
        return Message("assistant", self.text, self.thinking, self.calls)

    @property
    def is_said(self) -> bool:
        """Whether it holds an answer or a call."""
        return bool(self.text or self.calls)


EDITED = "edited by you"
"""Shown with a reply that the user edited."""


def cut_here(reply: Reply) -> Reply:
    """Return what a reply that goes on begins with: without what was left of a character where it was cut."""
    said = whole_characters(Message("assistant", reply.text, reply.thinking))
    return Reply(said.content, said.thinking, reply.thinking_s)


class ReplyBuilder:
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
    system_keys, between_keys: of these messages. results, result_keys: of the calls of the reply before this turn, which
    has no prompt of its own unless the model never said anything to them.
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
        """The prompt as the model is given it, attachments and all."""
        return whole(self.prompt, self.attachments)


def prompts_of(turns: Iterable[Turn]) -> list[int]:
    """Return the key of the prompt that each turn answers, by way of calls and their results; 0 is of none."""
    keys: list[int] = []
    for turn in turns:
        keys.append(turn.key or (keys[-1] if turn.results and keys else 0))
    return keys


def messages(system: str, turns: Iterable[Turn]) -> tuple[Message, ...]:
    """Return the conversation as the engine takes it.

    A turn whose reply never began is left out: templates refuse two prompts in a row. The last turn, unanswered, is the one asked.
    System messages stay where they stand.
    """
    turns = tuple(turns)
    out = _system((system,))
    for turn in turns[:-1]:
        replied = turn.reply is not None and turn.reply.is_said
        asked = [Message("user", turn.asked)] if replied and turn.asked else []
        out += [*_told(turn.results), *_system(turn.system), *asked, *_system(turn.between)]
        if turn.reply is not None and replied:
            out.append(turn.reply.as_message)
    for turn in turns[-1:]:
        asked = [] if turn.results and not turn.key else [Message("user", turn.asked)]
        out += [*_told(turn.results), *_system(turn.system), *asked, *_system(turn.between)]
    return tuple(_with_all_results(out))


def _told(results: Iterable[ToolResult]) -> list[Message]:
    return [Message("tool", each.text, tool_call_id=each.call.id, name=each.call.name) for each in results]


def _with_all_results(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation in which every call is answered: templates refuse one that is not."""
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
    """A message. key: its own; parent: of the message before it, None at the beginning.

    prompt: what the user wrote; None for a reply. reply: what the model said; None for a prompt, and while it is being made.
    attachments: what goes with the prompt. system: what a system message among them says; None for every other message.
    result: what came of a call of the reply before it; None for every other message.
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
        """Whether it is a model's, said or being made."""
        return self.prompt is None and self.system is None and self.result is None


@dataclass(slots=True)
class Tree:
    """All messages, and ``head``, the last one of the path that is read. Keys grow."""

    nodes: dict[int, MessageNode] = field(default_factory=dict)
    head: int | None = None
    _children: dict[int | None, list[int]] = field(default_factory=dict)
    _taken: dict[int | None, int] = field(default_factory=dict)  # the child that was on the path last

    def ask(self, prompt: str, parent: int | None, attachments: tuple[Attachment, ...] = ()) -> MessageNode:
        """Add a prompt after ``parent``, and stand there."""
        return self._add(MessageNode(self._next(), parent, prompt=prompt, attachments=attachments))

    def answer(self, parent: int) -> MessageNode:
        """Add a reply that is still to be made after ``parent``, a prompt or a system message, and stand there."""
        return self._add(MessageNode(self._next(), parent))

    def add_result(self, parent: int, result: ToolResult) -> MessageNode:
        """Add what came of a call after ``parent``, its reply or the result of the call before it, and stand there."""
        return self._add(MessageNode(self._next(), parent, result=result))

    def add_reply(self, parent: int | None, reply: Reply) -> MessageNode:
        """Add a reply that is whole after ``parent``, and stand there."""
        return self._add(MessageNode(self._next(), parent, reply=reply))

    def end(self, key: int, reply: Reply) -> None:
        """Say what the reply ``key`` became."""
        self.nodes[key] = replace(self.nodes[key], reply=reply)

    def add(self, node: MessageNode) -> None:
        """Add a message that was kept elsewhere. Its parent must be there; its key must be new."""
        self._add(node)

    def path_to(self, key: int | None) -> list[MessageNode]:
        """Return the messages from the first one to ``key``."""
        found = []
        while key is not None:
            found.append(self.nodes[key])
            key = self.nodes[key].parent
        return found[::-1]

    def turns(self) -> list[Turn]:
        """Return the path as turns of a prompt and its reply."""
        return self.turns_to(self.head)

    def turns_to(self, key: int | None) -> list[Turn]:
        """Return the turns up to ``key``; None: there are none."""
        turns: list[Turn] = []
        for node in self.path_to(key):
            self._add_to(turns, node)
        return turns

    def _add_to(self, turns: list[Turn], node: MessageNode) -> None:
        """Let ``node`` go on with the last turn where that has no reply yet, or begin another one.

        A conversation from elsewhere may begin with a reply, hold two in a row, or system messages anywhere.
        """
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
        """Return the messages that stand at the same place, oldest first, ``key`` among them."""
        return self._children[self.nodes[key].parent]

    def beside(self, key: int, by: int) -> int | None:
        """Return another version: ``by`` places on, and round again, from ``key`` or the nearest one before it that has several.

        None: there is one version of each.
        """
        several = next((node.key for node in reversed(self.path_to(key)) if len(self.siblings(node.key)) > 1), None)
        if several is None:
            return None
        siblings = self.siblings(several)
        return siblings[(siblings.index(several) + by) % len(siblings)]

    def place(self, key: int) -> tuple[int, int]:
        """Return which of how many siblings ``key`` is, from 1."""
        siblings = self.siblings(key)
        return siblings.index(key) + 1, len(siblings)

    def children(self, key: int | None) -> list[int]:
        """Return the messages that follow ``key``, oldest first; None: those that begin the conversation."""
        return self._children.get(key, [])

    def go(self, key: int) -> None:
        """Stand on the path through ``key``: at its end, by the way that was taken last."""
        for node in self.path_to(key):
            self._taken[node.parent] = node.key
        self.head = self.end_of(key)

    def end_of(self, key: int) -> int:
        """Return the last message of the path through ``key``, by the way that was taken last."""
        while (after := self._taken.get(key)) is not None:
            key = after
        return key

    def leaves(self) -> Iterator[int]:
        """Yield the last message of every path."""
        return (key for key in self.nodes if key not in self._children)

    def _add(self, node: MessageNode) -> MessageNode:
        self.nodes[node.key] = node
        self._children.setdefault(node.parent, []).append(node.key)
        self._taken[node.parent] = self.head = node.key
        return node

    def _next(self) -> int:
        return max(self.nodes, default=0) + 1


def _with_system(turn: Turn, key: int, text: str) -> Turn:
    """Return ``turn`` with a system message: before its reply if it has a prompt, else before the prompt to come."""
    if turn.key:
        return replace(turn, between=(*turn.between, text), between_keys=(*turn.between_keys, key))
    return replace(turn, system=(*turn.system, text), system_keys=(*turn.system_keys, key))


ENDINGS: dict[Ending, str] = {
    "stop": "",
    "length": "cut off at the length limit",
    "cancelled": "stopped",
    "lost": "engine crashed here",
    "failed": "failed",
    "tool_calls": "",
}


@dataclass(frozen=True, slots=True)
class ReplySettings:
    """What a reply is asked for with, beside the messages."""

    system: str
    sampling: Sampling
    template: TemplateOptions
    tools: tuple[ToolSpec, ...] = ()


@dataclass(slots=True)
class ReplyProgress:
    """How the running reply of a conversation is doing, or how the last one did.

    left_out: tokens that its prompt went without. recalled: it was made earlier, and this is what was stored with it. called: the
    tool whose call it is writing; "" while it writes none.
    """

    prefill: PrefillProgress | None = None
    live: Live | None = None
    metrics: Metrics | None = None
    diagnosis: Diagnosis | None = None
    outliers: tuple[Outlier, ...] = ()
    left_out: int = 0
    recalled: bool = False
    called: str = ""

    def take(self, event: Event | Live) -> None:
        """Take what an event tells of it."""
        match event:
            case PrefillProgress():
                self.prefill = event
            case Live():
                self.live, self.metrics, self.outliers = event, event.metrics, event.outliers
            case Truncated():
                self.left_out = event.tokens
            case ToolCallDelta(name):
                self.called = name
            case TextChunk() | ToolCall():
                self.called = ""
            case Finished():
                self.called = ""
                self.metrics, self.outliers, self.diagnosis = event.metrics, event.outliers, event.diagnosis
            case _:
                pass


def ended_reply(  # noqa: PLR0917
    builder: ReplyBuilder,
    progress: ReplyProgress,
    ending: Ending,
    now: float,
    model: str,
    finished: Finished | None = None,
    reason: str = "",
) -> Reply:
    """Return a reply of ``model`` as it ended: with what was said and measured so far, or what ``finished`` says it is.

    reason: why it failed; "" where it did not.
    """
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
    )


class Conversation:
    """A conversation, and the reply in it that is being made, if one is.

    Attributes:
        tree: its messages.
        progress: of the running reply, or of the last one.
        pruned: what is kept, but not sent: a prompt's key with "", which is its whole turn, or with the name of a file of it.
        allowed: the tools whose calls the user allowed in it, as long as it is open.
    """

    def __init__(self, tree: Tree | None = None, pruned: Iterable[tuple[int, str]] = ()) -> None:
        self.tree = Tree() if tree is None else tree
        self.progress = ReplyProgress()
        self.pruned = set(pruned)
        self.allowed: set[str] = set()
        self._builder = ReplyBuilder()
        self._reply: int | None = None

    @property
    def turns(self) -> list[Turn]:
        """The path that is read, as turns."""
        return self.tree.turns()

    @property
    def partial(self) -> Reply:
        """The running reply as far as it came."""
        return self._builder.so_far()

    def ask(self, draft: Draft, parent: int | None) -> Turn:
        """Add a prompt after the message ``parent`` (None: at the beginning), and room for its reply."""
        return self.answer(self.tree.ask(draft.text, parent, draft.attachments).key)

    def answer(self, prompt: int, begun: Reply | None = None) -> Turn:
        """Make room for a reply to ``prompt``, the first or another one, or to a call's result; ``begun``: what it goes on from."""
        asked = self.tree.nodes[prompt]
        self._builder = ReplyBuilder(begun)
        self._reply = self.tree.answer(prompt if asked.result is not None else self.end_of_prompt(prompt)).key
        return self.turns[-1]

    def revise(self, key: int, text: str) -> None:
        """Add a reply with the user's ``text`` beside the reply ``key``, and stand there."""
        old = self.tree.nodes[key]
        said = old.reply or Reply("")
        made = self.tree.add_reply(old.parent, Reply(text, said.thinking, model=said.model, edited=True))
        self.tree.go(made.key)

    def grow(self, text: str, kind: TextKind, now: float) -> None:
        """Add to the running reply."""
        self._builder.add(text, kind, now)

    def end(
        self, ending: Ending, now: float, model: str, finished: Finished | None = None, *, reason: str = ""
    ) -> Reply:
        """Close the running reply of ``model`` with what was said and measured so far, or what ``finished`` says it is.

        reason: why it failed; "" where it did not.
        """
        reply = ended_reply(self._builder, self.progress, ending, now, model, finished, reason)
        assert self._reply is not None
        self.tree.end(self._reply, reply)
        return reply

    def prompt_of(self, key: int) -> MessageNode | None:
        """Return the prompt ``key``, or the one that the reply ``key`` answers, by way of calls and their results; None where there
        is none.

        Of a system message: that of the message before it.
        """  # fmt: skip
        node = at = self._spoken(key)
        while at is not None and at.prompt is None:
            if at is not node and at.result is None and not (at.reply is not None and at.reply.calls):
                return None
            at = self._spoken(at.parent)
        return at

    def result_before(self, key: int) -> int | None:
        """Return the result of a call that the reply ``key`` follows; None where it answers a prompt."""
        parent = self.tree.nodes[key].parent
        return parent if parent is not None and self.tree.nodes[parent].result is not None else None

    def calls_before(self, key: int) -> int | None:
        """Return the reply whose calls the result ``key`` is among the answers to."""
        at: int | None = key
        while at is not None and self.tree.nodes[at].result is not None:
            at = self.tree.nodes[at].parent
        return at

    def reply_at(self, key: int | None) -> MessageNode | None:
        """Return the reply ``key`` of the path, or the one to the prompt ``key``; None: the last one. None where there is none.

        Of a system message: that of the message before it.
        """
        replies = [node for node in reversed(self.tree.path_to(self.tree.head)) if node.is_reply]
        if key is None:
            return replies[0] if replies else None
        at = self._spoken(key)
        if at is None or at.is_reply:  # which another reply may follow
            return next((node for node in replies if node is at), None)
        asked = self.prompt_of(at.key)
        return next((node for node in replies if asked is not None and self.prompt_of(node.key) is asked), None)

    def end_of_prompt(self, prompt: int) -> int:
        """Return the message that a reply to ``prompt`` follows: the last system message after it on the path, or itself."""
        asked = self.tree.nodes[prompt]
        path = reversed(self.tree.path_to(self.tree.head))
        return next((node.key for node in path if self._spoken(node.key) is asked), prompt)

    def _spoken(self, key: int | None) -> MessageNode | None:
        """Return the message ``key``, or of a system message, the last one before it that is none."""
        while key is not None and self.tree.nodes[key].system is not None:
            key = self.tree.nodes[key].parent
        return None if key is None else self.tree.nodes[key]

    def partial_reply(self, key: int) -> Reply | None:
        """Return the reply ``key`` of the path, or the one to the prompt ``key``; None where that prompt is unanswered.

        It is, too, where its reply was stopped, lost or failed before it said a whole character.
        """
        node = self.reply_at(key)
        reply = None if node is None else node.reply
        if reply is None or (reply.ending in ("stop", "tool_calls") and not reply.edited):
            return reply
        said = cut_here(reply)
        return reply if said.text or said.thinking else None

    def request(self, system: str, draft: str | None = None) -> tuple[Message, ...]:
        """Return the conversation as the engine takes it, ``draft`` at its end where one is given."""
        more: Sequence[Turn] = () if draft is None else (Turn(draft),)
        return messages(system, [*self.sent(self.turns), *more])

    def sent(self, turns: Sequence[Turn]) -> list[Turn]:
        """Return ``turns`` without what is left out of the prompt. The prompt that is answered is never left out."""
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
