"""What the screen asks of a model that need not be loaded, and the answer: plain values, since they cross a pipe.

The answers are computed in the engine's process (whatif_answer.py); the screen imports no MLX.
"""

from dataclasses import dataclass, field
from typing import Literal

from tokamac.engine.limits.diagnosis import Waits
from tokamac.engine.options import KVSpec

Wanted = Literal["table", "chips", "models", "disk"]
"""table: one thing changed at a time, decoding over contexts, and the roofline. chips: the same case on every chip of the table.
models: those of the catalogue, best first. disk: those that are named, in their order."""

Change = Literal["as asked", "weights", "keys and values", "context"]


@dataclass(frozen=True, slots=True)
class Where:
    """A machine: this one where ``chip`` is empty, else one of the chip table. memory_gb: as its maker says it."""

    chip: str = ""
    gpu_cores: int | None = None
    memory_gb: float | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """One case of one model. model: a folder, an id or a name of the catalogue; nothing is downloaded.

    bits: None is as it is packed. context: tokens held while decoding; prompt: of them, computed before the first token.
    names: the models to weigh, where the question is about several that are here.
    """

    wanted: Wanted
    model: str
    bits: int | None = None
    kv: KVSpec = field(default_factory=KVSpec)
    context: int = 4096
    prompt: int = 4096
    where: Where = field(default_factory=Where)
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Figures:
    """What a machine makes of a case. Bytes, tokens a second, seconds; None is unknown, and ``reason`` then says why.

    fits: whether ``memory_bytes`` are within ``budget_bytes``. from_others: bytes that other programs have to give way by.
    """

    memory_bytes: int | None = None
    budget_bytes: int | None = None
    fits: bool | None = None
    ceiling_tps: float | None = None
    expected_tps: float | None = None
    ttft_s: float | None = None
    reason: str = ""
    from_others: int = 0


@dataclass(frozen=True, slots=True)
class CaseLine:
    """A case with one thing changed. bits: None is as the model is packed."""

    change: Change
    bits: int | None
    key_bits: int
    value_bits: int
    context: int
    figures: Figures


@dataclass(frozen=True, slots=True)
class ChipLine:
    """The case on one chip."""

    chip: str
    gpu_cores: int | None
    bandwidth_gbs: float | None
    figures: Figures


@dataclass(frozen=True, slots=True)
class ModelLine:
    """A model of the catalogue, or one that is here. Bytes, weights; None is unknown. verdict: in a few words.

    download_bytes: of one that is not here. context: tokens of the prompt, and of the context, that the figures are for. text_only:
    it sees or hears, too, and that is left out.
    """

    model: str
    download_bytes: int | None
    parameters: int | None
    active_parameters: int | None
    verdict: str
    figures: Figures
    bits_per_weight: float | None = None
    context: int | None = None
    text_only: bool = False


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Decoding at one context, in tokens a second."""

    context: int
    ceiling_tps: float | None
    expected_tps: float | None


@dataclass(frozen=True, slots=True)
class Spot:
    """A phase under the roof: operations a byte, and what it does of 10^12 a second; None is unknown."""

    name: Literal["decode", "prefill"]
    intensity: float
    bound: Waits | None
    ceiling_tflops: float | None
    expected_tflops: float | None


@dataclass(frozen=True, slots=True)
class Roof:
    """A machine's roofline, and where both phases are under it. ridge: operations a byte."""

    bandwidth_gbs: float
    peak_tflops: float
    ridge: float
    spots: tuple[Spot, ...]


@dataclass(frozen=True, slots=True)
class Weighing:
    """The answer is not there yet: ``done`` of ``total`` models are weighed. line: the last of them."""

    done: int
    total: int
    line: ModelLine


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a question: of what it did not want, nothing. place: the machine's name.

    rule: how its budget is known, where it was not read. context_length: what the model was made for. notes: what is to be known
    of all cases together.
    """

    model: str
    place: str
    rule: str = ""
    context_length: int | None = None
    cases: tuple[CaseLine, ...] = ()
    curve: tuple[CurvePoint, ...] = ()
    roof: Roof | None = None
    chips: tuple[ChipLine, ...] = ()
    models: tuple[ModelLine, ...] = ()
    notes: tuple[str, ...] = ()
