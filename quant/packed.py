"""Weights that a checkpoint has packed already: how, and what they look like unpacked. Lazy throughout."""

from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
from mlx import nn

from tokamac.engine.limits.config_cost import Packing
from tokamac.engine.limits.cost import text_config
from tokamac.engine.model import DTYPES
from tokamac.quant.report import WeightError

PACKED_LEAVES = ("scales", "biases", "global_scale", "weight_scale")
"""What a packed module holds beside its words: gone when the weight is seen unpacked."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight that is packed already: how, and its arrays, lazy: words, scales and, of affine groups, biases.

    error: of what a calibrated method has packed, where it can be compared with the source; None of what the source itself holds.
    """

    packing: Packing
    arrays: tuple[mx.array, ...]
    error: WeightError | None = None


def is_packed(module: nn.Module) -> bool:
    """Whether a leaf module holds packed words: MLX's, with scales, or BitNet's, four ternary weights to a byte."""
    from mlx_lm.models.bitlinear_layers import BitLinear

    return "scales" in module or isinstance(module, BitLinear)


def taken(module: Any) -> Packed | None:
    """Return what a packed module holds, or None where ``mx.quantize`` has no packing like it.

    BitNet's bytes are another format. An nvfp4 stack whose experts have a scale of their own (``global_scale``) holds an array more
    than converted folders do.
    """
    if "scales" not in module or module.get("global_scale") is not None:
        return None
    arrays = (module["weight"], module["scales"], module.get("biases"))
    packing = Packing(module.bits, module.group_size, module.mode)
    return Packed(packing, tuple(array for array in arrays if array is not None))


def unpacked(module: Any, dtype: mx.Dtype) -> mx.array:
    """Return a packed module's weight, lazy: (…, out, in). ``dtype``: its type where the scales don't tell (microscaling)."""
    if "scales" not in module:
        return _ternary(module)
    scales = module["scales"]
    kind = scales.dtype if mx.issubdtype(scales.dtype, mx.floating) else dtype
    how = {**asdict(Packing(module.bits, module.group_size, module.mode)), "dtype": kind}
    shared = module.get("global_scale")
    if shared is None:
        return mx.dequantize(module["weight"], scales, module.get("biases"), **how)
    each = zip(module["weight"], scales, shared, strict=True)
    return mx.stack([mx.dequantize(words, groups, global_scale=whole, **how) for words, groups, whole in each])


def float_type(config: dict[str, Any]) -> mx.Dtype:
    """Return the type that a config says its unpacked weights have; bfloat16 where it says nothing."""
    text = text_config(config)
    return DTYPES.get(str(text.get("dtype") or text.get("torch_dtype")), mx.bfloat16)


def _ternary(module: Any) -> mx.array:
    """Return the weight of mlx-lm's BitLinear, as its kernel reads it.

    Two bits of byte (r, c), from bit 2i on, are 1 more than the weight of row r + i × rows, column c; all share one scale.
    """
    words, scale = module["weight"], module["weight_scale"]
    codes = mx.concatenate([(words >> (2 * i)) & 3 for i in range(4)])[: module.out_features]
    whole = scale.astype(mx.float32)
    found: mx.array = (codes.astype(mx.float32) - 1) * (1 / whole if module.invert_weight_scales else whole)
    return found.astype(scale.dtype)
