"""What the system counts of other processes: their children, and the processor time they took."""

import os
import subprocess
import sys
from pathlib import Path


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
