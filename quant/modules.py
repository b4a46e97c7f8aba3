"""What is done to MLX modules: walked, copied with every array shared, and one instance made to answer a method otherwise.

mlx-lm's models look into their layers (``layer.is_sliding``, ``layers[i].self_attn``): a wrapper around a layer would break them.

Refusing what is no finite number, by the name of the tensor that holds it.

Weights that a checkpoint has packed already: how, and what they look like unpacked. Lazy throughout.
"""

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from tokamac.engine.errors import ConversionError
from tokamac.engine.model.loader import DTYPES
from tokamac.engine.perf.config_cost import Packing
from tokamac.engine.perf.cost import text_config
from tokamac.quant.report import WeightError

Method = Callable[..., Any]


def leaves(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the modules that hold no others, with their paths."""
    found: list[tuple[str, Any]] = tree_flatten(module.leaf_modules(), is_leaf=nn.Module.is_module)
    return found


def layer_paths(module: Any) -> list[str]:
    """Return the paths of a model's layers (transformer blocks), in the order in which they run."""
    paths = {id(part): path for path, part in module.named_modules()}
    return [paths[id(layer)] for layer in module.layers]


def clone(module: nn.Module) -> Any:
    """Return a copy of a tree of modules; arrays are shared. A module that stands at two places stays one."""
    return _copied(module, {})


def override(module: nn.Module, **methods: Method) -> None:
    """Let this one instance answer ``methods`` by these functions, which are given the module first.

    It stays an instance of its class, with all its attributes. Nothing refers back to it: a cycle would keep its weights
    alive until the garbage collector comes by.
    """
    kind: Any = type(module)
    object.__setattr__(module, "_overrides", methods)  # past nn.Module's own, which would take a dict for submodules
    module.__class__ = _overridden(kind, tuple(sorted(methods)))


@cache
def _overridden(kind: Any, names: tuple[str, ...]) -> type[nn.Module]:
    def method(name: str) -> Method:
        def answer(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self._overrides[name](self, *args, **kwargs)

        return answer

    return cast(type[nn.Module], type(kind.__name__, (kind,), {name: method(name) for name in names}))


def _copied(value: Any, done: dict[int, Any]) -> Any:
    if isinstance(value, nn.Module):
        if id(value) not in done:
            done[id(value)] = made = copy.copy(value)
            for name, entry in value.items():
                made[name] = _copied(entry, done)
        return done[id(value)]
    if isinstance(value, dict):
        return {name: _copied(entry, done) for name, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(entry, done) for entry in value)
    return value


AGAIN = "Download the model again, or ask its author."
"""What to do where the source itself holds such values: no option of a conversion helps."""


def not_finite(name: str, hint: str = AGAIN) -> ConversionError:
    """Return the error to raise for a tensor that holds NaN or infinities."""
    return ConversionError(f"{name} holds values that are not finite numbers", hint)


def check_finite(name: str, *arrays: mx.array, hint: str = AGAIN) -> None:
    """Raise ConversionError, naming the tensor, unless all values of the arrays are finite numbers. Evaluates them."""
    if not all(bool(mx.all(mx.isfinite(array)).item()) for array in arrays):
        raise not_finite(name, hint)


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
