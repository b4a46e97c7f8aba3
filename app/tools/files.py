"""Tools that read: a file, a folder's names, the lines that match. Within the folders that the user allowed, and nothing hidden.

A path is resolved before it is judged, so no symbolic link leads out. What begins with a dot and what usually holds a secret is
refused below a folder; the user may allow such a folder by itself.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokamac.engine.files import NotRegularError, expanded, open_regular
from tokamac.engine.options import ToolSpec

from .tool import LONGEST_RESULT, ToolError

LARGEST_FILE = 8 << 20
"""Bytes of a file that is read."""
LARGEST_SEARCHED = 1 << 20
MOST_NAMES = 400
MOST_MATCHES = 100
MOST_FILES = 20_000
"""Names that a search looks at."""
SEARCH_S = 5.0
LINE_S = 0.5
"""A regular expression may take for ever on one line."""
LONGEST_LINE = 300
SECRET_NAMES = frozenset(
    {"id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "credentials", "credentials.json", "secrets.json"}
)
SECRET_ENDS = (".pem", ".key", ".p12", ".pfx", ".keychain", ".keychain-db", ".kdbx")


class AllowedFolders:
    """The folders that tools may read, the first of which paths are relative to."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.roots = tuple(dict.fromkeys(_resolved(folders)))

    def resolve(self, given: str) -> Path:
        """Return the path that a model means. Raises ToolError for one that it may not read, or that is not there."""
        if "\0" in given:
            raise ToolError("a path has no NUL in it")
        try:
            path = (self.roots[0] / expanded(given or ".")).resolve()
            root = self._root_of(path)
            if root is None:
                raise ToolError(
                    f"{given:.200} is outside of the folders that the user allowed: {', '.join(map(str, self.roots))}",
                    "Ask the user: folders under [tools] in the settings allows more.",
                )
            if why := hidden(path.relative_to(root)):
                raise ToolError(f"{given:.200} is not read: {why}")
            if not path.exists():
                raise ToolError(f"there is no {given:.200}")
        except (OSError, RuntimeError, ValueError) as error:
            raise ToolError(f"{given:.200} can't be read: {error}") from error
        return path

    def name(self, path: Path) -> str:
        """Return a path as it is told: from its folder on."""
        root = self._root_of(path)
        return str(path) if root is None or root != self.roots[0] else str(path.relative_to(root))

    def _root_of(self, path: Path) -> Path | None:
        return max(
            (root for root in self.roots if path.is_relative_to(root)), key=lambda root: len(root.parts), default=None
        )


def _resolved(folders: Sequence[Path]) -> Iterator[Path]:
    """Yield the folders without symbolic links; one whose path can't be followed allows nothing."""
    for folder in folders:
        with suppress(OSError, RuntimeError, ValueError):  # links in a circle, a name with a NUL
            yield expanded(folder).resolve()


def hidden(path: Path) -> str:
    """Return why a path below an allowed folder is not read; "" where it is."""
    if any(part.startswith(".") for part in path.parts):
        return "names that begin with a dot are hidden from tools"
    if path.name.lower() in SECRET_NAMES or path.name.lower().endswith(SECRET_ENDS):
        return "such files usually hold secrets"
    return ""


def _text(path: Path, most: int) -> str:
    """Return a file's text. Raises ToolError for what is too large, or no text."""
    try:
        with open_regular(path) as file:
            data = file.read(most + 1)
    except (NotRegularError, OSError) as error:
        raise ToolError(f"{path.name} can't be read: {error.strerror or error}") from error
    if len(data) > most:
        raise ToolError(f"{path.name} has more than {most >> 20} MiB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ToolError(f"{path.name} is not UTF-8 text") from None
    if "\0" in text:
        raise ToolError(f"{path.name} is a binary file")
    return text


class ReadFile:
    """Reads a text file."""

    spec = ToolSpec(
        "read_file",
        "Read a text file of the user's. Long files are cut; from_line and lines choose a part.",
        {
            "type": "object",
            "properties": {
                "path": {"type": "string", "description": "The file's path, relative to the user's folder."},
                "from_line": {"type": "integer", "description": "The first line to read, from 1."},
                "lines": {"type": "integer", "description": "How many lines to read."},
            },
            "required": ["path"],
        },
    )

    def __init__(self, folders: AllowedFolders) -> None:
        self._folders = folders

    def run(self, arguments: Mapping[str, Any]) -> str:
        """Return the file's text, or the lines that were asked for."""
        path = self._folders.resolve(arguments["path"])
        if path.is_dir():
            raise ToolError(f"{arguments['path']:.200} is a folder; list_folder lists it")
        lines = _text(path, LARGEST_FILE).splitlines()
        first, many = arguments.get("from_line", 1), arguments.get("lines")
        if first < 1 or (many is not None and many < 1):
            raise ToolError("from_line and lines are 1 or more")
        if first > max(1, len(lines)):
            raise ToolError(f"the file has {len(lines)} lines")
        last = len(lines) if many is None else min(len(lines), first - 1 + many)
        text = "\n".join(lines[first - 1 : last])
        if len(text) > LONGEST_RESULT - 200:
            text = text[: LONGEST_RESULT - 200]
            last = first + text.count("\n")
        whole = first == 1 and last == len(lines)
        return text if whole else f"{text}\n[lines {first} to {last} of {len(lines)}]"


class ListFolder:
    """Lists a folder."""

    spec = ToolSpec(
        "list_folder",
        "List the names in a folder of the user's; folders end with a slash.",
        {
            "type": "object",
            "properties": {
                "path": {"type": "string", "description": "The folder's path; nothing is the user's folder."}
            },
        },
    )

    def __init__(self, folders: AllowedFolders) -> None:
        self._folders = folders

    def run(self, arguments: Mapping[str, Any]) -> str:
        """Return the names, one a line, with the sizes of files."""
        path = self._folders.resolve(arguments.get("path", "."))
        if not path.is_dir():
            raise ToolError(f"{arguments.get('path')!r:.200} is not a folder")
        try:
            found = sorted(path.iterdir(), key=lambda each: (not each.is_dir(), each.name.lower()))
        except OSError as error:
            raise ToolError(f"the folder can't be read: {error.strerror}") from error
        shown = [each for each in found if not hidden(Path(each.name))]
        lines = [_named(each) for each in shown[:MOST_NAMES]]
        if len(shown) > MOST_NAMES:
            lines.append(f"[… {len(shown) - MOST_NAMES} more]")
        if len(found) > len(shown):
            lines.append(f"[{len(found) - len(shown)} hidden]")
        return "\n".join(lines) or "(an empty folder)"


def _named(path: Path) -> str:
    try:
        return f"{path.name}/" if path.is_dir() else f"{path.name}  {path.stat().st_size:,} bytes"
    except OSError:
        return path.name


class _Pace:
    """Bounds a search, whether or not what it walks over matches. note: what to say where it was cut short."""

    def __init__(self) -> None:
        self._ends_s = time.monotonic() + SEARCH_S
        self._seen = 0
        self.note = ""

    def goes_on(self, *, names: int = 0) -> bool:
        """Whether one more line, or file or folder, may be looked at."""
        self._seen += names
        if self._seen > MOST_FILES or time.monotonic() > self._ends_s:
            self.note = "[stopped early: search in a smaller folder]"
        return not self.note


class SearchFiles:
    """Searches the lines of text files."""

    spec = ToolSpec(
        "search_files",
        "Find the lines of the user's text files that hold a text, or match a regular expression. .gitignore is heeded.",
        {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "What to look for."},
                "path": {
                    "type": "string",
                    "description": "The folder or file to search; nothing is the user's folder.",
                },
                "regex": {"type": "boolean", "description": "Whether the text is a regular expression."},
                "files": {"type": "string", "description": "A pattern of file names, such as *.py."},
            },
            "required": ["text"],
        },
    )

    def __init__(self, folders: AllowedFolders) -> None:
        self._folders = folders

    def run(self, arguments: Mapping[str, Any]) -> str:
        """Return ``file:line: text`` for each line, within bounds of time and number."""
        import regex

        wanted = arguments["text"]
        if not wanted:
            raise ToolError("there is nothing to look for")
        try:
            pattern = regex.compile(wanted if arguments.get("regex") else regex.escape(wanted), regex.IGNORECASE)
        except regex.error as error:
            raise ToolError(f"that is no regular expression: {error}") from None
        path = self._folders.resolve(arguments.get("path", "."))
        pace = _Pace()
        found: list[str] = []
        try:
            for file, at, line in self._lines(path, arguments.get("files") or "*", pace):
                if pattern.search(line, timeout=LINE_S, concurrent=True):
                    found.append(f"{self._folders.name(file)}:{at}: {line.strip()[:LONGEST_LINE]}")
                if len(found) >= MOST_MATCHES or not pace.goes_on():
                    break
        except TimeoutError:
            raise ToolError("the regular expression takes too long: use a simpler one") from None
        note = f"[the first {MOST_MATCHES} lines; there may be more]" if len(found) >= MOST_MATCHES else pace.note
        return "\n".join([*(found or ["no line matches"]), *([note] if note else [])])

    def _lines(self, path: Path, pattern: str, pace: "_Pace") -> Iterator[tuple[Path, int, str]]:
        """Yield the lines to search, each with its file and number, as long as there is time."""
        for file in self._files(path, pattern, pace):
            try:
                lines = _text(file, LARGEST_SEARCHED).splitlines()
            except ToolError:
                continue
            yield from ((file, at, line) for at, line in enumerate(lines, 1))

    def _files(self, path: Path, pattern: str, pace: "_Pace") -> Iterator[Path]:
        """Yield the files to search, in a fixed order: nothing hidden, ignored, or reached by a link."""
        if path.is_file():
            yield path
            return
        root = next(root for root in self._folders.roots if path.is_relative_to(root))
        inner = path.relative_to(root)
        above = [root / each for each in dict.fromkeys((*reversed(inner.parents), inner))]
        rules = [(folder, found) for folder in above if (found := _rules(folder)) is not None]
        yield from self._walk(path, pattern, rules, pace)

    def _walk(self, folder: Path, pattern: str, rules: list[tuple[Path, Any]], pace: "_Pace") -> Iterator[Path]:
        try:
            names = sorted(folder.iterdir(), key=lambda each: (each.is_dir(), each.name))
        except OSError:
            return
        for each in names:
            if not pace.goes_on(names=1):
                return
            if hidden(Path(each.name)) or each.is_symlink() or _ignored(each, rules):
                continue
            if each.is_dir():
                own = _rules(each)
                yield from self._walk(each, pattern, [*rules, (each, own)] if own is not None else rules, pace)
            elif Path(each.name).match(pattern):
                yield each


def _rules(folder: Path) -> Any:
    """Return the rules of a folder's .gitignore; None where it has none."""
    import pathspec

    try:
        text = _text(folder / ".gitignore", LARGEST_SEARCHED)
        return pathspec.GitIgnoreSpec.from_lines(text.splitlines())
    except (ToolError, ValueError):
        return None


def _ignored(path: Path, rules: list[tuple[Path, Any]]) -> bool:
    tail = "/" if path.is_dir() else ""
    return any(spec.match_file(f"{path.relative_to(folder)}{tail}") for folder, spec in rules)
