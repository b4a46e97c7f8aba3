"""Learned positions: a table with a row for each, which GPT-2 and its like look up. Beyond its last row there is nothing.

MLX's lookup has no bounds: a position beyond the table is read from foreign memory. So what such a model is asked for is refused
where it does not fit (``Runtime.room``), and the table itself answers NaN for a row that it has not, which the engine tells from a
reply.
"""

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx

NAMES = re.compile(r"(^|\.)(wpe|embed_positions|position_embeddings?|pos_emb\w*)$")


def position_rows(model: Any) -> int | None:
    """Return how many positions the learned tables of mlx-lm's module hold; None where it has none."""
    return min((len(module.weight) for path, module in model.named_modules() if _is_table(path, module)), default=None)


def bound_positions(model: Any) -> None:
    """Let the tables of learned positions answer NaN beyond their last row. Names and types of parameters stay."""
    for path, module in model.named_modules():
        if _is_table(path, module):
            module.__class__ = _bounded(type(module))


def _is_table(path: str, module: Any) -> bool:
    return NAMES.search(path) is not None and "weight" in module


def _bounded(kind: type[Any]) -> type[Any]:
    import mlx.core as mx

    class Bounded(kind):
        """A table of positions that is never read beyond its end."""

        def __call__(self, positions: "mx.array") -> "mx.array":
            last = len(self.weight) - 1
            found = super().__call__(mx.minimum(positions, last))
            return mx.where((positions > last)[..., None], mx.array(float("nan"), found.dtype), found)

    return Bounded
