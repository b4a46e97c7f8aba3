"""What mlx-lm makes of a model folder: its own loader reads it, whatever packed it; here it is taken apart again.

The loader fills a module with lazy arrays. They become float weights by name, packed ones seen through a lazy unpacking, and the
module an empty one that packs nothing. So whatever mlx-lm reads can be converted, exactly as mlx-lm reads it.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from tokamac.engine.config import LANGUAGE_PARTS, MODELOPT, check_config, model_classes
from tokamac.engine.errors import ConversionError, ModelDamagedError, ModelError, ModelUnsupportedError
from tokamac.engine.limits.cost import text_config
from tokamac.engine.limits.hollow import hollow_model
from tokamac.engine.model import BUILD_ERRORS, load_lazily
from tokamac.engine.open_files import not_opened
from tokamac.engine.weights import without_fp8
from tokamac.quant.modules import leaves
from tokamac.quant.packed import PACKED_LEAVES, Packed, float_type, is_packed, taken, unpacked

READ_ERRORS = (*BUILD_ERRORS, NameError)
"""What mlx-lm's loader raises for a folder that it can't read; NameError where a config says AWQ and no weight is packed so."""

PACKING_KEYS = ("quantization", "quantization_config", "compression_config", "quantize_activations")
"""What a config says about packed weights. An unpacked model's config has none of it, nested or not."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder as mlx-lm reads it: an empty float module, float weights in its order, and by module path what was packed."""

    module: nn.Module
    weights: dict[str, mx.array]
    packed: dict[str, Packed]


def read_checkpoint(folder: Path, config: Mapping[str, Any], *, unchecked: bool = False) -> Checkpoint:
    """Return what ``folder`` holds, its config given normalised. Lazy: no weight is read.

    unchecked: also what the rule for configs doubts.

    Raises ModelError for what is damaged or of an unknown kind, ConversionError for weights packed in a way mlx-lm does not read.
    """
    module = _loaded(folder, config, unchecked=unchecked)
    hollow = hollow_model(float_config(config), value_bytes=2, unchecked=unchecked)
    floats = dict(leaves(hollow))
    # A class may be packed by nature (BitNet's): such layers stay what they are.
    held = {path: leaf for path, leaf in leaves(module) if is_packed(leaf) and not is_packed(floats[path])}
    packed = {path: words for path, leaf in held.items() if (words := taken(leaf)) is not None}
    found = dict(_float_weights(module, held, float_type(dict(config))))
    _empty(module, {path: floats[path] for path in held})
    weights = {name: found[name] for name, _ in tree_flatten(module.parameters())}
    return Checkpoint(module, weights, packed)


def float_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config that says nothing about packing, in its language part neither."""
    copy = {key: deepcopy(value) for key, value in config.items() if key not in PACKING_KEYS}
    return {key: float_config(value) if key in LANGUAGE_PARTS and value else value for key, value in copy.items()}


def packer(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the name of what packed the weights, where it is not MLX. Looked for where mlx-lm looks."""
    if own := config.get("quantization"):
        return _method(own, None)
    given = config.get("quantization_config") or text_config(config).get("quantization_config")
    if given:
        return _method(given, "an unnamed method")
    return "modelopt" if (folder / MODELOPT).is_file() else None


def _method(settings: Any, unnamed: str | None) -> str | None:
    named = isinstance(settings, dict) and "quant_method" in settings
    return str(settings["quant_method"]) if named else unnamed


def _loaded(folder: Path, config: Mapping[str, Any], *, unchecked: bool) -> nn.Module:
    """Return mlx-lm's module with the folder's weights, packed as they are."""
    own = deepcopy(dict(config))  # mlx-lm's classes write into what they are given
    classes = model_classes(own)
    if not unchecked:
        check_config(own, classes[1])
    try:
        return load_lazily(folder, without_fp8(own), classes)[0]
    except ModelError:
        raise
    except ImportError as error:
        raise ModelUnsupportedError(
            f"{folder} needs a package that is not installed: {error}", "Use another model."
        ) from error
    except READ_ERRORS as error:
        if (failure := not_opened(error, folder)) is not None:
            raise failure from error
        reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise _unreadable(folder, config, " ".join(reason.split())[:240]) from error


def _float_weights(module: nn.Module, packed: dict[str, Any], dtype: mx.Dtype) -> Iterator[tuple[str, mx.array]]:
    for name, array in tree_flatten(module.parameters()):
        path, _, leaf = name.rpartition(".")
        if path not in packed:
            yield name, array
        elif leaf == "weight":
            yield name, unpacked(packed[path], dtype)
        elif leaf not in PACKED_LEAVES:
            yield name, array


def _empty(module: nn.Module, floats: dict[str, nn.Module]) -> None:
    """Put ``floats``, by path, in place of packed layers, and zeros that take no memory in place of all weights."""
    module.update_modules(tree_unflatten(list(floats.items())))
    module.update(tree_map(lambda array: mx.broadcast_to(mx.zeros((), array.dtype), array.shape), module.parameters()))


def _unreadable(folder: Path, config: Mapping[str, Any], reason: str) -> ConversionError | ModelDamagedError:
    if method := packer(folder, config):
        return ConversionError(
            f"{folder} is packed by {method} in a way that mlx-lm does not read: {reason}",
            "Convert the original, unpacked model.",
        )
    return ModelDamagedError(
        f"{folder} does not hold a whole {config.get('model_type')} model: {reason}", "Download the model again."
    )
