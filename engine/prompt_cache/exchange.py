"""A computed prompt on its way out of the prompt cache and into another. On the engine's thread."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokamac.engine.errors import OptionError
from tokamac.engine.prompt_cache.disk import DamagedError, DiskStore, Segment, from_bytes
from tokamac.engine.prompt_cache.folder import Identity, SegmentEntry
from tokamac.engine.prompt_cache.interface import CacheStore
from tokamac.engine.prompt_cache.portable import (
    Packet,
    Portable,
    PortableError,
    check_identity,
    check_packet,
    damaged_segment,
    first_name,
    packets_of,
    read_portable,
    write_portable,
)

if TYPE_CHECKING:
    from tokamac.engine.runtime import Runtime

LEAST_TOKENS = 33
"""Fewer are never read from the disk: they are computed in a moment."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """A computed prompt in a file. tokens: of it; nbytes: of the file; new_bytes: of what the disk cache did not hold yet."""

    path: Path
    tokens: int
    nbytes: int
    new_bytes: int = 0


def export(runtime: "Runtime", store: CacheStore, file: Path, ids: list[int], keep: int | None) -> Exchanged:
    """Write what the live caches hold, the keys and values of ``ids``, to a file that is not there yet. Raises TokamacError."""
    disk, identity = _place(store)
    packets = store.packets(disk)
    facts = {"model": disk.label, "identity": identity, "kv": runtime.kv, "keep": keep, "tokens": len(ids)}
    size = write_portable(file, packets, **facts)  # type: ignore[arg-type]
    return Exchanged(file, len(ids), size)


def check_worth(ids: list[int]) -> None:
    """Raise OptionError for a prompt that would never be read from a disk."""
    if len(ids) < LEAST_TOKENS:
        raise OptionError(
            f"a prompt of {len(ids)} tokens is computed in a moment: there is nothing to export", "Give a longer one."
        )


def take_in(runtime: "Runtime", store: CacheStore, file: Path, vocabulary: int) -> Exchanged:
    """Put a computed prompt into the disk cache of the loaded model, all of it or, where something fails, nothing.

    All of the file is checked before anything is stored. Raises TokamacError.
    """
    disk, identity = _place(store)
    of = read_portable(file)
    check_identity(file, of, identity, runtime.kv)
    _check(runtime, file, of, vocabulary)
    written: list[SegmentEntry] = []
    try:
        for packet in packets_of(file, of):
            if (entry := disk.take_in(packet)) is not None:
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


def _place(store: CacheStore) -> tuple[DiskStore, Identity]:
    disk = store.disk
    if disk is None or disk.identity is None:
        raise OptionError(
            "the prompt cache has no disk here, so no prompt can be exported or imported",
            "Load with a PromptCacheSpec whose disk is on, from files that can be read.",
        )
    return disk, disk.identity


def _check(runtime: "Runtime", file: Path, of: Portable, vocabulary: int) -> None:
    """Raise PortableError unless the segments follow one another, and hold what this model's caches take."""
    caches = runtime.new_caches(of.keep)
    shapes: tuple[object, ...] | None = None
    before, at = first_name(of), 0
    for packet in packets_of(file, of):
        segment = _segment(file, packet)
        check_packet(file, packet, segment.tokens, segment.start, (before, at))
        found = _shapes(segment)
        if min(segment.tokens, default=-1) < 0 or max(segment.tokens) >= vocabulary or shapes not in (None, found):
            raise damaged_segment(file)
        if shapes is None:
            _try(file, segment, caches)
        shapes, before, at = found, packet.name, at + len(segment.tokens)
    if at != of.tokens:
        raise damaged_segment(file)


def _segment(file: Path, packet: Packet) -> Segment:
    try:
        return from_bytes(packet.data)
    except DamagedError as error:
        raise damaged_segment(file) from error


def _try(file: Path, segment: Segment, caches: list[object]) -> None:
    """Put the first segment into empty caches, as a prompt would."""
    from tokamac.engine.kv import snapshot

    try:
        snapshot.extend(caches, segment.piece, room=len(segment.tokens))
        if segment.states is not None:
            snapshot.thaw(caches, segment.states)
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, RuntimeError) as error:
        raise damaged_segment(file) from error


def _shapes(segment: Segment) -> tuple[object, ...]:
    """Return what is alike in all segments of a prompt; each array of a piece must have a slot a token."""
    return tuple(_of_piece(segment))


def _of_piece(segment: Segment) -> Iterator[object]:
    for arrays in segment.piece:
        for array in arrays:
            tokens = array.shape[-2] if array.ndim >= 2 else -1
            yield array.dtype, array.ndim, array.shape[:-2], array.shape[-1], tokens == len(segment.tokens)
