"""Answers one request over HTTP: reads its body within bounds, follows its replies, and ends them when the client goes away.

A stream's status waits for the engine's first word, so that a prompt that is refused is a plain 400. A client that waits longer is
sent comments that say so. A client that reads slowly holds its own replies up (``ServedEngine``), and nobody's else.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from tokamac.engine.events import Finished

from ..backend.protocol import ModelInfo
from .engine import ReplyFeed, ServedEngine
from .errors import RequestError, stopping, unexpected
from .record import Exchange, ServedReply, as_json

LONGEST_BODY = 32 * 2**20
"""Bytes: a conversation that fills a context of a million tokens is about 5 MB."""
BODY_S = 30.0
"""How long a body may take to arrive."""
WRITE_S = 60.0
"""How long a client may take to read what its connection holds."""
FIRST_S = 10.0
"""After how long a stream begins although the engine has said nothing yet: the reply waits for its turn."""
PING_S = 10.0
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


T = TypeVar("T")


class ClientLeftError(Exception):
    """The client closed its connection, or stopped reading."""


@dataclass(slots=True)
class RequestOutcome:
    """What the log tells of a request, beside its path and status: nothing that anybody wrote."""

    replies: Sequence[ServedReply] = ()
    error: str = ""


async def read_body(request: Request) -> bytes:
    """Return a request's body. Raises RequestError for one that is too long, or too long on its way."""
    too_long = RequestError(
        f"the body has more than {LONGEST_BODY:,} bytes", "Send less.", status=413, code="body_too_large"
    )
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
    return b"".join(pieces)


class Answering:
    """Makes the replies of one exchange and writes the answer.

    Args:
        engine: makes them.
        model: what the exchange was read for.
        exchange: what was asked, and the words of the answer.
        as_error: writes an error in the words of the interface.
        stopping: set when the server ends.
        outcome: filled for the log.
    """

    def __init__(
        self,
        engine: ServedEngine,
        model: ModelInfo,
        exchange: Exchange,
        as_error: Callable[[RequestError], Mapping[str, Any]],
        stopping: asyncio.Event,
        *,
        outcome: RequestOutcome,
    ) -> None:
        self._engine, self._model, self._exchange, self._as_error = engine, model, exchange, as_error
        self._stopping, self._outcome = stopping, outcome
        count = len(exchange.request.prompts) * exchange.request.n
        self._records = outcome.replies = [ServedReply(number) for number in range(count)]
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Answer, as an ASGI application. The replies end with it, however it ends."""
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
                    self._records[number].take(event)
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
                    record.take(event)
                    out += exchange.told(record, event)
            if self._have_ended():
                out += exchange.last(self._records)
            await self._write(b"".join(out), more=not self._have_ended())

    def _have_ended(self) -> bool:
        return all(record.ended is not None for record in self._records)

    def _is_told(self, record: ServedReply, event: object) -> bool:
        """Whether the client is told of it: of a reply that ends with its first call, nothing but its end follows that."""
        if not self._exchange.request.one_call or not record.calls:
            return True
        return isinstance(event, Finished)

    async def _fail(self, error: RequestError) -> None:
        self._outcome.error = error.code
        if error.code == "invalid_schema":
            error.param = self._exchange.request.form
        if self._has_begun:
            await self._write(self._exchange.failed(error), more=False)
        else:
            await self._write_json(error.status, self._as_error(error), error.retry_after_s)

    async def _write(self, body: bytes, *, more: bool = True) -> None:
        if not self._has_begun:
            self._has_begun = True
            await self._sent({"type": "http.response.start", "status": 200, "headers": HEADERS})
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
        """Send, unless the client stopped reading. Raises ClientLeftError."""
        try:
            async with asyncio.timeout(WRITE_S):
                await self._send(message)
        except (TimeoutError, OSError):
            raise ClientLeftError from None


async def while_wanted(work: Coroutine[Any, Any, T], receive: Receive, stop: asyncio.Event) -> T:
    """Return what ``work`` returns. It is cancelled once nobody waits for it.

    Raises ClientLeftError where the client has left, and RequestError where the server is stopped.
    """
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
    """Return once the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ended(task: "asyncio.Future[Any]") -> None:
    """Cancel a task and wait for its end, whatever that is."""
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()


App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Timed:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    @property
    def seconds(self) -> float:
        """So many."""
        return time.monotonic() - self._began_s
