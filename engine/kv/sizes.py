"""How large caches of keys and values are: arithmetic without MLX, for the caches and for what predicts them from a config alone.

Affine groups (https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html) take ``bits`` per value, and
a scale and a bias for each ``group_size`` neighbouring values of one head of one token.
"""

from ..options import GROUP_SIZES

ROTATED_KEY_BITS = 4
"""Keys of this many bits or fewer are rotated unless the caller says otherwise."""
STEP = 256
"""Slots are made in multiples of this many tokens."""
SHORT_STEP = 32
"""Behind a shared prefix: several replies each hold a tail of their own, and to copy it while it is short costs next to nothing."""
GROWTH = 16
"""A full store grows by a sixteenth, so an append copies 16 tokens on average at any depth, for at most 6 % of spare room."""


def bytes_per_value(bits: int, group_size: int, value_bytes: int = 2) -> float:
    """Return the bytes that one key or value number takes.

    value_bytes: of the model's own type, which 16 bits stand for, and of scales and biases.
    """
    return float(value_bytes) if bits == 16 else bits / 8 + 2 * value_bytes / group_size


def token_bytes(heads: int, dim: int, bits: int, group_size: int, scale_bytes: int) -> int:
    """Return the bytes of the keys (or the values) of one token in one layer: exact, since groups divide ``dim``."""
    return round(heads * dim * bytes_per_value(bits, group_size, scale_bytes))


def group_for(dim: int, wanted: int) -> int | None:
    """Return the largest group size up to ``wanted`` that divides the head dimension, or None where none does."""
    return max((size for size in GROUP_SIZES if size <= wanted and dim % size == 0), default=None)


def rounded(slots: int, step: int = STEP) -> int:
    """Return the slots made for ``slots`` tokens at once."""
    return -(-slots // step) * step


def grown(slots: int, stop: int, step: int = STEP) -> int:
    """Return the slots of caches that had ``slots``, once ``stop`` tokens are held."""
    return slots if stop <= slots else rounded(max(stop, slots + slots // GROWTH), step)
