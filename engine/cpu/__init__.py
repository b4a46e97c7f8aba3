"""CPU products where MLX has no GPU; removable once MLX's kernels are as fast."""

# Others import this module, which is light, and, where MLX computes on a CPU, layers.py and stepping.py, which load LLVM.

# MLX unpacks weights slowly on one thread; its reference BLAS is some 30 times slower than NumPy's. Packed
# weights use kernels (products.py) on own threads (pool.py), float32 ones NumPy (layers.py). What writes the kernels
# (kernels) loads numba, where their machine code (machine_code.py) isn't kept yet.

import math
import sys
from functools import cache
from hashlib import blake2b
from pathlib import Path

from ..events import RoundingCost
from ..files import read_bytes
from ..perf import hardware

PIECE = 64  # tokens of a prompt that are read at once: weights come from memory once for each piece

# Weights up to which a decode step is multiplied by MLX. Measured on two x86 cores, for one row: MLX 0.34 ns a weight,
# NumPy 0.1 ms + 0.08 ns. For rows of several sequences as well: eight replies of the guide at once made 105 tok/s
# together so, and 52 with NumPy, whose threads spin against MLX's.
LAZY_WEIGHTS = 1 << 20


def stays_lazy(weights: int) -> bool:
    return weights <= LAZY_WEIGHTS


@cache
def features() -> frozenset[str]:
    """Return this CPU's vector instructions, by LLVM's names."""
    from llvmlite import binding

    return frozenset(name for name, there in binding.get_host_cpu_features().items() if there)


def adds_products() -> bool:
    """Whether four products of bytes are added to a sum by one instruction."""
    return features() >= {"avx512f", "avx512bw", "avx512vl", "avx512vnni"}


def rounded_bits() -> tuple[int, ...]:
    """Return the widths of affine weights that are multiplied with rounded rows."""
    if adds_products():
        return (2, 3, 4, 5, 6, 8) if "avx512vbmi" in features() else (2, 4, 8)  # which spreads odd widths to bytes
    return (2, 4) if "avx2" in features() else ()  # which adds two products in 16 bits


# The measured quality cost of rounding a model's rows, kept per model. It selects how the model is computed, so its
# key is the weights and this CPU's widths, never the load.

RECIPE = 1  # counts how the two are measured: numbers of another recipe are measured again

FILE = "rounding.json"
MOST_CONFIG_BYTES = 64 << 20


def cost_key(folder: Path, weights: str) -> str:
    """Return the key of a model's cost; ``weights`` is their digest. Raises OSError."""
    text = blake2b(digest_size=16)
    for name in ("config.json", "tokenizer.json"):
        if (folder / name).is_file():
            data = read_bytes(folder / name, MOST_CONFIG_BYTES)
            text.update(f"{name} {len(data)} ".encode())
            text.update(data)
    return f"recipe {RECIPE} | {weights} | {text.hexdigest()} | {rounds_here()}"


def rounds_here() -> str:
    return " ".join(map(str, rounded_bits())) if sys.platform == "linux" else ""


def known_cost(key: str) -> RoundingCost | None:
    kept = hardware.load(hardware.store_file(FILE)).get(key)
    if not isinstance(kept, list) or len(kept) != 2 or any(type(value) not in (int, float) for value in kept):
        return None
    added, packing = map(float, kept)
    return RoundingCost(added, packing) if 0 <= added < math.inf and 0 <= packing < math.inf else None


def keep_cost(key: str, cost: RoundingCost) -> None:
    hardware.keep(hardware.store_file(FILE), {key: [cost.added, cost.packing]})


# Models whose own class was compared with what stands in for it, on this CPU by these sources, and was equal: that takes a
# third of a load.

COMPARED = "compared.json"
MOST_COMPARED = 64


def compared_key(cost_key: str, *others: object) -> str:
    """Return the key of a comparison; others: what else a model is loaded with."""
    from importlib import metadata

    from .machine_code import code_version, digest_of

    code = code_version() + digest_of(Path(__file__).parent.parent / "kv").hex()
    named = " ".join(map(repr, (cost_key, code, *others, *(metadata.version(each) for each in ("mlx", "mlx-lm")))))
    return blake2b(named.encode(), digest_size=16).hexdigest()


def was_equal(key: str) -> bool:
    return key in hardware.load(hardware.store_file(COMPARED))


def keep_equal(key: str) -> None:
    file = hardware.store_file(COMPARED)
    hardware.write(file, dict([*hardware.load(file).items(), (key, True)][-MOST_COMPARED:]))
