"""A GGUF file's hyper-parameters: read by key, checked, and rotary scaling as Hugging Face's configs tell it."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ModelUnsupportedError
from .file import GgufFile
from .places import damaged

Config = dict[str, Any]
Shape = tuple[int, ...]

MOST_LAYERS = 4096  # far more than any model has
ROTARY_TOLERANCE = 1e-3  # relative, of stored rotary factors against those that the config makes


@dataclass(frozen=True, slots=True)
class HyperParameters:
    """A file's hyper-parameters. Methods raise ModelDamagedError for one that is missing or of another type."""

    file: GgufFile

    def find(self, key: str) -> Any:
        """Return a value or None; floats as shortest decimals."""
        value = self.file.metadata.get(f"{self.file.architecture}.{key}")
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def number(self, key: str, default: float | None = None) -> Any:
        value = self.find(key)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if value is None:
            value = default
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise damaged(self.file.files[0], f"it has no number for {self.file.architecture}.{key}")
        return value

    def least(self, key: str) -> Any:
        """Return a number, or of one for each layer the least that is not 0."""
        value = self.find(key)
        return min(filter(None, value), default=0) if isinstance(value, list) else self.number(key)

    def has(self, name: str) -> bool:
        return name in self.file.tensors

    def shape(self, name: str) -> Shape:
        if name not in self.file.tensors:
            raise damaged(self.file.files[0], f"it has no tensor {name}")
        return self.file.tensors[name].shape

    def factors(self, name: str) -> list[float]:
        tensor = self.file.tensors[name]
        if tensor.kind.name != "F32" or math.prod(tensor.shape) > 1 << 16:
            raise damaged(self.file.files[0], f"{name} holds no rotary factors")
        return [float(value) for value in tensor.read().view(np.float32).reshape(-1)]

    @property
    def layers(self) -> int:
        """Without those that predict further tokens."""
        count = int(self.number("block_count")) - int(self.number("nextn_predict_layers", 0))
        if not 0 < count <= MOST_LAYERS:
            raise damaged(self.file.files[0], f"it tells of {count:,} layers")
        return count

    @property
    def head_dim(self) -> int:
        heads = self.number("attention.head_count") or 1
        return int(self.number("attention.key_length", self.number("embedding_length") // heads))

    @property
    def slides(self) -> list[bool] | None:
        """Which layers slide, where the file tells it for each or by a period."""
        pattern = self.find("attention.sliding_window_pattern")
        if isinstance(pattern, list):
            return [bool(each) for each in pattern[: self.layers]]
        return None if not pattern else [(index + 1) % int(pattern) != 0 for index in range(self.layers)]


def rope_scaling(params: HyperParameters) -> Config | None:
    if params.has("rope_freqs.weight") and params.file.architecture != "gemma4":
        return _llama3(params)
    kind = params.find("rope.scaling.type")
    if params.has("rope_factors_long.weight"):
        return {
            "rope_type": "longrope",
            "long_factor": params.factors("rope_factors_long.weight"),
            "short_factor": params.factors("rope_factors_short.weight"),
            "original_max_position_embeddings": params.number("rope.scaling.original_context_length"),
        }
    if kind in (None, "none") or params.number("rope.scaling.factor", 1.0) in (0, 1):
        return None
    if kind not in ("linear", "yarn"):
        raise ModelUnsupportedError(
            f"{params.file.files[0]} scales its positions by {kind!r:.40}, which is not known here",
            "Use the model's safetensors version.",
        )
    scaling = {"rope_type": kind, "factor": params.number("rope.scaling.factor")}
    if kind == "yarn":
        for name, key in YARN.items():
            if params.find(key) is not None:
                scaling[name] = params.number(key)
    return scaling


YARN = {
    "attention_factor": "rope.scaling.yarn_attn_factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
LOW, HIGH = 1.0, 4.0  # of Llama 3's scaling: its own, and nobody else's differ


def _llama3(params: HyperParameters) -> Config | None:
    """Return Llama 3's scaling from the factors that llama.cpp's converter made of it."""
    # It is 1 for short waves, `factor` for long ones, and between them 1 / ((1 - s) / factor + s) with
    # s = (original / wave - LOW) / (HIGH - LOW): so one such place tells the original length.
    factors = np.array(params.factors("rope_freqs.weight"))
    factor = float(factors.max(initial=1.0))
    if factor == 1.0:
        return None
    base, width = params.number("rope.freq_base", 10_000.0), 2 * len(factors)
    waves = 2 * math.pi * base ** (np.arange(0, width, 2) / width)
    with np.errstate(divide="ignore"):
        smooth = (1 / factors - 1 / factor) / (1 - 1 / factor)
    between = (smooth > ROTARY_TOLERANCE) & (smooth < 1 - ROTARY_TOLERANCE)
    length = float(np.median(waves[between] * (LOW + (HIGH - LOW) * smooth[between]))) if between.any() else 8192.0
    length = float(params.number("rope.scaling.original_context_length", round(length)))
    again = np.clip((length / waves - LOW) / (HIGH - LOW), 0, 1)
    if not np.allclose(1 / ((1 - again) / factor + again), factors, rtol=ROTARY_TOLERANCE):
        raise ModelUnsupportedError(
            f"{params.file.files[0]} has rotary factors of a kind that is not known here",
            "Use the model's safetensors version.",
        )
    return {
        "rope_type": "llama3",
        "factor": round(factor, 6),
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": round(length),
    }
