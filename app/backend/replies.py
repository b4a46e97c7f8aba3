"""What the engine's process says to the screen: one frozen dataclass a message."""

from dataclasses import dataclass, field
from typing import Literal

from tokamac.app.backend.requests import Asker
from tokamac.app.backend.whatif import Answer, ModelLine
from tokamac.engine.events import FinishReason, Live, Squeezed, TextKind
from tokamac.engine.limits.diagnosis import Diagnosis
from tokamac.engine.limits.gaps import Outlier
from tokamac.engine.limits.metrics import Metrics
from tokamac.engine.options import Sampling, Thinking
from tokamac.engine.price import Price


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes in use by the engine, now and at most, and the bytes it may use; None is unknown.

    predicted_peak_bytes: what the peak of a reply that has ended was expected to be. budget_source: in words, where the bytes it
    may use come from. total_bytes: the memory there is.
    """

    active_bytes: int | None = None
    peak_bytes: int | None = None
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    budget_source: str = ""
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the screen shows of a loaded model; None is unknown.

    device: what computes: "metal", "cuda" or "cpu". capacity: tokens that the context holds at once; rolls: whether the oldest make
    room then. later_system: whether its chat template takes system messages that follow others; else they are left out of prompts.
    recommended: what its makers suggest, else the defaults. notes: where the caches are not what was asked for, and why.
    advice: what to do about the installation, where that holds the model up. memory_notes: what loading it cost other programs.
    doubts: what of its config is computed otherwise, where it was loaded unchecked.
    adapter: what is added to it, as it was asked for; adapter_digest: of all its bytes.
    thinking_modes: what its chat template can be told of thinking; template_names: all that it reads beside the messages.
    """

    name: str
    path: str = ""
    device: str = ""
    architecture: str = ""
    parameters: int | None = None
    weight_bytes: int | None = None
    bits_per_weight: float | None = None
    context_length: int | None = None
    thinks: bool = False
    later_system: bool = False
    capacity: int | None = None
    rolls: bool = False
    recommended: Sampling = field(default_factory=Sampling)
    notes: tuple[str, ...] = ()
    advice: str | None = None
    memory_notes: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    adapter: str | None = None
    adapter_digest: str | None = None
    thinking_modes: tuple[Thinking, ...] = ()
    template_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Loading:
    """How far loading has come, in bytes; ``total`` None is not known yet. Of the warm-up nothing is counted."""

    stage: Literal["download", "weights", "warm-up"]
    done: int
    total: int | None


@dataclass(frozen=True, slots=True)
class Loaded:
    """The model is ready. ``ceiling_tps`` is that of an empty context."""

    info: ModelInfo
    ceiling_tps: float | None = None
    bandwidth_gbs: float | None = None
    memory: MemoryUse = field(default_factory=MemoryUse)


@dataclass(frozen=True, slots=True)
class Unloaded:
    """The model is gone and its memory given back."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prompt tokens of reply ``id`` in the cache; ``cached`` of them were there before."""

    id: int
    done: int
    total: int
    cached: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The conversation did not fit: ``tokens`` of its middle are not seen in reply ``id``."""

    id: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ShortOfMemory:
    """Memory was short before reply ``id``, and this was done."""

    id: int
    done: Squeezed


@dataclass(frozen=True, slots=True)
class Text:
    """Characters of reply ``id``, batched."""

    id: int
    text: str
    kind: TextKind = "answer"


@dataclass(frozen=True, slots=True)
class Stats:
    """The measurements of reply ``id`` so far."""

    id: int
    live: Live


@dataclass(frozen=True, slots=True)
class Done:
    """Reply ``id`` has ended. Its whole text is repeated, so that what is kept is what the engine said.

    thinking_ended_at: the budget of tokens that ended its thinking; None where none did.
    """

    id: int
    reason: FinishReason
    text: str
    thinking: str
    metrics: Metrics
    memory: MemoryUse = field(default_factory=MemoryUse)
    outliers: tuple[Outlier, ...] = ()
    diagnosis: Diagnosis | None = None
    thinking_ended_at: int | None = None


@dataclass(frozen=True, slots=True)
class Priced:
    """The answer to ``AskPrice`` of the same asker and id; None where no price can be told: too long a conversation, say."""

    asker: Asker
    id: int
    price: Price | None


@dataclass(frozen=True, slots=True)
class Counted:
    """The answer to ``AskCount`` of the same id; None where nothing can count."""

    id: int
    tokens: int | None


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The answer to ``AskWhatIf`` of the same id. None: ``error`` says why, or only ``done`` of ``total`` models are weighed.

    line: the last that was.
    """

    id: int
    answer: Answer | None
    error: str = ""
    done: int = 0
    total: int = 0
    line: ModelLine | None = None


@dataclass(frozen=True, slots=True)
class Notice:
    """Something went wrong that the user should know of and that ends nothing; once for each loaded model."""

    text: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The process is alive, and busy."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A request failed: reply ``id``, or (None) the loading of a model. The process goes on."""

    id: int | None
    error: str
    hint: str = ""


Reply = (
    Loading | Loaded | Unloaded | LeftOut | ShortOfMemory | Prefill | Text | Stats | Done | Priced | Counted | WhatIf
    | Notice | Heartbeat | Failed
)  # fmt: skip
