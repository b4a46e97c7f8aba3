"""/serve: its state machine, and a real server on the engine of a chat."""

import asyncio
import http.client
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.scripted_engine import SCRIPTED
from tests.waiting import PATIENCE_S
from tokamac.app.backend.processes import ChatServer, Ended, Refused, ServerJob, ServerPhase, Serving, decode_serving
from tokamac.app.backend.protocol import Load, Loaded
from tokamac.app.backend.sharing import ChatEngine, chat_socket

URL = "http://127.0.0.1:11435"


def test_it_starts_answers_and_stops() -> None:
    job = ServerJob()
    assert (job.on, job.line) == (False, "")
    job.begin()
    assert job.line == "server: starting"
    job.receive(Serving(URL, 0, 0))
    assert (job.phase, job.line) == (ServerPhase.ON, f"{URL} · no request")
    job.receive(Serving(URL, 2, 3))
    assert job.line == f"{URL} · 2 requests, 3 waiting"
    job.stop()
    job.receive(Serving(URL, 0, 0))
    assert job.line == "server: stopping"
    job.ended(Ended(130, "something"))
    assert (job.on, job.line, job.problem) == (False, "", "")


def test_why_it_ended_is_one_line() -> None:
    job = ServerJob()
    job.begin()
    job.receive(Refused("port 1 is in use", "Take\nanother."))
    job.ended(Ended(1, "tokamac: port 1 is in use"))
    assert (job.on, job.problem) == (False, "port 1 is in use. Take another.")
    job.begin()
    job.ended(Ended(-9, ""))
    assert job.problem == "The server ended: exit status -9"
    job.stop()
    assert not job.on
    assert isinstance(decode_serving(b"nonsense"), Refused)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the test's own, short enough for a socket."""
    with TemporaryDirectory(prefix="t") as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        yield Path(short)


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def asked(port: int, path: str, body: object = None, **heads: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    data = None if body is None else json.dumps(body).encode()
    connection.request("GET" if data is None else "POST", path, data, heads)
    answer = connection.getresponse()
    told = json.loads(answer.read())
    connection.close()
    return answer.status, told


def test_a_server_on_the_chats_engine_follows_its_models_and_ends_with_it(folder: Path) -> None:
    told: list[str] = []
    loaded = asyncio.Event()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        tasks: list[asyncio.Task[None]] = []
        changed = asyncio.Event()
        server = ChatServer(
            spawn=lambda work: tasks.append(loop.create_task(work)), changed=changed.set, told=told.append
        )

        async def until(phase: ServerPhase) -> None:
            while server.job.phase is not phase:
                changed.clear()
                await asyncio.wait_for(changed.wait(), 60)

        def hear(event: object) -> None:
            if isinstance(event, Loaded):
                loop.call_soon_threadsafe(loaded.set)

        engine = ChatEngine(SCRIPTED, folder / "log", hear)
        engine.send(Load("fast"))
        engine.share(chat_socket())
        port = free_port()
        server.begin(port)
        await until(ServerPhase.ON)
        assert told == [f"Serving this chat's model on http://127.0.0.1:{port}. /serve stop stops it."]
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
        status, answer = await asyncio.to_thread(asked, port, "/v1/chat/completions", body)
        assert (status, answer["model"]) == (200, "fast")
        assert (await asyncio.to_thread(asked, port, "/health", Origin="https://evil.example"))[0] == 403
        loaded.clear()
        engine.send(Load("steady"))  # /model
        await asyncio.wait_for(loaded.wait(), PATIENCE_S)
        while (await asyncio.to_thread(asked, port, "/health"))[1]["model"] != "steady":
            await asyncio.sleep(0.01)
        # The engine dies, and another one takes its place.
        os.kill(engine._link.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        again = ChatEngine(SCRIPTED, folder / "log", hear)
        again.share(chat_socket())
        again.send(Load("fast"))
        while (await asyncio.to_thread(asked, port, "/v1/chat/completions", body))[0] != 200:
            await asyncio.sleep(0.05)
        # A port in use is told in one line.
        other = ChatServer(
            spawn=lambda work: tasks.append(loop.create_task(work)), changed=lambda: None, told=told.append
        )
        other.begin(port)
        await tasks[-1]
        assert told[-1].startswith(f"port {port} is in use. Stop what listens there")
        server.stop()
        await until(ServerPhase.OFF)
        assert told[-1] == "The server has stopped."
        again.close()
        await asyncio.gather(*tasks)

    asyncio.run(run())
