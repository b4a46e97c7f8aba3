"""``tokamac launch`` with small programs in place of the agents, on a server whose engine plays scripts."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.serve.serving import HOST, Served, serving
from tests.scripted_engine import SCRIPTED
from tests.waiting import PATIENCE_S, until
from tokamac.app import cli
from tokamac.app.serve.clients import AGENTS, Endpoint
from tokamac.app.serve.launched import fixed_part

TOOL = {"name": "read_file", "input_schema": {"type": "object"}}
# What stands in for Claude Code: it asks twice, as it is told to by its environment, and ends with a status of its own.
STAND_IN = f"""#!{sys.executable}
import json, os, sys, urllib.request
name, value = os.environ["ANTHROPIC_CUSTOM_HEADERS"].split(": ")
for question in ("one", "two"):
    body = {{"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 8, "system": "Be brief.", "tools": [{json.dumps(TOOL)}],
            "messages": [{{"role": "user", "content": question}}]}}
    asked = urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", json.dumps(body).encode(), {{name: value}})
    urllib.request.urlopen(asked).read()
print(json.dumps({{"arguments": sys.argv[1:], "key": os.environ.get("ANTHROPIC_API_KEY")}}), flush=True)
sys.exit(7)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Puts a program on the path, and the state of this test into a folder of its own."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "bin").mkdir()

    def put(name: str, text: str) -> Path:
        file = tmp_path / "bin" / name
        file.write_text(text)
        file.chmod(0o755)
        return file

    return put


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving("calls", tmp_path_factory.mktemp("log") / "log", command=SCRIPTED) as served:
        yield served


def test_an_agent_runs_on_the_server_and_its_prompt_is_read_ahead_the_next_time(
    program: Callable[[str, str], Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "of another service")
    program("claude", STAND_IN)
    with serving("calls", tmp_path / "log", command=SCRIPTED) as server:
        launched = ["launch", "claude", "--port", str(server.port), "--", "-p", "--model", "x"]
        assert cli.main(launched) == 7
        told, said = capfd.readouterr()
        assert json.loads(told) == {"arguments": ["-p", "--model", "x"], "key": None}
        assert "is not known here yet" in said
        assert "Claude Code's first prompt: " in said
        assert "Claude Code's second prompt: " in said
        (kept,) = (tmp_path / "state").rglob("claude.*.json")
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
        assert set(json.loads(kept.read_text())["body"]) == {"system", "tools", "messages", "max_tokens"}
        assert "one" not in kept.read_text()  # nothing that the user said
        before = len(server.ask("/v1/requests")[1]["data"])
        assert cli.main(launched) == 7
        assert "the prompt of Claude Code: read " in capfd.readouterr().err
        assert len(server.ask("/v1/requests")[1]["data"]) == before + 3


def test_what_can_not_work_is_refused_in_a_line(
    program: Callable[[str, str], Path], server: Served, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def said(*arguments: str, status: int = 1) -> str:
        assert cli.main(["launch", *arguments]) == status
        return capfd.readouterr().err

    here = ("--port", str(server.port))
    assert "invalid choice" in said("codx", *here, status=2)
    assert "is no port" in said("claude", "--port", "0", status=2)
    assert "Install it: npm install -g opencode-ai" in said("opencode", *here)
    program("claude", "")
    assert "This server has calls." in said("claude", "-m", "org/other", *here)
    with serving("tiny-context", tmp_path / "log", command=SCRIPTED) as tiny:
        line = said("claude", "--port", str(tiny.port))
        assert "tiny-context holds 8 tokens, and Claude Code sends about 19,000 tokens of its own" in line
    with socket.create_server((HOST, 0)) as other:

        def greet() -> None:
            with other.accept()[0] as met:
                met.recv(1 << 16)
                met.sendall(b"SSH-2.0-other\r\n")

        threading.Thread(target=greet, daemon=True).start()
        assert "is no server of Tokamac's" in said("claude", "--port", str(other.getsockname()[1]))


def listens(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex((HOST, port)) == 0


@pytest.mark.parametrize("number", [0, signal.SIGKILL, signal.SIGHUP])
def test_its_own_server_never_outlives_it(program: Callable[[str, str], Path], tmp_path: Path, number: int) -> None:
    with socket.create_server((HOST, 0)) as free:
        begun, port = tmp_path / "begun", free.getsockname()[1]
    program("pi", f"#!/bin/sh\ntouch {begun}\nwhile [ -e {begun} ]; do sleep 0.05; done\n")
    launch = [sys.executable, "-m", "tokamac.app.cli", "launch", "pi", "-m", "guide", "--port", str(port)]
    process = subprocess.Popen(launch)
    until(begun.exists)
    assert listens(port)
    if number:
        process.send_signal(number)
        until(lambda: not listens(port))
    begun.unlink()
    process.wait(PATIENCE_S)
    assert not listens(port)


@pytest.mark.parametrize("end", [(signal.SIGINT, os.killpg, 3), (signal.SIGTERM, os.kill, 4)])
def test_ctrl_c_and_an_end_are_the_agents(
    program: Callable[[str, str], Path],
    server: Served,
    tmp_path: Path,
    end: tuple[int, Callable[[int, int], None], int],
) -> None:
    number, send, status = end
    begun = tmp_path / "begun"
    traps = "trap 'exit 3' INT\ntrap 'exit 4' TERM"
    program("claude", f"#!/bin/sh\n{traps}\ntouch {begun}\nwhile :; do sleep 0.05; done\n")
    command = [sys.executable, "-m", "tokamac.app.cli", "launch", "claude", "--port", str(server.port)]
    process = subprocess.Popen(command, start_new_session=True)
    until(begun.exists)
    send(process.pid, number)
    assert process.wait(PATIENCE_S) == status


def test_each_agent_is_told_the_server_the_model_and_its_room(tmp_path: Path) -> None:
    at = Endpoint("http://127.0.0.1:1", "org/model", "SECRET", 40_000, "claude.00000000.00000000")
    started = {name: agent.start(at, tmp_path) for name, agent in AGENTS.items()}
    claude = started["claude"].environment or {}
    assert (claude["ANTHROPIC_BASE_URL"], claude["CLAUDE_CODE_MAX_OUTPUT_TOKENS"]) == (at.url, "8192")
    # It compacts at 27 of 100 thousand tokens, so that a reply, and a tenth of the context, stay free.
    assert (claude["CLAUDE_CODE_AUTO_COMPACT_WINDOW"], claude["CLAUDE_AUTOCOMPACT_PCT_OVERRIDE"]) == ("100000", "27")
    codex: dict[str, Any] = tomllib.loads("\n".join(started["codex"].arguments[1::2]))
    assert codex["model_providers"]["tokamac"]["http_headers"] == {"x-tokamac-client": at.client}
    assert (codex["model_context_window"], codex["model_auto_compact_token_limit"]) == (40_000, 27_808)
    opencode = json.loads((started["opencode"].environment or {})["OPENCODE_CONFIG_CONTENT"])
    assert opencode["provider"]["tokamac"]["models"] == {"org/model": {"limit": {"context": 40_000, "output": 8192}}}
    file = Path(started["pi"].arguments[1])
    assert '"contextWindow": 40000' in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("path", "body", "kept"),
    [
        ("/v1/messages", {"tools": [1], "messages": [{"role": "user"}]}, {"tools", "messages", "max_tokens"}),
        ("/v1/messages", {"messages": [{"role": "user"}]}, None),
        ("/v1/messages", {"tools": [1], "messages": [{"role": "user"}, {"role": "assistant"}]}, None),
        ("/v1/responses", {"tools": [1], "input": [{"type": "function_call"}]}, None),
        ("/v1/responses", {"tools": [1], "input": "Hi"}, None),
        ("/v1/chat/completions", {"tools": [1], "messages": [3]}, None),
    ],
)
def test_only_a_first_request_with_tools_is_kept(path: str, body: dict[str, Any], kept: set[str] | None) -> None:
    fixed = fixed_part(path, body)
    assert (None if fixed is None else set(fixed)) == kept
