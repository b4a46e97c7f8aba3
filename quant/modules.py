"""What is done to trees of MLX modules: walked, copied with every array shared, and one instance made to answer a method otherwise.

mlx-lm's models look into their layers (``layer.is_sliding``, ``layers[i].self_attn``): a wrapper around a layer would break them.
"""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from tokamac.engine.errors import ConversionError

Method = Callable[..., Any]

AGAIN = "Download the model again, or ask its author."
"""What to do where the source itself is not finite: no option of a conversion helps."""


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
        return lambda self, *args, **kwargs: self._overrides[name](self, *args, **kwargs)

    return cast(type[nn.Module], type(kind.__name__, (kind,), {name: method(name) for name in names}))


def not_finite(name: str, hint: str = AGAIN) -> ConversionError:
    """Return the error to raise for a tensor that holds NaN or infinities."""
    return ConversionError(f"{name} holds values that are not finite numbers", hint)


def check_finite(name: str, *arrays: mx.array, hint: str = AGAIN) -> None:
    """Raise ConversionError, naming the tensor, unless all values of the arrays are finite numbers. Evaluates them."""
    if not all(bool(mx.all(mx.isfinite(array)).item()) for array in arrays):
        raise not_finite(name, hint)
