"""The server itself: who may ask, what a request may hold, clients that leave or read slowly, an engine that dies, and its end."""

import asyncio
import errno
import gzip
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import repeat
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.app.serve.serving import HOST, Served, events, serving, user
from tests.scripted_engine import model_spec
from tests.tiny import make_tiny
from tests.waiting import PATIENCE_S, until
from tokamac.app.backend import client
from tokamac.app.backend.client import Died
from tokamac.app.backend.protocol import Cancel, Generate, Load, Loaded, Loading, ReplyEvent, RequestFailed
from tokamac.app.backend.sharing import SharingError
from tokamac.app.serve import answering, server
from tokamac.app.serve import engine as serve_engine
from tokamac.app.serve.engine import ServedEngine
from tokamac.app.serve.gate import Gate, TokenFileError, is_loopback, token_of
from tokamac.app.serve.request import RequestError, ServedRequest
from tokamac.app.serve.routes import CROWDED, ServerApp
from tokamac.app.serve.server import ListenError, listen
from tokamac.engine import PrefillProgress, Sampling, TextChunk
from tokamac.engine.events import Message, ModelSpec

Scripted = Callable[..., AbstractContextManager[Served]]
CHAT = "/v1/chat/completions"
HI = {"messages": user("Hi"), "max_tokens": 1}
LONG = {"messages": user("Hi"), "max_tokens": 100_000, "temperature": 0}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model that never ends by itself, two replies at once."""
    folder = tmp_path_factory.mktemp("tiny")
    with serving(str(make_tiny(folder / "model", context=200_000)), folder / "log", parallel=2) as served:
        yield served


# Who may ask.


def test_a_web_page_may_not_ask(guide: Served) -> None:
    for origin in ("https://evil.example", "http://localhost:3000", "null"):
        status, heads, told = guide.told(CHAT, HI, headers={"Origin": origin})
        assert (status, told["error"]["code"]) == (403, "wrong_origin")
        assert "access-control-allow-origin" not in heads
    assert guide.ask(CHAT, method="OPTIONS", headers={"Origin": "https://evil.example"})[0] in (403, 405)


def test_a_name_that_is_not_of_this_machine_is_refused(guide: Served) -> None:
    for path in ("/v1/models", "/health"):
        status, told = guide.ask(path, headers={"Host": "evil.example"})
        assert (status, told["error"]["code"]) == (403, "wrong_host")
    for name in ("localhost", f"localhost:{guide.port}", "127.0.0.1:80", "[::1]:80"):
        assert guide.ask("/v1/models", headers={"Host": name})[0] == 200


def test_a_host_is_any_bytes_and_still_one_line_of_the_log(guide: Served) -> None:
    # A line is written after its answer: one of an earlier test may come in between.
    def logged(path: str) -> int:
        return sum(f" {path} 403 " in line and "wrong_host" in line for line in guide.lines)

    for host in ("[", "[::1", "a]b", "a\\b", "localhost@evil.example", "evil.example@127.0.0.1"):
        for path in (CHAT, "/health/", "/nothing"):
            before = logged(path)
            status, told = guide.ask(path, {"messages": []}, headers={"Host": host})
            assert (status, told["error"]["code"]) == (403, "wrong_host")
            until(lambda: logged(path) == before + 1)  # noqa: B023
    assert guide.ask("/health/")[0] == 404


def test_a_page_that_was_allowed_may_ask_and_read(tmp_path: Path) -> None:
    page = "http://localhost:3000"
    with serving("guide", tmp_path / "log", origins=(page,), hosts=("proxy.home",)) as served:
        status, heads, _ = served.told(CHAT, HI, headers={"Origin": page, "Host": "proxy.home"})
        assert (status, heads["access-control-allow-origin"]) == (200, page)
        asked = {"Origin": page, "Access-Control-Request-Headers": "content-type"}
        status, heads, _ = served.told(CHAT, method="OPTIONS", headers=asked)
        assert (status, heads["access-control-allow-headers"]) == (204, "content-type")
        assert served.ask(CHAT, HI, headers={"Origin": "http://localhost:3001"})[0] == 403
        # It is told nothing of what others asked.
        assert served.ask("/v1/requests", headers={"Origin": page})[0] == 403
        served.ask(CHAT, dated("2026-11-28"))
        use = served.ask(CHAT, dated("2026-11-29"), headers={"Origin": page})[1]["choices"][0]["tokamac"]["cache"]
        assert (use["churn"], use["held"], use["now"]) == ("date", "", "")


def test_the_token_is_asked_for_by_either_name(tmp_path: Path) -> None:
    with serving("guide", tmp_path / "log", token="a-token-of-the-test") as served:
        for heads in ({}, {"Authorization": "Bearer no"}, {"Authorization": "a-token-of-the-test"}, {"X-Api-Key": "ä"}):
            status, answered, told = served.told(CHAT, HI, headers=heads)
            assert (status, told["error"]["code"]) == (401, "invalid_api_key")
            assert answered["www-authenticate"] == "Bearer"
        assert served.ask(CHAT, HI, headers={"Authorization": "Bearer a-token-of-the-test"})[0] == 200
        assert served.ask("/health", headers={"X-Api-Key": "a-token-of-the-test"})[0] == 200
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="a-token-of-the-test", max_retries=0) as client:
            assert client.models.list().data


def test_outside_loopback_any_name_is_one_of_the_machine() -> None:
    Gate(("Studio.Home.",)).check({"host": "STUDIO.home:80"})
    Gate(None, token="t" * 16).check({"host": "studio.local:11435", "authorization": f"Bearer {'t' * 16}"})
    with pytest.raises(RequestError, match="token"):
        Gate(None, token="t" * 16).check({"host": "studio.local:11435"})
    assert [is_loopback(each) for each in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "192.168.1.2", "name")] == [
        True, True, True, False, False, False, False,
    ]  # fmt: skip


def test_the_tokens_file_is_the_users_alone(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "token"
    token = token_of(file)
    assert len(token) >= 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert token_of(file) == token
    file.chmod(0o644)
    with pytest.raises(TokenFileError, match="others can read"):
        token_of(file)
    file.chmod(0o600)
    file.write_text("short\n")
    with pytest.raises(TokenFileError, match="holds no token"):
        token_of(file)
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TokenFileError, match="can't be used"):
        token_of(file)


# What a request may hold.


def test_what_is_no_request_is_refused(guide: Served) -> None:
    deep = b'{"a": ' * 150 + b"1" + b"}" * 150
    for body in (b"{", b"[1]", b'{"messages": NaN}', b"\xff\xfe", b"[" * 100_000, deep):
        assert guide.ask(CHAT, body)[0] == 400
    for number in ("1e999", "-1e999", "1" + "0" * 400):
        status, told = guide.ask(CHAT, b'{"messages": [], "metadata": {"a": %s}}' % number.encode())
        assert (status, told["error"]["code"]) == (400, "invalid_json")
    status, told = guide.ask("/v1/nothing", {})
    assert (status, "/v1/embeddings, " in told["error"]["message"]) == (404, True)
    assert guide.ask("/v1/messages/nothing", {})[1]["type"] == "error"  # in Anthropic's words
    assert guide.ask(CHAT)[0] == 405


def test_a_body_too_long_is_refused_before_and_after_it_came(guide: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "LONGEST_BODY", 100_000)
    body = json.dumps({"messages": user("a" * 200_000)}).encode()
    assert guide.ask(CHAT, body)[0] == 413
    with socket.create_connection((HOST, guide.port), 60) as raw:  # in pieces, so that no length was said
        raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        with suppress(ConnectionError):
            for at in range(0, len(body), 50_000):
                piece = body[at : at + 50_000]
                raw.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
        assert raw.recv(12) == b"HTTP/1.1 413"


def test_headers_and_bodies_have_a_time_and_headers_a_length(guide: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEADERS_S", 0.2)
    monkeypatch.setattr(answering, "BODY_S", 0.2)
    with socket.create_connection((HOST, guide.port), 60) as raw:
        raw.sendall(b"GET /health HT")
        assert raw.recv(99) == b""
    with socket.create_connection((HOST, guide.port), 60) as raw:
        raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
        assert raw.recv(12) == b"HTTP/1.1 408"
    with socket.create_connection((HOST, guide.port), 60) as raw, suppress(ConnectionError):
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * 300_000)
        assert raw.recv(12) in (b"HTTP/1.1 400", b"")
    assert guide.ask("/health")[0] == 200


def test_packed_bodies_are_read_and_bombs_are_not(guide: Served) -> None:
    bomb = b" " * (answering.LONGEST_BODY + 1)
    body, packs = json.dumps(HI).encode(), {"gzip": gzip.compress, "deflate": zlib.compress}
    for name, pack in packs.items():
        for data, expected in ((pack(body), 200), (pack(body)[:-9], 400), (body, 400), (pack(bomb), 413)):
            assert guide.ask(CHAT, data, headers={"Content-Encoding": name})[0] == expected
    assert guide.ask(CHAT, body, headers={"Content-Encoding": "br"})[0] == 415


def test_every_answer_has_the_id_that_the_log_has(guide: Served) -> None:
    for path, body in ((CHAT, HI), (CHAT, {}), ("/v1/messages", {}), ("/nothing", None), ("/health", None)):
        _, heads, told = guide.told(path, body, headers={"Host": "a"} if path == "/health" else None)
        id = heads["x-request-id"]
        assert heads["request-id"] == id
        assert told.get("request_id", id) == id  # Anthropic's errors have it, too
        until(lambda: any(id in line for line in guide.lines))  # noqa: B023


def test_headers_that_came_at_once_are_bounded(guide: Served) -> None:
    assert guide.ask("/health", headers={"X-Long": "a" * 60_000})[0] == 200
    status, told = guide.ask("/health", headers={f"X-{at}": "a" * 20_000 for at in range(5)})
    assert (status, told["error"]["code"]) == (431, "headers_too_large")


async def test_a_connection_too_many_is_told_so_in_json() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    pool: Any = None  # it is refused before anybody looks for a model
    scope = {"type": "http", "method": "POST", "path": "/v1/messages", "query_string": b"", "headers": []}
    scope["state"] = {CROWDED: True}
    await ServerApp(pool, Gate(None), lambda _: None)(scope, receive, send)
    heads = dict(sent[0]["headers"])
    assert (sent[0]["status"], heads[b"connection"], int(heads[b"retry-after"])) == (503, b"close", 5)
    assert json.loads(sent[1]["body"])["error"]["type"] == "overloaded_error"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"]), "content": st.text(max_size=20) | JSON},
        optional={"tool_calls": JSON, "tool_call_id": JSON, "name": JSON},
    ),
    max_size=3,
)
BODIES = st.fixed_dictionaries(
    {"max_tokens": st.just(2)},
    optional={
        "messages": MESSAGES | JSON, "prompt": JSON, "input": JSON | MESSAGES, "system": JSON, "tools": JSON, "stop": JSON,
        "n": JSON, "stream": JSON, "temperature": JSON, "logit_bias": JSON, "tool_choice": JSON, "logprobs": JSON, "seed": JSON,
        "response_format": JSON, "reasoning": JSON, "thinking": JSON, "stream_options": JSON, "chat_template_kwargs": JSON,
    },
)  # fmt: skip


@pytest.mark.parametrize(
    "path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"]
)
def test_no_body_is_more_than_the_server_bears(guide: Served, path: str) -> None:
    @settings(max_examples=60)
    @given(BODIES | JSON)
    def tried(body: Any) -> None:
        status, told = guide.ask(path, json.dumps(body).encode())
        assert status in (200, 400), (status, told)
        if status == 400:
            assert told["error"]["message"]

    tried()
    assert guide.health()["status"] == "ok"


def test_a_prompt_that_no_line_to_the_engine_holds_is_refused(guide: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LONGEST_LINE", 10_000)
    status, told = guide.ask(CHAT, {**HI, "messages": user("ж" * 2_000)})  # six bytes each there, two in the body
    assert (status, told["error"]["code"]) == (400, "context_length_exceeded")
    assert guide.ask("/v1/completions", {"prompt": "ж" * 2_000})[0] == 400
    assert guide.health()["status"] == "ok"
    assert guide.ask(CHAT, HI)[0] == 200


def test_replies_to_one_request_have_seeds_after_the_largest_as_well(guide: Served) -> None:
    asked = {**HI, "temperature": 1, "n": 3}
    whole = guide.ask(CHAT, {**asked, "seed": 2**63 - 1})[1]["choices"]
    first = guide.ask(CHAT, {**asked, "seed": 0})[1]["choices"]
    assert [each["message"] for each in whole[1:]] == [each["message"] for each in first[:2]]


def test_what_fails_is_an_answer_and_no_reply_stays_counted(guide: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: ServedRequest, sample: int) -> Sampling:
        return Sampling(seed=-sample)

    with monkeypatch.context() as patched:
        patched.setattr(ServedRequest, "sampling_of", failing)
        status, told = guide.ask(CHAT, {**HI, "n": 3})
    assert (status, told["error"]["code"]) == (500, "internal")
    until(lambda: any("500" in line and "internal" in line for line in guide.lines))
    assert guide.health()["replies"] == 0


def test_the_log_holds_figures_and_nothing_that_anybody_wrote(guide: Served) -> None:
    guide.ask(CHAT, {"messages": user("a very secret question"), "max_tokens": 5})
    guide.ask("/v1/%1b]52;x", {})
    guide.ask(CHAT, {"messages": user("another secret"), "temperature": "secret"})
    until(lambda: any(" 404 " in line for line in guide.lines))
    assert "prompt " in next(line for line in guide.lines if f"{CHAT} 200" in line)
    assert not any("secret question" in line or "another secret" in line or "\x1b" in line for line in guide.lines)


def dated(date: str) -> dict[str, Any]:
    """A request whose system prompt begins with the date."""
    rules = " ".join(f"Rule {number}: be brief about number {number}." for number in range(12))
    return {"messages": [{"role": "system", "content": f"Today is {date}. {rules}"}, *user("Hi")], "max_tokens": 1}


def test_what_was_read_again_is_told_in_answers_the_list_of_requests_and_the_log(guide: Served) -> None:
    uses = []
    for day, path in ((1, CHAT), (2, CHAT), (3, "/v1/messages"), (4, "/v1/responses")):
        asked = dated(f"2026-11-0{day}")
        if path == "/v1/messages":
            asked["system"] = asked["messages"].pop(0)["content"]
        if path == "/v1/responses":
            asked = {"input": asked["messages"], "max_output_tokens": 16}
        told = guide.ask(path, asked)[1]
        uses.append((told["choices"][0] if path == CHAT else told)["tokamac"]["cache"])
    for day, use in enumerate(uses[1:], 1):
        assert (use["reason"], use["part"], use["churn"]) == ("changed", "system prompt", "date")
        assert (use["held"], use["now"]) == (f"2026-11-0{day}", f"2026-11-0{day + 1}")
        assert use["again_tokens"] > 100
    newest = guide.ask("/v1/requests")[1]["data"][0]
    assert (newest["path"], newest["model"], newest["status"]) == ("/v1/responses", "guide", 200)
    assert newest["replies"][0]["cache"] == uses[-1]
    until(lambda: any("/v1/responses" in line and "again" in line for line in guide.lines))
    (line,) = (line for line in guide.lines if "/v1/responses 200" in line and "again" in line)
    assert f"again {uses[-1]['again_tokens']} (date from {uses[-1]['common_tokens']} system prompt" in line
    assert "2026" not in line
    assert len(guide.ask("/v1/requests")[1]["data"]) <= 50


# Clients that leave, read slowly, or are too many.


def begun(served: Served, body: dict[str, Any]) -> socket.socket:
    """Ask for a stream, and return its connection once the first text came; nothing more of it is read."""
    raw = socket.create_connection((HOST, served.port), 60)
    data = json.dumps({**body, "stream": True}).encode()
    raw.sendall(
        b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (CHAT.encode(), len(data), data)
    )
    seen = b""
    while seen.count(b"data: ") < 2:
        seen += raw.recv(4096)
    return raw


def test_a_client_that_leaves_ends_its_reply(tiny: Served) -> None:
    raw = begun(tiny, LONG)
    assert tiny.health()["replies"] == 1
    raw.close()
    until(lambda: tiny.health()["replies"] == 0)
    waiting = tiny.connection()
    waiting.request("POST", CHAT, json.dumps(LONG))
    until(lambda: tiny.health()["replies"] == 1)
    waiting.close()
    until(lambda: tiny.health()["replies"] == 0)
    until(lambda: sum("the client left" in line for line in tiny.lines) >= 2)  # logged once the reply has ended


def test_a_client_that_reads_slowly_holds_up_nobody_and_gets_all(tiny: Served) -> None:
    long = {**LONG, "max_tokens": 6_000, "logprobs": True, "top_logprobs": 20}  # more than sockets hold
    raw = begun(tiny, long)
    until(lambda: tiny.ask(CHAT, {**LONG, "max_tokens": 500})[0] == 200)
    rest = b""
    while b"data: [DONE]" not in rest[-100:]:
        piece = raw.recv(1 << 16)
        assert piece
        rest += piece
    raw.close()
    assert rest.count(b'"finish_reason":"length"') == 1


def test_a_client_that_reads_nothing_is_left_in_time(tiny: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "WRITE_S", 0.3)
    raw = begun(tiny, {**LONG, "logprobs": True, "top_logprobs": 20})
    until(lambda: tiny.health()["replies"] == 0)
    raw.close()


def test_too_many_are_told_when_to_come_again(scripted: Scripted) -> None:
    with scripted("steady", parallel=1) as served:
        first = begun(served, {"messages": user("Hi")})
        with ThreadPoolExecutor(11) as pool:
            asked = [pool.submit(served.told, CHAT, HI) for _ in range(11)]
            until(lambda: sum(each.done() for each in asked) >= 2)  # the turn that all wait for is held
            first.close()
            told = [each.result() for each in asked]
        refused = [(heads, answer) for status, heads, answer in told if status == 429]
        assert len(refused) >= 2
        assert sum(status == 200 for status, _, _ in told) >= 8
        heads, answer = refused[0]
        assert int(heads["retry-after"]) >= 1
        assert answer["error"]["type"] == "rate_limit_error"


def test_who_waits_for_a_turn_is_told_so(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "FIRST_S", 0.05)
    monkeypatch.setattr(answering, "PING_S", 0.05)
    with scripted("slow", parallel=1) as served:
        first = begun(served, {"messages": user("Hi"), "max_tokens": 12})
        status, raw = served.ask(CHAT, {"messages": user("Hi"), "stream": True, "max_tokens": 1})
        assert status == 200
        assert raw.startswith(b": still here\n\n")
        assert events(raw)[-1][1] == "[DONE]"
        first.close()


# An engine that dies.


def test_a_dead_engine_is_a_clear_error_and_a_new_one(scripted: Scripted) -> None:
    with scripted("dies-decoding") as served:
        status, heads, told = served.told(CHAT, {"messages": user("Hi")})
        assert (status, told["error"]["code"]) == (503, "engine_unavailable")
        assert "the engine ended (exit status 7)" in told["error"]["message"]
        assert int(heads["retry-after"]) >= 1
        status, _ = served.ask(CHAT, {"messages": user("Hi")})
        assert status == 503  # it is started by who asks next, since it died at once
        until(lambda: served.ask("/health")[0] == 200)
        status, raw = served.ask(CHAT, {"messages": user("Hi"), "stream": True})
        assert status == 200  # the stream had begun
        told = events(raw)
        assert told[-2][1]["error"]["code"] == "engine_unavailable"
        assert any("the engine ended" in line for line in served.lines)


class Process:
    """Keeps what is sent, and says what a test has it say."""

    alive = True

    def __init__(self, hear: Callable[[object], object]) -> None:
        self.sent: list[Any] = []
        self._hear = hear

    def send(self, request: object) -> None:
        self.sent.append(request)

    def set_busy(self, _: object) -> None: ...

    async def say(self, *events: object) -> None:
        for event in events:
            self._hear(event)
        await asyncio.sleep(0)


class Processes(list[Process]):
    """Those that were started. fails: why the next are not."""

    fails: Iterator[Exception] = iter(())

    def start(self, *asked: Any, **_: object) -> Process:
        for failure in self.fails:
            raise failure
        self.append(Process(asked[-1]))
        return self[-1]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    made = Processes()
    for kind in ("EngineProcess", "EngineGuest"):
        monkeypatch.setattr(serve_engine, kind, made.start)
    return made


async def test_while_an_engine_is_started_again_clients_stay_away_as_long_as_loading_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: Processes
) -> None:
    clock_s, found = [0.0], []
    monkeypatch.setattr(serve_engine.time, "monotonic", lambda: clock_s[0])
    engine = ServedEngine(Load("large"), tmp_path / "log", lambda _: None)
    engine.start()
    clock_s[0] = 40.0
    await processes[0].say(Loaded(model_spec("large"), load=1))
    clock_s[0] = 900.0
    await processes[0].say(Loaded(model_spec("other"), load=2))  # whose process it is has changed the model
    clock_s[0] = 1_000.0
    reading = asyncio.ensure_future(engine.tokens("Hi"))
    await asyncio.sleep(0)
    await processes[0].say(Died("exit status 7", ""))
    for clock_s[0] in (1_000.0, 1_010.0):
        with pytest.raises(RequestError) as failed:
            await (reading if not found else engine.tokens("Hi"))
        found.append(failed.value.retry_after_s)
    assert found == [40, 30]


async def test_no_other_model_replies_than_a_request_was_read_for(tmp_path: Path, processes: Processes) -> None:
    asked, one, other = ServedRequest(((Message("user", "Hi"),),), Sampling()), model_spec("one"), model_spec("other")
    engine = ServedEngine(Load(""), tmp_path / "log", lambda _: None, join=tmp_path / "socket")
    engine.start()
    (process,) = processes

    async def refused(model: ModelSpec) -> RequestError:
        with pytest.raises(RequestError) as failed:
            async with engine.replies(asked, model):
                pass
        assert (failed.value.status, engine.admission.open) == (503, 0)
        return failed.value

    await process.say(Loaded(one, load=1))
    async with engine.replies(asked, one):
        (sent,) = (each for each in process.sent if isinstance(each, Generate))
        assert sent.load == 1
        await process.say(Loading())
        assert engine.state == "loading"
    assert process.sent[-1] == Cancel(sent.id)  # also while the next model is loaded
    await refused(one)
    await process.say(RequestFailed(None, "it does not fit", kind="MemoryLimitError"))
    assert "it does not fit" in (await refused(one)).message
    assert len(processes) == 1  # its owner may load another one
    await process.say(Loaded(other, load=2))
    await refused(one)
    async with engine.replies(asked, other):
        assert process.sent[-1].load == 2


@pytest.mark.parametrize(
    ("prompt_cache", "reads", "seeds"),
    [(True, False, [3, 3]), (True, True, [3, 3, 4, 5]), (False, False, [3, 4, 5, 3, 4, 5])],
)
async def test_other_replies_to_a_prompt_begin_once_the_first_has_read_it(
    tmp_path: Path, processes: Processes, prompt_cache: bool, reads: bool, seeds: list[int]
) -> None:
    asked = ServedRequest(((Message("user", "Hi"),), (Message("user", "Ho"),)), Sampling(seed=3), n=3)
    engine = ServedEngine(Load("", prompt_cache=prompt_cache), tmp_path / "log", lambda _: None)
    engine.start()
    (process,) = processes
    await process.say(Loaded(model_spec("one"), load=1))
    async with engine.replies(asked, model_spec("one")):
        if reads:
            id = next(each.id for each in process.sent if isinstance(each, Generate))
            said = PrefillProgress(1, 1, 0), TextChunk("a"), TextChunk("b")
            await process.say(*(ReplyEvent(id, each) for each in said))
        assert [each.sampling.seed for each in process.sent if isinstance(each, Generate)] == seeds
    assert engine.admission.open == 0


async def test_who_asks_next_tries_to_start_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: Processes
) -> None:
    monkeypatch.setattr(serve_engine, "LASTED_S", -1.0)
    engine = ServedEngine(Load("large"), tmp_path / "log", lambda _: None)
    engine.start()
    await processes[0].say(Loaded(model_spec("large"), load=1))
    processes.fails = repeat(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))
    await processes[0].say(Died("exit status 7", ""))
    for _ in range(2):
        with pytest.raises(RequestError, match="can't be started: Cannot allocate memory") as failed:
            await engine.tokens("Hi")
        assert (failed.value.status, failed.value.code) == (503, "engine_unavailable")
    with pytest.raises(RequestError, match="Cannot allocate memory"):
        await asyncio.wait_for(engine.ready(), 60)
    processes.fails = iter(())
    with pytest.raises(RequestError):
        await engine.tokens("Hi")
    assert engine.state == "loading"


async def test_a_chats_engine_is_looked_for_again_though_there_is_no_memory_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: Processes
) -> None:
    monkeypatch.setattr(serve_engine, "JOIN_S", 0.0)
    engine = ServedEngine(Load(""), tmp_path / "log", lambda _: None, join=tmp_path / "socket")
    engine.start()
    await processes[0].say(Loaded(model_spec("large"), load=1))
    processes.fails = iter((OSError(errno.EMFILE, "Too many open files"), SharingError("no engine answers")))
    await processes[0].say(Died("exit status 7", ""))
    assert (engine.state, engine.problem) == ("down", "the engine ended (exit status 7)")
    async with asyncio.timeout(60):
        while engine.state != "loading":
            await asyncio.sleep(0)
    assert next(processes.fails, None) is None


def test_a_model_that_can_not_be_loaded_is_told_at_the_start(scripted: Scripted) -> None:
    with pytest.raises(RequestError, match="no model is called 'missing'"), scripted("missing"):
        pass


# The command.


@contextmanager
def command(tmp_path: Path, *flags: str, model: str = "guide") -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start ``tokamac serve`` and yield it with its port."""
    home = {
        name: str(tmp_path) for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME")
    }
    log = tmp_path / "stderr"  # a pipe that nobody reads would hold the server up, once it is full
    with log.open("w", encoding="utf-8") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "tokamac.app.cli", "serve", model, "--port", "0", *flags],
            stderr=stderr, env={**os.environ, **home},
        )  # fmt: skip
    told: list[re.Match[str]] = []

    def is_told() -> bool:
        assert process.poll() is None
        told.extend(re.finditer(r"serving .*?:(\d+);", log.read_text(encoding="utf-8")))
        return bool(told)

    try:
        until(is_told)
        yield process, int(told[0].group(1))
    finally:
        process.kill()
        process.wait()


def children(process: subprocess.Popen[bytes]) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False).stdout
    return [int(each) for each in found.split()]


def test_ctrl_c_ends_streams_and_the_server(tmp_path: Path) -> None:
    with command(tmp_path) as (process, port):
        served = Served(port)
        (engine,) = children(process)
        raw = begun(served, {"messages": user("Hi"), "n": 60, "temperature": 2})
        process.send_signal(signal.SIGINT)
        rest = b""
        while piece := raw.recv(1 << 16):
            rest += piece
        raw.close()
        assert b'"code":"server_stopping"' in rest
        assert process.wait(PATIENCE_S) == 130
        with pytest.raises(ProcessLookupError):
            os.kill(engine, 0)


def test_an_engine_that_is_killed_under_load_is_replaced(tmp_path: Path) -> None:
    with command(tmp_path) as (process, port):
        served = Served(port)
        (engine,) = children(process)
        with ThreadPoolExecutor(8) as pool:
            asked = [
                pool.submit(served.ask, CHAT, {"messages": user("Hi"), "n": 8, "temperature": 2, "stream": at % 2 == 0})
                for at in range(8)
            ]
            until(lambda: served.health()["replies"] == 8)
            os.kill(engine, signal.SIGKILL)
            told = [each.result() for each in asked]
        for at, (status, answer) in enumerate(told):
            if at % 2:
                assert (status, answer["error"]["code"]) == (503, "engine_unavailable")
                assert "the engine ended (" in answer["error"]["message"]
            elif status == 200:  # the stream had begun
                assert events(answer)[-2][1]["error"]["code"] == "engine_unavailable"
            else:
                assert status == 503
        until(lambda: served.ask(CHAT, HI)[0] == 200)
        assert children(process) != [engine]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_a_server_that_is_killed_under_load_leaves_no_engine_and_its_port(tmp_path: Path) -> None:
    model = str(make_tiny(tmp_path / "model", context=200_000))
    with command(tmp_path, "--parallel", "4", model=model) as (process, port):
        served = Served(port)
        (engine,) = children(process)
        streams = [begun(served, LONG) for _ in range(4)]
        process.kill()
        for raw in streams:
            while piece := received(raw):
                assert b"[DONE]" not in piece  # it looks like no whole answer
            raw.close()

        def is_gone() -> bool:
            with suppress(ProcessLookupError):
                os.kill(engine, 0)
                return False
            return True

        until(is_gone)
    with command(tmp_path, "--port", str(port), model=model) as (_, again):
        assert again == port
        served = Served(again)
        assert all(served.ask(CHAT, {**HI, "model": name})[0] == 200 for name in ("model", model))
        (entry,) = served.ask("/v1/models")[1]["data"]
        assert (entry["id"], entry["display_name"]) == ("model", "model"), "no path of this machine is told"


def received(raw: socket.socket) -> bytes:
    try:
        return raw.recv(1 << 16)
    except ConnectionError:
        return b""


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with listen(HOST, 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=f"port {port} is in use"):
            listen(HOST, port)
        done = subprocess.run(
            [sys.executable, "-m", "tokamac.app.cli", "serve", "guide", "--port", str(port)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert (
        done.stderr == f"tokamac: port {port} is in use. Stop what listens there, or take another: --port {port + 1}.\n"
    )
    with pytest.raises(ListenError, match="--host"):
        listen("no such host", 0)
