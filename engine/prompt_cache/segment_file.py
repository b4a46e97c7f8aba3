"""A stored segment as bytes: a safetensors file of the tokens, what caches hold of them, and states at their end.

Arrays ``t`` (tokens, int64: the widest type comes first in such a file), ``p.<cache>.<array>`` (pieces, caches that grow in
order) and ``s.<cache>.<name>`` (states of the others); metadata ``start`` (position of the first token), ``numbers`` and
``types`` (JSON). NumPy has no bfloat16, so it is stored as its bits.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors.numpy import load, save

from tokamac.engine.kv.segments import Piece, State, States

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
