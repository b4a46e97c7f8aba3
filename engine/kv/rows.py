"""Several sequences in one forward pass: each row of the batch keeps its own caches, of whatever layout and bits.

    logits = forward(model, ids (B, N), [caches of one sequence, caches of another, …])         (B, N, V)

Embeddings, projections, experts and the head see one batch. What is a sequence's own stays its own: positions (an array of B
offsets, which MLX's rotary kernel takes), masks, keys and values, the attention to them. Recurrent states are stacked for the pass
and taken apart after it. Where a model computes keys and values by itself (latent attention, compressed entries, chunks), the
module that does it is called once a row, and the rest of the pass stays one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from typing import Any

import mlx.core as mx

from ..model.config import unbounded
from .attention import AttendingCache, StandInMask
from .cache import Cache
from .layout import Layout, Mask

Caches = list[Any]


class RowMasks(StandInMask):
    """Stands for the masks of B rows, from the call that asks for one to the attention that needs them.

    Each row has a mask of its own: their lengths differ. A model that looks into it, rather than pass it on, can't be batched.
    """

    def __init__(self, rows: "_Rows", tokens: int, window: int | None, *, as_array: bool) -> None:
        self._asked, self._tokens, self._window, self._as_array = rows, tokens, window, as_array
        self._made: dict[tuple[int, Layout, int], Mask] = {}

    def of(self, index: int, row: Cache) -> Mask:
        """Return the mask of a row whose cache holds the tokens of this call already."""
        start = row.offset - self._tokens
        key = index, row.layout, start
        if key not in self._made:
            self._made[key] = row.layout.mask(start, self._tokens, reach=self._window, as_array=self._as_array)
        return self._made[key]

    def before(self, index: int) -> Mask:
        """Return the mask of a row as its cache makes it, which does not hold the tokens yet."""
        row = self._asked.rows[index]
        mask: Mask = row.make_mask(self._tokens, return_array=self._as_array, window_size=self._window)
        return mask

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """Attend to keys and values that a layer's rows returned, where a later layer has no cache of its own."""
        return self._asked.batch.given[id(keys)].attend(queries, keys, values, scale=scale, mask=self, sinks=sinks)


class _Rows:
    """What the rows of a layer have in common. batch: what those of all layers share in one pass."""

    def __init__(self, rows: Sequence[Any], batch: "_Batch") -> None:
        self.rows = rows
        self.batch = batch

    @property
    def offset(self) -> Any:
        """Tokens held by each row: (B,), where mlx-lm's caches of one sequence have a number."""
        return mx.array([row.offset for row in self.rows], mx.int32)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:  # noqa: N803
        """Return what stands for the rows' masks."""
        return RowMasks(self, N, window_size, as_array=return_array)


class AttendingRows(_Rows, AttendingCache):
    """The caches of one layer that attend by themselves."""

    rows: Sequence[Cache]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store keys (B, H, N, D) and values (B, H, N, E), a row in each cache; return them as they came, for ``attend``."""
        self._fetched = [
            row.update_and_fetch(keys[index : index + 1], values[index : index + 1])
            for index, row in enumerate(self.rows)
        ]
        self._came = keys, values
        self.batch.given[id(keys)] = self
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what ``update_and_fetch`` did, for layers that share it."""
        return self._came

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,  # noqa: ARG002
        values: mx.array,  # noqa: ARG002
        *,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        """Attend row by row: queries (B, H·R, N, D) → (B, H·R, N, E)."""
        out = []
        for index, (row, fetched) in enumerate(zip(self.rows, self._fetched, strict=True)):
            own = mask.of(index, row) if isinstance(mask, RowMasks) else mask
            part = queries[index : index + 1]
            out.append(row.attend(part, *fetched, scale=scale, mask=own, sinks=sinks, softcap=softcap))
        return mx.concatenate(out, axis=0)


class SplitRows(_Rows):
    """The caches of one layer whose module is called once a row."""

    def __getitem__(self, part: int) -> "SplitRows":
        """Return one part of each row's ``CacheList``."""
        return SplitRows([row[part] for row in self.rows], self.batch)


@dataclass(slots=True)
class _Batch:
    """One pass: the stacked states of its recurrent layers, and what was returned for whom."""

    stacks: list[tuple[Any, Sequence[Any]]] = field(default_factory=list)
    given: dict[int, AttendingRows] = field(default_factory=dict)

    def joined(self, rows: Sequence[Any]) -> Any:
        """Return the caches of one layer as one."""
        from mlx_lm.models.cache import ArraysCache, CacheList

        first = rows[0]
        if isinstance(first, Cache):
            return AttendingRows(rows, self)
        if isinstance(first, ArraysCache):
            return self._stacked(rows)
        if isinstance(first, CacheList):
            parts = [self.joined(each) for each in zip(*(row.caches for row in rows), strict=True)]
            if not any(isinstance(part, SplitRows) for part in parts):
                gather: Any = CacheList
                return gather(*parts)
        return SplitRows(rows, self)

    def _stacked(self, rows: Sequence[Any]) -> Any:
        from mlx_lm.models.cache import ArraysCache

        whole = ArraysCache(len(rows[0].cache))
        for index, states in enumerate(zip(*(row.cache for row in rows), strict=True)):
            known = next((state for state in states if state is not None), None)
            if known is not None:
                empty = mx.zeros((1, *known.shape[1:]), known.dtype)  # as the models take a state that is not there yet
                whole[index] = mx.concatenate([empty if state is None else state for state in states], axis=0)
        self.stacks.append((whole, rows))
        return whole

    def take_apart(self) -> None:
        """Give each row its own states."""
        for whole, rows in self.stacks:
            for index, row in enumerate(rows):
                row.cache = [None if state is None else state[index : index + 1] for state in whole.cache]

    def end(self) -> None:
        """Let go of the rows: they refer to the pass, and keys and values would stay until garbage is looked for."""
        self.stacks.clear()
        self.given.clear()


def forward(model: Any, ids: mx.array, lanes: Sequence[Caches]) -> mx.array:
    """Run the next tokens of several sequences through ``model`` at once: ids (B, N) → logits (B, N, V), not evaluated.

    lanes: each sequence's caches, which are written as if it were alone.
    """
    if len(lanes) == 1:
        alone: mx.array = model(ids, cache=lanes[0])
        return alone
    batch = _Batch()
    try:
        logits: mx.array = model(ids, cache=[batch.joined(rows) for rows in zip(*lanes, strict=True)])
        batch.take_apart()
    finally:
        batch.end()
    return logits


def why_alone(model: Any, config: Mapping[str, Any], make: Callable[[], Caches]) -> str:
    """Return why sequences of ``model`` can't share a pass; "" where they can. Prepares its modules for it.

    A pass of two rows of different lengths is built, lazily. make: makes the caches of one sequence, at 16 bits or packed.
    """
    if unbounded(config):
        return "it finds positions by how many keys it is given"
    lanes = [make(), make()]
    try:
        install_split(model)
        for tokens, caches in enumerate(lanes, 1):
            model(mx.zeros((1, tokens), mx.int32), cache=caches)
        logits = forward(model, mx.zeros((2, 1), mx.int32), lanes)
    except Exception as error:  # any model's own code may run here
        return f"its class takes one sequence at a time ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
    return "" if logits.shape[:2] == (2, 1) else f"its class makes logits of shape {logits.shape} of two sequences"


_ours: set[Any] = set()
"""Calls of modules that stand in for mlx-lm's, each with the original as ``__wrapped__``."""


def install_split(model: Any) -> None:
    """Have the modules that are given a cache inside a layer of ``model`` take one of several rows. Idempotent.

    They behave as before for any other cache, so nobody else sees a difference.
    """
    for layer in model.layers:
        for name, module in layer.named_modules():
            kind = type(module)
            if name and kind.__call__ not in _ours and "cache" in signature(kind.__call__).parameters:
                kind.__call__ = _split_call(kind.__call__)


def _split_call(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(self: Any, *args: Any, **named: Any) -> Any:
        split = next((each for each in (*args, *named.values()) if isinstance(each, SplitRows)), None)
        if split is None:
            return original(self, *args, **named)
        count = len(split.rows)

        def own(index: int, value: Any) -> Any:
            if isinstance(value, SplitRows):
                return value.rows[index]
            if isinstance(value, RowMasks):
                return value.before(index)
            return value[index : index + 1] if isinstance(value, mx.array) and value.shape[:1] == (count,) else value

        out = [
            original(
                self, *(own(index, each) for each in args), **{name: own(index, each) for name, each in named.items()}
            )
            for index in range(count)
        ]
        return mx.concatenate(out, axis=0)

    _ours.add(call)
    return call
