"""What requests ask of a prompt cache, and the one that keeps nothing."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from tokamac.engine.prompt_cache.disk import DiskStore, Rates
from tokamac.engine.prompt_cache.memory import CacheLease
from tokamac.engine.prompt_cache.portable import Packet


@dataclass(frozen=True, slots=True)
class KnownPrefix:
    """What is known of a prompt. tokens: computed already, in memory or on disk; disk_bytes: of them to be read, in bytes."""

    tokens: int
    disk_bytes: int


class CacheStore(Protocol):
    """Where requests get their caches from, and where these go afterwards."""

    @property
    def rates(self) -> Rates:
        """What was measured of computing and of the disk."""

    @property
    def keeps(self) -> bool:
        """Whether anything is ever reused."""

    @property
    def needs_marks(self) -> bool:
        """Whether a prefix can be gone back to only where it was marked."""

    @property
    def nbytes(self) -> int:
        """Bytes held in memory, those of the caches that are lent included."""

    @property
    def aside(self) -> int:
        """Bytes held in memory beside the caches that are lent."""

    def shrink(self, wanted: int) -> int:
        """Let go of so many bytes of those, for good; return how many went."""

    @property
    def trouble(self) -> str | None:
        """What the user should know of the disk; None while all is well."""

    def take(self, ids: list[int], keep: int | None) -> CacheLease:
        """Return caches that hold the longest known prefix of ``ids``, all but the last id at most; empty ones if none is."""

    def lending(self, slot: CacheLease) -> AbstractContextManager[CacheLease]:
        """Return a context: ``slot`` goes back to the store at its end, and is dropped after a failure."""

    def rest(self, slot: CacheLease) -> None:
        """Take back what is lent, for others to use, until ``resume``."""

    def resume(self, slot: CacheLease, ids: list[int]) -> None:
        """Lend to ``slot`` again, after ``rest``: it holds the longest prefix of ``ids`` then that is still known."""

    def mark(self, slot: CacheLease) -> None:
        """Say that this is a place to come back to."""

    def known(self, ids: list[int], keep: int | None) -> KnownPrefix:
        """Return what ``take`` would find."""

    def idle(self) -> float | None:
        """Do a little of what can wait; return after how many seconds to be called again, or None."""

    def flush(self, seconds: float) -> None:
        """Do all that can wait, in so many seconds at most."""

    def clear(self) -> None:
        """Forget everything in memory."""

    def stored(self) -> list[tuple[list[int], int | None]]:
        """Return the prefixes on disk that no other continues, each with the tokens that its caches pin."""

    @property
    def disk(self) -> DiskStore | None:
        """The disk; None where there is none."""

    def packets(self, disk: DiskStore) -> Iterator[Packet]:
        """Yield what the caches that were lent last hold, as segments that ``disk`` would store."""

    def anew(self) -> "CacheStore":
        """Return a store with the same disk and nothing in memory."""


class NoCache:
    """Nothing is ever reused."""

    def __init__(self, make: Callable[[int | None], list[Any]]) -> None:
        self.rates = Rates()
        self.keeps = self.needs_marks = False
        self.nbytes = self.aside = 0
        self.trouble: str | None = None
        self.disk: DiskStore | None = None
        self._make = make

    def take(self, ids: list[int], keep: int | None) -> CacheLease:  # noqa: ARG002
        """Return empty caches."""
        return CacheLease([], self._make(keep), keep)

    @contextmanager
    def lending(self, slot: CacheLease) -> Iterator[CacheLease]:
        """Lend, and drop."""
        yield slot

    def rest(self, slot: CacheLease) -> None:
        """Nobody else uses them."""

    def resume(self, slot: CacheLease, ids: list[int]) -> None:
        """They were never taken back."""

    def shrink(self, wanted: int) -> int:  # noqa: ARG002
        """There is nothing to let go of."""
        return 0

    def mark(self, slot: CacheLease) -> None:
        """Nothing to do."""

    def known(self, ids: list[int], keep: int | None) -> KnownPrefix:  # noqa: ARG002
        """Nothing is known."""
        return KnownPrefix(0, 0)

    def idle(self) -> float | None:
        """Nothing to do."""
        return None

    def flush(self, seconds: float) -> None:
        """Nothing to do."""

    def clear(self) -> None:
        """Nothing to do."""

    def stored(self) -> list[tuple[list[int], int | None]]:
        """Nothing is."""
        return []

    def packets(self, disk: DiskStore) -> Iterator[Packet]:  # noqa: ARG002
        """Nothing is held."""
        return iter(())

    def anew(self) -> CacheStore:
        """Return itself: it holds nothing."""
        return self
