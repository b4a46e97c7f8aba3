"""Command line: finds and runs the command, and maps its end to an exit status."""

#     0 done · 1 failed (one line on stderr: what, and what to do next) · 2 wrong usage · 130 interrupted · 141 stdout was
#     closed
#
# A command is a module in tokamac.app.commands with ``parser()`` and ``run(parser, options) -> int``, imported on demand;
# ``--version`` and ``--help`` import only this file, the statuses and the topics.

import gc
import io
import os
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from itertools import takewhile

from . import INTERRUPTED, PIPE_CLOSED, WRONG_USAGE

HELP = ("-h", "--help", "help")
VERSION = ("-V", "--version")
RUN = "run"
SWITCHES = (
    "-c",
    "--continue",
    "--json",
    "-v",
    "-vv",
    "--allow-tools",
)  # flags of ask without a value: a question may follow

COMMANDS = {
    "chat": "open the chat (what `tokamac` alone does)",
    "ask": "answer once, on stdout",
    "convert": "quantize a model",
    "inspect": "show a model's sizes, memory and expected speed, here or on another machine",
    "quality": "compare two models: KL, top-1, perplexity, layer by layer",
    "bench": "measure time to first token, prefill and decode, beside the limit",
    "serve": "serve OpenAI's and Anthropic's HTTP APIs",
    "launch": "start Claude Code, Codex, opencode or pi on a local model",
    "models": "list, download, remove, search and suggest models",
    "cache": "manage the prompt cache on disk",
    "chats": "list, search, show, export, import, delete and restore saved chats",
    "backup": "write all chats and the settings to one file",
    "restore": "add what a backup has and is missing here",
    "doctor": "check this installation and machine",
    "completion": "set up completion in bash, zsh or fish",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv`` (without the program's name); return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _prepare_streams()
    try:
        status = _run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:
        status = PIPE_CLOSED
    except SystemExit as leaving:  # argparse: 0 after --help, 2 after a mistake
        status = leaving.code if isinstance(leaving.code, int) else 1
    except Exception as error:
        status = _failed(error, json_wanted="--json" in arguments)
    except BaseException as error:
        from tokamac.engine.errors import panic_error

        if (known := panic_error(error)) is None:
            raise
        status = _failed(known, json_wanted="--json" in arguments)
    return _flush(status)


def entry() -> None:
    status = main()
    # CPython notes a KeyboardInterrupt that leaves the code of an `exec`, and most imports make a dataclass, which is one. Though
    # it was caught, `python -m` would then end by the signal instead of with our status. The next `exec` forgets it.
    exec("")
    sys.exit(status)


def _run(arguments: list[str]) -> int:
    first, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if first in HELP:
        return _explain(rest)
    if first in VERSION:
        if rest:
            return _refuse(f"{first} takes no other arguments. See `tokamac --help`.")
        print(f"tokamac {_version()}")
        return 0
    if first in COMMANDS:
        return _do(first, rest)
    if first == RUN:
        return _chat_or_ask(rest)
    if not first or first.startswith("-"):
        asks = _has_question(arguments) or (_is_piped() and "--plain" not in arguments)
        return _do("ask" if asks else "chat", arguments, named=False)
    from .parser import meant_command, no_command

    meant = meant_command(first, COMMANDS)
    if meant is None and (_has_question(arguments[:1]) or _is_piped()):
        return _do("ask", arguments, named=False)
    return _refuse(no_command(first, meant))


def _chat_or_ask(arguments: list[str]) -> int:
    """Ollama's ``run``: ``chat``; with a prompt after MODEL or piped in, ``ask``."""
    model, *rest = arguments or [""]
    prompt = list(takewhile(lambda word: not word.startswith("-"), rest))
    if model and not model.startswith("-") and (prompt or (_is_piped() and "--plain" not in rest)):
        asked = [" ".join(prompt)] if prompt else []
        return _do("ask", [*asked, "--model", model, *rest[len(prompt) :]])
    return _do("chat", arguments)


def _has_question(arguments: Sequence[str]) -> bool:
    before = ""
    for word in arguments:
        of_flag = word.startswith("-") or (before.startswith("-") and before not in SWITCHES)
        if len(word.split()) > 1 and not of_flag:
            return True
        before = word
    return False


def _is_piped() -> bool:
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # none, closed, or no file of the system's
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _explain(words: list[str]) -> int:
    """Print help on a command or topic (both if they share a name), or the list."""
    from . import help as texts

    topics = texts.topics()
    if not words or words[0] in HELP:
        print(_help(topics))
        return 0
    name, rest = "chat" if words[0] == RUN else words[0], words[1:]
    if name not in COMMANDS and name not in topics:
        meant = texts.nearest_topic(name, [*COMMANDS, *topics])
        question = f"; did you mean tokamac help {meant}?" if meant else "."
        return _refuse(f"there is no help on {name!r}{question} See `tokamac help`.")
    if name in COMMANDS:
        with suppress(SystemExit):  # argparse leaves once it has printed
            _do(name, [*rest, "--help"])
    if name in topics and not rest:
        print(*([""] if name in COMMANDS else []), texts.topic(name), sep="\n")
    return 0


def _do(name: str, arguments: list[str], *, named: bool = True) -> int:
    """Run the command. named: False if it is only the default of plain ``tokamac``."""
    from tokamac.engine.files import raise_open_files

    raise_open_files()
    gc.disable()  # what is imported is no garbage, and looking through it takes longer than all that it could free
    command = import_module(f"tokamac.app.commands.{name}")
    gc.enable()
    parser = command.parser()
    if not named:
        parser.unnamed(VERSION)
    status: int = command.run(parser, parser.parse_args(arguments))
    return status


def _refuse(problem: str) -> int:
    from .text.terminal import note

    note(f"tokamac: {problem}")
    return WRONG_USAGE


def _help(topics: dict[str, str]) -> str:
    width = max(map(len, (*COMMANDS, *topics)))
    commands, explained = (
        "\n".join(f"  {name.ljust(width)}  {summary}" for name, summary in each.items()) for each in (COMMANDS, topics)
    )
    return f"""usage: tokamac [COMMAND] [OPTIONS]

A terminal chat app for local language models on MLX that is honest about speed.

commands (tokamac COMMAND --help has the flags):
{commands}

topics (tokamac help TOPIC):
{explained}

`tokamac "a question"` is ask, and so is anything with a pipe before it; `run` is chat.
MODEL is a folder, a GGUF file, a Hugging Face id (org/name), a short name (qwen3:8b), or guide, the embedded model.

examples:
  tokamac
  tokamac run qwen3:4b
  tokamac "Why is decode memory-bound?"
  git diff | tokamac "Review this"
  tokamac -c "And in one sentence?"
  tokamac --version"""


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tokamac")
    except PackageNotFoundError:
        return "(not installed: run from its source)"


def _failed(error: Exception, *, json_wanted: bool) -> int:
    """Print the error and hint on one line; return the exit status."""
    if os.environ.get("TOKAMAC_DEBUG"):
        import traceback

        traceback.print_exception(error)
    from tokamac.engine.device import cannot_import
    from tokamac.engine.errors import TokamacError, access_hint, engine_error
    from tokamac.engine.perf.memory import LEAST, space_left, too_little

    from .text.terminal import json_line, note

    if not isinstance(error, TokamacError) and (left := space_left()) is not None and left < LEAST // 4:
        error = too_little(left)  # whatever it was that could not be loaded or started
    error = engine_error(error) or error
    if isinstance(error, ImportError):
        error = cannot_import(error) or error
    if isinstance(error, TokamacError):
        message, hint = error.message, error.hint
    elif isinstance(error, OSError) and error.strerror:
        message = f"{error.filename or 'output'}: {error.strerror}"
        hint = access_hint(error, "Check the path, its permissions and the disk.")
    else:
        message = f"this should not happen: {type(error).__name__}: {error}".removesuffix(": ")
        hint = "Set TOKAMAC_DEBUG=1 for the traceback, and please report it."
    note(f"tokamac: {TokamacError(message, hint).one_line()}")
    if json_wanted:
        try:
            json_line({"event": "error", "error": message, "hint": hint})
        except BrokenPipeError:
            return PIPE_CLOSED
        except OSError:
            return 1  # stdout can't be written, as that line said
    return 1


def _prepare_streams() -> None:
    """Ensure stdout and stderr exist and replace unencodable characters by ``?``."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115  # for the rest of the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _flush(status: int) -> int:
    """Flush; prevents a second error from unwritable output at interpreter exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            with suppress(OSError, ValueError):  # not a file of the system: then nothing will complain
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if status == 0 and stream is sys.stdout and not isinstance(error, BrokenPipeError):
                status = _failed(error, json_wanted=False)  # help: argparse leaves before it is written
            elif status == 0:
                status = PIPE_CLOSED if isinstance(error, BrokenPipeError) else 1
    return status


if __name__ == "__main__":
    entry()
