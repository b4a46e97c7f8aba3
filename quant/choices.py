"""Which packing each module of a model gets, where nothing is measured: one for all, the model's own rules, or a recipe's.

Recipes: which modules of a model get more bits than the rest, as data. No MLX here: the command line lists them too.

The mixed recipes are mlx-lm's (``mlx_lm.convert``, by Alex Barron after llama.cpp's Q4_K_M): attention's values and the down
projections get more bits in the layers where errors cost most, and the output head everywhere. They replace the model's own
rules, as they do there: a router gets the bits of the rest.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import mlx.core as mx

from tokamac.engine.errors import OptionError
from tokamac.engine.perf.config_cost import Packing
from tokamac.engine.perf.cost import PartName, Tensor, part_of
from tokamac.quant.modules import leaves
from tokamac.quant.options import DEFAULT_GROUP_SIZE, UNQUANTIZED, Options
from tokamac.quant.source import Source

Layers = Literal["all", "spread"]
"""Which layers a rule is for. spread: the first and the last eighth, and every third of those between."""


@dataclass(frozen=True, slots=True)
class PackingRule:
    """Modules whose path holds one of ``names``, in ``layers``, get ``bits``."""

    names: tuple[str, ...]
    bits: int
    layers: Layers = "all"

    def holds(self, path: str, layer: int, layers: int) -> bool:
        """Whether it speaks of the module at ``path``, in ``layer`` of ``layers``."""
        if self.layers == "spread" and not in_spread(layer, layers):
            return False
        return any(name in path for name in self.names)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Bits by module: those of the first rule that holds, else ``bits``.

    bits: None leaves everything to the options and the model's own rules; there are no rules then.
    landmark: the name of a module that tells where in a path the layer's number stands. A model without it can't use the recipe.
    """

    name: str
    bits: int | None = None
    rules: tuple[PackingRule, ...] = ()
    landmark: str = ""

    def bits_for(self, path: str, layer: int, layers: int) -> int | None:
        """Return the bits for the module at ``path``, in ``layer`` of ``layers``."""
        return next((rule.bits for rule in self.rules if rule.holds(path, layer, layers)), self.bits)


def in_spread(layer: int, layers: int) -> bool:
    """Whether a layer is among the first or last eighth, or one of every three between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _mixed(low: int, high: int) -> Recipe:
    rules = (
        # Substrings, as in mlx-lm: "v_a_proj" is also in the latent attention's "kv_a_proj_with_mqa".
        PackingRule(("v_proj", "v_a_proj", "v_b_proj", "down_proj"), high, "spread"),
        PackingRule(("lm_head",), high),
    )
    return Recipe(f"mixed_{low}_{high}", low, rules, landmark="down_proj")


RECIPES = (Recipe("uniform"), _mixed(2, 6), _mixed(3, 4), _mixed(3, 6), _mixed(4, 6))


def recipe_names() -> tuple[str, ...]:
    """Return the names of all recipes."""
    return tuple(recipe.name for recipe in RECIPES)


def find_recipe(name: str) -> Recipe:
    """Return the recipe of that name. Raises OptionError, which lists them, if there is none."""
    for recipe in RECIPES:
        if recipe.name == name:
            return recipe
    raise OptionError(f"there is no recipe {name}", f"Use one of {', '.join(recipe_names())}.")


Choices = dict[str, Packing | None]
"""By path, of every module that could be packed: how it is, or None where it is not."""

PackingOf = Callable[[str, Any], Packing | None]
"""Is given the path of a module and the module, and says how it should be packed."""


def choose(source: Source, options: Options) -> Choices:
    """Return what ``options`` ask for, module by module.

    A model may have rules of its own (mlx-lm's ``quant_predicate``: routers at 8 bits, say); they hold, as in mlx-lm, unless
    a recipe says otherwise. A layer whose rows the groups do not divide stays unpacked: see ``left_out``.
    Raises OptionError for a recipe that does not exist or does not fit the model, and where nothing at all could be packed.
    """
    if options.dequantize:
        return {path: None for path, _ in packable(source)}
    recipe = find_recipe(options.recipe or "uniform")
    rule = _recipe_rule(source, options, recipe) if recipe.rules else _model_rule(source, options)
    chosen = {path: _fitted(source, options, path, rule(path, module)) for path, module in packable(source)}
    if not any(chosen.values()) and (reasons := out_of_groups(source, chosen, (options.group,))):
        raise OptionError(f"nothing can be packed: {'; '.join(reasons)}", "Use another --group-size, or --dequantize.")
    return chosen


def packable(source: Source) -> Iterator[tuple[str, Any]]:
    """Yield every module that could be packed, by path: it knows how, and its weight is a floating one."""
    for path, module in leaves(source.module):
        weight = source.weights.get(f"{path}.weight")
        if "to_quantized" in dir(module) and weight is not None and mx.issubdtype(weight.dtype, mx.floating):
            yield path, module


def left_out(source: Source, chosen: Choices) -> tuple[str, ...]:
    """Return a sentence for each kind of layer that stays unpacked because no group size in use divides its rows."""
    return out_of_groups(source, chosen, {packing.group_size for packing in chosen.values() if packing})


def part(source: Source, path: str) -> PartName:
    """Return the part of the model that a module's weight belongs to."""
    name = f"{path}.weight"
    return part_of(Tensor(name, "", tuple(source.weights[name].shape), 0), source.config)


def out_of_groups(source: Source, chosen: Choices, groups: Iterable[int]) -> tuple[str, ...]:
    """Return a sentence for each kind of layer that stays unpacked because none of ``groups`` divides its rows."""
    sizes = sorted(groups)
    widths = Counter(
        width
        for path, packing in chosen.items()
        if packing is None and sizes and all((width := _width(source, path)) % size for size in sizes)
    )
    return tuple(_sentence(count, width, sizes) for width, count in sorted(widths.items()))


def _sentence(count: int, width: int, sizes: list[int]) -> str:
    who = "1 layer stays" if count == 1 else f"{count} layers stay"
    groups = f"a group of {sizes[0]}" if len(sizes) == 1 else f"groups of {' or '.join(str(size) for size in sizes)}"
    return f"{who} unpacked: rows of {width} weights can't be divided into {groups}"


def _width(source: Source, path: str) -> int:
    return int(source.weights[f"{path}.weight"].shape[-1])


def _fitted(source: Source, options: Options, path: str, wish: Packing | None) -> Packing | None:
    """Return what was wished for, with the bits asked for embedding and head, if its groups divide the rows.

    Those bits are of affine groups: a microscaling format has bits of its own.
    """
    if wish is None:
        return None
    if options.embed_bits is not None and part(source, path) in ("embedding", "head"):
        group = wish.group_size if wish.mode == "affine" else DEFAULT_GROUP_SIZE
        wish = Packing(options.embed_bits, group, "affine")
    if _width(source, path) % wish.group_size and wish.mode == options.mode:
        wish = replace(wish, group_size=options.group)
    divided = not _width(source, path) % wish.group_size
    packs = wish.bits != UNQUANTIZED and source.weights[f"{path}.weight"].ndim >= 2 and divided
    return wish if packs else None


def _model_rule(source: Source, options: Options) -> PackingOf:
    """Return the options' packing for all, but for what mlx-lm's class of the model has a rule of its own for."""
    usual = Packing(options.packed_bits, options.group, options.mode)

    def rule(path: str, module: Any) -> Packing | None:
        own = model_rule(source, path, module)
        if isinstance(own, bool):
            return usual if own else None
        return Packing(own.get("bits", usual.bits), own.get("group_size", usual.group_size), own.get("mode", "affine"))

    return rule


def model_rule(source: Source, path: str, module: Any) -> bool | dict[str, Any]:
    """Return what mlx-lm's class of the model says of a module: whether it may be packed, or how."""
    predicate = getattr(source.module, "quant_predicate", None)
    asked = True if predicate is None else predicate(path, module)
    return asked if isinstance(asked, dict) and asked else bool(asked)


def _recipe_rule(source: Source, options: Options, recipe: Recipe) -> PackingOf:
    if options.bits is not None:
        raise OptionError(f"--bits and the recipe {recipe.name} contradict each other", "Give one of them.")
    position, layers = _layer_position(source, recipe), len(source.module.layers)

    def rule(path: str, _: Any) -> Packing | None:
        return Packing(recipe.bits_for(path, _layer(path, position), layers), options.group)

    return rule


def _layer_position(source: Source, recipe: Recipe) -> int:
    """Return which part of a path is the layer's number: the first number in the path of the recipe's landmark."""
    paths = (path.split(".") for path, _ in source.module.named_modules() if recipe.landmark in path)
    parts = next(paths, None)
    if parts is None:
        raise OptionError(
            f"the recipe {recipe.name} needs layers called {recipe.landmark}, and this model has none",
            "Use --target-bpw, or the recipe uniform.",
        )
    return next((at for at, each in enumerate(parts) if each.isdigit()), len(parts))


def _layer(path: str, position: int) -> int:
    """Return the number of the layer that a module is in; 0 where it is in none."""
    parts = path.split(".")
    return int(parts[position]) if len(parts) > position and parts[position].isdigit() else 0
