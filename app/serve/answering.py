"""Answers an HTTP request: bounded body, replies collected or streamed, cancelled when the client disconnects."""

import asyncio
import json
import time
import zlib
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from tokamac.engine.events import (
    Event,
    Finished,
    ModelSpec,
    PrefillProgress,
    TextChunk,
    TokenLogprob,
    ToolCall,
    Truncated,
)

from ..reports import cache_use
from .engine import ReplyFeed, ServedEngine
from .request import RequestError, ServedRequest, stopping, unexpected


@dataclass(slots=True)
class ServedReply:
    choice: int
    of_page: bool = False  # a web page reads it: it is told nothing of other prompts
    ignored: tuple[str, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    thinking: str = ""
    thinking_tokens: int = 0
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    thinking_logprobs: list[TokenLogprob] = field(default_factory=list)
    truncated: Truncated | None = None
    load_s: float | None = None
    ended: Finished | None = None

    def add(self, event: Event) -> None:
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
        assert self.ended is not None
        return self.ended

    @property
    def reason(self) -> str:
        return "tool_calls" if self.calls and self.end.reason == "cancelled" else self.end.reason

    @property
    def generated_tokens(self) -> int:
        return self.end.metrics.generated_tokens

    @property
    def figures(self) -> dict[str, Any]:
        more: dict[str, Any] = {} if self.truncated is None else {"truncated": asdict(self.truncated)}
        if self.ignored:
            more["ignored"] = list(self.ignored)
        if mistyped := {call.id: list(call.mistyped) for call in self.calls if call.mistyped}:
            more["mistyped"] = mistyped
        if self.end.reason == "loop":
            more["loop"] = True
        if self.end.cache is not None:
            more["cache"] = cache_use.as_json(self.end.cache, texts=not self.of_page)
        if self.load_s is not None:
            more["load_s"] = self.load_s
        if self.end.doubts:
            more["doubts"] = list(self.end.doubts)
        return {**asdict(self.end.metrics), **more}


BROKEN = "\ufffd"  # in a token that is a part of a character


def last_logprobs(end: Finished) -> tuple[TokenLogprob, ...]:
    """Return logprobs of tokens after the last text, without the end mark or stop text that ended the reply."""
    return end.logprobs if end.reason in ("length", "loop") else ()


def score(each: TokenLogprob) -> dict[str, Any]:
    def one(text: str, logprob: float) -> dict[str, Any]:
        read = None if BROKEN in text else list(text.encode("utf-8", "surrogatepass"))
        return {"token": text, "logprob": logprob, "bytes": read}

    return {**one(each.text, each.logprob), "top_logprobs": [one(other.text, other.logprob) for other in each.top]}


class Exchange(Protocol):
    """A request and its answer in the format of one API.

    ping: bytes to send while a client waits, or b"". media_type: of a stream. load_s: until its model was in memory.
    ignored: fields of the request that changed nothing.
    """

    request: ServedRequest
    ping: bytes
    media_type: str = "text/event-stream; charset=utf-8"
    load_s: float = 0.0
    ignored: Collection[str]

    def whole(self, replies: Sequence[ServedReply]) -> dict[str, Any]:
        """Return the body for a client that doesn't stream."""

    def chunks(self, reply: ServedReply, event: Event) -> Iterable[bytes]:
        """Yield the stream chunks for an event, which ``reply`` has already received."""

    def last(self, replies: Sequence[ServedReply]) -> Iterable[bytes]:
        """Yield the end of the stream, once all replies have ended."""

    def failed(self, error: RequestError) -> bytes:
        """Return the end of a stream that failed."""


def as_json(value: object) -> bytes:
    """Return ASCII JSON; a lone surrogate from a model stays an escape."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def sse(data: object, event: str = "") -> bytes:
    """Return a server-sent event (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""
    named = f"event: {event}\n".encode() if event else b""
    return named + b"data: " + as_json(data) + b"\n\n"


# A stream's HTTP status waits for the first engine event, so that a refused prompt is a plain 400; while waiting longer, SSE
# comments are sent. A slow client delays only its own replies (``ServedEngine``).


LONGEST_BODY = 32 * 2**20  # bytes: a conversation that fills a context of a million tokens is about 5 MB
PACKED = ("gzip", "deflate")
BODY_S = 30.0  # how long a body may take to arrive
WRITE_S = 60.0  # how long a client may take to read what its connection holds
FIRST_S = 10.0  # after how long a stream begins although the engine has said nothing yet: the reply waits for its turn
PING_S = 10.0
HEADERS = [(b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]


T = TypeVar("T")


class ClientLeftError(Exception):
    """The client disconnected or stopped reading."""


@dataclass(slots=True)
class RequestOutcome:
    """What came of a request, for the log, which never contains user text, and for /v1/requests. id: sent with the answer."""

    id: str = ""
    replies: Sequence[ServedReply] = ()
    model: str = ""
    client: str = ""
    of_page: bool = False
    error: str = ""
    body_bytes: int = 0

    def loaded(self, seconds: float) -> None:
        """Note that the request waited so long until its model was in memory."""
        for each in self.replies:
            each.load_s = seconds


def _too_long() -> RequestError:
    return RequestError(
        f"the body has more than {LONGEST_BODY:,} bytes", "Send less.", status=413, code="body_too_large"
    )


async def read_body(request: Request) -> bytes:
    """Return a body, unpacked. Raises RequestError for one that is too large, too slow, or packed in another way than it says."""
    too_long, packed = _too_long(), request.headers.get("content-encoding", "identity").strip().lower()
    if packed not in (*PACKED, "identity"):
        raise RequestError(
            f"a body packed as {packed!r:.40} can't be read", f"Send it as it is, or as {' or '.join(PACKED)}.", status=415,
            code="unsupported_encoding",
        )  # fmt: skip
    said = request.headers.get("content-length", "")
    if said.isdecimal() and int(said) > LONGEST_BODY:
        raise too_long
    pieces, length = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                length += len(piece)
                if length > LONGEST_BODY:
                    raise too_long
                pieces.append(piece)
    except TimeoutError:
        raise RequestError(
            f"the body took more than {BODY_S:g} s", "Send it faster.", status=408, code="timeout"
        ) from None
    body = b"".join(pieces)
    return await asyncio.to_thread(unpacked, body) if packed in PACKED else body


def unpacked(body: bytes) -> bytes:
    """Return what a body in gzip or zlib holds. Raises RequestError, without unpacking more than ``LONGEST_BODY``."""
    reader = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        found = reader.decompress(body, LONGEST_BODY + 1)
    except zlib.error:
        found = b""
    if len(found) > LONGEST_BODY:
        raise _too_long()
    if not reader.eof:
        raise RequestError(
            "the body is not whole gzip or deflate", "Pack it again, or send it as it is.", code="invalid_json"
        )
    return found


class Answering:
    """Runs the replies of one exchange and writes the response.

    Args:
        as_error: formats errors for the API.
        stopping: set when the server ends.
        outcome: filled for the log.
    """

    def __init__(
        self,
        engine: ServedEngine,
        model: ModelSpec,
        exchange: Exchange,
        as_error: Callable[[RequestError], Mapping[str, Any]],
        stopping: asyncio.Event,
        *,
        outcome: RequestOutcome,
    ) -> None:
        self._engine, self._model, self._exchange, self._as_error = engine, model, exchange, as_error
        self._stopping, self._outcome = stopping, outcome
        count = len(exchange.request.prompts) * exchange.request.n
        ignored = tuple(exchange.ignored)
        self._records = outcome.replies = [
            ServedReply(number, of_page=outcome.of_page, ignored=ignored) for number in range(count)
        ]
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """ASGI application; replies are cancelled when it exits."""
        self._send = send
        try:
            try:
                await while_wanted(self._answered(), receive, self._stopping)
            except RequestError as error:
                await self._fail(error)
        except ClientLeftError:
            self._outcome.error = "the client left"

    async def _answered(self) -> None:
        try:
            async with self._engine.replies(self._exchange.request, self._model) as replies:
                if self._exchange.request.stream:
                    await self._stream(replies)
                else:
                    await self._whole(replies)
        except RequestError as error:
            await self._fail(error)
        except ClientLeftError:
            raise
        except Exception:
            await self._fail(unexpected())
            raise  # for the log

    async def _whole(self, replies: ReplyFeed) -> None:
        while not self._have_ended():
            for number, event in await replies.next():
                if isinstance(event, RequestError):
                    raise event
                if self._is_told(self._records[number], event):
                    self._records[number].add(event)
        await self._write_json(200, self._exchange.whole(self._records))

    async def _stream(self, replies: ReplyFeed) -> None:
        exchange, within_s = self._exchange, FIRST_S
        while not self._have_ended():
            found = await replies.next(within_s)
            out = [] if found else [exchange.ping]
            within_s = PING_S
            for number, event in found:
                if isinstance(event, RequestError):
                    if out:
                        await self._write(b"".join(out))
                    raise event
                record = self._records[number]
                if self._is_told(record, event):
                    record.add(event)
                    out += exchange.chunks(record, event)
            if self._have_ended():
                out += exchange.last(self._records)
            await self._write(b"".join(out), more=not self._have_ended())

    def _have_ended(self) -> bool:
        return all(record.ended is not None for record in self._records)

    def _is_told(self, record: ServedReply, event: object) -> bool:
        """Whether to send an event: after a reply's final call only its end is sent."""
        if not self._exchange.request.one_call or not record.calls:
            return True
        return isinstance(event, Finished)

    async def _fail(self, error: RequestError) -> None:
        self._outcome.error, error.request_id = error.code, self._outcome.id
        if error.code == "invalid_schema":
            error.param = self._exchange.request.form
        if self._has_begun:
            await self._write(self._exchange.failed(error), more=False)
        else:
            await self._write_json(error.status, self._as_error(error), error.retry_after_s)

    async def _write(self, body: bytes, *, more: bool = True) -> None:
        if not self._has_begun:
            self._has_begun = True
            headers = [(b"content-type", self._exchange.media_type.encode()), *HEADERS]
            await self._sent({"type": "http.response.start", "status": 200, "headers": headers})
        if body or not more:
            await self._sent({"type": "http.response.body", "body": body, "more_body": more})

    async def _write_json(self, status: int, told: Mapping[str, Any], retry_after_s: int | None = None) -> None:
        body = as_json(told)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if retry_after_s is not None:
            headers.append((b"retry-after", str(retry_after_s).encode()))
        self._has_begun = True
        await self._sent({"type": "http.response.start", "status": status, "headers": headers})
        await self._sent({"type": "http.response.body", "body": body})

    async def _sent(self, message: dict[str, Any]) -> None:
        """Send. Raises ClientLeftError if the client stopped reading."""
        try:
            async with asyncio.timeout(WRITE_S):
                await self._send(message)
        except (TimeoutError, OSError):
            raise ClientLeftError from None


async def while_wanted(work: Coroutine[Any, Any, T], receive: Receive, stop: asyncio.Event) -> T:
    """Await ``work``, cancelled on disconnect (ClientLeftError) or server stop (RequestError)."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((task, gone, stopped), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeftError if gone.done() else stopping()
    finally:
        for each in (task, gone, stopped):
            await _ended(each)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ended(task: "asyncio.Future[Any]") -> None:
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()


App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Timed:
    def __init__(self) -> None:
        self._began_s = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began_s
