"""``tokamac restore``: add what a backup has and is missing here; never changes existing data."""

# Backups are untrusted: fixed member names, reads bounded by the manifest's sizes, chats pass the import checks,
# settings can't start programs or allow tools.

import argparse
import errno
import hashlib
import shutil
import struct
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import BadZipFile, ZipFile

from tokamac.engine.errors import access_hint
from tokamac.engine.files import expanded, open_regular, sizes

from .. import own_files, settings
from ..parser import Parser
from ..text.sanitise import sanitise_line
from ..text.strict_json import ShapeError, build
from ..text.terminal import json_line, picked
from ..text.units import count
from .backup import CHATS, FORMAT, MANIFEST, SETTINGS, VERSION, BackedUpFile, BackupError, Manifest

if TYPE_CHECKING:
    from ..store.values import Archive

MOST_MANIFEST = 1 << 19  # bytes
DISK = 2.2  # bytes of a disk that a byte of chats takes meanwhile: a copy, the chats themselves, and their index
NOTHING = "Nothing was restored."
UNREADABLE = (
    BadZipFile,
    NotImplementedError,
    RuntimeError,
    EOFError,
    ValueError,
    struct.error,
    zlib.error,
)  # of zipfile, for bad archives


def parser() -> Parser:
    made = Parser(
        "restore",
        "Add what a backup has and is not here: chats, settings, prompts, memory. Nothing is replaced.",
        "  tokamac restore ~/tokamac.zip",
    )
    made.add_argument("file", metavar="FILE", help="what `tokamac backup` wrote")
    made.add_argument("--json", action="store_true", help="one JSON object")
    return made


@dataclass
class Restored:
    """Outcome of a restore.

    Attributes:
        new, extended, same: chats; extended ones had more messages in the backup.
        deleted: chats deleted here.
        taken, kept: names of settings, and of files beside them.
    """

    new: int = 0
    extended: int = 0
    same: int = 0
    deleted: int = 0
    taken: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def run(parser: Parser, options: argparse.Namespace) -> int:  # noqa: ARG001  # every command's form
    path = expanded(options.file)
    try:
        with open_regular(path) as file:
            done = _restored(path, ZipFile(file))
    except UNREADABLE as error:
        raise BackupError(f"{path} is no backup, or is damaged: {error}", NOTHING) from error
    except OSError as problem:
        if problem.errno == errno.EINVAL:  # its directory names a place before its first byte
            raise BackupError(f"{path} is no backup, or is damaged: {problem.strerror}", NOTHING) from problem
        said = f"{problem.filename or path}: {problem.strerror or problem}"
        raise BackupError(
            f"{path} can't be restored: {said}", access_hint(problem, "Check the path and the disk.")
        ) from problem
    if options.json:
        chats = picked(done, "new", "extended", "same", "deleted")
        json_line({"path": str(path), "chats": chats, "settings": picked(done, "taken", "kept")})
        return 0
    print(f"chats: {count(done.new)} new, {count(done.extended)} extended, {count(done.same)} here already")
    if done.deleted:
        print(f"{count(done.deleted)} of them deleted here: `tokamac chats list --deleted`, `tokamac chats restore ID`")
    for said, names in (("taken", done.taken), ("kept as they are here", done.kept)):
        if names:
            print(f"settings and files {said}: {', '.join(map(sanitise_line, names))}")
    return 0


def _restored(path: Path, archive: ZipFile) -> Restored:
    from ..store.database import vet
    from ..store.store import Store
    from ..store.values import StoreError

    manifest = _manifest(path, archive)
    with Store.open() as store, tempfile.TemporaryDirectory(dir=store.file.parent, prefix=".restore-") as folder:
        free = shutil.disk_usage(folder).free
        if manifest.chats.bytes * DISK > free:
            needed, there = sizes(round(manifest.chats.bytes * DISK), free)
            raise BackupError(f"the chats of {path} need {needed} of disk, and {there} are free", "Free some space.")
        copy, kept = Path(folder) / CHATS, Path(folder) / SETTINGS
        for name, target, member in ((CHATS, copy, manifest.chats), (SETTINGS, kept, manifest.settings)):
            _extract(archive, name, member, target)
        texts = dict[str, str]()
        for number, member in enumerate(manifest.files):
            _extract(archive, member.name, member, Path(folder) / f"{number}")
            texts[member.name] = (Path(folder) / f"{number}").read_text(encoding="utf-8")
        text = kept.read_text(encoding="utf-8")
        settings.loads(text)  # before anything is changed
        try:
            vet(copy)
        except StoreError as error:
            raise BackupError(
                f"the chats of {path} can't be used: {error.message}".replace(f"{copy} ", "it "), NOTHING
            ) from error
        done = Restored()
        for chat in _chats(copy):
            merged = store.merge(chat)
            done.new += merged.is_new
            done.extended += bool(merged.added) and not merged.is_new
            done.same += not merged.added and not merged.is_new
            done.deleted += store.chat(merged.chat).deleted_at is not None
    taken, differ = settings.adopt(settings.default_path(), text)
    new, other = _adopt(settings.default_path().parent, texts)
    return replace(done, taken=(*taken, *new), kept=(*differ, *other))


def _adopt(home: Path, texts: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Write the files that are missing here; return their names, and those of others that differ."""
    here = {name: own_files.read(home / name) for name in texts}
    new = [name for name, text in here.items() if text is None]
    for name in new:
        own_files.write(home / name, texts[name])
    return new, [name for name, text in here.items() if text is not None and text.strip() != texts[name].strip()]


def _manifest(path: Path, archive: ZipFile) -> Manifest:
    """Return the manifest; the archive must have exactly a backup's members, each once."""
    from ..store.export import loads

    names = archive.namelist()
    if MANIFEST not in names:
        raise BadZipFile(f"it has no {MANIFEST}")
    if archive.getinfo(MANIFEST).file_size > MOST_MANIFEST:
        raise BadZipFile(f"its {MANIFEST} is too large")
    with archive.open(MANIFEST) as file:
        table = loads(file.read(MOST_MANIFEST + 1).decode())
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise ShapeError(f'it has no "format": "{FORMAT}"')
    if table.get("version") not in (1, VERSION):
        raise BackupError(
            f"{path} is of version {table.get('version')!r:.20}, and this tokamac reads {VERSION}", "Update tokamac."
        )
    manifest: Manifest = build(Manifest, table, "manifest")
    known = (MANIFEST, CHATS, SETTINGS, *(file.name for file in manifest.files))
    if sorted(names) != sorted(known) or len(known) > own_files.MOST_FILES + 3:
        other = next((name for name in names if name not in known), "")
        raise BadZipFile(
            f"it holds {other!r:.40}, which no backup does" if other else "a file is missing or there twice"
        )
    if manifest.settings.bytes > settings.LARGEST_BYTES:
        raise BadZipFile(f"its {SETTINGS} is too large")
    for own in manifest.files:
        if own.bytes > own_files.LARGEST_BYTES or not own_files.NAME.fullmatch(own.name):
            raise BadZipFile(f"{own.name!r:.60} is no prompt or memory, or too large")
    return manifest


def _extract(archive: ZipFile, name: str, member: BackedUpFile, target: Path) -> None:
    """Extract a member. Raises BadZipFile on a mismatch with the manifest."""
    digest, left = hashlib.sha256(), member.bytes
    with archive.open(name) as source, target.open("xb") as file:
        while piece := source.read(1 << 20):
            left -= len(piece)
            if left < 0:  # whatever else would come
                break
            digest.update(piece)
            file.write(piece)
    if left or digest.hexdigest() != member.sha256:
        raise BadZipFile(f"{name} is not what was backed up")


def _chats(copy: Path) -> Iterator["Archive"]:
    """Yield the chats, read as strictly as imports. Raises ShapeError."""
    from ..store.database import Database
    from ..store.export import from_json, to_json
    from ..store.store import Questions

    with closing(Questions(Database(copy))) as chats:
        for chat in chats.chats(limit=1 << 40):
            try:
                archive = chats.archive(chat.id)
                from_json(to_json(archive))
                for name in ("id", "draft", "folder"):
                    build(str, getattr(chat, name), name)
                build(float | None, chat.pinned_at, "pinned_at")
            except (KeyError, TypeError, AttributeError, OverflowError) as error:
                raise ShapeError(f"chat {chat.id!r:.20}: {error}") from error
            yield archive
