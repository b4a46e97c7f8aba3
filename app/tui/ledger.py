"""Which messages of the conversation that is held are in the store; those that are not are put there, as often as it takes.

tree       1 ─ 2 ─ 3 ─ 4 ─ 5 ─ 6 ─▶ 7 …        keys; 7 was asked for, and nobody has told the ledger yet
store     11  12  13  14̲                        ids; 14̲ is a reply that is not finished there
                      └── catch_up ──┘          finishes 14, adds 5 and 6
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from tokamac.app.store.store import Store
from tokamac.app.store.values import Json
from tokamac.app.tui.conversation import Reply, Turn
from tokamac.app.tui.kept import measured, state_of
from tokamac.app.tui.tree import Node, Tree

BACK = "The chat was deleted elsewhere; with what was said now it is back."
ANEW = "The chat was removed for ever elsewhere; what is held of it here is kept as a new chat."


@dataclass(frozen=True, slots=True)
class Asked:
    """What a reply was asked of, and how. text, thinking: what it goes on from."""

    model: str
    settings: Json = field(default_factory=dict)
    text: str = ""
    thinking: str = ""


class Ledger:
    """One chat of the store and the tree that is held of it. What was stored before a StoreError stays stored, and known.

    chat: its id; None until something of it is stored. tree: all of it is in the store already, under its own keys.
    """

    def __init__(self, store: Store, chat: str | None = None, tree: Tree | None = None) -> None:
        self.chat = chat
        self._store = store
        self._tree = Tree() if tree is None else tree
        self._ids = {key: key for key in self._tree.nodes}
        self._open: set[int] = set()  # replies that are not finished in the store
        self._asked: dict[int, Asked] = {}
        self._last = max(self._tree.nodes, default=0)  # what was told of so far

    def ask(self, tree: Tree, reply: int, asked: Asked) -> None:
        """A reply was asked for, and stands in ``tree`` with all that leads to it."""
        self._tree, self._last = tree, reply
        self._asked[reply] = asked

    def end(self, reply: Reply) -> None:
        """The reply that was asked for last is this."""
        self._tree.end(self._last, reply)

    @property
    def awaited(self) -> bool:
        """Whether a reply was asked for that is not whole in the store."""
        return self._last in self._asked

    @property
    def running(self) -> bool:
        """Whether a reply was asked for that has not ended."""
        return self.awaited and self._tree.nodes[self._last].reply is None

    @property
    def growing(self) -> int | None:
        """The id of the reply that grows in the store."""
        return self._ids.get(self._last) if self._last in self._open else None

    def stored(self, key: int) -> int | None:
        """Return the id in the store of a message that is held."""
        return self._ids.get(key)

    def held(self, message: int) -> int | None:
        """Return the key under which a message of the store is held."""
        return next((key for key, stored in self._ids.items() if stored == message), None)

    def lacks(self, turn: Turn) -> bool:
        """Whether the turn is not in the store, or not whole."""
        return any(key and (key not in self._ids or key in self._open) for key in (turn.key, turn.reply_key))

    def is_current(self) -> bool:
        """Whether the store holds of the chat just what is held here: no window has added to it. Raises StoreError."""
        branches = self._store.tree(self.chat) if self.chat is not None else []
        there = {(branch.id, branch.state) for branch in branches}
        nodes = self._tree.nodes
        return there == {(stored, _state(nodes[key])) for key, stored in self._ids.items()}

    def catch_up(self, begin: Callable[[], str]) -> tuple[str, str]:
        """Store what is not stored yet; return the chat's id, and what is to be said of it, or nothing. Raises StoreError.

        begin: makes a chat, and returns its id.
        """
        said = self._look()
        if self.chat is None:
            self.chat = begin()
        for node in self._tree.nodes.values():
            if node.key <= self._last:
                self._put(self.chat, node)
        still_deleted = said == BACK and self._store.chat(self.chat).deleted_at is not None  # nothing was said in it
        return self.chat, "" if still_deleted else said

    def _look(self) -> str:
        """Look whether the chat is still there; if not, nothing of it is stored any more."""
        if self.chat is None:
            return ""
        known = self._store.known(self.chat)
        if known is None:
            self.chat, self._ids = None, {}
            self._open.clear()
            return ANEW
        return "" if known.deleted_at is None else BACK

    def _put(self, chat: str, node: Node) -> None:
        if node.system is not None:
            if node.key not in self._ids:
                self._ids[node.key] = self._store.add_message(chat, self._before(node), "system", node.system).id
        elif node.prompt is not None:
            if node.key not in self._ids:
                self._put_prompt(chat, node, node.prompt)
        elif node.reply is None:
            if node.key not in self._ids:
                self._begin_reply(chat, node)
        elif node.key in self._open or node.key not in self._ids:
            self._put_reply(chat, node, node.reply)

    def _put_prompt(self, chat: str, node: Node, prompt: str) -> None:
        kept = self._store.add_message(chat, self._before(node), "user", prompt, attachments=node.attachments)
        self._ids[node.key] = kept.id
        if not prompt and node.attachments and not self._store.chat(chat).title:  # titles are made of the user's words
            self._store.rename(chat, node.attachments[0].name, "words")

    def _put_reply(self, chat: str, node: Node, reply: Reply) -> None:
        stored = self._ids.get(node.key)
        if (
            stored is None or self._store.message(stored).state != "partial"
        ):  # another took us for dead, and ended it short
            stored = self._begin_reply(chat, node)
        self._store.finish_reply(stored, reply.text, reply.thinking, state=state_of(reply), metrics=measured(reply))
        self._open.discard(node.key)
        self._asked.pop(node.key, None)

    def _begin_reply(self, chat: str, node: Node) -> int:
        asked = self._asked.get(node.key) or Asked("" if node.reply is None else node.reply.model)
        begun = self._store.begin_reply(
            chat,
            self._before(node),
            model=asked.model,
            settings=asked.settings,
            text=asked.text,
            thinking=asked.thinking,
        )
        self._ids[node.key] = begun.id
        self._open.add(node.key)
        return begun.id

    def _before(self, node: Node) -> int | None:
        return None if node.parent is None else self._ids[node.parent]


def _state(node: Node) -> str:
    return "complete" if node.reply is None else state_of(node.reply)
