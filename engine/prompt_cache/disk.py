"""The prompt cache on disk, for one model: which stored segments continue a prompt, reading them, and writing new ones.

A stored segment as bytes: a safetensors file of the tokens, what caches hold of them, and states at their end.

Arrays ``t`` (tokens, int64: the widest type comes first in such a file), ``p.<cache>.<array>`` (pieces, caches that grow in
order) and ``s.<cache>.<name>`` (states of the others); metadata ``start`` (position of the first token), ``numbers`` and
``types`` (JSON). NumPy has no bfloat16, so it is stored as its bits.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors.numpy import load, save

from tokamac.engine import metrics
from tokamac.engine.files import open_regular
from tokamac.engine.kv.snapshot import Piece, State, States
from tokamac.engine.prompt_cache.folder import Folder, FullError, Identity, SegmentEntry, child_name, root_name
from tokamac.engine.prompt_cache.portable import Packet
from tokamac.engine.prompt_cache.radix_tree import common_prefix

Host = dict[str, np.ndarray[Any, Any]]


class DamagedError(ValueError):
    """A file whose checksum is right holds something else than a segment of this model."""


@dataclass(frozen=True, slots=True)
class HostSegment:
    """A segment in memory that any thread may read: arrays of NumPy that look at MLX's, which they keep alive."""

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
    """What was read: tokens from the position ``start`` on, their piece, and the states at their end, if it has any."""

    start: int
    tokens: list[int]
    piece: Piece
    states: States | None


def to_host(start: int, tokens: Sequence[int], piece: Piece, states: States | None) -> HostSegment:
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
    about = {
        "start": str(segment.start),
        "caches": str(1 + max((int(name.split(".")[1]) for name in segment.arrays if name[0] == "p"), default=-1)),
        "types": json.dumps(segment.types),
        "numbers": json.dumps(segment.numbers),
    }
    data: bytes = save({"t": np.asarray(segment.tokens, np.int64), **segment.arrays}, metadata=about)
    return data


def tokens_of(head: bytes) -> list[int] | None:
    """Return the tokens from the first bytes of a file, or None where they are not in them. Nothing is verified."""
    try:
        length = int.from_bytes(head[:8], "little")
        begin, end = json.loads(head[8 : 8 + length])["t"]["data_offsets"]
        data = head[8 + length + begin : 8 + length + end]
        return None if len(data) < end - begin else np.frombuffer(data, np.int64).tolist()
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def from_bytes(data: bytes) -> Segment:
    """Return the segment of a file. Only for the thread that touches MLX. Raises DamagedError."""
    try:
        arrays, about = load(data), _about(data)
        types, numbers = json.loads(about["types"]), json.loads(about["numbers"])
        tokens = [int(token) for token in arrays.pop("t")]
        made = {name: _array(value, types.get(name)) for name, value in arrays.items()}
        piece = tuple(_numbered(made, f"p.{cache}.") for cache in range(int(about["caches"])))
        states = None
        if numbers is not None:
            states = tuple(State(_named(made, f"s.{cache}."), each) for cache, each in enumerate(numbers))
        return Segment(int(about["start"]), tokens, piece, states)
    except Exception as error:  # whatever a file may hold
        raise DamagedError(f"not a segment: {error}") from error


def _about(data: bytes) -> dict[str, str]:
    length = int.from_bytes(data[:8], "little")
    about: dict[str, str] = json.loads(data[8 : 8 + length])["__metadata__"]
    return about


def _array(value: np.ndarray[Any, Any], kind: str | None) -> mx.array:
    array = mx.array(value)
    return array.view(mx.bfloat16) if kind == "bfloat16" else array


def _named(arrays: dict[str, mx.array], prefix: str) -> dict[str, mx.array]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _numbered(arrays: dict[str, mx.array], prefix: str) -> tuple[mx.array, ...]:
    found = _named(arrays, prefix)
    return tuple(found[str(number)] for number in range(len(found)))


HEAD_BYTES = 1 << 16
"""Read of a file to know its tokens: they come first, after a header of some kilobytes."""

AGAIN_S = 300.0
"""Seconds after a failed write until the next: a full disk may have room then, a used-up day be over."""

SURE_BYTES = 1 << 18
"""From so many bytes on, a read or a write says something of the disk's speed."""

SURE_TOKENS = 64
"""From so many tokens on, a prefill says something of the device's speed."""


MOST_PINNED = 1 << 14
"""Pinned tokens, up to which a stored prefix is recognised without knowing their number."""


@dataclass(slots=True)
class Rates:
    """What was measured so far; None until then. prefill_tps: prompt tokens per second. read_bps, write_bps: bytes per second."""

    prefill_tps: float | None = None
    read_bps: float | None = None
    write_bps: float | None = None

    def saw_prefill(self, tokens: int, seconds: float) -> None:
        """Learn from a prefill of a good many tokens."""
        if tokens >= SURE_TOKENS and (seen := metrics.rate(tokens, seconds)) is not None:
            self.prefill_tps = _towards(self.prefill_tps, seen)

    def saw_read(self, count: int, seconds: float) -> None:
        """Learn from reading files: checksums, and copying what they hold into caches, included."""
        if count >= SURE_BYTES and (seen := metrics.rate(count, seconds)) is not None:
            self.read_bps = _towards(self.read_bps, seen)

    def saw_write(self, count: int, seconds: float) -> None:
        """Learn from writing a file."""
        if count >= SURE_BYTES and (seen := metrics.rate(count, seconds)) is not None:
            self.write_bps = _towards(self.write_bps, seen)

    def prefill_s(self, tokens: int) -> float | None:
        """Return the seconds that computing so many tokens takes; None is unknown."""
        return None if self.prefill_tps is None else tokens / self.prefill_tps

    def read_s(self, count: int) -> float | None:
        """Return the seconds that reading so many bytes takes; writing is slower, so it bounds what was never measured."""
        rate = self.read_bps or self.write_bps
        return None if rate is None else count / rate

    def is_worth(self, count: int, tokens: int) -> bool:
        """Whether to read so many bytes takes less time than to compute so many tokens; yes, while nothing is known."""
        read, prefill = self.read_s(count), self.prefill_s(tokens)
        return read is None or prefill is None or read < prefill


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
class _Known:
    """What is known of the model's folder: the segments that continue each name, and when the folder last changed."""

    changed: int = -1
    children: dict[str, list[SegmentEntry]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)


class DiskStore:
    """Stored segments of one model. ``trouble`` says what went wrong with the last write; None while all is well."""

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
        self._known = _Known()
        self._tokens: dict[str, list[int]] = {}  # by name
        self._writer: threading.Thread | None = None
        with contextlib.suppress(OSError):
            folder.tidy()

    def chain(self, ids: list[int], keep: int | None) -> list[Link]:
        """Return the stored segments that hold the longest prefix of ``ids``, in order; the last may be wanted in part."""
        self._look()
        links: list[Link] = []
        parent, at = root_name(self._model, keep), 0
        while at < len(ids):
            entry, shared = self._best(parent, ids, at)
            if entry is None:
                break
            whole = shared == len(self._tokens[entry.name])
            links.append(Link(entry, at, shared, whole))
            at, parent = at + shared, entry.name
            if not whole:
                break
        return links

    def load(self, link: Link, ids: list[int]) -> Segment | None:
        """Return a stored segment of the prompt ``ids``; None where it is damaged, foreign or gone, and then it is removed."""
        data = self.folder.read(link.entry)
        if data is None:
            self._forget(link.entry)
            return None
        try:
            segment = from_bytes(data)
        except DamagedError:
            segment = None
        if (
            segment is None
            or segment.start != link.start
            or child_name(link.entry.parent, segment.tokens) != link.entry.name
            or segment.tokens[: link.tokens] != ids[link.start : link.stop]
        ):
            self.discard(link.entry)
            return None
        return segment

    def discard(self, entry: SegmentEntry) -> None:
        """Remove a segment that is not what it should be."""
        self.folder.remove(entry)
        self._forget(entry)

    def ends(self) -> list[tuple[list[int], int | None]]:
        """Return the prefixes whose segments are all there and that none continues, each with the tokens pinned in its caches."""
        self._look()
        entries = {entry.name: entry for several in self._known.children.values() for entry in several}
        roots: dict[str, int | None] = {root_name(self._model, keep): keep for keep in (None, *range(MOST_PINNED))}
        found = []
        for entry in entries.values():
            if not self._known.children.get(entry.name) and (path := _path(entry, entries)) and path[0].parent in roots:
                parts = [self._tokens_of(each) for each in path]
                if None not in parts:
                    found.append(([token for part in parts for token in part or ()], roots[path[0].parent]))
        return found

    def names(self, ids: list[int], bounds: list[int], keep: int | None) -> list[str]:
        """Return the names of the prefix's parts between the bounds, the empty prefix's first."""
        names = [root_name(self._model, keep)]
        for start, stop in zip([0, *bounds], bounds, strict=False):
            names.append(child_name(names[-1], ids[start:stop]))
        return names

    def has(self, name: str) -> bool:
        """Whether a segment of that name is stored."""
        self._look()
        return name in self._known.names

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
        """Seconds until something may be written: after a failure, so that a full disk is not asked again at once."""
        return 0.0 if self.trouble is None else max(0.0, self._again_s - self._clock())

    def fail(self, trouble: str) -> None:
        """Note why nothing can be written now."""
        self.trouble, self._again_s = trouble, self._clock() + AGAIN_S

    def wait(self, seconds: float) -> None:
        """Wait for a write in progress, so long at most."""
        if self._writer is not None:
            self._writer.join(seconds)

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

    def take_in(self, packet: Packet) -> SegmentEntry | None:
        """Store a segment that was computed elsewhere, on this thread; None where it is here already. Raises OSError."""
        if self.has(packet.name):
            return None
        return self.folder.write(self._model, self.label, packet.parent, packet.name, packet.data)

    def remove_shorter(self, parent: str, tokens: list[int]) -> None:
        """Remove what is stored after ``parent`` and holds no more than a beginning of ``tokens``."""
        self._look()
        for entry in list(self._known.children.get(parent, [])):
            held = self._tokens_of(entry)
            if (
                held is not None
                and len(held) < len(tokens)
                and held == tokens[: len(held)]
                and not self._continued(entry)
            ):
                self.discard(entry)

    def _continued(self, entry: SegmentEntry) -> bool:
        return bool(self._known.children.get(entry.name))

    def _look(self) -> None:
        """Learn what is in the folder, if it has changed."""
        try:
            changed = (self.folder.root / self._model).stat().st_mtime_ns
        except OSError:
            self._known = _Known()
            return
        if changed == self._known.changed:
            return
        known = _Known(changed)
        for entry in self.folder.entries(self._model):
            known.children.setdefault(entry.parent, []).append(entry)
            known.names.add(entry.name)
        self._known = known
        self._tokens = {name: tokens for name, tokens in self._tokens.items() if name in known.names}

    def _best(self, parent: str, ids: list[int], at: int) -> tuple[SegmentEntry | None, int]:
        """Return the segment after ``parent`` that shares most with the ids from ``at`` on, and how many."""
        best, most = None, 0
        for entry in self._known.children.get(parent, []):
            tokens = self._tokens_of(entry)
            shared = 0 if tokens is None else common_prefix(tokens, ids[at : at + len(tokens)])
            # Of two that share as much, one that is wanted whole can be gone on from.
            if shared > most or (shared == most > 0 and tokens is not None and len(tokens) == shared):
                best, most = entry, shared
        return best, most

    def _tokens_of(self, entry: SegmentEntry) -> list[int] | None:
        if entry.name not in self._tokens:
            try:
                with open_regular(entry.path) as file:
                    tokens = tokens_of(file.read(HEAD_BYTES))
                    if tokens is None:  # a long header
                        file.seek(0)
                        tokens = tokens_of(file.read())
            except OSError:
                return None
            if tokens is None:
                self.discard(entry)
                return None
            self._tokens[entry.name] = tokens
        return self._tokens[entry.name]

    def _forget(self, entry: SegmentEntry) -> None:
        self._known.changed = -1
        self._tokens.pop(entry.name, None)


def _path(entry: SegmentEntry, entries: dict[str, SegmentEntry]) -> list[SegmentEntry]:
    """Return the segments from the first down to this one; the first one's parent is not among them."""
    path = [entry]
    while (above := entries.get(path[-1].parent)) is not None and len(path) <= len(entries):
        path.append(above)
    return path[::-1]


def _towards(known: float | None, seen: float) -> float:
    """Return a mean that follows what is seen: half of it is the last."""
    return seen if known is None else (known + seen) / 2
