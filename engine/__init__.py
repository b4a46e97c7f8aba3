"""Run language models with MLX: load, chat, measure.

    from tokamac.engine import Engine, KVSpec, Sampling

    with Engine.load("guide") as engine:
        for event in engine.chat().send("Why is decode memory-bound?", Sampling(temperature=0)):
            ...

Importing this package does no work: MLX and mlx-lm are loaded by ``Engine.load``.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import (
    ContextError,
    ConversionError,
    DeviceError,
    DownloadError,
    EngineClosedError,
    GrammarError,
    MemoryLimitError,
    ModelDamagedError,
    ModelError,
    ModelNotFoundError,
    ModelUnsupportedError,
    OptionError,
    TemplateError,
    TokamacError,
)

if TYPE_CHECKING:
    from .chat import Chat
    from .embedding import Embeddings
    from .engine import Engine
    from .events import (
        Action,
        Alternative,
        Branch,
        Continue,
        Edit,
        Event,
        Failed,
        Finished,
        Live,
        LoadProgress,
        LoopFound,
        MemoryPressure,
        Message,
        ModelSpec,
        PrefillProgress,
        Price,
        Regenerate,
        Send,
        TextChunk,
        TokenLogprob,
        ToolCall,
        ToolCallDelta,
        Truncated,
    )
    from .lab.exchange import Exchanged
    from .lab.scoring import Perplexity, Trial, TrialProgress
    from .metrics import Gaps, Metrics
    from .options import KVSpec, Nodes, PromptCacheSpec, Sampling, Speculation, TemplateOptions, ToolSpec
    from .perf.memory import Memory
    from .perf.roofline import Limits, Prediction
    from .prompt_cache.cache import Check
    from .schedule.stream import ReplyStream
    from .text.tokenizer import Tokenizer

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
    "Embeddings",
    "Engine",
    "EngineClosedError",
    "Event",
    "Exchanged",
    "Failed",
    "Finished",
    "Gaps",
    "GrammarError",
    "KVSpec",
    "Limits",
    "Live",
    "LoadProgress",
    "LoopFound",
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
    "Nodes",
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
    "Speculation",
    "TemplateError",
    "TemplateOptions",
    "TextChunk",
    "TokamacError",
    "TokenLogprob",
    "Tokenizer",
    "ToolCall",
    "ToolCallDelta",
    "ToolSpec",
    "Trial",
    "TrialProgress",
    "Truncated",
]

# Read when NumPy is loaded. By default the threads of its BLAS spin on for 0.1 s after a product, on cores that decode needs.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "14")

_NAMES = {
    "chat": "Chat",
    "embedding": "Embeddings",
    "engine": "Engine",
    "events": "Action Alternative Branch Continue Edit Event Failed Finished Live LoadProgress LoopFound "
    "MemoryPressure Message ModelSpec PrefillProgress Price Regenerate Send TextChunk TokenLogprob ToolCall ToolCallDelta "
    "Truncated",
    "metrics": "Gaps Metrics",
    "options": "KVSpec Nodes PromptCacheSpec Sampling Speculation TemplateOptions ToolSpec",
    "perf.memory": "Memory",
    "perf.roofline": "Limits Prediction",
    "prompt_cache.cache": "Check",
    "lab.exchange": "Exchanged",
    "lab.scoring": "Perplexity Trial TrialProgress",
    "text.tokenizer": "Tokenizer",
    "schedule.stream": "ReplyStream",
}  # fmt: skip
# Which module defines a name: the command line needs the errors alone, and MLX is imported where it is used.
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
