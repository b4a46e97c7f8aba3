"""How keys or values are stored: as they come, or as affine groups of a few bits along the head dimension.

Each token and head is encoded alone, so a token is encoded once, its slot does not matter, and any token can be dropped. Shapes:
B sequences, H key-value heads, R query heads per key-value head, N new tokens, T stored tokens, D head dimension.

Rotation: keys of few bits suffer from a few channels that are much larger than the rest. Multiplying queries and keys by an
orthonormal Hadamard matrix H spreads such outliers over all channels and keeps every product, since (Hq)·(Hk) = q·k
(QuaRot, https://arxiv.org/abs/2404.00456; llama.cpp rotates its quantized caches the same way). Attention may stay in the rotated
space: it then rotates the queries instead of the keys it reads, and the sum instead of the values.
"""

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ..device import device_kind
from ..errors import OptionError
from .sizes import token_bytes

Encoded = tuple[mx.array, ...]
"""What a codec makes of (B, H, N, D): arrays whose first three axes are (B, H, N)."""

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
LEAST_BLOCK = 16
"""A Hadamard block of fewer channels spreads an outlier over too few others to be of use."""


@dataclass(frozen=True, slots=True)
class Plain:
    """The model's own type, untouched.

    bits: per value, without scales; 16 stands for the model's own type. group_size: values that share a scale. block: channels
    rotated together. width: arrays that hold a token. packed: whether the fused attention kernel needs it decoded.
    """

    bits: ClassVar[int] = 16
    group_size: ClassVar[None] = None
    block: ClassVar[None] = None
    width: ClassVar[int] = 1
    packed: ClassVar[bool] = False

    def encode(self, x: mx.array) -> Encoded:
        """Encode x (B, H, N, D)."""
        return (x,)

    def decode(self, encoded: Encoded) -> mx.array:
        """Return (B, H, T, D), in the space and type of what was encoded."""
        return encoded[0]

    def unpack(self, encoded: Encoded) -> mx.array:
        """Return (B, H, T, D), still rotated where the codec rotates."""
        return encoded[0]

    def rotate(self, x: mx.array) -> mx.array:
        """Rotate x (..., D) as the codec does, or back: the two are the same."""
        return x

    def dot(self, queries: mx.array, encoded: Encoded) -> mx.array:
        """Multiply queries (B, H, M, D) by the keys: (B, H, M, T)."""
        return queries @ encoded[0].swapaxes(-1, -2)

    def mix(self, weights: mx.array, encoded: Encoded) -> mx.array:
        """Multiply weights (B, H, M, T) by the values: (B, H, M, D)."""
        return weights @ encoded[0]

    def token_bytes(self, heads: int, dim: int, scale_bytes: int) -> int:
        """Bytes of one token in one layer. scale_bytes: of a number in the model's own type."""
        return token_bytes(heads, dim, 16, 1, scale_bytes)


@dataclass(frozen=True, slots=True)
class Affine:
    """Affine groups: ``bits`` per value, a scale and a bias per ``group_size`` values.

    block: channels per Hadamard block, or None for no rotation; see ``rotation_block``.
    """

    bits: int
    group_size: int
    block: int | None = None
    width: ClassVar[int] = 3  # words, scales, biases
    packed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.bits not in AFFINE_BITS:
            raise OptionError(f"{self.bits} bits can't be packed in affine groups", f"Use one of {AFFINE_BITS}.")
        if self.group_size not in (32, 64, 128):
            raise OptionError(f"a KV group size of {self.group_size} is not supported", "Use 32, 64 or 128.")
        if self.block is not None and (self.block < LEAST_BLOCK or self.block & (self.block - 1)):
            raise OptionError(f"{self.block} channels can't be rotated", f"Use a power of two from {LEAST_BLOCK}.")

    def encode(self, x: mx.array) -> Encoded:
        """Pack x (B, H, N, D) into words (B, H, N, D·bits/32), scales and biases (B, H, N, D/group)."""
        packed, scales, biases = mx.quantize(self.rotate(x), group_size=self.group_size, bits=self.bits)
        return packed, scales, biases

    def decode(self, encoded: Encoded) -> mx.array:
        """Unpack to (B, H, T, D), rotated back if it was rotated."""
        return self.rotate(self.unpack(encoded))

    def unpack(self, encoded: Encoded) -> mx.array:
        """Unpack to (B, H, T, D), rotated if it was."""
        words, scales, biases = encoded
        return mx.dequantize(words, scales, biases, group_size=self.group_size, bits=self.bits)

    def rotate(self, x: mx.array) -> mx.array:
        """Rotate x (..., D) in blocks of channels; twice gives x again, since these matrices are symmetric."""
        if self.block is None:
            return x
        if self.block == x.shape[-1]:
            return mx.hadamard_transform(x)
        return mx.hadamard_transform(x.reshape(*x.shape[:-1], -1, self.block)).reshape(x.shape)

    def dot(self, queries: mx.array, encoded: Encoded) -> mx.array:
        """Multiply queries (B, H, M, D) by packed keys: (B, H, M, T)."""
        return self._times(self.rotate(queries), encoded, transpose=True)

    def mix(self, weights: mx.array, encoded: Encoded) -> mx.array:
        """Multiply weights (B, H, M, T) by packed values: (B, H, M, D).

        On Metal each row is multiplied alone, over the same words. MLX multiplies fewer than four rows there by ``qvm_split_k``,
        which divides T among threadgroups, and more by ``qmm_n``, where one threadgroup walks all of T for each head and each 32
        of the D columns (mlx/backend/metal/quantized.cpp, QuantizedMatmul::eval_gpu). Two or three rows together gain nothing:
        ``qvm_split_k`` gives every row threadgroups of its own. Words broadcast over the rows are not copied. On a CPU rows
        together are faster: 8 heads, 8 rows, D 128, T 4,000, 4 bits 4.5 ms against 6.6 (2-core x86). Not measured on Metal.
        """
        if device_kind() != "metal" or weights.shape[2] == 1:
            return self.rotate(self._times(weights, encoded, transpose=False))
        rows = mx.expand_dims(weights, 3)  # (B, H, M, 1, T)
        shared = tuple([mx.expand_dims(array, 2) for array in encoded])
        return self.rotate(self._times(rows, shared, transpose=False).squeeze(3))

    def token_bytes(self, heads: int, dim: int, scale_bytes: int) -> int:
        """Bytes of one token in one layer, scales and biases included."""
        return token_bytes(heads, dim, self.bits, self.group_size, scale_bytes)

    def _times(self, x: mx.array, encoded: Encoded, *, transpose: bool) -> mx.array:
        words, scales, biases = encoded
        return mx.quantized_matmul(
            x, words, scales, biases, transpose=transpose, group_size=self.group_size, bits=self.bits
        )


Codec = Plain | Affine


def rotation_block(dim: int) -> int | None:
    """Return the largest power of two that divides the head dimension, or None if it is too small to be of use.

    MLX also has Hadamard matrices of 12, 20 and 28 times a power of two, but those of 20 and 28 are not symmetric, so rotating
    back would need another product. Blocks do as well: a head dimension of 96 is rotated as three blocks of 32.
    """
    block = dim & -dim
    return block if block >= LEAST_BLOCK else None
