"""What tells a model's weights apart from all others: a digest of every byte of them. No MLX here.

Two models may differ in one layer alone, a merge or an edit, and keys and values of the one would be wrong for the other. In the
hub's cache a file's name is its SHA-256 already. Any other file is read whole, once: its digest is remembered by device, inode,
size and the times of its last changes, which no file keeps when something else is written into it. Where there is much to read, a
thread does it, and the prompt cache has no disk until it is done.
"""

import contextlib
import os
import re
import threading
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import xxhash

from tokamac.engine.limits import kept
from tokamac.engine.regular_files import open_regular

FILE = "weights.json"
"""In the prompt cache's folder: digests by file."""

MOST_REMEMBERED = 2000

AT_ONCE_BYTES = 256 << 20
"""Up to so many unread bytes nobody waits noticeably for them; above, a thread reads them."""

READ_BYTES = 8 << 20

BLOB = re.compile(r"[0-9a-f]{64}")
"""A file of the hub's cache: a link to ``blobs/<SHA-256>``."""


def identify(folder: Path, root: Path, then: Callable[[str], None]) -> threading.Thread | None:
    """Tell ``then`` the digest of a model folder's weights: before returning, or later from the thread that is returned.

    root: where digests are remembered. What can't be read is never told. Raises OSError where that is found at once.
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
    """Return 32 hexadecimal digits for the bytes of these files, and for their names. Remembers what it reads.

    Raises OSError for a file that can't be read, or is written to meanwhile.
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
    return {key: found for key, found in kept.load(root / FILE).items() if isinstance(found, str)}


def _remember(root: Path, learned: dict[str, str]) -> None:
    """Add what was learned, the newest last. Two processes may do so at once: one of them reads its files again next time."""
    with contextlib.suppress(OSError):  # a read-only folder: they are read again next time
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
    known = {key: found for key, found in _remembered(root).items() if key not in learned} | learned
    kept.write(root / FILE, dict(list(known.items())[-MOST_REMEMBERED:]))
