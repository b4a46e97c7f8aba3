"""A checkpoint's heads for tokens beyond the next, as modules: built from the class's own layer, filled, and called.

A head of the kind ``mtp`` is a model of one layer whose embedding reads more than a token:

    hidden state after token i  ─ hnorm ┐
    token i + 1 ─ embedding ──── enorm ─┴ eh_proj ─ a layer, with a cache of its own ─ norm ─▶ hidden state ─ the model's head
                                                                                          ╰ read again, with what was chosen

So mlx-lm's class makes its layer, masks and caches, whatever they are, from the model's own config with one layer. Hidden states
are those after the last norm: so have it the code beside DeepSeek's files, vLLM and SGLang, and others measured that more comes
true so than with those before it. The model's own embedding and head are used; copies of them in the files are left out.
"""

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
from .loader import BUILD_ERRORS
from .stored_heads import FUSED, StoredHeads
from .weights import unpack_fp8, without_fp8

ONE_LAYER: Mapping[str, Any] = {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "full_attention_interval": 1,
    "layer_types": None,
    "mlp_layer_types": None,
    "indexer_types": None,
    "mlp_only_layers": [],
}
"""What a config says of a model whose only layer is one for further tokens: full attention, and experts where there are any."""


class HeadTiedToModel(nn.Module):
    """Stands for the model's own output head: its weights are not the head's."""

    def __init__(self, project: Callable[[mx.array], mx.array]) -> None:
        super().__init__()
        self._project = (project,)

    def __call__(self, hidden: mx.array) -> mx.array:
        """hidden (…, D) → (…, V)."""
        return self._project[0](hidden)


class FusedEmbedding(nn.Module):
    """Makes what the layer reads of tokens and the hidden states before them.

    Args:
        model: whose embedding and head are used, and whose width and eps are its own.
    """

    def __init__(self, model: "ModelEnds") -> None:
        super().__init__()
        self.enorm = nn.RMSNorm(model.width, eps=model.eps)
        self.hnorm = nn.RMSNorm(model.width, eps=model.eps)
        self.eh_proj = nn.Linear(2 * model.width, model.width, bias=False)
        self._model = (model,)  # in a tuple it is not a submodule: its weights are the model's
        self._hidden: mx.array | None = None

    def reading(self, hidden: mx.array | None) -> None:
        """Set the hidden states (1, N, D) that belong to the ids of the next call; None are zeros."""
        self._hidden = hidden

    def __call__(self, ids: mx.array) -> mx.array:
        """ids (1, N) → (1, N, D)."""
        embedded = self.enorm(self._model[0].embed(ids))
        hidden = mx.zeros_like(embedded) if self._hidden is None else self.hnorm(self._hidden)
        fused: mx.array = self.eh_proj(mx.concatenate([embedded, hidden], axis=-1))
        return fused

    def as_linear(self, hidden: mx.array) -> mx.array:
        """Return logits, where head and embedding are tied."""
        return self._model[0].project(hidden)


class ModelEnds:
    """A model's embedding and head, which its heads for further tokens use.

    Args:
        module: mlx-lm's, with weights or without.
        config: its normalised config.

    Raises ModelUnsupportedError where they are not found.
    """

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
        """Bytes of the matrix that makes logits."""
        head = self._parent.lm_head if "lm_head" in self._parent else self._backbone.embed_tokens
        return sum(array.nbytes for _, array in tree_flatten(head.parameters()))


class MedusaBlock(nn.Module):
    """Adds what its layer makes of a hidden state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def __call__(self, hidden: mx.array) -> mx.array:
        """hidden (…, D) → (…, D)."""
        found: mx.array = hidden + nn.silu(self.linear(hidden))
        return found


class MedusaHeads(nn.Module):
    """Heads that each predict another of the tokens after the next, from the same hidden state."""

    def __init__(self, count: int, blocks: int, width: int, words: int) -> None:
        super().__init__()
        self.heads = [
            [*(MedusaBlock(width) for _ in range(blocks)), nn.Linear(width, words, bias=False)] for _ in range(count)
        ]

    def __call__(self, hidden: mx.array, index: int) -> mx.array:
        """hidden (1, 1, D) → the logits (1, V) of one head."""
        part: Any
        for part in self.heads[index]:
            hidden = part(hidden)
        return hidden[:, -1]


def one_layer(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a normalised config with one layer, of the kind that predicts further."""
    changed = deepcopy(dict(config))
    text = changed["text_config"] if isinstance(changed.get("text_config"), dict) else changed
    text.update({key: value for key, value in ONE_LAYER.items() if key in text})
    return changed


def build_heads(stored: StoredHeads, config: Mapping[str, Any], ends: ModelEnds) -> nn.Module:
    """Return the module of stored heads with lazy weights, packed as they are stored.

    ends: of the model. Raises ModelError where they don't fit it, or are damaged.
    """
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
    """Return the place in a head (``StoredHeads.names``) of a parameter of what ``build_heads`` made."""
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
    """Return arrays by their names in the module. The class's own step renames and stacks what is the layer's."""
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
    """Give a module its weights, packed as they are. Raises ValueError where names, shapes or types differ."""
    from mlx_lm.utils import infer_quant_config

    def packed(path: str, leaf: Any) -> bool | dict[str, Any]:
        if f"{path}.scales" not in weights or "to_quantized" not in dir(leaf):
            return False
        found: dict[str, Any] = infer_quant_config(path, leaf, weights)
        return found

    nn.quantize(module, class_predicate=packed)
    expected = {name: array.dtype for name, array in tree_flatten(module.parameters())}
    module.eval()
    module.load_weights(list(weights.items()), strict=True)
    for name, array in tree_flatten(module.parameters()):
        floating = mx.issubdtype(array.dtype, mx.floating) or (name.endswith("scales") and array.dtype == mx.uint8)
        if mx.issubdtype(expected[name], mx.floating) and not floating:
            raise ValueError(f"{name} holds {array.dtype} where the model has floating numbers")


class PredictionHead:
    """A head of the kind ``mtp``, ready to be called.

    Args:
        module: as ``build_heads`` makes it.
        ends: of the model.
    """

    def __init__(self, module: Any, ends: ModelEnds) -> None:
        self.module = module
        self._backbone = backbone_of(module)
        self._ends = ends

    def __call__(self, ids: mx.array, hidden: mx.array | None, caches: list[Any]) -> mx.array:
        """ids (1, N), the hidden states (1, N, D) before them, None for zeros → hidden states (1, N, D)."""
        self._backbone.embed_tokens.reading(hidden)
        try:
            found: mx.array = self._backbone(ids, caches)
        finally:
            self._backbone.embed_tokens.reading(None)
        return found

    def logits(self, hidden: mx.array) -> mx.array:
        """hidden (1, N, D) → the logits (1, V) of the last."""
        return self._ends.project(hidden[:, -1:])[:, -1]


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the heads' layer, to plan its caches by."""
    return one_layer(without_fp8(dict(config)))
