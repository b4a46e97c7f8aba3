"""What the figures were measured on, with which versions, and what processes took."""

import datetime
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from tokamac.engine.device import usable_cores
from tokamac.engine.perf.memory import machine_total

# What the system counts of other processes: their children, and the processor time they took.


def children(pid: int) -> list[int]:
    """Return the processes that ``pid`` has started and that still run."""
    pairs = [line.split() for line in _ps("-A", "-o", "pid=,ppid=").splitlines()]
    return [int(child) for child, parent in pairs if int(parent) == pid]


def cpu_s(pid: int) -> float:
    """Return the processor time that ``pid`` has taken so far, to a hundredth of a second."""
    if sys.platform == "linux":
        fields = (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        )  # a name may hold spaces; it stands before
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    *hours, minutes, seconds = _ps("-o", "time=", "-p", str(pid)).strip().split(":")
    return sum(int(each) for each in hours) * 3600 + int(minutes) * 60 + float(seconds)


def _ps(*options: str) -> str:
    return subprocess.run(["ps", *options], capture_output=True, text=True, check=True).stdout


# What the figures were measured on, and with which versions.

PACKAGES = ("tokamac", "mlx", "mlx-lm", "numpy", "textual")


def facts() -> list[tuple[str, str]]:
    """Return name and value, for the head of the page."""
    return [
        ("processor", f"{cpu_name()}, {usable_cores()} cores"),
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
