"""The model to convert: found, whole, of a known kind, and its weights under the names mlx-lm gives them. Nothing is read yet.

MLX arrays are lazy: what ``mx.load`` and a model's ``sanitize`` return is a recipe. Evaluating one tensor reads that tensor.

What mlx-lm makes of a model folder: its own loader reads it, whatever packed it; here it is taken apart again.

The loader fills a module with lazy arrays. They become float weights by name, packed ones seen through a lazy unpacking, and the
module an empty one that packs nothing. So whatever mlx-lm reads can be converted, exactly as mlx-lm reads it.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from tokamac.engine.errors import ConversionError, ModelDamagedError, ModelError, ModelUnsupportedError
from tokamac.engine.files import not_opened
from tokamac.engine.model.adapters import Adapter, Change, changes_of, fused, read_adapter
from tokamac.engine.model.config import LANGUAGE_PARTS, MODELOPT, check_config, model_classes, read_config
from tokamac.engine.model.loader import BUILD_ERRORS, doubts_about, load_lazily
from tokamac.engine.model.safetensors import check_places, find_shards
from tokamac.engine.model.skeleton import skeleton_model
from tokamac.engine.model.weights import without_fp8
from tokamac.engine.perf.cost import text_config
from tokamac.quant.modules import PACKED_LEAVES, Packed, float_type, is_packed, leaves, taken, unpacked
from tokamac.quant.provenance import adapter_name

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
    skeleton = skeleton_model(float_config(config), value_bytes=2, unchecked=unchecked)
    floats = dict(leaves(skeleton))
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


__all__ = ["Packed", "Source", "fresh", "locate", "open_adapter", "open_source"]


@dataclass(frozen=True, slots=True)
class Source:
    """A model before conversion.

    config: as if nothing were packed. module: mlx-lm's, unpacked; it never gets the weights, and only tells shapes and rules.
    weights: lazy arrays in the module's own order, what was packed seen unpacked; an entry is popped when it is converted.
    packed: by module path, what the source packed. notes: what a user should know about it.
    adapter: what is added to the weights; changes: by module path. unchecked: what the rule for configs doubts was let pass.
    """

    folder: Path
    config: dict[str, Any]
    module: nn.Module
    weights: dict[str, mx.array]
    packed: dict[str, Packed]
    source_bytes: int
    notes: tuple[str, ...] = ()
    adapter: Adapter | None = None
    changes: Mapping[str, Change] = field(default_factory=dict)
    unchecked: bool = False


def locate(source: str | Path) -> Path:
    """Return the folder of a model; a Hugging Face id is downloaded first, unless it is here already.

    To show the download, call ``tokamac.engine.hub.download.resolve`` with a progress of its own first, and convert the folder.
    """
    from tokamac.engine.hub.download import resolve

    return resolve(source)


def open_adapter(adapter: str | Path) -> Adapter:
    """Return an adapter by its folder or its Hugging Face id, downloaded first if need be. Raises ModelError, DownloadError."""
    from tokamac.engine.hub.download import resolve_adapter

    return read_adapter(resolve_adapter(adapter), str(adapter))


def open_source(folder: Path, *, adapter: Adapter | None = None, unchecked: bool = False) -> Source:
    """Return the model in ``folder``, checked without reading a weight.

    adapter: added to its weights, of which none that it changes counts as packed any more. unchecked: also a model of whose config
    something is doubted. It may be in floats, packed by MLX, or packed by anything that mlx-lm reads.
    Raises ModelError for what is missing, cut off, pickled or of an unknown kind; ConversionError for weights packed in a way that
    mlx-lm does not read.
    """
    config = read_config(folder)
    shards = find_shards(folder)
    check_places(folder, shards)
    read = read_checkpoint(folder, config, unchecked=unchecked)
    # Read anew where something is packed: if both shared arrays, unpacking one weight after the other would keep all their words.
    weights = read_checkpoint(folder, config, unchecked=unchecked).weights if read.packed else read.weights
    changes = {} if adapter is None else changes_of(adapter, read.module, config)
    doubts = doubts_about(config) if unchecked else ()
    notes = (
        *_notes(folder, config, read),
        *(() if adapter is None else (replace(adapter, name=adapter_name(adapter)).note(changes),)),
        *(f"unchecked: {doubt}; the converted model is as doubtful" for doubt in doubts),
    )
    return Source(
        folder=folder,
        config=_converted(config, read.module),
        module=read.module,
        weights=_changed(weights, changes),
        packed={path: held for path, held in read.packed.items() if path not in changes},
        source_bytes=sum(shard.stat().st_size for shard in shards),
        notes=notes,
        adapter=adapter,
        changes=changes,
        unchecked=unchecked,
    )


def fresh(source: Source) -> dict[str, mx.array]:
    """Return the weights of ``source`` anew, lazy floats by name: all of them, whatever was popped. Reads headers only."""
    read = read_checkpoint(source.folder, read_config(source.folder), unchecked=source.unchecked)
    return _changed(read.weights, source.changes)


def _changed(weights: dict[str, mx.array], changes: Mapping[str, Change]) -> dict[str, mx.array]:
    """Return weights with an adapter's changes in them; lazy, so one matrix at a time is computed."""
    changed = {f"{path}.weight": fused(weights[f"{path}.weight"], change) for path, change in changes.items()}
    return {name: changed.get(name, weight) for name, weight in weights.items()}


def _converted(config: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """Return the config without what only packed weights or a vision part need; mlx-lm keeps the latter for a module that sees."""
    sees = "vision_tower" in module.get("model", {})
    return {key: value for key, value in float_config(config).items() if sees or key != "vision_config"}


def _notes(folder: Path, config: dict[str, Any], read: Checkpoint) -> Iterator[str]:
    if (method := packer(folder, config)) not in (None, "bitnet") and not read.packed:
        yield f"the config says that the source was packed by {method}: converting the original loses less"
    if config.get("quantize_activations"):
        yield "the source also quantizes activations; the converted model does not"
