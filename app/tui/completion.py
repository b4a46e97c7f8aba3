"""Finding a file by a part of its path, written after @. Looks at names only; nothing is opened.

``@atch`` is looked for in all of the folder; ``@~/notes``, ``@../a`` and ``@/etc/h`` in the folder that they name.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MOST_OFFERED = 8
MOST_FILES = 20_000
WALK_S = 0.5
"""Walking a folder ends after so many files or seconds: what lies deeper is reached by writing more of its path."""
FRESH_S = 10.0
_SKIPPED = frozenset({"__pycache__", "node_modules", "target", "venv"})
_TOKEN = re.compile(r"(?:^|(?<=[\s(\[{\"']))@(\S*)$")
_PLACED = re.compile(r"(~[^/]*|\.{1,2})?/|~|\.{1,2}$")


@dataclass(frozen=True, slots=True)
class Naming:
    """A file that is being named: ``part`` of its path, after the @ in column ``start``."""

    start: int
    part: str


def naming(line: str, column: int) -> Naming | None:
    """Return what is being named before the cursor in ``line``; None where no word there begins with @."""
    token = _TOKEN.search(line[:column])
    return None if token is None else Naming(token.start(), token[1])


class Finder:
    """Finds files for somebody who stands in ``folder``. What is below it is looked up anew after ``FRESH_S``."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._walked_s = -FRESH_S
        self._below: Sequence[str] = ()

    def find(self, part: str, most: int = MOST_OFFERED) -> list[str]:
        """Return paths that fit ``part``, best first; those of folders end with a slash. May take ``WALK_S``."""
        if _PLACED.match(part) is None:
            return ranked(part, self._files(), most)
        before, slash, rest = part.rpartition("/")
        typed = before + slash if slash else f"{rest}/"
        names = _entries(self._folder, typed, hidden=rest.startswith("."))
        return [typed + name for name in ranked(rest if slash else "", names, most)]

    def _files(self) -> Sequence[str]:
        if self._clock() - self._walked_s >= FRESH_S:
            self._below, self._walked_s = tuple(files_below(self._folder)), self._clock()
        return self._below


def ranked(part: str, paths: Iterable[str], most: int = MOST_OFFERED) -> list[str]:
    """Return those of ``paths`` that hold the letters of ``part`` in their order, best first.

    A name that begins with it goes before a name that holds it, then a path that does, then letters that are scattered.
    """
    wanted = part.lower()
    fits = [(rank, len(path), path) for path in paths if (rank := _rank(wanted, path.lower())) is not None]
    return [path for _, _, path in sorted(fits)[:most]]


def files_below(folder: Path) -> Iterator[str]:
    """Yield the files below ``folder`` by their relative paths, nearest first; hidden ones and heaps of others' files left out."""
    until_s = time.monotonic() + WALK_S
    waiting, seen = [""], 0
    while waiting:
        within = waiting.pop(0)
        for name in _entries(folder, within, hidden=False):
            if name.endswith("/"):
                if name[:-1] not in _SKIPPED and not (folder / within / name).is_symlink():
                    waiting.append(within + name)
                continue
            yield within + name
            seen += 1
        if seen >= MOST_FILES or time.monotonic() > until_s:
            return


def _entries(folder: Path, typed: str, *, hidden: bool) -> list[str]:
    """Return the names in a folder, those of folders with a slash; none where it can't be read."""
    try:
        with os.scandir(folder / Path(typed).expanduser()) as entries:
            found = [each.name + ("/" if each.is_dir() else "") for each in entries if hidden or each.name[0] != "."]
    except (OSError, RuntimeError, ValueError):
        return []
    return sorted(name for name in found if name.isprintable())


def _rank(part: str, path: str) -> int | None:
    name = path.rstrip("/").rpartition("/")[2]
    tests = (name.startswith(part), part in name, part in path, _scattered(part, name), _scattered(part, path))
    return next((rank for rank, fits in enumerate(tests) if fits), None)


def _scattered(part: str, text: str) -> bool:
    rest = iter(text)
    return all(letter in rest for letter in part)
