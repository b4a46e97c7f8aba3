"""A folder that appears whole or not at all.

Everything is written to a hidden sibling (so: the same disk) and renamed when it is finished and on the disk. Whatever ends the
work early, an error or Ctrl-C, removes the sibling; an older folder of the same name stays until the very end.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokamac.engine.errors import ConversionError

SPARE_BYTES = 16 << 20
"""Left free on the disk: folders and the file system's own bookkeeping."""


def check_target(target: Path, source: Path, *, overwrite: bool) -> None:
    """Raise ConversionError unless ``target`` may be written: not in the way of the source, and new, or a model to replace."""
    ours, theirs = target.resolve(), source.resolve()
    if ours == theirs or theirs in ours.parents or ours in theirs.parents:
        raise ConversionError(
            f"{target} and the source {source} overlap: a source is never written", "Choose another folder."
        )
    if not target.exists() and not target.is_symlink():
        return
    if not overwrite:
        raise ConversionError(f"{target} already exists", "Choose another folder, or add --overwrite to replace it.")
    replaceable = target.is_dir() and not target.is_symlink()
    if not replaceable or (any(target.iterdir()) and not (target / "config.json").is_file()):
        raise ConversionError(f"{target} is not a model folder", "Only a model folder is replaced: choose another.")


def check_space(target: Path, needed_bytes: int) -> None:
    """Raise ConversionError where the disk of ``target`` has less room than needed."""
    place = next(parent for parent in target.absolute().parents if parent.exists())
    free = shutil.disk_usage(place).free
    if free < needed_bytes + SPARE_BYTES:
        raise ConversionError(
            f"{target} needs {needed_bytes / 1e9:.3f} GB and its disk has {free / 1e9:.3f} GB left",
            "Free some space, or choose a folder on another disk.",
        )


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to fill; at the end it takes the place of ``target``. An OSError becomes a ConversionError."""
    partial = target.with_name(f".{target.name}.partial-{secrets.token_hex(4)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        yield partial
        for file in partial.iterdir():
            _sync(file)
        _sync(partial)
        _install(partial, target)
    except OSError as error:
        raise ConversionError(
            f"{target} can't be written: {error.strerror or error}",
            "Check its disk and permissions, or choose another folder.",
        ) from error
    finally:
        # After success there is nothing left here.
        shutil.rmtree(partial, ignore_errors=True)


def write_file(file: Path, content: bytes) -> None:
    """Write a small file."""
    file.write_bytes(content)


def _install(partial: Path, target: Path) -> None:
    old = target.with_name(f".{target.name}.old-{secrets.token_hex(4)}")
    try:
        if target.exists():
            target.rename(old)
        partial.rename(target)
        _sync(target.parent)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    finally:
        # The old folder goes only when something stands in its place.
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
