"""The mean square of what each input channel of a linear layer carries over a text.

A weight's rounding error matters as far as its channel is used: E‖(Ŵ − W) x‖² is Σ (ŵ − w)² E[x²] where channels are
uncorrelated. So these moments are the weights of a least-squares search for the codes.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from tokamac.quant.observing import Inputs
from tokamac.quant.streamed import Streamed

if TYPE_CHECKING:
    import numpy as np


def moments(model: Streamed, sequences: Sequence[Sequence[int]]) -> "dict[str, np.ndarray]":
    """Return the mean of squared inputs, by module path: float32 (in,), and (experts, in) of a stack of experts.

    An expert's are those of the tokens that were sent to it; where there were none, the mean over all rows of its stack.
    sequences: token ids, of equal length, run side by side, so that each weight is read once. Layers that ``observe`` tells nothing
    of have no entry, nor have those whose inputs were not finite: a weight that is no number is refused by its own name later.
    Raises ModelError, and OptionError for tokens the model does not know.
    """
    sums: dict[str, _Sum] = {}

    def note(inputs: Inputs) -> None:
        if inputs.path not in sums:
            sums[inputs.path] = _Sum(inputs)
        sums[inputs.path].add(inputs)

    model.observe(sequences, note)
    means = {path: each.mean() for path, each in sums.items()}
    return {path: mean for path, mean in means.items() if math.isfinite(float(mean.sum(dtype="float64")))}


class _Sum:
    """Squares added up, on the host in float64. Where the layer is no stack of experts, all rows are those of one expert."""

    def __init__(self, first: Inputs) -> None:
        import numpy as np

        experts, self._stacked = first.stack or 1, first.stack is not None
        self._squares = np.zeros((experts, first.rows.shape[-1]))
        self._rows = np.zeros(experts, np.int64)

    def add(self, inputs: Inputs) -> None:
        """Add the rows of one call."""
        import numpy as np

        squares = mx.square(inputs.rows.astype(mx.float32))
        if inputs.experts is None:
            self._squares += np.asarray(mx.sum(squares, axis=0))
            self._rows += len(squares)
        else:
            self._squares += np.asarray(mx.zeros(self._squares.shape).at[inputs.experts].add(squares))
            self._rows += np.bincount(np.asarray(inputs.experts), minlength=len(self._rows))

    def mean(self) -> "np.ndarray":
        """Return the means. Something was added."""
        import numpy as np

        overall = self._squares.sum(axis=0) / self._rows.sum()
        own = self._squares / np.maximum(self._rows, 1)[:, None]
        means = np.where(self._rows[:, None] > 0, own, overall).astype(np.float32)
        return means if self._stacked else means.reshape(-1)
