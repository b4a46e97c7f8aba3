"""The working folder of a conversion, how it resumes, and how its result is installed atomically."""

#     parent/out                         the target: absent, or the old folder, until the end
#     parent/.out.partial/model/…        the new one: shards, then small files; on the same disk
#     parent/.out.partial/journal        a line for each written tensor
#     parent/.out.partial/kept/…         results of earlier stages, checksums in their names
#     parent/.out.partial/old            the old folder, until it is removed
#
# The partial folder survives Ctrl-C, a full disk or a crash, but not an error that a rerun can't fix. Journal lines
# follow their bytes, and either may be torn: each line and all bytes have checksums, verified before resuming.

# Install: exchange old and new, move the old one aside, clean up (move aside first where names can't be
# exchanged). Each crash state is recognisable, and ``check_target`` finishes or undoes it. The key noted before
# tells a repeated command that it is done (``is_installed``).

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import xxhash

from tokamac.engine import files
from tokamac.engine.device import device_kind, may_use_tf32
from tokamac.engine.errors import ALLOW, ConversionError, TokamacError, private
from tokamac.engine.files import open_regular, path_to_disk, read_bytes, sizes, sync
from tokamac.engine.model.adapters import Adapter
from tokamac.engine.perf import hardware

from .options import Options
from .report import PACKAGES, WeightError, version_of

SPARE_BYTES = 16 << 20  # left free on the disk: folders and the file system's own bookkeeping

# Hashed, and then written, at a time: it fits a processor's cache, so memory is read once for both.
SLICE_BYTES = 8 << 20

LONGEST_JOURNAL = 256 << 20  # bytes; a tensor takes some hundred

INSTALLED, MOST_INSTALLED = "conversions.json", 100  # which folders conversions have put where, in the user's cache

MODEL, OLD, JOURNAL, KEPT = "model", "old", "journal", "kept"
_OURS = {MODEL, OLD, JOURNAL, f"{JOURNAL}.new", KEPT}

AGAIN = "run the same command again: it continues from here."
AFRESH = "an unfinished conversion from another source, or with other options, was removed"

FORMAT = 1  # of the unfinished folder. Another number is another key, so no version continues what another one wrote.

READ_WHOLE = ("*.json", "*.model", "*.tiktoken", "*.txt", "*.jinja")


def conversion_key(folder: Path, options: Options, adapter: Adapter | None) -> str:
    """Return 32 hexadecimal digits that identify a conversion. Raises OSError."""
    # Weights count by headers, sizes and times; calibration text and adapter by content; all options but
    # ``verify``; versions and the device, since they decide rounding.
    small = sorted({file for pattern in READ_WHOLE for file in folder.glob(pattern) if file.is_file()})
    chosen = {name: value for name, value in asdict(options).items() if name != "verify"}
    text = options.calibration
    chosen["calibration"] = checksum(text) if isinstance(text, Path) else text
    facts = {
        "format": FORMAT,
        "versions": {name: version_of(name) for name in PACKAGES},
        "device": str(mx.default_device()),
        "tf32": may_use_tf32(device_kind()),
        "options": {**chosen, "adapter": None if adapter is None else adapter.digest},
        "files": {file.name: checksum(file) for file in small},
        "weights": {file.name: _weights(file) for file in sorted(folder.glob("*.safetensors"))},
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())


def _weights(file: Path) -> tuple[int, int, str]:
    at = file.stat()
    with open_regular(file) as opened:
        header_bytes = 8 + int.from_bytes(opened.read(8), "little")
    return at.st_size, at.st_mtime_ns, checksum(file, 0, min(header_bytes, at.st_size))


def partial_folder(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def check_target(target: Path, source: Path, *, overwrite: bool) -> None:
    """Raise ConversionError unless ``target`` may be written; first repairs an interrupted install."""
    if target.name in ("", ".."):
        raise ConversionError(
            f"{target} can't be the name of a new folder", "Name the folder itself, such as ./model-4bit."
        )
    if _overlap(target.resolve(), source.resolve()):
        raise ConversionError(
            f"{target} and the source {source} overlap: a source is never written", "Choose another folder."
        )
    _recover(target)
    if not target.exists() and not target.is_symlink():
        return
    if not overwrite:
        raise ConversionError(
            f"{target} already exists",
            "Choose another folder, or replace it with --overwrite (in Python overwrite=True).",
        )
    replaceable = target.is_dir() and not target.is_symlink()
    if not replaceable or (any(target.iterdir()) and not (target / "config.json").is_file()):
        raise ConversionError(f"{target} is not a model folder", "Only a model folder is replaced: choose another.")


def _overlap(target: Path, source: Path) -> bool:
    # By what the file system says they are: on most Macs' disks the case of a name, and how its accents are composed, makes no
    # difference, and a folder may be mounted in two places.
    files = {file.resolve() for file in source.iterdir()} if source.is_dir() else set[Path]()
    holding = {source, *source.parents, *(parent for file in files for parent in file.parents)}
    return _is_one_of(source, {target, *target.parents}) or _is_one_of(target, holding)


def _is_one_of(path: Path, others: Iterable[Path]) -> bool:
    found = _stat(path)
    known = filter(None, map(_stat, others))
    return found is not None and any(os.path.samestat(found, each) for each in known)


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:  # not there, or not ours to see: then nothing of it is read or written
        return None


def _recover(target: Path) -> None:
    root = partial_folder(target)
    whole = (root / MODEL).exists() and not (root / OLD).exists()
    if whole or not root.exists() or not _is_ours(root):
        return
    with writing_to(target), claimed(target):
        _put_back(root, target)
        if not (root / MODEL).exists():
            shutil.rmtree(root)


def free_bytes(target: Path) -> int:
    """Return the disk's free bytes, including an unfinished conversion's."""
    disk = next(parent for parent in target.absolute().parents if parent.exists())
    there = sum(file.lstat().st_size for file in partial_folder(target).rglob("*") if file.is_file())
    return shutil.disk_usage(disk).free + there


def check_space(target: Path, needed_bytes: int) -> None:
    """Raise ConversionError where the disk has too few free bytes."""
    needed_bytes, free = needed_bytes + SPARE_BYTES, free_bytes(target)
    if free < needed_bytes:
        needed, left = sizes(needed_bytes, free)
        raise ConversionError(
            f"{target} needs {needed} and its disk has {left} left",
            "Free some space, or choose a folder on another disk.",
        )


@contextmanager
def writing_to(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "Free some space" if full else ALLOW if private(error) else "Check its disk and permissions"
        then = f", then {AGAIN}" if partial_folder(target).exists() else ", or choose another folder."
        what = f" ({error.filename})" if error.filename else ""
        raise ConversionError(f"{target} can't be written: {error.strerror or error}{what}", remedy + then) from error


@contextmanager
def open_work_dir(target: Path, key: str) -> Iterator["WorkDir"]:
    """Yield the verified working folder of ``target``, which it replaces at the end.

    key: identifies the run to resume; other work is removed. Raises ConversionError where another process works
    there, or the disk refuses; the target is then as it was.
    """
    with writing_to(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with claimed(target) as root:
            _put_back(root, target)
            replace = target.exists()
            with _left_if_it_helps(root, target), WorkDir(root, key) as work:
                yield work
                _install(root, target, key, replace=replace)


@contextmanager
def _left_if_it_helps(root: Path, target: Path) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        unfinished = read_journal(root / JOURNAL).records or any((root / KEPT).glob("*"))
        if isinstance(error, TokamacError) or not unfinished or not (root / MODEL).exists():
            _put_back(root, target)
            shutil.rmtree(root, ignore_errors=True)  # what can't be removed is seen, and the next run tries again
        else:
            error.add_note(f"To finish the conversion, {AGAIN}")
        raise


class WorkDir:
    """A partial folder, locked by this process. Methods raise OSError. resumed: tensors already written."""

    def __init__(self, root: Path, key: str) -> None:
        found = read_journal(root / JOURNAL)
        ours = found.key == key
        if not ours:
            for path in root.iterdir():
                _remove(path)
        self.folder, self._kept = root / MODEL, root / KEPT
        for path in (self.folder, self._kept):
            path.mkdir(exist_ok=True)
        self.notes = () if ours or found.key is None else (AFRESH,)
        whole = found.entries[: intact(self.folder, found.entries)] if ours else ()
        self._journal = Journal(root / JOURNAL, key, whole)
        self._cut_back()
        for path in (root, root.parent):
            sync(path)
        self.resumed = len(whole)

    @property
    def entries(self) -> tuple["TensorEntry", ...]:
        return tuple(self._journal.entries)

    def add(self, entry: "TensorEntry", *, synced: bool) -> None:
        self._journal.add(entry)
        if synced:
            sync(self.folder)
            self._journal.sync()

    def cut(self, count: int) -> None:
        if count >= len(self.entries):
            return
        self._journal.cut(count)
        self._cut_back()
        self.resumed = min(self.resumed, count)

    def stage(self, name: str, compute: Callable[[], bytes]) -> bytes:
        for file in list(self._kept.iterdir()):
            mark, _, stage = file.name.partition("-")
            if stage == name:
                if checksum(file) == mark:
                    return file.read_bytes()
                file.unlink()
        data = compute()
        (self._kept / f"{xxhash.xxh3_128_hexdigest(data)}-{name}").write_bytes(data)
        return data

    def _cut_back(self) -> None:
        ends = {entry.shard: entry.end for entry in self.entries}
        for path in self.folder.iterdir():
            if path.name in ends:
                os.truncate(path, ends[path.name])
            else:
                _remove(path)

    def __enter__(self) -> "WorkDir":
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextmanager
def claimed(target: Path) -> Iterator[Path]:
    """Make and lock the partial folder until the end. Raises ConversionError if taken; OSError."""
    # A lock that goes with the process, however it ends.
    root = partial_folder(target)
    if not _is_ours(root):
        raise ConversionError(f"{root} is in the way: it holds no unfinished conversion", "Move it elsewhere.")
    handle = _locked(root, target)
    try:
        yield root
    finally:
        os.close(handle)


def _is_ours(root: Path) -> bool:
    if root.is_symlink() or not root.exists():
        return not root.is_symlink()
    return root.is_dir() and ((root / JOURNAL).is_file() or {path.name for path in root.iterdir()} <= _OURS)


def _locked(root: Path, target: Path) -> int:
    while True:
        root.mkdir(exist_ok=True)
        try:
            handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:  # the process that had it has just finished, and removed it
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if root.exists() and os.path.samestat(root.stat(), os.fstat(handle)):
                return handle
        except BlockingIOError as error:
            os.close(handle)
            raise ConversionError(
                f"another conversion is writing to {target}", "Wait until it has finished, or choose another folder."
            ) from error
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # removed while it was being locked


def is_installed(target: Path, key: str) -> bool:
    """Whether this very conversion is installed at ``target``. Raises OSError."""
    known = hardware.load(hardware.store_file(INSTALLED))
    return target.is_dir() and known.get(str(target.absolute())) == _mark(target, key)


def remove_partial(target: Path) -> None:
    """Remove a crash's leftovers. Raises ConversionError where another process works there; OSError."""
    if partial_folder(target).exists():
        with claimed(target) as root:
            shutil.rmtree(root)


def _install(root: Path, target: Path, key: str, *, replace: bool) -> None:
    for path in (*(root / MODEL).rglob("*"), root / MODEL):
        sync(path)
    path_to_disk(root / MODEL)
    if target.exists() and not replace:
        raise FileExistsError(errno.EEXIST, "a folder of that name has appeared meanwhile")
    file, name = hardware.store_file(INSTALLED), str(target.absolute())
    known = {other: mark for other, mark in hardware.load(file).items() if other != name}
    latest = [*known.items(), (name, _mark(root / MODEL, key))][-MOST_INSTALLED:]
    hardware.write(file, dict(latest))
    shutil.rmtree(root / OLD, ignore_errors=True)
    exchanged = target.exists() and files.exchange(root / MODEL, target)
    try:
        if not exchanged:
            if target.exists():
                target.rename(root / OLD)
            (root / MODEL).rename(target)
        sync(target.parent)
    except BaseException:
        if exchanged:
            files.exchange(root / MODEL, target)
        _put_back(root, target)
        raise
    if exchanged:
        (root / MODEL).rename(root / OLD)  # a crash from here on leaves what ``_recover`` removes
    shutil.rmtree(root, ignore_errors=True)


def _mark(folder: Path, key: str) -> str:
    at = folder.stat()
    return f"{key} {at.st_dev} {at.st_ino}"


def _put_back(root: Path, target: Path) -> None:
    if (root / OLD).exists() and not target.exists():
        (root / OLD).rename(target)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A journal line for a written tensor.

    end: bytes of its shard so far. checksum: XXH3, 128 bits, since the previous entry or the shard's beginning.
    """

    tensor: str
    shard: str
    end: int
    checksum: str
    error: WeightError | None


@dataclass(frozen=True, slots=True)
class FoundJournal:
    """A journal on disk. key: None where unreadable. records: in the format of that key's version."""

    key: str | None
    records: tuple[dict[str, Any], ...]

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        errors = (record["error"] for record in self.records)
        known = (None if error is None else WeightError(**error) for error in errors)
        return tuple(
            TensorEntry(**{**record, "error": error}) for record, error in zip(self.records, known, strict=True)
        )


def read_journal(file: Path) -> FoundJournal:
    records = list(_whole_lines(file))
    if not records or set(records[0]) != {"key"}:
        return FoundJournal(None, ())
    return FoundJournal(str(records[0]["key"]), tuple(records[1:]))


def intact(folder: Path, entries: Sequence[TensorEntry]) -> int:
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
    """A journal being written; atomically replaces the one on disk."""

    def __init__(self, file: Path, key: str, entries: Sequence[TensorEntry]) -> None:
        self._file, self._key = file, key
        self.entries = list(entries)
        self._handle = self._written_anew()

    def add(self, entry: TensorEntry) -> None:
        append(self._handle, _line(asdict(entry)))
        self.entries.append(entry)

    def cut(self, count: int) -> None:
        del self.entries[count:]
        old, self._handle = self._handle, self._written_anew()
        os.close(old)

    def sync(self) -> None:
        os.fsync(self._handle)

    def close(self) -> None:
        os.close(self._handle)

    def _written_anew(self) -> int:
        new = self._file.with_name(f"{self._file.name}.new")
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            append(handle, b"".join([_line({"key": self._key}), *(_line(asdict(entry)) for entry in self.entries)]))
            os.fsync(handle)
            new.replace(self._file)
        except BaseException:
            os.close(handle)
            raise
        return handle


def _line(record: dict[str, Any]) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return xxhash.xxh3_64_hexdigest(text).encode() + b" " + text + b"\n"


def _whole_lines(file: Path) -> Iterator[dict[str, Any]]:
    content = read_bytes(file, LONGEST_JOURNAL) if file.is_file() else b""
    for line in content.splitlines(keepends=True):
        mark, _, text = line.removesuffix(b"\n").partition(b" ")
        if not line.endswith(b"\n") or xxhash.xxh3_64_hexdigest(text).encode() != mark:
            return
        yield json.loads(text)


def append(handle: int, data: memoryview | bytes, hashed: Callable[[memoryview], object] = lambda _: None) -> None:
    """Write ``data`` in slices, each passed to ``hashed`` first. Raises OSError."""
    # Unbuffered and without copies: written data survives the end of the process.
    view = memoryview(data)
    for start in range(0, len(view), SLICE_BYTES):
        part = view[start : start + SLICE_BYTES]
        hashed(part)
        while part:
            part = part[os.write(handle, part) :]  # a disk that fills up takes a part, and fails the next time


def checksum(file: Path, start: int = 0, end: int | None = None) -> str:
    """Return XXH3 (128 bits, hexadecimal) of a file's bytes [start, end)."""
    digest, left = xxhash.xxh3_128(), file.stat().st_size - start if end is None else end - start
    buffer = memoryview(bytearray(min(SLICE_BYTES, max(left, 1))))
    with open_regular(file) as opened:
        opened.seek(start)
        while left > 0 and (count := opened.readinto(buffer[:left])):
            digest.update(buffer[:count])
            left -= count
    return digest.hexdigest()
