"""What rounding a model's rows on a CPU costs, kept for each model: measured once (cpu/rounding.py), known wherever it is asked.

It decides how the model is computed, so it depends on the model's files and on the widths that a CPU can round for, and on nothing
else: not on the machine's load, and not on what was asked for.
"""

import math
import sys
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from ..files import read_bytes
from ..perf import measurement_store

MOST_SHARE = 0.1
"""What rounding may add, over what the packing costs."""

RECIPE = 1
"""Counts how the two are measured: numbers of another recipe are measured again."""

FILE = "rounding.json"
MOST_CONFIG_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class RoundingCost:
    """Nats a token: what rounding rows to whole numbers adds, and about what the packing of the weights costs."""

    added: float
    packing: float

    @property
    def is_small(self) -> bool:
        """Whether rows are rounded."""
        return self.added <= MOST_SHARE * self.packing

    def __str__(self) -> str:
        """Return it as people read it."""
        share = f"adds KL {self.added:.2g}, packing about {self.packing:.2g}"
        return f"rounded to 8 bits ({share})" if self.is_small else f"exact (rounding to 8 bits {share})"


def cost_key(folder: Path, weights: str) -> str:
    """Return what a model's cost is kept as. weights: the digest of its weights. Raises OSError."""
    text = blake2b(digest_size=16)
    for name in ("config.json", "tokenizer.json"):
        if (folder / name).is_file():
            data = read_bytes(folder / name, MOST_CONFIG_BYTES)
            text.update(f"{name} {len(data)} ".encode())
            text.update(data)
    return f"recipe {RECIPE} | {weights} | {text.hexdigest()} | {rounds_here()}"


def rounds_here() -> str:
    """Return the widths of weights that this machine can round rows for, as text; "" where a GPU computes."""
    if sys.platform != "linux":
        return ""
    from .cpu.features import ROUNDED_BITS

    return " ".join(map(str, ROUNDED_BITS))


def known_cost(key: str) -> RoundingCost | None:
    """Return a model's cost as it was measured; None where it was not, or what is kept can't be right."""
    kept = measurement_store.load(measurement_store.store_file(FILE)).get(key)
    if not isinstance(kept, list) or len(kept) != 2 or any(type(value) not in (int, float) for value in kept):
        return None
    added, packing = map(float, kept)
    return RoundingCost(added, packing) if 0 <= added < math.inf and 0 <= packing < math.inf else None


def keep_cost(key: str, cost: RoundingCost) -> None:
    """Keep a model's cost."""
    measurement_store.keep(measurement_store.store_file(FILE), {key: [cost.added, cost.packing]})
