"""``tokamac models``: what is in the Hugging Face cache; bring a model there, take it away."""

import argparse
import time

from tokamac.app.commands import loading
from tokamac.app.options import Parser
from tokamac.app.output import table
from tokamac.app.sanitise import sanitise_line
from tokamac.app.tui.units import size


def parser() -> Parser:
    """Return what the command takes."""
    made = Parser(
        "models",
        "Models on disk, in the Hugging Face cache that other tools share (HF_HOME moves it). HF_TOKEN opens gated ones.",
        "  tokamac models list\n"
        "  tokamac models pull mlx-community/Qwen3-4B-Instruct-2507-4bit\n"
        "  tokamac models remove mlx-community/Qwen3-4B-Instruct-2507-4bit",
    )
    made.add_argument("action", nargs="?", choices=("list", "pull", "remove"), default="list", help="(list)")
    made.add_argument("id", nargs="?", metavar="ID", help="a Hugging Face id, org/name or org/name@revision")
    return made


def run(parser: Parser, options: argparse.Namespace) -> int:
    """List, pull or remove; return the exit status."""
    if options.action == "list":
        if options.id:
            parser.error("list takes no ID")
        return _list()
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
