"""The HTTP server: who may ask, its routes, its socket, signals and connection limits."""

import asyncio
import errno
import ipaddress
import math
import os
import re
import secrets
import signal
import socket
import stat
import threading
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from uuid import uuid4

import uvicorn
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from tokamac.engine.errors import TokamacError, access_hint
from tokamac.engine.events import LoadProgress
from tokamac.engine.options import Sampling, TemplateOptions
from tokamac.engine.perf.memory import give_back_freed
from tokamac.engine.text.length import COUNTED

from ..backend.client import CHILD_COMMAND
from ..backend.keep_awake import KeepAwake
from ..backend.protocol import Load, PromptTokens
from ..reports import cache_use
from ..text import units
from ..text.sanitise import sanitise_line
from .answering import (
    Answering,
    ClientLeftError,
    Exchange,
    RequestOutcome,
    ServedReply,
    Timed,
    as_json,
    read_body,
    while_wanted,
)
from .anthropic_messages import MessageExchange, anthropic_error, count_of
from .body import UnreadableBodyError, read_apart
from .clients import CLIENT_HEADER
from .embeddings import OllamaEmbeddings, OpenAIEmbeddings
from .engine import ServedEngine, check_told
from .launched import FirstPrompts, state_folder
from .metrics import OTHER, ServerMetrics
from .model_pool import CardMaker, ModelPool, Offer
from .ollama import (
    RUNNING,
    VERSION,
    OllamaChat,
    OllamaGenerate,
    OllamaModel,
    facts_of,
    keep_alive_s,
    loaded_only,
    ollama_error,
)
from .openai import ChatExchange, CompletionExchange, openai_error
from .request import Fields, RequestError, ServedModel, parsed, unexpected, unreadable
from .responses import KeptResponses, ResponseExchange

# On loopback any local program may ask, but no web page: pages send an ``Origin``, and DNS rebinding shows in
# ``Host``. Elsewhere a bearer token is required, from a file that only the user can read; host names protect
# nothing there.


LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
TOKEN_BYTES = 32
LONGEST_TOKEN = 512
HOST = re.compile(r"(?:(?P<name>[\w.-]+)|\[(?P<address>[0-9A-Fa-f:.]+)\])(?::\d*)?", re.ASCII)


class TokenFileError(TokamacError):
    """The token file can't be created, or can't be trusted."""


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def token_of(file: Path) -> str:
    """Return the file's token, created if missing. Raises TokenFileError."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except FileExistsError:
            return _kept(file)
        token = secrets.token_urlsafe(TOKEN_BYTES)
        with os.fdopen(descriptor, "w") as opened:
            opened.write(token + "\n")
    except OSError as error:
        why = f"{file} can't be used for the token: {error.strerror or error}"
        raise TokenFileError(why, access_hint(error, "Check the folder and its permissions.")) from error
    return token


def _kept(file: Path) -> str:
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as opened:
        found = os.fstat(opened.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid != os.getuid():
            raise TokenFileError(f"others can read or write {file}", f"Remove it, or: chmod 600 {file}")
        token = opened.read(LONGEST_TOKEN + 1).decode("ascii", "replace").strip()
    if not 16 <= len(token) <= LONGEST_TOKEN or not token.isprintable():
        raise TokenFileError(f"{file} holds no token", "Remove it: another is made.")
    return token


class Gate:
    """Checks requests. hosts: allowed host names, None for any (a token is needed then). token: None if not needed."""

    def __init__(self, hosts: Collection[str] | None, origins: Collection[str] = (), token: str | None = None) -> None:
        self._hosts = None if hosts is None else frozenset(each.lower().rstrip(".") for each in hosts)
        self._origins = frozenset(origins)
        self._token = None if token is None else token.encode()

    def check(self, headers: Mapping[str, str]) -> None:
        host = headers.get("host", "")
        if self._hosts is not None and (name := _host_name(host)) not in self._hosts:
            # Not even Docker's name for this machine, which any network may answer for.
            raise RequestError(
                f"this server is not called {host!r:.80}", f"Ask for localhost, or start it with --allow-host {name or 'NAME'}.",
                status=403, code="wrong_host",
            )  # fmt: skip
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins:
            raise RequestError(
                f"a web page of {origin!r:.80} may not ask", "Start the server with --allow-origin to let it.", status=403,
                code="wrong_origin",
            )  # fmt: skip
        if self._token is not None and not self._is_token(headers):
            raise RequestError(
                "the token is missing or wrong",
                "Send the one of the server's token file as a bearer token, or as x-api-key.",
                status=401, code="invalid_api_key",
            )  # fmt: skip

    def _is_token(self, headers: Mapping[str, str]) -> bool:
        assert self._token is not None
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        return secrets.compare_digest(given.encode("utf-8", "replace"), self._token)

    def allows(self, origin: str | None) -> bool:
        return origin in self._origins


def _host_name(host: str) -> str:
    found = HOST.fullmatch(host)
    return "" if found is None else (found["name"] or found["address"]).lower().rstrip(".")


Reading = Callable[[Mapping[str, Any], ServedModel], Exchange]
ErrorWriter = Callable[[RequestError], Mapping[str, Any]]
EmbeddingReading = Callable[[Mapping[str, Any], ServedModel], OpenAIEmbeddings | OllamaEmbeddings]
Runner = Callable[..., Awaitable[Any]]  # calls a function with what is given, and returns what it returns
MOST_RECENT = 50  # requests that /v1/requests tells of
RECORDED = ("prompt_tokens", "cached_tokens", "generated_tokens", "ttft_s", "total_s")  # metrics, there
# Bytes from which a body is understood in a thread, and from which its JSON is read in a process: other streams go on.
LONG_BODY, LONGER_BODY = 2**18, 2**20
READ_TOGETHER = 2  # such processes: values of a byte take some forty in memory


class JSONAnswer(Response):
    media_type = "application/json"

    def __init__(self, told: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(as_json(told), status, headers)


LOADING: Mapping[Any, str] = {OllamaChat: "messages", OllamaGenerate: "prompt"}  # without it they only load a model


class ServerApp:
    """The server application.

    Args:
        gate: authorization.
        log: receives a line per request.
    """

    def __init__(self, pool: ModelPool, gate: Gate, log: Callable[[str], None]) -> None:
        self.stopping, self._metrics = asyncio.Event(), ServerMetrics()
        self._pool, self._gate, self._log = pool, gate, log
        self._first_prompts = FirstPrompts(state_folder(), log)
        self._recent: deque[dict[str, Any]] = deque(maxlen=MOST_RECENT)
        self._reading = asyncio.Semaphore(READ_TOGETHER)
        asks: dict[str, tuple[Reading, ErrorWriter]] = {
            "/v1/chat/completions": (ChatExchange, openai_error),
            "/v1/completions": (CompletionExchange, openai_error),
            "/v1/responses": (partial(ResponseExchange, kept=KeptResponses()), openai_error),
            "/v1/messages": (MessageExchange, anthropic_error),
            "/api/chat": (OllamaChat, ollama_error),
            "/api/generate": (OllamaGenerate, ollama_error),
        }
        routes = [
            Route(path, self._endpoint(partial(self._reply, reading, error), error), methods=["POST"])
            for path, (reading, error) in asks.items()
        ]
        embeds: dict[str, tuple[EmbeddingReading, ErrorWriter]] = {
            "/v1/embeddings": (OpenAIEmbeddings, openai_error),
            "/api/embed": (OllamaEmbeddings, ollama_error),
            "/api/embeddings": (partial(OllamaEmbeddings, old=True), ollama_error),
        }
        routes += [
            Route(path, self._endpoint(partial(self._embed, reading, error), error), methods=["POST"])
            for path, (reading, error) in embeds.items()
        ]
        count = self._endpoint(self._count, anthropic_error)
        routes += [
            Route("/", self._endpoint(self._runs, ollama_error), methods=["GET"]),
            Route("/metrics", self._endpoint(self._page, openai_error), methods=["GET"]),
            Route("/api/version", self._endpoint(self._version, ollama_error), methods=["GET"]),
            Route("/api/tags", self._endpoint(self._tags, ollama_error), methods=["GET"]),
            Route("/api/ps", self._endpoint(self._in_memory, ollama_error), methods=["GET"]),
            Route("/api/show", self._endpoint(self._show, ollama_error), methods=["POST"]),
            Route("/v1/messages/count_tokens", count, methods=["POST"]),
            Route("/v1/models", self._endpoint(self._models, openai_error), methods=["GET"]),
            Route("/v1/models/{name:path}", self._endpoint(self._one_model, openai_error), methods=["GET"]),
            Route("/v1/requests", self._endpoint(self._requests, openai_error), methods=["GET"]),
            Route("/health", self._endpoint(self._health, openai_error), methods=["GET"]),
        ]
        self._paths = {each.path for each in routes}
        self._starlette = Starlette(routes=routes, exception_handlers={HTTPException: self._no_such_path})
        self._starlette.router.redirect_slashes = False  # before anybody was let in

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        id = scope.setdefault("state", {})["request_id"] = f"req_{uuid4().hex[:ID_DIGITS]}"
        added = [(b"x-request-id", id.encode()), (b"request-id", id.encode())]  # OpenAI's name for it, and Anthropic's

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        origin = Request(scope).headers.get("origin")
        if origin is None or not self._gate.allows(origin):
            await self._starlette(scope, receive, sending)
            return
        allowed = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]
        if scope["method"] == "OPTIONS":
            asked = Request(scope).headers.get("access-control-request-headers", "*")
            allowed += [(b"access-control-allow-headers", asked.encode("latin-1")),
                        (b"access-control-allow-methods", b"GET, POST")]  # fmt: skip
            await send({"type": "http.response.start", "status": 204, "headers": allowed})
            await send({"type": "http.response.body", "body": b""})
            return
        added += allowed
        await self._starlette(scope, receive, sending)

    def _endpoint(
        self, answer: Callable[[Request, RequestOutcome], Awaitable[Any]], as_error: ErrorWriter
    ) -> Callable[[Request], Awaitable[Any]]:
        async def endpoint(request: Request) -> Any:
            state = request.scope["state"]
            outcome, took = RequestOutcome(state["request_id"], of_page="origin" in request.headers), Timed()
            try:
                _check_room(request.headers.raw, crowded=state.get(CROWDED, False))
                self._gate.check(request.headers)
                made = await answer(request, outcome)
            except RequestError as error:
                outcome.error = error.code
                made = _refusal(error, as_error, outcome)
            except (ClientDisconnect, ClientLeftError):
                outcome.error = "the client left"
                made = Response(status_code=499)
            except Exception as error:
                self._log_failure(error)
                failure = unexpected()
                outcome.error = failure.code
                made = _refusal(failure, as_error, outcome)
            return self._logged(request, made, outcome, took)

        return endpoint

    def _logged(self, request: Request, answer: Any, outcome: RequestOutcome, took: Timed) -> Any:
        async def answered(scope: Scope, receive: Receive, send: Send) -> None:
            status, is_told = 0, False

            def tell() -> None:
                nonlocal is_told
                is_told = True
                self._count_request(request.scope["path"], status, outcome)
                self._log(_line(request, status, outcome, took.seconds))
                if request.method == "POST":
                    self._recent.append(_record(request, status, outcome, took.seconds))

            async def sending(message: Any) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                elif not message.get("more_body"):
                    tell()  # a client that has its whole answer finds it in /v1/requests
                await send(message)

            try:
                await answer(scope, receive, sending)
            except Exception as error:
                self._log_failure(error)
                outcome.error = "internal"
            finally:
                if not is_told:
                    tell()
                if outcome.body_bytes >= LONGER_BODY:
                    give_back_freed()

        return _Application(answered)

    async def _reply(self, reading: Reading, as_error: ErrorWriter, request: Request, outcome: RequestOutcome) -> Any:
        body, run = await self._read(request, outcome)
        outcome.client = "" if outcome.of_page else request.headers.get(CLIENT_HEADER, "")[:80]
        self._first_prompts.see(outcome.client, request.scope["path"], body)
        waited, began_s = Timed(), time.monotonic()
        async with AsyncExitStack() as held:
            keep = keep_alive_s(body) if as_error is ollama_error else None
            leasing = held.enter_async_context(self._pool.lease(_model_name(body), keep))
            resident = await while_wanted(leasing, request.receive, self.stopping)
            if reading in LOADING and (told := loaded_only(body, LOADING[reading])) is not None:
                return JSONAnswer(told)
            model = resident.served
            outcome.model = model.id
            exchange = await run(reading, body, model)
            exchange.load_s = waited.seconds
            await run(resident.engine.check, exchange.request)
            answering = Answering(resident.engine, model.info, exchange, as_error, self.stopping, outcome=outcome)
            if resident.loaded_s >= began_s:
                outcome.loaded(waited.seconds)
            lease = held.pop_all()

        async def answered(scope: Scope, receive: Receive, send: Send) -> None:
            async with lease:
                await answering(scope, receive, send)

        return answered

    async def _embed(
        self,
        reading: EmbeddingReading,
        as_error: ErrorWriter,
        request: Request,
        outcome: RequestOutcome,
    ) -> JSONAnswer:
        body, run = await self._read(request, outcome)
        waited, keep = Timed(), keep_alive_s(body) if as_error is ollama_error else None
        async with AsyncExitStack() as held:
            leasing = held.enter_async_context(self._pool.lease(_model_name(body), keep))
            resident = await while_wanted(leasing, request.receive, self.stopping)
            load_s = waited.seconds
            exchange = await run(reading, body, resident.served)
            making = resident.engine.embeddings(exchange.request)
            made = await while_wanted(making, request.receive, self.stopping)
        self._metrics.add_embedded(sum(sum(each.tokens) for each in made))
        return await asyncio.to_thread(lambda: JSONAnswer(exchange.answer(made, load_s)))

    async def _read(self, request: Request, outcome: RequestOutcome) -> tuple[Mapping[str, Any], Runner]:
        body = await read_body(request)
        outcome.body_bytes = len(body)
        run: Runner = _at_once if len(body) < LONG_BODY else asyncio.to_thread
        if len(body) < LONGER_BODY:
            return await run(parsed, body), run
        async with self._reading:
            try:
                return await while_wanted(read_apart(body), request.receive, self.stopping), run
            except UnreadableBodyError as error:
                raise unreadable(*error.args) from None

    async def _count(self, request: Request, outcome: RequestOutcome) -> JSONAnswer:
        body, run = await self._read(request, outcome)
        told = await while_wanted(self._tokens(body, run), request.receive, self.stopping)
        check_told(told, "invalid_prompt")
        return JSONAnswer(count_of(len(told.tokens)))

    async def _tokens(self, body: Mapping[str, Any], run: Runner) -> PromptTokens:
        async with self._pool.lease(_model_name(body)) as resident:
            exchange = await run(partial(MessageExchange, counting=True), body, resident.served)
            asked = exchange.request
            await run(partial(resident.engine.check_length, contexts=COUNTED), asked.prompts)
            (prompt,) = asked.prompts
            return await resident.engine.tokens("", prompt, asked.template, continues=asked.continues)

    async def _models(self, request: Request, outcome: RequestOutcome) -> JSONAnswer:  # noqa: ARG002
        entries = [model_entry(each.served) for each in self._pool.loaded]
        return JSONAnswer(models_list([*entries, *map(unloaded_entry, await self._pool.offered())]))

    async def _one_model(self, request: Request, outcome: RequestOutcome) -> JSONAnswer:  # noqa: ARG002
        id = await self._pool.meant(request.path_params["name"])
        found = next((each for each in self._pool.loaded if each.id == id), None)
        return JSONAnswer(unloaded_entry(id) if found is None else model_entry(found.served))

    async def _requests(self, request: Request, outcome: RequestOutcome) -> JSONAnswer:  # noqa: ARG002
        if outcome.of_page:
            raise RequestError("a web page may not read what others asked", status=403, code="wrong_origin")
        return JSONAnswer({"object": "list", "data": list(self._recent)[::-1]})

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
            known = "POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages; GET /v1/models, /v1/requests, /health"
            wrong = f"{request.method} {request.scope['path']:.80} is not answered here"
            raise RequestError(
                wrong,
                f"There are {known}; Ollama's /api/chat, generate, embed, show, tags, ps, version; /v1/embeddings, /metrics.",
                status=error.status_code,
                code="no_such_path",
            )

        path = request.scope["path"]
        as_error = (
            anthropic_error
            if path.startswith("/v1/messages")
            else ollama_error
            if path.startswith("/api")
            else openai_error
        )
        return await self._endpoint(refused, as_error)(request)

    # Ollama's interface -----------------------------------------------------------------------------------------------------

    async def _runs(self, request: Request, outcome: RequestOutcome) -> Response:  # noqa: ARG002
        return Response(RUNNING, media_type="text/plain")

    async def _page(self, request: Request, outcome: RequestOutcome) -> Response:  # noqa: ARG002
        return Response(self._metrics.text(self._pool.loaded, self._pool.busy), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def _version(self, request: Request, outcome: RequestOutcome) -> JSONAnswer:  # noqa: ARG002
        return JSONAnswer({"version": VERSION, "tokamac": metadata.version("tokamac")})

    async def _tags(self, request: Request, outcome: RequestOutcome) -> JSONAnswer:  # noqa: ARG002
        ids = [*(each.served.id for each in self._pool.loaded), *await self._pool.offered()]
        return JSONAnswer({"models": [(await self._facts(id)).listed for id in ids]})

    async def _in_memory(self, request: Request, outcome: RequestOutcome) -> JSONAnswer:  # noqa: ARG002
        told = [(await self._facts(each.id)).in_memory(each.nbytes, each.expires_s) for each in self._pool.loaded]
        return JSONAnswer({"models": told})

    async def _show(self, request: Request, outcome: RequestOutcome) -> JSONAnswer:
        body, _ = await self._read(request, outcome)
        given = Fields(body)
        name = given.text("model") or given.text("name")
        if not name:
            raise RequestError("model is required", param="model")
        return JSONAnswer((await self._facts(await self._pool.meant(name))).shown)

    async def _facts(self, id: str) -> OllamaModel:
        spec = next((each.served.info for each in self._pool.loaded if each.id == id), None)
        return await asyncio.to_thread(facts_of, id, spec)

    def _count_request(self, path: str, status: int, outcome: RequestOutcome) -> None:
        ended = [each.end.metrics for each in outcome.replies if each.ended is not None]
        self._metrics.add(path if path in self._paths else OTHER, status, ended)

    def _log_failure(self, error: BaseException) -> None:
        at = traceback.extract_tb(error.__traceback__)[-1]
        self._log(f"{type(error).__name__} in {at.name}, {at.filename}:{at.lineno}")


async def _at_once(work: Callable[..., Any], *given: Any) -> Any:
    return work(*given)


class _Application:
    background = None

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _check_room(headers: Sequence[tuple[bytes, bytes]], *, crowded: bool) -> None:
    """Raise RequestError for long headers, and on a connection too many."""
    if sum(len(name) + len(value) for name, value in headers) > LONGEST_HEADERS:
        raise RequestError(
            f"the headers have more than {LONGEST_HEADERS:,} bytes", "Send less.", status=431, code="headers_too_large"
        )
    if crowded:
        raise RequestError(
            f"this server has {MOST_CONNECTIONS} connections already", f"Try again in {CROWDED_S} s.", status=503,
            code="too_many_connections", retry_after_s=CROWDED_S,
        )  # fmt: skip


def _refusal(error: RequestError, as_error: ErrorWriter, outcome: RequestOutcome) -> JSONAnswer:
    error.request_id = outcome.id
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.code == "too_many_connections":
        headers["connection"] = "close"
    return JSONAnswer(as_error(error), error.status, headers)


def _model_name(body: Mapping[str, Any]) -> str | None:
    """Return the requested model; a non-string is rejected by the parser later."""
    name = body.get("model")
    return name if isinstance(name, str) else None


def model_entry(model: ServedModel) -> dict[str, Any]:
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(model.created))
    return {
        "id": model.id, "object": "model", "created": model.created, "owned_by": "tokamac",
        "type": "model", "display_name": model.info.name, "created_at": created,
        "max_model_len": model.info.capacity or model.info.context_length, "loaded": True,
    }  # fmt: skip


def unloaded_entry(id: str) -> dict[str, Any]:
    return {
        "id": id, "object": "model", "created": 0, "owned_by": "tokamac", "type": "model", "display_name": id,
        "created_at": "1970-01-01T00:00:00Z", "max_model_len": None, "loaded": False,
    }  # fmt: skip


def models_list(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first, last = (entries[0]["id"], entries[-1]["id"]) if entries else (None, None)
    return {"object": "list", "data": list(entries), "has_more": False, "first_id": first, "last_id": last}


def _line(request: Request, status: int, outcome: RequestOutcome, seconds: float) -> str:
    path = sanitise_line(request.scope["path"])[:80]  # ``request.url`` takes the host in, which may be anything
    parts = [time.strftime("%H:%M:%S"), request.method, path, str(status or "-")]
    parts += _figures([each for each in outcome.replies if each.ended is not None])
    parts += [units.seconds(seconds), outcome.id]
    if outcome.replies and (ignored := outcome.replies[0].ignored):
        more = f" and {len(ignored) - MOST_LOGGED} more" if len(ignored) > MOST_LOGGED else ""
        parts.append(f"ignored {', '.join(ignored[:MOST_LOGGED])}{more}")
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
        *filter(None, [cache_use.counts(replies[0].end.cache)]),
        f"TTFT {units.seconds(first.ttft_s)}",
        *([] if first.shown_decode_tps is None else [units.rate(first.shown_decode_tps)]),
    ]


def _record(request: Request, status: int, outcome: RequestOutcome, seconds: float) -> dict[str, Any]:
    replies = [
        {
            "reason": each.reason,
            **{name: getattr(each.end.metrics, name) for name in RECORDED},
            "cache": each.figures.get("cache"),
        }
        for each in outcome.replies
        if each.ended is not None
    ]
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - seconds)), "path": request.scope["path"][:80],
        "client": outcome.client or None, "model": outcome.model or None, "status": status or None, "seconds": seconds,
        "error": outcome.error or None,
        "replies": replies,
    }  # fmt: skip


# The socket is bound before the model is loaded, so a used port fails early; clients that connect meanwhile
# wait. The first Ctrl-C ends streams with an error and writes what was computed; the second ends immediately.


SIGNALS = (signal.SIGINT, signal.SIGTERM)
BACKLOG = 128
MOST_CONNECTIONS = 512
CROWDED, CROWDED_S = "crowded", 5  # on a connection too many; when to try again
LONGEST_HEADERS = 64 * 1024
ID_DIGITS = 24  # of a request's id
MOST_LOGGED = 8  # ignored fields in a line of the log
HEADERS_S = 15.0  # how long a connection may take to say what it asks
IDLE_S = 75  # how long a connection stays open between two requests
LOOK_S = 0.25  # how often it is looked whether the number of replies has changed, where somebody wants to know
STOP_S = 5  # how long replies may take to end once the server is stopped


class ListenError(TokamacError):
    """The server can't listen."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of a server.

    hosts, origins: allowed beyond loopback's. card: builds the announcement of the engine to the user's other
    programs; None: not announced. engine: socket of a running chat's engine, used instead of an own one. idle_s: how long a model
    stays in memory unused; inf for ever.
    """

    offer: Offer
    sampling: Sampling = Sampling()  # noqa: RUF009  # frozen
    template: TemplateOptions = TemplateOptions()  # noqa: RUF009
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    token: str | None = None
    card: CardMaker | None = None
    engine: Path | None = None
    idle_s: float = math.inf
    log: Path = field(default_factory=Path)
    command: tuple[str, ...] = CHILD_COMMAND


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises ListenError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a name"
        raise ListenError(f"--host {host:.80}: {why}", "Give an address of this machine, such as 127.0.0.1.") from error
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise ListenError(
                f"port {port} is in use", f"Stop what listens there, or take another: --port {port + 1}."
            ) from error
        raise ListenError(
            f"{host:.80}:{port} can't be listened to: {error.strerror}", "Check --host and --port."
        ) from error
    listening.setblocking(False)
    return listening


def gate_of(host: str, options: ServerOptions) -> Gate:
    hosts = (*LOOPBACK_NAMES, host, *options.hosts) if is_loopback(host) else None
    return Gate(hosts, options.origins, options.token)


class BoundedConnection(H11Protocol):
    """A connection whose request must arrive within ``HEADERS_S``, and is refused in JSON where there are too many."""

    # uvicorn limits only the pause after an answer, and says in plain text that there are too many.

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.app_state = {**self.app_state, CROWDED: len(self.connections) > MOST_CONNECTIONS}
        self._wait()

    def data_received(self, data: bytes) -> None:
        waits = self.cycle is None or self.cycle.response_complete
        if waits and self._deadline is None:
            self._wait()
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._deadline = self.loop.call_later(HEADERS_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class QuietServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    listening: socket.socket,
    host: str,
    options: ServerOptions,
    *,
    note: Callable[[str], None],
    progress: Callable[[LoadProgress], None] = lambda _: None,
    ready: Callable[[ServedModel], None] = lambda _: None,
    stop: asyncio.Event | None = None,
    keeper: KeepAwake | None = None,
    activity: Callable[[int, int], None] | None = None,
) -> bool:
    """Serve until a signal or ``stop``; return whether Ctrl-C ended it.

    Args:
        note: receives log lines.
        ready: called once requests are answered.
        keeper: keeps the machine awake during replies.
        activity: called with the numbers of running and waiting replies when they change.

    Raises RequestError where the model can't be loaded.
    """
    ending = _Ending(stop or asyncio.Event())

    def make_engine(load: Load, log: Path, share: Path | None) -> ServedEngine:
        engine = ServedEngine(load, log, note, options.command, keeper=keeper, share=share, join=options.engine)
        engine.on_lost = ending.stopping.set
        engine.on_progress = progress
        return engine

    pool = ModelPool(
        options.offer,
        make_engine,
        options.log,
        note,
        sampling=options.sampling,
        template=options.template,
        card=options.card,
        idle_s=options.idle_s,
    )
    try:
        with ending.by_signals():
            loaded, stopped = asyncio.ensure_future(pool.start()), asyncio.ensure_future(ending.stopping.wait())
            await asyncio.wait((loaded, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not loaded.done():
                loaded.cancel()
                return ending.interrupted
            model = loaded.result()
            app = ServerApp(pool, gate_of(host, options), note)
            server = ending.server = QuietServer(_config(app))
            serving = asyncio.ensure_future(server.serve(sockets=[listening]))
            ready(model)
            telling = asyncio.ensure_future(_tell(pool, activity))
            await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
            app.stopping.set()
            server.should_exit = True
            await serving
            telling.cancel()
    finally:
        await pool.close()
    return ending.interrupted


@dataclass
class _Ending:
    stopping: asyncio.Event
    server: QuietServer | None = None
    interrupted: bool = False

    @contextmanager
    def by_signals(self) -> Iterator[None]:
        """Handle signals, in the main thread only. A background shell job ignores Ctrl-C."""
        loop, main = asyncio.get_running_loop(), threading.current_thread() is threading.main_thread()
        heard = [each for each in SIGNALS if main and signal.getsignal(each) is not signal.SIG_IGN]
        for number in heard:
            loop.add_signal_handler(number, self._stop, number)
        try:
            yield
        finally:
            for number in heard:
                loop.remove_signal_handler(number)

    def _stop(self, number: int) -> None:
        self.interrupted = self.interrupted or number == signal.SIGINT
        if self.stopping.is_set() and self.server is not None:
            self.server.force_exit = True
        self.stopping.set()


async def _tell(pool: ModelPool, activity: Callable[[int, int], None] | None) -> None:
    before = None
    while activity is not None:
        if (now := pool.busy) != before:
            activity(*now)
            before = now
        await asyncio.sleep(LOOK_S)


def _config(app: ServerApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=BoundedConnection,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=LONGEST_HEADERS,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=STOP_S,
    )
