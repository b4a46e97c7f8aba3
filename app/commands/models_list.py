"""``tokamac models list``: what is on disk, and what this machine would make of it."""

import time
from typing import TYPE_CHECKING, Any

from tokamac.app.options import limit_of_settings
from tokamac.app.output import Progress, json_line, table
from tokamac.app.sanitise import sanitise_line
from tokamac.app.tui.units import UNKNOWN, count, rate, size

if TYPE_CHECKING:
    from tokamac.engine.hub import ModelOnDisk
    from tokamac.engine.limits.prospects import Prospect

CONTEXT = 8192
"""Tokens held while decoding, to reckon fit and speed with; or the model's own context, where that is shorter."""


def list_(*, json: bool) -> int:
    """Print the models in the Hugging Face cache; return the exit status."""
    from tokamac.engine import hub

    found = hub.list_models()
    weighed = _weigh(found) if found else []
    if json:
        json_line({"context": CONTEXT, "models": [_plain(*each) for each in weighed]})
    elif found:
        print(
            table(
                [["model", "size", "bits", "", "expected", "last used"], *(_row(*each) for each in weighed)],
                right=(1, 2, 4),
            )
        )
        print(
            f"\nFit and expected speed are for {count(CONTEXT)} tokens held, or all that a model's own context holds."
        )
    else:
        print("no models on disk; get one with: tokamac models pull ID")
    return 0


def _weigh(models: "tuple[ModelOnDisk, ...]") -> "list[tuple[ModelOnDisk, Prospect | None]]":
    """Return each with what this machine makes of it; None where it is not whole."""
    from tokamac.engine.limits.outcomes import Case
    from tokamac.engine.limits.places import here
    from tokamac.engine.limits.prospects import prospect

    place, case = here(limit=limit_of_settings()), Case(context=CONTEXT, prompt=CONTEXT)
    bar = Progress("weighing", unit="models", plain=False)
    found: list[tuple[ModelOnDisk, Prospect | None]] = []
    try:
        for model in models:
            bar.update(len(found), len(models))
            found.append((model, prospect(model.id, case, place) if model.whole else None))
    finally:
        bar.clear()
    return found


def _row(model: "ModelOnDisk", found: "Prospect | None") -> list[str]:
    used = time.strftime("%Y-%m-%d", time.localtime(model.last_used_s))
    if found is None:
        return [sanitise_line(model.id), size(model.nbytes), "", "not whole: pull it again", "", used]
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
        "bits_per_weight": None if outcome is None else outcome.bits_per_weight,
        "memory_bytes": None if memory is None else memory.total,
        "fits": None if memory is None else memory.fits,
        "ceiling_tps": None if outcome is None else outcome.ceiling_tps,
        "expected_tps": None if outcome is None else outcome.expected_tps,
        "verdict": None if found is None else found.verdict,
        "reason": "not whole on this disk" if found is None else found.reason,
    }
