"""Which class computes a model type: one of ours where mlx-lm has none, else mlx-lm's.

A file in this folder is one architecture, named as its ``model_type``. It holds what mlx-lm's model files hold: ``ModelArgs``, a
dataclass that takes what it knows of a normalised config (engine/model/config.py), and ``Model``, with ``layers`` and, where
needed, ``sanitize`` and ``make_cache``. Where mlx-lm's layers compute the same, they are composed or subclassed. Golden values
(tests/golden) prove every one. Nothing is registered with mlx-lm, so its other users see no change. Importing this package loads
no MLX; its files do.
"""

import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from ..files import import_mlx_lm

PREFIX = __name__ + "."
MODEL_MODULES = ("mlx_lm.models.", PREFIX)
"""Prefixes of modules with model classes."""

SAME_CLASS = {
    # model type: the module whose class computes it. The language parts of newer models are published alone, too.
    "gemma4_unified_text": "gemma4_text",
    "lfm2_vl": "lfm2-vl",
    "minimax_m3_vl_text": "minimax_m3",
    "olmo": "llama",  # Hugging Face's form of OLMo 1; mlx-lm's class is for Ai2's own, and corrections.py has what differs
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
}


@cache
def own_architectures() -> frozenset[str]:
    """Return the model types that have a file in this folder."""
    return frozenset(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def loads_in_mlx_lm(kind: str) -> bool:
    """Return whether mlx-lm by itself has the class that computes this model type here."""
    return kind not in own_architectures() and kind not in SAME_CLASS


def find_classes(config: Mapping[str, Any]) -> tuple[Callable[..., Any], type[Any]]:
    """Return Model and ModelArgs for a config's ``model_type``.

    A file of ours takes precedence over a class of that name in another version of mlx-lm: ours is the one proved here.
    Raises ValueError, ImportError or AttributeError where there is no language model of that type.
    """
    kind = SAME_CLASS.get(config["model_type"], config["model_type"])
    if not re.fullmatch(r"[\w-]+", kind):
        raise ValueError(f"{kind!r} is not a model type")
    import_mlx_lm()
    if kind in own_architectures():
        module = importlib.import_module(PREFIX + kind)
        return module.Model, module.ModelArgs
    from mlx_lm.utils import _get_classes

    found: tuple[Callable[..., Any], type[Any]] = _get_classes({**config, "model_type": kind})
    return found
