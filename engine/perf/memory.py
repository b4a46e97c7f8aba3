"""Memory: what is in use, what may be used, what can be had without taking from others. Bytes throughout.

Two figures, and one use of each. The *limit* is what MLX's arrays of this process may take in all: beyond it a load or a prompt is
refused. What is *available* is how much of that no other program has to give way for: beyond it the user is warned, and nothing is
refused, since the system makes room by compressing idle programs, or by swapping them out.

macOS   limit: what it recommends for the GPU, which leaves room for what the system itself keeps wired. Where other programs hold
        so much wired memory, which can be neither compressed nor swapped, that the machine has less than that left, the rest is
        the limit. Free memory does not count: macOS fills it with files and idle programs by design.
Linux   limit: of a card, its memory less what others hold of it. Else the least of what each control group leaves and
        the machine's memory, less what others hold and free swap can't take: there the kernel has nothing left to take away, and
        ends a program. Clean file pages never count as held.

Neither is ever below what this process has allocated already and a little more: what is there is not refused, and a loaded model
answers a short prompt whatever else happens. Both are read when they are asked for; only what macOS recommends MLX reads once a
process, so a new ``sudo sysctl iogpu.wired_limit_mb=…`` takes effect when the engine's process starts again.

A process on Linux is bound by its own control group and by every one above it, in the unified hierarchy (version 2) and in that of
the memory controller (version 1), either of which may be mounted anywhere and may show only a part. ``/proc/self/cgroup`` names
the group and ``/proc/self/mountinfo`` its folder (Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst). A group is
charged for the pages of files that its programs read, which the kernel drops before it refuses anything, so they are not counted
as held. Shared memory counts as a file there, but lies on the lists of what can't be dropped.

Address space may be bounded too (``ulimit -v``, RLIMIT_AS). Libraries, stacks of threads and reserved memory count in it, used or
not. Where it runs out, some libraries end the process; so what is certainly too little is refused before they are loaded.

Metal and CUDA devices have a limit for wired memory, which the system may not page out: one for the process, so the needs of
several engines are added. On a plain CPU it does nothing. It was tested with a stand-in for MLX only: no Mac was at hand.
"""

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from ..errors import MemoryLimitError
from . import macos

ALLOWANCE = 128 << 20
"""Bytes beyond what is allocated that are never refused: a short prompt of a loaded model, its keys and values and temporaries."""

WORTH_SAYING = 256 << 20
"""Bytes; where other programs give way by fewer, it goes unnoticed."""

PRESSURE = "kern.memorystatus_vm_pressure_level"
"""1 normal, 2 warning, 4 critical (sys/event.h, NOTE_MEMORYSTATUS_PRESSURE_*)."""
CRITICAL = 4

Source = Literal["asked", "recommended", "wired elsewhere", "device", "container", "machine", "address space"]

SOURCES: dict[Source, str] = {
    "asked": "as set by --memory or the memory setting",
    "recommended": "what macOS recommends for this GPU, read when the engine starts",
    "wired elsewhere": "the machine's memory less what other programs hold wired",
    "device": "the device's memory less what other programs hold of it",
    "container": "the container's limit less what its other programs hold",
    "machine": "the machine's memory less what other programs hold",
    "address space": "the address space that this process may take (ulimit -v) less what it holds of it otherwise",
}
"""Where a limit comes from, in words."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What MLX's arrays of this process may take in all, and where that comes from."""

    bytes: int
    source: Source


@dataclass(frozen=True, slots=True)
class Memory:
    """A snapshot. None is unknown.

    active, peak, pool: MLX's arrays now, at most so far, and freed buffers it keeps for reuse.
    device_total: memory of the device MLX computes on; on Apple silicon and on a plain CPU that is the machine's.
    budget: what MLX's arrays of this process may take in all (``Limit``); budget_source: where that comes from.
    available: what they may take before other programs have to give way.
    process_rss: resident memory of this process.
    """

    active: int
    peak: int
    pool: int
    device_total: int | None
    budget: int | None
    process_rss: int | None
    budget_source: Source | None = None
    available: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """Whether what is wanted fits the budget; ``fits`` is None where the budget is unknown.

    from_others: bytes that other programs would have to give way by now; 0 where none, or it is unknown.
    """

    weights: int
    kv: int
    working: int
    total: int
    budget: int | None
    fits: bool | None
    from_others: int = 0


def snapshot(asked: int | None = None) -> Memory:
    """Return memory in use and available now. asked: the limit, where the user set one.

    Takes about a millisecond on Linux, where files are read.
    """
    import mlx.core as mx

    found = allowed(asked)
    return Memory(
        active=mx.get_active_memory(),
        peak=mx.get_peak_memory(),
        pool=mx.get_cache_memory(),
        device_total=device_total(),
        budget=None if found is None else found.bytes,
        process_rss=process_rss(),
        budget_source=None if found is None else found.source,
        available=available(),
    )


def fit(*, weights: int, kv: int, working: int, budget: int | None, available: int | None = None) -> MemoryFit:
    """Return whether weights, KV and the largest temporaries fit together. available: what no other program gives way for."""
    total = weights + kv + working
    fits = None if budget is None else total <= budget
    return MemoryFit(weights, kv, working, total, budget, fits, taken_from_others(total, available))


def taken_from_others(total: int, available: int | None) -> int:
    """Return by how many bytes other programs have to give way for ``total``; 0 where that goes unnoticed, or is unknown."""
    short = 0 if available is None else total - available
    return short if short >= WORTH_SAYING else 0


def giving_way(nbytes: int) -> str:
    """Return in a clause what happens to other programs that have to give way by ``nbytes``."""
    amount = f"about {nbytes / 1e9:.1f} GB of other programs"
    return f"macOS would have to compress {amount}" if macos.system() else f"the system would have to swap out {amount}"


def recommended() -> int | None:
    """Return the device's recommended working set, where it names one (Metal)."""
    return _device_number("max_recommended_working_set_size")


def device_total() -> int | None:
    """Return the device's memory; the machine's where the device has none of its own."""
    return _device_number("memory_size", "total_memory") or machine_total()


def allowed(asked: int | None) -> Limit | None:
    """Return the limit that holds: what the user set, else the system's; None is unknown."""
    return system_limit() if asked is None else Limit(asked, "asked")


def array_budget() -> int | None:
    """Return the bytes of the system's limit."""
    found = system_limit()
    return None if found is None else found.bytes


@dataclass(slots=True)
class MemoryLimit:
    """Bytes that the user lets MLX's arrays take; None is the system's limit. One object for all that ask, since it may change.

    others: tells what other nodes that hold the model with this one allow; None is anything, or unknown.
    """

    nbytes: int | None = None
    others: Callable[[], int | None] = lambda: None

    def budget(self) -> int | None:
        """Return the bytes of the limit that holds now; None is unknown."""
        own, others = array_budget() if self.nbytes is None else self.nbytes, self.others()
        return min((each for each in (own, others) if each is not None), default=None)

    def fits(self, more: int) -> bool:
        """Whether arrays may take so many bytes more; so they may where the limit is unknown."""
        import mlx.core as mx

        budget = self.budget()
        return budget is None or mx.get_active_memory() + more <= budget


def system_limit() -> Limit | None:
    """Return what MLX's arrays of this process may take in all, as the system has it now; None is unknown."""
    ours = held()
    found = min(_limits(ours), key=lambda limit: limit.bytes, default=None)
    return None if found is None else Limit(max(found.bytes, ours + ALLOWANCE), found.source)


def available() -> int | None:
    """Return what MLX's arrays may take in all before other programs have to give way; None is unknown.

    On macOS that is what is free, all pages of files, which are dropped or written back and not compressed, and what programs
    marked as purgeable. At critical pressure the system needs those itself, and only what is free counts.
    """
    ours, mac = held(), macos.system()
    if mac is not None:
        pages = mac.pages()
        if pages is None:
            return None
        spare = pages.free if is_critical() else pages.free - pages.speculative + pages.file_backed + pages.purgeable
        return ours + spare * pages.size
    if (free := _device_number("free_memory")) is not None:
        return ours + free
    found = _meminfo()
    return None if found is None else found.available + _resident(ours)


def held() -> int:
    """Return the bytes of MLX's arrays and of its pool."""
    import mlx.core as mx

    return mx.get_active_memory() + mx.get_cache_memory()


def is_critical() -> bool:
    """Return whether macOS says that memory is so short that it ends programs next. Elsewhere nothing says so."""
    mac = macos.system()
    return mac is not None and mac.integer(PRESSURE) == CRITICAL


def machine_total() -> int | None:
    """Return the machine's physical memory, or what its container may use where that is less."""
    physical = _physical()
    if physical is None:
        return None
    return min([physical, *(group.limit for group in bounding())])


def process_rss() -> int | None:
    """Return the resident bytes of this process now; None where there is no /proc (macOS: use ``active`` instead)."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class MemInfo:
    """Of /proc/meminfo, in bytes. available: what programs can have without swapping; swap_free: what swap can still take."""

    available: int
    swap_free: int


def parse_meminfo(text: str) -> MemInfo | None:
    """Return what /proc/meminfo says; None where it does not say what is available."""
    sizes = {name: rest.split() for name, _, rest in (line.partition(":") for line in text.splitlines())}
    numbers = {name: int(words[0]) * 1024 for name, words in sizes.items() if words and words[0].isdecimal()}
    if "MemAvailable" not in numbers:
        return None
    return MemInfo(numbers["MemAvailable"], numbers.get("SwapFree", 0))


def _physical() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _limits(ours: int) -> list[Limit]:
    """Every bound of what arrays may take in all, of which ``ours`` are there."""
    mac = macos.system()
    if mac is not None:
        return _mac_limits(mac, ours)
    named, total, free = recommended(), _device_number("total_memory"), _device_number("free_memory")
    if named is not None:
        return [Limit(named, "recommended")]
    if total is not None:  # of a card, whose memory holds nothing but arrays
        return [Limit(total if free is None else min(total, ours + free), "device")]
    resident, found, physical = _resident(ours), _meminfo(), _physical()
    bounds = [Limit(group.limit - group.held + resident, "container") for group in bounding()]
    free_for_us = None if found is None else found.available + found.swap_free + resident
    bounds.extend(Limit(most, "machine") for most in (free_for_us, physical) if most is not None)
    if (space := space_left()) is not None:
        bounds.append(Limit(ours + space, "address space"))
    return bounds


def _mac_limits(mac: macos.System, ours: int) -> list[Limit]:
    """What macOS recommends, and what other programs' wired memory leaves of the machine."""
    # Our own arrays are among the wired pages while they are resident for the GPU.
    named, total, pages = recommended(), mac.integer("hw.memsize") or machine_total(), mac.pages()
    found = [] if named is None else [Limit(named, "recommended")]
    if total is not None:
        wired = 0 if pages is None else max(0, pages.wired * pages.size - ours)
        found.append(Limit(total - wired, "wired elsewhere"))
    return found


def _resident(ours: int) -> int:
    """How much of the arrays is in memory: pages that nothing was written to are not."""
    rss = process_rss()
    return ours if rss is None else min(ours, rss)


def _meminfo() -> MemInfo | None:
    try:
        return parse_meminfo(Path("/proc/meminfo").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _device_number(*keys: str) -> int | None:
    import mlx.core as mx

    info = mx.device_info()
    found = next((info[key] for key in keys if key in info), None)
    return int(found) if found else None


_lock = threading.Lock()
_needs: list[int] = []
_before = 0  # the limit that was in force before the first need


@contextmanager
def wired(needed_bytes: int) -> Iterator[int | None]:
    """Let ``needed_bytes`` be wired, never more than the device recommends; put the limit back after.

    needed_bytes: the planned peak, with the whole context in use.
    Yields the limit in force, None where the device has none. A limit that is higher already stays.
    """
    most = recommended()
    if most is None:
        yield None
        return
    import mlx.core as mx

    limit = _change(lambda: _needs.append(needed_bytes), most)
    try:
        yield limit
    finally:
        mx.synchronize()  # Metal's residency set must not change under work that is still running
        _change(lambda: _needs.remove(needed_bytes), most)


def _change(change: Callable[[], None], most: int) -> int:
    """Change the needs, and set the limit to their sum."""
    global _before  # noqa: PLW0603  # one limit for the process, as in MLX
    import mlx.core as mx

    with _lock:
        first = not _needs
        change()
        wanted = min(sum(_needs), most)
        replaced = int(mx.set_wired_limit(wanted))
        if first:
            _before = replaced
        limit = max(_before, wanted)
        if limit != wanted:
            mx.set_wired_limit(limit)
        return limit


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
    """The folders of this process's groups and of all above them, as far as they are mounted: looked for once."""
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
    """Where a hierarchy is mounted, and which of its groups is seen there."""
    for line in lines:
        mount, _, source = line.partition(" - ")
        fields, kind = mount.split(), source.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        options = kind[2].split(",")
        if (kind[0] == "cgroup2") if version is _V2 else (kind[0] == "cgroup" and "memory" in options):
            yield Path(_unescaped(fields[4])), PurePosixPath(_unescaped(fields[3]))


def _upwards(mounted: Path, root: PurePosixPath, name: str) -> Iterator[Path]:
    """The folder of a group and those above it; the mounted one alone, where the group lies outside of what is seen."""
    group = PurePosixPath(name)
    below = group.relative_to(root) if group.is_relative_to(root) and ".." not in group.parts else PurePosixPath()
    folder = mounted / below
    yield folder
    while folder != mounted:
        folder = folder.parent
        yield folder


def _group(folder: Path, version: _Version) -> Group | None:
    """What a group's files say; None where nothing bounds it, or they are not there."""
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
    """A path of mountinfo, in which a space is written \\040."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, character)
    return path


LEAST = 288_000_000
"""Bytes that an engine's libraries and threads take before there is any model. Measured on 2-core x86 Linux: the guide answers
where the process may have 400 MB in all, some 100 of them taken by then, and not with 300."""
LEAST_TO_INSPECT = 180_000_000
"""Bytes that are enough to weigh a model: ``inspect`` works with 300 MB in all, and not with 150."""


def space_left() -> int | None:
    """Return the bytes of address space that this process may still take; None where nothing bounds them, or it is unknown."""
    if sys.platform == "win32":
        return None
    import resource

    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    if allowed == resource.RLIM_INFINITY:
        return None
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except MemoryError:
        return 0
    except (OSError, ValueError, IndexError):
        return None  # macOS does not enforce it
    return max(0, allowed - pages * resource.getpagesize())


def check_address_space(least: int = LEAST) -> None:
    """Raise MemoryLimitError where there is less than ``least`` for libraries; does nothing once they are loaded."""
    left = None if "mlx.core" in sys.modules else space_left()
    if left is not None and left < least:
        raise too_little(left, least)


def too_little(left: int, least: int = LEAST) -> MemoryLimitError:
    """Return the error for a process that may take so little more address space."""
    return MemoryLimitError(
        f"this process may take {left / 1e6:.0f} MB more of address space, and the libraries it needs take {least / 1e6:.0f}",
        "Raise the limit (ulimit -v unlimited), or start it where there is none.",
    )
