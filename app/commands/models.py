"""``tokamac models``: what is in the Hugging Face cache; bring a model there, take it away; which ones would run well."""

import argparse

from tokamac.app.action_parser import ActionParser
from tokamac.app.commands.place import add_place_flags
from tokamac.app.options import any_given, positive
from tokamac.app.parser import Parser

ACTIONS = {
    "list": "how large each is, whether it fits and how fast it should be here",
    "pull": "download a model, or bring it up to date; an interrupted download goes on where it stopped",
    "remove": "take a model off the disk",
    "suggest": "which models of the catalogue fit, or may fit, here or on another machine, best first",
}
SUGGEST_FLAGS = ("context", "chip", "gpu_cores", "memory")


def parser() -> ActionParser:
    """Return what the command takes."""
    made = ActionParser(
        "models",
        "Models on disk, in the Hugging Face cache that other tools share (HF_HOME moves it). HF_TOKEN opens gated ones.",
        "  tokamac models list\n"
        "  tokamac models suggest --context 16384\n"
        "  tokamac models pull mlx-community/Qwen3-4B-Instruct-2507-4bit\n"
        "  tokamac models remove mlx-community/Qwen3-4B-Instruct-2507-4bit",
        ACTIONS,
    )
    made.add_argument("id", nargs="?", metavar="ID", help="a Hugging Face id, org/name or org/name@revision")
    made.add_argument("--json", action="store_true", help="JSON lines, the last one the result")
    removing = made.add_argument_group("remove")
    removing.add_argument("--unfinished", action="store_true", help="only what a download left that did not end")
    suggesting = made.add_argument_group("suggest")
    suggesting.add_argument("--context", type=positive, metavar="N", help="tokens of the prompt to reckon with (8192)")
    add_place_flags(made)
    made.only(("pull", "remove"), "id")
    made.only(("remove",), "unfinished")
    made.only(("suggest",), *SUGGEST_FLAGS)
    return made


def run(parser: Parser, options: argparse.Namespace) -> int:
    """List, pull, remove or suggest; return the exit status."""
    _check(parser, options)
    match options.action:
        case "list":
            from tokamac.app.commands.models_list import list_

            return list_(json=options.json)
        case "suggest":
            from tokamac.app.commands.models_suggest import suggest

            return suggest(parser, options)
        case "pull":
            from tokamac.app.commands.models_change import pull

            return pull(options.id, json=options.json)
        case _:
            from tokamac.app.commands.models_change import remove

            return remove(options.id, unfinished=options.unfinished, json=options.json)


def _check(parser: Parser, options: argparse.Namespace) -> None:
    """End with exit status 2 where something was given that the action does not take, or lacks."""
    action = options.action
    if action != "suggest" and any_given(options, SUGGEST_FLAGS):
        parser.error(f"{action} takes no flags of suggest")
    if action != "remove" and options.unfinished:
        parser.error(f"{action} takes no --unfinished")
    if action in ("list", "suggest") and options.id:
        parser.error(f"{action} takes no ID")
    if action in ("pull", "remove") and not options.id:
        parser.error(f"{action} needs an ID, such as mlx-community/Qwen3-4B-Instruct-2507-4bit")
