"""The model to convert: found, whole, of a known kind, and its weights under the names mlx-lm gives them. Nothing is read yet.

MLX arrays are lazy: what ``mx.load`` and a model's ``sanitize`` return is a recipe. Evaluating one tensor reads that tensor.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn

from tokamac.engine.adapters import Adapter, Change, changes_of, fused, read_adapter
from tokamac.engine.config import read_config
from tokamac.engine.model import doubts_about
from tokamac.engine.shards import check_places, find_shards
from tokamac.quant.checkpoint import Checkpoint, float_config, packer, read_checkpoint
from tokamac.quant.packed import Packed
from tokamac.quant.provenance import adapter_name

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

    To show the download, call ``tokamac.engine.hub.resolve`` with a progress of its own first, and convert the folder.
    """
    from tokamac.engine.hub import resolve

    return resolve(source)


def open_adapter(adapter: str | Path) -> Adapter:
    """Return an adapter by its folder or its Hugging Face id, downloaded first if need be. Raises ModelError, DownloadError."""
    from tokamac.engine.hub import resolve_adapter

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
