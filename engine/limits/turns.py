"""Time a layer's parts in turn, as a decode step does them, where MLX and NumPy take turns (engine/cpu.py).

Timed in a row of its own kind, a part finds its thread awake, its code and small arrays in the caches, and a core of its own. In
a step it doesn't: MLX's thread slept while NumPy multiplied, the weights went through the caches meanwhile, and NumPy's threads
look for more work for a while, on cores that MLX's thread and the host's want. So the parts of a layer take longer in turn than
apart. The difference is the price of handing over; it depends on what goes through the caches, so on the depth.

Products of as many columns are multiplied one after the other, as if they had one input. That is a step's order where attention's
are MLX's and the rest NumPy's; where all are NumPy's, a step waits twice more than is timed here, and once for each product in
the parts timed apart, so that the handing over comes out as little or nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import mlx.core as mx

from tokamac.engine.limits.parts import Attending, Launching, Multiplying, ones, usual_s

if TYPE_CHECKING:
    from tokamac.engine.kv.cache import Cache

PATIENCE = 2.0
"""A step of a model with such layers is little else than these: worth a closer look."""

Step = Callable[["Cache"], None]


@dataclass(frozen=True, slots=True)
class Turning:
    """A layer's small kernels, attention and products, these each as often as the layer has it; as many layers as ``attending``
    has caches, with weights of their own."""

    launching: Launching
    attending: Attending
    multiplying: tuple[Multiplying, ...]

    def seconds(self) -> float:
        """Return the seconds of one layer, all its parts in turn."""
        caches = self.attending.filled()
        layers = [self._layer() for _ in caches]

        def step() -> None:
            for layer, cache in zip(layers, caches, strict=True):
                layer(cache)
            self.attending.rewind(caches)

        return usual_s(step, patience=PATIENCE) / len(caches)

    def _layer(self) -> Step:
        """Return what runs a layer: what MLX computes is evaluated together, as NumPy's first product asks for it."""
        hidden = self.launching.hidden
        kernels, attend = self.launching.layer(), self.attending.attend()
        given = {
            columns: ones(1, columns) for columns in {hidden, *(each.product.columns for each in self.multiplying)}
        }
        lazy = [(each.product.columns, each.matrix()) for each in self.multiplying if not each.at_once]
        numpy = [(each.product.columns, each.matrix()) for each in self.multiplying if each.at_once]
        # Products of as many columns share their input, which is evaluated once: gate and up, queries, keys and values.
        together = [
            (columns, [matrix for _, matrix in group]) for columns, group in groupby(numpy, lambda pair: pair[0])
        ]

        def layer(cache: "Cache") -> None:
            y = kernels(given[hidden])
            products = [multiply(y if columns == hidden else given[columns]) for columns, multiply in lazy]
            mx.eval(attend(cache), products, y)
            for columns, group in together:
                x = y if columns == hidden else given[columns] * 0.5
                for multiply in group:
                    multiply(x)

        return layer
