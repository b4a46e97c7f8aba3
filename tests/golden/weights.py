"""Weights that NumPy alone can make again: each tensor is a stream of its own, keyed by seed and name.

So a golden case stores names and shapes, a few hundred bytes, and neither PyTorch nor a binary blob is needed to rebuild it.
Scales are chosen so that activations stay near 1 and log-probabilities spread over several units: a wrong rotary base or a
missed multiplier then shows as a difference of order 1, not of order 1e-3.
"""

import hashlib
import json
import shutil
import struct
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Shapes = Mapping[str, tuple[int, ...]]
Tensor = np.ndarray[Any, np.dtype[Any]]


def tensor(seed: int, name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> Tensor:
    """Return the values of one parameter, float32 (int64 for a table of ids): the same for the same seed, name and shape."""
    stream = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
    config = config.get("text_config", config)
    if name.endswith("tid2eid"):  # experts by token id: different ones for each
        order = stream.permuted(np.tile(np.arange(config["n_routed_experts"]), (shape[0], 1)), axis=1)
        return order[:, : shape[1]].astype(np.int64)
    noise = stream.standard_normal(shape, dtype=np.float32)
    if name.endswith(("q_norm.weight", "k_norm.weight")) and config["model_type"] in (
        "gemma4_text",
        "gemma4_unified_text",
    ):
        # Its attention has no scale but these: at 1, scores of 60 would make float32 itself err by 3e-4.
        return np.float32(0.07) * noise + np.float32(0.35)
    if name.endswith(("put_min", "put_max")):  # bounds that some numbers pass
        return np.float32(-1.5 if name.endswith("min") else 1.5) + np.float32(0.1) * noise
    if "norm" in name and name.endswith("weight"):
        return np.float32(0.2) * noise + np.float32(1.0)
    if len(shape) < 2:  # biases, sinks and other vectors
        return np.float32(0.3) * noise
    if name.endswith(("embed_tokens.weight", "embed_in.weight")):
        # Behind a big embedding multiplier the layers would not be seen: Granite and Gemma have one.
        scaled = "gemma" in config["model_type"] or "embedding_multiplier" in config
        return np.float32(0.2 if scaled else 0.5) * noise
    head = 2.0 * float(config.get("logits_scaling") or 1.0) if name.startswith(("lm_head", "embed_out")) else 1.3
    return np.float32(head / shape[-1] ** 0.5) * noise


_KEPT = tempfile.TemporaryDirectory(prefix="tokamac-golden-")


def write_weights(folder: Path, seed: int, shapes: Shapes, config: Mapping[str, Any]) -> None:
    """Write ``model.safetensors`` with every parameter of ``shapes``, under its Hugging Face name.

    A process makes each once: many tests ask for the same.
    """
    asked = json.dumps([seed, shapes, config], sort_keys=True).encode()
    kept = Path(_KEPT.name) / hashlib.sha256(asked).hexdigest()
    if not kept.exists():
        _write(kept, {name: tensor(seed, name, tuple(shape), config) for name, shape in shapes.items()})
    shutil.copyfile(kept, folder / "model.safetensors")


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs: list[bytes] = []
    end = 0
    for name in sorted(tensors):
        blob = np.ascontiguousarray(tensors[name]).tobytes()
        kind = "I64" if tensors[name].dtype == np.int64 else "F32"
        header[name] = {"dtype": kind, "shape": list(tensors[name].shape), "data_offsets": [end, end + len(blob)]}
        blobs.append(blob)
        end += len(blob)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)))
        file.write(head)
        file.writelines(blobs)
