"""Memory use, limits and availability, in bytes."""

# limit       what this process's arrays may take; beyond it loads and prompts are refused
# available   the part no other program must give way for; beyond it the user is warned

# macOS: the recommended GPU limit, less others' excess wired memory; MLX reads it once per process. Linux: a card's
# rest, else the least of cgroups (v1, v2; page cache excluded, shmem counted) and the machine's less what others hold
# beyond free swap. Never below what is allocated. Wired limits are summed over engines (tested with a stand-in).

import ctypes
import functools
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from ..errors import MemoryLimitError
from ..files import atomic_write
from ..options import WiredMode
from . import hardware

# Bytes beyond what is allocated that are never refused: a short prompt of a loaded model, its keys and values and
# temporaries.
ALLOWANCE = 128 << 20

M_MMAP_THRESHOLD, LARGE_BLOCK = -3, 1 << 20  # of mallopt(3), and bytes

WORTH_SAYING = 256 << 20  # bytes; where other programs give way by fewer, it goes unnoticed

# 1 normal, 2 warning, 4 critical (sys/event.h, NOTE_MEMORYSTATUS_PRESSURE_*).
PRESSURE = "kern.memorystatus_vm_pressure_level"
CRITICAL = 4

Source = Literal["asked", "recommended", "wired elsewhere", "device", "container", "machine", "address space"]

# Where a limit comes from, in words.
SOURCES: dict[Source, str] = {
    "asked": "as set by --memory or the memory setting",
    "recommended": "what macOS recommends for this GPU, read when the engine starts",
    "wired elsewhere": "the machine's memory less what other programs hold wired",
    "device": "the device's memory less what other programs hold of it",
    "container": "the container's limit less what its other programs hold",
    "machine": "the machine's memory less what other programs hold",
    "address space": "the address space that this process may take (ulimit -v) less what it holds of it otherwise",
}

UNWIRE_S, PRESSURE_S = 60.0, 5.0  # after the last work; between two looks at the pressure until then
BOOT = "kern.bootsessionuuid"

CLOSE = "close other programs"
# What gives this process more. Closing programs moves nothing of what macOS recommends.
REMEDIES: dict[Source, str] = {
    "asked": "allow more with --memory",
    "recommended": "let the GPU have more until the next restart (sudo sysctl iogpu.wired_limit_mb=MB) and start again",
    "address space": "allow more (ulimit -v)",
}


@dataclass(frozen=True, slots=True)
class Limit:
    bytes: int
    source: Source


@dataclass(frozen=True, slots=True)
class Memory:
    """A memory snapshot; None is unknown.

    Attributes:
        active, peak, pool: MLX's arrays now and at most, and freed buffers.
        device_total: The machine's on Apple silicon and plain CPUs.
        budget: Limit for this process's arrays, from ``budget_source``.
        available: Without displacing other programs.
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
    """Whether a demand fits; None is unknown. from_others: bytes others must release."""

    weights: int
    kv: int
    working: int
    total: int
    budget: int | None
    fits: bool | None
    from_others: int = 0


def snapshot(asked: int | None = None) -> Memory:
    """Return memory now; asked: the user's limit. About 1 ms on Linux."""
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
    total = weights + kv + working
    fits = None if budget is None else total <= budget
    return MemoryFit(weights, kv, working, total, budget, fits, taken_from_others(total, available))


def taken_from_others(total: int, available: int | None) -> int:
    short = 0 if available is None else total - available
    return short if short >= WORTH_SAYING else 0


def giving_way(nbytes: int) -> str:
    amount = f"about {nbytes / 1e9:.1f} GB of other programs"
    return (
        f"macOS would have to compress {amount}" if hardware.system() else f"the system would have to swap out {amount}"
    )


def recommended() -> int | None:
    return _device_number("max_recommended_working_set_size")


def device_total() -> int | None:
    return _device_number("memory_size", "total_memory") or machine_total()


def allowed(asked: int | None) -> Limit | None:
    return system_limit() if asked is None else Limit(asked, "asked")


def array_budget() -> int | None:
    found = system_limit()
    return None if found is None else found.bytes


@dataclass(slots=True)
class MemoryLimit:
    """The user's mutable array limit; None is the system's. others: other nodes' limits."""

    nbytes: int | None = None
    others: Callable[[], int | None] = lambda: None

    def budget(self) -> int | None:
        own, others = array_budget() if self.nbytes is None else self.nbytes, self.others()
        return min((each for each in (own, others) if each is not None), default=None)

    def fits(self, more: int) -> bool:
        import mlx.core as mx

        budget = self.budget()
        return budget is None or mx.get_active_memory() + more <= budget


def system_limit() -> Limit | None:
    ours = held()
    found = min(_limits(ours), key=lambda limit: limit.bytes, default=None)
    return None if found is None else Limit(max(found.bytes, ours + ALLOWANCE), found.source)


def available() -> int | None:
    # macOS: free, file-backed and purgeable pages; at critical pressure only free.
    ours, mac = held(), hardware.system()
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
    import mlx.core as mx

    return mx.get_active_memory() + mx.get_cache_memory()


def is_critical() -> bool:
    mac = hardware.system()
    return mac is not None and mac.integer(PRESSURE) == CRITICAL


def machine_total() -> int | None:
    physical = _physical()
    if physical is None:
        return None
    return min([physical, *(group.limit for group in bounding())])


def give_back_freed() -> None:
    """Give freed memory back to the system: glibc keeps what lies between allocations that live on."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def map_large_blocks() -> None:
    """Have glibc give each large block back when it is freed."""
    # Else blocks of up to 32 MB come out of threads' arenas, whose ends malloc_trim doesn't reach.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)


def process_rss() -> int | None:
    try:
        pages = int(_read("/proc/self/statm").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class MemInfo:
    available: int
    swap_free: int


MEMINFO = re.compile(r"^(MemAvailable|SwapFree):\s*(\d+)", re.MULTILINE)


def parse_meminfo(text: str) -> MemInfo | None:
    numbers = {name: int(size) * 1024 for name, size in MEMINFO.findall(text)}
    if "MemAvailable" not in numbers:
        return None
    return MemInfo(numbers["MemAvailable"], numbers.get("SwapFree", 0))


def _physical() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _limits(ours: int) -> list[Limit]:
    mac = hardware.system()
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


def _mac_limits(mac: hardware.System, ours: int) -> list[Limit]:
    # Our own arrays are among the wired pages while they are resident for the GPU.
    named, total, pages = recommended(), mac.integer("hw.memsize") or machine_total(), mac.pages()
    found = [] if named is None else [Limit(named, "recommended")]
    if total is not None:
        wired = 0 if pages is None else max(0, pages.wired * pages.size - ours)
        found.append(Limit(total - wired, "wired elsewhere"))
    return found


def _resident(ours: int) -> int:
    rss = process_rss()
    return ours if rss is None else min(ours, rss)


def _meminfo() -> MemInfo | None:
    try:
        return parse_meminfo(_read("/proc/meminfo"))
    except (OSError, ValueError):
        return None


def _device_number(*keys: str) -> int | None:
    import mlx.core as mx

    info = mx.device_info()
    for key in keys:
        if key in info:
            return int(info[key]) or None
    return None


_lock = threading.Lock()
_needs: list[int] = []
_before = 0  # the limit that was in force before the first need


@contextmanager
def wired(needed_bytes: int) -> Iterator[int | None]:
    """Wire up to the planned peak, within the recommendation; restore after. Yields the limit."""
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


class Wiring:
    """Wires a model's planned peak while it works.

    auto: until a minute after its last work, or memory pressure. Memory that stays wired while a Mac sleeps is what
    kernel panics are reported after (https://github.com/ml-explore/mlx/issues/3346).
    """

    def __init__(self, needed: int, mode: WiredMode, clock: Callable[[], float] = time.monotonic) -> None:
        self._needed, self._mode, self._clock = needed, mode, clock
        self._held = ExitStack()
        self._is_wired = False
        self._quiet_since: float | None = None
        if mode == "on":
            self._wire()

    def begin(self) -> None:
        self._quiet_since = None
        if self._mode == "auto" and not self._is_wired and not is_critical():
            self._wire()

    def _wire(self) -> None:
        self._held.enter_context(wired(self._needed))
        self._is_wired = True

    def idle(self) -> float | None:
        """Drop the limit where its time has come; return the seconds until it may, or None."""
        if self._mode != "auto" or not self._is_wired:
            return None
        now = self._clock()
        if self._quiet_since is None:
            self._quiet_since = now
        left = self._quiet_since + UNWIRE_S - now
        if left > 0 and not is_critical():
            return min(left, PRESSURE_S)
        self.close()
        return None

    def close(self) -> None:
        self._held.close()
        self._is_wired = False


@contextmanager
def marking(name: str) -> Iterator[str | None]:
    """Keep on disk that a model is loaded; yield its name where the Mac went down with one, and None elsewhere."""
    mac = hardware.system()
    boot, file = None if mac is None else mac.text(BOOT), hardware.store_file("loaded.json")
    if boot is None:
        yield None
        return
    before = hardware.load(file)
    with suppress(OSError), atomic_write(file) as written:
        written.write(json.dumps({"boot": boot, "model": name}).encode())
    try:
        lost = before.get("model") if before.get("boot") not in (None, boot) else None
        yield lost if isinstance(lost, str) else None
    finally:
        if hardware.load(file).get("boot") == boot:
            file.unlink(missing_ok=True)


UNBOUNDED = 1 << 60  # version 1 says so, or more, where there is no limit

DROPPABLE = ("active_file", "inactive_file", "slab_reclaimable")


@dataclass(frozen=True, slots=True)
class Group:
    """A limited control group. held: without reclaimable bytes."""

    limit: int
    held: int


@dataclass(frozen=True, slots=True)
class _Version:
    limit: str
    usage: str
    prefix: str


_V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_V2 = _Version("memory.max", "memory.current", "")


def bounding(proc: Path = Path("/proc/self")) -> list[Group]:
    found = []
    for limit, usage, stat, prefix in _files(proc):
        if (most := _number(limit)) is not None and most < UNBOUNDED and (held := _number(usage)) is not None:
            found.append(Group(most, max(0, held - _droppable(stat, prefix))))
    return found


@functools.cache
def _files(proc: Path) -> tuple[tuple[str, str, str, str], ...]:
    """(limit, usage, statistics, prefix) of the process's mounted groups and ancestors."""
    return tuple(
        (str(folder / version.limit), str(folder / version.usage), str(folder / "memory.stat"), version.prefix)
        for folder, version in _search(proc)
    )


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
    for line in lines:
        mount, _, source = line.partition(" - ")
        fields, kind = mount.split(), source.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        options = kind[2].split(",")
        if (kind[0] == "cgroup2") if version is _V2 else (kind[0] == "cgroup" and "memory" in options):
            yield Path(_unescaped(fields[4])), PurePosixPath(_unescaped(fields[3]))


def _upwards(mounted: Path, root: PurePosixPath, name: str) -> Iterator[Path]:
    group = PurePosixPath(name)
    below = group.relative_to(root) if group.is_relative_to(root) and ".." not in group.parts else PurePosixPath()
    folder = mounted / below
    yield folder
    while folder != mounted:
        folder = folder.parent
        yield folder


def _droppable(path: str, prefix: str) -> int:
    try:
        words = [line.split() for line in _read(path).splitlines()]
        return sum(
            int(word[1])
            for word in words
            if len(word) == 2 and word[0].removeprefix(prefix) in DROPPABLE and word[0].startswith(prefix)
        )
    except (OSError, ValueError):
        return 0


def _number(path: str) -> int | None:
    try:  # "max" where nothing bounds it
        return int(_read(path))
    except (OSError, ValueError):
        return None


def _read(path: str) -> str:
    with open(path, "rb") as file:  # noqa: PTH123  # before every prompt: a Path, and text, take ten times as long
        return file.read().decode("ascii")


def _unescaped(path: str) -> str:
    """Decode \\040 and the like in mountinfo paths."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, character)
    return path


# Bytes that an engine's libraries and threads take before there is any model. Measured on 2-core x86 Linux: the guide
# answers where the process may have 400 MB in all, some 100 of them taken by then, and not with 300.
LEAST = 288_000_000
# Bytes that are enough to weigh a model: `inspect` works with 300 MB in all, and not with 150.
LEAST_TO_INSPECT = 180_000_000


def space_left() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    if allowed == resource.RLIM_INFINITY:
        return None
    try:
        pages = int(_read("/proc/self/statm").split()[0])
    except MemoryError:
        return 0
    except (OSError, ValueError, IndexError):
        return None  # macOS does not enforce it
    return max(0, allowed - pages * resource.getpagesize())


def check_address_space(least: int = LEAST) -> None:
    """Raise MemoryLimitError if libraries lack address space; no-op once loaded."""
    # Some libraries end the process when it runs out.
    left = None if "mlx.core" in sys.modules else space_left()
    if left is not None and left < least:
        raise too_little(left, least)


def too_little(left: int, least: int = LEAST) -> MemoryLimitError:
    return MemoryLimitError(
        f"this process may take {left / 1e6:.0f} MB more of address space, and the libraries it needs take {least / 1e6:.0f}",
        "Raise the limit (ulimit -v unlimited), or start it where there is none.",
    )
