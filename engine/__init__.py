"""Run language models with MLX: load, chat, measure.

    from tokamac.engine import Engine, KVSpec, Sampling

    with Engine.load("guide") as engine:
        for event in engine.chat().send("Why is decode memory-bound?", Sampling(temperature=0)):
            ...

Importing this package does no work: MLX and mlx-lm are loaded by ``Engine.load``.
"""

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
    Event,
    Finished,
    Live,
    LoadProgress,
    Message,
    PrefillProgress,
    Squeezed,
    TextChunk,
    Truncated,
)
from tokamac.engine.limits.metrics import Gaps, Metrics
from tokamac.engine.options import KVSpec, PromptCacheSpec, Sampling
from tokamac.engine.price import Action, Branch, Continue, Edit, Price, Regenerate, Send

if TYPE_CHECKING:
    from tokamac.engine.chat import Chat
    from tokamac.engine.session import Engine

__all__ = [
    "Action",
    "Branch",
    "Chat",
    "ContextError",
    "Continue",
    "ConversionError",
    "DeviceError",
    "DownloadError",
    "Edit",
    "Engine",
    "EngineClosedError",
    "Event",
    "Finished",
    "Gaps",
    "KVSpec",
    "Live",
    "LoadProgress",
    "MemoryLimitError",
    "Message",
    "Metrics",
    "ModelDamagedError",
    "ModelError",
    "ModelNotFoundError",
    "ModelUnsupportedError",
    "OptionError",
    "PrefillProgress",
    "Price",
    "PromptCacheSpec",
    "Regenerate",
    "Sampling",
    "Send",
    "Squeezed",
    "TemplateError",
    "TextChunk",
    "TokamacError",
    "Truncated",
]


def __getattr__(name: str) -> Any:
    # MLX is imported when the engine is first asked for, so that the screen and the command line stay light.
    if name == "Engine":
        from tokamac.engine.session import Engine

        return Engine
    if name == "Chat":
        from tokamac.engine.chat import Chat

        return Chat
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
