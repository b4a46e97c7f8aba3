"""Tools that change files in the allowed folders: what a change would be, as a diff; making it; taking it back."""

import json
import os
import secrets
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from difflib import SequenceMatcher
from hashlib import sha256
from pathlib import Path
from typing import Any

from tokamac.engine.errors import TokamacError
from tokamac.engine.events import ToolCall
from tokamac.engine.files import HELD, to_disk
from tokamac.engine.options import ToolSpec

from ..store.values import FileWrite
from ..text.sanitise import reveal, sanitise_line
from .builtin import AllowedFolders, text_of
from .calls import Furthest, Line, Preview, ToolError

# A file is written beside its place and renamed there, by descriptors of its folder that follow no link: what was
# checked is what is written, whatever is put in the way meanwhile.

LARGEST_TEXT = 1 << 20  # bytes of a file before and after
MOST_SHOWN = 60_000  # characters of a diff: of a larger one, nobody would see what is hidden in it
MOST_ALIGNED = 1_000_000  # lines of one side times those of the other; aligning more takes too long
CONTEXT = 3
KEPT_BYTES = 64 << 20  # of files as they were
MOST_REMEMBERED = 64  # changes that were shown

# The call that runs on this thread: a change is noted with it. And what keeps a note beyond this process, returns what
# drops it again, and raises TokamacError; None: nothing does.
Keep = Callable[[FileWrite], Callable[[], None]]
RUNNING: ContextVar[ToolCall | None] = ContextVar("RUNNING", default=None)
KEEPS: ContextVar[Keep | None] = ContextVar("KEEPS", default=None)


@dataclass(frozen=True, slots=True)
class FileChange:
    """A file below ``root`` as it was (None: not there) and as it becomes (None: it goes)."""

    path: Path
    root: Path
    before: bytes | None
    after: bytes | None
    mode: int | None = None  # of the file before


@contextmanager
def _folder_of(change: FileChange | FileWrite, *, make: bool = False) -> Iterator[int]:
    """Yield the descriptor of the file's folder. make: where it is missing. Raises OSError at a link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    at = os.open(change.root, flags)
    try:
        for part in change.path.parent.relative_to(change.root).parts:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=at)
            below = os.open(part, flags, dir_fd=at)
            os.close(at)
            at = below
        yield at
    finally:
        os.close(at)


def _read(folder: int, name: str) -> tuple[bytes | None, int | None]:
    """Return a file's bytes and mode. Raises ToolError for what is no file to write."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None, None
    if not stat.S_ISREG(found.st_mode) or any((found.st_dev, found.st_ino) in held for held in tuple(HELD.values())):
        raise ToolError(f"{name} is not a file that can be written")
    if found.st_size > LARGEST_TEXT:
        raise ToolError(f"{name} has more than {LARGEST_TEXT >> 20} MiB")
    with os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder), "rb") as file:
        return file.read(LARGEST_TEXT + 1), stat.S_IMODE(found.st_mode)


def apply(change: FileChange) -> None:
    """Make a change, if the file is still as it was before. Raises ToolError and OSError."""
    name = change.path.name
    with _folder_of(change, make=change.after is not None) as folder:
        if _read(folder, name)[0] != change.before:
            raise ToolError(f"{name} was changed meanwhile")
        if change.after is None:
            os.unlink(name, dir_fd=folder)
            return
        temporary = f".{name[:60]}.{secrets.token_hex(6)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(temporary, flags, 0o666 if change.mode is None else 0o600, dir_fd=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(change.after)
                if change.mode is not None:
                    os.fchmod(file.fileno(), change.mode)
                file.flush()
                to_disk(file.fileno())
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise


class WriteJournal:
    """What calls write, noted before they do: in the chat's store, or here, up to KEPT_BYTES, where none keeps it."""

    def __init__(self) -> None:
        self._made: list[tuple[ToolCall, FileWrite]] = []
        self._lock = threading.Lock()

    @contextmanager
    def noting(self, change: FileChange) -> Iterator[None]:
        """Note what is written inside; drop the note if it raises. Raises ToolError, before anything is written."""
        call, keep = RUNNING.get(), KEEPS.get()
        write = FileWrite(change.path, change.root, change.before, _digest(change.after or b""), change.mode)
        try:
            drop = self._remember(call, write) if keep is None else keep(write)
        except TokamacError as error:
            raise ToolError(f"what it replaces can't be kept: {error.one_line()}") from error
        try:
            yield
        except BaseException:
            with suppress(TokamacError):  # a note of what was not written takes nothing back
                drop()
            raise

    def _remember(self, call: ToolCall | None, write: FileWrite) -> Callable[[], None]:
        if call is None:
            return lambda: None
        with self._lock:
            self._made.append(noted := (call, write))
            while sum(len(each.before or b"") for _, each in self._made) > KEPT_BYTES:
                del self._made[0]

        def drop() -> None:
            with self._lock:
                self._made = [each for each in self._made if each is not noted]

        return drop

    def of(self, calls: Collection[ToolCall], kept: Iterable[FileWrite] = ()) -> tuple[list[FileChange], list[Path]]:
        """Return what takes back the writes of these calls and those kept, and the files that somebody changed since."""
        with self._lock:
            found = [*kept, *(each for call, each in self._made if any(call is given for given in calls))]
        by_path: dict[Path, list[FileWrite]] = {}
        for each in found:
            by_path.setdefault(each.path, []).append(each)
        back, stay = list[FileChange](), list[Path]()
        for path, writes in reversed(by_path.items()):
            try:
                now = current(writes[0])
            except (OSError, ToolError):
                stay.append(path)
                continue
            while writes and now == writes[-1].before:  # it was not made, or somebody took it back
                writes.pop()
            if writes and now is not None and _digest(now) == writes[-1].after:
                first = writes[0]
                back.append(FileChange(path, first.root, now, first.before, first.mode))
            elif writes:
                stay.append(path)
        return back, stay


def _digest(data: bytes) -> bytes:
    return sha256(data).digest()


def current(write: FileWrite) -> bytes | None:
    """Return what the file holds now; None: it is not there. Raises OSError and ToolError."""
    with suppress(FileNotFoundError), _folder_of(write) as folder:
        return _read(folder, write.path.name)[0]
    return None


class _FileWriter(ABC):
    furthest: Furthest = "chat"
    spec: ToolSpec
    edits: str

    def __init__(self, folders: AllowedFolders, journal: WriteJournal) -> None:
        self._folders = folders
        self._journal = journal
        self._shown: dict[str, bytes | None] = {}  # by a call's arguments, the file that was shown with them

    def preview(self, arguments: Mapping[str, Any]) -> Preview:
        change = self.change(arguments)
        rows = diff(*(("" if each is None else each.decode("utf-8")) for each in (change.before, change.after)))
        if (size := sum(len(text) for _, text in rows)) > MOST_SHOWN:
            raise ToolError(f"the change has {size:,} characters, too many to look over", "Make it in smaller parts.")
        while len(self._shown) >= MOST_REMEMBERED:
            del self._shown[next(iter(self._shown))]
        self._shown[_key(arguments)] = change.before
        name = sanitise_line(str(change.path))
        heading = f"{self.spec.name}  {name}{'' if change.before is not None else '  (a new file)'}"
        return Preview((("!", heading), *(rows or [("note", "Nothing changes.")])), self.furthest, self.edits)

    def run(self, arguments: Mapping[str, Any]) -> str:
        change, key = self.change(arguments), _key(arguments)
        if key in self._shown and self._shown.pop(key) != change.before:
            raise ToolError(f"{change.path.name} was changed after the user was shown this change", "Read it again.")
        try:
            with self._journal.noting(change):
                apply(change)
        except OSError as error:
            raise ToolError(f"{change.path.name} can't be written: {error.strerror or error}") from error
        rows = diff(*(("" if each is None else each.decode("utf-8")) for each in (change.before, change.after)))
        counts = (sum(mark == which for mark, _ in rows) for which in "+-")
        return f"Wrote {self._folders.name(change.path)}: {next(counts)} lines added, {next(counts)} removed."

    def change(self, arguments: Mapping[str, Any]) -> FileChange:
        given = arguments["path"]
        path = self._folders.resolve(given, new=True)
        root = self._folders.root_of(path)
        if path.is_dir() or root is None:
            raise ToolError(f"{given:.200} is a folder")
        if not next(each for each in path.parents if each.exists()).is_dir():
            raise ToolError(f"{given:.200} is below a file")
        mode, text = None, None
        if path.exists():
            text, mode = text_of(path, LARGEST_TEXT), stat.S_IMODE(path.stat().st_mode)
            if not os.access(path, os.W_OK):
                raise ToolError(f"{given:.200} may not be written: it is read-only")
        try:
            after = self._after(text, arguments).encode()
        except UnicodeEncodeError:
            raise ToolError("the text holds half a character") from None
        if len(after) > LARGEST_TEXT or b"\0" in after:
            raise ToolError(f"a file that is written is text of at most {LARGEST_TEXT >> 20} MiB")
        return FileChange(path, root, None if text is None else path.read_bytes(), after, mode)

    @abstractmethod
    def _after(self, before: str | None, arguments: Mapping[str, Any]) -> str:
        """Return the file's new text. Raises ToolError."""


def _key(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, sort_keys=True)


_PATH = {"type": "string", "description": "The file's path, relative to the user's folder."}


class WriteFile(_FileWriter):
    spec = ToolSpec(
        "write_file",
        "Write a text file of the user's: a new one, or all of an existing one anew. The user sees the change first.",
        {
            "type": "object",
            "properties": {"path": _PATH, "content": {"type": "string", "description": "The whole text of the file."}},
            "required": ["path", "content"],
        },
    )
    edits = "content"

    def _after(self, before: str | None, arguments: Mapping[str, Any]) -> str:
        del before  # it is written anew
        content: str = arguments["content"]
        return content


class EditFile(_FileWriter):
    spec = ToolSpec(
        "edit_file",
        "Replace a part of a text file of the user's. The part must be in it exactly once. The user sees the change first.",
        {
            "type": "object",
            "properties": {
                "path": _PATH,
                "old": {
                    "type": "string",
                    "description": "The part to replace, exactly as in the file, with its lines.",
                },
                "new": {"type": "string", "description": "What takes its place."},
            },
            "required": ["path", "old", "new"],
        },
    )
    edits = "new"

    def _after(self, before: str | None, arguments: Mapping[str, Any]) -> str:
        old, new = arguments["old"], arguments["new"]
        if before is None:
            raise ToolError("there is no such file; write_file makes one")
        if "\r\n" in before and "\r" not in old:  # read_file shows such a file without them
            old, new = old.replace("\n", "\r\n"), new.replace("\n", "\r\n")
        count = before.count(old) if old else 0
        if count != 1:
            raise ToolError(f"old is in the file {count} times, not once", "Give more of the lines around it.")
        return before.replace(old, new)


def diff(before: str, after: str) -> list[Line]:
    """Return the rows of a diff, each revealed; empty where nothing changes."""
    old, new = before.split("\n") if before else [], after.split("\n") if after else []
    start = next((at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    room = min(len(old), len(new)) - start
    end = next((at for at in range(room) if old[-1 - at] != new[-1 - at]), room)
    first, last = max(0, start - CONTEXT), max(0, end - CONTEXT)
    a, b = old[first : len(old) - last], new[first : len(new) - last]
    if a == b:
        return []
    if len(a) * len(b) <= MOST_ALIGNED:
        groups = [list(group) for group in SequenceMatcher(None, a, b).get_grouped_opcodes(CONTEXT)]
    else:
        groups = [[("replace", 0, len(a), 0, len(b))]]
    rows: list[Line] = []
    for group in groups:
        rows.append(("@", f"line {first + group[0][1] + 1}"))
        for kind, i, j, k, m in group:
            if kind == "equal":
                rows += [(" ", _row(line)) for line in a[i:j]]
            else:
                rows += [("-", _row(line)) for line in a[i:j]] + [("+", _row(line)) for line in b[k:m]]
    return rows


def _row(line: str) -> str:
    return reveal(line).replace("\n", "↵")  # a carriage return is no new row: it could pass for one of the diff
