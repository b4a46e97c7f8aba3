"""``tokamac models``: list, pull, remove, search and suggest models."""

# With --json the chat's picker reads the lines of ``pull`` and ``remove`` (app/backend/processes.py).

import argparse
import time
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tokamac.engine.perf.memory import giving_way

from ..backend.keep_awake import awake
from ..models.local import gguf_models
from ..options import any_given, limit_of_settings, model_name, positive
from ..parser import ActionParser, Parser
from ..reports.verdict import poor_quality
from ..reports.what_if import times
from ..text.sanitise import sanitise_line
from ..text.terminal import Progress, json_line, note, picked, table
from ..text.units import UNKNOWN, count, percent, rate, rates, seconds, short, size
from . import loading
from .inspect import add_place_flags, fits, measure_it, place_of

if TYPE_CHECKING:
    from tokamac.engine.hub.download import HubModel, ModelOnDisk
    from tokamac.engine.perf.catalogue import Group
    from tokamac.engine.perf.inspection import Prospect
    from tokamac.engine.perf.what_if import Machine, Suggestion
    from tokamac.engine.speculation.gain import DraftOffer

    from ..models.listing import StartHere

# Tokens held while decoding, to reckon fit and speed with; or the model's own context, where that is shorter.
CONTEXT = 8192
LINES_APART_S = 0.25  # lines of progress: a reader draws each, and needs no more of them
ACTIONS = {
    "list": "models on disk: size, fit, expected speed",
    "pull": "download or update a model; an interrupted download resumes",
    "remove": "delete a model",
    "search": "find models on Hugging Face that run here, MLX first",
    "suggest": "a model to start with, and others that run well, here or on another machine",
}
SUGGEST_FLAGS = ("context", "chip", "gpu_cores", "memory")


def parser() -> ActionParser:
    made = ActionParser(
        "models",
        "Manage models in the Hugging Face cache, which other tools share. HF_HOME moves it, HF_TOKEN opens gated models.",
        "  tokamac models list\n"
        "  tokamac models suggest --context 16384\n"
        "  tokamac models search qwen3 coder\n"
        "  tokamac models pull mlx-community/Qwen3-4B-Instruct-2507-4bit\n"
        "  tokamac models pull unsloth/Qwen3-4B-Instruct-2507-GGUF:Q4_K_M\n"
        "  tokamac models remove mlx-community/Qwen3-4B-Instruct-2507-4bit",
        ACTIONS,
    )
    made.add_argument(
        "words",
        nargs="*",
        metavar="ID|WORDS",
        help="model ID (org/name, org/name@revision, org/name-GGUF:Q4_K_M) or short name; search: words",
    )
    made.add_argument("--json", action="store_true", help="JSON lines, the last one the result")
    removing = made.add_argument_group("remove")
    removing.add_argument("--unfinished", action="store_true", help="delete only an unfinished download")
    suggesting = made.add_argument_group("suggest")
    suggesting.add_argument(
        "--context", type=positive, metavar="N", help="prompt length to assume, in tokens (default: 8192)"
    )
    add_place_flags(made)
    made.only(("pull", "remove", "search"), "words")
    made.only(("remove",), "unfinished")
    made.only(("suggest",), *SUGGEST_FLAGS)
    return made


def run(parser: Parser, options: argparse.Namespace) -> int:
    _check(parser, options)
    match options.action:
        case "list":
            return list_(json=options.json)
        case "suggest":
            return suggest(parser, options)
        case "search":
            return search(" ".join(options.words), json=options.json)
        case "pull":
            try:
                model = model_name(options.words[0])
            except argparse.ArgumentTypeError as error:
                parser.error(str(error))
            return pull(model, json=options.json)
        case _:
            return remove(options.words[0], unfinished=options.unfinished, json=options.json)


def _check(parser: Parser, options: argparse.Namespace) -> None:
    """Exit with status 2 for a missing or unsupported argument of the action."""
    action = options.action
    if action != "suggest" and any_given(options, SUGGEST_FLAGS):
        parser.error(f"{action} takes no --context, --chip, --gpu-cores or --memory")
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
    """Download or update a model (loading never updates); return the exit status."""
    from tokamac.engine.hub import download
    from tokamac.engine.hub.names import EMBEDDED

    if model in EMBEDDED:
        note(f"note: {model} is embedded: it comes with the program")
    if not json:
        if "gguf" in model.casefold() and ":" not in model:
            _tell_variants(model)
        print(loading.fetch(model, download.pull))
        return 0
    lines = _Lines()
    folder = download.pull(model, progress=lambda at: lines.tell(at.done, at.total))
    nbytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())  # links into the cache
    json_line({"event": "pulled", "id": model, "path": str(folder), "bytes": nbytes})
    return 0


def _tell_variants(model: str) -> None:
    from tokamac.engine.hub.download import gguf_variants

    found, chosen = gguf_variants(model)
    if chosen is not None and len(found) > 1:
        rows = [
            [sanitise_line(each.name), size(each.nbytes), "suits this machine" * (each == chosen)] for each in found
        ]
        note(table(rows, right=(1,)))
        note(f"note: {sanitise_line(f'{model}:{chosen.name}')} is fetched; another one by its name after the colon")


def remove(model: str, *, unfinished: bool, json: bool) -> int:
    """Delete a model, or only an unfinished download; return the exit status."""
    from tokamac.engine.errors import OptionError
    from tokamac.engine.gguf.library import HUB, OLLAMA, owner_of
    from tokamac.engine.hub import cache

    if (kept := owner_of(model, gguf_models(cache.cache_folder()))) is not None and kept.owner != HUB:
        there = f"`ollama rm {kept.name}` removes it." if kept.owner == OLLAMA else "Remove it there."
        raise OptionError(f"{model} belongs to {kept.owner}", there)
    freed = cache.discard_unfinished(model) if unfinished else cache.remove_model(model)
    if json:
        json_line({"event": "removed", "id": model, "freed_bytes": freed})
    elif unfinished and not freed:
        print(f"{sanitise_line(model)} has no unfinished download")
    else:
        print(f"removed {sanitise_line(model)}: {size(freed)} freed")
    return 0


def search(words: str, *, json: bool) -> int:
    """Print hub search results; with --json each again once its config arrives."""
    from tokamac.engine.hub import download as hub
    from tokamac.engine.perf.hardware import store_file

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
        note("note: tokamac models pull ID downloads one, tokamac inspect ID shows how it runs here")
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
    """Throttled progress as JSON lines."""

    def __init__(self) -> None:
        self._told_s: float | None = None

    def tell(self, done: int, total: int | None) -> None:
        now = time.monotonic()
        if self._told_s is None or now - self._told_s >= LINES_APART_S or done == total:
            self._told_s = now
            line: dict[str, Any] = {"event": "progress", "done": done, "total": total}
            json_line(line)


def list_(*, json: bool) -> int:
    from tokamac.engine.hub import download
    from tokamac.engine.hub.cache import ModelOnDisk, cache_folder

    kept = gguf_models(cache_folder())
    owners = {each.name: each.owner for each in kept}
    others = (ModelOnDisk(each.name, each.file, each.nbytes, None, whole=True) for each in kept)
    weighed = _weigh((_guide(), *download.list_models(), *others))
    if json:
        plain = [{**_plain(*each), "owner": owners.get(each[0].id)} for each in weighed]
        json_line({"context": CONTEXT, "models": plain})
    else:
        head = ["model", "size", "bits", "", "expected", "last used"]
        print(table([head, *(_row(*each, owners.get(each[0].id)) for each in weighed)], right=(1, 2, 4)))
        held = f"{count(CONTEXT)} tokens of context, or all that a model has"
        print(f"\nFit and expected speed are for {held}.")
        for model, _ in weighed:
            if worse := poor_quality(model.path):
                note(f"note: {model.id}: {worse}")
        if len(weighed) == 1:
            print("Only the embedded model is here. To get one: tokamac models suggest, then tokamac models pull ID")
    return 0


def _guide() -> "ModelOnDisk":
    from tokamac.assets import asset_path
    from tokamac.engine.hub.cache import ModelOnDisk
    from tokamac.engine.hub.names import GUIDE

    folder = asset_path("guide", "model")
    return ModelOnDisk(GUIDE, folder, sum(path.stat().st_size for path in folder.glob("*")), None, whole=True)


def _weigh(models: "tuple[ModelOnDisk, ...]") -> "list[tuple[ModelOnDisk, Prospect | None]]":
    """Return each model's prospects here; None if incomplete."""
    from tokamac.engine.perf.inspection import prospect
    from tokamac.engine.perf.what_if import WhatIfCase, here

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


def _row(model: "ModelOnDisk", found: "Prospect | None", owner: str | None) -> list[str]:
    last = model.last_used_s
    used = owner or "embedded" if last is None else time.strftime("%Y-%m-%d", time.localtime(last))
    if found is None:
        return [sanitise_line(model.id), size(model.nbytes), "", "incomplete: pull it again", "", used]
    bits = found.outcome.bits_per_weight
    verdict = f"{found.verdict}, worse answers" if poor_quality(model.path) else found.verdict
    figures = [UNKNOWN if bits is None else f"{bits:.2f}", verdict, rate(found.outcome.expected_tps)]
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
        "advice": poor_quality(model.path) or None,
    }


def suggest(parser: Parser, options: argparse.Namespace) -> int:
    place = place_of(parser, options)
    from tokamac.engine.hub.download import last_speed
    from tokamac.engine.perf.catalogue import standings
    from tokamac.engine.perf.what_if import here, nominal, suggestions
    from tokamac.engine.speculation.gain import draft_offer

    from ..models.listing import NO_START, StartHere

    context, limit = options.context or CONTEXT, limit_of_settings()
    place = place or here(limit=limit)
    make = nominal(place, limit=limit)
    bar = Progress("estimating", unit="models", plain=False)
    try:
        found = suggestions(place, make, context, progress=bar.update)
    finally:
        bar.clear()
    first = next((each.repository.id for each in standings(make) if each.start), None)
    chosen = next((each for each in found if each.id == first), None)
    start = None if chosen is None else StartHere(chosen.id, chosen.download_bytes, last_speed())
    drafts = {each.id: draft_offer(each, place) for each in found}
    if options.json:
        begin = None
        if start is not None and chosen is not None:
            speeds = picked(chosen.outcome, "expected_tps", "ceiling_tps")
            begin = {**asdict(start), "download_s": start.download_s, **speeds}
        plain = [{**_suggested_plain(each), "draft": (draft := drafts[each.id]) and asdict(draft)} for each in found]
        json_line(
            {"context": context, "suggestions": plain, "start_here": begin, "note": NO_START if start is None else None}
        )
        return 0
    _print(found, start, place, context, drafts)
    return 0


HEADINGS: "dict[Group, str]" = {
    "recommended": "Recommended, best first",
    "slow": "Slow",
    "tight": "Leave little memory",
    "fit unknown": "Fit unknown",
}


def _print(
    found: "tuple[Suggestion, ...]",
    start: "StartHere | None",
    place: "Machine",
    context: int,
    drafts: "dict[str, DraftOffer | None]",
) -> None:
    from ..models.listing import NO_START

    possible = [each for each in found if "does not fit" not in (each.group, each.verdict)]
    print(f"{sanitise_line(place.chip.label)}, with a prompt of {context:,} tokens\n")
    if start is not None:
        tps = next(each.outcome.expected_tps for each in found if each.id == start.model)
        speed = [] if tps is None else [f"about {tps:.0f} tok/s"]
        print(
            f"Start here: {start.model}\n            {' · '.join([size(start.download_bytes), *speed, start.wait])}\n"
        )
    head = ["model", "weights", "download", "memory", "ceiling", "expected", "first token", ""]
    first, *rows = table([head, *map(_suggested_row, possible)], right=(1, 2, 3, 4, 5, 6)).splitlines()
    for group, alike in groupby(zip(possible, rows, strict=True), key=lambda pair: pair[0].group):
        print(f"{HEADINGS[group]}\n\n{first}", *(row for _, row in alike), "", sep="\n")
    if not possible:
        print("No model of the catalogue fits.")
    if pairs := [(each.id, draft) for each in possible if (draft := drafts[each.id]) is not None]:
        true = percent(pairs[0][1].acceptance)
        print(f"With a draft model (tokamac help speed), at an acceptance rate of {true}\n")
        head = ["model", "draft model", "download", "memory of both", "", "gain", "expected"]
        print(table([head, *(_draft_row(*pair) for pair in pairs)], right=(2, 3, 5, 6)))
        print()
    for line in [*([] if start is not None else [NO_START]), *_notes(found, possible, place)]:
        note(f"note: {line}")


def _draft_row(model: str, draft: "DraftOffer") -> list[str]:
    memory, gain = draft.memory, draft.gain
    gained = UNKNOWN if gain is None else times(gain) if gain > 1 else "none"
    taken = size(None if memory is None else memory.total)
    return [model, draft.id, size(draft.download_bytes), taken, fits(memory), gained, rate(draft.expected_tps)]


def _notes(found: "tuple[Suggestion, ...]", possible: "list[Suggestion]", place: "Machine") -> list[str]:
    notes: list[str] = []
    if len(found) > len(possible):
        notes.append(f"{len(found) - len(possible)} more of the catalogue do not fit")
    if place.budget_rule is not None:
        notes.append(place.budget_rule)
    if place.budget_bytes is None:
        notes.append("fit is unknown without --memory")
    if (first := next((each for each in possible if _from_others(each)), None)) is not None:
        notes.append(f"tight for now: for {first.id} {giving_way(_from_others(first))}")
    best: dict[str, str] = {}
    for each in possible:
        if each.outcome.reason:
            best.setdefault(each.outcome.reason, each.id)
    notes.extend(reason + (measure_it(model, here=False) if place.local else "") for reason, model in best.items())
    return notes


def _from_others(each: "Suggestion") -> int:
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
        rates(outcome.expected_tps, outcome.expected_range),
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
