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
    Alternative,
    Event,
    Finished,
    Live,
    LoadProgress,
    Message,
    PrefillProgress,
    Squeezed,
    TextChunk,
    TokenLogprob,
    Truncated,
)
from tokamac.engine.limits.metrics import Gaps, Metrics
from tokamac.engine.options import KVSpec, PromptCacheSpec, Sampling
from tokamac.engine.price import Action, Branch, Continue, Edit, Price, Regenerate, Send

if TYPE_CHECKING:
    from tokamac.engine.chat import Chat
    from tokamac.engine.core import ModelSpec
    from tokamac.engine.kv.quality import Trial, TrialProgress
    from tokamac.engine.limits.limits import Limits
    from tokamac.engine.limits.memory import Memory
    from tokamac.engine.limits.prediction import Prediction
    from tokamac.engine.perplexity import Perplexity
    from tokamac.engine.prompt_cache.check import Check
    from tokamac.engine.prompt_cache.exchange import Exchanged
    from tokamac.engine.reply_stream import ReplyStream
    from tokamac.engine.session import Engine
    from tokamac.engine.tokens import Tokenizer

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
    "Squeezed",
    "TemplateError",
    "TextChunk",
    "TokamacError",
    "TokenLogprob",
    "Tokenizer",
    "Trial",
    "TrialProgress",
    "Truncated",
]


_HOMES = {
    "Chat": "chat", "Check": "prompt_cache.check", "Engine": "session", "Exchanged": "prompt_cache.exchange",
    "Limits": "limits.limits", "Memory": "limits.memory", "ModelSpec": "core", "Perplexity": "perplexity",
    "Prediction": "limits.prediction", "ReplyStream": "reply_stream", "Tokenizer": "tokens", "Trial": "kv.quality",
    "TrialProgress": "kv.quality",
}  # fmt: skip
"""Which module defines a name that MLX is imported with, so that the screen and the command line stay light."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
