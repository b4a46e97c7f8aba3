"""How a weight becomes packed words: Round and Search take one weight at a time; gptq.py and awq.py look at what goes through it.

What the latter two share is here as well: what they can't do, how mlx-lm's code is run, and the way back into a Source. mlx-lm runs
a whole model with all its weights in memory; here its code gets one layer or block at a time, so that a model is calibrated in
little more memory than it is converted in.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx

from tokamac.engine.device import device_kind
from tokamac.engine.errors import ConversionError, OptionError, TokamacError
from tokamac.engine.perf.config_cost import Packing
from tokamac.engine.perf.cost import text_config

from ..calibration import LENGTH
from ..modules import check_finite
from ..options import SEARCHED, Options
from ..source import Packed, Source

if TYPE_CHECKING:
    import numpy as np

BLOCK_WEIGHTS = 1 << 22
"""Weights that are rounded at once, by all cores: MLX takes up to 77 bytes a weight on a CPU, so this bounds that to 0.3 GB."""

FLOAT_BYTES = 4
"""Of a value while a calibrated method works: float32. GPTQ sums squares over all tokens, which half precision can't hold, and
MLX's CPU backend runs half precision slowly."""

OTHERWISE = "Use --method search."
"""The way out where a calibrated method fails on what another one can pack."""

FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError)
"""What mlx-lm's code raises for a model that it did not expect."""


class Quantizer(Protocol):
    """Packs one weight at a time."""

    def pack(self, path: str, weight: mx.array, packing: Packing) -> tuple[mx.array, ...]:
        """Return words, scales and, of affine groups, biases, in the layout, shapes and types of ``mx.quantize``.

        path: of the module. weight: (…, in), floating; scales and biases have its type.
        """
        ...


class Round:
    """MLX's own: each value goes to the nearest step between a group's two ends."""

    def pack(self, path: str, weight: mx.array, packing: Packing) -> tuple[mx.array, ...]:  # noqa: ARG002
        """See Quantizer."""
        rows, lanes = weight.reshape(-1, weight.shape[-1]), _lanes()
        step = max(1, BLOCK_WEIGHTS // len(lanes) // rows.shape[1])
        # MLX on a CPU packs 32 values at a time: in groups of 16, an odd number of narrow rows would end within such a pack.
        # Where all rows together are odd, the last block is too, as the whole would be.
        step += step % 2
        if rows.shape[0] <= step:
            return tuple(mx.quantize(weight, **asdict(packing)))
        whole: list[mx.array] = []
        for begin in range(0, rows.shape[0], step * len(lanes)):
            for at, lane in zip(range(begin, rows.shape[0], step), lanes, strict=False):
                block = mx.quantize(rows[at : at + step], **asdict(packing), stream=lane)
                whole = whole or [mx.zeros((rows.shape[0], part.shape[1]), part.dtype) for part in block]
                for into, part in zip(whole, block, strict=True):
                    # In place, as nothing else holds it: joining blocks would hold all twice.
                    into[at : at + step] = part
            mx.eval(*whole)
        return tuple(part.reshape(*weight.shape[:-1], part.shape[-1]) for part in whole)


@cache
def _lanes() -> "tuple[mx.ThreadLocalStream | mx.Stream, ...]":
    """Return the streams to share the work among: on a CPU one for each core, as MLX rounds with one core of a stream."""
    device = mx.default_device()
    if device_kind() != "cpu":
        return (mx.default_stream(device),)
    return tuple(mx.new_thread_local_stream(device) for _ in range(os.cpu_count() or 1))


@dataclass(frozen=True, slots=True)
class Search:
    """For every group the scale, and of affine ones the bias, of least squared error; what has no gain in it is rounded.

    importance: by module path, the mean squared input of each channel over a text; errors weigh by it where it is known.
    """

    importance: "Mapping[str, np.ndarray]" = field(default_factory=dict)

    def pack(self, path: str, weight: mx.array, packing: Packing) -> tuple[mx.array, ...]:
        """See Quantizer."""
        from ..search import search
        from ..search.on_mlx import search_scales

        if packing.mode not in SEARCHED:
            return Round().pack(path, weight, packing)
        find = search if packing.mode == "affine" else search_scales
        return find(weight, packing, self.importance.get(path))


def dequantized(arrays: Sequence[mx.array], packing: Packing) -> mx.array:
    """Return what packed ``arrays`` (words, scales and, of affine groups, biases) are worth; lazy."""
    words, scales, *biases = arrays
    made: mx.array = mx.dequantize(words, scales, biases[0] if biases else None, **asdict(packing))
    return made


def check_plain(method: str, options: Options) -> None:
    """Raise OptionError where ``options`` ask for what neither calibrated method can do."""
    if options.mode != "affine":
        raise OptionError(f"{method} packs affine groups, not {options.mode}", "Use --method round, or --mode affine.")
    if options.recipe is not None or options.target_bpw is not None:
        planned = "a recipe" if options.recipe is not None else "a target for bits per weight"
        raise OptionError(f"{method} packs everything alike, and {planned} does not", OTHERWISE)


def uniform(options: Options) -> Packing:
    """Return the packing that a calibrated method gives to all it packs."""
    return Packing(options.packed_bits, options.group, "affine")


def attention_bytes(config: Mapping[str, Any], sequences: int) -> int:
    """Return the memory of attention's scores, before the softmax and after. A GPU's fused kernel holds none."""
    heads = int(text_config(config).get("num_attention_heads") or 0) if device_kind() == "cpu" else 0
    return FLOAT_BYTES * 2 * sequences * heads * LENGTH**2


def working(name: str, weight: mx.array) -> mx.array:
    """Return a weight in float32, evaluated. Raises ConversionError where it is not finite: the effect would spread."""
    cast = weight.astype(mx.float32)
    check_finite(name, cast)
    return cast


def packed_layer(layer: Any, path: str, packing: Packing, dtype: mx.Dtype) -> Packed:
    """Return what an MLX layer packed by a method holds, its scales and biases in ``dtype``. Raises ConversionError."""
    arrays = (layer.weight, layer.scales.astype(dtype), layer.biases.astype(dtype))
    check_finite(f"{path}.weight", *arrays[1:], hint=OTHERWISE)
    mx.eval(*arrays)
    return Packed(packing, arrays)


def with_packed(source: Source, packed: dict[str, Packed], changed: dict[str, mx.array]) -> Source:
    """Return ``source`` with what a method ``packed``, seen unpacked in ``weights``, and the parameters that it ``changed``."""
    seen = {f"{path}.weight": dequantized(each.arrays, each.packing) for path, each in packed.items()}
    return replace(source, weights={**source.weights, **seen, **changed}, packed={**source.packed, **packed})


@contextmanager
def running(method: str, module: ModuleType, **replaced: object) -> Iterator[None]:
    """Run mlx-lm's ``module`` with other things under some of its names; what fails in it is a ConversionError.

    They are put back at the end. A conversion is the only user of these modules in its process.
    """
    before = {name: module.__dict__[name] for name in replaced}
    module.__dict__.update(replaced)
    try:
        yield
    except TokamacError:  # ours, on the way through: an OptionError is a ValueError too
        raise
    except FAILURES as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConversionError(f"{method} fails on this model: {reason}", OTHERWISE) from error
    finally:
        module.__dict__.update(before)


class Silent:
    """Stands in for mlx-lm's tqdm: writes nothing to the terminal."""

    def __call__(self, items: Iterable[Any], **_: object) -> Iterable[Any]:
        """Return ``items``: no bar is drawn."""
        return items

    def write(self, message: str) -> None:
        """Drop what mlx-lm has to say of a block: a conversion measures its result itself."""
