"""``tokamac launch``: starts an agent on the local model, with its settings in the environment and its prompt read ahead."""

import argparse
import http.client
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

import platformdirs

from tokamac.engine.errors import TokamacError
from tokamac.engine.requirements import pip_install

from ..backend.processes import NEEDS, PORT, serve_command
from ..options import MODEL, default_model, model_name
from ..parser import Parser
from ..serve.clients import AGENTS, Agent, Endpoint
from ..serve.launched import kept_prompt, state_folder
from ..text.terminal import note
from ..text.units import count, seconds
from .loading import fetch
from .serve import HOST, port_number, token_file

LOOK_S = 0.2  # how often a server that is starting is asked whether it is ready
ANSWER_S = 5.0
AHEAD_S = 3.0  # how long the agent waits for its prompt to be read before it starts; the rest is read meanwhile
ENDS = (signal.SIGTERM, signal.SIGHUP)
END_S = 10.0  # how long a server may take to end
MAIN_SHARE = 0.5  # of the longest prompt: shorter ones are an agent's side requests, for titles and such


class TokenWantedError(TokamacError):
    """The server asks for the token of its file."""


class LaunchParser(Parser):
    def parse_args(  # type: ignore[override]  # the cli asks for no other Namespace
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        given = list(args or ())
        at = given.index("--") if "--" in given else len(given)
        options = super().parse_args(given[:at], namespace)
        options.arguments = given[at + 1 :]
        return options


def parser() -> Parser:
    made = LaunchParser(
        "launch",
        "Start a coding agent on a local model: on the server that runs on the port, else on one of its own, which ends with "
        "it. Only the agent's environment and arguments are set, none of its files. What follows -- is the agent's.",
        "  tokamac launch claude\n"
        "  tokamac launch codex -m mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit\n"
        '  tokamac launch claude -- -p "What does this folder hold?"',
    )
    made.add_argument("agent", choices=tuple(AGENTS), metavar="AGENT", help=", ".join(AGENTS))
    made.add_argument("-m", "--model", type=model_name, metavar="MODEL", help=f"{MODEL} (default: the model used last)")
    made.add_argument(
        "--port", type=port_number, default=PORT, metavar="N", help=f"the server's port (default: {PORT})"
    )
    return made


def run(parser: Parser, options: argparse.Namespace) -> int:
    if not options.port:
        parser.error("--port 0 is no port that an agent can be told")
    agent: Agent = AGENTS[options.agent]
    if (program := shutil.which(agent.program)) is None:
        hint = f"Install it: npm install -g {agent.package}"
        raise TokamacError(f"{agent.title} is not installed: there is no program {agent.program}", hint)
    folder = state_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    here = sha256(os.fsencode(Path.cwd())).hexdigest()[:8]
    with _hearing(ENDS, _leave), _server(options) as found:  # or a server of its own would outlive it
        at = replace(found, client=f"{options.agent}.{here}.{secrets.token_hex(4)}")
        _check_room(agent, at)
        _read_ahead(agent, at, folder)
        start = agent.start(at, folder)
        command = [program, *start.arguments, *options.arguments]
        try:
            return _run_child(command, {**_own_environment(), **(start.environment or {})})
        finally:
            _tell_cost(agent, at)


@contextmanager
def _hearing(numbers: Iterable[signal.Signals], handler: Callable[[int, Any], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, each in before.items():
            signal.signal(number, each)


def _leave(number: int, _: object) -> None:
    sys.exit(128 + number)


def _own_environment() -> dict[str, str]:
    # A key for Anthropic's own service would be asked about, or sent.
    return {name: value for name, value in os.environ.items() if name != "ANTHROPIC_API_KEY"}


def ask(at: Endpoint, path: str, body: object = None, within_s: float | None = ANSWER_S) -> Any:
    """Return the JSON that the server answers. Raises TokamacError for its errors, OSError where none answers."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {at.key}"}
    try:
        request = urllib.request.Request(at.url + path, data, headers)
        # No proxy of the environment stands before this machine.
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=within_s) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.UNAUTHORIZED:
            raise TokenWantedError("the server wants its token", f"It is in {token_file()}.") from None
        told = _told(error)
        if "parallel" in told:  # of /health: it is not ready
            return told
        if "message" in told:
            raise TokamacError(str(told["message"])) from None
        raise _foreign(at) from error
    except (ValueError, LookupError, http.client.HTTPException) as error:
        raise _foreign(at) from error


def _told(error: urllib.error.HTTPError) -> dict[str, Any]:
    try:
        told = json.load(error)
        return dict(told.get("error", told))
    except (ValueError, TypeError, AttributeError):
        return {}


def _foreign(at: Endpoint) -> TokamacError:
    return TokamacError(f"what listens on {at.url} is no server of Tokamac's", "Take another port: --port.")


@contextmanager
def _server(options: argparse.Namespace) -> Iterator[Endpoint]:
    at = Endpoint(f"http://{HOST}:{options.port}", "")
    try:
        health = ask(at, "/health")
        if "parallel" not in health:
            raise _foreign(at)
        if health["status"] != "ok":
            raise TokamacError(f"the server on {at.url} is not ready: {health['status']}", "Try again in a moment.")
    except TokenWantedError:
        at = replace(at, key=token_file().read_text().strip())
    except OSError:
        with _own_server(options, at):
            yield _model_of(at, None)
        return
    yield _model_of(at, options.model)


def _model_of(at: Endpoint, wanted: str | None) -> Endpoint:
    entry = ask(at, "/v1/models")["data"][0] if wanted is None else ask(at, f"/v1/models/{quote(wanted)}")
    return replace(at, model=entry["id"], context=entry["max_model_len"])


@contextmanager
def _own_server(options: argparse.Namespace, at: Endpoint) -> Iterator[None]:
    if any(find_spec(name) is None for name in NEEDS):
        raise TokamacError("the server needs starlette and uvicorn", f"Install them: {pip_install('tokamac[serve]')}.")
    from tokamac.engine.hub import download

    model = options.model or default_model()
    fetch(model, download.resolve)
    log = platformdirs.user_log_path("tokamac", ensure_exists=True) / "launch-server.log"
    note(f"loading {model}; the server's log is {log}")
    command = [*serve_command(), model, "--port", str(options.port), "--until-eof"]
    # A session of its own: Ctrl-C is the agent's. The pipe ends with this process, however that ends.
    with (
        log.open("wb") as written,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=written, stderr=written, start_new_session=True) as server,
    ):  # fmt: skip
        try:
            while not _is_ready(at):
                if server.poll() is not None:
                    said = log.read_text("utf-8", "replace").strip().splitlines()
                    raise TokamacError(f"the server ended: {said[-1] if said else server.returncode}")
                time.sleep(LOOK_S)
            yield
        finally:
            server.terminate()
            try:
                server.wait(END_S)
            except subprocess.TimeoutExpired:
                server.kill()


def _is_ready(at: Endpoint) -> bool:
    try:
        return bool(ask(at, "/health")["status"] == "ok")
    except (OSError, TokamacError):
        return False


def _check_room(agent: Agent, at: Endpoint) -> None:
    if at.context is not None and at.context < agent.prompt_tokens + at.reply:
        needed = f"about {count(agent.prompt_tokens)} tokens of its own, and a reply of {count(at.reply)}"
        raise TokamacError(
            f"{at.model} holds {count(at.context)} tokens, and {agent.title} sends {needed}",
            "Use a model with a longer context: -m MODEL.",
        )


def _read_ahead(agent: Agent, at: Endpoint, folder: Path) -> None:
    """Read what the agent sent first when it was last started here; go on after AHEAD_S."""
    if (kept := kept_prompt(at.client, folder)) is None:
        note(f"the prompt of {agent.title} is not known here yet: its first answer waits until it was read")
        return
    path, body = kept
    told: list[str] = []

    def read() -> None:
        try:
            answer = ask(at, path, {**body, "model": at.model}, within_s=None)
            figures = answer["tokamac"] if "tokamac" in answer else answer["choices"][0]["tokamac"]
            read_tokens = count(figures["prefill_tokens"])
            told.append(
                f"read {read_tokens} of {count(figures['prompt_tokens'])} tokens in {seconds(figures['ttft_s'])}"
            )
        except (TokamacError, OSError, LookupError) as error:
            told.append(f"it could not be read ahead: {error}")

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(AHEAD_S)
    note(f"the prompt of {agent.title}: {told[0] if told else 'still being read, the first answer waits for the rest'}")


def _run_child(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run the agent; return its status. Signals are its own."""
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []  # heard before there was a child to tell

    def pass_on(number: int, _: object) -> None:
        if child is None:
            early.append(number)
        elif number != signal.SIGINT:
            child.send_signal(number)  # Ctrl-C reaches it from the terminal itself

    try:
        with _hearing((signal.SIGINT, *ENDS), pass_on):
            child = subprocess.Popen(command, env=environment)
            for number in early:
                pass_on(number, None)
            status = child.wait()
    except OSError as error:
        raise TokamacError(
            f"{command[0]} can't be started: {error.strerror or error}", "Check its installation."
        ) from error
    return status if status >= 0 else 128 - status


def _tell_cost(agent: Agent, at: Endpoint) -> None:
    try:
        listed = ask(at, "/v1/requests")["data"]
    except (OSError, TokamacError):
        return
    replies = [each["replies"][0] for each in reversed(listed) if each["client"] == at.client and each["replies"]]
    longest = max((each["prompt_tokens"] for each in replies), default=0)
    main = [each for each in replies if each["prompt_tokens"] >= MAIN_SHARE * longest]
    for name, each in zip(("first", "second"), main, strict=False):
        prompt, cached = count(each["prompt_tokens"]), count(each["cached_tokens"])
        note(
            f"{agent.title}'s {name} prompt: {prompt} tokens, {cached} of them held; {seconds(each['ttft_s'])} to the first token"
        )
