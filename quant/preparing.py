"""What a conversion finds out before it writes: inputs of layers, how much each tensor matters, what a calibrated method packs.

Each stage's result is kept in the workplace, so that a run that goes on does not measure again, and goes on with the same values.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tokamac.engine.context_length import context_length
from tokamac.engine.errors import ModelError
from tokamac.engine.limits.config_cost import Packing
from tokamac.engine.tokens import load_tokenizer
from tokamac.quant import calibration
from tokamac.quant.choices import Choices, choose
from tokamac.quant.method import Quantizer, Round, Search
from tokamac.quant.moments import moments
from tokamac.quant.options import BITS, Options
from tokamac.quant.peak import CALIBRATED, SEQUENCES
from tokamac.quant.plan import Plan, make_plan
from tokamac.quant.report import StageDone
from tokamac.quant.source import Source
from tokamac.quant.streamed import Streamed, streamable_source
from tokamac.quant.workplace import Workplace

if TYPE_CHECKING:
    import numpy as np

Tell = Callable[[StageDone], None]

MOMENTS, CHOICES = "moments.safetensors", "choices.json"


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that writing needs. source: what a calibrated method packed is packed in it."""

    source: Source
    quantizer: Quantizer
    plan: Plan


def check_method(source: Source, options: Options) -> None:
    """Raise OptionError where the method can't do what ``options`` ask for with this model, or has no text to look at."""
    if isinstance(options.calibration, Path):
        calibration.text(options.calibration)
    if options.how in CALIBRATED:
        CALIBRATED[options.how].check(source.config, source.module, options)


def foreseen(source: Source, options: Options) -> Plan:
    """Return the plan as far as it is known before anything is measured.

    A budget's choices are not: the plan is then that of the most bits for all that keep to it. Raises OptionError.
    """
    if options.target_bpw is None:
        return make_plan(source, options, choose(source, options))
    for bits in sorted(BITS, reverse=True):
        alike = replace(options, target_bpw=None, bits=bits)
        plan = make_plan(source, options, choose(source, alike))
        if plan.bits_per_weight <= options.target_bpw:
            told = f"which tensors get more than {bits} bits is measured when it runs; the whole has {options.target_bpw:g} at most"
            return replace(plan, notes=(*plan.notes, told))
    told = "all at 2 bits is still too large: whether larger groups bring it down far enough is found out when it runs"
    return replace(plan, notes=(*plan.notes, told))


def prepare(source: Source, options: Options, place: Workplace, tell: Tell) -> Prepared:
    """Return what is to be written, and how; ``source`` is used up. Raises OptionError, ModelError and ConversionError.

    The plan's notes go into the finished folder, so none tells of this run alone.
    """
    quantizer = _quantizer(source, options, place, tell)
    chosen, notes = _choices(source, options, quantizer, place, tell)
    if options.how in CALIBRATED:
        method = CALIBRATED[options.how]
        packed = method.pack(source, options, chosen, sequences(source, options, method.SEQUENCES), tell)
        source.weights.clear()  # arrays that both hold would stay in memory once they are read
        source = packed
    plan = make_plan(source, options, chosen)
    return Prepared(source, quantizer, replace(plan, notes=tuple(dict.fromkeys((*plan.notes, *notes)))))


def sequences(source: Source, options: Options, count: int = SEQUENCES) -> list[list[int]]:
    """Return token sequences of the calibration text, all equally long. Raises OptionError, and ModelError without a tokenizer."""
    text = calibration.text(options.calibration if isinstance(options.calibration, Path) else None)
    tokenizer = load_tokenizer(source.folder, source.config, source.folder.name)
    length = min(calibration.LENGTH, context_length(source.config) or calibration.LENGTH)
    return calibration.sequences(tokenizer, text, count, length)


def _quantizer(source: Source, options: Options, place: Workplace, tell: Tell) -> Quantizer:
    if options.how == "round":
        return Round()
    weighed = options.how == "search" and options.calibration is not None
    return Search(_moments(source, options, place, tell) if weighed else {})


def _moments(source: Source, options: Options, place: Workplace, tell: Tell) -> "dict[str, np.ndarray]":
    from safetensors.numpy import load, save

    kept = place.kept(MOMENTS)
    if kept is None:
        model = Streamed(
            streamable_source(source), progress=lambda done, total: tell(StageDone("calibrating", done, total))
        )
        kept = place.keep(MOMENTS, save(moments(model, sequences(source, options))))
    found: dict[str, np.ndarray] = load(kept.read_bytes())
    return found


def _choices(
    source: Source, options: Options, quantizer: Quantizer, place: Workplace, tell: Tell
) -> tuple[Choices, tuple[str, ...]]:
    if options.target_bpw is None:
        return choose(source, options), ()
    kept = place.kept(CHOICES)
    if kept is None:
        kept = place.keep(CHOICES, _spent(source, options, quantizer, tell))
    found = json.loads(kept.read_bytes())
    chosen = {path: None if packing is None else Packing(**packing) for path, packing in found["chosen"].items()}
    return chosen, tuple(found["notes"])


def _spent(source: Source, options: Options, quantizer: Quantizer, tell: Tell) -> bytes:
    from tokamac.quant.sensitivity import plan_budget

    try:
        ids = sequences(source, options, 1)[0]
    except ModelError:  # no tokenizer that can be read: the budget is planned without a text, and says so
        ids = None
    chosen, notes = plan_budget(source, options, quantizer, ids, tell)
    plain = {path: None if packing is None else asdict(packing) for path, packing in chosen.items()}
    return json.dumps({"chosen": plain, "notes": notes}).encode()
