"""The server's paths, and what answers them."""

import asyncio
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib import metadata
from typing import Any, TypeVar
from uuid import uuid4

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tokamac.engine.perf.memory import give_back_freed
from tokamac.engine.text.length import COUNTED

from ..models.local import shown_name
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
from .engine import check_told
from .fetched import with_pictures
from .gate import Gate
from .launched import FirstPrompts, state_folder
from .metrics import OTHER, ServerMetrics
from .model_pool import ModelPool, Resident
from .ollama import (
    ELSEWHERE,
    RUNNING,
    VERSION,
    OllamaChat,
    OllamaGenerate,
    OllamaModel,
    facts_of,
    keep_alive_s,
    loaded_only,
    named,
    ollama_error,
)
from .openai import ChatExchange, CompletionExchange, openai_error
from .request import RequestError, ServedModel, parsed, unexpected, unreadable
from .responses import KeptResponses, ResponseExchange

T = TypeVar("T")
Reading = Callable[[Mapping[str, Any], ServedModel], Exchange]
ErrorWriter = Callable[[RequestError], Mapping[str, Any]]
EmbeddingReading = Callable[[Mapping[str, Any], ServedModel], OpenAIEmbeddings | OllamaEmbeddings]
Answer = Callable[[Request, RequestOutcome], Awaitable[Any]]
Runner = Callable[..., Awaitable[Any]]  # calls a function with what is given, and returns what it returns
MOST_RECENT = 50  # requests that /v1/requests tells of
RECORDED = ("prompt_tokens", "cached_tokens", "generated_tokens", "ttft_s", "total_s")  # metrics, there
# Bytes from which a body is understood in a thread, and from which its JSON is read in a process: other streams go on.
LONG_BODY, LONGER_BODY = 2**18, 2**20
READ_TOGETHER = 2  # such processes: values of a byte take some forty in memory
LONGEST_HEADERS = 64 * 1024
MOST_CONNECTIONS = 512
CROWDED, CROWDED_S = "crowded", 5  # on a connection too many; when to try again
ID_DIGITS = 24  # of a request's id
MOST_LOGGED = 8  # ignored fields in a line of the log


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
        fetches: whether pictures named by a web address are fetched.
    """

    def __init__(self, pool: ModelPool, gate: Gate, log: Callable[[str], None], *, fetches: bool = False) -> None:
        self._fetches = fetches
        self.stopping, self._metrics = asyncio.Event(), ServerMetrics()
        self._pool, self._gate, self._log = pool, gate, log
        self._first_prompts = FirstPrompts(state_folder(), log)
        self._recent: deque[dict[str, Any]] = deque(maxlen=MOST_RECENT)
        self._reading = asyncio.Semaphore(READ_TOGETHER)
        posts: dict[str, Answer] = {
            "/v1/chat/completions": partial(self._reply, ChatExchange),
            "/v1/completions": partial(self._reply, CompletionExchange),
            "/v1/responses": partial(self._reply, partial(ResponseExchange, kept=KeptResponses())),
            "/v1/messages": partial(self._reply, MessageExchange),
            "/v1/messages/count_tokens": self._count,
            "/v1/embeddings": partial(self._embed, OpenAIEmbeddings),
            "/api/chat": partial(self._reply, OllamaChat),
            "/api/generate": partial(self._reply, OllamaGenerate),
            "/api/embed": partial(self._embed, OllamaEmbeddings),
            "/api/embeddings": partial(self._embed, partial(OllamaEmbeddings, old=True)),
            "/api/show": self._show,
            "/api/pull": self._pull,
        }
        gets: dict[str, Answer] = {
            "/": self._runs,
            "/v1/models": self._models,
            "/v1/models/{name:path}": self._one_model,
            "/v1/requests": self._requests,
            "/health": self._health,
            "/metrics": self._page,
            "/api/version": self._version,
            "/api/tags": self._tags,
            "/api/ps": self._in_memory,
        }
        self._paths = {"POST": posts, "GET": gets}
        routes = [
            Route(path, self._endpoint(answer), methods=[method])
            for method, answers in self._paths.items()
            for path, answer in answers.items()
        ]
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

    def _endpoint(self, answer: Answer) -> Callable[[Request], Awaitable[Any]]:
        async def endpoint(request: Request) -> Any:
            state, as_error = request.scope["state"], errors_of(request.scope["path"])
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

    async def _reply(self, reading: Reading, request: Request, outcome: RequestOutcome) -> Any:
        body, run = await self._read(request, outcome)
        path = request.scope["path"]
        outcome.client = "" if outcome.of_page else request.headers.get(CLIENT_HEADER, "")[:80]
        self._first_prompts.see(outcome.client, path, body)
        began_s = time.monotonic()
        async with AsyncExitStack() as held:
            resident = await held.enter_async_context(self._leased(request, body))
            load_s = time.monotonic() - began_s
            if reading in LOADING and (told := loaded_only(body, LOADING[reading])) is not None:
                return JSONAnswer(told)
            model = resident.served
            outcome.model = model.id
            exchange = await run(reading, body, model)
            exchange.load_s = load_s
            await run(resident.engine.check, exchange.request)
            answering = Answering(
                resident.engine, model.info, exchange, errors_of(path), self.stopping, outcome=outcome
            )
            if resident.loaded_s >= began_s:
                outcome.loaded(load_s)
            lease = held.pop_all()

        async def answered(scope: Scope, receive: Receive, send: Send) -> None:
            async with lease:
                await answering(scope, receive, send)

        return answered

    async def _embed(self, reading: EmbeddingReading, request: Request, outcome: RequestOutcome) -> JSONAnswer:
        body, run = await self._read(request, outcome)
        waited = Timed()
        async with self._leased(request, body) as resident:
            load_s = waited.seconds
            exchange = await run(reading, body, resident.served)
            made = await self._wanted(request, resident.engine.embeddings(exchange.request))
        self._metrics.add_embedded(sum(sum(each.tokens) for each in made))
        return await asyncio.to_thread(lambda: JSONAnswer(exchange.answer(made, load_s)))

    async def _count(self, request: Request, outcome: RequestOutcome) -> JSONAnswer:
        body, run = await self._read(request, outcome)
        async with self._leased(request, body) as resident:
            asked = (await run(partial(MessageExchange, counting=True), body, resident.served)).request
            await run(partial(resident.engine.check_length, contexts=COUNTED), asked.prompts)
            (prompt,) = asked.prompts
            telling = resident.engine.tokens("", prompt, asked.template, continues=asked.continues)
            told = await self._wanted(request, telling)
        check_told(told, "invalid_prompt")
        return JSONAnswer(count_of(len(told.tokens)))

    @asynccontextmanager
    async def _leased(self, request: Request, body: Mapping[str, Any]) -> AsyncIterator[Resident]:
        """Hold the model that a request names in memory; one that is no text is refused by who reads the body."""
        name = body.get("model")
        keep = keep_alive_s(body) if errors_of(request.scope["path"]) is ollama_error else None
        async with AsyncExitStack() as held:
            lease = self._pool.lease(name if isinstance(name, str) else None, keep)
            yield await self._wanted(request, held.enter_async_context(lease))

    async def _wanted(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        return await while_wanted(work, request.receive, self.stopping)

    async def _read(self, request: Request, outcome: RequestOutcome) -> tuple[Mapping[str, Any], Runner]:
        given, run = await self._understood(request, outcome)
        if self._fetches:
            given = await self._wanted(request, asyncio.to_thread(with_pictures, given))
        return given, run

    async def _understood(self, request: Request, outcome: RequestOutcome) -> tuple[Mapping[str, Any], Runner]:
        body = await read_body(request)
        outcome.body_bytes = len(body)
        run: Runner = _at_once if len(body) < LONG_BODY else asyncio.to_thread
        if len(body) < LONGER_BODY:
            return await run(parsed, body), run
        async with self._reading:
            try:
                return await self._wanted(request, read_apart(body)), run
            except UnreadableBodyError as error:
                raise unreadable(*error.args) from None

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
            known = "; ".join(f"{method} {', '.join(sorted(paths))}" for method, paths in self._paths.items())
            path = request.scope["path"]
            raise RequestError(
                f"{request.method} {path:.80} is not answered here", ELSEWHERE.get(path, f"There are {known}."),
                status=error.status_code, code="no_such_path",
            )  # fmt: skip

        return await self._endpoint(refused)(request)

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
        return JSONAnswer((await self._facts(await self._pool.meant(named(body)))).shown)

    async def _pull(self, request: Request, outcome: RequestOutcome) -> JSONAnswer:
        body, _ = await self._read(request, outcome)
        try:
            await self._pool.meant(named(body))  # what may be asked for is here already
        except RequestError as error:
            error.hint = ELSEWHERE["/api/pull"]
            raise
        return JSONAnswer({"status": "success"})

    async def _facts(self, id: str) -> OllamaModel:
        spec = next((each.served.info for each in self._pool.loaded if each.id == id), None)
        return await asyncio.to_thread(facts_of, id, self._pool.source(id), spec)

    def _count_request(self, path: str, status: int, outcome: RequestOutcome) -> None:
        ended = [each.end.metrics for each in outcome.replies if each.ended is not None]
        is_known = any(path in paths for paths in self._paths.values())
        self._metrics.add(path if is_known else OTHER, status, ended)

    def _log_failure(self, error: BaseException) -> None:
        at = traceback.extract_tb(error.__traceback__)[-1]
        self._log(f"{type(error).__name__} in {at.name}, {at.filename}:{at.lineno}")


def errors_of(path: str) -> ErrorWriter:
    """Return how the interface that a path is of writes errors."""
    if path == "/" or path.startswith("/api"):
        return ollama_error
    return anthropic_error if path.startswith("/v1/messages") else openai_error


async def _at_once(work: Callable[..., Any], *given: Any) -> Any:
    return work(*given)


class _Application:
    background = None

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _check_room(headers: Sequence[tuple[bytes, bytes]], *, crowded: bool) -> None:
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


def model_entry(model: ServedModel) -> dict[str, Any]:
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(model.created))
    return {
        "id": model.id, "object": "model", "created": model.created, "owned_by": "tokamac",
        "type": "model", "display_name": shown_name(model.info.name), "created_at": created,
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
