"""A conversation: its messages, and what may be done with them. The engine finds what of it is computed already."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tokamac.engine.errors import OptionError
from tokamac.engine.events import Event, Finished, Message, TextChunk
from tokamac.engine.options import Sampling

if TYPE_CHECKING:
    from tokamac.engine.session import Engine


class Chat:
    """A conversation with an engine's model. Made by ``engine.chat``.

    ``messages`` are the turns without the system prompt. ``send`` and ``regenerate`` yield events; stop iterating, or close
    the iterator, to cancel: what was said so far stays in ``messages``.
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

    def _check(self, index: int) -> None:
        if not 0 <= index < len(self._messages):
            raise OptionError(f"there is no message {index}", f"The chat has {len(self._messages)}, counted from 0.")

    def _reply(self, sampling: Sampling | None) -> Iterator[Event]:
        system = [Message("system", self.system)] if self.system else []
        events = self._engine.generate([*system, *self._messages], sampling or Sampling())
        return self._record(events)

    def _record(self, events: Iterator[Event]) -> Iterator[Event]:
        said = {"answer": "", "thinking": ""}
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
                self._messages.append(Message("assistant", said["answer"], said["thinking"]))
