"""The model to convert: found, whole, of a known kind, and its weights under the names mlx-lm gives them. Nothing is read yet.

MLX arrays are lazy: what ``mx.load`` and a model's ``sanitize`` return is a recipe. Evaluating one tensor reads that tensor.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from tokamac.engine.config import check_config, model_classes, read_config
from tokamac.engine.errors import (
    ConversionError,
    ModelDamagedError,
    ModelError,
    ModelUnsupportedError,
)
from tokamac.engine.model import BUILD_ERRORS
from tokamac.engine.shards import find_shards

AGAIN = "Download the model again."


@dataclass(frozen=True, slots=True)
class Source:
    """A model before conversion. ``weights``: lazy arrays in the module's own order; an entry is popped when it is converted."""

    folder: Path
    config: dict[str, Any]
    module: nn.Module
    weights: dict[str, mx.array]
    source_bytes: int


def locate(source: str | Path) -> Path:
    """Return the folder of a model; a Hugging Face id is downloaded first, unless it is here already.

    To show the download, call ``tokamac.engine.hub.resolve`` with a progress of its own first, and convert the folder.
    """
    from tokamac.engine.hub import resolve

    return resolve(source)


def open_source(folder: Path) -> Source:
    """Return the model in ``folder``, checked without reading a weight.

    Raises ModelError for what is missing, cut off, pickled or of an unknown kind; ConversionError for what is packed already.
    """
    config = read_config(folder)
    _refuse_packed(folder, config)
    shards = find_shards(folder)
    model_class, arguments_class = model_classes(config)
    check_config(config, arguments_class)
    try:
        module = model_class(arguments_class.from_dict(config))
        loaded: dict[str, mx.array] = {}
        for shard in shards:
            loaded.update(cast(dict[str, mx.array], mx.load(str(shard))))
        weights = module.sanitize(loaded) if "sanitize" in dir(module) else loaded
    except ModelError:
        raise
    except ImportError as error:
        raise ModelUnsupportedError(
            f"{folder} needs a package that is not installed: {error}", "Use another model."
        ) from error
    except BUILD_ERRORS as error:
        raise _unfit(folder, config, " ".join(str(error).split())[:240]) from error
    _check_names(folder, config, module, weights)
    ordered = {name: weights[name] for name, _ in tree_flatten(module.parameters())}
    return Source(folder, config, module, ordered, sum(shard.stat().st_size for shard in shards))


def _refuse_packed(folder: Path, config: dict[str, Any]) -> None:
    text = config.get("text_config")
    places = (config, text if isinstance(text, dict) else {})
    found = [place[key] for place in places for key in ("quantization", "quantization_config") if place.get(key)]
    if not found and not (folder / "hf_quant_config.json").is_file():
        return
    settings = found[0] if found and isinstance(found[0], dict) else {}
    what = settings.get("quant_method") or (f"{settings['bits']} bits" if "bits" in settings else "its config says so")
    raise ConversionError(
        f"{folder} is already quantized ({what})",
        "Convert the original model; this one can be used as it is if MLX reads it.",
    )


def _check_names(folder: Path, config: dict[str, Any], module: nn.Module, weights: dict[str, mx.array]) -> None:
    wanted = dict(tree_flatten(module.parameters()))
    if missing := [name for name in wanted if name not in weights]:
        raise _unfit(folder, config, f"{len(missing)} weights are missing, {missing[0]} first")
    if unknown := [name for name in weights if name not in wanted]:
        raise _unfit(folder, config, f"{len(unknown)} weights have no place in it, {unknown[0]} first")
    for name, array in wanted.items():
        if array.shape != weights[name].shape:
            raise _unfit(folder, config, f"{name} has the shape {weights[name].shape} instead of {array.shape}")


def _unfit(folder: Path, config: dict[str, Any], reason: str) -> ModelDamagedError:
    return ModelDamagedError(f"{folder} does not hold a whole {config.get('model_type')} model: {reason}", AGAIN)
