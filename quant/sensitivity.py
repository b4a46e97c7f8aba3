"""Which packing for which tensor, so that a model of a given size says what its source says.

    damage of a packing = α · its relative squared error

For small errors the divergence between the words of a model and of its packed form grows as the sum of such terms over its
tensors (Malinovskii et al. 2024, "Pushing the Limits of Large Language Model Quantization via the Linearity Theorem", arXiv
2411.17525). So the errors of all packings are measured (damage.py), each tensor's α is found (importance.py), and the budget is
spent where the sum becomes least (budget.py).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tokamac.engine.errors import OptionError
from tokamac.engine.limits.config_cost import Packing
from tokamac.quant.alternatives import Alternatives, Sizes, alternatives, sizes
from tokamac.quant.budget import Candidate, spend
from tokamac.quant.choices import Choices, out_of_groups
from tokamac.quant.damage import relative_errors, sample
from tokamac.quant.importance import Alpha, Errors, How, Trial, find_alphas, packed_type, way
from tokamac.quant.method import Quantizer
from tokamac.quant.moments import moments
from tokamac.quant.options import BITS, GROUP_SIZES, Options
from tokamac.quant.report import StageDone
from tokamac.quant.source import Source, fresh
from tokamac.quant.streamed import Streamed, streamable_source

if TYPE_CHECKING:
    import numpy as np

Tell = Callable[[StageDone], None]

CAUTIOUS_BITS = 3
"""The least bits where α is only guessed: two bits for the wrong tensor would cost more than they save."""

DIGITS = 4
"""Of a damage, so that the last bits of floating-point sums don't decide between two packings."""

NOTES: Mapping[How, str] = {
    "measured": "bits were spent by the divergence that each tensor's packing causes, measured on a text",
    "guessed": "bits were spent by how much each layer changes what runs through it: the model is too large to measure "
    "what each tensor's packing causes",
    "by kind": "bits were spent by each tensor's error and kind alone: without a text nothing could be measured",
}


def plan_budget(
    source: Source, options: Options, quantizer: Quantizer, ids: Sequence[int] | None, tell: Tell
) -> tuple[Choices, tuple[str, ...]]:
    """Return the packings that make a model of at most ``options.target_bpw`` bits per weight, and what a user should know.

    ids: tokens of a text, some hundred; None where there is no text or no tokenizer. tell: is called as the work goes on.
    What is stored counts in full: scales, biases, and all that is never packed. Weights are read, but ``source.weights`` stay lazy.
    Raises OptionError, before anything is measured, where even the smallest packing is too large; ConversionError for weights that
    are not finite.
    """
    assert options.target_bpw is not None
    trial = Trial(source, options, quantizer, ids or (), tell)
    how = way(source, trial.ids)
    among, cost = _affordable(source, options, how)
    errors = _errors(trial, among, _inputs(trial) if trial.ids else {})
    alphas = find_alphas(how, trial, errors)
    candidates = {path: _candidates(cost.of[path], errors[path], alphas[path]) for path in among}
    chosen = {path: each.packing for path, each in spend(candidates, _budget_bytes(options, cost)).items()}
    return chosen, (NOTES[how], *out_of_groups(source, chosen, _groups(options)))


def _affordable(source: Source, options: Options, how: How) -> tuple[Alternatives, Sizes]:
    for least_bits in (BITS[0],) if how == "measured" else (CAUTIOUS_BITS, BITS[0]):
        among = alternatives(source, options, least_bits)
        cost = sizes(source, options, among)
        if cost.smallest - cost.fixed <= _budget_bytes(options, cost):
            return among, cost
    least = math.ceil(100 * 8 * cost.smallest / cost.parameters) / 100
    raise OptionError(
        f"{options.target_bpw:g} bits per weight can't be reached: the smallest packing of this model has {least:g}",
        f"Use --target-bpw {least:g} or more.",
    )


def _budget_bytes(options: Options, cost: Sizes) -> int:
    """Return the bytes left for what can be packed."""
    assert options.target_bpw is not None
    return int(options.target_bpw * cost.parameters / 8) - cost.fixed


def _groups(options: Options) -> tuple[int, ...]:
    return GROUP_SIZES if options.group_size is None else (options.group_size,)


def _inputs(trial: Trial) -> "dict[str, np.ndarray]":
    def progress(done: int, total: int) -> None:
        trial.tell(StageDone("reading a text", done, total))

    return moments(Streamed(streamable_source(trial.source), progress=progress), [trial.ids])


def _errors(trial: Trial, among: Alternatives, inputs: "Mapping[str, np.ndarray]") -> Errors:
    """Return the relative squared error of every alternative, tensor by tensor; 0 of what stays as it is in the source."""
    source = trial.source
    weights, found = fresh(source), dict[str, dict[Packing | None, float]]()
    for done, (path, packings) in enumerate(among.items(), start=1):
        rows = sample(weights.pop(f"{path}.weight")).astype(packed_type(source, trial.options, path))
        kept = source.packed[path].packing if path in source.packed else None
        packed = [packing for packing in packings if packing is not None and packing != kept]
        measured = relative_errors(path, rows, packed, trial.quantizer, inputs.get(path))
        found[path] = {packing: measured.get(packing, 0.0) if packing else 0.0 for packing in packings}
        trial.tell(StageDone("measuring errors", done, len(among)))
    return found


def _candidates(
    nbytes: Mapping[Packing | None, int], errors: Mapping[Packing | None, float], alpha: Alpha
) -> list[Candidate]:
    return [
        Candidate(packing, nbytes[packing], float(f"{alpha.at(packing.bits if packing else None) * error:.{DIGITS}g}"))
        for packing, error in errors.items()
    ]
