"""Multi-token prediction heads as modules, built from the model's own layer class."""

# hidden state after token i  ─ hnorm ┐
# token i + 1 ─ embedding ──── enorm ─┴ eh_proj ─ a layer with a cache ─ norm ─▶ hidden state ─ model's head

# mlx-lm's class makes an ``mtp`` head's layer, masks and caches from the config with one layer. Hidden states
# are those after the last norm, as in DeepSeek's code, vLLM and SGLang: acceptance is higher than before the
# norm. The model's embedding and head are used; the files' copies are dropped.

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from ..errors import ModelDamagedError, ModelError, ModelUnsupportedError
from ..files import not_opened
from .config import model_classes
from .head import asking_for_logits, backbone_of
from .loader import BUILD_ERRORS, packing_of
from .weights import FUSED, StoredHeads, unpack_fp8, without_fp8

# What a config says of a model whose only layer is one for further tokens: full attention, and experts where there are
# any.
ONE_LAYER: Mapping[str, Any] = {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "full_attention_interval": 1,
    "layer_types": None,
    "mlp_layer_types": None,
    "indexer_types": None,
    "mlp_only_layers": [],
}


class HeadTiedToModel(nn.Module):
    """A placeholder for the model's output head, without weights."""

    def __init__(self, project: Callable[[mx.array], mx.array]) -> None:
        super().__init__()
        self._project = (project,)

    def __call__(self, hidden: mx.array) -> mx.array:
        return self._project[0](hidden)


class FusedEmbedding(nn.Module):
    """The layer's input from tokens and preceding hidden states."""

    def __init__(self, model: "ModelEnds") -> None:
        super().__init__()
        self.enorm = nn.RMSNorm(model.width, eps=model.eps)
        self.hnorm = nn.RMSNorm(model.width, eps=model.eps)
        self.eh_proj = nn.Linear(2 * model.width, model.width, bias=False)
        self._model = (model,)  # in a tuple it is not a submodule: its weights are the model's
        self._hidden: mx.array | None = None

    def reading(self, hidden: mx.array | None) -> None:
        """Set the hidden states (1, N, D) of the next call's ids; None are zeros."""
        self._hidden = hidden

    def __call__(self, ids: mx.array) -> mx.array:
        embedded = self.enorm(self._model[0].embed(ids))
        hidden = mx.zeros_like(embedded) if self._hidden is None else self.hnorm(self._hidden)
        fused: mx.array = self.eh_proj(mx.concatenate([embedded, hidden], axis=-1))
        return fused

    def as_linear(self, hidden: mx.array) -> mx.array:
        return self._model[0].project(hidden)


class ModelEnds:
    """A model's embedding and head. Raises ModelUnsupportedError where they are not found."""

    def __init__(self, module: Any, config: Mapping[str, Any]) -> None:
        text = {**config, **(config.get("text_config") or {})}
        self._backbone = backbone_of(module)
        if self._backbone is None:
            raise ModelUnsupportedError("the model's hidden states can't be read", "Use it without its heads.")
        self.width, self.eps = int(text["hidden_size"]), float(text.get("rms_norm_eps", 1e-6))
        self._parent = next(
            each for _, each in module.named_modules() if any(part is self._backbone for part in each.values())
        )

    def embed(self, ids: mx.array) -> mx.array:
        """ids (1, N) → (1, N, D)."""
        found: mx.array = self._backbone.embed_tokens(ids)
        return found

    def project(self, hidden: mx.array) -> mx.array:
        """hidden (1, N, D) → logits (1, N, V)."""
        with asking_for_logits():
            if "lm_head" in self._parent:
                logits: mx.array = self._parent.lm_head(hidden)
            else:
                logits = self._backbone.embed_tokens.as_linear(hidden)
        return logits

    @property
    def head_bytes(self) -> int:
        head = self._parent.lm_head if "lm_head" in self._parent else self._backbone.embed_tokens
        return sum(array.nbytes for _, array in tree_flatten(head.parameters()))


class MedusaBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def __call__(self, hidden: mx.array) -> mx.array:
        found: mx.array = hidden + nn.silu(self.linear(hidden))
        return found


class MedusaHeads(nn.Module):
    """Heads that each predict a different later token from one hidden state."""

    def __init__(self, count: int, blocks: int, width: int, words: int) -> None:
        super().__init__()
        self.heads = [
            [*(MedusaBlock(width) for _ in range(blocks)), nn.Linear(width, words, bias=False)] for _ in range(count)
        ]

    def __call__(self, hidden: mx.array, index: int) -> mx.array:
        """hidden (1, 1, D) → one head's logits (1, V)."""
        part: Any
        for part in self.heads[index]:
            hidden = part(hidden)
        return hidden[:, -1]


def one_layer(config: Mapping[str, Any]) -> dict[str, Any]:
    changed = deepcopy(dict(config))
    text = changed["text_config"] if isinstance(changed.get("text_config"), dict) else changed
    text.update({key: value for key, value in ONE_LAYER.items() if key in text})
    return changed


def build_heads(stored: StoredHeads, config: Mapping[str, Any], ends: ModelEnds) -> nn.Module:
    """Build stored heads with lazy, packed weights. Raises ModelError."""
    try:
        if stored.kind == "medusa":
            text = {**config, **(config.get("text_config") or {})}
            module: nn.Module = MedusaHeads(stored.count, stored.blocks, ends.width, int(text["vocab_size"]))
            weights = {stored.names[name]: array for name, array in _arrays(stored)}
        else:
            module = _layer_model(config, ends)
            weights = _placed(stored, config, module)
        _fill(module, weights)
    except ModelError:
        raise
    except BUILD_ERRORS as error:
        folder = next(iter(stored.files.values())).parent
        if (failure := not_opened(error, folder)) is not None:
            raise failure from error
        reason = " ".join(str(error).split())[:200]
        raise ModelDamagedError(f"they are not whole, or another model's: {reason}", "Download it again.") from error
    return module


def place_of(name: str, module: Any) -> str:
    backbone = backbone_of(module)
    if backbone is None:
        return name
    path = next(path for path, each in module.named_modules() if each is backbone)
    place = name.removeprefix(f"{path}.")
    return (
        f"layer.{place.removeprefix('layers.0.')}"
        if place.startswith("layers.0.")
        else place.removeprefix("embed_tokens.")
    )


def _layer_model(config: Mapping[str, Any], ends: ModelEnds) -> Any:
    own = one_layer(config)
    make, arguments = model_classes(own)
    module = make(arguments.from_dict(own))
    backbone = backbone_of(module)
    if backbone is None:
        raise ModelUnsupportedError("the layer of its class can't be used alone", "Use it without its heads.")
    backbone.embed_tokens = FusedEmbedding(ends)
    parent = next(each for _, each in module.named_modules() if any(part is backbone for part in each.values()))
    if "lm_head" in parent:
        parent.lm_head = HeadTiedToModel(ends.project)
    return module


def _arrays(stored: StoredHeads) -> Iterator[tuple[str, mx.array]]:
    for file in sorted(set(stored.files.values())):
        arrays: Any = mx.load(str(file))
        yield from ((name, arrays[name]) for name, where in stored.files.items() if where == file)


def _placed(stored: StoredHeads, config: Mapping[str, Any], module: Any) -> dict[str, mx.array]:
    backbone = backbone_of(module)
    path = next(path for path, each in module.named_modules() if each is backbone)
    plain = unpack_fp8({stored.names[name]: array for name, array in _arrays(stored)}, dict(config))
    norms = {place: array for place, array in plain.items() if array.ndim == 1 and place.endswith("norm.weight")}
    layer = {
        f"{path}.layers.0.{place.removeprefix('layer.')}": array
        for place, array in plain.items()
        if place.startswith("layer.") and place not in norms
    }
    # Norms are put right here: a class tells what they are by weights that only the whole model has.
    placed: dict[str, mx.array] = module.sanitize(layer)
    for place, array in plain.items():
        value = array + 1.0 if place in norms and stored.less_one else array
        if place in norms and place.startswith("layer."):
            placed[f"{path}.layers.0.{place.removeprefix('layer.')}"] = value
        elif place.startswith("norm."):
            placed[f"{path}.{place}"] = value
        elif place.partition(".")[0] in FUSED:
            placed[f"{path}.embed_tokens.{place}"] = value
    return placed


def _fill(module: Any, weights: dict[str, mx.array]) -> None:
    """Set packed weights. Raises ValueError for other names, shapes or types."""

    def packed(path: str, leaf: Any) -> bool | dict[str, Any]:
        if f"{path}.scales" not in weights or "to_quantized" not in dir(leaf):
            return False
        return packing_of(path, leaf, weights)

    nn.quantize(module, class_predicate=packed)
    expected = {name: array.dtype for name, array in tree_flatten(module.parameters())}
    module.eval()
    module.load_weights(list(weights.items()), strict=True)
    for name, array in tree_flatten(module.parameters()):
        floating = mx.issubdtype(array.dtype, mx.floating) or (name.endswith("scales") and array.dtype == mx.uint8)
        if mx.issubdtype(expected[name], mx.floating) and not floating:
            raise ValueError(f"{name} holds {array.dtype} where the model has floating numbers")


class PredictionHead:
    """A callable ``mtp`` head."""

    def __init__(self, module: Any, ends: ModelEnds) -> None:
        self.module = module
        self._backbone = backbone_of(module)
        self._ends = ends

    def __call__(self, ids: mx.array, hidden: mx.array | None, caches: list[Any]) -> mx.array:
        """ids (1, N), preceding hidden states (1, N, D) or None for zeros → hidden states (1, N, D)."""
        self._backbone.embed_tokens.reading(hidden)
        try:
            found: mx.array = self._backbone(ids, caches)
        finally:
            self._backbone.embed_tokens.reading(None)
        return found

    def logits(self, hidden: mx.array) -> mx.array:
        """hidden (1, N, D) → the last logits (1, V)."""
        return self._ends.project(hidden[:, -1:])[:, -1]


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return one_layer(without_fp8(dict(config)))
