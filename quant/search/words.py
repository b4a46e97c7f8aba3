"""MLX's layout of packed codes: one after another from the lowest bit on, whatever the bits, cut in words of 32."""

import mlx.core as mx


def pack_codes(codes: mx.array, bits: int) -> mx.array:
    """Return (groups, size · bits / 32) uint32. codes: (groups, size), whole numbers of any type."""
    single = codes.astype(mx.uint32)[..., None] >> mx.arange(bits, dtype=mx.uint32) & 1
    words = single.reshape(codes.shape[0], -1, 32) << mx.arange(32, dtype=mx.uint32)
    return words.sum(axis=-1).astype(mx.uint32)
