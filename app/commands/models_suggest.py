"""``tokamac models suggest``: which models of the catalogue would run well here, or on another machine, best first."""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tokamac.app.commands.inspect_report import chip_name
from tokamac.app.commands.measuring import measure_it
from tokamac.app.commands.place import place_of
from tokamac.app.output import Progress, json_line, note, table
from tokamac.app.parser import Parser
from tokamac.app.tui.units import rate, seconds, short, size
from tokamac.engine.limits.memory import giving_way

if TYPE_CHECKING:
    from tokamac.engine.limits.places import Place
    from tokamac.engine.limits.suggest import Suggestion

CONTEXT = 8192


def suggest(parser: Parser, options: argparse.Namespace) -> int:
    """Print the suggestions; return the exit status."""
    place = place_of(parser, options)
    from tokamac.engine.limits.whatif import here, suggestions

    context = options.context or CONTEXT
    place = place or here()
    bar = Progress("weighing", unit="models", plain=False)
    try:
        found = suggestions(place, context, progress=bar.update)
    finally:
        bar.clear()
    if options.json:
        json_line({"context": context, "suggestions": [_plain(each) for each in found]})
        return 0
    _print(found, place, context)
    return 0


def _print(found: "tuple[Suggestion, ...]", place: "Place", context: int) -> None:
    possible = [each for each in found if each.verdict != "does not fit"]
    print(f"{chip_name(place.chip)}, with a prompt of {context:,} tokens, best first\n")
    head = ["model", "weights", "download", "memory", "ceiling", "expected", "first token", ""]
    print(table([head, *map(_row, possible)], right=(1, 2, 3, 4, 5, 6)))
    if not possible:
        print("none of the catalogue fits")
    for line in _notes(found, possible, place):
        note(f"note: {line}")


def _notes(found: "tuple[Suggestion, ...]", possible: "list[Suggestion]", place: "Place") -> list[str]:
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


def _row(each: "Suggestion") -> list[str]:
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


def _plain(each: "Suggestion") -> dict[str, Any]:
    outcome = each.outcome
    return {
        "id": each.id,
        "model": each.name,
        "download_bytes": each.download_bytes,
        "parameters": each.parameters,
        "active_parameters": each.active_parameters,
        "weight_bytes": outcome.weight_bytes,
        "memory": None if outcome.memory is None else asdict(outcome.memory),
        "ceiling_tps": outcome.ceiling_tps,
        "expected_tps": outcome.expected_tps,
        "prefill_tps": outcome.prefill_tps,
        "ttft_s": outcome.ttft_s,
        "verdict": each.verdict,
        "reason": each.reason,
    }
