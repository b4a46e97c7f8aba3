"""Model classes by ``model_type``: ours where mlx-lm has none, else mlx-lm's."""

# Each file is one architecture in mlx-lm's form: ``ModelArgs`` of a normalised config (engine/model/config.py),
# ``Model``, optional ``sanitize`` and ``make_cache``. Golden values (tests/golden) verify it. Nothing is
# registered with mlx-lm, and this package loads no MLX.

import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from ..mlx_lm_package import find_models

PREFIX = __name__ + "."
MODEL_MODULES = ("mlx_lm.models.", PREFIX)  # prefixes of modules with model classes

SAME_CLASS = {
    # model type: the module whose class computes it. The language parts of newer models are published alone, too.
    "gemma4_unified_text": "gemma4_text",
    "lfm2_vl": "lfm2-vl",
    "smolvlm": "idefics3",
    "minimax_m3_vl_text": "minimax_m3",
    "olmo": "llama",  # Hugging Face's form of OLMo 1; mlx-lm's class is for Ai2's own, and corrections.py has what differs
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
}


# The modules that mlx-lm itself takes for other names (``mlx_lm/utils.py``, which brings transformers; a test compares).
BY_TYPE = {
    "mistral": "llama",
    "llava": "mistral3",
    "phi-msft": "phixtral",
    "falcon_mamba": "mamba",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "qwen2_5_vl": "qwen2_vl",
    "minimax_m2": "minimax",
    "iquestcoder": "llama",
    "xverse": "llama",
    "gemma4_unified": "gemma4",
    "deepseek_v41_text": "deepseek_v41",
}
# What sees, by the language model within it: the module that computes that.
BY_LANGUAGE_PART = {"internvl": {"qwen2": "qwen2_vl", "qwen3": "qwen3_vl"}}
BY_ARCHITECTURE = {("bailing_hybrid", "BailingMoeV3ForCausalLM"): "bailing_moe_v3"}


@cache
def own_architectures() -> frozenset[str]:
    return frozenset(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def loads_in_mlx_lm(kind: str) -> bool:
    return not (kind in own_architectures() or kind in SAME_CLASS or kind in BY_LANGUAGE_PART)


def find_classes(config: Mapping[str, Any]) -> tuple[Callable[..., Any], type[Any]]:
    """Return Model and ModelArgs of a config. Raises ValueError, ImportError or AttributeError if there is none."""
    # Ours takes precedence over a class of another mlx-lm version: ours is the verified one.
    kind = SAME_CLASS.get(config["model_type"], config["model_type"])
    if (within := BY_LANGUAGE_PART.get(kind)) is not None:
        kind = within.get(str((config.get("text_config") or {}).get("model_type")), kind)
    if not re.fullmatch(r"[\w-]+", kind):
        raise ValueError(f"{kind!r} is not a model type")
    find_models()
    if kind in own_architectures():
        module = importlib.import_module(PREFIX + kind)
        return module.Model, module.ModelArgs
    named = config.get("architectures") or ()
    for architecture in (named,) if isinstance(named, str) else named:
        if (kind, architecture) in BY_ARCHITECTURE:
            kind = BY_ARCHITECTURE[kind, architecture]
            break
    else:
        kind = BY_TYPE.get(kind, kind)
    name = f"mlx_lm.models.{kind}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # a library that the model needs
            raise
        raise ValueError(f"mlx-lm has no model {kind}") from error
    return module.Model, module.ModelArgs
