"""Conversion options: frozen, checked when made. No MLX here, as the command line imports this."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokamac.engine.errors import OptionError
from tokamac.engine.options import real, whole

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
DTYPES = ("float16", "bfloat16", "float32")
UNQUANTIZED = 16

Method = Literal["round", "search", "gptq", "awq"]
METHODS: tuple[Method, ...] = ("round", "search", "gptq", "awq")

# Methods that pack by what goes through the model: they always look at a text, and pack all layers alike.
CALIBRATED: tuple[Method, ...] = ("gptq", "awq")

Shipped = Literal["shipped"]  # the calibration text that comes with Tokamac
SHIPPED: Shipped = "shipped"
NoText = Literal["none"]
NO_TEXT: NoText = "none"

# Modes whose bits and group size are part of the format: (bits, group size).
MICROSCALING = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}

# Modes in which search finds less error than rounding. The floats of mxfp8 reach so far that its scales hardly matter.
SEARCHED = ("affine", "mxfp4", "nvfp4")

MODES = ("affine", *MICROSCALING)

DEFAULT_BITS, DEFAULT_GROUP_SIZE = 4, 64


@dataclass(frozen=True, slots=True)
class Options:
    """How weights are packed.

    bits, group_size: of affine groups along the last axis; None: 4 and 64, or the mode's. method: None: search, where
    the mode has it. recipe: a rule of quant/packing.py. target_bpw: bits per weight of the whole model, scales
    included. target_kl: nats a token that packing may cost, as measured tensor by tensor. calibration: a text, "shipped"
    or "none"; None: shipped, where the method looks at a text. dtype: of unpacked tensors, scales and biases; None keeps
    each. embed_bits: of embedding and output head; 16 leaves them unpacked; None: up to 8, as far as quant/packing.py
    finds them worth their bytes. verify: compare with the source at the end. adapter: low-rank changes, merged before
    packing. unchecked: convert despite config doubts.
    keep_vision: False leaves out what sees or hears; None keeps it where there is any. vision_bits: of its linear layers,
    in affine groups; None: as the source.
    """

    bits: int | None = None
    group_size: int | None = None
    mode: str = "affine"
    method: Method | None = None
    recipe: str | None = None
    target_bpw: float | None = None
    target_kl: float | None = None
    calibration: Path | Shipped | NoText | None = None
    dtype: str | None = None
    embed_bits: int | None = None
    dequantize: bool = False
    verify: bool = True
    adapter: str | Path | None = None
    unchecked: bool = False
    keep_vision: bool | None = None
    vision_bits: int | None = None

    def __post_init__(self) -> None:
        for name in ("bits", "group_size", "embed_bits", "vision_bits"):  # numbers of other libraries become Python's
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole(value, name))
        for name in ("target_bpw", "target_kl"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, real(value, name))
        self._check_values()
        self._check_mode()
        self._check_together()

    @property
    def as_stored(self) -> bool:
        """Whether no packing was asked for: a GGUF file's is then carried over."""
        return self.mode == "affine" and not self.dequantize and all(each is None for each in self._packing)

    @property
    def measures(self) -> bool:
        """Whether the bits of each tensor are chosen by what they cost."""
        return self.target_bpw is not None or self.target_kl is not None

    @property
    def _packing(self) -> tuple[object, ...]:
        targets = (self.target_bpw, self.target_kl)
        return (self.bits, self.group_size, self.method, self.recipe, *targets, self.embed_bits)

    @property
    def packed_bits(self) -> int:
        """Bits of a weight where nothing else is chosen for it."""
        return self.bits or MICROSCALING.get(self.mode, (DEFAULT_BITS, 0))[0]

    @property
    def group(self) -> int:
        """Weights that share a scale where nothing else is chosen for them."""
        return self.group_size or MICROSCALING.get(self.mode, (0, DEFAULT_GROUP_SIZE))[1]

    @property
    def text(self) -> Path | Shipped | None:
        """The text that weights are packed by, the default put in; None: by none."""
        if self.how == "round" or self.dequantize or self.calibration == NO_TEXT:
            return None
        return self.calibration or SHIPPED

    @property
    def how(self) -> Method:
        """The method, the default put in."""
        return self.method or ("search" if self.mode in SEARCHED else "round")

    def _check_values(self) -> None:
        if self.mode not in MODES:
            raise OptionError(f"mode {self.mode} is not supported", f"Use one of {', '.join(MODES)}.")
        own_group = (MICROSCALING[self.mode][1],) if self.mode in MICROSCALING else ()
        for what, value, allowed in (
            (f"{self.bits} bits is", self.bits, BITS),
            (f"group size {self.group_size} is", self.group_size, (*GROUP_SIZES, *own_group)),
            (f"method {self.method} is", self.method, METHODS),
            (f"dtype {self.dtype} is", self.dtype, DTYPES),
            (f"{self.embed_bits} bits for the embedding is", self.embed_bits, (*BITS, UNQUANTIZED)),
            (f"{self.vision_bits} bits for what sees is", self.vision_bits, BITS),
        ):
            if value is not None and value not in allowed:
                raise OptionError(f"{what} not supported", f"Use one of {', '.join(str(each) for each in allowed)}.")
        text: object = self.calibration
        if not (text is None or isinstance(text, Path) or text in (SHIPPED, NO_TEXT)):
            raise OptionError(
                f"{self.calibration!r} is no calibration text", f'Give a Path, "{SHIPPED}" or "{NO_TEXT}".'
            )
        if self.target_bpw is not None and not 2 < self.target_bpw <= UNQUANTIZED:
            raise OptionError(f"{self.target_bpw:g} bits per weight is out of range", "Use more than 2 and at most 16.")
        if self.target_kl is not None and not self.target_kl > 0:
            raise OptionError(
                f"a KL divergence of {self.target_kl:g} is out of range", "Use more than 0, such as 0.05."
            )

    def _check_mode(self) -> None:
        if self.mode not in MICROSCALING:
            return
        bits, group = MICROSCALING[self.mode]
        if self.bits not in (None, bits) or self.group_size not in (None, group):
            raise OptionError(
                f"{self.mode} has {bits} bits in groups of {group}",
                "Leave out the bits and the group size, or use mode affine.",
            )
        if self.method in CALIBRATED or (self.method == "search" and self.mode not in SEARCHED):
            raise OptionError(f"{self.method} does not pack {self.mode}", "Use method round, or mode affine.")

    def _check_together(self) -> None:
        planners = {
            "a recipe": self.recipe,
            "a target for bits per weight": self.target_bpw,
            "a target for the KL divergence": self.target_kl,
        }
        given = [name for name, value in planners.items() if value is not None]
        if len(given) > 1:
            raise OptionError(f"{given[0]} and {given[1]} contradict each other", "Give one of them.")
        for planned in given:
            if self.mode != "affine":
                raise OptionError(f"{planned} mixes affine packings, not {self.mode}", "Use mode affine.")
            if self.how in CALIBRATED:
                raise OptionError(f"{self.how} packs everything alike, and {planned} does not", "Use method search.")
        if self.measures and self.bits is not None:
            raise OptionError(f"bits and {given[0]} contradict each other", "Give one of them.")
        if self.dequantize and (self.mode != "affine" or any(value is not None for value in self._packing)):
            raise OptionError(
                "--dequantize (dequantize=True) unpacks everything, so options about packing have no effect",
                "Leave one of them.",
            )
        if self.vision_bits is not None and (self.keep_vision is False or self.dequantize):
            raise OptionError("what sees can't be packed where it is left out or unpacked", "Leave out its bits.")
        if self.calibration not in (None, NO_TEXT) and (self.how == "round" or self.dequantize):
            raise OptionError("rounding looks at no text", "Use method search, gptq or awq with a calibration text.")
        if self.calibration == NO_TEXT and self.how in CALIBRATED:
            raise OptionError(f"{self.how} packs by a text", "Leave out calibration none, or use method search.")
