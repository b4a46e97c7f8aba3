"""The safetensors files of a model folder, checked from their headers alone: nothing is loaded, no MLX is needed."""

import json
import operator
import struct
from pathlib import Path
from typing import Any

from tokamac.engine.errors import ModelDamagedError, ModelUnsupportedError

INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
HEADER_LIMIT = 100_000_000
"""Bytes; the format's own limit for a header."""


def find_shards(folder: Path) -> list[Path]:
    """Return the weight files of a model folder, each checked to be whole.

    Raises ModelDamagedError for a missing or truncated file, ModelUnsupportedError where there are only pickles.
    """
    shards = sorted(folder.glob("model*.safetensors"))
    listed = _listed(folder)
    for name in sorted(listed):
        if not (folder / name).is_file():
            raise ModelDamagedError(f"{folder / name} is missing, though {INDEX} names it", "Download the model again.")
    if not shards:
        if any(True for pattern in PICKLES for _ in folder.glob(pattern)):
            raise ModelUnsupportedError(
                f"{folder} has only pickled weights, which can run code when read",
                "Use a safetensors version of the model.",
            )
        raise ModelDamagedError(f"{folder} has no weights (model*.safetensors)", "Download or convert the model again.")
    for shard in shards:
        read_header(shard)
    return shards


def read_header(shard: Path) -> dict[str, Any]:
    """Return a safetensors header (tensor name → dtype, shape, data_offsets) after checking that the file is as long as it says.

    Raises ModelDamagedError when it is not.
    """
    size = shard.stat().st_size
    with shard.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else HEADER_LIMIT + 1
        if length > min(HEADER_LIMIT, size):
            raise _damaged(shard, "its header is cut off")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((_end(entry) for entry in tensors.values()), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise _damaged(shard, "its header is not readable") from error
    if 8 + length + end != size:
        raise _damaged(shard, f"it has {size:,} bytes instead of {8 + length + end:,}")
    return tensors


def _end(entry: dict[str, Any]) -> int:
    """Return where a tensor's bytes end; raises for an entry that is not one."""
    begin, end = (operator.index(offset) for offset in entry["data_offsets"])
    shape = [operator.index(size) for size in entry["shape"]]
    if not isinstance(entry["dtype"], str) or not 0 <= begin <= end or min(shape, default=0) < 0:
        raise ValueError
    return end


def _listed(folder: Path) -> set[str]:
    index = folder / INDEX
    if not index.is_file():
        return set()
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelDamagedError(f"{index} is not a readable index", "Download that file again.") from error
    if any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise ModelDamagedError(f"{index} names files outside the model's folder", "Don't use this model.")
    return names


def _damaged(shard: Path, what: str) -> ModelDamagedError:
    return ModelDamagedError(f"{shard} is damaged: {what}", "Download that file again.")
