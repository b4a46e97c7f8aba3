"""Recipes: which modules of a model get more bits than the rest, as data. No MLX here: the command line lists them too.

The mixed recipes are mlx-lm's (``mlx_lm.convert``, by Alex Barron after llama.cpp's Q4_K_M): attention's values and the down
projections get more bits in the layers where errors cost most, and the output head everywhere. They replace the model's own
rules, as they do there: a router gets the bits of the rest.
"""

from dataclasses import dataclass
from typing import Literal

from tokamac.engine.errors import OptionError

Layers = Literal["all", "spread"]
"""Which layers a rule is for. spread: the first and the last eighth, and every third of those between."""


@dataclass(frozen=True, slots=True)
class Rule:
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
    rules: tuple[Rule, ...] = ()
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
        Rule(("v_proj", "v_a_proj", "v_b_proj", "down_proj"), high, "spread"),
        Rule(("lm_head",), high),
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
