"""The model to convert: found, whole, of a known kind, and its weights under the names mlx-lm gives them. Nothing is read yet.

MLX arrays are lazy: what ``mx.load`` and a model's ``sanitize`` return is a recipe. Evaluating one tensor reads that tensor.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn

from tokamac.engine.config import read_config
from tokamac.engine.shards import check_places, find_shards
from tokamac.quant.checkpoint import Checkpoint, float_config, packer, read_checkpoint
from tokamac.quant.packed import Packed

__all__ = ["Packed", "Source", "fresh", "locate", "open_source"]


@dataclass(frozen=True, slots=True)
class Source:
    """A model before conversion.

    config: as if nothing were packed. module: mlx-lm's, unpacked; it never gets the weights, and only tells shapes and rules.
    weights: lazy arrays in the module's own order, what was packed seen unpacked; an entry is popped when it is converted.
    packed: by module path, what the source packed. notes: what a user should know about it.
    """

    folder: Path
    config: dict[str, Any]
    module: nn.Module
    weights: dict[str, mx.array]
    packed: dict[str, Packed]
    source_bytes: int
    notes: tuple[str, ...] = ()


def locate(source: str | Path) -> Path:
    """Return the folder of a model; a Hugging Face id is downloaded first, unless it is here already.

    To show the download, call ``tokamac.engine.hub.resolve`` with a progress of its own first, and convert the folder.
    """
    from tokamac.engine.hub import resolve

    return resolve(source)


def open_source(folder: Path) -> Source:
    """Return the model in ``folder``, checked without reading a weight.

    It may be in floats, packed by MLX, or packed by anything that mlx-lm reads.
    Raises ModelError for what is missing, cut off, pickled or of an unknown kind; ConversionError for weights packed in a way that
    mlx-lm does not read.
    """
    config = read_config(folder)
    shards = find_shards(folder)
    check_places(folder, shards)
    read = read_checkpoint(folder, config)
    # Read anew where something is packed: if both shared arrays, unpacking one weight after the other would keep all their words.
    weights = read_checkpoint(folder, config).weights if read.packed else read.weights
    notes = tuple(_notes(folder, config, read))
    source_bytes = sum(shard.stat().st_size for shard in shards)
    return Source(folder, _converted(config, read.module), read.module, weights, read.packed, source_bytes, notes)


def fresh(source: Source) -> dict[str, mx.array]:
    """Return the weights of ``source`` anew, lazy floats by name: all of them, whatever was popped. Reads headers only."""
    return read_checkpoint(source.folder, read_config(source.folder)).weights


def _converted(config: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """Return the config without what only packed weights or a vision part need; mlx-lm keeps the latter for a module that sees."""
    sees = "vision_tower" in module.get("model", {})
    return {key: value for key, value in float_config(config).items() if sees or key != "vision_config"}


def _notes(folder: Path, config: dict[str, Any], read: Checkpoint) -> Iterator[str]:
    if (method := packer(folder, config)) not in (None, "bitnet") and not read.packed:
        yield f"the config says that the source was packed by {method}: converting the original loses less"
    if config.get("quantize_activations"):
        yield "the source also quantizes activations; the converted model does not"
