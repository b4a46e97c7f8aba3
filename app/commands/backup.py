"""``tokamac backup``: all chats and settings in one file, for ``tokamac restore``."""

# A zip of ``chats.db``, ``settings.toml``, prompt files and memory, and ``manifest.json`` (sizes, SHA-256). No secrets: tokens
# and keys are excluded, as are settings tables that start programs or grant access.

import argparse
import hashlib
import json
import tempfile
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from zipfile import ZIP_DEFLATED, ZipFile

from tokamac.engine.errors import TokamacError, access_hint
from tokamac.engine.files import atomic_write, exists, expanded

from .. import own_files, settings
from ..parser import Parser
from ..text.sanitise import sanitise_line
from ..text.terminal import json_line, note
from ..text.units import count, size
from .chats import open_to_read

if TYPE_CHECKING:
    from ..store.store import Questions

FORMAT, VERSION = "tokamac-backup", 2
MANIFEST, CHATS, SETTINGS = "manifest.json", "chats.db", "settings.toml"
LEFT_OUT = ("tokens", "MCP servers", "permissions of tools")


class BackupError(TokamacError):
    """A backup can't be made or used."""


@dataclass(frozen=True, slots=True)
class BackedUpFile:
    """A file in a backup. sha256: hexadecimal. name: of one of the user's own."""

    bytes: int
    sha256: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A backup's manifest. made: ISO 8601. tokamac: version. files: prompts and memory, from version 2 on."""

    format: str
    version: int
    made: str
    tokamac: str
    chats: BackedUpFile
    settings: BackedUpFile
    files: tuple[BackedUpFile, ...] = ()


def parser() -> Parser:
    made = Parser(
        "backup",
        "Write all chats, with their attachments, the settings, profiles, prompts and memory into a new file that only you "
        "can read. "
        "Tokens, MCP servers and the permissions of tools are left out; so are models.",
        "  tokamac backup ~/tokamac.zip\n  tokamac restore ~/tokamac.zip",
    )
    made.add_argument("file", metavar="FILE", help="the new file")
    made.add_argument("--json", action="store_true", help="one JSON object")
    return made


def run(parser: Parser, options: argparse.Namespace) -> int:  # noqa: ARG001  # every command's form
    path = expanded(options.file)
    if exists(path):
        raise BackupError(f"{path} exists", "Give another name; nothing was replaced.")
    own = settings.default_path()
    try:
        text = settings.shareable(own)
    except (OSError, *settings.DAMAGED) as error:
        raise BackupError(f"{own} can't be read: {error}", "Mend it, or move it away.") from error
    try:
        with closing(open_to_read()) as chats:
            kept = _write(path, chats, text, own.parent)
        nbytes = path.stat().st_size
    except OSError as problem:
        hint = access_hint(problem, "Check the path and the disk.")
        raise BackupError(f"{path} can't be written: {problem.strerror or problem}", hint) from problem
    if options.json:
        json_line({"path": str(path), "chats": kept, "bytes": nbytes, "left_out": list(LEFT_OUT)})
        return 0
    many = f"{count(kept)} chat{'' if kept == 1 else 's'}"
    print(f"{many}, the settings, prompts and memory are in {sanitise_line(str(path))} ({size(nbytes)})")
    note(f"left out: {', '.join(LEFT_OUT)}; models and the prompt cache")
    return 0


def _write(path: Path, chats: "Questions", text: str, home: Path) -> int:
    """Write the archive; return the number of chats."""
    from ..store.store import Store

    with tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=".tokamac-") as folder:  # mode 0700
        copy = Path(folder) / CHATS
        chats.copy_to(copy)
        with Store.open(copy) as copied:  # whoever deleted a chat does not want it back; and no reply is being written
            copied.purge(-1.0)
            kept = len(copied.chats(limit=1 << 40))
        with atomic_write(path, ".tokamac-") as file, ZipFile(file, "w", ZIP_DEFLATED) as archive:
            with copy.open("rb") as source:
                members = {
                    "chats": _add(archive, CHATS, source),
                    "settings": _add(archive, SETTINGS, BytesIO(text.encode())),
                }
            texts = {name: own_files.read(home / name) or "" for name in own_files.all_in(home)}
            files = (replace(_add(archive, name, BytesIO(each.encode())), name=name) for name, each in texts.items())
            made = datetime.now(UTC).isoformat(timespec="seconds")
            manifest = Manifest(FORMAT, VERSION, made, metadata.version("tokamac"), **members, files=tuple(files))
            archive.writestr(MANIFEST, json.dumps(asdict(manifest), indent=2) + "\n")
    return kept


def _add(archive: ZipFile, name: str, source: BinaryIO) -> BackedUpFile:
    digest, nbytes = hashlib.sha256(), 0
    with archive.open(name, "w", force_zip64=True) as target:
        while piece := source.read(1 << 20):
            target.write(piece)
            digest.update(piece)
            nbytes += len(piece)
    return BackedUpFile(nbytes, digest.hexdigest())
