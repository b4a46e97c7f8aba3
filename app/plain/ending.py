"""How a process that was waited for ended, where it did not do what it was for."""

from tokamac.app.backend.killed import killed_by
from tokamac.app.backend.line_process import Ended


def why(end: Ended) -> str:
    """Return what ended a process that failed: a signal, or what its own last words say."""
    if end.status < 0:
        return killed_by(-end.status)
    return end.last_line or f"exit status {end.status}"
