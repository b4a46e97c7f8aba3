"""The modules of a model that hold no others: those with the weights.

What MLX's ``leaf_modules`` finds, in one walk: that one looks through all that is below each module, again at every depth, which
was a quarter of the time in which a model is weighed.
"""

from typing import Any

ADDED = (".lora_a", ".lora_b", ".gain")
"""How the names of an adapter's arrays end (engine/adapted_layers.py)."""


def leaf_modules(model: Any) -> list[tuple[str, Any]]:
    """Return each module below ``model`` that has none below itself, with its path, in the model's order."""
    found: list[tuple[str, Any]] = []
    _collect(model, "", found)
    return found


def added_matrices(model: Any) -> list[tuple[str, Any]]:
    """Return the matrices of adapters (mlx_lm.tuner's ``lora_a`` and ``lora_b``) with their paths, in the model's order."""
    from mlx.utils import tree_flatten

    return [each for each in tree_flatten(model.parameters()) if each[0].rpartition(".")[2] in ("lora_a", "lora_b")]


def _collect(value: Any, path: str, found: list[tuple[str, Any]]) -> None:
    """Add what is below ``value``. No closure: one that calls itself is a cycle, and would hold a model's weights for long."""
    from mlx import nn

    before = len(found)
    pairs = value.items() if isinstance(value, dict) else enumerate(value)  # a module is a dict of what it holds
    for key, each in pairs:
        if isinstance(each, dict | list):
            _collect(each, f"{path}.{key}" if path else str(key), found)
    if path and len(found) == before and isinstance(value, nn.Module):
        found.append((path, value))
