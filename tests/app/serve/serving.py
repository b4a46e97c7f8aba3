"""A server in a thread of the test's own process, with a real engine's process behind it: the guide, a tiny model or a script."""

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engine.helpers import within
from tests.waiting import PATIENCE_S
from tokamac.app.backend.protocol import Load
from tokamac.app.serve.engine import TEXT_EVERY_S
from tokamac.app.serve.model_pool import Offer
from tokamac.app.serve.request import ServedModel
from tokamac.app.serve.server import ServerOptions, listen, serve
from tokamac.engine.options import Nodes

HOST = "127.0.0.1"
QUESTION = "What is decode?"


@dataclass
class Served:
    """A running server. lines: of its log."""

    port: int
    lines: list[str] = field(default_factory=list)
    model: ServedModel | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(HOST, self.port, timeout=PATIENCE_S)

    def ask(
        self, path: str, body: object = None, *, method: str = "", headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Send a request, and return its status and what came: JSON as it is read, else bytes."""
        status, _, told = self.told(path, body, method=method, headers=headers)
        return status, told

    def told(
        self, path: str, body: object = None, *, method: str = "", headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        connection = self.connection()
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        try:
            connection.request(method or ("GET" if body is None else "POST"), path, data, headers or {})
            answer = connection.getresponse()
            raw = answer.read()
        finally:
            connection.close()
        heads = {name.lower(): value for name, value in answer.getheaders()}
        is_json = heads.get("content-type") == "application/json"
        return answer.status, heads, json.loads(raw) if is_json else raw

    def health(self) -> dict[str, Any]:
        told: dict[str, Any] = self.ask("/health")[1]
        return told


@contextmanager
def serving(
    model: str,
    log: Path,
    *,
    parallel: int = 8,
    memory: int | None = None,
    aliases: tuple[str, ...] = (),
    allowed: tuple[str, ...] = (),
    nodes: Nodes | None = None,
    draft: str | None = None,
    **options: Any,
) -> Iterator[Served]:
    """Serve ``model`` while entered.

    parallel, memory, nodes, draft: of Load. aliases, allowed: of Offer. options: of ServerOptions.
    """
    listening = listen(HOST, 0)
    served = Served(listening.getsockname()[1])
    begun, stops = threading.Event(), []
    failed: list[BaseException] = []
    load = Load(model, parallel=parallel, memory=memory, draft=draft, text_every_s=TEXT_EVERY_S, nodes=nodes)
    wanted = ServerOptions(Offer(load, model, aliases, allowed), log=log, **options)

    async def run() -> None:
        stops.append((asyncio.get_running_loop(), asyncio.Event()))

        def ready(model: ServedModel) -> None:
            served.model = model
            begun.set()

        await serve(listening, HOST, wanted, note=served.lines.append, ready=ready, stop=stops[0][1])

    def work() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            failed.append(error)
        finally:
            begun.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert begun.wait(PATIENCE_S)
    if failed:
        listening.close()
        raise failed[0]
    try:
        yield served
    finally:
        loop, stop = stops[0]
        loop.call_soon_threadsafe(stop.set)
        within(thread.join)
        listening.close()
        if failed:
            raise failed[0]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def events(raw: bytes) -> list[tuple[str, Any]]:
    """Return the server-sent events of a stream: names, and their data; comments are left out."""
    found = []
    for block in raw.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line and not line.startswith(":"))
        if "data" in lines:
            done = lines["data"] == "[DONE]"
            found.append((lines.get("event", ""), "[DONE]" if done else json.loads(lines["data"])))
    return found
