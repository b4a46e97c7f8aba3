"""Generated tokens to shown text: whole characters, stop texts, thinking, calls, loops."""

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING

import regex

from ..events import (
    Alternative,
    LoopFound,
    PartialReply,
    Piece,
    TextChunk,
    TextKind,
    TokenLogprob,
    ToolCall,
)
from .calls import CallReader, OpenCall
from .tokenizer import LONGEST_PENDING, Tokenizer

if TYPE_CHECKING:
    from ..sampling import Score

# What ends a Harmony message or begins the header of the next, which "<|message|>" ends:
# `<|end|><|start|>assistant<|channel|>final<|message|>`. https://cookbook.openai.com/articles/openai-harmony
CHANNEL_MARKS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")

CHANNEL_MARK = re.compile(r"<\|\w+\|>")
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
CALLED_FUNCTION = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")  # to whom a Harmony message is addressed

FENCE = "```"  # a block of code: that it is a call is known when nothing follows it
BARE_CALL = regex.compile(rf"\s*(?P<mark>\{{|\[(?=\s*\{{)|{FENCE}(?=\w*\s*[\[{{]))")

ReplyPart = Piece | ToolCall  # what a reply's tokens make


def held_back(text: str, markers: tuple[str, ...]) -> int:
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if marker.startswith(text[-size:]):
                longest = size
                break
    return longest


def first_of(text: str, markers: tuple[str, ...]) -> tuple[int, str] | None:
    found = [(text.find(marker), -len(marker), marker) for marker in markers if marker in text]
    if not found:
        return None
    position, _, marker = min(found)
    return position, marker


class ReplyText:
    """Collects a reply token by token; ``add`` and ``finish`` return TextChunks and tool calls.

    A token belongs to the first text shown after it; those of a call to what follows the call. Stop texts apply
    to
    the answer only. Harmony: channel ``analysis`` is thinking, all others are answer.

    Args:
        in_thinking: Whether the reply begins inside thinking.
        unstopped: Number of first tokens that no stop text applies to.
        calls: None without tools: what looks like a call is text.
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
        self.ended = False  # by a mark of several tokens
        self._reader = calls
        dialect = None if calls is None else calls.dialect
        bare = () if dialect is None else dialect.bare
        self._opens_bare = "{" in bare  # a call may begin the answer without a mark
        self._call_starts = tuple(
            each for each in ("" if dialect is None else dialect.start, *bare) if each not in ("", "{")
        )
        self._is_marked = dialect is not None and not dialect.is_alone
        self._call_marks = frozenset(token for each in self._call_starts for token in tokenizer.token_ids(each))
        self._call: OpenCall | None = None
        self._is_cut = False
        self._thinking: tuple[str, ...] = tokenizer.thinking or ()
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(() if partial is None else partial.ids)
        self._ends = tokenizer.end_texts
        self._stops = () if unstopped else stops
        self._later_stops, self._unstopped = stops, unstopped
        self._in_thinking = in_thinking
        self._in_header = False  # between a channel's marks: not text
        self._fresh = partial is None  # nothing of this kind is shown yet: leading blank lines are padding
        self._pending = dialect.start if dialect is not None and calls is not None and calls.opened else ""
        self._ids: list[int] = []  # that went with no text yet
        self._logprobs: list[TokenLogprob] = []
        self._guessed = 0  # of these tokens
        self._hidden = tokenizer.hidden_ids
        self._is_plain = False  # whether text is shown as it comes, unless it has one of:
        self._leads: frozenset[str] = frozenset()  # what marks begin with

    @property
    def thinks(self) -> bool:
        return self._in_thinking and not self._in_header and self._call is None and not self.stopped

    @property
    def is_settled(self) -> bool:
        return not self._pending and self._detokenizer.is_whole

    @property
    def stopped(self) -> bool:
        return self.ended or self.stopped_by is not None

    def add(self, token: int, score: "Score | None" = None, *, guessed: bool = False) -> Sequence[ReplyPart]:
        """Add the next token; return what is shown now. guessed: an accepted draft token."""
        self._ids.append(token)
        self._guessed += guessed
        if score is not None:
            self._logprobs.append(self._described(token, score))
        if self._is_plain and token not in self._hidden:
            text = self._detokenizer.add(token)
            if not text:
                return ()
            if not self._pending and self._leads.isdisjoint(text) and not (self._call_starts and text[-1].isspace()):
                return (self._chunk(text),)
            self._pending += text
            parts = [*self._drain(final=False)]
        else:
            parts = [*self._added(token)]
        if not self._unstopped:
            self._stops = self._later_stops
        special = self._fresh or self._in_header or self._unstopped or self.stopped or self._call is not None
        self._is_plain = not special and not (self._opens_bare and not self.answer)
        self._leads = frozenset(mark[0] for mark in self._markers())
        return parts

    def _added(self, token: int) -> Iterator[ReplyPart]:
        if self.stopped:
            return
        self._unstopped = max(self._unstopped - 1, 0)
        if token not in self._hidden or self._is_of_call(token):
            self._pending += self._detokenizer.add(token)
            yield from self._drain(final=False)
        elif not self._in_thinking:  # a mark is never shown, but a stop text may end with it
            mark = self._tokenizer.token_text(token)
            match = first_of(self._pending + mark, tuple(stop for stop in self._stops if stop.endswith(mark)))
            if match is not None:
                yield from self._end(*match)

    def add_last(self, token: int, score: "Score | None" = None) -> None:
        self._ids.append(token)
        if score is not None:
            self._logprobs.append(self._described(token, score))

    def take_tokens(self) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
        taken = tuple(self._ids), tuple(self._logprobs)
        self._ids.clear()
        self._logprobs.clear()
        self._guessed = 0
        return taken

    def _described(self, token: int, score: "Score") -> TokenLogprob:
        text = self._tokenizer.token_text
        others = tuple(Alternative(each, text(each), value) for each, value in score.top)
        return TokenLogprob(token, text(token), score.logprob, others)

    def _is_of_call(self, token: int) -> bool:
        is_inside = self._call is not None and self._is_marked and token not in self._tokenizer.eos_ids
        return is_inside or token in self._call_marks

    def finish(self, *, cut: bool = False) -> Sequence[ReplyPart]:
        """Return what is left to show. cut: the model did not end the reply."""
        if self.stopped:
            return ()
        self._is_cut = cut
        self._pending += self._detokenizer.flush()
        return [*self._drain(final=True)]

    def _end(self, position: int, mark: str) -> Iterator[TextChunk]:
        yield from self._show(self._pending[:position])
        self.ended = mark in self._ends
        self.stopped_by = None if self.ended else mark
        self._pending = ""

    def _drain(self, *, final: bool) -> Iterator[ReplyPart]:
        channels = self._tokenizer.writes_channels
        while not self.stopped:
            if self._call is not None:
                has_ended = yield from self._grow_call(self._call, final=final)
                if not has_ended:
                    return
                continue
            if self._opens_bare and not (self.answer or self._in_thinking) and self._pending.strip():
                bare = BARE_CALL.match(self._pending, partial=True)
                if bare is not None and not bare.partial:
                    self._open_call(bare.start("mark"), bare["mark"])
                    continue
                if bare is not None and not final:
                    return
            if self._in_header:
                has_left = yield from self._leave_header()
                if has_left:
                    continue
                if final:
                    self._pending = ""  # the reply was cut inside a header
                return
            match = self._first_mark()
            if match is None:
                yield from self._show(self._take_ready(final=final))
                return
            position, marker = match
            if marker in self._ends or (marker in self._stops and not self._in_thinking):
                yield from self._end(position, marker)
            elif marker in self._call_starts:
                before = self._pending[:position].rstrip()  # white space before a call is no text
                yield from self._show(before)
                self._pending = self._pending[len(before) :]
                self._open_call(position - len(before), marker)
            elif channels:
                yield from self._show(self._pending[:position])
                self._pending, self._in_header = self._pending[position:], True
            else:
                if not self._is_padding(position):
                    yield from self._show(self._pending[:position])
                self._pending = self._pending[position + len(marker) :]
                self._in_thinking = not self._in_thinking and marker in self._thinking[:1]
                self._fresh = not (self._in_thinking and self.thinking)
                self._pending = ("" if self._fresh else "\n\n") + self._pending

    def _open_call(self, position: int, marker: str) -> None:
        """Begin to read a call whose marker is at ``position``: what is before it is white space."""
        assert self._reader is not None
        has_mark = marker == self._reader.dialect.start
        begin = position + (len(marker) if has_mark else 0)
        bare = 0 if has_mark else len(marker)
        quiet = self._in_thinking or marker == FENCE
        self._call = OpenCall(self._reader, self._pending[:begin], ends=self._ends, bare=bare, quiet=quiet)
        self._pending = self._pending[begin:]

    def _leave_header(self) -> Generator[ReplyPart, None, bool]:
        header, mark, text = self._pending.partition("<|message|>")
        if not mark:
            return False
        lost, _, header = header.rpartition("<|start|>")
        if (said := CHANNEL_MARK.sub("", lost)).strip() not in ("", "analysis", "commentary", "final"):
            self._in_thinking, self._in_header = True, False  # a message that lacks its own header
            yield from self._show(said)
        named = [*CHANNEL.finditer(header)]
        if self._reader is not None and (called := CALLED_FUNCTION.search(header)) is not None:
            self._call = OpenCall(self._reader, header + mark, called.group(1), ends=CHANNEL_MARKS)
            self._pending, self._in_header, self._in_thinking = text, False, False
            return True
        self._in_thinking = bool(named) and named[-1].group(1) == "analysis"
        again = bool(self.answer.strip()) and not self._in_thinking
        self._pending, self._in_header, self._fresh = ("\n\n" if again else "") + text, False, not again
        return True

    def _grow_call(self, call: OpenCall, *, final: bool) -> Generator[ReplyPart, None, bool]:
        parts = call.feed(self._pending)
        if final:
            parts += call.end(cut=self._is_cut)
        self._pending = ""
        for part in parts:
            if isinstance(part, str):
                yield from self._show(part)
                continue
            if isinstance(part, ToolCall):
                self.calls.append(part)
                self._in_thinking = False
            yield part
        if call.is_over:
            self._pending, self._call = call.rest, None
        return call.is_over

    def _take_ready(self, *, final: bool) -> str:
        waits = 0 if final else held_back(self._pending, self._markers())
        if not final and self._call_starts:  # a call may follow
            waits = len(self._pending) - len(self._pending[: len(self._pending) - waits].rstrip())
        ready = self._pending[: len(self._pending) - waits]
        if not final and self._is_padding(len(ready)):
            return ""  # thinking may begin after it
        self._pending = self._pending[len(ready) :]
        return ready

    def _is_padding(self, position: int) -> bool:
        may_think = self._tokenizer.thinking is not None and not self.answer and not self.thinking
        return self._fresh and may_think and not self._in_thinking and not self._pending[:position].strip()

    def _first_mark(self) -> tuple[int, str] | None:
        """Return the first mark, and its place: not what only talks of thinking."""
        at, markers = 0, self._markers()
        while (found := first_of(self._pending[at:], markers)) is not None:
            place, mark = at + found[0], found[1]
            if self._in_thinking or mark not in self._thinking or self._begins_line(place):
                return place, mark
            at = place + len(mark)
        return None

    def _begins_line(self, place: int) -> bool:
        before = self.answer + self._pending[:place]
        return not before.strip() or (before.rstrip(" \t").endswith("\n") and before.count("```") % 2 == 0)

    def _markers(self) -> tuple[str, ...]:
        call = self._call_starts
        if self._tokenizer.writes_channels:
            return CHANNEL_MARKS + (() if self._in_thinking else self._stops)
        if self._in_thinking:
            return (*self._thinking[1:], *call, *self._ends)
        return (*self._thinking, *call, *self._ends, *self._stops)

    def _show(self, text: str) -> Iterator[TextChunk]:
        if self._fresh and self._tokenizer.thinking:
            text = text.lstrip("\n")
        if self.calls and not self._in_thinking:
            text = text if text.strip() else ""
        if not text:
            return
        self._fresh = False
        yield self._chunk(text)

    def _chunk(self, text: str) -> TextChunk:
        kind: TextKind = "answer"
        if self._in_thinking:
            kind = "thinking"
            self.thinking += text
        else:
            self.answer += text
        ids, logprobs = tuple(self._ids), tuple(self._logprobs)
        guessed = ((0, len(text)),) if self._guessed and self._guessed == len(ids) else ()
        self._ids.clear()
        self._logprobs.clear()
        self._guessed = 0
        return TextChunk(text, kind, ids, logprobs, guessed)


class ThinkingBudget:
    """Ends a reply's thinking after ``most`` tokens, and a few more until the character is whole.

    thought: thinking tokens of a continued reply. ended_at: the budget, once it has ended the thinking.
    """

    def __init__(self, most: int | None, text: ReplyText, tokenizer: Tokenizer, thought: int = 0) -> None:
        self.ended_at: int | None = None
        self._most, self._count = most, thought
        self._text, self._tokenizer = text, tokenizer
        self._thinks = False  # at the token before

    @property
    def unforced(self) -> int | None:
        return None if self._most is None or self.ended_at is not None else self._most - self._count

    def ending(self) -> list[int]:
        """Return, once, the ids that end the thinking; call before the first token and after each."""
        thought, self._thinks = self._thinks, self._text.thinks
        if self._most is None or self.ended_at is not None or not self._thinks:
            return []
        self._count += thought
        unsettled = not self._text.is_settled and self._count < self._most + LONGEST_PENDING
        if self._count < self._most or unsettled:
            return []
        self.ended_at = self._most
        return self._tokenizer.thinking_end(self._text.thinking)


# The prefix function since an anchor (Knuth, Morris and Pratt, 1977) gives the shortest period in amortised
# constant time. The anchor moves up where nothing repeats, so text before a loop does not hide it.


ENOUGH_TOKENS = 512  # of repetition: a table of 12 rows of 12 zeros has 444
ENOUGH_REPEATS = 4  # of a long period: no text repeats a paragraph so often, word for word
REACHES = (64, 192, 512, 1536)  # tokens until an anchor moves up: twice the longest period; short ones are found soon


class Repetition:
    """The shortest period of the newest tokens. reach: tokens without repeat that move the anchor up."""

    def __init__(self, reach: int) -> None:
        self._reach = reach
        self._tokens: list[int] = []
        self._borders: list[int] = []  # of each prefix, the longest proper one that also ends it

    @property
    def length(self) -> int:
        return len(self._tokens)

    @property
    def period(self) -> int:
        return len(self._tokens) - self._borders[-1] if self._borders else 0

    def add(self, token: int) -> int:
        tokens, borders = self._tokens, self._borders
        border = borders[-1] if borders else 0
        while border and tokens[border] != token:
            border = borders[border - 1]
        if tokens and tokens[border] == token:
            border += 1
        tokens.append(token)
        borders.append(border)
        if len(tokens) >= self._reach and 2 * border < len(tokens):
            tokens.clear()
            borders.clear()
        return len(tokens)


class LoopWatch:
    """Detects loops, and ends a reply for them.

    grace: tokens after detection. least: tokens before any end. keeps_going: asked at the end of the grace.
    """

    def __init__(
        self,
        *,
        check: bool = True,
        grace: int = 0,
        least: int = 0,
        keeps_going: Callable[[], bool] = lambda: False,
    ) -> None:
        self.ends_reply = False
        self._repetitions = tuple(map(Repetition, REACHES)) if check else ()
        self._grace, self._least, self._keeps_going = grace, least, keeps_going
        self._count = 0
        self._ends_at: int | None = None  # tokens of the reply, in a loop that was told

    def add(self, token: int) -> LoopFound | None:
        self._count += 1
        period = 0
        for each in self._repetitions:
            if each.add(token) >= ENOUGH_TOKENS and each.length >= ENOUGH_REPEATS * each.period:
                period = each.period
        told = self._ends_at is not None
        if not period:
            self._ends_at = None
            return LoopFound(0, None) if told else None
        if self._ends_at is None:
            self._ends_at = max(self._count + self._grace, self._least)
        if self._count >= self._ends_at:
            self.ends_reply = not self._keeps_going()
            self._repetitions, self._ends_at = (), None
            return None
        return None if told else LoopFound(period, self._ends_at)
