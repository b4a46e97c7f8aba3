"""What the tests of GPTQ and AWQ share: seeded token ids, a source in floats, and what its layers are given."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_unflatten

from tests.quant.quant_models import make_source
from tokamac.quant.modules import clone
from tokamac.quant.source import Source, fresh, open_source
from tokamac.quant.streaming import Streamed, streamable_source

VOCABULARY = 320


def seeded_ids(sequences: int = 4, length: int = 48) -> list[list[int]]:
    """Return token ids in which some are much likelier than others, as in a text."""
    generator = np.random.default_rng(7)
    ids = np.minimum(generator.geometric(0.02, (sequences, length)), VOCABULARY - 1)
    return [[int(token) for token in row] for row in ids]


def source_of(folder: Path, kind: str, *, dtype: str = "bfloat16", **changes: Any) -> Source:
    made = make_source(folder, kind, **changes)
    file = str(made / "model.safetensors")
    arrays: Any = mx.load(file)
    mx.save_safetensors(file, {name: array.astype(getattr(mx, dtype)) for name, array in arrays.items()})
    return open_source(made)


def logits(source: Source, ids: list[list[int]], weights: dict[str, mx.array] | None = None) -> mx.array:
    """Return what the model says with these weights (the source's own if None), in float32."""
    model: Any = clone(source.module)
    found = fresh(source) if weights is None else weights
    floats = [(n, w.astype(mx.float32) if mx.issubdtype(w.dtype, mx.floating) else w) for n, w in found.items()]
    model.update(tree_unflatten(floats))
    answered: mx.array = model(mx.array(ids))
    return answered


def inputs_of(source: Source, ids: list[list[int]]) -> dict[str, np.ndarray]:
    """Return the rows that every linear layer is given, by path."""
    found: dict[str, np.ndarray] = {}
    Streamed(streamable_source(source)).observe(
        ids, lambda x: found.update({x.path: np.array(x.rows.astype(mx.float32))})
    )
    return found


def relative(found: mx.array, expected: mx.array) -> float:
    return float((mx.linalg.norm((found - expected).reshape(-1)) / mx.linalg.norm(expected.reshape(-1))).item())


def same_bytes(one: Source, other: Source) -> bool:
    """Whether two results hold the same arrays, bit by bit."""
    if one.packed.keys() != other.packed.keys() or one.weights.keys() != other.weights.keys():
        return False
    arrays = [
        (a, b) for path in one.packed for a, b in zip(one.packed[path].arrays, other.packed[path].arrays, strict=True)
    ]
    arrays += [(one.weights[name], other.weights[name]) for name in one.weights]
    return all(a.dtype == b.dtype and bool(mx.array_equal(a, b).item()) for a, b in arrays)
