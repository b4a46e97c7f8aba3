"""A computed prompt on its way out of the prompt cache and into another. On the engine's thread."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OptionError
from ..kv import snapshot
from ..kv.cache import Cache
from ..kv.probe import leaves
from .disk import DamagedError, DiskStore, Segment, from_bytes
from .folder import Identity, SegmentEntry, child_name, root_name
from .memory import CacheStore
from .portable import (
    Packet,
    Portable,
    PortableError,
    check_identity,
    damaged,
    packets_of,
    read_portable,
    write_portable,
)

if TYPE_CHECKING:
    from ..runtime import Runtime

LEAST_TOKENS = 33
"""Shorter prompts are never read from the disk: they are computed in a moment."""
FOREIGN = "a segment does not hold this model's keys and values"


@dataclass(frozen=True, slots=True)
class Exchanged:
    """A computed prompt in a file. tokens: of it; nbytes: of the file; new_bytes: of what the disk cache did not hold yet."""

    path: Path
    tokens: int
    nbytes: int
    new_bytes: int = 0


def check_worth(ids: list[int]) -> None:
    """Raise OptionError for a prompt that would never be read from a disk."""
    if len(ids) < LEAST_TOKENS:
        raise OptionError(
            f"a prompt of {len(ids)} tokens is computed in a moment: there is nothing to export", "Give a longer one."
        )


def export(runtime: "Runtime", store: CacheStore, file: Path, ids: list[int], keep: int | None) -> Exchanged:
    """Write what the live caches hold, the keys and values of ``ids``, to a new file. Raises TokamacError."""
    disk, identity = _disk_of(store)
    size = write_portable(
        file, store.packets(), model=disk.label, identity=identity, kv=runtime.kv, keep=keep, tokens=len(ids)
    )
    return Exchanged(file, len(ids), size)


def take_in(runtime: "Runtime", store: CacheStore, file: Path, vocabulary: int) -> Exchanged:
    """Put a computed prompt into the disk cache of the loaded model: all of it or, where something fails, nothing.

    The whole file is checked before anything is stored. Raises TokamacError.
    """
    disk, identity = _disk_of(store)
    of = read_portable(file)
    check_identity(file, of, identity, runtime.kv)
    _check(runtime, file, of, vocabulary)
    written: list[SegmentEntry] = []
    try:
        for packet in packets_of(file, of):
            if (entry := disk.store(packet, last=packet.name == of.segments[-1][1])) is not None:
                written.append(entry)
    except BaseException as error:
        for entry in written:
            disk.discard(entry)
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise PortableError(
                f"{file} can't be stored in {disk.folder.root}: {reason}", "Make room: tokamac cache clear."
            ) from error
        raise
    return Exchanged(file, of.tokens, file.stat().st_size, sum(entry.size for entry in written))


def _disk_of(store: CacheStore) -> tuple[DiskStore, Identity]:
    disk = store.disk
    if disk is None or disk.identity is None:
        raise OptionError(
            "the prompt cache has no disk here, so prompts can be neither exported nor imported",
            "Load with a PromptCacheSpec whose disk is on, from files that can be read.",
        )
    return disk, disk.identity


def _check(runtime: "Runtime", file: Path, of: Portable, vocabulary: int) -> None:
    """Raise PortableError unless the segments are consecutive, and hold what this model's caches take."""
    caches = runtime.new_caches(of.keep)
    shapes: list[object] | None = None
    parent, at = root_name(of.identity.fingerprint, of.keep), 0
    for packet in packets_of(file, of):
        try:
            segment = from_bytes(packet.data)
        except DamagedError as error:
            raise damaged(file, FOREIGN) from error
        if not _continues(packet, segment, parent, at):
            raise damaged(file, "its segments are not consecutive")
        if min(segment.tokens, default=-1) < 0 or max(segment.tokens) >= vocabulary or not _has_slots(segment):
            raise damaged(file, FOREIGN)
        found = list(_shapes(segment))
        if shapes not in (None, found) or (shapes is None and not _fits(segment, caches)):
            raise damaged(file, FOREIGN)
        shapes, parent, at = found, packet.name, at + len(segment.tokens)
    if at != of.tokens:
        raise damaged(file, FOREIGN)


def _continues(packet: Packet, segment: Segment, parent: str, at: int) -> bool:
    try:
        named = child_name(parent, segment.tokens) == packet.name
    except (ValueError, OverflowError):
        return False
    return named and packet.parent == parent and segment.start == at


def _has_slots(segment: Segment) -> bool:
    """Return whether each array of a slice has a slot for each token."""
    arrays = [array for arrays in segment.piece for array in arrays]
    return all(array.ndim >= 2 and array.shape[-2] == len(segment.tokens) for array in arrays)


def _fits(segment: Segment, caches: list[Any]) -> bool:
    """Return whether empty caches take the first segment, as a prompt would, and hold all its tokens then."""
    try:
        snapshot.extend(caches, segment.piece, reserve=len(segment.tokens))
        snapshot.thaw(caches, segment.states or ())
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, RuntimeError):
        return False
    counting = [cache for _, cache in leaves(caches) if isinstance(cache, Cache) or snapshot.grows(cache)]
    return all(cache.offset == len(segment.tokens) for cache in counting)


def _shapes(segment: Segment) -> Iterator[object]:
    """Yield what is alike in all segments of a prompt."""
    for arrays in segment.piece:
        for array in arrays:
            yield array.dtype, array.ndim, array.shape[:-2], array.shape[-1]
