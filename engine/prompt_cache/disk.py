"""The prompt cache on disk, for one model: find stored segments that continue a prompt, read them, and write new ones.

A segment is a safetensors file of a run of tokens, what the caches hold of them, and the states at their end. Its arrays are ``t``
(tokens, int64: the widest type comes first in such a file), ``p.<cache>.<array>`` (slices of caches that grow, in order) and
``s.<cache>.<name>`` (states of the others); its metadata are ``start`` (position of the first token), ``numbers`` and ``types``
(JSON). NumPy has no bfloat16, so that is stored as its bits.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors.numpy import load, save

from .. import metrics
from ..files import open_regular
from ..kv.snapshot import KVSlice, State, States
from .folder import Folder, FullError, Identity, SegmentEntry, child_name, root_name
from .portable import Packet
from .radix_tree import common_prefix

Host = dict[str, np.ndarray[Any, Any]]

HEAD_BYTES = 1 << 16
"""Read of a file to know its tokens: they come first, after a header of some kilobytes."""

AGAIN_S = 300.0
"""Seconds from a failed write to the next: by then a full disk may have room, or the daily budget be a new one."""

SURE_BYTES = 1 << 18
"""Reads and writes of fewer bytes say nothing about the disk's speed."""

SURE_TOKENS = 64
"""A prefill of fewer tokens says nothing about the device's speed."""

MOST_PINNED = 1 << 14
"""Up to this many pinned tokens, a stored prefix is recognised without knowing their number."""


class DamagedError(ValueError):
    """A file with the right checksum is no segment of this model."""


@dataclass(frozen=True, slots=True)
class HostSegment:
    """A segment that any thread may read: NumPy arrays that view MLX's, and keep them alive."""

    start: int
    tokens: list[int]
    arrays: Host
    types: dict[str, str]
    numbers: list[dict[str, int | None]] | None

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment as it was read: tokens from the position ``start`` on, their slice, and the states at their end, if any."""

    start: int
    tokens: list[int]
    piece: KVSlice
    states: States | None


def to_host(start: int, tokens: Sequence[int], piece: KVSlice, states: States | None) -> HostSegment:
    """Return what a writer needs; evaluates. Only for the thread that touches MLX."""
    named = {f"p.{cache}.{number}": array for cache, arrays in enumerate(piece) for number, array in enumerate(arrays)}
    for cache, state in enumerate(states or ()):
        named |= {f"s.{cache}.{name}": array for name, array in state.arrays.items()}
    mx.eval(list(named.values()))
    types = {name: "bfloat16" for name, array in named.items() if array.dtype == mx.bfloat16}
    arrays = {name: np.asarray(array.view(mx.uint16) if name in types else array) for name, array in named.items()}
    numbers = None if states is None else [state.numbers for state in states]
    return HostSegment(start, list(tokens), arrays, types, numbers)


def to_bytes(segment: HostSegment) -> bytes:
    """Return the file's bytes. Touches no MLX."""
    metadata = {
        "start": str(segment.start),
        "caches": str(1 + max((int(name.split(".")[1]) for name in segment.arrays if name[0] == "p"), default=-1)),
        "types": json.dumps(segment.types),
        "numbers": json.dumps(segment.numbers),
    }
    data: bytes = save({"t": np.asarray(segment.tokens, np.int64), **segment.arrays}, metadata=metadata)
    return data


def from_bytes(data: bytes) -> Segment:
    """Return the segment in a file's bytes. Only for the thread that touches MLX. Raises DamagedError."""
    try:
        arrays, metadata = load(data), _header(data)[0]["__metadata__"]
        types, numbers = json.loads(metadata["types"]), json.loads(metadata["numbers"])
        tokens = [int(token) for token in arrays.pop("t")]
        made = {
            name: mx.array(value).view(mx.bfloat16) if types.get(name) == "bfloat16" else mx.array(value)
            for name, value in arrays.items()
        }
        parts = [_named(made, f"p.{cache}.") for cache in range(int(metadata["caches"]))]
        piece = tuple(tuple(part[str(number)] for number in range(len(part))) for part in parts)
        states = None
        if numbers is not None:
            states = tuple(State(_named(made, f"s.{cache}."), each) for cache, each in enumerate(numbers))
        return Segment(int(metadata["start"]), tokens, piece, states)
    except Exception as error:  # a file may hold anything
        raise DamagedError(f"not a segment: {error}") from error


def _tokens_in(head: bytes) -> list[int] | None:
    """Return the tokens from the first bytes of a file, None where they are not among them. Verifies nothing."""
    try:
        header, length = _header(head)
        begin, end = header["t"]["data_offsets"]
        data = head[length + begin : length + end]
        return None if len(data) < end - begin else np.frombuffer(data, np.int64).tolist()
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _header(data: bytes) -> tuple[Any, int]:
    """Return a safetensors file's header, and where it ends."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), end


def _named(arrays: dict[str, mx.array], prefix: str) -> dict[str, mx.array]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


@dataclass(slots=True)
class Rates:
    """Measured speeds; None until then. prefill_tps: prompt tokens per second. read_bps, write_bps: bytes per second."""

    prefill_tps: float | None = None
    read_bps: float | None = None
    write_bps: float | None = None

    def saw_prefill(self, tokens: int, seconds: float) -> None:
        """Learn from a prefill, if it was long enough."""
        self.prefill_tps = _learn(self.prefill_tps, tokens, seconds, SURE_TOKENS)

    def saw_read(self, count: int, seconds: float) -> None:
        """Learn from reading files, checksums and copying into caches included."""
        self.read_bps = _learn(self.read_bps, count, seconds, SURE_BYTES)

    def saw_write(self, count: int, seconds: float) -> None:
        """Learn from writing a file."""
        self.write_bps = _learn(self.write_bps, count, seconds, SURE_BYTES)

    def prefill_s(self, tokens: int) -> float | None:
        """Return the seconds that computing ``tokens`` tokens takes; None is unknown."""
        return None if self.prefill_tps is None else tokens / self.prefill_tps

    def read_s(self, count: int) -> float | None:
        """Return the seconds that reading ``count`` bytes takes, or writing while no read was measured: that is slower."""
        rate = self.read_bps or self.write_bps
        return None if rate is None else count / rate

    def is_worth(self, count: int, tokens: int) -> bool:
        """Whether reading ``count`` bytes takes less time than computing ``tokens`` tokens; True while either is unknown."""
        read, prefill = self.read_s(count), self.prefill_s(tokens)
        return read is None or prefill is None or read < prefill


def _learn(known: float | None, count: int, seconds: float, least: int) -> float | None:
    """Return the rate with a new measurement, which counts for half; as it was where fewer than ``least`` were measured."""
    seen = metrics.rate(count, seconds) if count >= least else None
    return known if seen is None else seen if known is None else (known + seen) / 2


@dataclass(frozen=True, slots=True)
class Link:
    """A stored segment that continues a prefix: its first ``tokens`` tokens are wanted, from the position ``start`` on."""

    entry: SegmentEntry
    start: int
    tokens: int
    whole: bool

    @property
    def stop(self) -> int:
        """Position after the last wanted token."""
        return self.start + self.tokens


@dataclass(slots=True)
class _Index:
    """What the model's folder holds: the segments by parent, and when the folder last changed."""

    changed: int = -1
    children: dict[str, list[SegmentEntry]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)


class DiskStore:
    """Stored segments of one model. trouble: what went wrong with the last write; None while all is well."""

    def __init__(
        self,
        folder: Folder,
        model: str,
        label: str,
        rates: Rates,
        clock: Callable[[], float] = time.monotonic,
        *,
        identity: Identity | None = None,
    ) -> None:
        self.identity = identity
        self.label = label
        self.rates = rates
        self.folder = folder
        self.trouble: str | None = None
        self._again_s = 0.0
        self._clock = clock
        self._model = model
        self._index = _Index()
        self._tokens: dict[str, list[int]] = {}  # by segment name
        self._writer: threading.Thread | None = None
        with contextlib.suppress(OSError):
            folder.tidy()

    def chain(self, ids: list[int], keep: int | None) -> list[Link]:
        """Return the stored segments that hold the longest prefix of ``ids``, in order; the last may be wanted in part."""
        self._refresh()
        links: list[Link] = []
        parent, at, whole = root_name(self._model, keep), 0, True
        while at < len(ids) and whole:
            entry, shared = self._best(parent, ids, at)
            if entry is None:
                break
            whole = shared == len(self._tokens[entry.name])
            links.append(Link(entry, at, shared, whole))
            at, parent = at + shared, entry.name
        return links

    def load(self, link: Link, ids: list[int]) -> Segment | None:
        """Return a stored segment of the prompt ``ids``; None where it is gone, or damaged or foreign: then it is removed."""
        data = self.folder.read(link.entry)
        if data is None:
            self._forget(link.entry)
            return None
        with contextlib.suppress(DamagedError):
            segment = from_bytes(data)
            if (
                segment.start == link.start
                and child_name(link.entry.parent, segment.tokens) == link.entry.name
                and segment.tokens[: link.tokens] == ids[link.start : link.stop]
            ):
                return segment
        self.discard(link.entry)
        return None

    def discard(self, entry: SegmentEntry) -> None:
        """Remove a segment that is not what it should be."""
        self.folder.remove(entry)
        self._forget(entry)

    def ends(self) -> list[tuple[list[int], int | None]]:
        """Return the complete prefixes that no segment continues, each with the number of tokens its caches pin."""
        self._refresh()
        entries = {entry.name: entry for several in self._index.children.values() for entry in several}
        roots: dict[str, int | None] = {root_name(self._model, keep): keep for keep in (None, *range(MOST_PINNED))}
        found = []
        for entry in entries.values():
            if entry.name not in self._index.children and (path := _path(entry, entries))[0].parent in roots:
                parts = [self._tokens_of(each) for each in path]
                if None not in parts:
                    found.append(([token for part in parts for token in part or ()], roots[path[0].parent]))
        return found

    def parts(self, ids: list[int], bounds: list[int], keep: int | None) -> Iterator[tuple[int, int, str, str]]:
        """Yield each part of a prefix between the bounds: where it starts and stops, its parent's name and its own."""
        start, parent = 0, root_name(self._model, keep)
        for stop in bounds:
            name = child_name(parent, ids[start:stop])
            yield start, stop, parent, name
            start, parent = stop, name

    def has(self, name: str) -> bool:
        """Whether a segment of that name is stored."""
        self._refresh()
        return name in self._index.names

    @property
    def is_writing(self) -> bool:
        """Whether a segment is being written."""
        return self._writer is not None and self._writer.is_alive()

    def write(self, segment: HostSegment, parent: str, name: str) -> None:
        """Write a segment on a thread of its own. A failure is noted in ``trouble``."""
        self._writer = threading.Thread(
            target=self._write, args=(segment, parent, name), name="tokamac-prompt-cache", daemon=True
        )
        self._writer.start()

    @property
    def rest_s(self) -> float:
        """Seconds until the next write may be tried: a full disk is not tried again at once."""
        return 0.0 if self.trouble is None else max(0.0, self._again_s - self._clock())

    def fail(self, trouble: str) -> None:
        """Note why nothing can be written now."""
        self.trouble, self._again_s = trouble, self._clock() + AGAIN_S

    def wait(self, seconds: float) -> None:
        """Wait for a write in progress, ``seconds`` at most."""
        if self._writer is not None:
            self._writer.join(seconds)

    def store(self, packet: Packet, *, last: bool) -> SegmentEntry | None:
        """Store a segment that was computed elsewhere, on this thread; None where it is here already. Raises OSError.

        last: nothing continues it, so that a longer segment which begins with it will do.
        """
        if self.has(packet.name) or (last and self._is_covered(packet)):
            return None
        return self.folder.write(self._model, self.label, packet.parent, packet.name, packet.data)

    def _is_covered(self, packet: Packet) -> bool:
        """Whether a stored segment begins with this one. One with states can't be cut: it ends where they were taken."""
        tokens, header = _tokens_in(packet.data), _header(packet.data)[0]
        if tokens is None or header["__metadata__"]["numbers"] != "null":
            return False
        stored = (self._tokens_of(entry) for entry in list(self._index.children.get(packet.parent, [])))
        return any(other is not None and other[: len(tokens)] == tokens for other in stored)

    def remove_shorter(self, parent: str, tokens: list[int]) -> None:
        """Remove segments after ``parent`` that hold only a beginning of ``tokens`` and that nothing continues."""
        self._refresh()
        for entry in list(self._index.children.get(parent, [])):
            held = self._tokens_of(entry)
            shorter = held is not None and len(held) < len(tokens) and held == tokens[: len(held)]
            if shorter and entry.name not in self._index.children:
                self.discard(entry)

    def _write(self, segment: HostSegment, parent: str, name: str) -> None:
        began = time.perf_counter()
        try:
            data = to_bytes(segment)
            self.folder.write(self._model, self.label, parent, name, data)
            self.rates.saw_write(len(data), time.perf_counter() - began)
            self.trouble = None
        except FullError as error:
            self.fail(f"{error}: nothing more is stored for now")
        except OSError as error:
            reason = error.strerror or type(error).__name__
            self.fail(f"the prompt cache can't be written ({reason}, {self.folder.root}): it stays in memory")
        except Exception as error:  # or the thread would end in silence, and the next idle step write the same again
            self.fail(f"the prompt cache can't be written ({type(error).__name__}: {error}): it stays in memory")

    def _refresh(self) -> None:
        """Read what is in the folder, if it has changed."""
        try:
            changed = (self.folder.root / self._model).stat().st_mtime_ns
        except OSError:
            self._index = _Index()
            return
        if changed == self._index.changed:
            return
        index = _Index(changed)
        for entry in self.folder.entries(self._model):
            index.children.setdefault(entry.parent, []).append(entry)
            index.names.add(entry.name)
        self._index = index
        self._tokens = {name: tokens for name, tokens in self._tokens.items() if name in index.names}

    def _best(self, parent: str, ids: list[int], at: int) -> tuple[SegmentEntry | None, int]:
        """Return the segment after ``parent`` that shares most with the ids from ``at`` on, and how many tokens."""
        best, most = None, 0
        for entry in self._index.children.get(parent, []):
            tokens = self._tokens_of(entry) or []
            shared = common_prefix(tokens, ids[at : at + len(tokens)])
            # Of two that share as much, prefer one that is wanted whole: others may continue it.
            if shared > most or (shared == most > 0 and len(tokens) == shared):
                best, most = entry, shared
        return best, most

    def _tokens_of(self, entry: SegmentEntry) -> list[int] | None:
        if entry.name not in self._tokens:
            try:
                with open_regular(entry.path) as file:
                    tokens = _tokens_in(file.read(HEAD_BYTES))
                    if tokens is None:  # a long header
                        file.seek(0)
                        tokens = _tokens_in(file.read())
            except OSError:
                return None
            if tokens is None:
                self.discard(entry)
                return None
            self._tokens[entry.name] = tokens
        return self._tokens[entry.name]

    def _forget(self, entry: SegmentEntry) -> None:
        self._index.changed = -1
        self._tokens.pop(entry.name, None)


def _path(entry: SegmentEntry, entries: dict[str, SegmentEntry]) -> list[SegmentEntry]:
    """Return the segments from the first one down to this one."""
    path = [entry]
    while (above := entries.get(path[-1].parent)) is not None and len(path) <= len(entries):
        path.append(above)
    return path[::-1]
