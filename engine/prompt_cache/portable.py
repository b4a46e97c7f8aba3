"""One computed prompt as one file, to keep or to take to another machine: its stored segments, and whose they are. No MLX here.

    magic (16) | segment | segment | … | footer: JSON | its length, 8 bytes | checksum of magic, footer and length, 16 bytes

Segments are the bytes that the prompt cache's folder holds (disk.py). The footer has each one's name and checksum, so every byte
of the file is covered, and says what computed the keys and values: they are valid for nothing else. Such a file may come from
anybody: nothing of it is used before all of it is checked, and nothing in it is run.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from ..errors import OptionError, TokamacError, access_hint
from ..files import atomic_write, open_regular
from ..options import KVSpec
from .folder import Identity

MAGIC = b"tokamac prompt 1"
TAIL_BYTES = 24
MOST_FOOTER_BYTES = 64 << 20
MOST_SEGMENTS = 1 << 17
"""A million tokens in segments of 256 are some four thousand."""

_NAME = re.compile(r"[0-9a-f]{32}")

DIFFERENCES = {
    "weights": "other weights",
    "text": "another config, tokenizer or chat template",
    "kv": "other KV settings",
    "versions": "other versions",
    "more": "another device, number type or adapter",
}
"""What to call each part of an identity that differs."""


class PortableError(TokamacError):
    """A file holds no computed prompt, or one of another model."""


@dataclass(frozen=True, slots=True)
class Packet:
    """A stored segment: its parent's name, its own, and its bytes."""

    parent: str
    name: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Portable:
    """What a file says about itself. tokens: of the prompt. model: what it was called where the prompt was computed.

    keep: tokens that its caches pin. segments: parent's name, name, bytes and checksum of each, in order.
    """

    model: str
    identity: Identity
    kv: KVSpec
    keep: int | None
    tokens: int
    segments: tuple[tuple[str, str, int, str], ...]


def write_portable(
    file: Path, packets: Iterable[Packet], *, model: str, identity: Identity, kv: KVSpec, keep: int | None, tokens: int
) -> int:
    """Write a computed prompt, whole or not at all; return the file's size in bytes. Raises OptionError where it can't."""
    if file.exists() or file.is_symlink():
        raise OptionError(f"{file} already exists", "Name another file, or remove it.")
    try:
        with atomic_write(file, f".{file.name[:64]}.") as out:
            out.write(MAGIC)
            listed = []
            for packet in packets:
                out.write(packet.data)
                listed.append((packet.parent, packet.name, len(packet.data), xxhash.xxh3_128_hexdigest(packet.data)))
            facts = {"model": model, "keep": keep, "tokens": tokens, "kv": asdict(kv), "identity": asdict(identity)}
            footer = json.dumps({**facts, "segments": listed}, default=str).encode()
            length = len(footer).to_bytes(8, "little")
            out.write(footer + length + xxhash.xxh3_128_digest(MAGIC + footer + length))
            return out.tell()
    except OSError as error:
        reason = error.strerror or error
        raise OptionError(f"{file} can't be written: {reason}", access_hint(error, "Name another place.")) from error


def read_portable(file: Path) -> Portable:
    """Return what a file says about itself, its footer checked. Raises TokamacError where it is no such file, or damaged."""
    hint = "Name one that `tokamac cache export` wrote."
    if not file.is_file():
        raise PortableError(f"there is no file {file}", hint)
    try:
        size = file.stat().st_size
        with open_regular(file) as opened:
            if size < len(MAGIC) + TAIL_BYTES or opened.read(len(MAGIC)) != MAGIC:
                raise PortableError(f"{file} is not a computed prompt", hint)
            opened.seek(size - TAIL_BYTES)
            tail = opened.read(TAIL_BYTES)
            length = int.from_bytes(tail[:8], "little")
            if length > min(MOST_FOOTER_BYTES, size - len(MAGIC) - TAIL_BYTES):
                raise damaged(file, "its footer is corrupt")
            opened.seek(size - TAIL_BYTES - length)
            footer = opened.read(length)
    except OSError as error:
        raise _unreadable(file, error) from error
    if xxhash.xxh3_128_digest(MAGIC + footer + tail[:8]) != tail[8:]:
        raise damaged(file, "its footer is corrupt")
    try:
        found = _portable(json.loads(footer))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OptionError) as error:
        raise damaged(file, "its footer can't be read") from error
    if len(MAGIC) + sum(each[2] for each in found.segments) + length + TAIL_BYTES != size:
        raise damaged(file, "its length is wrong")
    return found


def packets_of(file: Path, of: Portable) -> Iterator[Packet]:
    """Yield the segments of a file, each checked. Raises TokamacError at the first that is not what was written."""
    try:
        with open_regular(file) as opened:
            opened.seek(len(MAGIC))
            for parent, name, size, checksum in of.segments:
                data = opened.read(size)
                if xxhash.xxh3_128_hexdigest(data) != checksum:
                    raise damaged(file, "a segment is corrupt")
                yield Packet(parent, name, data)
    except OSError as error:
        raise _unreadable(file, error) from error


def check_identity(file: Path, of: Portable, here: Identity, kv: KVSpec) -> None:
    """Raise TokamacError, naming what differs, unless a file's keys and values are those of the loaded model."""
    if of.identity.fingerprint == here.fingerprint and of.kv == kv:
        return
    theirs, ours = of.identity.facts, here.facts
    other = [words for part, words in DIFFERENCES.items() if theirs.get(part) != ours.get(part)]
    versions = _versions(theirs.get("versions"), ours.get("versions"))
    raise PortableError(
        f"{file} does not belong to this model: {of.model:.80} computed it with {', '.join(other) or 'another model'}{versions}",
        "Load the very model, adapter and KV settings that it was exported with, or compute the prompt again.",
    )


def damaged(file: Path, what: str) -> TokamacError:
    """Return the error for a file that is not what was written."""
    return PortableError(f"{file} is damaged: {what}", "Copy it again, or export the prompt again.")


def _portable(facts: Mapping[str, Any]) -> Portable:
    named, kv, keep, tokens = facts["identity"], facts["kv"], facts["keep"], facts["tokens"]
    listed = [(str(parent), str(name), size, str(checksum)) for parent, name, size, checksum in facts["segments"]]
    if not (keep is None or _is_count(keep)) or not _is_count(tokens) or len(listed) > MOST_SEGMENTS or not listed:
        raise ValueError("counts")
    for parent, name, size, checksum in listed:
        if not (_is_count(size) and all(_NAME.fullmatch(each) for each in (parent, name, checksum))):
            raise ValueError("a segment")
    if not _NAME.fullmatch(named["fingerprint"]) or not isinstance(named["facts"], dict):
        raise ValueError("an identity")
    identity = Identity(named["fingerprint"], named["facts"])
    return Portable(str(facts["model"]), identity, KVSpec(**kv), keep, tokens, tuple(listed))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 48


def _versions(theirs: object, ours: object) -> str:
    if not isinstance(theirs, dict) or not isinstance(ours, dict) or theirs == ours:
        return ""
    pairs = [
        f"{name} {theirs.get(name)!s:.20}, here {ours.get(name)}" for name in ours if theirs.get(name) != ours[name]
    ]
    return f" ({'; '.join(pairs)})"


def _unreadable(file: Path, error: OSError) -> TokamacError:
    return PortableError(
        f"{file} can't be read: {error.strerror or error}", access_hint(error, "Check its permissions.")
    )
