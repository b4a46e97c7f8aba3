"""Seeded adapters as files, in PEFT's form and in mlx-lm's, and the same changes worked out with NumPy."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors.numpy import load_file, save_file

Array = np.ndarray[Any, Any]
RANK, ALPHA = 4, 6.0
TARGETS = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """The model's weights by name, without ``.weight``."""
    arrays = mx.load(str(folder / "model.safetensors"))
    return {name.removesuffix(".weight"): tuple(array.shape) for name, array in arrays.items()}


def write_peft(
    folder: Path,
    model: Path,
    *,
    paths: tuple[str, ...] | None = None,
    seed: int = 0,
    rank: int = RANK,
    dora: bool = False,
    more: dict[str, Array] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter of these modules (TARGETS of every layer) as PEFT does; ``config`` changes its config."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes, random = shapes_of(model), np.random.default_rng(seed)
    tensors: dict[str, Array] = {}
    for path in paths or default_paths(shapes):
        rows, columns = shapes[path]
        down = random.standard_normal((rank, columns)).astype(np.float32) / 4
        up = random.standard_normal((rows, rank)).astype(np.float32) / 4
        stem = f"base_model.model.{path}"
        if path.endswith("embed_tokens"):
            tensors[f"{stem}.lora_embedding_A"], tensors[f"{stem}.lora_embedding_B"] = up.T.copy(), down.T.copy()
        else:
            tensors[f"{stem}.lora_A.weight"], tensors[f"{stem}.lora_B.weight"] = down, up
        if dora:
            tensors[f"{stem}.lora_magnitude_vector"] = 1 + random.random(rows, np.float32)
    save_file(tensors | (more or {}), folder / "adapter_model.safetensors")
    written = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": ALPHA,
        "use_dora": dora,
        "base_model_name_or_path": "org/base",
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return folder


def as_mlx(folder: Path, peft: Path) -> Path:
    """Write what ``write_peft`` wrote as mlx-lm would: the same changes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((peft / "adapter_config.json").read_text())
    kinds = {"lora_A.weight": "lora_a", "lora_B.weight": "lora_b", "lora_magnitude_vector": "m"}
    tensors = {}
    for name, array in load_file(peft / "adapter_model.safetensors").items():
        for theirs, ours in kinds.items():
            if name.endswith(theirs):
                stem = name.removeprefix("base_model.model.").removesuffix(theirs)
                tensors[stem + ours] = np.ascontiguousarray(array.T)
    save_file(tensors, folder / "adapters.safetensors")
    parameters = {"rank": config["r"], "scale": config["lora_alpha"] / config["r"], "dropout": 0.0}
    kind = "dora" if config["use_dora"] else "lora"
    written = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": parameters, "model": "org/base"}
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return folder


def default_paths(shapes: dict[str, tuple[int, ...]]) -> tuple[str, ...]:
    return tuple(name for name in shapes if name.endswith(TARGETS))


def write_fused(folder: Path, model: Path, peft: Path, scales: dict[str, float] | None = None) -> Path:
    """Write the model with an adapter's changes in its weights, worked out here with NumPy from the papers' formulas.

    scales: by the end of a path, where it is not alpha ÷ r.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    weights = {
        name: np.array(array.astype(mx.float32)) for name, array in mx.load(str(model / "model.safetensors")).items()
    }
    tensors = load_file(peft / "adapter_model.safetensors")
    for name in tensors:
        for kind, other in (("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B")):
            if not name.endswith(kind):
                continue
            path = name.removeprefix("base_model.model.").removesuffix(f".{kind}")
            scale = next((value for end, value in (scales or {}).items() if path.endswith(end)), ALPHA / RANK)
            change = tensors[name.replace(kind, other)] @ tensors[name]
            changed = weights[f"{path}.weight"] + scale * (change.T if "embedding" in kind else change)
            magnitude = tensors.get(name.replace(kind, "lora_magnitude_vector"))
            if magnitude is not None:
                changed = changed * (magnitude / np.linalg.norm(changed, axis=1))[:, None]
            weights[f"{path}.weight"] = changed.astype(np.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "mlx"})
    return folder
