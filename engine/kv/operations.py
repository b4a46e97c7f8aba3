"""What is done to a model and its caches, as one seam: here, at once; where several machines hold the model, on all of them."""

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx

from . import rows, snapshot
from .rewind import BeforePass
from .snapshot import KVSlice, States


class TakesBack(Protocol):
    """What caches held before a pass."""

    def take_back(self, wrong: int, read: int) -> int:
        """Take back the last ``wrong`` tokens of a pass that read so many; return how many of the others they still hold."""


class CacheOperations(Protocol):
    """See ``rows.forward``, ``rewind.BeforePass``, and for the others ``snapshot``."""

    def forward(self, model: Any, ids: mx.array, lanes: Sequence[list[Any]]) -> mx.array:
        """Run the next tokens of several sequences."""

    def before_pass(self, caches: list[Any]) -> TakesBack:
        """Remember what caches hold before a pass that may be taken back."""

    def cut(self, caches: list[Any], start: int, stop: int) -> KVSlice:
        """Return copies of tokens."""

    def cut_off(self, caches: list[Any], bounds: Sequence[int]) -> list[KVSlice]:
        """Move the last tokens out."""

    def extend(
        self, caches: list[Any], piece: KVSlice, start: int = 0, stop: int | None = None, *, reserve: int = 0
    ) -> None:
        """Append tokens."""

    def share(self, held: list[Any], empty: list[Any], tokens: int) -> int:
        """Have empty caches begin with what others hold."""

    def own_prefixes(self, caches: list[Any]) -> None:
        """Copy what caches share."""

    def split(self, piece: KVSlice, at: int) -> tuple[KVSlice, KVSlice]:
        """Divide a slice."""

    def part(self, piece: KVSlice, start: int | None, stop: int | None) -> KVSlice:
        """Return a part of a slice."""

    def join(self, pieces: Sequence[KVSlice]) -> KVSlice:
        """Return consecutive slices as one."""

    def freeze(self, caches: list[Any]) -> States:
        """Return the states of what does not grow."""

    def thaw(self, caches: list[Any], states: States) -> None:
        """Put states back."""

    def rewind(self, caches: list[Any], n: int) -> None:
        """Trim what does not grow."""


class LocalOperations:
    """Done in this process."""

    forward = staticmethod(rows.forward)
    before_pass = staticmethod(BeforePass)
    cut = staticmethod(snapshot.cut)
    cut_off = staticmethod(snapshot.cut_off)
    extend = staticmethod(snapshot.extend)
    share = staticmethod(snapshot.share)
    own_prefixes = staticmethod(snapshot.own_prefixes)
    split = staticmethod(snapshot.split)
    part = staticmethod(snapshot.part)
    join = staticmethod(snapshot.join)
    freeze = staticmethod(snapshot.freeze)
    thaw = staticmethod(snapshot.thaw)
    rewind = staticmethod(snapshot.rewind)


LOCAL: CacheOperations = LocalOperations()
