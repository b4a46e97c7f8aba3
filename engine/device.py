"""Which device MLX runs on, and the checks before its first use."""

import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from .errors import DeviceError
from .requirements import unmet_here

DeviceKind = Literal["metal", "cuda", "cpu"]

BACKENDS = ("mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")

TF32 = "MLX_ENABLE_TF32"
"""The variable that MLX reads, once for a process, before its first product on a GPU (mlx/utils.h)."""


def usable_cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may use: by its affinity, and by the quota of the control groups it is in.

    root: where ``proc`` and ``sys`` are.
    """
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([there, *_quotas(root)])


def _quotas(root: Path) -> Iterator[int]:
    """Yield the cores that each of Linux's control groups around this process allows; a part of one counts as one."""
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text("utf-8").splitlines()]
    except OSError:
        return
    for _, controllers, path in (group for group in groups if len(group) == 3):
        is_second = not controllers  # of the two versions
        if not is_second and "cpu" not in controllers.split(","):
            continue
        folder = root / "sys/fs/cgroup" / ("" if is_second else "cpu")
        names = ("cpu.max",) if is_second else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        # Within a container the first is its own, whatever the path says.
        for part in ("", *path.strip("/").split("/")):
            folder /= part
            with suppress(OSError, ValueError, ZeroDivisionError):
                quota, period = " ".join((folder / name).read_text("ascii") for name in names).split()
                if quota != "max" and int(quota) > 0:
                    yield math.ceil(int(quota) / int(period))


def installed_backends() -> tuple[str, ...]:
    """Return the installed distributions that carry an MLX backend."""
    from importlib import metadata

    found = []
    for name in BACKENDS:
        with suppress(metadata.PackageNotFoundError):
            metadata.version(name)
            found.append(name)
    return tuple(found)


def check_backends(installed: tuple[str, ...], *, platform: str = sys.platform) -> None:
    """Raise DeviceError unless there is exactly one MLX backend.

    The Linux builds put their library at the same path, so with two of them the one installed last would silently win. macOS has
    only one, which Homebrew, conda and Nix ship within ``mlx`` itself.
    """
    if platform == "darwin":
        return
    if not installed:
        raise DeviceError("MLX is installed without a backend", _reinstall(platform))
    if len(installed) > 1:
        unwanted = " ".join(installed)
        raise DeviceError(
            f"several MLX backends are installed together ({', '.join(installed)})",
            f"Keep one: pip uninstall -y {unwanted}, then pip install --force-reinstall 'mlx[cpu]' or 'mlx[cuda13]'.",
        )


def cannot_import(error: ImportError, *, platform: str = sys.platform, unmet: str | None = None) -> DeviceError | None:
    """Return the error for an MLX that can't be imported; None where the import error is about something else.

    unmet: what this machine lacks, as requirements.py says it; None asks.
    """
    if not re.search(r"\bmlx\b|libmlx", f"{error.name or ''} {error}"):
        return None
    lacks = unmet_here() if unmet is None else unmet
    reason = " ".join(str(error).split())[:240]
    return DeviceError(f"MLX can't be loaded: {reason}", lacks or _reinstall(platform))


def _reinstall(platform: str) -> str:
    if platform == "darwin":
        return "Install it again: pip install --force-reinstall mlx."
    return "Install one backend: pip install --force-reinstall 'mlx[cpu]' or 'mlx[cuda13]'."


def device_kind() -> DeviceKind:
    """Return what MLX computes on. Touches the device."""
    return _device_kind()


def _device_kind() -> DeviceKind:  # apart, so that tests can force every importer's answer in one place
    import mlx.core as mx

    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def multiply_in_float32() -> None:
    """Have this process multiply float32 in full where GPUs would take TF32, unless its environment says otherwise.

    MLX lets CUDA and Apple GPUs from M5 on round factors to 10 bits of mantissa, an error of about one in a thousand. Call this at
    the start of a program: it concerns the whole process, and does nothing once MLX has multiplied on a GPU.
    """
    os.environ.setdefault(TF32, "0")


def may_use_tf32(device: DeviceKind) -> bool:
    """Return whether MLX rounds the factors of float32 products, where the GPU can."""
    return device != "cpu" and os.environ.get(TF32, "1").strip() != "0"


def leave_thread() -> None:
    """Wait for, and end, what MLX runs on behalf of this thread; else the process aborts at exit."""
    if "mlx.core" not in sys.modules:  # never imported, so nothing runs
        return
    import mlx.core as mx

    mx.synchronize()
    mx.clear_streams()


def end_without_mlx() -> None:
    """End the process at once: one of its threads waits in MLX for what will never come, and MLX would abort at exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
