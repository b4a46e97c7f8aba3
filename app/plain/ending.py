"""How a process that was waited for ended, where it did not do what it was for."""

import signal

from tokamac.app.backend.line_process import Ended


def why(end: Ended) -> str:
    """Return what ended a process that failed: a signal, or what its own last words say."""
    if end.status < 0:
        known = -end.status in set(signal.Signals)
        return f"killed by {signal.Signals(-end.status).name if known else f'signal {-end.status}'}"
    return end.last_line or f"exit status {end.status}"
