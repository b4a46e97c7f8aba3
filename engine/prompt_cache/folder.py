"""The folder of stored segments, and computed prompts as portable files. No MLX."""

import contextlib
import datetime
import fcntl
import json
import os
import re
import shutil
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from sys import intern
from typing import Any

import platformdirs
import xxhash

from ..errors import OptionError, TokamacError, access_hint
from ..files import TOKENIZER_BYTES, atomic_write, open_regular, read_bytes, read_text
from ..model.safetensors import weight_files
from ..options import KVSpec
from ..perf import hardware

#     <root>/<model fingerprint>/<parent>.<name>.<checksum>.kv      one segment; the checksum covers all its bytes
#     <root>/written-2026-11-21                                     a line of bytes for each write of that day
#     <root>/<fingerprint>/.new-…                                   being written, locked by its writer
#     <root>/weights.json                                           digests of weight files
#
# Files appear whole, by renaming, within a total size and a daily write budget. Processes may share the folder:
# a missing file is a miss, and a damaged one is removed when read.

# Every byte of the weights counts in the fingerprint: a merge or edit may change one layer alone. In the hub's
# cache a file's name is its SHA-256. Others are hashed once, on a thread if large, and remembered by device,
# inode, size and times, which an edit in place changes.


NAME = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{32})\.([0-9a-f]{32})\.kv")
MODEL = re.compile(r"[0-9a-f]{32}")
LABEL = "model.txt"
NEW = ".new-"
LEDGER_BYTES, LABEL_BYTES = 64 << 20, 1 << 20  # a day's count of writing, and a model's label, at most
LEAST_AGE_S = 60.0  # a file being written is left alone for so long, locked or not

TOTAL_BYTES, TOTAL_SHARE = 8 << 30, 10  # all segments at most: the smaller of these bytes and a tenth of the disk
# Written in a day at most: a disk of 1 TB that may be written 600 times over lasts a hundred years of such days.
DAILY_BYTES = 16 << 30
MORE_ROOM = 50  # where room must be made, a fiftieth of the total is freed beyond it
RESERVE_BYTES, RESERVE_SHARE = 1 << 30, 20  # left free on the disk: these bytes, or a twentieth of a small disk

FORMAT = 2  # version of the stored files. It is part of the fingerprint, so files of another version are never found.
TEXT_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
)

FILE = "weights.json"
MOST_REMEMBERED = 2000
AT_ONCE_BYTES = 256 << 20  # so many unread bytes of weights are read at once; more are read by a thread
READ_BYTES = 8 << 20
BLOB = re.compile(r"[0-9a-f]{64}")  # where a file of the hub's cache links to: `blobs/<SHA-256>`


class FullError(OSError):
    """A budget does not allow the write."""


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """A stored segment; when it was last used, in seconds."""

    # A server holds thousands: a Path takes as much as all of this.
    parent: str
    name: str
    file: str
    size: int
    used: float

    @property
    def path(self) -> Path:
        return Path(self.file)


@dataclass(frozen=True, slots=True)
class ModelUsage:
    fingerprint: str
    label: str
    files: int
    bytes: int
    used: float


@dataclass(frozen=True, slots=True)
class Budgets:
    total: int | None = None
    daily: int | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """What keys and values depend on. fingerprint: 32 hexadecimal digits; facts: its parts."""

    fingerprint: str
    facts: Mapping[str, Any]


def default_root() -> Path:
    given = os.environ.get("TOKAMAC_CACHE_DIR")
    return (Path(given) if given else platformdirs.user_cache_path("tokamac")) / "prompts"


class Folder:
    """Stored segments under ``root``, made at the first write. Methods raise OSError."""

    def __init__(
        self,
        root: Path,
        budgets: Budgets = Budgets(),  # frozen
        today: Callable[[], datetime.date] = datetime.date.today,
    ) -> None:
        self.root = root
        self._budgets = budgets
        self._today = today

    @property
    def total_budget(self) -> int:
        if self._budgets.total is not None:
            return self._budgets.total
        return min(TOTAL_BYTES, shutil.disk_usage(_existing(self.root)).total // TOTAL_SHARE)

    @property
    def daily_budget(self) -> int:
        return DAILY_BYTES if self._budgets.daily is None else self._budgets.daily

    def written_today(self) -> int:
        try:
            lines = read_text(self._ledger(), LEDGER_BYTES, "ascii").split()
        except (OSError, ValueError):
            return 0
        return sum(int(line) for line in lines if line.isdigit())

    def models(self) -> list[ModelUsage]:
        found = []
        for folder in self._model_folders():
            entries = list(self.entries(folder.name))
            used = max((entry.used for entry in entries), default=0.0)
            size = sum(entry.size for entry in entries)
            found.append(ModelUsage(folder.name, _label(folder), len(entries), size, used))
        return sorted(found, key=lambda usage: -usage.used)

    def has_others(self, model: str, label: str) -> bool:
        """Return whether segments are stored under a label by another model's fingerprint than ``model``."""
        others = (each for each in self._model_folders() if each.name != model and _label(each) == label)
        return any(next(self.entries(each.name), None) is not None for each in others)

    def entries(self, model: str) -> Iterator[SegmentEntry]:
        with contextlib.suppress(OSError), os.scandir(self.root / model) as files:
            for file in files:
                if match := NAME.fullmatch(file.name):
                    with contextlib.suppress(OSError):  # removed meanwhile
                        at = file.stat()
                        yield SegmentEntry(intern(match[1]), match[2], file.path, at.st_size, at.st_mtime)

    def read(self, entry: SegmentEntry) -> bytes | None:
        """Return a segment's bytes and mark its use; None, and it is removed, if they are damaged."""
        try:
            data = read_bytes(entry.path, self.total_budget)
        except OSError:
            return None
        match = NAME.fullmatch(entry.path.name)
        if match is None or xxhash.xxh3_128_hexdigest(data) != match[3]:
            self.remove(entry)
            return None
        with contextlib.suppress(OSError):
            os.utime(entry.path)
        return data

    def write(self, model: str, label: str, parent: str, name: str, data: bytes) -> SegmentEntry:
        """Store a segment, evicting others for room. Raises FullError for a budget, OSError for the disk."""
        if self.written_today() + len(data) > self.daily_budget:
            raise FullError("the daily budget for writing the prompt cache is used up")
        self._make_room(len(data))
        folder = self.root / model
        self._make(folder, label)
        path = folder / f"{parent}.{name}.{xxhash.xxh3_128_hexdigest(data)}.kv"
        with atomic_write(path, NEW) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # tells other processes, and containers, that its writer is alive
            file.write(data)
        self._note(len(data))
        return SegmentEntry(parent, name, str(path), len(data), path.stat().st_mtime)

    def remove(self, entry: SegmentEntry) -> None:
        with contextlib.suppress(OSError):
            entry.path.unlink()

    def tidy(self) -> None:
        for folder in self._model_folders():
            for path in folder.glob(f"{NEW}*"):
                if _is_abandoned(path):
                    path.unlink(missing_ok=True)
        for path in self.root.glob("written-*"):
            if path != self._ledger():
                path.unlink(missing_ok=True)

    def clear(self) -> int:
        before = self._stored_bytes()
        for folder in self._model_folders():
            shutil.rmtree(folder, ignore_errors=True)  # another process may write, or clear, at the same time
        left = self._stored_bytes()
        if left and before and left >= before:
            raise OSError(f"nothing in {self.root} could be removed")
        return before - left

    def _model_folders(self) -> list[Path]:
        try:
            return [path for path in self.root.iterdir() if MODEL.fullmatch(path.name) and path.is_dir()]
        except OSError:
            return []

    def _all_entries(self) -> list[SegmentEntry]:
        return [entry for folder in self._model_folders() for entry in self.entries(folder.name)]

    def _stored_bytes(self) -> int:
        return sum(entry.size for entry in self._all_entries())

    def _make(self, folder: Path, label: str) -> None:
        for each in (self.root, folder):
            each.mkdir(parents=True, exist_ok=True, mode=0o700)
            each.chmod(0o700)
        named = folder / LABEL
        if not named.exists():
            handle = os.open(named, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(label)

    def _make_room(self, size: int) -> None:
        """Evict the least recently used until ``size`` bytes fit. Raises FullError where they never will."""
        budget = self.total_budget
        disk = shutil.disk_usage(_existing(self.root))
        if disk.free - size < min(RESERVE_BYTES, disk.total // RESERVE_SHARE):
            raise FullError("the disk is nearly full")
        if size > budget:
            raise FullError("it would exceed the size limit of the prompt cache on disk")
        entries = self._all_entries()
        surplus = sum(entry.size for entry in entries) + size - budget
        if surplus <= 0:
            return
        surplus += min(budget // MORE_ROOM, budget - size)  # so that not every write must look for what to remove
        for entry in least_used_first(entries):
            if surplus <= 0:
                return
            self.remove(entry)
            surplus -= entry.size

    def _ledger(self) -> Path:
        return self.root / f"written-{self._today():%Y-%m-%d}"

    def _note(self, size: int) -> None:
        handle = os.open(self._ledger(), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(handle, f"{size}\n".encode())  # one short append: whole, even beside other processes
        finally:
            os.close(handle)


def least_used_first(entries: list[SegmentEntry]) -> list[SegmentEntry]:
    by_name = {entry.name: entry for entry in entries}
    used: dict[str, float] = {}
    depth: dict[str, int] = {}
    for entry in entries:
        at: SegmentEntry | None = entry
        levels = 0
        while at is not None and levels <= len(entries):
            used[at.name] = max(used.get(at.name, 0.0), entry.used)
            at, levels = by_name.get(at.parent), levels + 1
        depth[entry.name] = levels
    return sorted(entries, key=lambda entry: (used[entry.name], -depth[entry.name]))


def _existing(path: Path) -> Path:
    return next((each for each in (path, *path.parents) if each.exists()), path)


def _label(folder: Path) -> str:
    try:
        return read_bytes(folder / LABEL, LABEL_BYTES).decode("utf-8", "replace")[:200]
    except OSError:
        return ""


def _is_abandoned(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            if time.time() - os.fstat(file.fileno()).st_mtime < LEAST_AGE_S:
                return False
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def identity(folder: Path, kv: KVSpec, weights: str, **more: object) -> Identity:
    """Return what a model's keys and values depend on; of ``kv`` all but ``on_full``. Raises OSError."""
    spec = {name: value for name, value in asdict(kv).items() if name != "on_full"}
    versions = {name: metadata.version(name) for name in ("tokamac", "mlx", "mlx-lm")}
    facts = json.dumps([FORMAT, spec, versions, weights, more], sort_keys=True, default=str)
    whole, text = blake2b(facts.encode(), digest_size=16), blake2b(digest_size=16)
    for name in TEXT_FILES:
        if (folder / name).is_file():
            data = read_bytes(folder / name, TOKENIZER_BYTES)
            for each in (whole, text):
                each.update(f"{name} {len(data)} ".encode())
                each.update(data)
    parts = {"weights": weights, "text": text.hexdigest(), "kv": spec, "versions": versions}
    return Identity(whole.hexdigest(), {**parts, "more": {name: str(value) for name, value in more.items()}})


def root_name(model: str, keep: int | None) -> str:
    return blake2b(f"{model} {keep}".encode(), digest_size=16).hexdigest()


def child_name(parent: str, tokens: Sequence[int]) -> str:
    return blake2b(bytes.fromhex(parent) + array("i", tokens).tobytes(), digest_size=16).hexdigest()


def identify(folder: Path, root: Path, then: Callable[[str], None]) -> threading.Thread | None:
    """Call ``then`` with the weights' digest: before returning, or later from the returned thread.

    Never called for unreadable weights; raises OSError where that shows immediately. root: keeps digests.
    """
    remembered = _remembered(root)
    files = weight_files(folder)
    unread = sum(file.stat().st_size for file in files if _known(file, remembered) is None)
    if unread <= AT_ONCE_BYTES:
        then(digest(files, root))
        return None

    def work() -> None:
        with contextlib.suppress(OSError):
            then(digest(files, root))

    thread = threading.Thread(target=work, name="tokamac-weights", daemon=True)
    thread.start()
    return thread


def digest(files: list[Path], root: Path) -> str:
    """Return 32 hexadecimal digits for the files' bytes and names, remembered under ``root``."""
    remembered = _remembered(root)
    whole, learned = blake2b(digest_size=16), {}
    for file in files:
        found = _known(file, remembered)
        if found is None:
            key, found = _key(file), _read(file)
            if _key(file) != key:
                raise OSError(f"{file} changed while it was read")
            learned[key] = found
        whole.update(f"{file.name} {found} ".encode())
    if learned:
        _remember(root, learned)
    return whole.hexdigest()


def known_digest(files: list[Path], root: Path) -> str | None:
    """Return the remembered digest of unchanged files, or None. Raises OSError."""
    remembered = _remembered(root)
    return digest(files, root) if all(_known(file, remembered) for file in files) else None


def _known(file: Path, remembered: dict[str, str]) -> str | None:
    blob = Path(os.path.realpath(file))
    if blob.parent.name == "blobs" and BLOB.fullmatch(blob.name):
        return blob.name
    return remembered.get(_key(file))


def _key(file: Path) -> str:
    at = file.stat()
    return f"{at.st_dev} {at.st_ino} {at.st_size} {at.st_mtime_ns} {at.st_ctime_ns}"


def _read(file: Path) -> str:
    found = xxhash.xxh3_128()
    with open_regular(file) as opened:
        while part := opened.read(READ_BYTES):
            found.update(part)  # lets other threads run
    return found.hexdigest()


def _remembered(root: Path) -> dict[str, str]:
    return {key: found for key, found in hardware.load(root / FILE).items() if isinstance(found, str)}


def _remember(root: Path, learned: dict[str, str]) -> None:
    # Unlocked: if two processes write at the same time, one reads its files again next time.
    with contextlib.suppress(OSError):  # a read-only folder: they are read again next time
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
    known = {key: found for key, found in _remembered(root).items() if key not in learned} | learned
    hardware.write(root / FILE, dict(list(known.items())[-MOST_REMEMBERED:]))


#     magic (16) | segment | segment | … | footer: JSON | its length, 8 bytes | checksum of magic, footer and length, 16 bytes
#
# The footer holds each segment's name and checksum, and the identity they are valid for. Files may come from
# anybody: everything is verified before use, and nothing in them is run.


MAGIC = b"tokamac prompt 1"
TAIL_BYTES = 24
MOST_FOOTER_BYTES = 64 << 20
MOST_SEGMENTS = 1 << 17  # a million tokens in segments of 256 are some four thousand

_NAME = re.compile(r"[0-9a-f]{32}")

# What to call each part of an identity that differs.
DIFFERENCES = {
    "weights": "other weights",
    "text": "another config, tokenizer or chat template",
    "kv": "other KV settings",
    "versions": "other versions",
    "more": "another device, number type or adapter",
}


class PortableError(TokamacError):
    """A file holds no computed prompt, or another model's."""


@dataclass(frozen=True, slots=True)
class Packet:
    parent: str
    name: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Portable:
    """A file's footer. keep: pinned tokens. segments: (parent's name, name, bytes, checksum), in order."""

    model: str
    identity: Identity
    kv: KVSpec
    keep: int | None
    tokens: int
    segments: tuple[tuple[str, str, int, str], ...]


def write_portable(
    file: Path, packets: Iterable[Packet], *, model: str, identity: Identity, kv: KVSpec, keep: int | None, tokens: int
) -> int:
    """Write a computed prompt atomically; return the file's bytes. Raises OptionError."""
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
    """Read and verify a file's footer. Raises TokamacError for a foreign or damaged file."""
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
    """Yield a file's verified segments. Raises TokamacError at the first damaged one."""
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
    """Raise TokamacError, naming the difference, unless the file fits the loaded model."""
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
