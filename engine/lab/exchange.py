"""Export and import of computed prompts. On the engine's thread."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import OptionError, computing
from ..events import Message
from ..kv import snapshot
from ..kv.attention import leaves
from ..kv.cache import Cache
from ..prompt_cache.cache import PromptCache
from ..prompt_cache.disk import DamagedError, DiskStore, Segment, from_bytes
from ..prompt_cache.folder import (
    Identity,
    Packet,
    Portable,
    PortableError,
    SegmentEntry,
    check_identity,
    child_name,
    damaged,
    packets_of,
    read_portable,
    root_name,
    write_portable,
)
from ..runner import Runner, cacheable, compute_prompt
from ..runtime import Runtime
from ..schedule.schedule import Pace, ReplyEvents
from ..text.prompt import Prompt

LEAST_TOKENS = 33  # shorter prompts are never read from the disk: they are computed in a moment
FOREIGN = "a segment does not hold this model's keys and values"


@dataclass(frozen=True, slots=True)
class Exchanged:
    """A computed prompt in a file.

    Attributes:
        tokens: Of the prompt.
        nbytes: Of the file.
        new_bytes: Not in the disk cache before.
    """

    path: Path
    tokens: int
    nbytes: int
    new_bytes: int = 0


def export_prompt(
    runner: Runner,
    prompt: Prompt,
    file: Path,
    pace: Pace,
    *,
    cancelled: Callable[[], bool],
    then: Callable[[Exchanged], None],
    goes_on: bool,
) -> ReplyEvents:
    """Compute a prompt, or read it from the prompt cache, and write its keys and values. Raises TokamacError."""
    request = cacheable(runner, prompt, "closed" if goes_on else "opened")
    messages = [item for item in prompt if isinstance(item, Message)]
    if goes_on and messages:
        stable = runner.prompting().stable(messages)
        request = replace(request, ids=[*stable, stable[-1]] if stable else [])
    ids = request.ids[:-1]
    if len(ids) < LEAST_TOKENS:
        raise OptionError(
            f"a prompt of {len(ids)} tokens is computed in a moment: there is nothing to export", "Give a longer one."
        )
    yield from compute_prompt(runner, request, pace, cancelled=cancelled)
    if cancelled():
        return
    store, kv = runner.store, runner.runtime.kv
    disk, identity = _disk_of(store)
    size = write_portable(
        file, store.packets(), model=disk.label, identity=identity, kv=kv, keep=request.keep, tokens=len(ids)
    )
    then(Exchanged(file, len(ids), size))


def import_prompt(runner: Runner, file: Path) -> Exchanged:
    """Import a computed prompt into the disk cache, all or nothing. Raises TokamacError."""
    runtime = runner.runtime
    disk, identity = _disk_of(runner.store)
    of = read_portable(file)
    check_identity(file, of, identity, runtime.kv)
    with computing():
        _check(runtime, file, of, runner.spec.vocabulary_size)
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


def _disk_of(store: PromptCache) -> tuple[DiskStore, Identity]:
    disk = store.disk
    if disk is None or disk.identity is None:
        raise OptionError(
            "the prompt cache has no disk here, so prompts can be neither exported nor imported",
            "Load with a PromptCacheSpec whose disk is on, from files that can be read.",
        )
    return disk, disk.identity


def _check(runtime: Runtime, file: Path, of: Portable, vocabulary: int) -> None:
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
    arrays = [array for arrays in segment.piece for array in arrays]
    return all(array.ndim >= 2 and array.shape[-2] == len(segment.tokens) for array in arrays)


def _fits(segment: Segment, caches: list[Any]) -> bool:
    try:
        snapshot.extend(caches, segment.piece, reserve=len(segment.tokens))
        snapshot.thaw(caches, segment.states or ())
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, RuntimeError):
        return False
    counting = [cache for _, cache in leaves(caches) if isinstance(cache, Cache) or snapshot.grows(cache)]
    return all(cache.offset == len(segment.tokens) for cache in counting)


def _shapes(segment: Segment) -> Iterator[object]:
    for arrays in segment.piece:
        for array in arrays:
            yield array.dtype, array.ndim, array.shape[:-2], array.shape[-1]
