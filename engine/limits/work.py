"""What a model asks of a machine, phase by phase: bytes to read, operations to do, kernels to launch. Knows no machine.

    bytes of a decode step = shared weights + active experts + keys and values of every sequence
    operations of a prefill = 2 × active linear parameters × tokens + attention, the head on the last token only

Made from a module, loaded or hollow, its config and its cache plan, so that a model that was never downloaded counts as a
loaded one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tokamac.engine.limits.attention_work import Attention, Heads, attention_of, chosen_entries, heads_of, query_heads
from tokamac.engine.limits.cost import Cost, Form, text_config
from tokamac.engine.limits.family import Trait, traits_of
from tokamac.engine.limits.kv_cost import value_bytes_of
from tokamac.engine.limits.launches import launches
from tokamac.engine.limits.leaves import leaf_modules
from tokamac.engine.limits.products import Product, products_of
from tokamac.engine.options import KVSpec

if TYPE_CHECKING:
    from tokamac.engine.kv.plan import CachePlan, LayerPlan
    from tokamac.engine.limits.config_cost import Packing


@dataclass(frozen=True, slots=True)
class KVLayer:
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
class Work:
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
    kv: tuple[KVLayer, ...]
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


def work_of(model: Any, config: Mapping[str, Any], cost: Cost, plan: "CachePlan") -> Work:
    """Return the work of mlx-lm's module for a normalised config; ``cost`` is of the form its weights are held in."""
    experts = cost.parts["experts"]
    shared = [part for name, part in cost.parts.items() if name != "experts"]
    known = cost.active_parameters is not None
    products, attention = products_of(model, config), attention_of(config, plan.layers)
    head = next((each for each in products if each.head), None)
    counted = known and attention is not None and head is not None
    return Work(
        traits=traits_of(config),
        layers=len(model.layers),
        hidden=head.columns if head is not None else None,
        launches=launches(model, config, plan),
        shared_bytes=sum(part.nbytes_per_token for part in shared),
        expert_bytes=experts.nbytes,
        active=_share(experts.nbytes_per_token, experts.nbytes) if known else None,
        prefill_parameters=sum(each.parameters for each in products if not each.head) if counted else None,
        head_parameters=sum(each.parameters for each in products if each.head),
        kv=tuple(_kv_layer(layer, config, attention or ()) for layer in plan.layers),
        attention=attention or (),
        products=products,
        query_heads=query_heads(config),
        vocabulary=head.rows if head is not None else None,
    )


def _kv_layer(layer: "LayerPlan", config: Mapping[str, Any], attention: Sequence[Attention]) -> KVLayer:
    read = KVLayer(layer.bytes_per_token, layer.limit, layer.fixed_bytes, heads_of(config, layer, attention))
    chosen = chosen_entries(config, layer.index) if layer.kind == "compressed" else None
    if chosen is None:
        return read
    text = text_config(config)
    share = text["head_dim"] / (text["head_dim"] + text["index_head_dim"])  # the rest are the keys that choose
    return replace(read, picked_bytes_per_token=round(layer.bytes_per_token * share), picked=chosen[0] * chosen[1])


def work_of_config(
    config: Mapping[str, Any],
    *,
    packing: "Packing | None" = None,
    form: Form = "stored",
    kv: KVSpec = KVSpec(),  # noqa: B008
) -> Work | str:
    """Return the work of a model that need not be on disk, or the reason why it can't be said.

    packing: instead of the config's own. Raises OptionError for a KV flag that the model's caches can't take.
    """
    from tokamac.engine.errors import ModelError
    from tokamac.engine.kv import plan_caches
    from tokamac.engine.limits.config_cost import cost_of_config

    cost = cost_of_config(config, packing=packing, form=form)
    if isinstance(cost, str):
        return cost
    try:
        model = module_of(config, packing=packing, form=form)
    except ModelError as error:
        return error.message
    return work_of(model, config, cost, plan_caches(model, config, kv))


def module_of(config: Mapping[str, Any], *, packing: "Packing | None" = None, form: Form = "stored") -> Any:
    """Return mlx-lm's module, hollow, with its weights in this form. Raises ModelUnsupportedError and ModelDamagedError."""
    from mlx.utils import tree_unflatten

    from tokamac.engine.limits.config_cost import pack
    from tokamac.engine.limits.hollow import hollow_model

    stored_bytes = 2 if packing else value_bytes_of(config)
    model = hollow_model(config, stored_bytes if form == "stored" else 4)
    unpacked = _plain(model) if form == "unpacked" else []
    pack(model, config, packing)
    model.update_modules(tree_unflatten(unpacked))
    return model


def _plain(model: Any) -> list[tuple[str, Any]]:
    """Return the modules, by path, that a plain CPU unpacks (engine/cpu.py): not the expert stacks, nor the stacks of heads."""
    from mlx import nn

    return [(path, module) for path, module in leaf_modules(model) if type(module) in (nn.Linear, nn.Embedding)]


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
