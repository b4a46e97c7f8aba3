"""What an unfinished conversion has written, a line for each tensor: the next run goes on behind the last one.

    <checksum of the line> {"key": …}                                         of which conversion
    <checksum of the line> {"tensor": …, "shard": …, "end": …, "checksum": …}    a tensor, in the order of writing

A line is appended after the bytes that it tells of. Either may be missing or torn after a crash, and after a power cut the disk may
even hold the line without the bytes. So nothing is believed: reading ends at the first line that is not whole, and every
byte is compared with its checksum before the next run builds on it.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from tokamac.engine.regular_files import read_bytes
from tokamac.quant.files import append, checksum
from tokamac.quant.report import WeightError

LONGEST = 256 << 20
"""Bytes of a journal at most: a tensor takes some hundred."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that is written.

    end: bytes of its shard up to and with it. checksum: XXH3, 128 bits, of the bytes since the entry before in the same
    shard; those of a shard's first tensor begin with the header. error: if it was packed; else None.
    """

    tensor: str
    shard: str
    end: int
    checksum: str
    error: WeightError | None


@dataclass(frozen=True, slots=True)
class Found:
    """A journal as it was found. key: None where there is none that can be read. records: as they were written, under that key."""

    key: str | None
    records: tuple[dict[str, Any], ...]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The tensors. Only to be asked for where the key is one's own: another version may have written other fields."""
        return tuple(_entry(record) for record in self.records)


def read_journal(file: Path) -> Found:
    """Return what is whole of a journal, from its beginning."""
    records = list(_whole_lines(file))
    if not records or set(records[0]) != {"key"}:
        return Found(None, ())
    return Found(str(records[0]["key"]), tuple(records[1:]))


def intact(folder: Path, entries: Sequence[Entry]) -> int:
    """Return how many entries, from the first one on, tell of bytes that ``folder`` holds unharmed. Reads them all."""
    ends: dict[str, int] = {}
    for number, entry in enumerate(entries):
        file = folder / entry.shard
        if file.is_symlink() or not file.is_file():
            return number
        if checksum(file, ends.get(entry.shard, 0), entry.end) != entry.checksum:
            return number
        ends[entry.shard] = entry.end
    return len(entries)


class Journal:
    """A journal that is being written. It begins with the entries given, and takes the place of what was there at once."""

    def __init__(self, file: Path, key: str, entries: Sequence[Entry]) -> None:
        self._file, self._key = file, key
        self._handle = self._begun(entries)
        self._entries = list(entries)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """What is written, in order."""
        return tuple(self._entries)

    def add(self, entry: Entry) -> None:
        """Append an entry whose bytes are written."""
        append(self._handle, _line(asdict(entry)))
        self._entries.append(entry)

    def cut(self, count: int) -> None:
        """Forget all entries but the first ``count``."""
        old, self._handle = self._handle, self._begun(self._entries[:count])
        os.close(old)
        del self._entries[count:]

    def sync(self) -> None:
        """Return when all entries are on the disk."""
        os.fsync(self._handle)

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)

    def _begun(self, entries: Sequence[Entry]) -> int:
        new = self._file.with_name(f"{self._file.name}.new")
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            append(handle, b"".join([_line({"key": self._key}), *(_line(asdict(entry)) for entry in entries)]))
            os.fsync(handle)
            new.replace(self._file)
        except BaseException:
            os.close(handle)
            raise
        return handle


def _entry(record: dict[str, Any]) -> Entry:
    error = record["error"]
    return Entry(**{**record, "error": None if error is None else WeightError(**error)})


def _line(record: dict[str, Any]) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return xxhash.xxh3_64_hexdigest(text).encode() + b" " + text + b"\n"


def _whole_lines(file: Path) -> Iterator[dict[str, Any]]:
    content = read_bytes(file, LONGEST) if file.is_file() else b""
    for line in content.splitlines(keepends=True):
        mark, _, text = line.removesuffix(b"\n").partition(b" ")
        if not line.endswith(b"\n") or xxhash.xxh3_64_hexdigest(text).encode() != mark:
            return
        yield json.loads(text)
