"""Memory in use, memory there is, and whether a model fits. Bytes throughout."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Memory:
    """A snapshot. None is unknown.

    active, peak, pool: MLX's arrays now, at most so far, and freed buffers it keeps for reuse.
    device_total: memory of the device MLX computes on; on Apple silicon and on a plain CPU that is the machine's.
    budget: what this process may use in all: the device's recommended working set where it names one (it moves with the
    system's settings, so it is read each time), less what other programs have of it where that is known (macOS); else what the
    system says is free plus what this process holds.
    process_rss: resident memory of this process.
    """

    active: int
    peak: int
    pool: int
    device_total: int | None
    budget: int | None
    process_rss: int | None


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether what is wanted fits the budget; ``fits`` is None where the budget is unknown."""

    weights: int
    kv: int
    working: int
    total: int
    budget: int | None
    fits: bool | None


def snapshot() -> Memory:
    """Return memory in use and available now. Touches the device; takes well under a millisecond."""
    import mlx.core as mx

    return Memory(
        active=mx.get_active_memory(),
        peak=mx.get_peak_memory(),
        pool=mx.get_cache_memory(),
        device_total=device_total(),
        budget=budget(),
        process_rss=process_rss(),
    )


def fit(*, weights: int, kv: int, working: int, budget: int | None) -> Fit:
    """Return whether weights, KV and the largest temporaries fit together."""
    total = weights + kv + working
    return Fit(weights, kv, working, total, budget, None if budget is None else total <= budget)


def recommended() -> int | None:
    """Return the device's recommended working set, where it names one (Metal, CUDA)."""
    return _device_number("max_recommended_working_set_size")


def device_total() -> int | None:
    """Return the device's memory; the machine's where the device has none of its own."""
    return _device_number("memory_size", "total_memory") or machine_total()


def budget() -> int | None:
    """Return what this process may use in all."""
    if (size := recommended()) is not None:
        return size
    if (total := _device_number("total_memory")) is not None:  # a CUDA card that names no working set
        return total
    available, total = _available(), machine_total()
    if available is None:
        return total
    return available + (process_rss() or 0)


def array_budget() -> int | None:
    """Return what MLX's arrays may take in all: the budget, less what this process holds beside them where that counts."""
    whole = budget()
    if whole is None or recommended() is not None or _device_number("total_memory") is not None:
        return whole  # of a device, whose memory holds nothing but arrays
    return whole - max(0, (process_rss() or 0) - _arrays())


def machine_total() -> int | None:
    """Return the machine's physical memory, or what its container may use where that is less."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    limit = _container_limit()
    return physical if limit is None else min(physical, limit)


def process_rss() -> int | None:
    """Return the resident bytes of this process now; None where there is no /proc (macOS: use ``active`` instead)."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def parse_meminfo(text: str) -> int | None:
    """Return MemAvailable of /proc/meminfo, in bytes."""
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _arrays() -> int:
    import mlx.core as mx

    return mx.get_active_memory() + mx.get_cache_memory()


def _available() -> int | None:
    try:
        available = parse_meminfo(Path("/proc/meminfo").read_text(encoding="ascii"))
    except (OSError, ValueError, IndexError):
        return None
    limit, used = _container_limit(), _container_number("memory.current")
    if available is None or limit is None or used is None:
        return available
    return min(available, max(limit - used, 0))


def _container_limit() -> int | None:
    return _container_number("memory.max")


def _container_number(name: str) -> int | None:
    try:  # "max" where nothing bounds it
        return int((Path("/sys/fs/cgroup") / name).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _device_number(*keys: str) -> int | None:
    import mlx.core as mx

    info = mx.device_info()
    found = next((info[key] for key in keys if key in info), None)
    return int(found) if found else None
