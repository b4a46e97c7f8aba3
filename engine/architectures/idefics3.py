"""The language model within Idefics3 and SmolVLM: mlx-lm's Llama. What sees is engine/vision's."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import llama
from mlx_lm.models.base import BaseModelArgs


@dataclass
class ModelArgs(BaseModelArgs):
    model_type: str
    text_config: dict[str, Any]


class Model(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args, self.model_type = args, args.model_type
        self.language_model = llama.Model(llama.ModelArgs.from_dict(args.text_config))

    def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
        logits: mx.array = self.language_model(inputs, cache=cache, input_embeddings=input_embeddings)
        return logits

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        own = {name.removeprefix("language_model."): value for name, value in weights.items()}
        named = {name.replace("model.text_model.", "model."): value for name, value in own.items()}
        kept = {name: value for name, value in named.items() if not name.startswith("model.connector.")}
        return {f"language_model.{name}": value for name, value in self.language_model.sanitize(kept).items()}

    @property
    def layers(self) -> Any:
        return self.language_model.layers
