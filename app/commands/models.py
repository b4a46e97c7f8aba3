"""``tokamac models``: what is in the Hugging Face cache; bring a model there, take it away; which ones would run well."""

import argparse
import time

from tokamac.app.commands import loading
from tokamac.app.commands.place import add_place_flags
from tokamac.app.options import Parser, any_given, positive
from tokamac.app.output import table
from tokamac.app.sanitise import sanitise_line
from tokamac.app.tui.units import size

ACTIONS = ("list", "pull", "remove", "suggest")
SUGGEST_FLAGS = ("context", "chip", "gpu_cores", "memory")


def parser() -> Parser:
    """Return what the command takes."""
    made = Parser(
        "models",
        "Models on disk, in the Hugging Face cache that other tools share (HF_HOME moves it). HF_TOKEN opens gated ones. "
        "suggest names those of the catalogue that would run well, best first.",
        "  tokamac models list\n"
        "  tokamac models suggest --context 16384\n"
        "  tokamac models pull mlx-community/Qwen3-4B-Instruct-2507-4bit\n"
        "  tokamac models remove mlx-community/Qwen3-4B-Instruct-2507-4bit",
    )
    made.add_argument("action", nargs="?", choices=ACTIONS, default="list", help="(list)")
    made.add_argument("id", nargs="?", metavar="ID", help="a Hugging Face id, org/name or org/name@revision")
    suggesting = made.add_argument_group("suggest")
    suggesting.add_argument("--context", type=positive, metavar="N", help="tokens of the prompt to reckon with (8192)")
    suggesting.add_argument("--json", action="store_true", help="one JSON object")
    add_place_flags(made)
    return made


def run(parser: Parser, options: argparse.Namespace) -> int:
    """List, pull, remove or suggest; return the exit status."""
    if options.action != "suggest" and (options.json or any_given(options, SUGGEST_FLAGS)):
        parser.error(f"{options.action} takes no flags")
    if options.action in ("list", "suggest") and options.id:
        parser.error(f"{options.action} takes no ID")
    if options.action == "list":
        return _list()
    if options.action == "suggest":
        from tokamac.app.commands.models_suggest import suggest

        return suggest(parser, options)
    if not options.id:
        parser.error(f"{options.action} needs an ID, such as mlx-community/Qwen3-4B-Instruct-2507-4bit")
    from tokamac.engine import hub

    if options.action == "pull":
        # Brings it up to date too, which loading a model never does by itself.
        print(loading.fetch(options.id, hub.pull))
        return 0
    freed = hub.remove_model(options.id)
    print(f"removed {sanitise_line(options.id)}: {size(freed)} freed")
    return 0


def _list() -> int:
    from tokamac.engine import hub

    found = hub.list_models()
    if not found:
        print("no models on disk; get one with: tokamac models pull ID")
        return 0
    rows = [["model", "size", "last used", ""]]
    for model in found:
        used = time.strftime("%Y-%m-%d", time.localtime(model.last_used_s))
        rows.append(
            [sanitise_line(model.id), size(model.nbytes), used, "" if model.whole else "not whole: pull it again"]
        )
    print(table(rows, right=(1,)))
    return 0
