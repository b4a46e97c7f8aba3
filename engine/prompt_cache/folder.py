"""The folder of stored segments: files that are whole or not there, within a total size and a daily amount of writing. No MLX here.

    <root>/<model fingerprint>/<parent>.<name>.<checksum>.kv      one segment; the checksum is of all its bytes
    <root>/written-2026-11-21                                     a line for each write of that day: its bytes
    <root>/<fingerprint>/.new-…                                   being written, and locked by who does

A name says what a file is, and the checksum in it whether that is still so: a file that was cut short, damaged or swapped is
removed when it is read. Several processes may use the folder: files appear by renaming, and who finds one gone has a miss.
"""

import contextlib
import datetime
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import xxhash

from tokamac.engine.durable import sync, to_disk
from tokamac.engine.regular_files import open_regular, read_bytes, read_text

NAME = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{32})\.([0-9a-f]{32})\.kv")
MODEL = re.compile(r"[0-9a-f]{32}")
LABEL = "model.txt"
LEDGER_BYTES, LABEL_BYTES = 64 << 20, 1 << 20
"""A day's count of writing, and a model's label, at most."""
LEAST_AGE_S = 60.0
"""A file that is being written is left alone for so long, locked or not."""

TOTAL_BYTES, TOTAL_SHARE = 8 << 30, 10
"""All segments at most: so many bytes, and one part in ten of the disk."""
DAILY_BYTES = 16 << 30
"""Written in a day at most: a disk of 1 TB that may be written 600 times over lasts a hundred years of such days."""
MORE_ROOM = 50
"""Where room must be made, one part in so many of the total is freed beyond it."""
RESERVE_BYTES, RESERVE_SHARE = 1 << 30, 20
"""Left free on the disk: so many bytes, or one part in twenty of a small one."""


class FullError(OSError):
    """A budget does not allow to write."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored segment: the names of its parent and itself, its file and size, and when it was last of use (seconds)."""

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

    def entries(self, model: str) -> Iterator[Entry]:
        """Yield the segments of a model, in no order."""
        with contextlib.suppress(OSError), os.scandir(self.root / model) as files:
            for file in files:
                if match := NAME.fullmatch(file.name):
                    with contextlib.suppress(OSError):  # removed meanwhile
                        at = file.stat()
                        yield Entry(match[1], match[2], Path(file.path), at.st_size, at.st_mtime)

    def read(self, entry: Entry) -> bytes | None:
        """Return a segment's bytes, and note its use; None, and the file is gone, if they are not what was written."""
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

    def write(self, model: str, label: str, parent: str, name: str, data: bytes) -> Entry:
        """Store a segment, making room for it. Raises FullError where a budget forbids it, OSError where the disk does."""
        if self.written_today() + len(data) > self.daily_budget:
            raise FullError("the daily budget for writing the prompt cache is used up")
        self._make_room(len(data))
        folder = self.root / model
        self._make(folder, label)
        path = folder / f"{parent}.{name}.{xxhash.xxh3_128_hexdigest(data)}.kv"
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".new-")  # mode 0600
        try:
            with os.fdopen(handle, "wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # says that its writer lives, also to another container
                file.write(data)
                file.flush()
                to_disk(file.fileno())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        sync(folder)
        self._note(len(data))
        return Entry(parent, name, path, len(data), path.stat().st_mtime)

    def remove(self, entry: Entry) -> None:
        """Remove a segment, if it is still there."""
        with contextlib.suppress(OSError):
            entry.path.unlink()

    def tidy(self) -> None:
        """Remove what processes left that died while they wrote, and the counts of earlier days."""
        for folder in self._model_folders():
            for path in folder.glob(".new-*"):
                if _is_abandoned(path):
                    path.unlink(missing_ok=True)
        for path in self.root.glob("written-*"):
            if path != self._ledger():
                path.unlink(missing_ok=True)

    def clear(self) -> int:
        """Remove all segments of all models; return the bytes. The day's count of writing stays."""
        freed = 0
        for folder in self._model_folders():
            freed += sum(entry.size for entry in self.entries(folder.name))
            shutil.rmtree(folder, ignore_errors=True)  # another process may write, or clear, at the same time
        left = sum(entry.size for folder in self._model_folders() for entry in self.entries(folder.name))
        if left and freed and left >= freed:
            raise OSError(f"nothing of {self.root} could be removed")
        return freed - left

    def _model_folders(self) -> list[Path]:
        try:
            return [path for path in self.root.iterdir() if MODEL.fullmatch(path.name) and path.is_dir()]
        except OSError:
            return []

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
        """Remove what was not used for longest until ``size`` more bytes fit. Raises FullError where they never will."""
        budget = self.total_budget
        disk = shutil.disk_usage(_existing(self.root))
        if disk.free - size < min(RESERVE_BYTES, disk.total // RESERVE_SHARE):
            raise FullError("the disk is nearly full")
        if size > budget:
            raise FullError("the prompt cache on disk may not grow so large")
        entries = [entry for folder in self._model_folders() for entry in self.entries(folder.name)]
        surplus = sum(entry.size for entry in entries) + size - budget
        if surplus <= 0:
            return
        surplus += min(budget // MORE_ROOM, budget - size)  # so that not every write looks for what to remove
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
            os.write(handle, f"{size}\n".encode())  # one short write to the end: whole, also beside other processes
        finally:
            os.close(handle)


def least_used_first(entries: list[Entry]) -> list[Entry]:
    """Sort segments by when they, or any that continue them, were last of use; what is continued comes after what continues it."""
    by_name = {entry.name: entry for entry in entries}
    used: dict[str, float] = {}
    depth: dict[str, int] = {}
    for entry in entries:
        at: Entry | None = entry
        levels = 0
        while at is not None and levels <= len(entries):
            used[at.name] = max(used.get(at.name, 0.0), entry.used)
            at, levels = by_name.get(at.parent), levels + 1
        depth[entry.name] = levels
    return sorted(entries, key=lambda entry: (used[entry.name], -depth[entry.name]))


def _existing(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _label(folder: Path) -> str:
    try:
        return read_bytes(folder / LABEL, LABEL_BYTES).decode("utf-8", "replace")[:200]
    except OSError:
        return ""


def _is_abandoned(path: Path) -> bool:
    """Whether nobody writes a file any more. One that was made just now may be about to be locked."""
    try:
        with open_regular(path) as file:
            if time.time() - os.fstat(file.fileno()).st_mtime < LEAST_AGE_S:
                return False
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
