"""Where a conversion works until it is finished, what it finds there of an earlier run, and how its folder appears, whole.

    parent/out                         the target: not there, or the old folder, until the end
    parent/.out.partial/model/…        the new one: shards, then the small files; on the same disk
    parent/.out.partial/journal        what is written, a line for each tensor: the next run continues behind the last one
    parent/.out.partial/kept/…         results of earlier stages, each with its checksum in its name
    parent/.out.partial/old            the old folder, until it is removed

    with open_work_dir(target, conversion_key(folder, options, adapter)) as work:
        …                              measure: work.stage(name, compute)
        write(plan, …, work, …)        tensors: those before work.resumed are there
    # now the folder is at target

The partial folder stays where the next run can continue: after Ctrl-C, a full disk, a crash. It is removed where it would not help:
after an error that says that this model can't be converted like this.

A line of the journal is appended after the bytes that it tells of. Either may be missing or torn after a crash, and after a power
cut the disk may even hold the line without the bytes. So nothing is believed: each line has a checksum, reading ends at the first
line that is not whole, and every byte is compared with its checksum before the next run builds on it.

The last steps are: exchange the old folder with the new one, move the old one aside, remove what is left. Where the system can't
exchange two names, the old one is moved aside first. A crash between any two steps leaves a state that tells which they were, and
``check_target`` finishes or undoes them. Which folder is about to be installed is noted before, so that the same command, repeated
after a crash that came later, finds out that it has nothing to do (``is_installed``).
"""

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
from tokamac.engine.files import open_regular, path_to_disk, read_bytes, sync
from tokamac.engine.model.adapters import Adapter
from tokamac.engine.perf import measurement_store
from tokamac.engine.units import sizes

from .options import Options
from .provenance import PACKAGES, version_of
from .report import WeightError

SPARE_BYTES = 16 << 20
"""Left free on the disk: folders and the file system's own bookkeeping."""

SLICE_BYTES = 8 << 20
"""Hashed, and then written, at a time: it fits a processor's cache, so memory is read once for both."""

LONGEST_JOURNAL = 256 << 20
"""Bytes; a tensor takes some hundred."""

INSTALLED, MOST_INSTALLED = "conversions.json", 100
"""Which folders conversions have put where, in the user's cache."""

MODEL, OLD, JOURNAL, KEPT = "model", "old", "journal", "kept"
_OURS = {MODEL, OLD, JOURNAL, f"{JOURNAL}.new", KEPT}

AGAIN = "run the same command again: it continues from here."
AFRESH = "an unfinished conversion from another source, or with other options, was removed"

FORMAT = 1
"""Of the unfinished folder. Another number is another key, so no version continues what another one wrote."""

READ_WHOLE = ("*.json", "*.model", "*.tiktoken", "*.txt", "*.jinja")


def conversion_key(folder: Path, options: Options, adapter: Adapter | None) -> str:
    """Return 32 hexadecimal digits that tell a conversion of ``folder`` with ``options`` from any other.

    Of the source: small files whole; of the weights, headers, sizes and times of change. Of the options: all but ``verify``, which
    no weight depends on; a calibration text and an adapter by their content. Versions and the device count too: they decide how
    values are rounded. Raises OSError where a file can't be read.
    """
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
    """Return the folder that holds an unfinished conversion to ``target``: a sibling whose name follows from it."""
    return target.with_name(f".{target.name}.partial")


def check_target(target: Path, source: Path, *, overwrite: bool) -> None:
    """Raise ConversionError unless ``target`` may be written: not in the way of the source, and new, or a model to replace.

    What a crash left in the last steps of an earlier conversion to it is put right first.
    """
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
    """Say whether one of two resolved folders holds the other, or the files that the source's links lead to."""
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
    """Return the free bytes on the disk of ``target``, what an unfinished conversion to it holds counted in."""
    disk = next(parent for parent in target.absolute().parents if parent.exists())
    there = sum(file.lstat().st_size for file in partial_folder(target).rglob("*") if file.is_file())
    return shutil.disk_usage(disk).free + there


def check_space(target: Path, needed_bytes: int) -> None:
    """Raise ConversionError where the disk of ``target`` has fewer bytes free than needed."""
    needed_bytes, free = needed_bytes + SPARE_BYTES, free_bytes(target)
    if free < needed_bytes:
        needed, left = sizes(needed_bytes, free)
        raise ConversionError(
            f"{target} needs {needed} and its disk has {left} left",
            "Free some space, or choose a folder on another disk.",
        )


@contextmanager
def writing_to(target: Path) -> Iterator[None]:
    """Make a ConversionError of what the disk refuses, with a hint that fits what remains to continue from."""
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
    """Yield the folder to write ``target`` in; at the end, what is in it takes the place of ``target``.

    key: what an earlier run must have had for this one to continue it; the work of any other is removed. What was written is
    checked first. Raises ConversionError where another process works there, or the disk refuses; the target is then as it was.
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
    """A partial folder that this process holds. Methods raise OSError.

    folder: to be filled with what the target shall hold, and nothing else. resumed: tensors that an earlier run wrote.
    notes: what a user should know.
    """

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
        """The tensors that are written, in order."""
        return tuple(self._journal.entries)

    def add(self, entry: "TensorEntry", *, synced: bool) -> None:
        """Note a tensor whose bytes are written. synced: they are on the disk, and what leads to them shall be."""
        self._journal.add(entry)
        if synced:
            sync(self.folder)
            self._journal.sync()

    def cut(self, count: int) -> None:
        """Forget all tensors but the first ``count``, and remove their bytes."""
        if count >= len(self.entries):
            return
        self._journal.cut(count)
        self._cut_back()
        self.resumed = min(self.resumed, count)

    def stage(self, name: str, compute: Callable[[], bytes]) -> bytes:
        """Return what a stage came to in an earlier run, if it is whole; else what ``compute`` returns, stored for later runs."""
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
        """Leave nothing in the folder but the bytes that the entries tell of."""
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
    """Make the partial folder of ``target`` where there is none, and yield it, locked for this process until the end.

    The lock goes with the process, however that ends. Raises ConversionError where another one holds it, or where something
    else has that name; OSError.
    """
    root = partial_folder(target)
    if not _is_ours(root):
        raise ConversionError(f"{root} is in the way: it holds no unfinished conversion", "Move it elsewhere.")
    handle = _locked(root, target)
    try:
        yield root
    finally:
        os.close(handle)


def _is_ours(root: Path) -> bool:
    """Say whether a partial folder of that name may be used: new, begun, or half removed by an earlier run."""
    if root.is_symlink() or not root.exists():
        return not root.is_symlink()
    return root.is_dir() and ((root / JOURNAL).is_file() or {path.name for path in root.iterdir()} <= _OURS)


def _locked(root: Path, target: Path) -> int:
    """Return a handle that holds the lock of ``root``."""
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
    """Whether ``target`` is the very folder that a conversion with this key has put there. Raises OSError."""
    known = measurement_store.load(measurement_store.store_file(INSTALLED))
    return target.is_dir() and known.get(str(target.absolute())) == _mark(target, key)


def remove_partial(target: Path) -> None:
    """Remove what a crash left beside a target that is whole. Raises ConversionError where another process works there; OSError."""
    if partial_folder(target).exists():
        with claimed(target) as root:
            shutil.rmtree(root)


def _install(root: Path, target: Path, key: str, *, replace: bool) -> None:
    """Put what was written in the place of ``target``, on the disk. After an OSError the target is what it was."""
    for path in (*(root / MODEL).rglob("*"), root / MODEL):
        sync(path)
    path_to_disk(root / MODEL)
    if target.exists() and not replace:
        raise FileExistsError(errno.EEXIST, "a folder of that name has appeared meanwhile")
    file, name = measurement_store.store_file(INSTALLED), str(target.absolute())
    known = {other: mark for other, mark in measurement_store.load(file).items() if other != name}
    latest = [*known.items(), (name, _mark(root / MODEL, key))][-MOST_INSTALLED:]
    measurement_store.write(file, dict(latest))
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
    """Return the old folder to its place, if it was moved aside and nothing has come there."""
    if (root / OLD).exists() and not target.exists():
        (root / OLD).rename(target)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor that is written: a line of the journal.

    end: bytes of its shard up to and with it. checksum: XXH3, 128 bits, of the bytes since the entry before in the same
    shard; those of a shard's first tensor begin with the header. error: if it was packed; else None.
    """

    tensor: str
    shard: str
    end: int
    checksum: str
    error: WeightError | None


@dataclass(frozen=True, slots=True)
class FoundJournal:
    """A journal as it was found. key: None where there is none that can be read. records: as they were written, under that key."""

    key: str | None
    records: tuple[dict[str, Any], ...]

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """The tensors. Only for a key of one's own: another version may have written other fields."""
        errors = (record["error"] for record in self.records)
        known = (None if error is None else WeightError(**error) for error in errors)
        return tuple(
            TensorEntry(**{**record, "error": error}) for record, error in zip(self.records, known, strict=True)
        )


def read_journal(file: Path) -> FoundJournal:
    """Return what is whole of a journal, from its beginning."""
    records = list(_whole_lines(file))
    if not records or set(records[0]) != {"key"}:
        return FoundJournal(None, ())
    return FoundJournal(str(records[0]["key"]), tuple(records[1:]))


def intact(folder: Path, entries: Sequence[TensorEntry]) -> int:
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

    def __init__(self, file: Path, key: str, entries: Sequence[TensorEntry]) -> None:
        self._file, self._key = file, key
        self.entries = list(entries)
        self._handle = self._written_anew()

    def add(self, entry: TensorEntry) -> None:
        """Append an entry whose bytes are written."""
        append(self._handle, _line(asdict(entry)))
        self.entries.append(entry)

    def cut(self, count: int) -> None:
        """Forget all entries but the first ``count``."""
        del self.entries[count:]
        old, self._handle = self._handle, self._written_anew()
        os.close(old)

    def sync(self) -> None:
        """Return when all entries are on the disk."""
        os.fsync(self._handle)

    def close(self) -> None:
        """Close the file."""
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
    """Write ``data`` to a file descriptor, slice by slice; ``hashed`` is given each slice before it is written.

    No buffer and no copy: what this function has returned from survives the end of the process. Raises OSError.
    """
    view = memoryview(data)
    for start in range(0, len(view), SLICE_BYTES):
        part = view[start : start + SLICE_BYTES]
        hashed(part)
        while part:
            part = part[os.write(handle, part) :]  # a disk that fills up takes a part, and fails the next time


def checksum(file: Path, start: int = 0, end: int | None = None) -> str:
    """Return the XXH3 checksum (128 bits, hexadecimal) of a file's bytes from ``start`` to ``end``, or to where it ends before."""
    digest, left = xxhash.xxh3_128(), file.stat().st_size - start if end is None else end - start
    buffer = memoryview(bytearray(min(SLICE_BYTES, max(left, 1))))
    with open_regular(file) as opened:
        opened.seek(start)
        while left > 0 and (count := opened.readinto(buffer[:left])):
            digest.update(buffer[:count])
            left -= count
    return digest.hexdigest()
