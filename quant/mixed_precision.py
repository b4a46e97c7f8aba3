r"""Which packing for which tensor, so that a model of a given size says what its source says.

    damage of a packing = α · its relative squared error

For small errors the divergence between the words of a model and of its packed form grows as the sum of such terms over its
tensors (Malinovskii et al. 2024, "Pushing the Limits of Large Language Model Quantization via the Linearity Theorem", arXiv
2411.17525). So the errors of all packings are measured (importance.py), each tensor's α is found (importance.py), and the budget is
spent where the sum becomes least.

The ways in which each tensor of a model could be stored under a budget, and the bytes that each takes.

Spend a budget of bytes where it does the least damage: one packing for every tensor.

A multiple-choice knapsack. Its relaxation is solved by one price λ for a byte: every tensor takes the candidate of least
damage + λ · bytes, and those lie on the lower convex hull of its candidates.

    damage │ o                    the hull's steps of all tensors, steepest first, are bought while the budget lasts;
           │  \  o               then whatever later step still fits is taken as well (the greedy fill)
           │   o─._
           │       ‾o───o
           └───────────── bytes

Greedy misses the best choice by less than one step. What may still beat it is looked for exactly: a candidate's damage + λ · bytes
above the least of its tensor is its regret, and no choice whose regrets add up to more than the gap between greedy and relaxed
damage can win (Sinha and Zoltners 1979, "The Multiple-Choice Knapsack Problem"). The few that remain are searched.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tokamac.engine.errors import OptionError
from tokamac.engine.perf.config_cost import Packing
from tokamac.quant.choices import Choices, model_rule, out_of_groups, packable, part
from tokamac.quant.importance import (
    Alpha,
    Errors,
    ErrorTrial,
    How,
    find_alphas,
    moments,
    packed_type,
    relative_errors,
    sample,
    way,
)
from tokamac.quant.methods.method import Quantizer
from tokamac.quant.options import BITS, GROUP_SIZES, UNQUANTIZED, Options
from tokamac.quant.plan import make_plan
from tokamac.quant.report import StageDone
from tokamac.quant.source import Source, fresh
from tokamac.quant.streaming import Streamed, streamable_source

if TYPE_CHECKING:
    import numpy as np


Alternatives = dict[str, tuple[Packing | None, ...]]
"""By module path, the packings a tensor may get; None is unpacked."""

ROUTER = re.compile(r"(^|\.)(router|gate|shared_expert_gate)(\.(gate|proj|layer|classifier|gate_proj|wg))?$")
"""Modules that choose experts, by their names in model classes."""

ROUTER_BITS = 8
"""The least for a router, as in mlx-lm's rules: a token sent to another expert is no small error, and the tensor is small."""


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


def alternatives(source: Source, options: Options, least_bits: int = BITS[0]) -> Alternatives:
    """Return every packing that ``options``, the model's rules and its shapes allow, with at least ``least_bits``.

    Where mlx-lm's class of a model forbids packing, that holds. Where it asks for more bits, that holds for routers only: other
    layers are measured. What is packed in the source may stay so. The bits of the embedding and the head may be given.
    """
    return {
        path: tuple(dict.fromkeys(_packings(source, options, path, module, least_bits))) or (None,)
        for path, module in packable(source)
    }


def sizes(source: Source, options: Options, among: Alternatives) -> Sizes:
    """Return the bytes of every alternative, as a plan counts them. Reads no weight."""
    packings = dict.fromkeys(packing for each in among.values() for packing in each)
    of: dict[str, dict[Packing | None, int]] = {path: {} for path in among}
    for packing in packings:
        asked: Choices = {path: packing for path, each in among.items() if packing in each}
        plan = make_plan(source, options, asked)
        written = {tensor.name: tensor.nbytes for tensor in plan.tensors}
        for path in asked:
            of[path][packing] = written[f"{path}.weight"]
    unpacked = make_plan(source, options, {})
    fixed = sum(tensor.nbytes for tensor in unpacked.tensors if tensor.name.removesuffix(".weight") not in among)
    return Sizes(of, fixed, unpacked.parameters)


def _packings(source: Source, options: Options, path: str, module: Any, least_bits: int) -> Iterator[Packing | None]:
    own, shape = model_rule(source, path, module), source.weights[f"{path}.weight"].shape
    if not own or len(shape) < 2 or (given := _given_bits(source, options, path)) == UNQUANTIZED:
        yield None
        return
    floor = _router_bits(own) if ROUTER.search(path) else least_bits
    for bits in BITS if given is None else (given,):
        for group in GROUP_SIZES if options.group_size is None else (options.group_size,):
            if (bits >= floor or given is not None) and shape[-1] % group == 0:
                yield Packing(bits, group)
    if given is None:
        yield None
        yield from _kept(source, options, path)


def _given_bits(source: Source, options: Options, path: str) -> int | None:
    return options.embed_bits if part(source, path) in ("embedding", "head") else None


def _router_bits(own: bool | dict[str, Any]) -> int:
    return max(ROUTER_BITS, own.get("bits", 0) if isinstance(own, dict) else 0)


def _kept(source: Source, options: Options, path: str) -> Iterator[Packing]:
    """Yield the packing that the source has, unless another group size is asked for."""
    if path in source.packed:
        own = source.packed[path].packing
        if options.group_size in (None, own.group_size):
            yield own


MAX_FRONTIER = 4096
"""Partial choices that the exact search keeps in view. More, and the greedy choice stands: it is then very near the best."""

ROUNDING = 1e-9
"""Relative error allowed to sums of damages, so that a tie is not lost to rounding."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to store a tensor: its packing (None: unpacked), the bytes it takes, and the damage it does, in any one unit."""

    packing: Packing | None
    nbytes: int
    damage: float


@dataclass(frozen=True, slots=True)
class _Step:
    """On the hull of one tensor, from one candidate to the next larger: what it costs and what it saves."""

    name: str
    to: Candidate
    nbytes: int
    saved: float

    @property
    def slope(self) -> float:
        """Damage saved by a byte."""
        return self.saved / self.nbytes


Chosen = dict[str, Candidate]


def smallest_bytes(candidates: Mapping[str, Sequence[Candidate]]) -> int:
    """Return the bytes of the smallest choice there is."""
    return sum(min(each.nbytes for each in options) for options in candidates.values())


def spend(candidates: Mapping[str, Sequence[Candidate]], budget_bytes: int) -> Chosen:
    """Return one candidate for every tensor: the least total damage that takes at most ``budget_bytes``.

    Where several are as good, one that takes no more bytes than the others. The same arguments give the same choice.
    Raises OptionError if nothing fits.
    """
    needed = smallest_bytes(candidates)
    if needed > budget_bytes:
        raise OptionError(
            f"{budget_bytes} bytes are too few: the smallest packing takes {needed}", "Allow more bits per weight."
        )
    useful = {name: _undominated(options) for name, options in candidates.items()}
    steps = sorted(_all_steps(useful), key=lambda step: -step.slope)
    greedy, price = _buy(useful, steps, budget_bytes)
    return _search(useful, budget_bytes, greedy, price) or greedy


def total_bytes(chosen: Mapping[str, Candidate]) -> int:
    """Return the bytes of a choice."""
    return sum(each.nbytes for each in chosen.values())


def total_damage(chosen: Mapping[str, Candidate]) -> float:
    """Return the damage of a choice."""
    return sum(each.damage for each in chosen.values())


def _undominated(options: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that no other beats in bytes and damage, smallest first: damages fall strictly."""
    kept: list[Candidate] = []
    for each in sorted(options, key=lambda option: (option.nbytes, option.damage)):
        if not kept or each.damage < kept[-1].damage:
            kept.append(each)
    return kept


def _all_steps(useful: Mapping[str, Sequence[Candidate]]) -> Iterator[_Step]:
    for name, options in useful.items():
        for small, large in pairwise(_hull(options)):
            yield _Step(name, large, large.nbytes - small.nbytes, small.damage - large.damage)


def _hull(options: Sequence[Candidate]) -> list[Candidate]:
    """Return the lower convex hull: each step saves less damage a byte than the one before."""
    hull: list[Candidate] = []
    for each in options:
        while len(hull) > 1 and _above(hull[-2], hull[-1], each):
            hull.pop()
        hull.append(each)
    return hull


def _above(left: Candidate, middle: Candidate, right: Candidate) -> bool:
    """Whether ``middle`` lies on or above the line between the others."""
    first = (left.damage - middle.damage) * (right.nbytes - middle.nbytes)
    second = (middle.damage - right.damage) * (middle.nbytes - left.nbytes)
    return first <= second


def _buy(useful: Mapping[str, Sequence[Candidate]], steps: Sequence[_Step], budget_bytes: int) -> tuple[Chosen, float]:
    """Return the greedy choice, and the price of a byte: the slope of the first step that did not fit (0: all did)."""
    chosen = {name: options[0] for name, options in useful.items()}
    left, price, stopped = budget_bytes - total_bytes(chosen), 0.0, set[str]()
    for step in steps:
        # A step starts where the one before it ended, so a tensor that missed one takes no later one.
        if step.name in stopped or step.nbytes > left:
            stopped.add(step.name)
            price = price or step.slope
            continue
        chosen[step.name] = step.to
        left -= step.nbytes
    return _fill(useful, chosen, left), price


def _fill(useful: Mapping[str, Sequence[Candidate]], chosen: Chosen, left: int) -> Chosen:
    """Spend what is left on the best single changes that fit, off the hull too, until none does."""
    filled = dict(chosen)
    while True:
        better = [
            (filled[name].damage - each.damage, name, each)
            for name, options in useful.items()
            for each in options
            if each.damage < filled[name].damage and each.nbytes - filled[name].nbytes <= left
        ]
        if not better:
            return filled
        _, name, best = max(better, key=lambda entry: entry[0])
        left -= best.nbytes - filled[name].nbytes
        filled[name] = best


@dataclass(frozen=True, slots=True)
class _Partial:
    """Candidates for the first few tensors: a linked list, newest first."""

    nbytes: int
    damage: float
    regret: float
    last: Candidate | None
    before: "_Partial | None"

    def picks(self) -> list[Candidate]:
        """Return the candidates in order."""
        found, node = list[Candidate](), self
        while node.before is not None and node.last is not None:
            found.append(node.last)
            node = node.before
        return found[::-1]


def _search(
    useful: Mapping[str, Sequence[Candidate]], budget_bytes: int, greedy: Chosen, price: float
) -> Chosen | None:
    """Return the best choice of all, or None where the search would grow past MAX_FRONTIER."""
    least = {name: min(each.damage + price * each.nbytes for each in options) for name, options in useful.items()}
    scale = sum(least.values())
    gap = total_damage(greedy) - (scale - price * budget_bytes) + ROUNDING * scale
    rest_bytes = sum(options[0].nbytes for options in useful.values())
    frontier = [_Partial(0, 0.0, 0.0, None, None)]
    for name, options in useful.items():
        rest_bytes -= options[0].nbytes
        grown = [
            _Partial(part.nbytes + each.nbytes, part.damage + each.damage, regret, each, part)
            for part in frontier
            for each in options
            if (regret := part.regret + each.damage + price * each.nbytes - least[name]) <= gap
            and part.nbytes + each.nbytes + rest_bytes <= budget_bytes
        ]
        frontier = _pareto(grown)
        if len(frontier) > MAX_FRONTIER:
            return None
    best = min(frontier, key=lambda part: (part.damage, part.nbytes))
    return dict(zip(useful, best.picks(), strict=True))


def _pareto(parts: Sequence[_Partial]) -> list[_Partial]:
    """Return the partial choices that no other beats in bytes and damage, smallest first."""
    kept: list[_Partial] = []
    for choice in sorted(parts, key=lambda choice: (choice.nbytes, choice.damage)):
        if not kept or choice.damage < kept[-1].damage:
            kept.append(choice)
    return kept


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
    trial = ErrorTrial(source, options, quantizer, ids or (), tell)
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


def _inputs(trial: ErrorTrial) -> "dict[str, np.ndarray]":
    def progress(done: int, total: int) -> None:
        trial.tell(StageDone("reading a text", done, total))

    return moments(Streamed(streamable_source(trial.source), progress=progress), [trial.ids])


def _errors(trial: ErrorTrial, among: Alternatives, inputs: "Mapping[str, np.ndarray]") -> Errors:
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
