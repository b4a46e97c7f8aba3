"""Where a pass's tokens stand, for models that place pictures in a plane or let their tokens see each other."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn


@dataclass(frozen=True, slots=True, eq=False)
class PictureGroups:
    """By position in the whole sequence, which picture a token is of, from 1; 0: text.

    slides: its tokens see each other in layers with a window alone, and within it.
    """

    of: mx.array
    slides: bool = False

    def joined(self, mask: mx.array, rows: mx.array, columns: mx.array) -> mx.array:
        own, other = self.of[rows][:, None], self.of[columns][None]
        return mask | ((own == other) & (own > 0))

    def within(self, reach: int | None) -> "PictureGroups | None":
        """Return these where they see ahead in a layer with such a window, else None."""
        return None if self.slides and reach is None else self


_groups: ContextVar[PictureGroups | None] = ContextVar("groups", default=None)
picture_groups = _groups.get  # of this pass


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Rotary positions (3, N) of time, row and column; or a shift of all."""

    positions: mx.array | None = None
    shift: Any = 0  # an int, or (B,) of a step of several replies


_places: ContextVar[Places | None] = ContextVar("places", default=None)
places = _places.get
# (layers, T, width): what the first layers add at the tokens of pictures.
_deep: ContextVar[mx.array | None] = ContextVar("deep", default=None)

# (1, T, width): what stands for the embeddings of a pass's ids, where the model's class takes ids alone.
_given: ContextVar[mx.array | None] = ContextVar("given", default=None)


@contextmanager
def placed(
    at: Places | None, groups: PictureGroups | None, deep: mx.array | None, given: mx.array | None = None
) -> Iterator[None]:
    first, second, third, fourth = _places.set(at), _groups.set(groups), _deep.set(deep), _given.set(given)
    try:
        yield
    finally:
        _given.reset(fourth)
        _places.reset(first)
        _groups.reset(second)
        _deep.reset(third)


@contextmanager
def shifted(shifts: list[int]) -> Iterator[None]:
    shift = shifts[0] if len(shifts) == 1 else mx.array(shifts, mx.int32)
    token = _places.set(Places(None, shift))
    try:
        yield
    finally:
        _places.reset(token)


def why_no_planes(model: nn.Module, sections: tuple[int, ...]) -> str:
    """Return why a model's rotary embeddings can't turn by planes, or ""."""
    ropes = _ropes(model)
    if not ropes or any(type(rope) is not nn.RoPE or rope.traditional for rope in ropes):
        return "its rotary positions are scaled, and pictures are not placed in such"
    wrong = next((rope for rope in ropes if sum(sections) != rope.dims // 2), None)
    return "" if wrong is None else f"its rotary sections {list(sections)} are not half of {wrong.dims}"


def use_planes(model: nn.Module, sections: tuple[int, ...], *, interleaved: bool) -> None:
    for rope in _ropes(model):
        rope._streams = _streams(sections, interleaved=interleaved)
        rope.__class__ = PlaneRoPE


def _ropes(model: nn.Module) -> list[Any]:
    found = {id(rope): rope for path, rope in model.named_modules() if path.rpartition(".")[2] == "rope"}
    return list(found.values())


def take_deep(layers: list[Any]) -> None:
    """Have the first layers add what pictures bring to each."""
    for index, layer in enumerate(layers):
        layer.__class__ = _deepened(type(layer), index)


def take_given(embeds: Any) -> None:
    """Have a module of embeddings give those of pictures, where a pass has such."""
    embeds.__class__ = _giving(type(embeds))


def _giving(kind: type[Any]) -> type[Any]:
    class Given(kind):
        def __call__(self, ids: mx.array) -> mx.array:
            found: mx.array = super().__call__(ids) if (given := _given.get()) is None else given
            return found

    Given.__name__, Given.__qualname__, Given.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Given


def _deepened(kind: type[Any], index: int) -> type[Any]:
    class Deepened(kind):
        def __call__(self, *args: Any, **named: Any) -> mx.array:
            out: mx.array = super().__call__(*args, **named)
            return out if (deep := _deep.get()) is None else out + deep[index]

    Deepened.__name__, Deepened.__qualname__, Deepened.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Deepened


def _streams(sections: tuple[int, ...], *, interleaved: bool) -> tuple[int, ...]:
    count = sum(sections)
    if not interleaved:
        return tuple(stream for stream, size in enumerate(sections) for _ in range(size))
    streams = [0] * count
    for stream in (1, 2):
        for index in range(stream, min(3 * sections[stream], count), 3):
            streams[index] = stream
    return tuple(streams)


class PlaneRoPE(nn.RoPE):
    _streams: tuple[int, ...]

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        now = _places.get()
        if now is None:
            plain: mx.array = super().__call__(x, offset=offset)
            return plain
        if now.positions is None:
            shifted: mx.array = super().__call__(x, offset=offset + now.shift)
            return shifted
        return _turned(x, now.positions, self)


def _turned(x: mx.array, positions: mx.array, rope: PlaneRoPE) -> mx.array:
    half = rope.dims // 2
    frequencies = rope.base ** (-mx.arange(half, dtype=mx.float32) / half) * rope.scale
    own = positions[mx.array(rope._streams)].T.astype(mx.float32)  # (N, half)
    angles = own * frequencies
    cos, sin = mx.cos(angles), mx.sin(angles)
    first, second = x[..., :half].astype(mx.float32), x[..., half : rope.dims].astype(mx.float32)
    rotated = mx.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return mx.concatenate([rotated, x[..., rope.dims :]], axis=-1) if x.shape[-1] > rope.dims else rotated
