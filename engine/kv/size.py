"""Bytes of keys and values, as pure arithmetic: no MLX here, so a plan can be made from a config alone.

Affine groups (https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html): ``group`` neighbouring
values of one head of one token share a scale and a bias of ``scale_bytes`` each, beside ``bits`` per value.
"""

from tokamac.engine.options import GROUP_SIZES


def bytes_per_value(bits: int, group_size: int, value_bytes: int = 2) -> float:
    """Bytes that one key or value number takes. value_bytes: of the model's own type, which 16 bits mean, and of scale and bias."""
    if bits == 16:
        return float(value_bytes)
    return bits / 8 + 2 * value_bytes / group_size


def token_bytes(heads: int, dim: int, bits: int, group_size: int, scale_bytes: int) -> int:
    """Bytes that the keys (or the values) of one token take in one layer: exact, since groups divide ``dim``."""
    return round(heads * dim * bytes_per_value(bits, group_size, scale_bytes))


def group_for(dim: int, wanted: int) -> int | None:
    """Return the largest group size up to ``wanted`` that divides the head dimension, or None where none does."""
    return max((size for size in GROUP_SIZES if size <= wanted and dim % size == 0), default=None)
