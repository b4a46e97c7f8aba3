"""Where a conversion works until it is finished, and what it finds there of an earlier run that was not.

    with workplace(target, conversion_key(folder, options)) as place:
        …                     measure: place.kept(name), place.keep(name, data)
        write(…, place, …)    tensors: those before place.resumed are there
    # here the folder stands at target

    .out.partial/model/…       the folder to be: shards, then the small files
    .out.partial/journal       what is written, tensor by tensor (journal.py)
    .out.partial/kept/…        results of earlier stages, each with its checksum in its name

It stays where the next run can go on: after Ctrl-C, a full disk, a crash. It goes where that would help nobody: after an error that
says that this model can't be converted so.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import xxhash

from tokamac.engine.durable import sync
from tokamac.engine.errors import TokamacError
from tokamac.quant.files import checksum
from tokamac.quant.folder import AGAIN, JOURNAL, KEPT, MODEL, claimed, discard, install, put_back, writing_to
from tokamac.quant.journal import Entry, Journal, intact, read_journal

AFRESH = "an unfinished conversion of another source, or with other options, was here: it was removed"


@contextmanager
def workplace(target: Path, key: str) -> Iterator["Workplace"]:
    """Yield the place to write ``target`` in; at the end, what is in its folder takes the place of ``target``.

    key: what an earlier run must have had for this one to go on with it; the work of any other is removed. What was written is
    checked first. Raises ConversionError where another process works there, or the disk refuses; the target is then as it was.
    """
    with writing_to(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with claimed(target) as root:
            put_back(root, target)
            replace = target.exists()
            with _left_if_it_helps(root, target), Workplace(root, key) as place:
                yield place
                install(root, target, key, replace=replace)


class Workplace:
    """A partial folder that this process holds. Methods raise OSError.

    folder: to be filled with what the target shall hold, and nothing else. resumed: tensors that an earlier run wrote.
    notes: what a user should know.
    """

    def __init__(self, root: Path, key: str) -> None:
        found = read_journal(root / JOURNAL)
        ours = found.key == key
        if not ours:
            _clear(root)
        self.folder, self._kept = root / MODEL, root / KEPT
        for path in (self.folder, self._kept):
            path.mkdir(exist_ok=True)
        self.notes = () if ours or found.key is None else (AFRESH,)
        whole = found.entries[: intact(self.folder, found.entries)] if ours else ()
        self._journal = Journal(root / JOURNAL, key, whole)
        _cut_back(self.folder, whole)
        for path in (root, root.parent):
            sync(path)
        self.resumed = len(whole)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The tensors that are written, in order."""
        return self._journal.entries

    def add(self, entry: Entry, *, synced: bool) -> None:
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
        _cut_back(self.folder, self.entries)
        self.resumed = min(self.resumed, count)

    def keep(self, name: str, data: bytes) -> Path:
        """Store the result of a stage for later runs, in place of an earlier one of that name, and return where."""
        file = self._kept / f"{xxhash.xxh3_128_hexdigest(data)}-{name}"
        file.write_bytes(data)
        for other in self._stored(name):
            if other != file:
                other.unlink()
        return file

    def kept(self, name: str) -> Path | None:
        """Return the file that holds the result of a stage, whole; None where there is none."""
        for file in self._stored(name):
            if checksum(file) == file.name.partition("-")[0]:
                return file
            file.unlink()
        return None

    def _stored(self, name: str) -> list[Path]:
        return [file for file in self._kept.iterdir() if file.name.partition("-")[2] == name]

    def __enter__(self) -> "Workplace":
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()


@contextmanager
def _left_if_it_helps(root: Path, target: Path) -> Iterator[None]:
    try:
        yield
    except TokamacError:
        discard(root, target)
        raise
    except BaseException as error:
        begun = read_journal(root / JOURNAL).records or any((root / KEPT).glob("*"))
        if begun and (root / MODEL).exists():
            error.add_note(f"To finish the conversion, {AGAIN}")
        else:
            discard(root, target)
        raise


def _cut_back(folder: Path, entries: Sequence[Entry]) -> None:
    """Leave nothing in ``folder`` but the bytes that the entries tell of."""
    ends = {entry.shard: entry.end for entry in entries}
    for path in folder.iterdir():
        if path.name in ends:
            os.truncate(path, ends[path.name])
        else:
            _remove(path)


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
