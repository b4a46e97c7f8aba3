"""Models by name: which may be asked for, which are in memory, and who leaves for whom. The arithmetic, and real processes."""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.app.serve.serving import HOST, Served, serving, user
from tests.scripted_engine import SCRIPTED, model_spec
from tests.tiny import make_tiny
from tests.waiting import until
from tokamac.app.backend.protocol import Load, MemoryUse, ModelLine
from tokamac.app.serve import answering, model_pool
from tokamac.app.serve.engine import ServedEngine
from tokamac.app.serve.gate import Gate
from tokamac.app.serve.model_pool import Eviction, InMemory, ModelPool, Offer, Resident, eviction, shares
from tokamac.app.serve.routes import ServerApp

CHAT = "/v1/chat/completions"
NAMES = ("a", "b", "c")
# Bytes; each of the models takes 24.1 MB.
ROOM_FOR_ONE, ROOM_FOR_TWO, ROOM_FOR_NONE = 30_000_000, 60_000_000, 20_000_000


# Who leaves.

OLD, NEW, BUSY = InMemory("old", 40, False, 1), InMemory("new", 40, False, 3), InMemory("busy", 40, True, 2)


def test_the_least_recently_used_idle_model_leaves_first() -> None:
    assert eviction(20, [NEW, OLD], 100) == Eviction()
    assert eviction(30, [NEW, OLD], 100) == Eviction(idle=("old",))
    assert eviction(70, [NEW, OLD], 100) == Eviction(idle=("old", "new"))


def test_a_model_in_use_is_waited_for_only_where_no_idle_one_is_enough() -> None:
    assert eviction(30, [BUSY, NEW], 100) == Eviction(idle=("new",))
    assert eviction(90, [BUSY, NEW], 100) == Eviction(idle=("new",), busy=("busy",))


def test_what_has_no_room_alone_makes_nobody_leave() -> None:
    assert eviction(101, [NEW, BUSY], 100) == Eviction(fits=False)


def test_what_is_unknown_is_alone_in_memory() -> None:
    assert eviction(None, [NEW], 100) == Eviction(idle=("new",))
    assert eviction(10, [NEW], None) == Eviction(idle=("new",))
    assert eviction(10, [InMemory("x", None, in_use=False, used=1), NEW], 1000) == Eviction(idle=("x",))


def test_shares_add_up_to_the_memory() -> None:
    assert shares({"a": 20, "b": 40}, 100) == {"a": 40, "b": 60}
    assert shares({"a": 70, "b": 40}, 100) == {"a": 70, "b": 40}
    assert shares({"a": None, "b": 40}, 100) == {"a": None, "b": None}


# Who waits for a load.


class WaitingEngine(ServedEngine):
    """Says that its model is loaded once it may; there is no process."""

    def __init__(self, load: Load, log: Path) -> None:
        super().__init__(load, log, lambda _: None)
        self.begun, self.may_load, self.closed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def start(self) -> None:
        self.begun.set()

    async def ready(self) -> None:
        await self.may_load.wait()
        self._loaded(model_spec(self._load.model), MemoryUse())

    async def weigh(self, names: Sequence[str], context: int) -> tuple[ModelLine, ...]:
        return ()

    async def close(self) -> None:
        self.closed.set()


class Waiting:
    """A server without sockets that has ``a`` in memory, room for one model, and ``b`` to offer."""

    def __init__(self, log: Path) -> None:
        self.engines: list[WaitingEngine] = []
        self.lines: list[str] = []
        self.pool = ModelPool(Offer(Load("a"), "a", allowed=("b",)), self._made, log, self.lines.append)
        self.app = ServerApp(self.pool, Gate(None), self.lines.append)
        self.leave = asyncio.Event()
        self.leases: list[AbstractAsyncContextManager[Resident]] = []

    def _made(self, load: Load, log: Path, share: Path | None) -> WaitingEngine:
        self.engines.append(WaitingEngine(load, log))
        return self.engines[-1]

    async def start(self) -> "Waiting":
        self.engines[0].may_load.set()
        await self.pool.start()
        return self

    async def begun(self, number: int) -> WaitingEngine:
        """Return the engine of this number, once it loads."""
        while len(self.engines) <= number:
            await asyncio.sleep(0)
        await self.engines[number].begun.wait()
        return self.engines[number]

    def lease(self, model: str) -> "asyncio.Task[Resident]":
        """Return a request for a model, which holds it for ever."""
        self.leases.append(self.pool.lease(model))
        return asyncio.ensure_future(self.leases[-1].__aenter__())

    async def ask(self, path: str, model: str = "b") -> tuple[int, bytes]:
        """Return the answer to a client that leaves once it is to."""
        body = json.dumps(asked(model)).encode()
        pieces, told = [{"type": "http.request", "body": body, "more_body": False}], list[Any]()

        async def receive() -> Any:
            if pieces:
                return pieces.pop()
            await self.leave.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            told.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
        await self.app(scope, receive, send)
        return told[0]["status"], b"".join(each.get("body", b"") for each in told)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages/count_tokens"])
async def test_who_waits_for_a_model_hears_that_the_server_stops(tmp_path: Path, path: str) -> None:
    async with asyncio.timeout(60):
        server = await Waiting(tmp_path / "log").start()
        asking = asyncio.ensure_future(server.ask(path))
        engine = await server.begun(1)
        server.app.stopping.set()
        status, told = await asking
        assert (status, b"the server is being stopped" in told) == (503, True)
        await engine.closed.wait()
        await server.pool.close()


@pytest.mark.parametrize("path", [CHAT, "/v1/messages/count_tokens"])
async def test_a_model_is_not_loaded_for_a_client_that_left(tmp_path: Path, path: str) -> None:
    async with asyncio.timeout(60):
        server = await Waiting(tmp_path / "log").start()
        asking = asyncio.ensure_future(server.ask(path))
        engine = await server.begun(1)
        server.leave.set()
        assert (await asking)[0] == 499
        assert "the client left" in server.lines[-1]
        await engine.closed.wait()
        again = server.lease("b")  # it has its turn once the other has ended
        (await server.begun(2)).may_load.set()
        assert (await again).leases == 1
        await server.pool.close()


async def test_a_client_that_leaves_the_line_makes_no_model_leave(tmp_path: Path) -> None:
    async with asyncio.timeout(60):
        server = await Waiting(tmp_path / "log").start()
        first = server.lease("b")
        engine = await server.begun(1)
        asking = asyncio.ensure_future(server.ask(CHAT, "a"))
        while "a" not in server.pool._loads:
            await asyncio.sleep(0)
        server.leave.set()
        assert (await asking)[0] == 499
        engine.may_load.set()
        assert (await first).id == "b"
        await server.pool.close()
        assert len(server.engines) == 2


async def test_a_load_goes_on_for_others_when_who_began_it_leaves(tmp_path: Path) -> None:
    async with asyncio.timeout(60):
        server = await Waiting(tmp_path / "log").start()
        first, second, third = (server.lease("b") for _ in range(3))
        engine = await server.begun(1)
        first.cancel()
        await asyncio.wait((first,))
        server.pool._loads["b"].task.add_done_callback(lambda _: second.cancel())  # before it knows that it has a lease
        engine.may_load.set()
        resident = await third
        await asyncio.wait((second,))
        assert first.cancelled()
        assert second.cancelled()
        assert not engine.closed.is_set()
        assert resident.leases == 1
        await server.pool.close()


async def test_a_model_leaves_memory_whole_though_who_wanted_its_room_is_gone(tmp_path: Path) -> None:
    may_close, closing = asyncio.Event(), asyncio.Event()

    async def close() -> None:
        closing.set()
        await may_close.wait()

    async with asyncio.timeout(60):
        server = await Waiting(tmp_path / "log").start()
        server.engines[0].close = close  # type: ignore[method-assign]
        first = server.lease("b")
        await closing.wait()
        first.cancel()
        again = server.lease("a")
        await asyncio.wait((first,))
        for _ in range(9):
            await asyncio.sleep(0)
        assert len(server.engines) == 2  # its log and its socket are still those of the one that leaves
        may_close.set()
        (await server.begun(2)).may_load.set()
        assert (await again).id == "a"
        await server.pool.close()


# Real models.


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Three models that answer differently, and take as much as each other."""
    folder = tmp_path_factory.mktemp("models")
    return {name: str(make_tiny(folder / name, seed=seed, context=200_000)) for seed, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def two(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that may have two of them in memory."""
    log = tmp_path_factory.mktemp("log") / "log"
    with serving(models["a"], log, memory=ROOM_FOR_TWO, allowed=(models["b"], models["c"])) as served:
        yield served


def asked(model: str) -> dict[str, Any]:
    return {"model": model, "messages": user("Hi"), "max_tokens": 8, "temperature": 0}


def text_of(served: Served, model: str) -> str:
    status, told = served.ask(CHAT, asked(model))
    assert status == 200, told
    assert told["model"] == model
    return str(told["choices"][0]["message"]["content"])


def loaded(served: Served, models: dict[str, str]) -> set[str]:
    here = served.health()["loaded"]
    return {name for name, model in models.items() if model in here}


def test_clients_of_two_models_are_each_answered_by_their_own(two: Served, models: dict[str, str]) -> None:
    own = {name: text_of(two, models[name]) for name in ("a", "b")}
    assert own["a"] != own["b"]

    def one(at: int) -> tuple[str, str]:
        name = "ab"[at % 2]
        if at % 4 < 2:
            return name, text_of(two, models[name])
        return name, two.ask("/v1/messages", asked(models[name]))[1]["content"][0]["text"]

    with ThreadPoolExecutor(8) as pool:
        assert all(text == own[name] for name, text in pool.map(one, range(24)))
    assert loaded(two, models) == {"a", "b"}
    entries = {each["id"]: each["loaded"] for each in two.ask("/v1/models")[1]["data"]}
    assert entries == {models["a"]: True, models["b"]: True, models["c"]: False}


def test_the_one_used_least_recently_leaves_and_comes_again(two: Served, models: dict[str, str]) -> None:
    first = text_of(two, models["b"])
    text_of(two, models["a"])
    text_of(two, models["c"])
    assert loaded(two, models) == {"a", "c"}
    assert two.ask("/v1/messages/count_tokens", {"model": models["c"], "messages": user("Hi")})[0] == 200
    assert text_of(two, models["b"]) == first
    assert loaded(two, models) == {"b", "c"}
    status, told = two.ask(CHAT, {**asked(""), "model": None})
    assert (status, told["model"]) == (200, models["a"])  # none is the one that the server was started with


def test_a_model_in_use_never_leaves(models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_pool, "WAIT_S", 0.2)
    monkeypatch.setattr(answering, "WRITE_S", 600.0)  # else a busy machine gives the reader up before all is asked
    with serving(models["a"], tmp_path / "log", memory=ROOM_FOR_ONE, allowed=(models["b"],)) as served:
        body = {"messages": user("Hi"), "max_tokens": 100_000, "min_tokens": 100_000, "temperature": 0, "stream": True}
        body |= {"logprobs": True, "top_logprobs": 20}  # more than sockets hold, before the reply ends by itself
        with socket.create_connection((HOST, served.port), 60) as raw:  # reads a little, and then nothing for a while
            data = json.dumps(body).encode()
            raw.sendall(
                b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(data))
            )
            raw.sendall(data)
            assert b"200 OK" in raw.recv(1 << 12)
            for path, body in ((CHAT, asked(models["b"])), ("/v1/messages", asked(models["b"]))):
                status, heads, told = served.told(path, body)
                assert status == 503
                assert int(heads["retry-after"]) >= 1
                assert models["a"] in told["error"]["message"]
            assert loaded(served, models) == {"a"}
            assert served.health()["replies"] == 1
        until(lambda: served.health()["replies"] == 0)
        monkeypatch.setattr(model_pool, "WAIT_S", 60.0)
        with ThreadPoolExecutor(6) as pool:  # with room for one, they take turns
            assert len(set(pool.map(lambda at: text_of(served, models["ab"[at % 2]]), range(4)))) == 2


def test_names_that_may_not_be_asked_for_are_a_404(models: dict[str, str], two: Served, tmp_path: Path) -> None:
    for name in ("gpt-4o", str(make_tiny(tmp_path / "here")), "../a", ""):
        for path in (CHAT, "/v1/messages"):
            status, told = two.ask(path, asked(name))
            assert (status, "may not be asked for" in told["error"]["message"]) == (404, True)
        assert two.ask(f"/v1/models/{quote(name or 'none')}")[0] == 404
    near = two.ask(CHAT, asked(models["c"] + "c"))[1]["error"]["message"]
    assert f"Did you mean {models['c']}?" in near
    assert two.ask(CHAT, {**asked(""), "model": 5})[0] == 400


def test_what_can_not_be_loaded_is_told_and_leaves_the_others(models: dict[str, str], tmp_path: Path) -> None:
    broken = make_tiny(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"no weights")
    with serving(models["a"], tmp_path / "log", memory=ROOM_FOR_NONE, allowed=(models["b"], str(broken))) as served:
        status, told = served.ask(CHAT, asked(models["b"]))
        assert (status, told["error"]["code"]) == (400, "model_too_large")
        assert "it needs 24.1 MB, and 20.0 MB are available" in told["error"]["message"]
        assert served.ask(CHAT, asked(models["a"]))[0] == 200  # it was there, and stayed
        status, told = served.ask(CHAT, asked(str(broken)))
        assert (status, told["error"]["param"]) == (400, "model")


def test_a_model_whose_size_is_unknown_is_alone_in_memory(tmp_path: Path) -> None:
    with serving("fast", tmp_path / "log", command=SCRIPTED, allowed=("guide", "missing")) as served:
        assert served.ask(CHAT, {**asked("missing")})[0] == 400
        assert served.ask(CHAT, asked("guide"))[0] == 200
        assert served.health()["loaded"] == ["guide"]
        assert served.ask(CHAT, asked("fast"))[0] == 200
        assert served.health()["loaded"] == ["fast"]


def test_what_is_allowed_must_be_on_the_disk(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tokamac.app.cli", "serve", "guide", "--port", "0", "--allow", str(tmp_path / "none")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "there is no folder" in done.stderr


# What is not used leaves.


def test_an_unused_model_leaves_memory_and_the_next_request_loads_it_again(tmp_path: Path) -> None:
    with serving("guide", tmp_path / "log", command=SCRIPTED, idle_s=0.0) as served:
        for _ in range(2):
            until(lambda: served.health()["loaded"] == [])
            status, told = served.ask(CHAT, {"messages": user("Hi")})
            assert (status, told["choices"][0]["tokamac"]["load_s"] > 0) == (200, True)
        assert any("the next request loads it again" in line for line in served.lines)
