"""The server's paths, as a Starlette application: each request is let in, read, answered, and written to the log in one line."""

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .. import units
from ..backend.protocol import PromptTokens
from ..sanitise import sanitise_line
from .answering import Answering, ClientLeftError, RequestOutcome, Timed, read_body, while_wanted
from .anthropic_messages import MessageExchange, anthropic_error, check_counted, count_of
from .errors import RequestError, unexpected
from .fields import parsed
from .model_pool import ModelPool
from .openai_chat import ChatExchange
from .openai_completions import CompletionExchange
from .openai_responses import ResponseExchange
from .record import Exchange, ServedReply, as_json, openai_error
from .request import ServedModel
from .security import Gate

Reading = Callable[[Mapping[str, Any], ServedModel], Exchange]
ErrorWriter = Callable[[RequestError], Mapping[str, Any]]
Runner = Callable[..., Awaitable[Any]]
"""Calls a function with what is given, and returns what it returns."""
LONG_BODY = 2**18
"""Bytes from which a body is read in a thread: other streams go on meanwhile."""


class JSONAnswer(Response):
    """A JSON object."""

    media_type = "application/json"

    def __init__(self, told: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(as_json(told), status, headers)


class ServerApp:
    """What the server answers.

    Args:
        pool: the models, whose engines make the replies.
        gate: who may ask.
        log: told a line for each request.
    """

    def __init__(self, pool: ModelPool, gate: Gate, log: Callable[[str], None]) -> None:
        self.stopping = asyncio.Event()
        self._pool, self._gate, self._log = pool, gate, log
        asks = {
            "/v1/chat/completions": (ChatExchange, openai_error),
            "/v1/completions": (CompletionExchange, openai_error),
            "/v1/responses": (ResponseExchange, openai_error),
            "/v1/messages": (MessageExchange, anthropic_error),
        }
        routes = [
            Route(path, self._endpoint(partial(self._reply, reading, error), error), methods=["POST"])
            for path, (reading, error) in asks.items()
        ]
        count = self._endpoint(self._count, anthropic_error)
        routes += [
            Route("/v1/messages/count_tokens", count, methods=["POST"]),
            Route("/v1/models", self._endpoint(self._models, openai_error), methods=["GET"]),
            Route("/v1/models/{name:path}", self._endpoint(self._one_model, openai_error), methods=["GET"]),
            Route("/health", self._endpoint(self._health, openai_error), methods=["GET"]),
        ]
        self._starlette = Starlette(routes=routes, exception_handlers={HTTPException: self._no_such_path})
        self._starlette.router.redirect_slashes = False  # before anybody was let in

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as an ASGI application."""
        origin = None if scope["type"] != "http" else Request(scope).headers.get("origin")
        if not self._gate.allows(origin):
            await self._starlette(scope, receive, send)
            return
        assert origin is not None
        allowed = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]
        if scope["method"] == "OPTIONS":
            asked = Request(scope).headers.get("access-control-request-headers", "*")
            allowed += [(b"access-control-allow-headers", asked.encode("latin-1")),
                        (b"access-control-allow-methods", b"GET, POST")]  # fmt: skip
            await send({"type": "http.response.start", "status": 204, "headers": allowed})
            await send({"type": "http.response.body", "body": b""})
            return

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *allowed]}
            await send(message)

        await self._starlette(scope, receive, sending)

    def _endpoint(
        self, answer: Callable[[Request, RequestOutcome], Awaitable[Any]], as_error: ErrorWriter
    ) -> Callable[[Request], Awaitable[Any]]:
        """Return what lets a request in, answers it and logs it. Whatever goes wrong is an answer."""

        async def endpoint(request: Request) -> Any:
            outcome, took = RequestOutcome(), Timed()
            try:
                self._gate.check(request.headers)
                made = await answer(request, outcome)
            except RequestError as error:
                outcome.error = error.code
                made = _refusal(error, as_error)
            except (ClientDisconnect, ClientLeftError):
                outcome.error = "the client left"
                made = Response(status_code=499)
            except Exception as error:
                self._log_failure(error)
                failure = unexpected()
                outcome.error = failure.code
                made = _refusal(failure, as_error)
            return self._logged(request, made, outcome, took)

        return endpoint

    def _logged(self, request: Request, answer: Any, outcome: RequestOutcome, took: Timed) -> Any:
        """Return the answer as what writes a line of the log after it."""

        async def answered(scope: Scope, receive: Receive, send: Send) -> None:
            status = 0

            async def sending(message: Any) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            try:
                await answer(scope, receive, sending)
            except Exception as error:
                self._log_failure(error)
                outcome.error = "internal"
            finally:
                self._log(_line(request, status, outcome, took.seconds))

        return _Application(answered)

    async def _reply(self, reading: Reading, as_error: ErrorWriter, request: Request, outcome: RequestOutcome) -> Any:
        body, run = await self._read(request)
        async with AsyncExitStack() as held:
            leasing = held.enter_async_context(self._pool.lease(_name(body)))
            resident = await while_wanted(leasing, request.receive, self.stopping)
            model = resident.served
            exchange = await run(reading, body, model)
            answering = Answering(resident.engine, model.info, exchange, as_error, self.stopping, outcome=outcome)
            lease = held.pop_all()

        async def answered(scope: Scope, receive: Receive, send: Send) -> None:
            async with lease:
                await answering(scope, receive, send)

        return answered

    async def _read(self, request: Request) -> tuple[Mapping[str, Any], Runner]:
        """Return a body, and what runs the rest of reading it."""
        body = await read_body(request)
        run: Runner = _at_once if len(body) < LONG_BODY else asyncio.to_thread
        return await run(parsed, body), run

    async def _count(self, request: Request, outcome: RequestOutcome) -> JSONAnswer:  # noqa: ARG002
        body, run = await self._read(request)
        told = await while_wanted(self._tokens(body, run), request.receive, self.stopping)
        check_counted(told.error)
        return JSONAnswer(count_of(len(told.tokens)))

    async def _tokens(self, body: Mapping[str, Any], run: Runner) -> PromptTokens:
        async with self._pool.lease(_name(body)) as resident:
            exchange = await run(partial(MessageExchange, counting=True), body, resident.served)
            asked = exchange.request
            (prompt,) = asked.prompts
            return await resident.engine.tokens("", prompt, asked.template, continues=asked.continues)

    async def _models(self, request: Request, outcome: RequestOutcome) -> JSONAnswer:  # noqa: ARG002
        entries = [model_entry(each.served) for each in self._pool.loaded]
        return JSONAnswer(models_list([*entries, *map(unloaded_entry, await self._pool.offered())]))

    async def _one_model(self, request: Request, outcome: RequestOutcome) -> JSONAnswer:  # noqa: ARG002
        id = await self._pool.meant(request.path_params["name"])
        found = next((each for each in self._pool.loaded if each.id == id), None)
        return JSONAnswer(unloaded_entry(id) if found is None else model_entry(found.served))

    async def _health(self, request: Request, outcome: RequestOutcome) -> JSONAnswer:  # noqa: ARG002
        loaded = self._pool.loaded
        engine = self._pool.first_engine
        well = engine.state == "ready" or any(each.engine.state == "ready" for each in loaded)
        told: dict[str, Any] = {"status": "ok" if well else engine.state, "model": self._pool.default.id}
        told["loaded"] = [each.served.id for each in loaded]
        if problem := next((each.engine.problem for each in loaded if each.engine.problem), ""):
            told["problem"] = problem
        replies, waiting = self._pool.busy
        told |= {"replies": replies, "waiting": waiting, "parallel": engine.admission.parallel}
        return JSONAnswer(told, 200 if well else 503)

    async def _no_such_path(self, request: Request, error: Exception) -> Any:
        async def refused(request: Request, outcome: RequestOutcome) -> JSONAnswer:  # noqa: ARG001
            assert isinstance(error, HTTPException)
            known = "POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages; GET /v1/models, /health"
            wrong = f"{request.method} {request.scope['path']:.80} is not answered here"
            raise RequestError(wrong, f"There are {known}.", status=error.status_code, code="no_such_path")

        anthropic = request.scope["path"].startswith("/v1/messages")
        return await self._endpoint(refused, anthropic_error if anthropic else openai_error)(request)

    def _log_failure(self, error: BaseException) -> None:
        """Log where something failed, without its text: that may quote what somebody wrote."""
        at = traceback.extract_tb(error.__traceback__)[-1]
        self._log(f"{type(error).__name__} in {at.name}, {at.filename}:{at.lineno}")


async def _at_once(work: Callable[..., Any], *given: Any) -> Any:
    return work(*given)


class _Application:
    """An ASGI application that Starlette takes for a response."""

    background = None

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _refusal(error: RequestError, as_error: ErrorWriter) -> JSONAnswer:
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONAnswer(as_error(error), error.status, headers)


def _name(body: Mapping[str, Any]) -> str | None:
    """Return the name of the model that a request asks for; what is no text is refused by who reads the request."""
    name = body.get("model")
    return name if isinstance(name, str) else None


def model_entry(model: ServedModel) -> dict[str, Any]:
    """Return a loaded model as both interfaces list it: each reads its own fields."""
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(model.created))
    return {
        "id": model.id, "object": "model", "created": model.created, "owned_by": "tokamac",
        "type": "model", "display_name": model.info.name, "created_at": created,
        "max_model_len": model.info.capacity or model.info.context_length, "loaded": True,
    }  # fmt: skip


def unloaded_entry(id: str) -> dict[str, Any]:
    """Return a model that may be asked for and is not loaded."""
    return {
        "id": id, "object": "model", "created": 0, "owned_by": "tokamac", "type": "model", "display_name": id,
        "created_at": "1970-01-01T00:00:00Z", "max_model_len": None, "loaded": False,
    }  # fmt: skip


def models_list(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the list of models, in the form of both interfaces."""
    first, last = (entries[0]["id"], entries[-1]["id"]) if entries else (None, None)
    return {"object": "list", "data": list(entries), "has_more": False, "first_id": first, "last_id": last}


def _line(request: Request, status: int, outcome: RequestOutcome, seconds: float) -> str:
    """Return a line of the log."""
    path = sanitise_line(request.scope["path"])[:80]  # ``request.url`` takes the host in, which may be anything
    parts = [time.strftime("%H:%M:%S"), request.method, path, str(status or "-")]
    parts += _figures([each for each in outcome.replies if each.ended is not None])
    parts.append(units.seconds(seconds))
    if outcome.error:
        parts.append(outcome.error)
    return " ".join(parts)


def _figures(replies: Sequence[ServedReply]) -> list[str]:
    if not replies:
        return []
    metrics = [each.end.metrics for each in replies]
    first = metrics[0]
    return [
        f"prompt {units.count(first.prompt_tokens)} ({units.count(first.cached_tokens)} cached)",
        f"reply {units.count(sum(each.generated_tokens for each in replies))}",
        f"TTFT {units.seconds(first.ttft_s)}",
        units.rate(first.decode_tps),
    ]
