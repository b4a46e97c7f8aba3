"""How much a model's words suffer from a relative squared error of one tensor: its α, found in one of three ways.

measured: a text is read with that tensor alone packed coarsely (replay.py); needs the model in memory, in float32.
guessed: the share of what leaves a layer that the layer itself has added, times what is usual for the kind of tensor.
by kind: what is usual for the kind of tensor, alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import mlx.core as mx

from tokamac.engine.device import device_kind
from tokamac.engine.limits.config_cost import Packing
from tokamac.quant.choices import packable, part
from tokamac.quant.damage import coarse
from tokamac.quant.method import Quantizer
from tokamac.quant.options import Options
from tokamac.quant.replay import Replay, fits, layer_numbers
from tokamac.quant.report import StageDone
from tokamac.quant.source import Source
from tokamac.quant.streamed import Streamed, streamable_source

How = Literal["measured", "guessed", "by kind"]
Errors = dict[str, dict[Packing | None, float]]
"""By module path and packing, the relative squared error."""

REFERENCE_BITS = (2, 4)
"""Where α is taken. It is no constant: codes of least squared error shrink a weight, the more the coarser they are, and errors that
all point one way do more damage than noise of the same size. Between and beyond these two it follows from them."""

REFERENCE_GROUP = 64

TOKENS = 256
"""Read for each tensor. Both readings say the same words, so little text is needed: on the model that ships, 128 tokens led to as
good a choice as 512."""

FLOOR = 0.1
"""Of the median α: the least that is believed of a tensor. A short text may not use some weights at all."""

TINY = 1e-12
"""α where nothing does any damage: so small that only sizes count, and a logarithm can still be taken."""

MOST_PRODUCTS = {"cpu": 1e14}
GPU_PRODUCTS = 1e16
"""Multiplications that measuring may take: about half an hour of two CPU cores, or of a large GPU."""

KINDS = (("v_proj", 4.0), ("o_proj", 4.0), ("out_proj", 4.0), ("down_proj", 2.0), ("fc2", 2.0))
"""By the end of a name, what packing a tensor costs beside others of its layer, which count 1: values and what leaves attention and
the feed-forward part most, as in mlx-lm's and llama.cpp's mixed recipes."""

HEAD = 8.0
"""The same for the output head, tied to the embedding or not, beside a layer that changes everything."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What is measured on: a model, what it shall become, the method that will pack it, and tokens of a text (none: there is none).

    tell: is called as the work goes on.
    """

    source: Source
    options: Options
    quantizer: Quantizer
    ids: Sequence[int]
    tell: Callable[[StageDone], None]


@dataclass(frozen=True, slots=True)
class Alpha:
    """Nats a token for a relative squared error of 1, by the bits at which it was taken, fewest first."""

    taken: tuple[tuple[int, float], ...]

    def at(self, bits: int | None) -> float:
        """Return α at ``bits``: between two that were taken by a straight line in log α; beyond them, the nearest."""
        (few, first), (many, last) = self.taken[0], self.taken[-1]
        if bits is None or bits >= many:
            return last
        if bits <= few:
            return first
        share = (bits - few) / (many - few)
        return math.exp((1 - share) * math.log(first) + share * math.log(last))

    def at_least(self, floor: float) -> "Alpha":
        """Return the same, with no value below ``floor``."""
        return Alpha(tuple((bits, max(value, floor)) for bits, value in self.taken))


def packed_type(source: Source, options: Options, path: str) -> mx.Dtype:
    """Return the type of a weight when it is packed: the one asked for, else its own."""
    own = source.weights[f"{path}.weight"].dtype
    return own if options.dtype is None else getattr(mx, options.dtype)


def way(source: Source, ids: Sequence[int]) -> How:
    """Return how α can be found: measured where the model fits the memory and the work is bearable."""
    if not ids:
        return "by kind"
    tokens, weights = min(len(ids), TOKENS), sum(array.size for array in source.weights.values())
    products = tokens * weights * len(REFERENCE_BITS) * sum(1 for _ in packable(source)) / 2
    bearable = products <= MOST_PRODUCTS.get(device_kind(), GPU_PRODUCTS)
    return "measured" if bearable and fits(source, tokens) else "guessed"


def find_alphas(how: How, trial: Trial, errors: Errors) -> dict[str, Alpha]:
    """Return α of every tensor in ``errors``. Raises ConversionError for weights that are not finite."""
    if how == "measured":
        return _measured(trial, errors)
    source, shares = trial.source, _shares(trial) if how == "guessed" else {}
    tied, layers = all(part(source, path) != "head" for path in errors), layer_numbers(source.module)
    return {
        path: Alpha(((0, _usual(source, path, tied=tied) * shares.get(layers.get(id(module)), 1.0)),))
        for path, module in packable(source)
    }


def references(packings: Sequence[Packing | None]) -> tuple[Packing, ...]:
    """Return the packings at which α is taken, fewest bits first: as near as there are to REFERENCE_BITS and REFERENCE_GROUP."""
    among = [packing for packing in packings if packing is not None and packing.mode == "affine"]

    def distance(packing: Packing, bits: int) -> tuple[int, int]:
        assert packing.bits is not None
        return abs(packing.bits - bits), abs(packing.group_size - REFERENCE_GROUP)

    nearest = (min(among, key=lambda packing: distance(packing, bits)) for bits in REFERENCE_BITS) if among else ()
    return tuple(dict.fromkeys(nearest))


def _measured(trial: Trial, errors: Errors) -> dict[str, Alpha]:
    replay, found = Replay(trial.source, trial.ids[:TOKENS]), dict[str, Alpha]()
    for done, (path, by_packing) in enumerate(errors.items(), start=1):
        taken = tuple(
            (packing.bits, _divergence(replay, trial, path, packing) / (by_packing[packing] or math.inf))
            for packing in references(tuple(by_packing))
            if packing.bits is not None
        )
        found[path] = Alpha(taken or ((0, 0.0),))
        mx.clear_cache()  # each tensor has another size: the pool would hold them all
        trial.tell(StageDone("measuring sensitivity", done, len(errors)))
    floor = max(FLOOR * median([alpha.taken[-1][1] for alpha in found.values()]), TINY)
    return {path: alpha.at_least(floor) for path, alpha in found.items()}


def _divergence(replay: Replay, trial: Trial, path: str, packing: Packing) -> float:
    # Packed from the type it will be packed from: a scale's rounding may send a token to another expert.
    weight = replay.weight(path).astype(packed_type(trial.source, trial.options, path))
    return replay.divergence(path, coarse(path, weight, packing, trial.quantizer))


def _shares(trial: Trial) -> dict[int | None, float]:
    """Return, by layer, the squared size of what it adds to what runs through it, relative to what leaves it."""
    before, found = mx.zeros(()), dict[int | None, float]()

    def watch(number: int, output: mx.array) -> None:
        nonlocal before
        after = output.astype(mx.float32)
        found[number] = _square(after - before) / (_square(after) or 1.0)
        before = after

    def progress(done: int, total: int) -> None:
        trial.tell(StageDone("measuring sensitivity", done, total))

    Streamed(streamable_source(trial.source), progress=progress).run(trial.ids, watch=watch)
    return found


def _square(values: mx.array) -> float:
    found: Any = mx.sum(mx.square(values)).item()
    return float(found)


def _usual(source: Source, path: str, *, tied: bool) -> float:
    """Return what packing a tensor costs beside others, by its kind. tied: the embedding is the output head."""
    place = part(source, path)
    if place == "head" or (place == "embedding" and tied):
        return HEAD
    return next((value for ending, value in KINDS if path.endswith(ending)), 1.0)
