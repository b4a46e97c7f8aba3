"""Compaction: the model's summary of a conversation begins another branch; what it replaces stays in the tree."""

#     prompt ─ reply ─ prompt ─ reply ─ prompt ─ reply           the path that was read
#     summarise + files ─ summary ─ pinned turn ─ prompt ─ reply  the branch: a sibling of the first prompt
#
# The summary is asked for at the end of the path, so its prompt is in the prompt cache. Where path and summary don't fit
# the context, a shorter part of the path is summarised, and the rest kept whole.

import re
from dataclasses import dataclass, replace

from tokamac.engine.events import Event, Finished, Live, Message, ModelSpec
from tokamac.engine.options import KVSpec, Sampling, TemplateOptions

from ..backend.protocol import Cancel, Generate
from ..store.values import Attachment
from .conversation import Conversation, Reply, Turn, messages
from .steps import Ask, Step

INSTRUCTION = (
    "Summarise our conversation so far in short lines. Keep every name, number, date, fact, decision and open question: "
    "only this summary will be remembered. Leave out greetings."
)
PREPARES_AT, APPLIES_AT = 0.7, 0.85  # shares of the context
LEAST_TOKENS, MOST_TOKENS, SHARE = 64, 1024, 8  # of a summary; at most an eighth of the context
FIRST_ID = -1_000_000_000  # of requests, below those of titles


@dataclass(frozen=True, slots=True)
class CompactPlan:
    """What is summarised. first_kept: the prompt from which on the path is kept whole; turns: summarised ones."""

    messages: tuple[Message, ...]
    first_kept: int
    turns: int
    pinned: tuple[int, ...]
    attachments: tuple[Attachment, ...]


def plan(conversation: Conversation, system: str, share: float = 1.0) -> CompactPlan | None:
    """Return how to compact all but the last turn, or a ``share`` of that; None: nothing."""
    turns = conversation.turns
    starts = [at for at, turn in enumerate(turns) if turn.key]
    cut = starts[max(0, round(share * (len(starts) - 1)))] if starts else 0
    gone = conversation.sent(turns)[:cut]
    if not any(turn.reply is not None and turn.reply.is_said for turn in gone):
        return None
    pinned = tuple(turn.key for turn in gone if turn.key in conversation.pinned)
    files = {each.name: each for turn in gone if turn.key not in pinned for each in turn.attachments}
    asked = messages(system, [*gone, Turn(INSTRUCTION)])
    return CompactPlan(asked, turns[cut].key, len([turn for turn in gone if turn.key]), pinned, tuple(files.values()))


def most_tokens(capacity: int | None, used: int | None = None) -> int:
    """Return how long a summary may be: an eighth of the context, and half of the ``used`` one."""
    shares = (MOST_TOKENS if capacity is None else capacity // SHARE, MOST_TOKENS if used is None else used // 2)
    return max(LEAST_TOKENS, min(MOST_TOKENS, *shares))


def kept_turns(conversation: Conversation, made: CompactPlan) -> list[Turn]:
    """Return the turns that the branch has word for word."""
    turns = conversation.turns
    first = next((at for at, turn in enumerate(turns) if turn.key == made.first_kept), len(turns))
    return [turn for at, turn in enumerate(turns) if at >= first or turn.key in made.pinned]


def branch(conversation: Conversation, made: CompactPlan, summary: Reply) -> bool:
    """Add the branch and go to it; return whether the path is still the one that was summarised."""
    tree = conversation.tree
    path = tree.path_to(tree.head)
    if made.first_kept not in {node.key for node in path}:
        return False
    after = None
    for node in path:
        if node.system is None:
            break
        after = node.key  # what stands before the first prompt stays before it
    at = tree.add_reply(tree.ask(INSTRUCTION, after, made.attachments).key, summary).key
    kept, of = False, 0
    for node in path:
        of = node.key if node.prompt is not None else of
        kept = kept or node.key == made.first_kept
        if (kept or of in made.pinned) and (of, "") not in conversation.pruned:
            copied = tree.copy(node, at)
            at = copied.key
            if of in conversation.pinned and node.prompt is not None:
                conversation.pinned.add(copied.key)
    tree.go(at)
    return True


def once(text: str) -> str:
    """Return a text with each line and sentence once: small models repeat themselves."""
    first: dict[str, str] = {}
    for part in re.findall(r"[^.!?\n]+[.!?\n]*", text):
        first.setdefault(part.strip(), part)
    return "".join(first.values()).strip()


class Compactor:
    """A summary of one conversation. ready: it is written. asked: the user waits for it."""

    def __init__(self) -> None:
        self.conversation: Conversation | None = None
        self.made: CompactPlan | None = None
        self.ready: Reply | None = None
        self.asked = False
        self.refused: tuple[Conversation, int | None] | None = None  # a path for which there is no summary
        self._id = FIRST_ID
        self._request: Generate | None = None
        self._share = 1.0

    @property
    def running(self) -> bool:
        return self._request is not None

    def is_for(self, conversation: Conversation) -> bool:
        return self.conversation is conversation and self.made is not None

    def begin(
        self,
        conversation: Conversation,
        system: str,
        template: TemplateOptions,
        info: ModelSpec | None,
        *,
        used: int | None,
        asked: bool,
        share: float = 1.0,
    ) -> list[Step]:
        stopped = self.stop()
        if (made := plan(conversation, system, share)) is None:
            return []
        thinks = info is not None and "off" in info.thinking_modes
        told = replace(template, thinking="off") if thinks else template
        most = most_tokens(None if info is None else info.capacity, used)
        self._id -= 1
        self._request = Generate(
            self._id, made.messages, Sampling(temperature=0.0, max_tokens=most), template=told, background=True
        )
        self.conversation, self.made, self.ready, self.asked, self._share = conversation, made, None, asked, share
        return [*stopped, Ask(self._request)]

    def on_reply(self, id: int, event: Event | Live, model: str) -> bool:
        """Handle an event of a reply that isn't the session's; return whether it ends the summary."""
        if self._request is None or id != self._request.id or not isinstance(event, Finished):
            return False
        self._request = None
        text = once(event.text)
        if text and event.reason in ("stop", "length", "loop"):
            self.ready = Reply(text, model=model, metrics=event.metrics, diagnosis=event.diagnosis)
        return True

    def failed(self, id: int) -> float | None:
        """Return the share of the path to try in its place; 0: none. None: it is another's request."""
        if self._request is None or id != self._request.id:
            return None
        self._request = None
        return self._share / 2 if self._share > 1 / 4 else 0.0

    def stop(self) -> list[Step]:
        request, self._request = self._request, None
        return [] if request is None else [Ask(Cancel(request.id))]

    def reset(self) -> None:
        self.conversation = self.made = self.ready = self._request = None
        self.asked = False


def is_due(kv: KVSpec, used: int | None, info: ModelSpec | None, share: float) -> bool:
    capacity = None if info is None else info.capacity
    return kv.on_full == "compact" and used is not None and capacity is not None and used >= share * capacity
