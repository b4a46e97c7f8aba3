"""How much memory macOS has left for this process: parsers (pure, tested on recorded outputs) and the thin calls that feed them.

The calls only work on a Mac; elsewhere they return None. They have not been run by the tests, the parsers have.
"""

import re
import subprocess

from tokamac.engine.limits.macos import is_mac

TIMEOUT_S = 2.0

CRITICAL = 4
"""`kern.memorystatus_vm_pressure_level`: 1 normal, 2 warning, 4 critical."""

AVAILABLE = ("Pages free", "Pages speculative", "Pages inactive")
"""What other programs do not use now: what `psutil` calls available. `vm_stat` counts speculative pages apart from free ones."""


def parse_vm_stat(text: str) -> int | None:
    """Return from `vm_stat` the bytes that are free or can be had at once; None where it does not say."""
    size = re.search(r"page size of (\d+) bytes", text)
    counts = [re.search(rf"^{name}:\s+(\d+)\.?\s*$", text, re.MULTILINE) for name in AVAILABLE]
    if size is None or any(count is None for count in counts):
        return None
    return int(size.group(1)) * sum(int(count.group(1)) for count in counts if count)


def parse_pressure(text: str) -> int | None:
    """Return the level of `sysctl -n kern.memorystatus_vm_pressure_level`."""
    return int(text) if text.strip().isdigit() else None


def available() -> int | None:
    """Return the bytes that other programs leave; 0 where the system says that memory is critically short. Takes milliseconds."""
    if not is_mac():
        return None
    level = _output("sysctl", "-n", "kern.memorystatus_vm_pressure_level")
    if level is not None and parse_pressure(level) == CRITICAL:
        return 0
    text = _output("vm_stat")
    return None if text is None else parse_vm_stat(text)


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
