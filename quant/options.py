"""What a conversion may be asked for: frozen, checked when made. No MLX here: the command line uses this too."""

from dataclasses import dataclass

from tokamac.engine.errors import OptionError

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
DTYPES = ("float16", "bfloat16", "float32")
UNQUANTIZED = 16


@dataclass(frozen=True, slots=True)
class Options:
    """How weights are packed.

    bits, group_size: of affine groups along a weight's last axis; each group adds a scale and a bias of the weight's type.
    dtype: of what is not packed, scales and biases included; None keeps each tensor's own.
    embed_bits: for the embedding and the output head; 16 leaves them unpacked, None treats them like the rest.
    """

    bits: int = 4
    group_size: int = 64
    dtype: str | None = None
    embed_bits: int | None = None

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise OptionError(f"{self.bits} bits is not supported", f"Use one of {_list(BITS)}.")
        if self.group_size not in GROUP_SIZES:
            raise OptionError(f"group size {self.group_size} is not supported", f"Use one of {_list(GROUP_SIZES)}.")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise OptionError(f"dtype {self.dtype} is not supported", f"Use one of {_list(DTYPES)}.")
        if self.embed_bits is not None and self.embed_bits not in (*BITS, UNQUANTIZED):
            raise OptionError(
                f"{self.embed_bits} bits for the embedding is not supported",
                f"Use one of {_list((*BITS, UNQUANTIZED))}.",
            )


def _list(values: tuple[object, ...]) -> str:
    return ", ".join(str(value) for value in values)
