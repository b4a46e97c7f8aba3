"""A conversation as a tree: what was edited or made again stays beside what replaced it. Plain values, and where one stands.

prompt ─ reply ─ prompt ─ reply        a path from the first message to where the conversation stands
              └─ prompt ─ reply        an edit: another prompt after the same reply
                        └ reply        made again: another reply to the same prompt
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tokamac.app.store.values import Attachment
from tokamac.app.tui.conversation import Reply, Turn


@dataclass(frozen=True, slots=True)
class Node:
    """A message. key: its own; parent: of the message before it, None at the beginning.

    prompt: what the user wrote; None for a reply. reply: what the model said; None for a prompt, and while it is being made.
    attachments: what goes with the prompt. system: what a system message among them says; None for every other message.
    """

    key: int
    parent: int | None
    prompt: str | None = None
    reply: Reply | None = None
    attachments: tuple[Attachment, ...] = ()
    system: str | None = None

    @property
    def is_reply(self) -> bool:
        """Whether it is a model's, said or being made."""
        return self.prompt is None and self.system is None


@dataclass(slots=True)
class Tree:
    """All messages, and ``head``, the last one of the path that is read. Keys grow."""

    nodes: dict[int, Node] = field(default_factory=dict)
    head: int | None = None
    _children: dict[int | None, list[int]] = field(default_factory=dict)
    _taken: dict[int | None, int] = field(default_factory=dict)  # the child that was on the path last

    def ask(self, prompt: str, parent: int | None, attachments: tuple[Attachment, ...] = ()) -> Node:
        """Add a prompt after ``parent``, and stand there."""
        return self._add(Node(self._next(), parent, prompt=prompt, attachments=attachments))

    def answer(self, parent: int) -> Node:
        """Add a reply that is still to be made after ``parent``, a prompt or a system message, and stand there."""
        return self._add(Node(self._next(), parent))

    def end(self, key: int, reply: Reply) -> None:
        """Say what the reply ``key`` became."""
        self.nodes[key] = replace(self.nodes[key], reply=reply)

    def add(self, node: Node) -> None:
        """Add a message that was kept elsewhere. Its parent must be there; its key must be new."""
        self._add(node)

    def path_to(self, key: int | None) -> list[Node]:
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

    def _add_to(self, turns: list[Turn], node: Node) -> None:
        """Let ``node`` go on with the last turn where that has no reply yet, or begin another one.

        A conversation from elsewhere may begin with a reply, hold two in a row, or system messages anywhere.
        """
        place = self.place(node.key)
        turn = turns.pop() if turns and not turns[-1].reply_key else Turn("")
        if node.system is not None:
            turn = _with_system(turn, node.key, node.system)
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

    def _add(self, node: Node) -> Node:
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
