"""What a reply is made of: messages go in, events come out. Only plain values, so they may cross threads and pipes."""

from dataclasses import dataclass
from typing import Literal

from tokamac.engine.limits.metrics import Metrics

Role = Literal["system", "user", "assistant"]
TextKind = Literal["answer", "thinking"]
FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. ``thinking`` is the reasoning that led to an assistant's ``content``."""

    role: Role
    content: str
    thinking: str = ""


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """Prompt tokens in the cache so far (``done``, of ``total``); ``cached`` of them were there before."""

    done: int
    total: int
    cached: int


@dataclass(frozen=True, slots=True)
class Truncated:
    """The prompt did not fit: ``messages`` of its middle were left out whole, ``tokens`` in all."""

    messages: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Whole characters of the reply, in order; ``kind`` tells the model's thinking from its answer."""

    text: str
    kind: TextKind = "answer"


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a reply: why it ended, the whole answer, its thinking, and what was measured."""

    reason: FinishReason
    text: str
    metrics: Metrics
    thinking: str = ""


Event = Truncated | PrefillProgress | TextChunk | Finished


@dataclass(frozen=True, slots=True)
class Live:
    """A snapshot of the reply in progress: its metrics so far and its last gaps between tokens (ms, oldest first)."""

    metrics: Metrics
    context_tokens: int
    gaps_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far loading has come: bytes ``done`` of ``total`` (None: not known yet) in this ``stage``."""

    stage: Literal["download", "weights"]
    done: int
    total: int | None
