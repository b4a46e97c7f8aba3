"""From tokens to what the reader sees: whole characters, no stop texts, thinking kept apart from the answer."""

import re
from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING

from ..events import Alternative, Piece, TextChunk, TextKind, TokenLogprob, ToolCall, ToolCallDelta
from .continuation import PartialReply
from .tokenizer import LONGEST_PENDING, Tokenizer
from .tools import BARE, CALLED_FUNCTION, CallReader, OpenCall, may_be_bare

if TYPE_CHECKING:
    from ..sampling import Score

CHANNEL_MARKS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
"""What ends a Harmony message or begins the header of the next, which "<|message|>" ends:
``<|end|><|start|>assistant<|channel|>final<|message|>``. https://cookbook.openai.com/articles/openai-harmony"""

CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")

ReplyPart = Piece | ToolCall
"""What a reply's tokens make."""


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
    """Collects a reply token by token; ``add`` and ``finish`` yield TextChunks, and calls where the model was given tools.

    ``answer`` and ``thinking`` hold all that was yielded of each kind, after what a continued reply began with. Stop texts apply to
    the answer alone: once ``stopped_by`` is one of them, nothing more will come. Of a Harmony reply, the channel ``analysis`` is
    thinking and every other is answer.

    Args:
        tokenizer: The model's.
        stops: Stop texts.
        in_thinking: Whether the reply begins inside thinking.
        partial: What a continued reply began with.
        unstopped: Number of first tokens that no stop text applies to.
        calls: Reads calls of tools; None where the model was given none: what looks like one is text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: tuple[str, ...] = (),
        *,
        in_thinking: bool = False,
        partial: PartialReply | None = None,
        unstopped: int = 0,
        calls: CallReader | None = None,
    ) -> None:
        self.answer = "" if partial is None else partial.message.content
        self.thinking = "" if partial is None else partial.message.thinking
        self.calls: list[ToolCall] = []
        self.stopped_by: str | None = None
        self._reader = calls
        self._call_marks = (
            tokenizer.token_ids(calls.form.start) if calls is not None and calls.form.start else frozenset()
        )
        self._call: OpenCall | None = None
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(() if partial is None else partial.ids)
        self._stops = () if unstopped else stops
        self._later_stops, self._unstopped = stops, unstopped
        self._in_thinking = in_thinking
        self._in_header = False  # between a channel's marks: not text
        self._fresh = partial is None  # nothing of this kind is shown yet: leading blank lines are padding
        self._pending = ""

    @property
    def thinks(self) -> bool:
        """Whether the next token is thinking, as far as the tokens so far tell."""
        return self._in_thinking and not self._in_header and self._call is None and not self.stopped

    @property
    def is_settled(self) -> bool:
        """Whether all text is shown: no character is incomplete, and nothing may yet be the beginning of a mark."""
        return not self._pending and self._detokenizer.is_whole

    @property
    def stopped(self) -> bool:
        """Whether a stop text was met."""
        return self.stopped_by is not None

    def add(self, token: int) -> Iterator[ReplyPart]:
        """Add the next token of the reply; end and padding marks are skipped, unless a stop text ends with one."""
        if self.stopped:
            return
        if self._unstopped:
            self._unstopped -= 1
        else:
            self._stops = self._later_stops
        if not self._tokenizer.is_hidden(token) or self._is_of_call(token):
            self._pending += self._detokenizer.add(token)
            yield from self._drain(final=False)
        elif not self._in_thinking:  # a mark is never shown, but a stop text may end with it
            mark = self._tokenizer.token_text(token)
            match = first_of(self._pending + mark, tuple(stop for stop in self._stops if stop.endswith(mark)))
            if match is not None:
                yield from self._end(*match)

    def _is_of_call(self, token: int) -> bool:
        """Whether a hidden token is part of a call: a mark of it, or between its marks."""
        is_marked = self._reader is not None and self._reader.form.name != BARE
        return token in self._call_marks or (
            self._call is not None and is_marked and token not in self._tokenizer.eos_ids
        )

    def finish(self) -> Iterator[ReplyPart]:
        """Yield what was held back, now that nothing follows."""
        if not self.stopped:
            self._pending += self._detokenizer.flush()
            yield from self._drain(final=True)

    def _end(self, position: int, stop: str) -> Iterator[TextChunk]:
        yield from self._show(self._pending[:position])
        self.stopped_by = stop
        self._pending = ""

    def _drain(self, *, final: bool) -> Iterator[ReplyPart]:
        channels = self._tokenizer.writes_channels
        start = self._call_start
        while not self.stopped:
            if self._call is not None:
                has_ended = yield from self._grow_call(self._call, final=final)
                if not has_ended:
                    return
                continue
            if self._reader is not None and self._may_be_bare:
                if self._reader.is_bare(self._pending):
                    self._call = OpenCall(self._reader, "")
                elif final:
                    yield from self._end_bare(self._reader)
                else:
                    return
                continue
            if self._in_header:
                if self._leave_header():
                    continue
                if final:
                    self._pending = ""  # the reply was cut inside a header
                return
            match = first_of(self._pending, self._markers())
            if match is None:
                yield from self._show(self._take_ready(final=final))
                return
            position, marker = match
            if marker in self._stops and not self._in_thinking:
                yield from self._end(position, marker)
            elif self._reader is not None and marker == start:
                before = self._pending[:position].rstrip()  # white space before a call is no text
                yield from self._show(before)
                self._call = OpenCall(self._reader, self._pending[len(before) : position] + marker)
                self._pending, self._in_thinking = self._pending[position + len(marker) :], False
            elif channels:
                yield from self._show(self._pending[:position])
                self._pending, self._in_header = self._pending[position:], True
            else:
                if not self._is_padding(position):
                    yield from self._show(self._pending[:position])
                self._pending = self._pending[position + len(marker) :]
                self._in_thinking = not self._in_thinking
                self._fresh = True

    def _leave_header(self) -> bool:
        """Read the channel of a complete header and begin its text; False while the header is incomplete."""
        header, mark, text = self._pending.partition("<|message|>")
        if not mark:
            return False
        named = CHANNEL.search(header)
        if self._reader is not None and (called := CALLED_FUNCTION.search(header)) is not None:
            self._call = OpenCall(self._reader, header + mark, called.group(1))
            self._pending, self._in_header, self._in_thinking = text, False, False
            return True
        self._in_thinking = named is not None and named.group(1) == "analysis"
        again = bool(self.answer.strip()) and not self._in_thinking
        self._pending, self._in_header, self._fresh = ("\n\n" if again else "") + text, False, not again
        return True

    @property
    def _call_start(self) -> str:
        """The mark with which calls begin; "" where none does."""
        return "" if self._reader is None else self._reader.form.start

    @property
    def _may_be_bare(self) -> bool:
        """Whether the reply so far may be a call without marks, which is told at its end."""
        bare = self._reader is not None and self._reader.form.name == BARE and not self.answer and not self._in_thinking
        return bare and bool(self._pending) and may_be_bare(self._pending)

    def _end_bare(self, reader: CallReader) -> Iterator[ReplyPart]:
        call, text = OpenCall(reader, ""), self._pending
        self._pending = ""
        parts = [*call.take(text), *call.end()]
        if not parts or any(isinstance(each, ToolCall) and each.problem for each in parts):
            yield from self._show(text)  # a model may answer with JSON
        else:
            yield from self._keep(call, parts)

    def _grow_call(self, call: OpenCall, *, final: bool) -> Generator[ReplyPart, None, bool]:
        """Give the pending text to the open call, and end it at its mark; return whether it has ended."""
        end = "" if self._reader is None else self._reader.form.end
        ends = CHANNEL_MARKS if call.name else (end,) if end else ()
        match = first_of(self._pending, ends)
        waits = 0 if match is not None or final else held_back(self._pending, ends)
        position, mark = (len(self._pending) - waits, "") if match is None else match
        body, self._pending = self._pending[:position], self._pending[position:]
        yield from self._keep(call, call.take(body))
        if match is None and not final:
            return False
        self._call = None
        if call.name:
            mark = ""  # Harmony's begins what follows
        self._pending = self._pending[len(mark) :]
        yield from self._keep(call, call.end(), mark)
        return True

    def _keep(self, call: OpenCall, parts: Iterable[ToolCallDelta | ToolCall], mark: str = "") -> Iterator[ReplyPart]:
        """Yield what is told of a call; of one that can't be read, also its text."""
        for part in parts:
            if isinstance(part, ToolCall):
                self.calls.append(part)
            yield part
            if isinstance(part, ToolCall) and part.problem:
                yield from self._show(call.header + part.arguments + mark)

    def _take_ready(self, *, final: bool) -> str:
        """Remove from the pending text, and return, all that can't be part of a marker."""
        waits = 0 if final else held_back(self._pending, self._markers())
        if not final and self._call_start:  # a call may follow
            waits = len(self._pending) - len(self._pending[: len(self._pending) - waits].rstrip())
        ready = self._pending[: len(self._pending) - waits]
        if not final and self._is_padding(len(ready)):
            return ""  # thinking may begin after it
        self._pending = self._pending[len(ready) :]
        return ready

    def _is_padding(self, position: int) -> bool:
        """Whether the pending text up to here is white space, at the beginning of a reply that may yet think."""
        may_think = self._tokenizer.thinking is not None and not self.answer and not self.thinking
        return self._fresh and may_think and not self._in_thinking and not self._pending[:position].strip()

    def _markers(self) -> tuple[str, ...]:
        thinking = self._tokenizer.thinking
        call = (self._call_start,) if self._call_start else ()
        if self._tokenizer.writes_channels:
            return CHANNEL_MARKS + (() if self._in_thinking else self._stops)
        if self._in_thinking:
            return (*((thinking[1],) if thinking else ()), *call)
        # A second opening mark is text about thinking: models think once, before they answer.
        opening = (thinking[0],) if thinking and not self.answer and not self.thinking else ()
        return opening + call + self._stops

    def _show(self, text: str) -> Iterator[TextChunk]:
        if self._fresh and self._tokenizer.thinking:
            text = text.lstrip("\n")
        if self.calls and not self._in_thinking:
            text = text if text.strip() else ""
        if not text:
            return
        self._fresh = False
        kind: TextKind = "thinking" if self._in_thinking else "answer"
        if self._in_thinking:
            self.thinking += text
        else:
            self.answer += text
        yield TextChunk(text, kind)


class TokenSources:
    """Tells which tokens each piece of text came from: a token goes with the first text that is shown once it is there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._guessed = 0  # of these tokens

    def add(self, token: int, score: "Score | None" = None, *, guessed: bool = False) -> None:
        """Add the next token of the reply, and its score where that is wanted. guessed: it was, and came true."""
        self._ids.append(token)
        self._guessed += guessed
        if score is not None:
            text = self._tokenizer.token_text
            others = tuple(Alternative(each, text(each), value) for each, value in score.top)
            self._logprobs.append(TokenLogprob(token, text(token), score.logprob, others))

    def take(self) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
        """Return the tokens that went with no text yet, and what is known of them; each is returned once."""
        taken = tuple(self._ids), tuple(self._logprobs)
        self._ids.clear()
        self._logprobs.clear()
        self._guessed = 0
        return taken

    def mark(self, parts: Iterable[ReplyPart]) -> Iterator[ReplyPart]:
        """Yield text with the tokens it came from, guessed where all of them are; those of a call go with what follows it."""
        for part in parts:
            if not isinstance(part, TextChunk):
                yield part
                continue
            guessed = ((0, len(part.text)),) if self._guessed and self._guessed == len(self._ids) else ()
            yield TextChunk(part.text, part.kind, *self.take(), guessed)


class ThinkingBudget:
    """Ends a reply's thinking after a number of tokens, as the model would.

    It waits until the character, and what may be a mark, is complete: a few tokens more at most.

    Args:
        most: Tokens; None has no end.
        text: The reply.
        tokenizer: The model's.
        thought: Tokens of thinking that a continued reply began with.

    Attributes:
        ended_at: The budget, once it has ended the thinking.
    """

    def __init__(self, most: int | None, text: ReplyText, tokenizer: Tokenizer, thought: int = 0) -> None:
        self.ended_at: int | None = None
        self._most, self._count = most, thought
        self._text, self._tokenizer = text, tokenizer
        self._thinks = False  # at the token before

    @property
    def unforced(self) -> int | None:
        """How many of the next tokens come before any that must end the thinking; None: all."""
        return None if self._most is None or self.ended_at is not None else self._most - self._count

    def ending(self) -> list[int]:
        """Return the ids that must come next to end the thinking, once; call before the reply's first token and after each."""
        thought, self._thinks = self._thinks, self._text.thinks
        if self._most is None or self.ended_at is not None or not self._thinks:
            return []
        self._count += thought
        unsettled = not self._text.is_settled and self._count < self._most + LONGEST_PENDING
        if self._count < self._most or unsettled:
            return []
        self.ended_at = self._most
        return self._tokenizer.thinking_end(self._text.thinking)
