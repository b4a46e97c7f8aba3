"""``tokamac serve``: a local server with the interfaces of OpenAI and Anthropic, until Ctrl-C."""

import argparse
import asyncio
import os
import socket
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tokamac.engine.errors import TokamacError

from .. import INTERRUPTED
from ..backend.chat_server import NEEDS, PORT
from ..backend.keep_awake import KeepAwake, program
from ..backend.protocol import Load
from ..options import (
    adapter_of,
    add_nodes_flags,
    add_parallel_flag,
    add_reply_flags,
    add_speculation_flags,
    check_speculation_flags,
    default_model,
    is_cpu_exact,
    known_settings,
    kv_spec,
    memory_limit,
    nodes_of,
    parallel_of,
    sampling,
    speculation_of,
    template_options,
)
from ..output import Progress, json_line, note
from ..parser import Parser
from ..sanitise import sanitise_line
from .loading import fetch, on_disk, tell_loading

if TYPE_CHECKING:
    from ..serve.model_pool import CardMaker
    from ..serve.request import ServedModel
    from ..serve.server import ServerOptions

HOST = "127.0.0.1"
ENGINE_S = 60.0
"""How long the engine of a chat may take to be there."""


def parser() -> Parser:
    """Return what the command takes."""
    made = Parser(
        "serve",
        "Answer programs over HTTP, with the interfaces of OpenAI and Anthropic, until Ctrl-C. Only this machine may ask, "
        "unless --host says so. A request's own values win over flags.",
        "  tokamac serve\n"
        "  tokamac serve mlx-community/Qwen3-4B-Instruct-2507-4bit --kv-bits 8 --alias qwen\n"
        "  tokamac serve --print-config\n"
        '  curl localhost:11435/v1/chat/completions -d \'{"messages": [{"role": "user", "content": "Why is decode slow?"}]}\'',
    )
    made.add_argument(
        "model", nargs="?", metavar="MODEL", help="a folder, a Hugging Face id, or guide (the one picked last)"
    )
    made.add_argument(
        "--host", default=HOST, help=f"the address to listen to ({HOST}); another than loopback needs a token"
    )
    made.add_argument(
        "--port", type=_port, default=PORT, metavar="N", help=f"the port to listen to ({PORT}); 0 takes a free one"
    )
    made.add_argument(
        "--alias",
        action="append",
        default=[],
        metavar="NAME",
        help="a name that the model answers to, too; may be repeated",
    )
    made.add_argument(
        "--allow", action="append", default=[], metavar="MODEL",
        help="another model that may be asked for by name, and is then loaded beside this one or in its place; may be repeated",
    )  # fmt: skip
    made.add_argument(
        "--allow-downloaded",
        action="store_true",
        help="allow every model of the Hugging Face cache; tokamac models lists them",
    )
    made.add_argument(
        "--require-token",
        action="store_true",
        help="ask for the token on loopback as well: other users of this machine lack it",
    )
    made.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name under which a proxy asks; may be repeated",
    )
    made.add_argument(
        "--allow-origin", action="append", default=[], metavar="URL",
        help="a web page that may ask, such as http://localhost:3000 or app://obsidian.md; may be repeated",
    )  # fmt: skip
    made.add_argument(
        "--engine",
        metavar="SOCKET",
        help="answer with the engine of a chat, over this socket; /serve in the chat does that",
    )
    made.add_argument("--json", action="store_true", help="where it answers, and how many replies run, as JSON lines")
    made.add_argument(
        "--print-config", action="store_true", help="what to paste into editors and agents, and no server"
    )
    add_reply_flags(made)
    add_parallel_flag(made)
    add_speculation_flags(made)
    add_nodes_flags(made)
    return made


def _port(text: str) -> int:
    if not text.isdecimal() or len(text) > 5 or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a port, 0 to 65535")
    return int(text)


def run(parser: Parser, options: argparse.Namespace) -> int:
    """Serve until Ctrl-C, and return the exit status."""
    if options.model is not None and not options.model.strip():
        parser.error("MODEL is empty")
    from ..serve.security import is_loopback

    check_speculation_flags(parser, options)
    model = options.model or default_model()
    if options.allow_host and not is_loopback(options.host):
        parser.error("--allow-host is for loopback: elsewhere any name may be used, with the token")
    if options.print_config:
        _print_config(options, model)
        return 0
    if any(find_spec(name) is None for name in NEEDS):
        raise TokamacError("the server needs starlette and uvicorn", "Install them: pip install 'tokamac[serve]'.")
    from tokamac.engine.hub import download

    from ..serve.server import listen

    if options.engine is not None:
        if options.model is not None or options.allow or options.allow_downloaded:
            parser.error("--engine has the model of the chat: leave out MODEL, --allow and --allow-downloaded")
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


def wait_for_engine(path: Path) -> None:
    """Wait until the engine at a socket answers: its process may just be starting. Raises SharingError."""
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
    """Return what makes the cards of engines, by which chats of the same user find them; None where they can't."""
    from ..backend.sharing import EngineCard, SharingError, sharing_folder

    try:
        folder = sharing_folder()
    except SharingError as error:
        note(f"chats will not find this server's engine: {error.one_line()}")
        return None

    def card(number: int, load: Load) -> EngineCard:
        return EngineCard(os.getpid(), url, load, str(folder / f"serve-{os.getpid()}-{number}.sock"))

    return card


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _needs_token(options: argparse.Namespace) -> bool:
    from ..serve.security import is_loopback

    return bool(options.require_token) or not is_loopback(options.host)


def _print_config(options: argparse.Namespace, model: str) -> None:
    from ..serve.client_config import KEY, client_config

    key = KEY
    if _needs_token(options):
        key = "TOKEN"
        print(f"# TOKEN is what {token_file()} holds\n")
    print(client_config(options.host, options.port, options.alias[0] if options.alias else model, key))


def _server_options(parser: Parser, options: argparse.Namespace, model: str) -> "ServerOptions":
    from platformdirs import user_log_path

    from ..models.names import lasting
    from ..serve.engine import TEXT_EVERY_S
    from ..serve.model_pool import Offer
    from ..serve.security import token_of
    from ..serve.server import ServerOptions

    guesses, nodes = speculation_of(options, model), nodes_of(parser, options)
    if nodes is not None and (options.allow or options.allow_downloaded):
        parser.error("other models can't be allowed with several nodes: they hold one")
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
        text_every_s=TEXT_EVERY_S,
        nodes=nodes,
        forms=True,
    )
    known = known_settings()

    def load_of(other: str) -> Load:
        adapter, draft = known.beside(other)
        return load.of(other, adapter, draft if load.speculation else None)

    for other in options.allow:
        on_disk(other)
    return ServerOptions(
        Offer(
            load,
            model if options.engine is None else "",  # whatever the chat has
            tuple(options.alias),
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
    )


def token_file() -> Path:
    """Return where the token is kept."""
    from platformdirs import user_data_path

    return user_data_path("tokamac") / "serve-token"


def _serve(options: argparse.Namespace, listening: socket.socket, wanted: "ServerOptions") -> int:
    from ..backend.keep_awake import in_settings
    from ..serve.server import serve

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
