r"""Which packing for which tensor, so that a model of a given size says what its source says.

    error of a packing = α · its relative squared error, in nats a token

For small errors the divergence between the words of a model and of its packed form grows as the sum of such terms over its
tensors (Malinovskii et al. 2024, "Pushing the Limits of Large Language Model Quantization via the Linearity Theorem", arXiv
2411.17525). So the errors of all packings are measured, each tensor's α is found (sensitivity.py), and the budget of bytes is spent
where the sum becomes least: a multiple-choice knapsack. Its relaxation is solved by one price λ for a byte: every tensor takes the
candidate of least error + λ · bytes, and those lie on the lower convex hull of its candidates.

    error │ o                     the hull's steps of all tensors, steepest first, are bought while the budget lasts;
          │  \  o                then whatever later step still fits is taken as well (the greedy fill)
          │   o─._
          │       ‾o───o
          └───────────── bytes

Greedy misses the best choice by less than one step. What may still beat it is looked for exactly: a candidate's error + λ · bytes
above the least of its tensor is its regret, and no choice whose regrets add up to more than the gap between greedy and relaxed
error can win (Sinha and Zoltners 1979, "The Multiple-Choice Knapsack Problem"). The few that remain are searched.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from tokamac.engine.errors import OptionError
from tokamac.engine.perf.config_cost import Packing

from .choices import Choices, model_rule, out_of_groups, packable, part
from .methods import Quantizer
from .options import BITS, GROUP_SIZES, UNQUANTIZED, Options
from .plan import make_plan
from .report import StageDone, StageProgress
from .sensitivity import (
    AlphaBasis,
    Errors,
    ErrorTrial,
    alpha_basis,
    find_alphas,
    packed_type,
    relative_errors,
    sample,
)
from .source import Source, fresh
from .streaming import Streamed, activation_statistics, streamable_source

if TYPE_CHECKING:
    import numpy as np

Alternatives = dict[str, tuple[Packing | None, ...]]
"""By module path, the packings a tensor may get; None is unpacked."""

ROUTER = re.compile(r"(^|\.)(router|gate|shared_expert_gate)(\.(gate|proj|layer|classifier|gate_proj|wg))?$")
"""Modules that choose experts, by their names in model classes."""

ROUTER_BITS = 8
"""The least for a router, as in mlx-lm's rules: a token sent to another expert is no small error, and the tensor is small."""

CAUTIOUS_BITS = 3
"""The least bits where α is only guessed: two bits for the wrong tensor would cost more than they save."""

DIGITS = 4
"""Of an error, so that the last bits of floating-point sums don't decide between two packings."""

MAX_FRONTIER = 4096
"""Partial choices that the exact search keeps in view. More, and the greedy choice stands: it is then very near the best."""

ROUNDING = 1e-9
"""Relative error allowed to sums of errors, so that a tie is not lost to rounding."""

NOTES: Mapping[AlphaBasis, str] = {
    "measured": "bits were allocated by the divergence that packing each tensor causes, measured on a text",
    "guessed": "bits were allocated by how much each layer changes its input: the model is too large to measure "
    "what packing each tensor causes",
    "by kind": "bits were allocated by each tensor's error and kind alone: there was no text to measure on",
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of everything that could be written.

    of: by module path and packing. fixed: what is never packed. parameters: of the whole model.
    """

    of: Mapping[str, Mapping[Packing | None, int]]
    fixed: int
    parameters: int

    @property
    def smallest(self) -> int:
        """Bytes of the smallest model there is."""
        return self.fixed + sum(min(sizes.values()) for sizes in self.of.values())


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to store a tensor: its packing (None: unpacked), the bytes it takes, and its error, in any one unit."""

    packing: Packing | None
    nbytes: int
    error: float


@dataclass(frozen=True, slots=True)
class _Step:
    """On the hull of one tensor, from one candidate to the next larger: what it costs, and the error that each byte saves."""

    name: str
    to: Candidate
    nbytes: int
    slope: float


@dataclass(frozen=True, slots=True)
class _Partial:
    """Candidates for the first few tensors: the last one, and those before it."""

    nbytes: int
    error: float
    regret: float
    last: Candidate | None
    before: "_Partial | None"


Chosen = dict[str, Candidate]
Sized = TypeVar("Sized", Candidate, _Partial)


def plan_budget(
    source: Source, options: Options, quantizer: Quantizer, ids: Sequence[int] | None, progress: StageProgress
) -> tuple[Choices, tuple[str, ...]]:
    """Return the packings that make a model of at most ``options.target_bpw`` bits per weight, and what a user should know.

    What is stored counts in full: scales, biases, and all that is never packed. Weights are read, but ``source.weights`` stay lazy.

    Args:
        source: The model.
        options: With a target.
        quantizer: What will pack it.
        ids: Tokens of a text, some hundred; None where there is no text or no tokenizer.
        progress: Is called as the work goes on.

    Raises:
        OptionError: Before anything is measured, where even the smallest packing is too large.
        ConversionError: For weights that are not finite.
    """
    trial = ErrorTrial(source, options, quantizer, ids or (), progress)
    basis = alpha_basis(source, trial.ids)
    among, cost = _affordable(source, options, basis)
    errors = _errors(trial, among)
    alphas = find_alphas(basis, trial, errors)
    candidates = {
        path: [
            Candidate(
                packing, cost.of[path][packing], _rounded(alphas[path].at(packing.bits if packing else None) * error)
            )
            for packing, error in errors[path].items()
        ]
        for path in among
    }
    chosen = {path: each.packing for path, each in spend(candidates, _budget_bytes(options, cost)).items()}
    groups = GROUP_SIZES if options.group_size is None else (options.group_size,)
    return chosen, (NOTES[basis], *out_of_groups(source, chosen, groups))


def _rounded(error: float) -> float:
    return float(f"{error:.{DIGITS}g}")


def _affordable(source: Source, options: Options, basis: AlphaBasis) -> tuple[Alternatives, Sizes]:
    for least_bits in (BITS[0],) if basis == "measured" else (CAUTIOUS_BITS, BITS[0]):
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


def _errors(trial: ErrorTrial, among: Alternatives) -> Errors:
    """Return the relative squared error of every alternative, tensor by tensor; 0 of what stays as it is in the source."""

    def reading(done: int, total: int) -> None:
        trial.progress(StageDone("reading a text", done, total))

    source, importance = trial.source, dict[str, "np.ndarray"]()
    if trial.ids:
        importance = activation_statistics(Streamed(streamable_source(source), progress=reading), [trial.ids])
    weights, found = fresh(source), dict[str, dict[Packing | None, float]]()
    for done, (path, packings) in enumerate(among.items(), start=1):
        rows = sample(weights.pop(f"{path}.weight")).astype(packed_type(source, trial.options, path))
        exact = (None, source.packed[path].packing if path in source.packed else None)
        packed = [packing for packing in packings if packing and packing not in exact]
        measured = relative_errors(path, rows, packed, trial.quantizer, importance.get(path))
        found[path] = {packing: measured.get(packing, 0.0) if packing else 0.0 for packing in packings}
        trial.progress(StageDone("measuring errors", done, len(among)))
    return found


def sizes(source: Source, options: Options, among: Alternatives) -> Sizes:
    """Return the bytes of every alternative, as a plan counts them. Reads no weight."""
    of: dict[str, dict[Packing | None, int]] = {path: {} for path in among}
    for packing in dict.fromkeys(packing for each in among.values() for packing in each):
        chosen: Choices = {path: packing for path, each in among.items() if packing in each}
        written = {tensor.name: tensor.nbytes for tensor in make_plan(source, options, chosen).tensors}
        for path in chosen:
            of[path][packing] = written[f"{path}.weight"]
    unpacked = make_plan(source, options, {})
    fixed = sum(tensor.nbytes for tensor in unpacked.tensors if tensor.name.removesuffix(".weight") not in among)
    return Sizes(of, fixed, unpacked.parameters)


def alternatives(source: Source, options: Options, least_bits: int = BITS[0]) -> Alternatives:
    """Return every packing that ``options``, the model's rules and its shapes allow, with at least ``least_bits``.

    Where mlx-lm's class of a model forbids packing, that holds. Where it asks for more bits, that holds for routers only: other
    layers are measured. What is packed in the source may stay so. The bits of the embedding and the head may be given.
    """
    return {
        path: tuple(dict.fromkeys(_packings(source, options, path, module, least_bits))) or (None,)
        for path, module in packable(source)
    }


def _packings(source: Source, options: Options, path: str, module: Any, least_bits: int) -> Iterator[Packing | None]:
    rule, shape = model_rule(source, path, module), source.weights[f"{path}.weight"].shape
    given = options.embed_bits if part(source, path) in ("embedding", "head") else None
    if not rule or len(shape) < 2 or given == UNQUANTIZED:
        yield None
        return
    if given is not None:
        bits_allowed: Sequence[int] = (given,)
    else:
        router = max(ROUTER_BITS, rule.get("bits", 0) if isinstance(rule, dict) else 0)
        least = router if ROUTER.search(path) else least_bits
        bits_allowed = [bits for bits in BITS if bits >= least]
    for bits in bits_allowed:
        for group in GROUP_SIZES if options.group_size is None else (options.group_size,):
            if shape[-1] % group == 0:
                yield Packing(bits, group)
    if given is None:
        yield None
        own = source.packed[path].packing if path in source.packed else None
        if own is not None and options.group_size in (None, own.group_size):
            yield own


def spend(candidates: Mapping[str, Sequence[Candidate]], budget_bytes: int) -> Chosen:
    """Return one candidate for every tensor: the least total error that takes at most ``budget_bytes``.

    Where several are as good, one that takes no more bytes than the others. The same arguments give the same choice.
    Raises OptionError if nothing fits.
    """
    needed = smallest_bytes(candidates)
    if needed > budget_bytes:
        raise OptionError(
            f"{budget_bytes} bytes are too few: the smallest packing takes {needed}", "Allow more bits per weight."
        )
    useful = {name: _undominated(options) for name, options in candidates.items()}
    greedy, price = _buy(useful, budget_bytes)
    return _search(useful, budget_bytes, greedy, price) or greedy


def smallest_bytes(candidates: Mapping[str, Sequence[Candidate]]) -> int:
    """Return the bytes of the smallest choice there is."""
    return sum(min(each.nbytes for each in options) for options in candidates.values())


def total_bytes(chosen: Mapping[str, Candidate]) -> int:
    """Return the bytes of a choice."""
    return sum(each.nbytes for each in chosen.values())


def total_error(chosen: Mapping[str, Candidate]) -> float:
    """Return the error of a choice."""
    return sum(each.error for each in chosen.values())


def _undominated(options: Iterable[Sized]) -> list[Sized]:
    """Return those that no other beats in bytes and error, smallest first: errors fall strictly."""
    kept: list[Sized] = []
    for each in sorted(options, key=lambda option: (option.nbytes, option.error)):
        if not kept or each.error < kept[-1].error:
            kept.append(each)
    return kept


def _steps(useful: Mapping[str, Sequence[Candidate]]) -> Iterator[_Step]:
    """Yield the steps of every tensor's lower convex hull: each saves less error a byte than the one before."""
    for name, options in useful.items():
        hull: list[Candidate] = []
        for each in options:
            while len(hull) > 1 and _above(hull[-2], hull[-1], each):
                hull.pop()
            hull.append(each)
        for small, large in pairwise(hull):
            nbytes = large.nbytes - small.nbytes
            yield _Step(name, large, nbytes, (small.error - large.error) / nbytes)


def _above(left: Candidate, middle: Candidate, right: Candidate) -> bool:
    """Whether ``middle`` lies on or above the line between the others."""
    first = (left.error - middle.error) * (right.nbytes - middle.nbytes)
    second = (middle.error - right.error) * (middle.nbytes - left.nbytes)
    return first <= second


def _buy(useful: Mapping[str, Sequence[Candidate]], budget_bytes: int) -> tuple[Chosen, float]:
    """Return the greedy choice, and the price of a byte: the slope of the first step that did not fit (0: all did)."""
    chosen = {name: options[0] for name, options in useful.items()}
    left, price, stopped = budget_bytes - total_bytes(chosen), 0.0, set[str]()
    for step in sorted(_steps(useful), key=lambda step: -step.slope):
        # A step starts where the one before it ended, so a tensor that missed one takes no later one.
        if step.name in stopped or step.nbytes > left:
            stopped.add(step.name)
            price = price or step.slope
            continue
        chosen[step.name] = step.to
        left -= step.nbytes
    while better := [  # spend what is left on the best single changes that fit, off the hull too
        (chosen[name].error - each.error, name, each)
        for name, options in useful.items()
        for each in options
        if each.error < chosen[name].error and each.nbytes - chosen[name].nbytes <= left
    ]:
        _, name, best = max(better, key=lambda entry: entry[0])
        left -= best.nbytes - chosen[name].nbytes
        chosen[name] = best
    return chosen, price


def _search(
    useful: Mapping[str, Sequence[Candidate]], budget_bytes: int, greedy: Chosen, price: float
) -> Chosen | None:
    """Return the best choice of all, or None where the search would grow past MAX_FRONTIER."""
    least = {name: min(each.error + price * each.nbytes for each in options) for name, options in useful.items()}
    scale = sum(least.values())
    gap = total_error(greedy) - (scale - price * budget_bytes) + ROUNDING * scale
    rest_bytes = smallest_bytes(useful)
    frontier = [_Partial(0, 0.0, 0.0, None, None)]
    for name, options in useful.items():
        rest_bytes -= options[0].nbytes
        frontier = _undominated(
            _Partial(part.nbytes + each.nbytes, part.error + each.error, regret, each, part)
            for part in frontier
            for each in options
            if (regret := part.regret + each.error + price * each.nbytes - least[name]) <= gap
            and part.nbytes + each.nbytes + rest_bytes <= budget_bytes
        )
        if len(frontier) > MAX_FRONTIER:
            return None
    chosen, node = Chosen(), min(frontier, key=lambda part: (part.error, part.nbytes))
    for name in reversed(list(useful)):
        assert node.last is not None
        assert node.before is not None
        chosen[name], node = node.last, node.before
    return {name: chosen[name] for name in useful}
