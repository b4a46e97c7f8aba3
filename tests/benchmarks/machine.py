"""What the figures were measured on, and with which versions."""

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from tokamac.engine.perf.memory import machine_total

PACKAGES = ("tokamac", "mlx", "mlx-lm", "numpy", "textual")


def facts() -> list[tuple[str, str]]:
    """Return name and value, for the head of the page."""
    return [
        ("processor", f"{cpu_name()}, {cores()} cores"),
        ("memory", memory()),
        ("system", platform.platform(terse=True)),
        (
            "versions",
            ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in PACKAGES)]),
        ),
    ]


def moment() -> str:
    """Return the time, and how busy the machine has been."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{now}, load average before {', '.join(f'{value:.2f}' for value in os.getloadavg())} (1, 5, 15 minutes)"


def cpu_name() -> str:
    """Return the processor's name as the system gives it."""
    if platform.system() == "Darwin":
        asked = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        )
        return asked.stdout.strip() or "unknown"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cores() -> int:
    """Return the cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory() -> str:
    """Return the machine's memory."""
    total = machine_total()
    return "unknown" if total is None else f"{total / 1e9:.1f} GB"


def version(distribution: str) -> str:
    """Return the installed version; of a source tree that is not installed, what its pyproject.toml says."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "(from its source)"
