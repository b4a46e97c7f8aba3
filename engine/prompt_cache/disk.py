"""The prompt cache on disk, for one model: find, read and write segments."""

# A segment is a safetensors file: ``t`` (tokens, int64, the widest type first), ``p.<cache>.<array>`` (slices of growing
# caches, in order), ``s.<cache>.<name>`` (states); metadata ``start`` (position of the first token),
# ``numbers`` and ``types`` (JSON). bfloat16, which NumPy lacks, is stored as its bits.

import contextlib
import json
import re
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors.numpy import load, save

from ..files import open_regular
from ..kv.snapshot import KVSlice, State, States
from ..metrics import Rates
from .folder import Folder, FullError, Identity, Packet, SegmentEntry, child_name, root_name
from .memory import common_prefix

Host = dict[str, np.ndarray[Any, Any]]

HEAD_BYTES = 1 << 14  # read of a file to know its tokens: they come first, after a header of some kilobytes
LONG_HEAD_BYTES = 1 << 20

# Where they lie, as safetensors writes its header: all of it as JSON takes several times as long, and 20 GB have 2,000 files.
PLACE = re.compile(rb'"t":\{[^{}]*"data_offsets":\[(\d{1,15}),(\d{1,15})\]')

# Seconds from a failed write to the next: by then a full disk may have room, or the daily budget be a new one.
AGAIN_S = 300.0


MOST_TOKENS = 1 << 21  # of stored segments that are remembered, the least used forgotten first: 8 MB

MOST_PINNED = 1 << 14  # up to this many pinned tokens, a stored prefix is recognised without knowing their number


class DamagedError(ValueError):
    """A file with a valid checksum is no segment of this model."""


@dataclass(frozen=True, slots=True)
class HostSegment:
    """A segment that any thread may read: NumPy views that keep MLX's arrays alive."""

    start: int
    tokens: list[int]
    arrays: Host
    types: dict[str, str]
    numbers: list[dict[str, int | None]] | None

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


@dataclass(frozen=True, slots=True)
class Segment:
    start: int
    tokens: list[int]
    piece: KVSlice
    states: States | None


def to_host(start: int, tokens: Sequence[int], piece: KVSlice, states: States | None) -> HostSegment:
    """Return a segment for the writer; evaluates. MLX thread only."""
    named = {f"p.{cache}.{number}": array for cache, arrays in enumerate(piece) for number, array in enumerate(arrays)}
    for cache, state in enumerate(states or ()):
        named |= {f"s.{cache}.{name}": array for name, array in state.arrays.items()}
    mx.eval(list(named.values()))
    types = {name: "bfloat16" for name, array in named.items() if array.dtype == mx.bfloat16}
    arrays = {name: np.asarray(array.view(mx.uint16) if name in types else array) for name, array in named.items()}
    numbers = None if states is None else [state.numbers for state in states]
    return HostSegment(start, list(tokens), arrays, types, numbers)


def to_bytes(segment: HostSegment) -> bytes:
    """Return the file's bytes. Touches no MLX, so any thread may call it."""
    metadata = {
        "start": str(segment.start),
        "caches": str(1 + max((int(name.split(".")[1]) for name in segment.arrays if name[0] == "p"), default=-1)),
        "types": json.dumps(segment.types),
        "numbers": json.dumps(segment.numbers),
    }
    data: bytes = save({"t": np.asarray(segment.tokens, np.int64), **segment.arrays}, metadata=metadata)
    return data


def from_bytes(data: bytes) -> Segment:
    """Parse a file's bytes. MLX thread only. Raises DamagedError."""
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


def _tokens_in(head: bytes) -> "array[int] | None":
    length = 8 + int.from_bytes(head[:8], "little")
    if length > len(head) or (place := PLACE.search(head, 8, length)) is None:
        return None
    begin, end = (length + int(each) for each in place.groups())
    with contextlib.suppress(ValueError, OverflowError):
        return None if end > len(head) else array("i", np.frombuffer(head[begin:end], np.int64).tolist())
    return None


def _header(data: bytes) -> tuple[Any, int]:
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), end


def _named(arrays: dict[str, mx.array], prefix: str) -> dict[str, mx.array]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


@dataclass(frozen=True, slots=True)
class Link:
    entry: SegmentEntry
    start: int
    tokens: int
    whole: bool

    @property
    def stop(self) -> int:
        return self.start + self.tokens


@dataclass(slots=True)
class _Index:
    changed: int = -1
    children: dict[str, list[SegmentEntry]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)


class DiskStore:
    """Stored segments of one model. trouble: the last write's failure, or None."""

    def __init__(
        self,
        folder: Folder,
        model: str,
        label: str,
        rates: Rates,
        clock: Callable[[], float] = time.monotonic,
        *,
        identity: Identity | None = None,
        most_tokens: int = MOST_TOKENS,
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
        self._tokens = OrderedDict[str, "array[int]"]()  # by segment name
        self._held, self._most_tokens = 0, most_tokens  # of these
        self._writer: threading.Thread | None = None
        with contextlib.suppress(OSError):
            folder.tidy()

    def chain(self, ids: list[int], keep: int | None) -> list[Link]:
        self._refresh()
        links, wanted = list[Link](), array("i", ids)
        parent, at, whole = root_name(self._model, keep), 0, True
        while at < len(ids) and whole:
            entry, shared, whole = self._best(parent, wanted, at)
            if entry is None:
                break
            links.append(Link(entry, at, shared, whole))
            at, parent = at + shared, entry.name
        return links

    def nearest(self, ids: list[int], keep: int | None) -> list[int]:
        """Return the stored tokens that begin most like ``ids``, as the newest of them go on."""
        links = self.chain(ids, keep)
        found = [link.entry for link in links]
        parent = found[-1].name if found else root_name(self._model, keep)
        while (children := self._index.children.get(parent)) and len(found) <= len(self._index.names):
            found.append(newest := max(children, key=lambda entry: entry.used))
            parent = newest.name
            if self._tokens_of(newest) is None:
                break
        return [token for entry in found for token in self._tokens_of(entry) or ()]

    @property
    def has_other_settings(self) -> bool:
        return self.folder.has_others(self._model, self.label)

    def load(self, link: Link, ids: list[int]) -> Segment | None:
        """Return a stored segment; None where it is gone, damaged or foreign (removed then)."""
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
        self.folder.remove(entry)
        self._forget(entry)

    def ends(self) -> list[tuple[list[int], int | None]]:
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
        start, parent = 0, root_name(self._model, keep)
        for stop in bounds:
            name = child_name(parent, ids[start:stop])
            yield start, stop, parent, name
            start, parent = stop, name

    def has(self, name: str) -> bool:
        self._refresh()
        return name in self._index.names

    @property
    def is_writing(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def write(self, segment: HostSegment, parent: str, name: str) -> None:
        self._writer = threading.Thread(
            target=self._write, args=(segment, parent, name), name="tokamac-prompt-cache", daemon=True
        )
        self._writer.start()

    @property
    def rest_s(self) -> float:
        return 0.0 if self.trouble is None else max(0.0, self._again_s - self._clock())

    def fail(self, trouble: str) -> None:
        self.trouble, self._again_s = trouble, self._clock() + AGAIN_S

    def wait(self, seconds: float) -> None:
        if self._writer is not None:
            self._writer.join(seconds)

    def store(self, packet: Packet, *, last: bool) -> SegmentEntry | None:
        """Store a segment computed elsewhere, on this thread; None if already here. Raises OSError."""
        if self.has(packet.name) or (last and self._is_covered(packet)):
            return None
        return self.folder.write(self._model, self.label, packet.parent, packet.name, packet.data)

    def _is_covered(self, packet: Packet) -> bool:
        tokens, header = _tokens_in(packet.data), _header(packet.data)[0]
        if tokens is None or header["__metadata__"]["numbers"] != "null":
            return False
        stored = (self._tokens_of(entry) for entry in list(self._index.children.get(packet.parent, [])))
        return any(other is not None and other[: len(tokens)] == tokens for other in stored)

    def remove_shorter(self, parent: str, tokens: list[int]) -> None:
        self._refresh()
        for entry in list(self._index.children.get(parent, [])):
            held = self._tokens_of(entry)
            shorter = held is not None and len(held) < len(tokens) and held.tolist() == tokens[: len(held)]
            if shorter and entry.name not in self._index.children:
                self.discard(entry)

    def _write(self, segment: HostSegment, parent: str, name: str) -> None:
        began = time.perf_counter()
        try:
            data = to_bytes(segment)
            self.folder.write(self._model, self.label, parent, name, data)
            self.rates.observe_write(len(data), time.perf_counter() - began)
            self.trouble = None
        except FullError as error:
            self.fail(f"{error}: nothing more is stored for now")
        except OSError as error:
            reason = error.strerror or type(error).__name__
            self.fail(f"the prompt cache can't be written ({reason}, {self.folder.root}): it stays in memory")
        except Exception as error:  # or the thread would end in silence, and the next idle step write the same again
            self.fail(f"the prompt cache can't be written ({type(error).__name__}: {error}): it stays in memory")

    def _refresh(self) -> None:
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
        for name in self._tokens.keys() - index.names:
            self._forget_tokens(name)

    def _best(self, parent: str, ids: "array[int]", at: int) -> tuple[SegmentEntry | None, int, bool]:
        best, most, whole = None, 0, False
        for entry in list(self._index.children.get(parent, [])):
            tokens = self._tokens_of(entry) or array("i")
            shared = common_prefix(tokens, ids[at : at + len(tokens)])
            # Of two that share as much, prefer one that is wanted whole: others may continue it.
            if shared > most or (shared == most > 0 and len(tokens) == shared):
                best, most, whole = entry, shared, len(tokens) == shared
        return best, most, whole

    def _tokens_of(self, entry: SegmentEntry) -> "array[int] | None":
        tokens = self._tokens.get(entry.name)
        if tokens is None:
            try:
                with open_regular(entry.file) as file:
                    tokens = _tokens_in(file.read(HEAD_BYTES))
                    if tokens is None:  # a long header
                        file.seek(0)
                        tokens = _tokens_in(file.read(LONG_HEAD_BYTES))
            except OSError:
                return None
            if tokens is None:
                self.discard(entry)
                return None
            self._tokens[entry.name] = tokens
            self._held += len(tokens)
        self._tokens.move_to_end(entry.name)
        while self._held > self._most_tokens:
            self._forget_tokens(next(iter(self._tokens)))
        return tokens

    def _forget(self, entry: SegmentEntry) -> None:
        self._index.changed = -1
        self._forget_tokens(entry.name)

    def _forget_tokens(self, name: str) -> None:
        self._held -= len(self._tokens.pop(name, ()))


def _path(entry: SegmentEntry, entries: dict[str, SegmentEntry]) -> list[SegmentEntry]:
    path = [entry]
    while (above := entries.get(path[-1].parent)) is not None and len(path) <= len(entries):
        path.append(above)
    return path[::-1]
