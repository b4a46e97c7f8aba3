"""MLX's device, and checks before its first use."""

import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from .errors import DeviceError
from .requirements import pip_install, unmet_here

DeviceKind = Literal["metal", "cuda", "cpu"]

BACKENDS = ("mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")

# The variable that MLX reads, once for a process, before its first product on a GPU (mlx/utils.h).
TF32 = "MLX_ENABLE_TF32"


def usable_cores(root: Path = Path("/")) -> int:
    """Return usable cores, by affinity and cgroup quota. root: of ``proc`` and ``sys``."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([there, *_quotas(root)])


def _quotas(root: Path) -> Iterator[int]:
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
    from importlib import metadata

    found = []
    for name in BACKENDS:
        with suppress(metadata.PackageNotFoundError):
            metadata.version(name)
            found.append(name)
    return tuple(found)


def check_backends(installed: tuple[str, ...], *, platform: str = sys.platform) -> None:
    # Linux builds share a library path: of two, the one installed last wins silently. macOS has only one, which
    # Homebrew, conda and Nix ship within ``mlx`` itself.
    if platform == "darwin":
        return
    if not installed:
        raise DeviceError("MLX is installed without a backend", _reinstall(platform))
    if len(installed) > 1:
        unwanted = " ".join(installed)
        raise DeviceError(
            f"several MLX backends are installed together ({', '.join(installed)})",
            f"Keep one: pip uninstall -y {unwanted}, then {pip_install('--force-reinstall', 'mlx[cpu]')} or 'mlx[cuda13]'.",
        )


def cannot_import(error: ImportError, *, platform: str = sys.platform, unmet: str | None = None) -> DeviceError | None:
    """Return the error for an unimportable MLX, None if unrelated. unmet: missing requirement; None: look."""
    if not re.search(r"\bmlx\b|libmlx", f"{error.name or ''} {error}"):
        return None
    lacks = unmet_here() if unmet is None else unmet
    reason = " ".join(str(error).split())[:240]
    return DeviceError(f"MLX can't be loaded: {reason}", lacks or _reinstall(platform))


def broken_library(error: ImportError) -> tuple[str, str]:
    """Return which library can't be imported and why, and what helps."""
    library = (error.name or "a library").partition(".")[0]
    again = pip_install("--force-reinstall", library.replace("_", "-"))
    return f"{library} can't be imported: {' '.join(str(error).split())[:240]}", f"Install it again: {again}."


def _reinstall(platform: str) -> str:
    if platform == "darwin":
        return f"Install it again: {pip_install('--force-reinstall', 'mlx')}."
    return f"Install one backend: {pip_install('--force-reinstall', 'mlx[cpu]')} or 'mlx[cuda13]'."


def device_kind() -> DeviceKind:
    return _device_kind()


def _device_kind() -> DeviceKind:  # apart, so that tests can force every importer's answer in one place
    import mlx.core as mx

    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def multiply_in_float32() -> None:
    """Disable TF32 in this process, unless its environment says otherwise. Call before MLX uses a GPU."""
    # MLX lets CUDA and Apple GPUs from M5 on round factors to 10 bits of mantissa, an error of about 0.1 %.
    os.environ.setdefault(TF32, "0")


def may_use_tf32(device: DeviceKind) -> bool:
    return device != "cpu" and os.environ.get(TF32, "1").strip() != "0"


def leave_thread() -> None:
    """End MLX's work for this thread; else the process aborts at exit."""
    if "mlx.core" not in sys.modules:  # never imported, so nothing runs
        return
    import mlx.core as mx

    mx.synchronize()
    mx.clear_streams()


def end_without_mlx() -> None:
    """Exit immediately: a thread waits in MLX forever, and MLX would abort at exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
