"""What macOS says of the machine: parsers (pure, tested on recorded outputs) and the thin calls that feed them.

The calls only work on a Mac; elsewhere they return None. They have not been run by the tests, the parsers have.
"""

import re
import subprocess
import sys

TIMEOUT_S = 5.0


def parse_ioreg_cores(text: str) -> int | None:
    """Return ``gpu-core-count`` from `ioreg -rc AGXAccelerator -d1`; the largest where several accelerators are listed."""
    counts = [int(count) for count in re.findall(r'^\s*"gpu-core-count"\s*=\s*(\d+)\s*$', text, re.MULTILINE)]
    return max(counts, default=None)


def parse_ioreg_memory(text: str) -> int | None:
    """Return the bytes of memory the GPU has in use, from the same output.

    The key "In use system memory (driver)" comes first and is 0: it is not the one.
    """
    found = re.search(r'"In use system memory"\s*=\s*(\d+)', text)
    return int(found.group(1)) if found else None


def parse_profiler_cores(text: str) -> int | None:
    """Return the GPU cores from `system_profiler SPDisplaysDataType`.

    Only a number alone counts: SPHardwareDataType has a line of the same name for the CPU, "16 (12 performance and …)".
    """
    found = re.search(r"^\s*Total Number of Cores:\s*(\d+)\s*$", text, re.MULTILINE | re.IGNORECASE)
    return int(found.group(1)) if found else None


def parse_throttled(text: str) -> bool | None:
    """Return from `pmset -g therm` whether the system holds the chip back; None where the text does not say.

    Held back: a limit on speed or scheduling below 100 %, or a warning level above 0. A warning that was never recorded is none.
    """
    limits = re.findall(r"^\s*CPU_(?:Speed|Scheduler)_Limit\s*=\s*(\d+)\s*$", text, re.MULTILINE)
    levels = re.findall(r"(?:thermal|performance) warning level\s*=\s*(\d+)\s*$", text, re.MULTILINE | re.IGNORECASE)
    if any(int(limit) < 100 for limit in limits) or any(int(level) > 0 for level in levels):
        return True
    none_recorded = re.search(r"no thermal warning level has been recorded", text, re.IGNORECASE)
    return False if limits or levels or none_recorded else None


def parse_chip_name(text: str) -> str | None:
    """Return the chip's name from `sysctl -n machdep.cpu.brand_string`."""
    return text.split("(", maxsplit=1)[0].strip() or None


def is_mac() -> bool:
    """Return whether this is macOS."""
    return sys.platform == "darwin"


def chip_name() -> str | None:
    """Return the chip's name; None where there is no such command."""
    text = _output("sysctl", "-n", "machdep.cpu.brand_string")
    return parse_chip_name(text) if text else None


def gpu_cores() -> int | None:
    """Return how many GPU cores the chip has: they tell its bins apart."""
    if (text := _output("ioreg", "-rc", "AGXAccelerator", "-d1")) and (cores := parse_ioreg_cores(text)):
        return cores
    text = _output("system_profiler", "SPDisplaysDataType")
    return parse_profiler_cores(text) if text else None


def throttled() -> bool | None:
    """Return whether the system holds the chip back because of its heat; None where it does not tell. Takes milliseconds."""
    text = _output("pmset", "-g", "therm")
    return parse_throttled(text) if text else None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
