"""What is being said: the tree of messages, and the reply that is being made."""

from collections.abc import Sequence
from dataclasses import replace

from tokamac.app.backend import wire
from tokamac.app.tui.conversation import Ending, Growing, Reply, Turn, messages
from tokamac.app.tui.tree import Node, Tree
from tokamac.engine.events import Message, TextKind


class Talk:
    """A conversation. Its last message is a reply, or a prompt whose reply is being made."""

    def __init__(self, tree: Tree | None = None) -> None:
        self.tree = Tree() if tree is None else tree
        self._growing = Growing()
        self._reply: int | None = None

    @property
    def turns(self) -> list[Turn]:
        """The path that is read, as turns."""
        return self.tree.turns()

    @property
    def said(self) -> Reply:
        """The running reply as far as it came."""
        return self._growing.so_far()

    def ask(self, prompt: str, parent: int | None) -> Turn:
        """Add ``prompt`` after the reply ``parent`` (None: at the beginning), and room for its reply."""
        return self.answer(self.tree.ask(prompt, parent).key)

    def answer(self, prompt: int) -> Turn:
        """Make room for a reply to ``prompt``, the first or another one."""
        self._growing = Growing()
        self._reply = self.tree.answer(prompt).key
        return self.turns[-1]

    def grow(self, text: str, kind: TextKind, now: float) -> None:
        """Add to the running reply."""
        self._growing.add(text, kind, now)

    def end(self, ending: Ending, now: float, model: str, done: wire.Done | None = None) -> Reply:
        """Close the running reply of ``model`` with what was said so far, or what ``done`` says was said."""
        reply = replace(self._growing.end(ending, now), model=model)
        if done is not None:
            reply = replace(
                reply,
                text=done.text,
                thinking=done.thinking,
                metrics=done.metrics,
                outliers=done.outliers,
                diagnosis=done.diagnosis,
            )
        assert self._reply is not None
        self.tree.end(self._reply, reply)
        return reply

    def prompt_of(self, key: int) -> Node:
        """Return the prompt ``key``, or the one that the reply ``key`` answers."""
        node = self.tree.nodes[key]
        return node if node.parent is None or node.prompt is not None else self.tree.nodes[node.parent]

    def request(self, system: str, draft: str | None = None) -> tuple[Message, ...]:
        """Return the conversation as the engine takes it, ``draft`` at its end where one is given."""
        more: Sequence[Turn] = () if draft is None else (Turn(draft),)
        return messages(system, [*self.turns, *more])
