"""Step 3.7 Flash: mlx-lm's Step 3.5; the vision part is omitted."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import base, step3p5

Weights = dict[str, mx.array]
PREFIX = "language_model."


@dataclass
class ModelArgs(base.BaseModelArgs):
    model_type: str
    text_config: dict[str, Any]


class Model(nn.Module):
    """Token ids (B, T) → logits (B, T, V)."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.model_type, self.args = args.model_type, args
        self.language_model = step3p5.Model(step3p5.ModelArgs.from_dict(args.text_config))

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        logits: mx.array = self.language_model(inputs, cache)
        return logits

    @property
    def layers(self) -> list[nn.Module]:
        layers: list[nn.Module] = self.language_model.layers
        return layers

    def make_cache(self) -> list[Any]:
        caches: list[Any] = self.language_model.make_cache()
        return caches

    def sanitize(self, weights: Weights) -> Weights:
        named = {name.removeprefix(PREFIX): value for name, value in weights.items()}
        text = {name: value for name, value in named.items() if name.startswith(("model.", "lm_head."))}
        return {PREFIX + name: value for name, value in self.language_model.sanitize(text).items()}

    @property
    def cast_predicate(self) -> Callable[[str], bool]:
        predicate: Callable[[str], bool] = self.language_model.cast_predicate
        return predicate

    @property
    def quant_predicate(self) -> Callable[[str, nn.Module], Any]:
        predicate: Callable[[str, nn.Module], Any] = self.language_model.quant_predicate
        return predicate
