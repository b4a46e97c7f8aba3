"""Packed formats that the kernels multiply, and how rows that are rounded to int8 lie."""

from dataclasses import dataclass

from . import rounded_bits

LANES = 16  # weights unpacked at once. It divides every group that MLX knows.

AFFINE, FP4, FP8 = "affine", "fp4", "fp8"


@dataclass(frozen=True, slots=True)
class WeightFormat:
    bits: int
    kind: str = AFFINE

    @property
    def swaps(self) -> bool:
        """Whether x needs the order 0 8 1 9 … 7 15 in which 4-bit words unpack."""
        return self.bits == 4

    @property
    def block_bytes(self) -> int:
        return self.bits * LANES // 8


FLOAT32, BFLOAT16, FLOAT16, E8M0, E4M3 = range(5)  # how scales and biases are stored

FORMATS = (*(WeightFormat(bits) for bits in (2, 3, 4, 5, 6, 8)), WeightFormat(4, FP4), WeightFormat(8, FP8))


PLAIN = WeightFormat(32, "plain")  # numbers as they are. Not a way of packing, so it is not among FORMATS.

FORMS = (*FORMATS, PLAIN)
PLAIN_FORM = FORMS.index(PLAIN)

EXACT = -1  # in place of how scales are: rows of x are not rounded, and scales are float32

VECTOR = 64
TURN_BYTES = 2 * 4 * LANES  # of what a rounded row says of the groups of a turn


def can_round(format: WeightFormat) -> bool:
    return format.kind == AFFINE and format.bits in rounded_bits()


def vectors_of(format: WeightFormat) -> int:
    return 8 // format.bits if format.bits in (2, 4) else 1


def rounded_bytes(format: WeightFormat, columns: int, group_size: int) -> int:
    count = vectors_of(format)
    return -(-columns // (VECTOR * count)) * VECTOR * count + -(-columns // group_size // LANES) * TURN_BYTES
