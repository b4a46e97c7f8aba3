"""One reply as a client's answer needs it: collected from the engine's events, with the figures that go beside it."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from tokamac.engine.events import (
    Event,
    Finished,
    PrefillProgress,
    TextChunk,
    TokenLogprob,
    ToolCall,
    Truncated,
)

from .errors import RequestError
from .request import ServedRequest

BROKEN = "\ufffd"


@dataclass(slots=True)
class ServedReply:
    """What came of a reply so far. choice: which of the request's. logprobs: of the answer, apart from the thinking's."""

    choice: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    thinking: str = ""
    thinking_tokens: int = 0
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    thinking_logprobs: list[TokenLogprob] = field(default_factory=list)
    truncated: Truncated | None = None
    ended: Finished | None = None

    def take(self, event: Event) -> None:
        """Add what the engine said."""
        match event:
            case PrefillProgress(_, total, cached):
                self.prompt_tokens, self.cached_tokens = total, cached
            case TextChunk(text, "thinking", ids, logprobs):
                self.thinking += text
                self.thinking_tokens += len(ids)
                self.thinking_logprobs += logprobs
            case TextChunk(text, _, _, logprobs):
                self.text += text
                self.logprobs += logprobs
            case ToolCall(problem=""):
                self.calls.append(event)
            case Truncated():
                self.truncated = event
            case Finished():
                self.ended = event
                self.logprobs += last_logprobs(event)

    @property
    def end(self) -> Finished:
        """The end of a reply that has ended."""
        assert self.ended is not None
        return self.ended

    @property
    def reason(self) -> str:
        """Why it ended: of a reply that was ended after a call of a tool, that call."""
        return "tool_calls" if self.calls and self.end.reason == "cancelled" else self.end.reason

    @property
    def generated_tokens(self) -> int:
        """Tokens that were written."""
        return self.end.metrics.generated_tokens

    @property
    def figures(self) -> dict[str, Any]:
        """The field ``tokamac`` of an answer: what was measured, and what else is to be known of the reply."""
        more: dict[str, Any] = {} if self.truncated is None else {"truncated": asdict(self.truncated)}
        if self.end.doubts:
            more["doubts"] = list(self.end.doubts)
        return {**asdict(self.end.metrics), **more}


def last_logprobs(end: Finished) -> tuple[TokenLogprob, ...]:
    """Return those of the tokens after the last text, but for what ended the reply: an end mark, a stop text."""
    return end.logprobs if end.reason == "length" else ()


class Exchange(Protocol):
    """One request in the words of an interface, and the answer in the same.

    request: what it asks of the engine. ping: what may be sent while a client waits, or b"".
    """

    request: ServedRequest
    ping: bytes

    def whole(self, replies: Sequence[ServedReply]) -> dict[str, Any]:
        """Return the answer to a client that waits for all of it."""

    def told(self, reply: ServedReply, event: Event) -> Iterable[bytes]:
        """Yield what a client that reads a stream is told of an event, which ``reply`` has taken."""

    def last(self, replies: Sequence[ServedReply]) -> Iterable[bytes]:
        """Yield the end of the stream, once all replies have ended."""

    def failed(self, error: RequestError) -> bytes:
        """Return the end of a stream that failed."""


def as_json(value: object) -> bytes:
    """Return JSON in ASCII: a lone surrogate that a model wrote stays an escape."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def sse(data: object, event: str = "") -> bytes:
    """Return one server-sent event (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""
    named = f"event: {event}\n".encode() if event else b""
    return named + b"data: " + as_json(data) + b"\n\n"


def token_bytes_of(text: str) -> list[int] | None:
    """Return the bytes of a token's text; None where it is a part of a character, whose bytes are not known."""
    return None if BROKEN in text else list(text.encode("utf-8", "surrogatepass"))


def openai_usage(replies: Sequence[ServedReply], n: int) -> dict[str, Any]:
    """Return the usage of all replies; a prompt counts once, however many replies there are to it."""
    firsts = replies[::n]
    prompt, generated = (
        sum(each.end.metrics.prompt_tokens for each in firsts),
        sum(each.generated_tokens for each in replies),
    )
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(each.end.metrics.cached_tokens for each in firsts)},
        "completion_tokens_details": {"reasoning_tokens": sum(each.thinking_tokens for each in replies)},
    }


def openai_error(error: RequestError) -> dict[str, Any]:
    """Return an error as OpenAI's interface writes it."""
    kind = (
        "invalid_request_error" if error.status < 429 else "rate_limit_error" if error.status == 429 else "server_error"
    )
    told = {"message": error.one_line(), "type": kind, "param": error.param or None, "code": error.code}
    return {"error": told}
