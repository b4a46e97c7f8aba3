"""Which packing each module of a model gets, where nothing is measured: one for all, the model's own rules, or a recipe's.

The mixed recipes are mlx-lm's (``mlx_lm.convert``, by Alex Barron after llama.cpp's Q4_K_M): attention's values and the down
projections get more bits in the layers where errors cost most, and the output head everywhere. They replace the model's own
rules, as they do there: a router gets the bits of the rest.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx

from tokamac.engine.errors import OptionError
from tokamac.engine.perf.config_cost import Packing
from tokamac.engine.perf.cost import PartName, Tensor, part_of

from .modules import leaves
from .options import DEFAULT_GROUP_SIZE, UNQUANTIZED, Options
from .source import HeadSource, Source

Choices = dict[str, Packing | None]
"""By path, of every module that could be packed: how it is, or None where it is not."""

Rule = Callable[[str, Any], Packing | None]
"""Is given the path of a module and the module, and says how it should be packed."""

RECIPES: Mapping[str, tuple[int, int] | None] = {
    "uniform": None, "mixed_2_6": (2, 6), "mixed_3_4": (3, 4), "mixed_3_6": (3, 6), "mixed_4_6": (4, 6),
}  # fmt: skip
"""By name, the bits of most modules and of those that matter more; None leaves all to the options and the model's own rules."""

SPREAD = ("v_proj", "v_a_proj", "v_b_proj", "down_proj")
"""Modules that matter more in the layers of ``in_spread``. Parts of names, as in mlx-lm: "v_a_proj" is also in the latent
attention's "kv_a_proj_with_mqa"."""

LANDMARK = "down_proj"
"""A module whose path tells where in a path the layer's number stands. A model without it can't use a mixed recipe."""


def choose(source: Source, options: Options) -> Choices:
    """Return what ``options`` ask for, module by module.

    A model may have rules of its own (mlx-lm's ``quant_predicate``: routers at 8 bits, say); they hold, as in mlx-lm, unless
    a recipe says otherwise. A layer whose rows the groups do not divide stays unpacked: see ``left_out``.
    Raises OptionError for a recipe that does not exist or does not fit the model, and where nothing at all could be packed.
    """
    if options.dequantize:
        return {path: None for path, _ in packable(source)}
    recipe = options.recipe or "uniform"
    if recipe not in RECIPES:
        raise OptionError(f"there is no recipe {recipe}", f"Use one of {', '.join(RECIPES)}.")
    bits = RECIPES[recipe]
    rule = _model_rule(source, options) if bits is None else _mixed_rule(source, options, *bits)
    chosen = {path: _fitted(source, options, path, rule(path, module)) for path, module in packable(source)}
    if not any(chosen.values()) and (reasons := out_of_groups(source, chosen, (options.group,))):
        raise OptionError(f"nothing can be packed: {'; '.join(reasons)}", "Use another --group-size, or --dequantize.")
    return chosen


def choose_for_heads(heads: HeadSource, options: Options) -> Choices:
    """Return how heads for further tokens are packed: as most of the model, and as its class says of some modules."""
    usual, chosen = Packing(options.packed_bits, options.group, options.mode), Choices()
    for path, (own_path, module) in heads.modules.items():
        weight, rule = heads.source.weights[f"{path}.weight"], model_rule(heads.source, own_path, module)
        wanted: Packing | None = usual if rule else None
        if isinstance(rule, dict):
            wanted = Packing(
                rule.get("bits", usual.bits), rule.get("group_size", usual.group_size), rule.get("mode", "affine")
            )
        if wanted is not None and weight.shape[-1] % wanted.group_size:
            wanted = usual
        fits = wanted is not None and not options.dequantize and weight.shape[-1] % wanted.group_size == 0
        chosen[path] = wanted if fits else None
    return chosen


def packable(source: Source) -> Iterator[tuple[str, Any]]:
    """Yield every module that could be packed, by path: it knows how, and its weight is a floating one."""
    for path, module in leaves(source.module):
        weight = source.weights.get(f"{path}.weight")
        if "to_quantized" in dir(module) and weight is not None and mx.issubdtype(weight.dtype, mx.floating):
            yield path, module


def part(source: Source, path: str) -> PartName:
    """Return the part of the model that a module's weight belongs to."""
    name = f"{path}.weight"
    return part_of(Tensor(name, "", tuple(source.weights[name].shape), 0), source.config)


def left_out(source: Source, chosen: Choices) -> tuple[str, ...]:
    """Return a sentence for each kind of layer that stays unpacked because no group size in use divides its rows."""
    return out_of_groups(source, chosen, {packing.group_size for packing in chosen.values() if packing})


def out_of_groups(source: Source, chosen: Choices, groups: Iterable[int]) -> tuple[str, ...]:
    """Return a sentence for each kind of layer that stays unpacked because none of ``groups`` divides its rows."""
    sizes = sorted(groups)
    unpacked = (_width(source, path) for path, packing in chosen.items() if packing is None)
    widths = Counter(width for width in unpacked if sizes and all(width % size for size in sizes))
    named = f"a group of {sizes[0]}" if len(sizes) == 1 else f"groups of {' or '.join(str(size) for size in sizes)}"
    reason = f"weights can't be divided into {named}"
    return tuple(
        f"{'1 layer stays' if count == 1 else f'{count} layers stay'} unpacked: rows of {width} {reason}"
        for width, count in sorted(widths.items())
    )


def _width(source: Source, path: str) -> int:
    return int(source.weights[f"{path}.weight"].shape[-1])


def _fitted(source: Source, options: Options, path: str, wanted: Packing | None) -> Packing | None:
    """Return what is wanted, with the bits asked for embedding and head, if its groups divide the rows."""
    if wanted is None:
        return None
    if options.embed_bits is not None and part(source, path) in ("embedding", "head"):
        # These bits are of affine groups: a microscaling format has bits of its own.
        group = wanted.group_size if wanted.mode == "affine" else DEFAULT_GROUP_SIZE
        wanted = Packing(options.embed_bits, group, "affine")
    width = _width(source, path)
    if width % wanted.group_size and wanted.mode == options.mode:
        wanted = replace(wanted, group_size=options.group)
    fits = source.weights[f"{path}.weight"].ndim >= 2 and width % wanted.group_size == 0
    return wanted if fits and wanted.bits != UNQUANTIZED else None


def _model_rule(source: Source, options: Options) -> Rule:
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
    answer = True if predicate is None else predicate(path, module)
    return answer if isinstance(answer, dict) and answer else bool(answer)


def _mixed_rule(source: Source, options: Options, low: int, high: int) -> Rule:
    if options.bits is not None:
        raise OptionError(f"--bits and the recipe {options.recipe} contradict each other", "Give one of them.")
    layers = len(source.module.layers)
    landmark = next((path for path, _ in source.module.named_modules() if LANDMARK in path), None)
    if landmark is None:
        raise OptionError(
            f"the recipe {options.recipe} needs layers called {LANDMARK}, and this model has none",
            "Use --target-bpw, or the recipe uniform.",
        )
    position = next((at for at, word in enumerate(landmark.split(".")) if word.isdigit()), None)

    def rule(path: str, _: Any) -> Packing:
        words = path.split(".")
        number = words[position] if position is not None and position < len(words) else ""
        layer = int(number) if number.isdigit() else 0  # 0 also where it is in none
        more = "lm_head" in path or (in_spread(layer, layers) and any(name in path for name in SPREAD))
        return Packing(high if more else low, options.group)

    return rule


def in_spread(layer: int, layers: int) -> bool:
    """Whether a layer is among the first or last eighth, or one of every three between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
