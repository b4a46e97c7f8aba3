"""The folder that is written: where it may be, and how it appears whole or not at all.

    parent/out                         the target: not there, or the old one, until the end
    parent/.out.partial/model          everything is written here, on the same disk
    parent/.out.partial/old            the old one, until it is removed
    parent/.out.partial/…              what the next run needs to go on (workplace.py)

The last steps are: exchange the old folder with the new one, move the old one aside, remove what is left. Where the system can't
exchange two names, the old one is moved aside first. A crash between any two steps leaves a state that tells which they were, and
``check_target`` finishes or undoes them. Which folder is about to be installed is noted before, so that the same command, repeated
after a crash that came later, finds out that it has nothing to do (``is_installed``).
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tokamac.engine import durable
from tokamac.engine.durable import path_to_disk, sync
from tokamac.engine.errors import ALLOW, ConversionError, private
from tokamac.engine.limits import kept
from tokamac.engine.limits.ladder import told_apart

SPARE_BYTES = 16 << 20
"""Left free on the disk: folders and the file system's own bookkeeping."""

INSTALLED = "conversions.json"
"""Which folders conversions have put where, in the user's cache."""
MOST_INSTALLED = 100

MODEL, OLD, JOURNAL, KEPT = "model", "old", "journal", "kept"
_OURS = {MODEL, OLD, JOURNAL, f"{JOURNAL}.new", KEPT}

AGAIN = "run the same command again: it goes on where this one ended."


def partial_folder(target: Path) -> Path:
    """Return the folder that holds an unfinished conversion to ``target``: a sibling whose name follows from it."""
    return target.with_name(f".{target.name}.partial")


def check_target(target: Path, source: Path, *, overwrite: bool) -> None:
    """Raise ConversionError unless ``target`` may be written: not in the way of the source, and new, or a model to replace.

    What a crash left in the last steps of an earlier conversion to it is put right first.
    """
    if target.name in ("", ".."):
        raise ConversionError(f"{target} is no name for a new folder", "Name the folder itself, such as ./model-4bit.")
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
    """Say whether one of two resolved folders holds the other, or the files that the source's links lead to.

    By what the file system says they are: on most Macs' disks the case of a name, and how its accents are composed, makes no
    difference, and a folder may be mounted in two places.
    """
    files = {file.resolve() for file in source.iterdir()} if source.is_dir() else set[Path]()
    holding = {source, *source.parents, *(parent for file in files for parent in file.parents)}
    return _is_one_of(source, {target, *target.parents}) or _is_one_of(target, holding)


def _is_one_of(path: Path, others: Iterable[Path]) -> bool:
    found = _stat(path)
    return found is not None and any(
        known is not None and os.path.samestat(found, known) for known in map(_stat, others)
    )


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:  # not there, or not ours to see: then nothing of it is read or written
        return None


def free_bytes(target: Path) -> int:
    """Return the room on the disk of ``target``, what an unfinished conversion to it holds counted in."""
    place = next(parent for parent in target.absolute().parents if parent.exists())
    there = sum(file.lstat().st_size for file in partial_folder(target).rglob("*") if file.is_file())
    return shutil.disk_usage(place).free + there


def check_space(target: Path, needed_bytes: int) -> None:
    """Raise ConversionError where the disk of ``target`` has less room than needed."""
    needed_bytes, free = needed_bytes + SPARE_BYTES, free_bytes(target)
    if free < needed_bytes:
        needed, left = told_apart(needed_bytes, free)
        raise ConversionError(
            f"{target} needs {needed} and its disk has {left} left",
            "Free some space, or choose a folder on another disk.",
        )


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


def is_installed(target: Path, key: str) -> bool:
    """Whether ``target`` is the very folder that a conversion with this key has put there. Raises OSError."""
    return target.is_dir() and kept.load(kept.store_file(INSTALLED)).get(str(target.absolute())) == _mark(target, key)


def remove_partial(target: Path) -> None:
    """Remove what a crash left beside a target that is whole. Raises ConversionError where another process works there; OSError."""
    if partial_folder(target).exists():
        with claimed(target) as root:
            shutil.rmtree(root)


def install(root: Path, target: Path, key: str, *, replace: bool) -> None:
    """Put what was written in the place of ``target``, on the disk, and remove the partial folder.

    key: of the conversion. replace: there was a target at the beginning. Raises OSError; the target is then what it was.
    """
    for path in (*(root / MODEL).rglob("*"), root / MODEL):
        sync(path)
    path_to_disk(root / MODEL)
    if target.exists() and not replace:
        raise FileExistsError(errno.EEXIST, "a folder of that name has appeared meanwhile")
    file = kept.store_file(INSTALLED)
    known = {name: mark for name, mark in kept.load(file).items() if name != str(target.absolute())}
    kept.write(file, dict([*known.items(), (str(target.absolute()), _mark(root / MODEL, key))][-MOST_INSTALLED:]))
    shutil.rmtree(root / OLD, ignore_errors=True)
    exchanged = target.exists() and durable.exchange(root / MODEL, target)
    try:
        if not exchanged:
            if target.exists():
                target.rename(root / OLD)
            (root / MODEL).rename(target)
        sync(target.parent)
    except BaseException:
        if exchanged:
            durable.exchange(root / MODEL, target)
        put_back(root, target)
        raise
    if exchanged:
        (root / MODEL).rename(root / OLD)  # a crash from here on leaves what ``_recover`` removes
    shutil.rmtree(root, ignore_errors=True)


def _mark(folder: Path, key: str) -> str:
    at = folder.stat()
    return f"{key} {at.st_dev} {at.st_ino}"


def discard(root: Path, target: Path) -> None:
    """Remove the partial folder, and leave the target as it was before the conversion."""
    put_back(root, target)
    shutil.rmtree(root, ignore_errors=True)  # what can't be removed is seen, and the next run tries again


def put_back(root: Path, target: Path) -> None:
    """Return the old folder to its place, if it was moved aside and nothing has come there."""
    if (root / OLD).exists() and not target.exists():
        (root / OLD).rename(target)


@contextmanager
def writing_to(target: Path) -> Iterator[None]:
    """Make a ConversionError of what the disk refuses, with a hint that fits what is left to go on with."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "Free some space" if full else ALLOW if private(error) else "Check its disk and permissions"
        then = f", then {AGAIN}" if partial_folder(target).exists() else ", or choose another folder."
        what = f" ({error.filename})" if error.filename else ""
        raise ConversionError(f"{target} can't be written: {error.strerror or error}{what}", remedy + then) from error


def _recover(target: Path) -> None:
    root = partial_folder(target)
    whole = (root / MODEL).exists() and not (root / OLD).exists()
    if whole or not root.exists() or not _is_ours(root):
        return
    with writing_to(target), claimed(target):
        put_back(root, target)
        if not (root / MODEL).exists():
            shutil.rmtree(root)


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
                f"another conversion is writing {target}", "Wait until it has finished, or choose another folder."
            ) from error
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # removed while it was being locked
