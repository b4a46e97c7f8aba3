"""A model's decode steps by step.py, in place of its class's forward pass."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx import nn
from mlx_lm.models import rope_utils

from ..kv.cache import AttendingRows, Cache, HeldSlots
from ..kv.layout import Affine, Codec, Plain, Ring
from ..kv.plan import CachePlan
from ..model.corrected_layers import FeedForward, LongRoPE, ScaledRoPE
from ..model.head import are_asked_for, keep_hidden_states
from ..vision.positions import places
from . import PIECE
from .formats import FORMS, LANES, PLAIN_FORM, WeightFormat
from .layers import NOTICEABLE_S, PackedEmbedding, PackedHead, PackedLinear, round_rows, rounds_rows
from .machine_code import address_of, function_of, prepare_step
from .pool import POOL
from .products import Floats, PackedMatrix, Preparation, embedding_of, shares
from .words import attention, products, step
from .words.step import GELU, GELU_TANH, SILU

# Classes match by name, since their order of computation is invisible; layers must be standard, with supported
# packing. stepping.py then compares results.


PLACE = "mlx_lm.models."

PROBED = 256  # positions whose rotations are asked for at once

# Rotary embeddings that turn a position in the same way however long the context is.
STEADY_ROPES = (
    *(nn.RoPE, rope_utils.Llama3RoPE, rope_utils.YarnRoPE, rope_utils.SuScaledRoPE, rope_utils.ProportionalRoPE),
    *(ScaledRoPE, LongRoPE),
)


class UnfitError(Exception):
    """Why a model doesn't fit, phrased to follow "because"."""


@dataclass(frozen=True, slots=True)
class Family:
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
# What classes call one of these that they only pass on to: those of models that could see as well.
INSIDE = "language_model"


@dataclass(frozen=True, slots=True)
class LayerParts:
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
    """All parts of a step. heads: of keys; repeats: query heads per key head; size: head dimension."""

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
    """Cosines and sines by position. dims: rotated channels per head. paired: partners are adjacent."""

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

    def rows_at(self, position: int) -> Floats:
        """Return (2, dims / 2): cosines and sines at a position."""
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
        ones = np.zeros((1, 1, 1, self._size), np.float32)
        ones[..., ::2] = 1
        turned = np.asarray(self._rope(mx.array(ones), offset=1))[0, 0, 0, 1::2]
        return 2 * int(np.count_nonzero(turned))


def parts_of(model: Any) -> ModelParts:
    """Return the parts of mlx-lm's ``model``. Raises UnfitError."""
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
    def __init__(self, name: str, family: Family, ropes: dict[int, Rotations]) -> None:
        self._name, self._family, self._ropes = name, family, ropes
        self._found: dict[str, Any] = {}

    @property
    def heads(self) -> tuple[int, int, int]:
        found: tuple[int, int, int] = self._found["heads"]
        return found

    @property
    def activation(self) -> int:
        return int(self._found["activation"])

    @property
    def eps(self) -> float:
        return float(self._found["eps"])

    def parts(self, layer: Any) -> LayerParts:
        """Return a layer's parts. Raises UnfitError."""
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


# ``take_steps`` compares both on a few tokens; then kernels do decode steps (a token of one or more sequences,
# or verified draft tokens) and prompt pieces without logits, on the engine's caches (engine/kv/cache.py). All
# else stays with the class.


Words = npt.NDArray[np.int64]
Forward = Callable[[mx.array, Any], mx.array]
Caching = Callable[[], list[Any]]

# Tokens of one sequence that a step takes at most: the last one and the longest draft. More are a piece of a prompt.
MOST_ROWS = 32

TOLERANCE = 1e-3  # how far logits may lie from the class's own, over the largest of them: the order of sums differs

CHECKED = ((3, 1, 4), (1, 5, 9))  # tokens read by the class, and tokens that are then decoded both ways


class Steps:
    def __init__(self, parts: ModelParts) -> None:
        self.parts = parts
        self._spaces: dict[tuple[int, bool], _Space] = {}
        self._words: WeakKeyDictionary[HeldSlots, tuple[int, Words]] = WeakKeyDictionary()

    def of_layers(self, first: int, last: int) -> "Steps":
        return Steps(replace(self.parts, layers=self.parts.layers[first:last]))

    def logits(self, inputs: mx.array, caches: Sequence[Any], own: Forward) -> mx.array | None:
        """Return logits (B, N, V) of a fitting step, with the tokens cached, else None.

        own: the class's pass, for sequences whose caches need it, one by one so that none sees its neighbours.
        """
        batch, count = inputs.shape
        if count != 1 and batch == 1 and not are_asked_for():
            return self.read(inputs, caches, own)
        if count != 1 and (batch != 1 or count > MOST_ROWS):
            return None
        lanes = _lanes(caches)
        for lane in lanes:
            self._make_slots(lane)
        fitting = [all(cache.takes_in_place(count) for cache in lane) for lane in lanes]
        if not any(fitting):
            return None
        if all(fitting):
            return self._step(inputs, lanes)
        found = [own(inputs[row : row + 1], lane) for row, lane in enumerate(lanes) if not fitting[row]]
        chosen = [row for row, fits in enumerate(fitting) if fits]
        together = self._step(inputs[mx.array(chosen)], [lanes[row] for row in chosen])
        parts = iter(found), iter(mx.split(together, len(chosen)))
        return mx.concatenate([next(parts[fits]) for fits in fitting])

    def read(self, inputs: mx.array, caches: Sequence[Any], own: Forward) -> mx.array | None:
        """Prefill ids (1, N) as far as the caches accept; ``own`` does the rest. None if they accept none."""
        (lane,) = _lanes(caches) or ([],)
        done, count = 0, inputs.shape[1]
        self._make_slots(lane)
        while lane and done < count:
            size = min(PIECE, count - done)
            if not all(cache.takes_in_place(size) for cache in lane):
                break
            self._compute(inputs[:, done : done + size], [lane], asked=False)
            done += size
        if done == count:
            return mx.zeros((1, 0, len(self.parts.head.weight)))
        return own(inputs[:, done:], caches) if done else None

    def _make_slots(self, lane: Sequence[Cache]) -> None:
        for cache in lane:
            cache.make_slots(self.parts.heads, self.parts.size)

    def _step(self, inputs: mx.array, lanes: Sequence[Sequence[Cache]]) -> mx.array:
        logits, hidden = self._compute(inputs, lanes, asked=True)
        keep_hidden_states(lambda: mx.array(hidden.reshape(*inputs.shape, -1)))
        return mx.array(logits.reshape(*inputs.shape, -1))  # shaped by NumPy: nothing is left for MLX to compute

    def _compute(self, inputs: mx.array, lanes: Sequence[Sequence[Cache]], *, asked: bool) -> tuple[Floats, Floats]:
        count = inputs.shape[1]
        ids = np.asarray(inputs).reshape(-1).astype(np.int64)
        key = 1 << (len(ids) - 1).bit_length(), asked
        if key not in self._spaces:
            self._spaces[key] = _Space(self.parts, key[0], asked=asked)
        addresses: list[list[int]] = []
        positions: list[int] = []
        for lane in lanes:
            if lane[0].claim(count):  # else the others, which were claimed with it, lie still
                mx.eval([cache.claim(count) for cache in lane])
            positions += range(lane[0].offset, lane[0].offset + count)
            addresses += [[self._address(cache, cache.hold(count)) for cache in lane]] * count
        return self._spaces[key].run(ids, addresses, positions)

    def _address(self, cache: Cache, held: HeldSlots) -> int:
        found = self._words.get(held)
        if found is None:
            words = _cache_words(cache, held, self.parts.size)
            found = self._words[held] = int(words.ctypes.data), words  # to ask NumPy takes longer than to look it up
        return found[0]


def _lanes(caches: Sequence[Any]) -> list[list[Cache]]:
    if all(type(cache) is Cache for cache in caches):
        return [list(caches)]
    if all(type(cache) is AttendingRows for cache in caches):
        lanes = [list(lane) for lane in zip(*(cache.rows for cache in caches), strict=True)]
        if all(type(cache) is Cache for lane in lanes for cache in lane):
            return lanes
    return []


def _cache_words(cache: Cache, held: HeldSlots, size: int) -> Words:
    layout = cache.layout
    words = np.zeros(attention.PARTS + attention.PART * len(held.prefix), np.int64)
    words[attention.CAPACITY], words[attention.PREFIXES] = held.capacity, len(held.prefix)
    words[attention.PREFIX_TOKENS] = sum(each.tokens for each in held.prefix)
    if isinstance(layout, Ring):
        words[attention.WINDOW], words[attention.KEEP], words[attention.SPARE] = (
            layout.window,
            layout.keep,
            layout.spare,
        )
    for first, codec, addresses in (
        (attention.KEYS, cache.key_codec, held.keys),
        (attention.VALUES, cache.value_codec, held.values),
    ):
        words[first : first + len(addresses)] = addresses
        form, group, bits, rotated = _form(codec, size)
        kernel = address_of("score" if first == attention.KEYS else "mix", form)
        words[first + attention.KERNEL : first + attention.SIDE] = (
            *(kernel, bits, rotated, size * bits // 8, size // group, group // 16),
            int(FORMS[form].swaps),
        )
    at = attention.PARTS
    for each in held.prefix:
        words[at] = each.tokens
        for place, arrays in ((at + 1, each.keys), (at + 4, each.values)):
            words[place : place + len(arrays)] = [np.asarray(array).ctypes.data for array in arrays]
        at += attention.PART
    return words


def _form(codec: Codec, size: int) -> tuple[int, int, int, int]:
    if isinstance(codec, Affine):
        return FORMS.index(WeightFormat(codec.bits)), codec.group_size, codec.bits, codec.block or 0
    return PLAIN_FORM, size, 32, 0


class _Space:
    def __init__(self, parts: ModelParts, rows: int, *, asked: bool) -> None:
        self._parts, self._rows = parts, rows
        self._kept: list[Any] = []  # whatever words hold the addresses of
        self._counting: list[Words] = []  # of products: each tells how many rows there are
        query_width, key_width = parts.heads * parts.repeats * parts.size, parts.heads * parts.size
        dims, inner = len(parts.last_norm), _columns(parts.layers[0].down)
        self._ids = self._keep(np.zeros(rows, np.int64))
        self._hidden, self._normed, self._added = (self._buffer(dims) for _ in range(3))
        self._joined, self._mixed = self._buffer(query_width + 2 * key_width), self._buffer(query_width)
        self._gated, self._acted = self._buffer(2 * inner), self._buffer(inner)
        dims_turned = parts.ropes[0].dims
        self._turns = self._keep(np.zeros((rows, len(parts.ropes), 2, dims_turned // 2), np.float32))
        self._table = self._keep(np.zeros((rows, len(parts.layers), 2), np.int64))
        self._logits = self._buffer(len(parts.head.weight) if asked else 0)
        self._prepared: dict[tuple[int, Preparation], tuple[Any, Words]] = {}
        self._model = np.zeros(step.MODEL, np.int64)
        self._model[:] = (
            *(rows, dims, inner, dims_turned, parts.ropes[0].paired, len(parts.ropes), self._turns.ctypes.data),
            parts.activation,
            *(
                each.ctypes.data
                for each in (self._hidden, self._normed, self._added, self._gated, self._acted, parts.last_norm)
            ),
            *embedding_of(parts.embedding._matrix, self._ids, self._hidden, self._keep),
            *(address_of("write"), address_of("attend")),
        )
        self._numbers = np.array((parts.embedded, parts.residual, parts.logits, parts.softcap, parts.eps), np.float32)
        self._layers = np.array([self._layer_words(each) for each in parts.layers])
        self._attentions = np.array([self._attention_words(index, each) for index, each in enumerate(parts.layers)])
        runs = [each for layer in parts.layers for each in self._products(layer)]
        if asked:
            self._runs = np.array([*runs, self._product((parts.head,), self._normed, self._logits)])
        else:
            self._runs = np.array(runs[: len(runs) - step.RUNS + 1])
        self._step = function_of("step", 10)
        self._given = (
            *(
                self._model.ctypes.data,
                self._layers.ctypes.data,
                len(self._layers),
                self._runs.ctypes.data,
                len(self._runs),
            ),
            *(self._attentions.ctypes.data, self._numbers.ctypes.data, self._logits.ctypes.data, self._logits.shape[1]),
        )

    def run(
        self, ids: npt.NDArray[np.int64], addresses: Sequence[Sequence[int]], positions: Sequence[int]
    ) -> tuple[Floats, Floats]:
        """Compute a step: logits (rows, V) and hidden states (rows, D), valid until the next.

        addresses: cache words per row. Hidden states are the head's if logits are requested.
        """
        rows = len(ids)
        if rows != self._model[step.COUNT]:
            self._model[step.COUNT] = self._attentions[:, attention.ROWS] = rows
            for words in self._counting:
                words[products.COUNT] = rows
        self._ids[:rows] = ids
        self._table[:rows, :, 0] = addresses
        self._table[:rows, :, 1] = np.array(positions)[:, None]
        for row, position in enumerate(positions):
            for index, rope in enumerate(self._parts.ropes):
                self._turns[row, index] = rope.rows_at(position)
        pool = POOL.acquire()
        try:
            self._step(pool, *self._given)
        finally:
            POOL.release(pool)
        return self._logits[:rows], self._normed[:rows]

    def _keep(self, array: Any) -> Any:
        self._kept.append(array)
        return array

    def _buffer(self, width: int) -> Floats:
        made: Floats = self._keep(np.zeros((self._rows, width), np.float32))
        return made

    def _address(self, array: Any) -> int:
        return 0 if array is None else int(self._keep(array).ctypes.data)

    def _layer_words(self, layer: LayerParts) -> list[int]:
        return [
            *(self._address(each) for each in layer.norms[:4]),
            *(self._bias((each,)) for each in (layer.added, layer.down)),
            *(self._address(each) for each in layer.norms[4:]),
            *(self._bias(each) for each in (layer.joined, layer.gated)),
            self._parts.ropes.index(layer.rope),
        ]

    def _products(self, layer: LayerParts) -> list[tuple[int, ...]]:
        return [
            self._product(layer.joined, self._normed, self._joined),
            self._product((layer.added,), self._mixed, self._added),
            self._product(layer.gated, self._normed, self._gated),
            self._product((layer.down,), self._acted, self._added),
        ]

    def _bias(self, layers: Sequence[Any]) -> int:
        if not any("bias" in each for each in layers):
            return 0
        parts = [
            np.array(each.bias.astype(mx.float32)) if "bias" in each else np.zeros(len(each.weight), np.float32)
            for each in layers
        ]
        return self._address(np.concatenate(parts))

    def _attention_words(self, index: int, layer: LayerParts) -> Words:
        parts, words = self._parts, np.zeros(attention.ALL, np.int64)
        queries = 4 * parts.heads * parts.repeats * parts.size
        joined = self._joined.ctypes.data
        words[:] = (
            *(parts.heads, parts.repeats, parts.size, self._rows, index, len(parts.layers), self._table.ctypes.data),
            *(joined, self._joined.strides[0], joined + queries, joined + queries + 4 * parts.heads * parts.size),
            *(self._mixed.ctypes.data, self._mixed.strides[0]),
            self._address(np.array((layer.scale, layer.softcap), np.float32)),
        )
        return words

    def _product(self, layers: Sequence[Any], x: Floats, y: Floats) -> tuple[int, ...]:
        matrices = [each._matrix for each in layers]
        preparations: dict[int, tuple[int, int]] = {}
        several: list[int] = []
        begin = 0
        for index, matrix in enumerate(matrices):
            rows: Any = x
            if (preparation := matrix.preparation) is not None:
                rows, arguments = self._prepare(preparation, x)
                preparations[arguments.ctypes.data] = preparation.kernel, arguments.ctypes.data
            words = self._keep(matrix._arguments.copy())
            self._counting.append(words)
            words[products.X], words[products.X_BYTES], words[products.COUNT] = (
                rows.ctypes.data,
                rows.strides[0],
                self._rows,
            )
            words[products.Y], words[products.Y_BYTES] = y.ctypes.data + 4 * begin, y.strides[0]
            several += (sum_of_pieces(matrices[:index]), matrix.kernel, words.ctypes.data)
            begin += len(matrix.weight)
        _, at_once = shares(self._rows, begin, x.shape[1], POOL.threads)
        all_pieces = sum_of_pieces(matrices)
        before = self._keep(np.array([each for pair in preparations.values() for each in pair], np.int64))
        if len(matrices) == 1:
            _, kernel, address = several
        else:
            made = self._keep(np.array([len(matrices), *several, all_pieces], np.int64))
            kernel, address = address_of("several"), made.ctypes.data
        return kernel, address, all_pieces, at_once, before.ctypes.data, len(preparations)

    def _prepare(self, preparation: Preparation, x: Floats) -> tuple[Any, Words]:
        key = x.ctypes.data, preparation
        if key not in self._prepared:
            out = self._keep(np.zeros((self._rows, preparation.row_bytes), np.uint8))
            self._prepared[key] = out, self._keep(preparation.arguments(x, out))
        return self._prepared[key]


def sum_of_pieces(matrices: Sequence[PackedMatrix]) -> int:
    return sum(-(-len(each.weight) // products.OUTS) for each in matrices)


def _columns(layer: Any) -> int:
    return int(layer.scales.shape[1]) * int(layer.group_size)


def take_steps(
    model: nn.Module,
    plan: CachePlan,
    make: Caching,
    compiling: Callable[[], None] = lambda: None,
    *,
    compared: bool = False,
) -> str:
    """Switch a model's steps and prompt pieces to kernels; return why not, or "". Weights must stay unchanged.

    plan: of its caches, for compilation. make: a sequence's caches at 16 bits. compared: with what its class computes, before.
    """
    try:
        steps = Steps(parts_of(model))
    except UnfitError as error:
        return str(error)
    codecs = {(each.ours.key_codec, each.ours.value_codec) for each in plan.layers if each.ours is not None}
    with ThreadPoolExecutor(1, "tokamac-compile") as threads:
        compiled = threads.submit(_prepare, codecs | {(Plain(), Plain())})
        try:
            compiled.result(NOTICEABLE_S)
        except TimeoutError:
            compiling()
            compiled.result()
    if not compared:
        rounds = rounds_rows(model)
        if rounds:  # rounded rows make a large step of a small difference: what is compared is exact
            round_rows(model, rounds=False)
        off = _difference(model, steps, make)
        if rounds:
            round_rows(model, rounds=True)
            steps = Steps(steps.parts)
        if not off <= TOLERANCE:
            return f"what was compiled for its class lies {off:.1e} of the largest logit off"
    model._steps = steps
    model.__class__ = _stepping(type(model))
    return ""


def _prepare(codecs: Iterable[tuple[Codec, Codec]]) -> None:
    for keys, values in codecs:
        address_of("score", _form(keys, LANES)[0])
        address_of("mix", _form(values, LANES)[0])
    prepare_step()


def _difference(model: nn.Module, steps: Steps, make: Caching) -> float:
    read, decoded = CHECKED
    both = make(), make()
    if steps.read(mx.array([read]), both[0], model) is None:
        return float("nan")
    model(mx.array([read]), cache=both[1])
    mx.eval([cache.state for cache in both[1]])
    off = 0.0
    for token in decoded:
        ids = mx.array([[token]])
        found = steps.logits(ids, both[0], model)
        if found is None:
            return float("nan")
        expected = model(ids, cache=both[1])
        off = max(off, float(mx.max(mx.abs(found - expected)) / mx.max(mx.abs(expected))))
    return off


class Stepped:
    _steps: Steps


def steps_of(model: nn.Module) -> Steps | None:
    return model._steps if isinstance(model, Stepped) else None


def _stepping(kind: type[Any]) -> type[Any]:
    class Stepping(Stepped, kind):
        def __call__(self, inputs: mx.array, cache: Any = None, *others: Any, **named: Any) -> mx.array:
            if cache is not None and not others and not named and inputs.ndim == 2 and places() is None:
                found = self._steps.logits(inputs, cache, super().__call__)
                if found is not None:
                    return found
            own: mx.array = super().__call__(inputs, cache, *others, **named)
            return own

    Stepping.__name__, Stepping.__qualname__, Stepping.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Stepping
