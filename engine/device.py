"""Which device MLX runs on, and the checks to make before the first use of it."""

from importlib import metadata
from typing import Literal

from tokamac.engine.errors import DeviceError

DeviceKind = Literal["metal", "cuda", "cpu"]


BACKENDS = ("mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")


def installed_backends() -> tuple[str, ...]:
    """Return the installed distributions that carry an MLX backend."""
    return tuple(name for name in BACKENDS if _is_installed(name))


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def check_backends(installed: tuple[str, ...]) -> None:
    """Raise DeviceError unless there is exactly one MLX backend.

    The Linux builds put their library at the same path, so with two of them the one installed last would silently win.
    """
    if not installed:
        raise DeviceError("MLX is installed without a backend", "Install one: pip install 'mlx[cpu]' or 'mlx[cuda13]'.")
    if len(installed) > 1:
        unwanted = " ".join(installed)
        raise DeviceError(
            f"several MLX backends are installed together ({', '.join(installed)})",
            f"Keep one: pip uninstall -y {unwanted}, then pip install --force-reinstall 'mlx[cpu]' or 'mlx[cuda13]'.",
        )


def device_kind() -> DeviceKind:
    """Return what MLX computes on. Touches the device."""
    return _device_kind()


def _device_kind() -> DeviceKind:  # apart, so that tests can force every importer's answer in one place
    import mlx.core as mx

    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def leave_thread() -> None:
    """Wait for, and end, what MLX runs on behalf of this thread. Left undone, the process aborts when it exits."""
    import mlx.core as mx

    mx.synchronize()
    mx.clear_streams()
