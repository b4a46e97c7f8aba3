"""Run language models with MLX: load, chat, measure.

    from tokamac.engine import Engine, KVSpec, Sampling

    with Engine.load("guide") as engine:
        for event in engine.chat().send("Why is decode memory-bound?", Sampling(temperature=0)):
            ...

Importing this package does no work: MLX and mlx-lm are loaded by ``Engine.load``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tokamac.engine.errors import (
    ContextError,
    ConversionError,
    DeviceError,
    DownloadError,
    EngineClosedError,
    MemoryLimitError,
    ModelDamagedError,
    ModelError,
    ModelNotFoundError,
    ModelUnsupportedError,
    OptionError,
    TemplateError,
    TokamacError,
)
from tokamac.engine.events import (
    Action,
    Alternative,
    Branch,
    Continue,
    Edit,
    Event,
    Finished,
    Live,
    LoadProgress,
    MemoryPressure,
    Message,
    PrefillProgress,
    Price,
    Regenerate,
    Send,
    TextChunk,
    TokenLogprob,
    Truncated,
)
from tokamac.engine.metrics import Gaps, Metrics
from tokamac.engine.options import KVSpec, PromptCacheSpec, Sampling, TemplateOptions

if TYPE_CHECKING:
    from tokamac.engine.chat import Chat
    from tokamac.engine.engine import Engine
    from tokamac.engine.kv.divergence import Trial, TrialProgress
    from tokamac.engine.perf.memory import Memory
    from tokamac.engine.perf.roofline import Limits, Prediction
    from tokamac.engine.prompt_cache.cache import Check
    from tokamac.engine.prompt_cache.exchange import Exchanged
    from tokamac.engine.runner import ModelSpec
    from tokamac.engine.scoring import Perplexity
    from tokamac.engine.text.tokenizer import Tokenizer
    from tokamac.engine.worker import ReplyStream

__all__ = [
    "Action",
    "Alternative",
    "Branch",
    "Chat",
    "Check",
    "ContextError",
    "Continue",
    "ConversionError",
    "DeviceError",
    "DownloadError",
    "Edit",
    "Engine",
    "EngineClosedError",
    "Event",
    "Exchanged",
    "Finished",
    "Gaps",
    "KVSpec",
    "Limits",
    "Live",
    "LoadProgress",
    "Memory",
    "MemoryLimitError",
    "MemoryPressure",
    "Message",
    "Metrics",
    "ModelDamagedError",
    "ModelError",
    "ModelNotFoundError",
    "ModelSpec",
    "ModelUnsupportedError",
    "OptionError",
    "Perplexity",
    "Prediction",
    "PrefillProgress",
    "Price",
    "PromptCacheSpec",
    "Regenerate",
    "ReplyStream",
    "Sampling",
    "Send",
    "TemplateError",
    "TemplateOptions",
    "TextChunk",
    "TokamacError",
    "TokenLogprob",
    "Tokenizer",
    "Trial",
    "TrialProgress",
    "Truncated",
]


_HOMES = {
    "Chat": "chat", "Check": "prompt_cache.cache", "Engine": "engine", "Exchanged": "prompt_cache.exchange",
    "Limits": "perf.roofline", "Memory": "perf.memory", "ModelSpec": "runner", "Perplexity": "scoring",
    "Prediction": "perf.roofline", "ReplyStream": "worker", "Tokenizer": "text.tokenizer", "Trial": "kv.divergence",
    "TrialProgress": "kv.divergence",
}  # fmt: skip
"""Which module defines a name that MLX is imported with, so that the screen and the command line stay light."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
