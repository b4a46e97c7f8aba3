"""Control groups of Linux: what a container, a service or a slice may use, and what its programs hold of it.

A process is bound by its own group and by every one above it, in the unified hierarchy (version 2) and in that of the memory
controller (version 1), either of which may be mounted anywhere and may show only a part. ``/proc/self/cgroup`` names the group and
``/proc/self/mountinfo`` where it is to be found (Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst).

A group is charged for the pages of files that its programs read: after a download nearly all of it. The kernel drops them before
it refuses anything, so they are not held. Shared memory counts as a file there, but lies on the lists of what can't be dropped.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

UNBOUNDED = 1 << 60
"""Version 1 says so, or more, where there is no limit."""

DROPPABLE = ("active_file", "inactive_file", "slab_reclaimable")


@dataclass(frozen=True, slots=True)
class Group:
    """A control group with a limit, in bytes. held: by its programs, less what the kernel drops first."""

    limit: int
    held: int


@dataclass(frozen=True, slots=True)
class _Version:
    """The names of one version's files. prefix: of what counts the groups below, too."""

    limit: str
    usage: str
    prefix: str


_V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_V2 = _Version("memory.max", "memory.current", "")


def bounding(proc: Path = Path("/proc/self")) -> list[Group]:
    """Return the groups with a limit that bound this process; none where there are no control groups."""
    found = (_group(folder, version) for folder, version in _folders(proc))
    return [group for group in found if group is not None]


@functools.cache
def _folders(proc: Path) -> tuple[tuple[Path, _Version], ...]:
    """Return the folders of this process's groups and of all above them, as far as they are mounted: looked for once."""
    return tuple(_search(proc))


def _search(proc: Path) -> Iterator[tuple[Path, _Version]]:
    try:
        groups = (proc / "cgroup").read_text(encoding="utf-8").splitlines()
        mounts = (proc / "mountinfo").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in groups:
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        version = _V1 if controllers else _V2
        for mounted, root in _mounts(mounts, version):
            yield from ((folder, version) for folder in _upwards(mounted, root, name))


def _mounts(lines: list[str], version: _Version) -> Iterator[tuple[Path, PurePosixPath]]:
    """Yield where a hierarchy is mounted, and which of its groups is seen there."""
    for line in lines:
        mount, _, source = line.partition(" - ")
        fields, kind = mount.split(), source.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        options = kind[2].split(",")
        if (kind[0] == "cgroup2") if version is _V2 else (kind[0] == "cgroup" and "memory" in options):
            yield Path(_unescaped(fields[4])), PurePosixPath(_unescaped(fields[3]))


def _upwards(mounted: Path, root: PurePosixPath, name: str) -> Iterator[Path]:
    """Yield the folder of a group and those above it; the mounted one alone, where the group lies outside of what is seen."""
    group = PurePosixPath(name)
    below = group.relative_to(root) if group.is_relative_to(root) and ".." not in group.parts else PurePosixPath()
    folder = mounted / below
    yield folder
    while folder != mounted:
        folder = folder.parent
        yield folder


def _group(folder: Path, version: _Version) -> Group | None:
    """Return what a group's files say; None where nothing bounds it, or they are not there."""
    limit = _number(folder / version.limit)
    if limit is None or limit >= UNBOUNDED or (usage := _number(folder / version.usage)) is None:
        return None
    return Group(limit, max(0, usage - _droppable(folder / "memory.stat", version.prefix)))


def _droppable(path: Path, prefix: str) -> int:
    try:
        words = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
        return sum(
            int(word[1])
            for word in words
            if len(word) == 2 and word[0].removeprefix(prefix) in DROPPABLE and word[0].startswith(prefix)
        )
    except (OSError, ValueError):
        return 0


def _number(path: Path) -> int | None:
    try:  # "max" where nothing bounds it
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _unescaped(path: str) -> str:
    """Return a path of mountinfo, in which a space is written \\040."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, character)
    return path
