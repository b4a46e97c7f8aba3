"""What a model asks of a machine, phase by phase: bytes to read, operations to do, kernels to launch. Knows no machine.

    bytes of a decode step = shared weights + active experts + keys and values of every sequence
    operations of a prefill = 2 × active linear parameters × tokens + attention, the head on the last token only

``model_work`` counts them from a module.
"""

import functools
from dataclasses import dataclass
from typing import Literal

from ..kv.attention_kernel import AttentionCall, AttentionDevice, Kernel, kernel_of


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's attention.

    width: numbers multiplied for each query and key that see each other: the dims of a key and of a value, over all query heads.
    window: keys that a query sees at most; None is all. layer: whose keys and values they are. every: tokens to a key.
    """

    width: int
    window: int | None
    layer: int = 0
    every: int = 1

    def operations(self, tokens: int, cached: int) -> int:
        """Operations of ``tokens`` queries after ``cached``: two for each number of each pair that sees each other."""
        if self.every > 1:
            pairs = _pairs_before(cached + tokens, self) - _pairs_before(cached, self)
        else:
            pairs = visible_pairs(tokens, cached, self.window)
        return 2 * self.width * pairs


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads that read one cache in a decode step.

    queries, keys: heads of each kind. key_dim, value_dim: numbers of a head. written_out: the model multiplies by itself, as for a
    soft cap. layers: how many attend to this cache, its own included.
    """

    queries: int
    keys: int
    key_dim: int
    value_dim: int
    written_out: bool = False
    layers: int = 1

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.queries // self.keys

    @property
    def fused(self) -> bool:
        """Whether Metal has one kernel for a long context, and not two products with the scores between them."""
        return self.kernel(LONG, large=True) != "unfused"

    def kernel(self, held: int, *, large: bool) -> Kernel:
        """Return the kernel that Metal runs for one query after ``held`` tokens, without a mask. large: on Pro, Max and Ultra."""
        return _decode_kernel(self, max(held, 1), large)


LONG = 1 << 20
"""Tokens of a context for which it is asked whether there is a fused kernel: one that begins somewhere would else make the step at
which it begins quicker than the one before."""


@functools.lru_cache(maxsize=4096)
def _decode_kernel(heads: Heads, held: int, large: bool) -> Kernel:
    call = AttentionCall(
        query_heads=heads.queries,
        heads=heads.keys,
        queries=1,
        keys=held,
        size=heads.key_dim,
        value_size=heads.value_dim,
        mask="none",
        written_out=heads.written_out,
    )
    return kernel_of(call, AttentionDevice("metal", architecture="s" if large else "g"))


def visible_pairs(tokens: int, cached: int, window: int | None) -> int:
    """Return how many (query, key) pairs see each other: ``tokens`` queries after ``cached``, each sees itself and what came before
    it, ``window`` tokens at most."""
    last = cached + tokens
    if window is None or last <= window:
        return _triangle(last) - _triangle(cached)
    if cached >= window:
        return tokens * window
    return _triangle(window) - _triangle(cached) + (last - window) * window


def _pairs_before(tokens: int, attention: Attention) -> int:
    """Return the pairs of the first ``tokens`` queries with the entries that they see: query t (from 1) sees t // every."""
    every, most = attention.every, attention.window
    full = tokens if most is None else min(tokens, most * every - 1)  # queries that see fewer than the most
    whole, rest = divmod(full, every)
    pairs = every * _triangle(whole - 1) + whole * (rest + 1) if whole else 0
    return pairs + (0 if most is None else (tokens - full) * most)


def _triangle(count: int) -> int:
    return count * (count + 1) // 2


Trait = Literal[
    "dense", "mixture", "sliding window", "latent attention", "compressed attention", "hybrid", "state space"
]
"""dense: every weight is read for every token. mixture: of experts, only some are active. sliding window: some layers see only the
last tokens. latent attention: keys and values are compressed together (MLA). compressed attention: several tokens become one entry.
hybrid: some layers keep a state of fixed size instead of keys and values (linear attention, state space, convolution). state space:
all of them do."""

TERNARY = "ternary"
"""The mode of BitNet's matrices: four weights of three values each to a byte, stacked along the rows, with one scale for all."""


@dataclass(frozen=True, slots=True)
class Product:
    """Matrices alike: (rows, columns), packed with ``bits`` in groups (None: floats), ``count`` of them in the model.

    stack: matrices in one array, of which a token multiplies with ``active``: all of them, or a mixture's chosen experts. 1 and 1
    for a plain matrix. A convolution along the tokens counts as a stack too: a row of its weights a channel. head: it makes logits,
    so prefill uses it once.
    """

    rows: int
    columns: int
    bits: int | None
    group_size: int = 64
    mode: str = "affine"
    stack: int = 1
    active: int = 1
    head: bool = False
    count: int = 1

    def nbytes(self, value_bytes: int) -> int:
        """Bytes of one matrix that a token reads. value_bytes: of a number that is not packed: weights, scales, biases."""
        weights = self.rows * self.columns * self.active
        if self.bits is None:
            return weights * value_bytes
        # Affine groups have a scale and a bias each, microscaled ones a scale of one byte.
        group_bytes = {"affine": 2 * value_bytes, TERNARY: 0}.get(self.mode, 1)
        return round(weights * (self.bits / 8 + group_bytes / self.group_size))

    @property
    def parameters(self) -> int:
        """Weights that a token is multiplied with, of all matrices alike."""
        return self.rows * self.columns * self.active * self.count

    @property
    def key(self) -> str:
        """What names it in a file of measurements."""
        packing = "float" if self.bits is None else f"{self.mode} {self.bits} in {self.group_size}"
        stack = "" if self.stack == 1 else f" {self.active} of {self.stack}"
        return f"{self.rows}x{self.columns} {packing}{stack}"


@dataclass(frozen=True, slots=True)
class KVUse:
    """What one cache holds: bytes a token up to ``limit`` tokens (None: all of them), and ``fixed_bytes`` whatever the context.

    heads: those that read it in a decode step; None where they are unknown. picked_bytes_per_token: the part of
    ``bytes_per_token`` of which a step reads no more than ``picked`` tokens' worth (compressed entries that are chosen).
    """

    bytes_per_token: int
    limit: int | None
    fixed_bytes: int
    heads: Heads | None = None
    picked_bytes_per_token: int = 0
    picked: int = 0

    def held(self, context: int) -> int:
        """Tokens held after ``context`` tokens."""
        return context if self.limit is None else min(context, self.limit)

    def bytes_at(self, context: int) -> int:
        """Bytes read by a step after ``context`` tokens: all that are held, but of chosen entries those alone."""
        held = self.held(context)
        unread = max(0, held - self.picked) * self.picked_bytes_per_token
        return self.fixed_bytes + held * self.bytes_per_token - unread


@dataclass(frozen=True, slots=True)
class Workload:
    """A model's work. Bytes and parameters; None is unknown.

    hidden: width of the residual. launches: kernels a decode step launches, counted from the modules. shared_bytes: weights
    every step reads. expert_bytes: all experts' weights, of which each token reads the share ``active``: None for a mixture that
    does not say it. prefill_parameters: active linear parameters, without the head; None also where the config does not tell the
    size of attention. kv: one a cache: keys that several layers share are counted once. attention: one a layer that attends.
    products: the matrices of which the parameters are the sum.
    """

    traits: tuple[Trait, ...]
    layers: int
    hidden: int | None
    launches: int
    shared_bytes: int
    expert_bytes: int
    active: float | None
    prefill_parameters: int | None
    head_parameters: int
    kv: tuple[KVUse, ...]
    attention: tuple[Attention, ...]
    products: tuple[Product, ...]
    query_heads: int | None
    vocabulary: int | None

    @property
    def expert_products(self) -> int:
        """Products of a step that gather a token's experts from a stack of them."""
        return sum(product.count for product in self.products if product.active < product.stack)

    def weight_bytes(self, batch: int = 1) -> int | None:
        """Bytes of weights that one step of ``batch`` sequences reads: experts that any of them chose, each once."""
        if not self.expert_bytes:
            return self.shared_bytes
        if self.active is None:
            return None
        return self.shared_bytes + round(self.expert_bytes * self.touched(batch))

    def touched(self, tokens: int) -> float:
        """Share of the experts that any of ``tokens`` tokens chose, on average where each chooses for itself; 0 without experts."""
        return 1 - (1 - (self.active or 0.0)) ** tokens

    def kv_bytes(self, context: int, batch: int = 1) -> int:
        """Bytes of keys, values and states that one step reads at this context.

        What it writes is left out: of keys and values that is one token; of states as much as is read, and a chip's cache may take
        it, so that the ceiling stays one.
        """
        return batch * sum(layer.bytes_at(context) for layer in self.kv)

    def step_bytes(self, context: int, batch: int = 1) -> int | None:
        """Bytes that one decode step reads."""
        weights = self.weight_bytes(batch)
        return None if weights is None else weights + self.kv_bytes(context, batch)

    def prefill_operations(self, tokens: int, cached: int = 0) -> int | None:
        """Operations of reading ``tokens`` after ``cached`` and making the first token: the head runs once."""
        if self.prefill_parameters is None:
            return None
        linear = 2 * (self.prefill_parameters * tokens + self.head_parameters)
        return linear + sum(layer.operations(tokens, cached) for layer in self.attention)
