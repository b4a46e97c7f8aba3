"""A conversation: its messages, and what may be done with them. The engine finds what of it is computed already."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tokamac.engine.continuation import unfinished
from tokamac.engine.errors import EngineClosedError, OptionError
from tokamac.engine.events import Event, Finished, Message, TextChunk
from tokamac.engine.options import Sampling
from tokamac.engine.price import Action, Continue, Edit, Price, Regenerate, Send

if TYPE_CHECKING:
    from tokamac.engine.session import Engine


class Chat:
    """A conversation with an engine's model. Made by ``engine.chat``.

    ``messages`` are the turns without the system prompt. ``send``, ``regenerate`` and ``continue_reply`` yield events; stop
    iterating, or close the iterator, to cancel: what was said so far stays in ``messages``.
    """

    def __init__(self, engine: "Engine", system: str | None = None, messages: Sequence[Message] = ()) -> None:
        self._engine = engine
        self.system = system
        self._messages = list(messages)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The turns so far, oldest first."""
        return tuple(self._messages)

    def send(self, text: str, sampling: Sampling | None = None) -> Iterator[Event]:
        """Add a user's message and generate the reply. Raises OptionError for an empty message.

        A message before it that was never answered (cancelled at once, say) is left out: templates refuse two in a row.
        """
        if not text.strip():
            raise OptionError("the message is empty", "Write something first.")
        if self._messages and self._messages[-1].role == "user":
            self._messages.pop()
        self._messages.append(Message("user", text))
        return self._reply(sampling)

    def regenerate(self, sampling: Sampling | None = None) -> Iterator[Event]:
        """Generate the last reply again, or the missing one after an edit. Raises OptionError when there is no question."""
        if self._messages and self._messages[-1].role == "assistant":
            self._messages.pop()
        if not self._messages:
            raise OptionError("there is nothing to regenerate", "Send a message first.")
        return self._reply(sampling)

    def continue_reply(self, sampling: Sampling | None = None) -> Iterator[Event]:
        """Generate the rest of the last reply, which was cut: at its token limit, or by cancelling. It becomes one message with it.

        TextChunks are what is new; Finished holds all of the reply. Raises OptionError where no reply is last, or it is empty.
        """
        begun = unfinished(self._messages)
        self._messages[-1] = begun
        return self._record(
            self._engine.generate(self._prompt(self._messages), sampling or Sampling(), continues=True), begun
        )

    def edit(self, index: int, text: str) -> None:
        """Replace the text of message ``index`` and drop what followed it; ``regenerate`` then answers it.

        Raises OptionError when there is no such message.
        """
        self._check(index)
        self._messages[index:] = [Message(self._messages[index].role, text)]

    def branch(self, index: int) -> "Chat":
        """Return a new chat that begins with the messages up to and including ``index``; this one stays as it is.

        Raises OptionError when there is no such message.
        """
        self._check(index)
        return Chat(self._engine, self.system, self._messages[: index + 1])

    def price(self, action: Action) -> Price:
        """Return what an action would take until the reply's first token, before it is taken: ``Send``, ``Regenerate``,
        ``Continue``, ``Edit``, ``Branch``. Waits for a reply in progress. Raises OptionError for a message that is not there.
        """  # fmt: skip
        return self._engine.price(self._prompt(self._after(action)), continues=isinstance(action, Continue))

    def warm(self, text: str = "") -> None:
        """Compute ahead what is certain of the conversation, and of a message that begins with ``text``. Returns at once.

        Any request ends it; what was computed is found by the next.
        """
        self._engine.warm_ahead(self._prompt(self._after(Send(text))))

    def _reread(self) -> None:
        """Templates drop earlier thinking: read the visible answer alone while nothing else is to do, or the next turn must."""
        with contextlib.suppress(EngineClosedError):
            self.warm()

    def _after(self, action: Action) -> list[Message]:
        """Return the messages that an action would have answered."""
        messages = self._messages
        if isinstance(action, Send):
            answered = messages[:-1] if messages and messages[-1].role == "user" else messages
            return [*answered, Message("user", action.text)]
        if isinstance(action, Continue):
            return [*messages[:-1], unfinished(messages)]
        if isinstance(action, Regenerate):
            return messages[:-1] if messages and messages[-1].role == "assistant" else messages
        self._check(action.index)
        if isinstance(action, Edit):
            return [*messages[: action.index], Message(messages[action.index].role, action.text)]
        kept = messages[: action.index + 1]
        return kept if kept[-1].role == "user" else [*kept, Message("user", "")]

    def _prompt(self, messages: Sequence[Message]) -> list[Message]:
        return [*([Message("system", self.system)] if self.system else []), *messages]

    def _check(self, index: int) -> None:
        if not 0 <= index < len(self._messages):
            raise OptionError(f"there is no message {index}", f"The chat has {len(self._messages)}, counted from 0.")

    def _reply(self, sampling: Sampling | None) -> Iterator[Event]:
        return self._record(self._engine.generate(self._prompt(self._messages), sampling or Sampling()))

    def _record(self, events: Iterator[Event], begun: Message | None = None) -> Iterator[Event]:
        """Yield ``events``, and keep the reply they make: a new message, or all of ``begun``, the last one."""
        said = {"answer": begun.content, "thinking": begun.thinking} if begun else {"answer": "", "thinking": ""}
        asked, position = self._messages[-1], len(self._messages)
        try:
            for event in events:
                if isinstance(event, TextChunk):
                    said[event.kind] += event.text
                elif isinstance(event, Finished):
                    said = {"answer": event.text, "thinking": event.thinking}
                yield event
        finally:
            # An edit during the reply changes what was asked: then the reply belongs to nothing.
            unchanged = len(self._messages) == position and self._messages[-1] is asked
            if any(said.values()) and unchanged:
                kept = position if begun is None else position - 1
                self._messages[kept:] = [Message("assistant", said["answer"], said["thinking"])]
                if said["thinking"]:
                    self._reread()
