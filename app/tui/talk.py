"""What is being said: the tree of messages, and the reply that is being made."""

from collections.abc import Sequence
from dataclasses import replace

from tokamac.app.backend import wire
from tokamac.app.tui.attachments import Draft
from tokamac.app.tui.conversation import Ending, Growing, Reply, Turn, cut_here, messages
from tokamac.app.tui.tree import Node, Tree
from tokamac.engine.events import Message, TextKind


class Talk:
    """A conversation, and the reply in it that is being made, if one is."""

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

    def ask(self, draft: Draft, parent: int | None) -> Turn:
        """Add a prompt after the message ``parent`` (None: at the beginning), and room for its reply."""
        return self.answer(self.tree.ask(draft.text, parent, draft.attachments).key)

    def answer(self, prompt: int, begun: Reply | None = None) -> Turn:
        """Make room for a reply to ``prompt``, the first or another one; ``begun``: what it goes on from."""
        self._growing = Growing(begun)
        self._reply = self.tree.answer(self.end_of_prompt(prompt)).key
        return self.turns[-1]

    def grow(self, text: str, kind: TextKind, now: float) -> None:
        """Add to the running reply."""
        self._growing.add(text, kind, now)

    def end(self, ending: Ending, now: float, model: str, done: wire.Done | None = None, *, reason: str = "") -> Reply:
        """Close the running reply of ``model`` with what was said so far, or what ``done`` says was said.

        reason: why it failed; "" where it did not.
        """
        reply = replace(self._growing.end(ending, now), model=model, reason=reason)
        if done is not None:
            reply = replace(
                reply,
                text=done.text,
                thinking=done.thinking,
                metrics=done.metrics,
                outliers=done.outliers,
                diagnosis=done.diagnosis,
                thinking_ended_at=done.thinking_ended_at,
            )
        assert self._reply is not None
        self.tree.end(self._reply, reply)
        return reply

    def prompt_of(self, key: int) -> Node | None:
        """Return the prompt ``key``, or the one that the reply ``key`` answers; None where there is none.

        Of a system message: that of the message before it.
        """
        node = self._spoken(key)
        before = None if node is None else self._spoken(node.parent)
        return next((each for each in (node, before) if each is not None and each.prompt is not None), None)

    def reply_at(self, key: int | None) -> Node | None:
        """Return the reply ``key`` of the path, or the one to the prompt ``key``; None: the last one. None where there is none.

        Of a system message: that of the message before it.
        """
        replies = [node for node in reversed(self.tree.path_to(self.tree.head)) if node.is_reply]
        if key is None:
            return replies[0] if replies else None
        at = self._spoken(key)
        if at is None or at.is_reply:  # which another reply may follow
            return next((node for node in replies if node is at), None)
        return next((node for node in replies if self._spoken(node.parent) is at), None)

    def end_of_prompt(self, prompt: int) -> int:
        """Return the message that a reply to ``prompt`` follows: the last system message after it on the path, or itself."""
        asked = self.tree.nodes[prompt]
        path = reversed(self.tree.path_to(self.tree.head))
        return next((node.key for node in path if self._spoken(node.key) is asked), prompt)

    def _spoken(self, key: int | None) -> Node | None:
        """Return the message ``key``, or of a system message, the last one before it that is none."""
        while key is not None and self.tree.nodes[key].system is not None:
            key = self.tree.nodes[key].parent
        return None if key is None else self.tree.nodes[key]

    def begun(self, key: int) -> Reply | None:
        """Return the reply ``key`` of the path, or the one to the prompt ``key``; None where that prompt is unanswered.

        It is, too, where its reply was stopped, lost or failed before it said a whole character.
        """
        node = self.reply_at(key)
        reply = None if node is None else node.reply
        if reply is None or reply.ending == "stop":
            return reply
        said = cut_here(reply)
        return reply if said.text or said.thinking else None

    def request(self, system: str, draft: str | None = None) -> tuple[Message, ...]:
        """Return the conversation as the engine takes it, ``draft`` at its end where one is given."""
        more: Sequence[Turn] = () if draft is None else (Turn(draft),)
        return messages(system, [*self.turns, *more])
