"""From tokens to what the reader sees: whole characters, stop texts never shown, thinking told apart from the answer."""

from collections.abc import Iterator

from tokamac.engine.continuation import Begun
from tokamac.engine.events import TextChunk, TextKind
from tokamac.engine.tokens import Tokenizer


def held_back(text: str, markers: tuple[str, ...]) -> int:
    """Return how many characters at the end of ``text`` could be the beginning of a marker, and so must wait.

    That is the longest suffix of ``text`` that is a proper prefix of any marker.
    """
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if marker.startswith(text[-size:]):
                longest = size
                break
    return longest


def first_of(text: str, markers: tuple[str, ...]) -> tuple[int, str] | None:
    """Return the position and the text of the marker that appears first; the longer one where two begin together."""
    found = [(text.find(marker), -len(marker), marker) for marker in markers if marker in text]
    if not found:
        return None
    position, _, marker = min(found)
    return position, marker


class ReplyText:
    """Collects a reply token by token.

    ``add`` and ``finish`` yield TextChunks. Once ``stopped`` is true a stop text was met and nothing more will come.
    ``answer`` and ``thinking`` hold all that was yielded of each kind, after what the reply had ``begun`` with where it is
    continued. Stop texts apply to the answer alone.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: tuple[str, ...] = (),
        *,
        in_thinking: bool = False,
        begun: Begun | None = None,
    ) -> None:
        self.answer = "" if begun is None else begun.said.content
        self.thinking = "" if begun is None else begun.said.thinking
        self.stopped = False
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(() if begun is None else begun.ids)
        self._stops = stops
        self._in_thinking = in_thinking
        self._fresh = begun is None  # nothing shown since the kind last changed: leading blank lines there are padding
        self._pending = ""

    def add(self, token: int) -> Iterator[TextChunk]:
        """Take the next token of the reply; end and padding marks are passed over."""
        if not self.stopped and not self._tokenizer.is_hidden(token):
            self._pending += self._detokenizer.add(token)
            yield from self._drain(final=False)

    def finish(self) -> Iterator[TextChunk]:
        """Yield what was held back, now that nothing follows."""
        if not self.stopped:
            self._pending += self._detokenizer.flush()
            yield from self._drain(final=True)

    def _drain(self, *, final: bool) -> Iterator[TextChunk]:
        while True:
            markers = self._markers()
            match = first_of(self._pending, markers)
            if match is None:
                keep = 0 if final else held_back(self._pending, markers)
                ready = self._pending[: len(self._pending) - keep]
                self._pending = self._pending[len(ready) :]
                yield from self._show(ready)
                return
            position, marker = match
            yield from self._show(self._pending[:position])
            self._pending = self._pending[position + len(marker) :]
            if not self._is_thinking_marker(marker):
                self.stopped = True
                self._pending = ""
                return
            self._in_thinking = not self._in_thinking
            self._fresh = True

    def _markers(self) -> tuple[str, ...]:
        thinking = self._tokenizer.thinking
        if self._in_thinking:
            return (thinking[1],) if thinking else ()
        # A second opening mark is text about thinking, not thinking: models think once, before they answer.
        opening = (thinking[0],) if thinking and not self.answer and not self.thinking else ()
        return opening + self._stops

    def _is_thinking_marker(self, marker: str) -> bool:
        thinking = self._tokenizer.thinking
        if thinking is None:
            return False
        return marker == thinking[1] if self._in_thinking else marker == thinking[0] and not self.answer

    def _show(self, text: str) -> Iterator[TextChunk]:
        if self._fresh and self._tokenizer.thinking:
            text = text.lstrip("\n")
        if not text:
            return
        self._fresh = False
        kind: TextKind = "thinking" if self._in_thinking else "answer"
        if self._in_thinking:
            self.thinking += text
        else:
            self.answer += text
        yield TextChunk(text, kind)
