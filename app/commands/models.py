"""``tokamac models``: what is in the Hugging Face cache; bring a model there, take it away; which ones would run well.

With --json the chat's picker reads the lines of ``pull`` and ``remove`` (app/backend/puller.py).
"""

import argparse
import time
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tokamac.engine.perf.memory import giving_way

from ..backend.keep_awake import awake
from ..options import any_given, limit_of_settings, positive
from ..output import Progress, json_line, note, picked, table
from ..parser import ActionParser, Parser
from ..sanitise import sanitise_line
from ..speculation_gain import times
from ..units import UNKNOWN, count, percent, rate, seconds, short, size
from . import loading
from .inspect import add_place_flags, fits, measure_it, place_of

if TYPE_CHECKING:
    from tokamac.engine.hub.download import ModelOnDisk
    from tokamac.engine.hub.search import HubModel
    from tokamac.engine.perf.inspection import Prospect
    from tokamac.engine.perf.machine import Machine
    from tokamac.engine.perf.what_if import Group, Suggestion
    from tokamac.engine.speculation.gain import DraftOffer

    from ..models.advice import ModelAdvice

CONTEXT = 8192
"""Tokens held while decoding, to reckon fit and speed with; or the model's own context, where that is shorter."""
LINES_APART_S = 0.25
"""Lines of progress: a reader draws each, and needs no more of them."""
ACTIONS = {
    "list": "size of each, whether it fits and how fast it should be here",
    "pull": "download a model, or bring it up to date; an interrupted download goes on where it stopped",
    "remove": "delete a model from the disk",
    "search": "find models on Hugging Face that run here, those in MLX's format first",
    "suggest": "one model to start with, and which others run well here or on another machine",
}
SUGGEST_FLAGS = ("context", "chip", "gpu_cores", "memory")


def parser() -> ActionParser:
    """Return what the command takes."""
    made = ActionParser(
        "models",
        "Models on disk, in the Hugging Face cache that other tools share (HF_HOME moves it). HF_TOKEN opens gated ones.",
        "  tokamac models list\n"
        "  tokamac models suggest --context 16384\n"
        "  tokamac models search qwen3 coder\n"
        "  tokamac models pull mlx-community/Qwen3-4B-Instruct-2507-4bit\n"
        "  tokamac models remove mlx-community/Qwen3-4B-Instruct-2507-4bit",
        ACTIONS,
    )
    made.add_argument(
        "words",
        nargs="*",
        metavar="ID|WORDS",
        help="a Hugging Face id, org/name or org/name@revision; words to search for",
    )
    made.add_argument("--json", action="store_true", help="JSON lines, the last one the result")
    removing = made.add_argument_group("remove")
    removing.add_argument("--unfinished", action="store_true", help="only what an unfinished download left")
    suggesting = made.add_argument_group("suggest")
    suggesting.add_argument("--context", type=positive, metavar="N", help="prompt length to assume, in tokens (8192)")
    add_place_flags(made)
    made.only(("pull", "remove", "search"), "words")
    made.only(("remove",), "unfinished")
    made.only(("suggest",), *SUGGEST_FLAGS)
    return made


def run(parser: Parser, options: argparse.Namespace) -> int:
    """List, pull, remove or suggest; return the exit status."""
    _check(parser, options)
    match options.action:
        case "list":
            return list_(json=options.json)
        case "suggest":
            return suggest(parser, options)
        case "search":
            return search(" ".join(options.words), json=options.json)
        case "pull":
            return pull(options.words[0], json=options.json)
        case _:
            return remove(options.words[0], unfinished=options.unfinished, json=options.json)


def _check(parser: Parser, options: argparse.Namespace) -> None:
    """End with exit status 2 where something was given that the action does not take, or lacks."""
    action = options.action
    if action != "suggest" and any_given(options, SUGGEST_FLAGS):
        parser.error(f"{action} takes no flags of suggest")
    if action != "remove" and options.unfinished:
        parser.error(f"{action} takes no --unfinished")
    words = options.words
    if action in ("list", "suggest") and words:
        parser.error(f"{action} takes no ID")
    if action in ("pull", "remove") and not words:
        parser.error(f"{action} needs an ID, such as mlx-community/Qwen3-4B-Instruct-2507-4bit")
    if action in ("pull", "remove") and len(words) > 1:
        parser.error(f"unrecognized arguments: {' '.join(words[1:])}")
    if action == "search" and not "".join(words).strip():
        parser.error("search needs words, such as: tokamac models search qwen3 coder")


@awake
def pull(model: str, *, json: bool) -> int:
    """Bring a model to disk, or up to date, which loading one never does by itself; return the exit status."""
    from tokamac.engine.hub import download
    from tokamac.engine.hub.names import EMBEDDED

    if model in EMBEDDED:
        note(f"note: {model} is embedded: it is always here and comes with the program")
    if not json:
        print(loading.fetch(model, download.pull))
        return 0
    lines = _Lines()
    folder = download.pull(model, progress=lambda at: lines.tell(at.done, at.total))
    nbytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())  # links into the cache
    json_line({"event": "pulled", "id": model, "path": str(folder), "bytes": nbytes})
    return 0


def remove(model: str, *, unfinished: bool, json: bool) -> int:
    """Take a model off the disk, or only what an unfinished download left; return the exit status."""
    from tokamac.engine.hub import cache

    freed = cache.discard_unfinished(model) if unfinished else cache.remove_model(model)
    if json:
        json_line({"event": "removed", "id": model, "freed_bytes": freed})
    elif unfinished and not freed:
        print(f"nothing of {sanitise_line(model)} is unfinished on this disk")
    else:
        print(f"removed {sanitise_line(model)}: {size(freed)} freed")
    return 0


def search(words: str, *, json: bool) -> int:
    """Print what Hugging Face finds; return the exit status. With --json a line for each, again once its config has come."""
    from tokamac.engine.hub import search as hub
    from tokamac.engine.perf.measurement_store import store_file

    found: dict[str, hub.HubModel] = {}
    for model in hub.search(words, store_file("configs")):
        found[model.id] = model
        if json:
            json_line({"event": "found", **hub.plain(model)})
    if json:
        json_line({"event": "searched", "words": words, "models": [hub.plain(each) for each in found.values()]})
    elif found:
        head = ["model", "format", "size", "context", "licence", "downloads", "good for"]
        print(table([head, *map(_found_row, found.values())], right=(2, 3, 5)))
        note("note: tokamac models pull ID downloads one; tokamac inspect ID then says how it runs here")
    else:
        print(f"Hugging Face has no model for {sanitise_line(words)} that runs here")
    return 0


def _found_row(model: "HubModel") -> list[str]:
    return [
        sanitise_line(model.id),
        "MLX" if model.mlx else "safetensors",
        size(model.nbytes),
        short(model.context),
        sanitise_line(model.licence or UNKNOWN),
        short(model.downloads),
        model.good_for,
    ]


class _Lines:
    """Progress as JSON lines, a few a second."""

    def __init__(self) -> None:
        self._told_s: float | None = None

    def tell(self, done: int, total: int | None) -> None:
        now = time.monotonic()
        if self._told_s is None or now - self._told_s >= LINES_APART_S or done == total:
            self._told_s = now
            line: dict[str, Any] = {"event": "progress", "done": done, "total": total}
            json_line(line)


def list_(*, json: bool) -> int:
    """Print the embedded model and those in the Hugging Face cache; return the exit status."""
    from tokamac.engine.hub import download

    weighed = _weigh((_guide(), *download.list_models()))
    if json:
        json_line({"context": CONTEXT, "models": [_plain(*each) for each in weighed]})
    else:
        head = ["model", "size", "bits", "", "expected", "last used"]
        print(table([head, *(_row(*each) for each in weighed)], right=(1, 2, 4)))
        held = f"{count(CONTEXT)} tokens held, or all that a model's own context holds"
        print(f"\nFit and expected speed are for {held}.")
        if len(weighed) == 1:
            print("Only the embedded model is here. More: tokamac models suggest, then tokamac models pull ID")
    return 0


def _guide() -> "ModelOnDisk":
    """The embedded model, which is always here, as one of the list."""
    from tokamac.assets import asset_path
    from tokamac.engine.hub.cache import ModelOnDisk
    from tokamac.engine.hub.names import GUIDE

    folder = asset_path("guide", "model")
    return ModelOnDisk(GUIDE, folder, sum(path.stat().st_size for path in folder.glob("*")), None, whole=True)


def _weigh(models: "tuple[ModelOnDisk, ...]") -> "list[tuple[ModelOnDisk, Prospect | None]]":
    """Return each with what this machine makes of it; None where it is not whole."""
    from tokamac.engine.perf.inspection import prospect
    from tokamac.engine.perf.machine import here
    from tokamac.engine.perf.what_if import WhatIfCase

    place, case = here(limit=limit_of_settings()), WhatIfCase(context=CONTEXT, prompt=CONTEXT)
    bar = Progress("estimating", unit="models", plain=False)
    found: list[tuple[ModelOnDisk, Prospect | None]] = []
    try:
        for model in models:
            bar.update(len(found), len(models))
            found.append((model, prospect(model.id, case, place) if model.whole else None))
    finally:
        bar.clear()
    return found


def _row(model: "ModelOnDisk", found: "Prospect | None") -> list[str]:
    last = model.last_used_s
    used = "embedded" if last is None else time.strftime("%Y-%m-%d", time.localtime(last))
    if found is None:
        return [sanitise_line(model.id), size(model.nbytes), "", "incomplete: pull it again", "", used]
    bits = found.outcome.bits_per_weight
    figures = [UNKNOWN if bits is None else f"{bits:.2f}", found.verdict, rate(found.outcome.expected_tps)]
    return [sanitise_line(model.id), size(model.nbytes), *figures, used]


def _plain(model: "ModelOnDisk", found: "Prospect | None") -> dict[str, Any]:
    outcome = None if found is None else found.outcome
    memory = None if outcome is None else outcome.memory
    return {
        "id": model.id,
        "path": str(model.path),
        "bytes": model.nbytes,
        "whole": model.whole,
        "last_used_s": model.last_used_s,
        **picked(outcome, "bits_per_weight"),
        "memory_bytes": None if memory is None else memory.total,
        **picked(memory, "fits"),
        **picked(outcome, "ceiling_tps", "expected_tps"),
        "verdict": None if found is None else found.verdict,
        "reason": "not complete on this disk" if found is None else found.reason,
    }


def suggest(parser: Parser, options: argparse.Namespace) -> int:
    """Print the suggestions; return the exit status."""
    place = place_of(parser, options)
    from tokamac.engine.hub.download import last_speed
    from tokamac.engine.perf.machine import here
    from tokamac.engine.perf.what_if import suggestions
    from tokamac.engine.speculation.gain import draft_offer

    from ..backend.advice import model_line
    from ..models.advice import advise

    context = options.context or CONTEXT
    place = place or here(limit=limit_of_settings())
    bar = Progress("estimating", unit="models", plain=False)
    try:
        found = suggestions(place, context, progress=bar.update)
    finally:
        bar.clear()
    advice = advise(map(model_line, found), last_speed())
    drafts = {each.id: draft_offer(each, place) for each in found}
    if options.json:
        start = None if advice.start is None else asdict(advice.start)
        plain = [{**_suggested_plain(each), "draft": _draft_plain(drafts[each.id])} for each in found]
        json_line({"context": context, "suggestions": plain, "start_here": start, "note": advice.note or None})
        return 0
    _print(found, advice, place, context, drafts)
    return 0


HEADINGS: "dict[Group, str]" = {
    "recommended": "Recommended, best first",
    "speed unknown": "They fit; their speed here is not known yet",
    "slow": "Slow, the fastest first",
    "fit unknown": "Whether they fit is not known",
}


def _print(
    found: "tuple[Suggestion, ...]",
    advice: "ModelAdvice",
    place: "Machine",
    context: int,
    drafts: "dict[str, DraftOffer | None]",
) -> None:
    """Print what may fit, group after group, in columns that are alike; then the draft models that are known for them."""
    possible = [each for each in found if each.group != "does not fit"]
    print(f"{sanitise_line(place.chip.label)}, with a prompt of {context:,} tokens\n")
    if advice.start is not None:
        print(f"Start here: {advice.start.model}\n            {advice.start.facts}\n")
    head = ["model", "weights", "download", "memory", "ceiling", "expected", "first token", ""]
    first, *rows = table([head, *map(_suggested_row, possible)], right=(1, 2, 3, 4, 5, 6)).splitlines()
    for group, alike in groupby(zip(possible, rows, strict=True), key=lambda pair: pair[0].group):
        print(f"{HEADINGS[group]}\n\n{first}", *(row for _, row in alike), "", sep="\n")
    if not possible:
        print("none of the catalogue fits")
    if pairs := [(each.id, draft) for each in possible if (draft := drafts[each.id]) is not None]:
        true = percent(pairs[0][1].acceptance)
        print(f"With a draft model beside it, which guesses ahead (tokamac help speed); {true} of its guesses true\n")
        head = ["model", "draft model", "download", "memory of both", "", "gain", "expected"]
        print(table([head, *(_draft_row(*pair) for pair in pairs)], right=(2, 3, 5, 6)))
        print()
    for line in [*([advice.note] if advice.note else []), *_notes(found, possible, place)]:
        note(f"note: {line}")


def _draft_row(model: str, draft: "DraftOffer") -> list[str]:
    memory, gain = draft.memory, draft.gain
    gained = UNKNOWN if gain is None else times(gain) if gain > 1 else "none"
    taken = size(None if memory is None else memory.total)
    return [model, draft.id, size(draft.download_bytes), taken, fits(memory), gained, rate(draft.expected_tps)]


def _draft_plain(draft: "DraftOffer | None") -> dict[str, Any] | None:
    return None if draft is None else asdict(draft)


def _notes(found: "tuple[Suggestion, ...]", possible: "list[Suggestion]", place: "Machine") -> list[str]:
    notes: list[str] = []
    if len(found) > len(possible):
        notes.append(f"{len(found) - len(possible)} more of the catalogue do not fit")
    if place.budget_rule is not None:
        notes.append(place.budget_rule)
    if place.budget_bytes is None:
        notes.append("whether a model fits is unknown without --memory")
    if (first := next((each for each in possible if _from_others(each)), None)) is not None:
        notes.append(f"tight for now: for {first.id} {giving_way(_from_others(first))}")
    best: dict[str, str] = {}
    for each in possible:
        if each.outcome.reason:
            best.setdefault(each.outcome.reason, each.id)
    notes.extend(reason + (measure_it(model, here=False) if place.local else "") for reason, model in best.items())
    return notes


def _from_others(each: "Suggestion") -> int:
    """Return what other programs have to give way by for a model that fits."""
    memory = each.outcome.memory
    return memory.from_others if memory is not None and each.verdict == "tight" else 0


def _suggested_row(each: "Suggestion") -> list[str]:
    outcome, memory = each.outcome, each.outcome.memory
    mixture = "mixture" in each.traits and each.active_parameters is not None
    return [
        each.id,
        short(each.parameters) + (f", {short(each.active_parameters)} a token" if mixture else ""),
        size(each.download_bytes),
        size(None if memory is None else memory.total),
        rate(outcome.ceiling_tps),
        rate(outcome.expected_tps),
        seconds(outcome.ttft_s),
        each.verdict,
    ]


def _suggested_plain(each: "Suggestion") -> dict[str, Any]:
    outcome = each.outcome
    return {
        "id": each.id,
        "model": each.name,
        **picked(each, "download_bytes", "parameters", "active_parameters"),
        "weight_bytes": outcome.weight_bytes,
        "memory": None if outcome.memory is None else asdict(outcome.memory),
        **picked(outcome, "ceiling_tps", "expected_tps", "prefill_tps", "ttft_s"),
        **picked(each, "verdict", "reason", "group"),
    }
