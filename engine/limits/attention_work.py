"""What attention computes: which queries see which keys, how many numbers each pair takes, and which heads read a cache, layer by
layer."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tokamac.engine.kv.attention_kernel import AttentionCall, AttentionDevice, Kernel, kernel_of
from tokamac.engine.limits.cost import first_of, text_config

if TYPE_CHECKING:
    from tokamac.engine.kv.plan import LayerPlan


SPARSE = "compressed_sparse_attention"
"""Layers that choose among compressed entries."""


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


CAPPED = frozenset({"gemma2", "vaultgemma"})
"""Families that cap their scores where the config does not say."""


def attention_of(config: Mapping[str, Any], layers: "Sequence[LayerPlan]") -> tuple[Attention, ...] | None:
    """Return the attention of every layer that has keys, of its own or another's; None where the config does not tell its size.

    Latent attention multiplies with the dims that its config names, unfolded, as prefill does.
    """
    own = []
    for layer in layers:
        if layer.kind == "state":
            continue
        width = _width(config, layer)
        if width is None:
            return None
        if layer.kind == "compressed":
            own.extend(_compressed(text_config(config), width, layer.index))
        else:
            own.append(Attention(width, layer.window, layer.index))
    return (*own, *_reusing(config, own))


def heads_of(config: Mapping[str, Any], layer: "LayerPlan", attention: Sequence[Attention]) -> Heads | None:
    """Return the heads that read a layer's cache; None where they are unknown. Packed keys and values are multiplied by kernels of
    which no measurement was published: they are taken to compute no faster than the others."""
    queries = query_heads(config, layer.index)
    if layer.ours is None or queries is None:
        return None
    seen = layer.ours.seen
    if seen.heads < 1 or queries % seen.heads:
        return None
    text = text_config(config)
    capped = bool(text.get("attn_logit_softcapping", text.get("model_type") in CAPPED))
    layers = sum(each.layer == layer.index for each in attention)
    return Heads(queries, seen.heads, seen.key_dim, seen.value_dim, capped or not seen.through, max(layers, 1))


def query_heads(config: Mapping[str, Any], layer: int = 0) -> int | None:
    """Return the query heads of a layer; None where the config does not say."""
    text = text_config(config)
    heads = first_of(text, "num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads")
    kinds, sliding = text.get("layer_types"), text.get("attention_other_setting")  # Step 3.5's
    if isinstance(sliding, dict) and isinstance(kinds, list) and kinds[layer] == "sliding_attention":
        heads = sliding.get("num_attention_heads")
    if isinstance(heads, list):
        heads = heads[layer]
    return heads if isinstance(heads, int) else None


def reusing_layers(config: Mapping[str, Any]) -> int:
    """Return how many of the upper layers attend to keys and values of lower ones (gemma3n, gemma4, afm7)."""
    return int(first_of(text_config(config), "num_kv_shared_layers", "num_kv_reuse_layers") or 0)


def _width(config: Mapping[str, Any], layer: "LayerPlan") -> int | None:
    text, heads = text_config(config), query_heads(config, layer.index)
    if heads is None:
        return None
    if layer.ours is not None:
        return heads * (layer.ours.seen.key_dim + layer.ours.seen.value_dim)
    if layer.kind == "latent":
        index = (text.get("index_n_heads"), text.get("index_head_dim"))
        if layer.path[1:] == (1,) and isinstance(index[0], int) and isinstance(index[1], int):
            return index[0] * index[1]  # scores that choose what to attend to (DeepSeek-V3.2)
        dims = [text.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
        return heads * sum(dims) if all(isinstance(dim, int) for dim in dims) else None  # type: ignore[arg-type]
    dim, hidden = text.get("head_dim"), first_of(text, "hidden_size", "n_embd")
    known = isinstance(dim, int) or isinstance(hidden, int)
    return 2 * heads * (dim or hidden // heads) if known else None


def _reusing(config: Mapping[str, Any], own: Sequence[Attention]) -> Iterator[Attention]:
    """Yield the attention of the layers that reuse keys: those of the last layer of their kind that made some."""
    count, kinds = reusing_layers(config), text_config(config).get("layer_types")
    made = {attention.layer: attention for attention in own}
    if not count or not made:
        return
    first = max(made) + 1
    for layer in range(first, first + count):
        alike = [index for index in made if not isinstance(kinds, list) or kinds[index] == kinds[layer]]
        yield replace(made[max(alike, default=first - 1)])


def chosen_entries(config: Mapping[str, Any], layer: int) -> tuple[int, int] | None:
    """Return (tokens to an entry, entries that a query attends to) of a layer that chooses among compressed entries, else None."""
    text = text_config(config)
    kind = text["layer_types"][layer]
    return (text["compress_rates"][kind], text["index_topk"]) if kind == SPARSE else None


def _compressed(text: Mapping[str, Any], width: int, layer: int) -> Iterator[Attention]:
    """Yield the attention of a layer that compresses (DeepSeek V4): its window, the keys that choose among entries, and these."""
    kind = text["layer_types"][layer]
    every = text["compress_rates"][kind]
    yield Attention(width, text["sliding_window"], layer)
    if kind == SPARSE:
        yield Attention(text["index_n_heads"] * text["index_head_dim"], None, layer, every)
    yield Attention(width, text["index_topk"] if kind == SPARSE else None, layer, every)


def _pairs_before(tokens: int, attention: Attention) -> int:
    """Return the pairs of the first ``tokens`` queries with the entries that they see: query t (from 1) sees t // every."""
    every, most = attention.every, attention.window
    full = tokens if most is None else min(tokens, most * every - 1)  # queries that see fewer than the most
    whole, rest = divmod(full, every)
    pairs = every * _triangle(whole - 1) + whole * (rest + 1) if whole else 0
    return pairs + (0 if most is None else (tokens - full) * most)


def _triangle(count: int) -> int:
    return count * (count + 1) // 2
