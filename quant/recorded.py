"""Reading ``conversion.json`` back. Anyone may have written it, so what is not of the right shape is not believed."""

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

from tokamac.engine.regular_files import TooLargeError, read_bytes
from tokamac.quant.divergence import Quality
from tokamac.quant.report import FORMAT, RECORD, Outcome

RECORD_LIMIT = 64 << 20
"""Bytes; a model of ten thousand tensors has a record of three million."""

UNRECORDED = "nothing was recorded when it was made"

UNCOMPARED = "it was not compared with its source when it was made"

LAYERS_LIMIT = 10_000


def read_recorded(folder: Path) -> Outcome | str:
    """Return how close the model in ``folder`` was to its source when it was made, or the reason why that can't be said.

    Texts of the record are not passed on: what is of concern is judged anew, from its figures.
    """
    file = folder / RECORD
    try:
        return _outcome(json.loads(read_bytes(file, RECORD_LIMIT)))
    except FileNotFoundError:
        return UNRECORDED
    except TooLargeError:
        return f"{RECORD} is longer than any record"
    except OSError as error:
        return f"{RECORD} can't be read: {error.strerror}"
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return f"{RECORD} is damaged"


def read_sizes(folder: Path) -> tuple[int, float, int] | None:
    """Return the recorded bytes of the weights, their bits per weight, and the source's bytes; None where that can't be read."""
    try:
        found = json.loads(read_bytes(folder / RECORD, RECORD_LIMIT))
        weights, bits, source = (_figure(found[name]) for name in ("weight_bytes", "bits_per_weight", "source_bytes"))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return None if weights is None or bits is None or source is None else (int(weights), bits, int(source))


def _outcome(found: Any) -> Outcome | str:
    """Return what a record says; raise KeyError, TypeError, ValueError or OverflowError where it is none."""
    if found["format"] != FORMAT:
        return f"{RECORD} was written by another version of Tokamac"
    said, bits = found["quality"], _figure(found["bits_per_weight"])
    if said is None:
        return UNCOMPARED
    figures = {field.name: _figure(said[field.name]) for field in fields(Quality)}
    layers, error = said["layers"], _figure(said["relative_error"])
    if not isinstance(layers, list) or len(layers) > LAYERS_LIMIT:
        raise ValueError
    if bits is None or bits <= 0 or (error is not None and error < 0):
        raise ValueError
    return Outcome(bits, error, _quality(figures), tuple(map(_figure, layers)))


def _quality(figures: dict[str, float | None]) -> Quality | None:
    """Return the comparison; None where no text was compared."""
    places, ratio, top1 = figures["positions"], figures["perplexity_ratio"], figures["top1"]
    if places is None:
        return None
    if places < 1 or (ratio is not None and ratio <= 0) or not 0 <= (top1 or 0) <= 1:
        raise ValueError
    return Quality(**{**figures, "positions": int(places)})  # type: ignore[arg-type]  # the dictionary loses which is which


def _figure(value: Any) -> float | None:
    """Return a finite number, or None: no figure of a record is anything else."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    if not math.isfinite(value):
        raise ValueError
    return value
