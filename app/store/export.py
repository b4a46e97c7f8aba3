"""One conversation out of the store into a file, and back in.

    export.write(Path("chat.md"), export.to_markdown(store.archive(chat.id)))      the branch it stands on, to read
    export.write(Path("chat.json"), export.to_json(store.archive(chat.id)))        all of it
    store.adopt(export.read(Path("chat.json"), now=time.time()))                   either, or another program's Markdown

What is read is data: it is checked, stored as it is, and nothing in it is followed or run.
"""

import os
from pathlib import Path

from tokamac.app.backend.shapes import ShapeError
from tokamac.app.store.errors import StoreError
from tokamac.app.store.foreign_markdown import from_foreign_markdown
from tokamac.app.store.json_file import from_json, to_json
from tokamac.app.store.markdown_file import from_markdown, is_ours, to_markdown
from tokamac.app.store.values import Archive
from tokamac.engine.durable import to_disk
from tokamac.engine.errors import access_hint
from tokamac.engine.regular_files import TooLargeError, read_bytes

__all__ = ["parse", "read", "to_json", "to_markdown", "write"]

MAX_BYTES = 256 << 20
"""A conversation of fifty million words: what is larger is something else."""


def parse(text: str, *, now: float) -> Archive:
    """Return the conversation in a text of either kind; ``now`` dates what has no date. Raises StoreError."""
    try:
        if text.lstrip("\ufeff \t\r\n").startswith("{"):
            return from_json(text.lstrip("\ufeff"))
        return from_markdown(text) if is_ours(text) else from_foreign_markdown(text, now)
    except ShapeError as error:
        raise StoreError(f"This is no conversation that can be imported: {error}", "Nothing was stored.") from error
    except ValueError as error:
        raise StoreError(f"This is no JSON: {error}", "Nothing was stored.") from error


def read(path: Path, *, now: float) -> Archive:
    """Return the conversation in a file. Raises StoreError."""
    try:
        return parse(read_bytes(path, MAX_BYTES).decode("utf-8"), now=now)
    except TooLargeError as problem:
        raise StoreError(f"{path} is larger than {MAX_BYTES >> 20} MiB", "A conversation is not.") from problem
    except OSError as problem:
        hint = access_hint(problem, "Check the path and its permissions.")
        raise StoreError(f"{path} can't be read: {problem.strerror or problem}", hint) from problem
    except UnicodeDecodeError as error:
        raise StoreError(f"{path} is no UTF-8 text", "Save it as UTF-8.") from error


def write(path: Path, text: str) -> None:
    """Write a new file that its user alone can read. Raises StoreError where there is one, or it can't be written."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise StoreError(f"{path} exists", "Give another name; nothing was replaced.") from None
    except OSError as problem:
        raise _unwritable(path, problem) from problem
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode("utf-8"))
            file.flush()
            to_disk(file.fileno())
    except BaseException as problem:
        path.unlink(missing_ok=True)  # half a file is none, by Ctrl-C too
        if isinstance(problem, OSError):
            raise _unwritable(path, problem) from problem
        raise


def _unwritable(path: Path, problem: OSError) -> StoreError:
    return StoreError(f"{path} can't be written: {problem.strerror or problem}", access_hint(problem, ""))
