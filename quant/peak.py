"""The memory that a conversion takes at most, foreseen from shapes: what MLX holds at once in its most expensive moment.

Bytes a weight were measured on MLX's CPU backend, where each stage was run alone on one large tensor; a GPU takes no more.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

from tokamac.engine.limits.config_cost import Packing
from tokamac.engine.limits.cost import text_config
from tokamac.quant import awq, gptq, replay
from tokamac.quant.calibration import LENGTH
from tokamac.quant.choices import Choices
from tokamac.quant.importance import TOKENS as MEASURED
from tokamac.quant.method import BLOCK_WEIGHTS
from tokamac.quant.modules import layer_paths
from tokamac.quant.options import SEARCHED, Options
from tokamac.quant.search import blocks, implementation
from tokamac.quant.shards import type_bytes
from tokamac.quant.source import Source
from tokamac.quant.verify import TOKENS

if TYPE_CHECKING:
    from tokamac.quant.plan import TensorPlan

CALIBRATED: dict[str, ModuleType] = {"gptq": gptq, "awq": awq}
"""Methods that pack by what goes through the model; each module has ``check``, ``pack`` and ``peak_bytes``."""

SEQUENCES = 8
"""Of ``calibration.LENGTH`` tokens: what search looks at. Second moments of 4,000 tokens are known to a few per cent."""

ROUNDING = {"affine": 8, "mxfp4": 41, "nvfp4": 77, "mxfp8": 8}
"""Bytes a weight beside the weight itself, while a block is rounded."""

SEARCHING = 3
"""Bytes a weight beside the weight itself, while a tensor is searched by numba, which holds few arrays."""

UNPACKING = 18
"""Bytes a weight while a packed one is unpacked, at 3 bits; other bits take less."""

LAYER_WEIGHT = 12
"""Bytes a weight of the layer that is computed: in float32, as it is unpacked, and of the layer before it, not yet let go."""

PLACE_WORD = 16
"""Bytes for each word of the vocabulary at each place of a text: logits of two models, and what is computed of them."""


def peak_bytes(source: Source, options: Options, chosen: Choices, tensors: "tuple[TensorPlan, ...]") -> int:
    """Return an upper estimate, in bytes, of what MLX will hold at once."""
    return max(_stages(source, options, chosen, tensors))


def _stages(source: Source, options: Options, chosen: Choices, tensors: "tuple[TensorPlan, ...]") -> Iterator[int]:
    yield max(_of_tensor(tensor, source, options) for tensor in tensors)
    if options.how in CALIBRATED:
        yield CALIBRATED[options.how].peak_bytes(source, options, chosen)
    if options.target_bpw is not None and replay.fits(source, MEASURED):
        yield replay.peak_bytes(source, MEASURED)
    runs_text = options.target_bpw is not None or (options.how == "search" and options.calibration is not None)
    heads = text_config(source.config).get("num_attention_heads")
    known, paths = heads if isinstance(heads, int) else 1, frozenset(layer_paths(source.module))
    if runs_text:
        yield _of_run(paths, tensors, known, SEQUENCES, LENGTH, logits=False)
    if options.verify:
        yield _of_run(paths, tensors, known, 1, TOKENS, logits=True)


def _of_tensor(tensor: "TensorPlan", source: Source, options: Options) -> int:
    """Return the bytes for one tensor: as read and put together by mlx-lm, as cast, while it is packed, and packed."""
    packed_before = tensor.name.rpartition(".")[0] in source.packed
    read = UNPACKING * tensor.parameters if packed_before else 2 * tensor.source_bytes
    cast = tensor.parameters * type_bytes(tensor.dtype) if tensor.dtype != tensor.source_dtype else 0
    return read + cast + _packing(tensor.packing, tensor.parameters, options) + 2 * tensor.nbytes


def _packing(packing: Packing | None, weights: int, options: Options) -> int:
    if packing is None:
        return weights
    if options.how == "round" or packing.mode not in SEARCHED:
        return ROUNDING[packing.mode] * min(weights, BLOCK_WEIGHTS)
    if packing.mode != "affine":
        return blocks.SEARCHING_SCALES * min(weights, blocks.block_here(blocks.SEARCHING_SCALES))
    if implementation().name == "mlx":
        return blocks.SEARCHING * min(weights, blocks.block_here(blocks.SEARCHING))
    return SEARCHING * weights


def _of_run(
    paths: frozenset[str], tensors: "tuple[TensorPlan, ...]", heads: int, sequences: int, length: int, *, logits: bool
) -> int:
    """Return the bytes for sequences of so many tokens, run side by side with one layer's weights in memory.

    paths: of the layers. Attention's scores are counted as they are where no kernel fuses them.
    """
    layers: dict[str, int] = {}
    ends, widest, words = 0, 0, 0
    for tensor in tensors:
        layer = _layer(paths, tensor.name)
        if layer is not None:
            layers[layer] = layers.get(layer, 0) + tensor.parameters
            widest = max((widest, *tensor.shape[-2:]))
        else:
            ends += tensor.source_bytes + tensor.nbytes
            words = max(words, tensor.shape[0])
    tokens = sequences * length
    activations = 4 * 4 * tokens * widest + 2 * 4 * heads * tokens * length
    largest = LAYER_WEIGHT * max(layers.values(), default=0)
    return largest + 2 * ends + activations + (PLACE_WORD * tokens * words if logits else 0)


def _layer(paths: frozenset[str], name: str) -> str | None:
    """Return which of the layers a tensor is part of."""
    parts = name.split(".")
    return next((path for end in range(1, len(parts)) if (path := ".".join(parts[:end])) in paths), None)
