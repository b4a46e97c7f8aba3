"""The folder of stored segments, and whose they are. No MLX here.

    <root>/<model fingerprint>/<parent>.<name>.<checksum>.kv      one segment; the checksum covers all its bytes
    <root>/written-2026-11-21                                     a line for each write of that day: its bytes
    <root>/<fingerprint>/.new-…                                   being written, and locked by its writer
    <root>/weights.json                                           digests of weight files that were read

Files are whole or not there, within a total size and a daily amount of writing. A name says what a file is, and its checksum
whether that still holds: a truncated, damaged or swapped file is removed when it is read. Several processes may share the folder:
files appear by renaming, and one that is gone is a miss.

Only the same model, settings and tokens lead to a segment's name. Two models may differ in one layer alone, after a merge or an
edit, so every byte of the weights counts. In the hub's cache a file's name is its SHA-256 already. Any other file is read whole,
once: its digest is remembered by device, inode, size and times of change, which do not survive an edit in place. Where there is
much to read, a thread does it, and until then the prompt cache has no disk.
"""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any

import platformdirs
import xxhash

from ..files import TOKENIZER_BYTES, atomic_write, open_regular, read_bytes, read_text
from ..options import KVSpec
from ..perf import measurement_store

NAME = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{32})\.([0-9a-f]{32})\.kv")
MODEL = re.compile(r"[0-9a-f]{32}")
LABEL = "model.txt"
NEW = ".new-"
LEDGER_BYTES, LABEL_BYTES = 64 << 20, 1 << 20
"""A day's count of writing, and a model's label, at most."""
LEAST_AGE_S = 60.0
"""A file being written is left alone for so long, locked or not."""

TOTAL_BYTES, TOTAL_SHARE = 8 << 30, 10
"""All segments at most: the smaller of these bytes and a tenth of the disk."""
DAILY_BYTES = 16 << 30
"""Written in a day at most: a disk of 1 TB that may be written 600 times over lasts a hundred years of such days."""
MORE_ROOM = 50
"""Where room must be made, a fiftieth of the total is freed beyond it."""
RESERVE_BYTES, RESERVE_SHARE = 1 << 30, 20
"""Left free on the disk: these bytes, or a twentieth of a small disk."""

FORMAT = 2
"""Version of the stored files. It is part of the fingerprint, so files of another version are never found."""
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
AT_ONCE_BYTES = 256 << 20
"""So many unread bytes of weights are read at once; more are read by a thread."""
READ_BYTES = 8 << 20
BLOB = re.compile(r"[0-9a-f]{64}")
"""Where a file of the hub's cache links to: ``blobs/<SHA-256>``."""


class FullError(OSError):
    """A budget does not allow the write."""


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """A stored segment: the names of its parent and itself, its file and size, and when it was last used (seconds)."""

    parent: str
    name: str
    path: Path
    size: int
    used: float


@dataclass(frozen=True, slots=True)
class ModelUsage:
    """What is stored for one model with one KV setting. label: what it was called when it was loaded."""

    fingerprint: str
    label: str
    files: int
    bytes: int
    used: float


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes at most: stored in all, and written in a day. None: the defaults."""

    total: int | None = None
    daily: int | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """What keys and values are computed by. fingerprint: 32 hexadecimal digits; facts: what they were made of, part by part."""

    fingerprint: str
    facts: Mapping[str, Any]


def default_root() -> Path:
    """Return where segments are stored: ``TOKAMAC_CACHE_DIR``, else the user's cache folder."""
    given = os.environ.get("TOKAMAC_CACHE_DIR")
    return (Path(given) if given else platformdirs.user_cache_path("tokamac")) / "prompts"


class Folder:
    """Stored segments under ``root``. Makes nothing before the first write. Methods raise OSError where the disk does."""

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
        """Bytes that may be stored."""
        if self._budgets.total is not None:
            return self._budgets.total
        return min(TOTAL_BYTES, shutil.disk_usage(_existing(self.root)).total // TOTAL_SHARE)

    @property
    def daily_budget(self) -> int:
        """Bytes that may be written in a day."""
        return DAILY_BYTES if self._budgets.daily is None else self._budgets.daily

    def written_today(self) -> int:
        """Return the bytes written today, by all processes."""
        try:
            lines = read_text(self._ledger(), LEDGER_BYTES, "ascii").split()
        except (OSError, ValueError):
            return 0
        return sum(int(line) for line in lines if line.isdigit())

    def models(self) -> list[ModelUsage]:
        """Return what is stored, by model, last used first."""
        found = []
        for folder in self._model_folders():
            entries = list(self.entries(folder.name))
            used = max((entry.used for entry in entries), default=0.0)
            size = sum(entry.size for entry in entries)
            found.append(ModelUsage(folder.name, _label(folder), len(entries), size, used))
        return sorted(found, key=lambda usage: -usage.used)

    def entries(self, model: str) -> Iterator[SegmentEntry]:
        """Yield the segments of a model, in no order."""
        with contextlib.suppress(OSError), os.scandir(self.root / model) as files:
            for file in files:
                if match := NAME.fullmatch(file.name):
                    with contextlib.suppress(OSError):  # removed meanwhile
                        at = file.stat()
                        yield SegmentEntry(match[1], match[2], Path(file.path), at.st_size, at.st_mtime)

    def read(self, entry: SegmentEntry) -> bytes | None:
        """Return a segment's bytes, and note its use; None, and the file is removed, if they are not what was written."""
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
        """Store a segment, making room for it. Raises FullError where a budget forbids it, OSError where the disk does."""
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
        return SegmentEntry(parent, name, path, len(data), path.stat().st_mtime)

    def remove(self, entry: SegmentEntry) -> None:
        """Remove a segment, if it is still there."""
        with contextlib.suppress(OSError):
            entry.path.unlink()

    def tidy(self) -> None:
        """Remove what processes left that died while writing, and the counts of earlier days."""
        for folder in self._model_folders():
            for path in folder.glob(f"{NEW}*"):
                if _is_abandoned(path):
                    path.unlink(missing_ok=True)
        for path in self.root.glob("written-*"):
            if path != self._ledger():
                path.unlink(missing_ok=True)

    def clear(self) -> int:
        """Remove all segments of all models; return the bytes. The day's count of writing stays."""
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
        """Remove the least recently used until ``size`` more bytes fit. Raises FullError where they never will."""
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
    """Sort segments by when they, or any that continue them, were last used; a segment comes after those that continue it."""
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
    """Return the path, or the nearest folder above it that exists."""
    return next((each for each in (path, *path.parents) if each.exists()), path)


def _label(folder: Path) -> str:
    try:
        return read_bytes(folder / LABEL, LABEL_BYTES).decode("utf-8", "replace")[:200]
    except OSError:
        return ""


def _is_abandoned(path: Path) -> bool:
    """Whether nobody writes a file any more. A new one may be about to be locked."""
    try:
        with open_regular(path) as file:
            if time.time() - os.fstat(file.fileno()).st_mtime < LEAST_AGE_S:
                return False
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def identity(folder: Path, kv: KVSpec, weights: str, **more: object) -> Identity:
    """Return what tells the keys and values of a model with its settings apart from all others.

    Args:
        folder: The model's, whose config, tokenizer and template count by content.
        kv: The settings; all but ``on_full`` count.
        weights: A digest of the weights, see ``digest``.
        more: Whatever else decides what keys and values look like (number type, device). So do the versions of this package
            and of the libraries that compute them.

    Raises:
        OSError: A file can't be read.
    """
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
    """Return the name of the empty prefix, made from a model's fingerprint and the number of tokens that its caches pin."""
    return blake2b(f"{model} {keep}".encode(), digest_size=16).hexdigest()


def child_name(parent: str, tokens: Sequence[int]) -> str:
    """Return the name of a prefix, made from its parent's name and the tokens that follow it."""
    return blake2b(bytes.fromhex(parent) + array("i", tokens).tobytes(), digest_size=16).hexdigest()


def identify(folder: Path, root: Path, then: Callable[[str], None]) -> threading.Thread | None:
    """Call ``then`` with the digest of a model folder's weights: before returning, or later from the returned thread.

    root: where digests are remembered. For weights that can't be read, ``then`` is never called; OSError is raised where that is
    found at once.
    """
    remembered = _remembered(root)
    files = sorted(folder.glob("*.safetensors"))
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
    """Return 32 hexadecimal digits for the bytes and the names of these files. Remembers what it reads.

    Raises OSError for a file that can't be read, or changes meanwhile.
    """
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
    """Return the ``digest`` of files that were read before and have not changed since; None where one was not. Raises OSError."""
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
    return {key: found for key, found in measurement_store.load(root / FILE).items() if isinstance(found, str)}


def _remember(root: Path, learned: dict[str, str]) -> None:
    """Add what was learned, newest last. If two processes do so at once, one of them reads its files again next time."""
    with contextlib.suppress(OSError):  # a read-only folder: they are read again next time
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
    known = {key: found for key, found in _remembered(root).items() if key not in learned} | learned
    measurement_store.write(root / FILE, dict(list(known.items())[-MOST_REMEMBERED:]))
