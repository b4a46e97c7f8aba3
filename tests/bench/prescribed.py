"""A sampler that chooses as any does, and then takes the next token of a text instead."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from tokamac.engine.sampling import Sampler, SamplerState


class Prescribed(Sampler):
    """Takes the tokens of ``text``, whatever the logits are; they are computed all the same."""

    def __init__(self, text: Sequence[int], *given: Any) -> None:
        super().__init__(*given)
        self._ids = list(text)
        self._text = mx.array(self._ids, mx.uint32)

    def __call__(self, logits: mx.array, allowed: np.ndarray | None = None) -> mx.array:
        """Return the next token of the text, (1,)."""
        place = min(self._made, len(self._text) - 1)
        return super().__call__(logits, allowed) * 0 + self._text[place : place + 1]

    def take_likeliest(self, logits: np.ndarray) -> int:
        """Return the next token of the text."""
        place = min(self._made, len(self._text) - 1)
        super().take_likeliest(logits)
        return self._ids[place]

    def choose_rows(
        self, logits: mx.array, allowed: Sequence[np.ndarray] | None = None
    ) -> tuple[mx.array, list[SamplerState]]:
        """Return the next tokens of the text, one a row."""
        places = mx.minimum(mx.arange(len(logits)) + self._made, len(self._text) - 1)
        chosen, states = super().choose_rows(logits, allowed)
        return chosen * 0 + self._text[places], states
