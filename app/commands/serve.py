"""``tokamac serve``: local server with the OpenAI, Anthropic and Ollama APIs, until Ctrl-C."""

import argparse
import asyncio
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tokamac.engine.errors import TokamacError
from tokamac.engine.requirements import pip_install

from .. import INTERRUPTED
from ..backend.keep_awake import KeepAwake, program
from ..backend.processes import NEEDS, PORT
from ..backend.protocol import Load
from ..options import (
    MODEL,
    adapter_of,
    add_flags,
    add_nodes_flags,
    add_reply_flags,
    add_speculation_flags,
    check_speculation_flags,
    default_model,
    is_cpu_exact,
    known_settings,
    kv_spec,
    memory_limit,
    model_name,
    nodes_of,
    pace_of,
    parallel_of,
    sampling,
    speculation_of,
    template_options,
)
from ..parser import Parser
from ..text.sanitise import sanitise_line
from ..text.terminal import Progress, json_line, note
from .loading import fetch, on_disk, tell_loading

if TYPE_CHECKING:
    from ..serve.model_pool import CardMaker
    from ..serve.request import ServedModel
    from ..serve.server import ServerOptions
    from ..serve.service import ServiceState

HOST = "127.0.0.1"
IDLE_MIN = 30
HEALTH_S = 5.0  # how long a server may take to say how it is
ENGINE_S = 60.0  # how long the engine of a chat may take to be there


def parser() -> Parser:
    made = Parser(
        "serve",
        "Serve OpenAI's, Anthropic's and Ollama's HTTP APIs until Ctrl-C. Listens on localhost unless --host is given. Values in a "
        "request override flags.",
        "  tokamac serve\n"
        "  tokamac serve mlx-community/Qwen3-4B-Instruct-2507-4bit --kv-bits 8 --alias qwen\n"
        "  tokamac serve --print-config\n"
        '  curl localhost:11435/v1/chat/completions -d \'{"messages": [{"role": "user", "content": "Why is decode slow?"}]}\'',
    )
    made.add_model(model_name, f"{MODEL} (default: the model used last)")
    made.add_argument(
        "--host", default=HOST, help=f"address to listen on; others than localhost need a token (default: {HOST})"
    )
    made.add_argument(
        "--port",
        type=port_number,
        default=PORT,
        metavar="N",
        help=f"port to listen on; 0 picks a free one (default: {PORT})",
    )
    made.add_argument(
        "--alias",
        action="append",
        default=[],
        metavar="NAME",
        help="additional model name accepted in requests; repeatable",
    )
    made.add_argument(
        "--allow", action="append", type=model_name, default=[], metavar="MODEL",
        help="another model that requests may name, loaded when it is asked for; repeatable",
    )  # fmt: skip
    made.add_argument(
        "--allow-downloaded", action="store_true", help="allow every model in the Hugging Face cache (tokamac models)"
    )
    made.add_argument(
        "--idle", type=_minutes, default=IDLE_MIN, metavar="MIN",
        help=f"minutes after which an unused model leaves memory; the next request loads it again; 0: never (default: {IDLE_MIN})",
    )  # fmt: skip
    made.add_argument(
        "--require-token",
        action="store_true",
        help="require the token on localhost too, against other users of this machine",
    )
    made.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="additional Host accepted in requests, for proxies; repeatable",
    )
    made.add_argument(
        "--allow-origin", action="append", default=[], metavar="URL",
        help="web page allowed to send requests, such as http://localhost:3000 or app://obsidian.md; repeatable",
    )  # fmt: skip
    made.add_argument(
        "--fetch-images", action="store_true",
        help="fetch pictures that requests name by a web address, from public ones alone: at most 8 of 4 MB in 20 s",
    )  # fmt: skip
    made.add_argument(
        "--engine", metavar="SOCKET", help="use a running chat's engine over this socket (what /serve does)"
    )
    made.add_argument(
        "--until-eof", action="store_true", help="stop when standard input ends, too: for programs that start a server"
    )
    made.add_argument("--json", action="store_true", help="print the address and the running replies as JSON lines")
    service = made.add_mutually_exclusive_group()
    service.add_argument(
        "--install", action="store_true", help="serve with these flags whenever you are logged in (launchd, or systemd)"
    )
    service.add_argument("--status", action="store_true", help="tell how that service is, and exit")
    service.add_argument("--logs", action="store_true", help="print the end of its log, and exit")
    service.add_argument("--uninstall", action="store_true", help="stop and remove it, and exit")
    made.add_argument("--print-config", action="store_true", help="print settings for editors and agents, and exit")
    add_reply_flags(made)
    add_flags(made, "--parallel", "--pace")
    add_speculation_flags(made)
    add_nodes_flags(made)
    return made


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a number of minutes, 0 or more")
    return value


def port_number(text: str) -> int:
    if not text.isdecimal() or len(text) > 5 or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a port, 0 to 65535")
    return int(text)


def run(parser: Parser, options: argparse.Namespace) -> int:
    if options.model is not None and not options.model.strip():
        parser.error("MODEL is empty")
    from ..serve.gate import is_loopback

    check_speculation_flags(parser, options)
    model = options.model or default_model()
    if options.allow_host and not is_loopback(options.host):
        parser.error("--allow-host works only on localhost: elsewhere any Host is accepted, with the token")
    if options.print_config:
        _print_config(options, model)
        return 0
    if options.status or options.logs or options.uninstall:
        return _service(options)
    if any(find_spec(name) is None for name in NEEDS):
        raise TokamacError(
            "the server needs starlette, uvicorn and prometheus-client",
            f"Install them: {pip_install('tokamac[serve]')}.",
        )
    from tokamac.engine.hub import download

    from ..serve.server import listen

    if options.install:
        _server_options(parser, options, model)  # what would be refused then is refused now
        return _service(options)
    if options.engine is not None:
        if options.model is not None or options.allow or options.allow_downloaded:
            parser.error("--engine uses the model of the chat: leave out MODEL, --allow and --allow-downloaded")
        wait_for_engine(Path(options.engine))
    wanted = _server_options(parser, options, model)
    load = wanted.offer.load
    listening = listen(options.host, options.port)
    if options.engine is not None:
        with listening:
            return _serve(options, listening, wanted)
    with listening:
        fetch(model, download.resolve)
        if load.adapter is not None:
            fetch(load.adapter, download.resolve_adapter)
        if load.draft is not None:
            fetch(load.draft, download.resolve)
        return _serve(options, listening, wanted)


def _service(options: argparse.Namespace) -> int:
    from platformdirs import user_log_path

    from ..serve import service

    log, found = user_log_path("tokamac") / "serve.log", service.manager()
    if options.install:
        service.install(found, service.command_of([each for each in sys.argv[2:] if each != "--install"], log))
        note(f"installed: {found.file}. It serves whenever you are logged in; tokamac serve --status tells how it is")
    elif options.uninstall:
        note("removed" if service.uninstall(found) else "there is no such service")
    elif options.logs:
        status, text = service.run_tool(found.logs(log))
        print("\n".join(map(sanitise_line, text.splitlines())))
        return min(status, 1)
    else:
        return _status(found.state(), (options.host, options.port))
    return 0


def _status(state: "ServiceState", address: tuple[str, int]) -> int:
    """Print what the system and the server say; return 0 where both say that it runs."""
    from http.client import HTTPConnection, HTTPException

    if state.running is None:
        note("the service is not installed: tokamac serve --install")
        return 1
    print(f"service: {sanitise_line(state.detail)}")
    host, port = address
    connection = HTTPConnection(host, port, timeout=HEALTH_S)
    try:
        told = {"authorization": f"Bearer {token_file().read_text().strip()}"} if token_file().is_file() else {}
        connection.request("GET", "/health", headers=told)
        answer = connection.getresponse()
        health = json.load(answer) if answer.status == 200 else {"status": f"answers {answer.status}"}
    except (OSError, ValueError, HTTPException) as error:
        print(f"{host}:{port}: no answer ({sanitise_line(str(error))})")
        return 1
    finally:
        connection.close()
    loaded = ", ".join(health.get("loaded", ())) or "none in memory"
    print(sanitise_line(f"{host}:{port}: {health.get('status')}; {loaded}; {health.get('replies')} replies"))
    return 0 if state.running else 1


def wait_for_engine(path: Path) -> None:
    """Wait until the socket's engine answers: it may still be starting. Raises SharingError."""
    from ..backend.sharing import SharingError, connected

    until_s = time.monotonic() + ENGINE_S
    while True:
        try:
            connected(path).close()
        except SharingError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.1)
        else:
            return


def _shared(url: str) -> "CardMaker | None":
    """Return the factory of engine cards for chats of this user; None if unavailable."""
    from ..backend.sharing import EngineCard, SharingError, sharing_folder

    try:
        folder = sharing_folder()
    except SharingError as error:
        note(f"chats can't share this server's engine: {error.one_line()}")
        return None

    def card(number: int, load: Load) -> EngineCard:
        return EngineCard(os.getpid(), url, load, str(folder / f"serve-{os.getpid()}-{number}.sock"))

    return card


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _needs_token(options: argparse.Namespace) -> bool:
    from ..serve.gate import is_loopback

    return bool(options.require_token) or not is_loopback(options.host)


def _print_config(options: argparse.Namespace, model: str) -> None:
    from ..models.local import lasting, shown_name
    from ..serve.clients import KEY, client_config

    key = KEY
    if _needs_token(options):
        key = "TOKEN"
        print(f"# TOKEN is what {token_file()} holds\n")
    name = options.alias[0] if options.alias else shown_name(lasting(model))
    print(client_config(options.host, options.port, name, key))


def _server_options(parser: Parser, options: argparse.Namespace, model: str) -> "ServerOptions":
    from platformdirs import user_log_path

    from ..models.local import lasting, shown_name
    from ..serve.engine import TEXT_EVERY_S
    from ..serve.gate import token_of
    from ..serve.model_pool import Offer
    from ..serve.server import ServerOptions

    guesses, nodes, (pace, on_battery) = speculation_of(options, model), nodes_of(parser, options), pace_of(options)
    if nodes is not None and (options.allow or options.allow_downloaded):
        parser.error("several nodes serve one model: leave out --allow and --allow-downloaded")
    load = Load(
        lasting(model),
        kv_spec(parser, options),
        prompt_cache=not options.no_prompt_cache,
        memory=memory_limit(options),
        unchecked=options.unchecked,
        adapter=adapter_of(options, model),
        parallel=parallel_of(options),
        speculation=guesses is not None,
        draft=None if guesses is None or guesses.draft is None else str(guesses.draft),
        cpu_exact=is_cpu_exact(options),
        wired=known_settings().wired,
        pace=pace,
        pace_on_battery=on_battery,
        text_every_s=TEXT_EVERY_S,
        nodes=nodes,
        forms=True,
    )
    known = known_settings()

    def load_of(other: str) -> Load:
        adapter, draft = known.beside(other)
        return load.for_model(other, adapter, draft if load.speculation else None)

    for other in options.allow:
        on_disk(other)
    return ServerOptions(
        Offer(
            load,
            shown_name(load.model) if options.engine is None else "",  # whatever the chat has
            (*options.alias, model),
            tuple(options.allow),
            options.allow_downloaded,
            load_of,
        ),
        sampling=sampling(parser, options),
        template=template_options(parser, options),
        hosts=tuple(options.allow_host),
        origins=tuple(options.allow_origin),
        token=token_of(token_file()) if _needs_token(options) else None,
        log=user_log_path("tokamac") / "serve-engine.log",
        idle_s=60 * options.idle or math.inf,
        fetches=options.fetch_images,
    )


def token_file() -> Path:
    from platformdirs import user_data_path

    return user_data_path("tokamac") / "serve-token"


def _end_with_input() -> None:
    with suppress(OSError):
        while os.read(sys.stdin.fileno(), 1024):  # what waits in sys.stdin.read would hold up the end of Python
            pass
    os.kill(os.getpid(), signal.SIGTERM)


def _serve(options: argparse.Namespace, listening: socket.socket, wanted: "ServerOptions") -> int:
    from ..backend.keep_awake import in_settings
    from ..serve.server import serve

    if options.until_eof:
        threading.Thread(target=_end_with_input, daemon=True).start()
    bar = Progress("loading", plain=False)
    keeper = KeepAwake(program(), in_settings)
    url, joins = _url(options.host, listening.getsockname()[1]), options.engine is not None
    wanted = replace(wanted, card=None if joins else _shared(url), engine=Path(options.engine) if joins else None)

    def say(line: str) -> None:
        bar.clear()
        note(sanitise_line(line))

    def ready(model: "ServedModel") -> None:
        for remark in (*model.info.memory_notes, *(each.text for each in model.info.model_notes)):
            say(f"note: {remark}")
        if wanted.offer.several:
            others = "any other that is downloaded" if wanted.offer.any_downloaded else ", ".join(wanted.offer.allowed)
            say(f"also by name: {others}")
        say(f"serving {model.id} on {url}; Ctrl-C stops it, tokamac serve --print-config says how to use it")
        if wanted.token is not None:
            say(f"the token is in {token_file()}")

    def activity(replies: int, waiting: int) -> None:
        json_line({"event": "serving", "url": url, "replies": replies, "waiting": waiting})

    try:
        interrupted = asyncio.run(
            serve(
                listening,
                options.host,
                wanted,
                note=say,
                progress=lambda at: tell_loading(at, bar),
                ready=ready,
                keeper=keeper,
                activity=activity if options.json else None,
            )
        )
    finally:
        bar.clear()
        keeper.close()
    return INTERRUPTED if interrupted else 0
