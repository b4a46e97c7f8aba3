"""Which of mlx-lm's classes compute as step.py does, and what of a model of theirs it needs.

A class fits by name, because the order in which it computes can't be seen from outside; its layers must be its own, and packed as
the kernels multiply. What fits is then compared with the class itself (stepping.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models import rope_utils

from ..corrected_layers import FeedForward, LongRoPE, ScaledRoPE
from .packed import PackedEmbedding, PackedHead, PackedLinear
from .step import GELU, GELU_TANH, SILU, Floats

PLACE = "mlx_lm.models."

PROBED = 256
"""Positions whose rotations are asked for at once."""

STEADY_ROPES = (
    *(nn.RoPE, rope_utils.Llama3RoPE, rope_utils.YarnRoPE, rope_utils.SuScaledRoPE, rope_utils.ProportionalRoPE),
    *(ScaledRoPE, LongRoPE),
)
"""Rotary embeddings that turn a position in the same way however long the context is."""


class UnfitError(Exception):
    """Why a model does not fit, in words that follow "because"."""


@dataclass(frozen=True, slots=True)
class Family:
    """What the instances of a class have in common.

    activation: of the gated feed-forward block; None: as its block says. adds_one: whether norms multiply by 1 + weight. embedding:
    what embeddings are multiplied by, given the model.
    """

    activation: int | None = SILU
    adds_one: bool = False
    embedding: Callable[[Any], float] = lambda _: 1.0


def _root(model: Any) -> float:
    return float(model.args.hidden_size**0.5)


def _rounded_root(model: Any) -> float:
    return float(mx.array(_root(model), mx.bfloat16).item())  # type: ignore[arg-type]


FAMILIES = {
    "llama": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "phi3": Family(),
    "granite": Family(embedding=lambda model: float(model.model.embedding_multiplier)),
    "gemma": Family(None, adds_one=True, embedding=_root),
    "gemma2": Family(GELU_TANH, adds_one=True, embedding=_root),
    "gemma3_text": Family(GELU_TANH, adds_one=True, embedding=_rounded_root),
}
INSIDE = "language_model"
"""What classes call one of these that they only pass on to: those of models that could see as well."""


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Of one layer. norms: weights in the order of step.py, None where there is none; the first two are there."""

    norms: tuple[Floats | None, ...]
    joined: tuple[PackedLinear, ...]
    added: PackedLinear
    gated: tuple[PackedLinear, ...]
    down: PackedLinear
    rope: "Rotations"
    scale: float
    softcap: float


@dataclass(frozen=True, slots=True)
class ModelParts:
    """All that a step needs. heads: of keys; repeats: query heads to one of them; size: a head's numbers."""

    layers: tuple[LayerParts, ...]
    ropes: "tuple[Rotations, ...]"
    embedding: PackedEmbedding
    last_norm: Floats
    head: PackedLinear | PackedEmbedding
    heads: int
    repeats: int
    size: int
    activation: int
    eps: float
    embedded: float
    residual: float
    logits: float
    softcap: float


class Rotations:
    """Cosines and sines of positions, as a rotary embedding gives them.

    dims: numbers of a head that it rotates. paired: whether those that turn together stand side by side.
    """

    def __init__(self, rope: Any, size: int) -> None:
        if type(rope) not in STEADY_ROPES:
            raise UnfitError(f"its rotary embedding is a {type(rope).__name__}")
        self._rope, self._size = rope, size
        one = np.zeros((1, 1, 1, size), np.float32)
        one[..., 0] = 1
        turned = np.flatnonzero(np.asarray(rope(mx.array(one), offset=1)))
        if len(turned) != 2 or turned[0] != 0:
            raise UnfitError("its rotary embedding is not understood")
        self.paired = turned[1] == 1 and size > 2
        self.dims = self._all_paired() if self.paired else 2 * int(turned[1])
        self._known: dict[int, Floats] = {}

    def at(self, position: int) -> Floats:
        """Return (2, dims / 2): the cosines and sines of a position."""
        block = position // PROBED
        if block not in self._known:
            if len(self._known) >= PROBED:
                self._known.clear()
            self._known[block] = self._ask(block * PROBED)
        found: Floats = self._known[block][position % PROBED]
        return found

    def _ask(self, first: int) -> Floats:
        halves = slice(0, self.dims, 2) if self.paired else slice(0, self.dims // 2)
        others = slice(1, self.dims, 2) if self.paired else slice(self.dims // 2, self.dims)
        ones = np.zeros((1, 1, PROBED, self._size), np.float32)
        ones[..., halves] = 1
        turned = np.asarray(self._rope(mx.array(ones), offset=first))[0, 0]
        return np.stack([turned[:, halves], turned[:, others]], axis=1)

    def _all_paired(self) -> int:
        """Return how many numbers are rotated, from the first on, where pairs stand side by side."""
        ones = np.zeros((1, 1, 1, self._size), np.float32)
        ones[..., ::2] = 1
        turned = np.asarray(self._rope(mx.array(ones), offset=1))[0, 0, 0, 1::2]
        return 2 * int(np.count_nonzero(turned))


def parts_of(model: Any) -> ModelParts:
    """Return what a step of mlx-lm's ``model`` needs. Raises UnfitError."""
    name = _name_of(model)
    if INSIDE in model:
        model = model[INSIDE]
        name = _name_of(model)
    if name not in FAMILIES or type(model).__name__ != "Model":
        raise UnfitError(f"its class, {name}, is not one of those that steps are compiled for")
    family, decoder = FAMILIES[name], model.model
    tied = "lm_head" not in model
    embedding = _packed(decoder.embed_tokens, "embed_tokens")
    if type(embedding) is not PackedEmbedding:
        raise UnfitError("its embedding is not packed")
    ropes: dict[int, Rotations] = {}
    reader = _LayerReader(name, family, ropes)
    layers = tuple(reader.parts(layer) for layer in decoder.layers)
    last_norm = reader.norm(decoder.norm)
    assert last_norm is not None
    return ModelParts(
        layers,
        tuple({id(each.rope): each.rope for each in layers}.values()),
        embedding,
        last_norm,
        embedding if tied else _packed(model.lm_head, "lm_head"),
        *reader.heads,
        activation=reader.activation,
        eps=reader.eps,
        embedded=family.embedding(model),
        residual=float(decoder.layers[0].residual_multiplier) if name == "granite" else 1.0,
        logits=1 / float(model.logits_scaling) if name == "granite" else 1.0,
        softcap=float(model.final_logit_softcapping) if name == "gemma2" else 0.0,
    )


def _name_of(model: Any) -> str:
    return type(model).__module__.removeprefix(PLACE)


def _packed(layer: Any, name: str) -> Any:
    if type(layer) not in (PackedLinear, PackedHead, PackedEmbedding):
        raise UnfitError(f"its {name} is a {type(layer).__name__}, not packed as the kernels multiply")
    return layer


class _LayerReader:
    """Reads layers, and finds out whether they are alike where a step takes them to be."""

    def __init__(self, name: str, family: Family, ropes: dict[int, Rotations]) -> None:
        self._name, self._family, self._ropes = name, family, ropes
        self._found: dict[str, Any] = {}

    @property
    def heads(self) -> tuple[int, int, int]:
        """Key heads, query heads to one of them, and a head's numbers."""
        found: tuple[int, int, int] = self._found["heads"]
        return found

    @property
    def activation(self) -> int:
        """That of all layers."""
        return int(self._found["activation"])

    @property
    def eps(self) -> float:
        """That of all norms."""
        return float(self._found["eps"])

    def parts(self, layer: Any) -> LayerParts:
        """Return the parts of a layer. Raises UnfitError."""
        attention, block = layer.self_attn, layer.mlp
        self._own(layer, attention)
        heads, queries = attention.n_kv_heads, attention.n_heads
        joined = self._linear(attention, ("qkv_proj",) if "qkv_proj" in attention else ("q_proj", "k_proj", "v_proj"))
        width = sum(len(each.weight) for each in joined)
        size = width // (queries + 2 * heads)
        if queries % heads or width % (queries + 2 * heads) or size % 16:
            raise UnfitError("its heads are of a width that the kernels do not take")
        self._same("heads", (heads, queries // heads, size))
        self._same("activation", self._activation(block))
        post = "pre_feedforward_layernorm" in layer
        norms = (
            self.norm(layer.input_layernorm),
            self.norm(layer.pre_feedforward_layernorm if post else layer.post_attention_layernorm),
            self.norm(layer.post_attention_layernorm) if post else None,
            self.norm(layer.post_feedforward_layernorm) if post else None,
            self.norm(attention.get("q_norm")),
            self.norm(attention.get("k_norm")),
        )
        return LayerParts(
            norms,
            joined,
            self._linear(attention, ("o_proj",))[0],
            self._linear(block, ("gate_up_proj",) if "gate_up_proj" in block else ("gate_proj", "up_proj")),
            self._linear(block, ("down_proj",))[0],
            rope=self._rope(attention.rope, size),
            scale=float(attention.scale),
            softcap=float(attention.attn_logit_softcapping) if self._name == "gemma2" else 0.0,
        )

    def norm(self, module: Any) -> Floats | None:
        """Return what a norm multiplies by; None for none."""
        if module is None:
            return None
        own = type(module).__module__ == PLACE + self._name and type(module).__name__ == "RMSNorm"
        if own != self._family.adds_one or not (own or type(module) is nn.RMSNorm):
            raise UnfitError(f"one of its norms is a {type(module).__name__}")
        self._same("eps", float(module.eps))
        weight = module.weight.astype(mx.float32) + (1.0 if own else 0.0)
        return np.array(weight)

    def _activation(self, block: Any) -> int:
        if self._family.activation is not None:
            self._own(block)
            return self._family.activation
        if type(block) is not FeedForward:
            raise UnfitError(f"its feed-forward block is a {type(block).__name__}")
        return GELU_TANH if block._gelu is nn.gelu_approx else GELU

    def _own(self, *modules: Any) -> None:
        for module in modules:
            if type(module).__module__ != PLACE + self._name:
                raise UnfitError(f"one of its layers holds a {type(module).__name__} that is not its class's own")

    def _linear(self, module: Any, names: Sequence[str]) -> tuple[Any, ...]:
        return tuple(_packed(module[name], name) for name in names)

    def _rope(self, rope: Any, size: int) -> Rotations:
        key: Any = (rope.dims, rope.traditional, rope.base, rope.scale) if type(rope) is nn.RoPE else id(rope)
        if key not in self._ropes:
            self._ropes[key] = Rotations(rope, size)
        found = self._ropes[key]
        self._same("rotated", (found.dims, found.paired))
        return found

    def _same(self, what: str, value: Any) -> None:
        if self._found.setdefault(what, value) != value:
            raise UnfitError(f"its layers differ in their {what}")
