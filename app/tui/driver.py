"""What is written to the terminal, last of all: emoji of several characters keep their place.

Terminals draw a flag, a skin tone or a joined family in as many cells as they know of, or don't; all that follows in the row would
move, and the panel's edge with it. So the cells that such a cluster has in our rows are cleared, it is drawn, and the cursor is
put behind them, wherever it went.
"""

import re

from rich.cells import cell_len
from textual.drivers.linux_driver import LinuxDriver

_SUSPECT = re.compile("[\u200d\ufe0f\U0001f1e6-\U0001f1ff\U0001f3fb-\U0001f3ff]")
_BASE = "[^\x00-\x20\x7f-\x9f\u200d\ufe0f\U0001f3fb-\U0001f3ff]"
_CHANGED = "(?:\ufe0f\u20e3?|[\U0001f3fb-\U0001f3ff])"
_CLUSTER = re.compile(f"[\U0001f1e6-\U0001f1ff]{{2}}|{_BASE}{_CHANGED}?(?:\u200d{_BASE}{_CHANGED}?)+|{_BASE}{_CHANGED}")
TITLE = "\x1b]2;"
"""Begins the terminal's title, which is no row."""


def anchored(data: str) -> str:
    """Return what is to be written, with each cluster in as many cells as its row counts for it."""
    return data if _SUSPECT.search(data) is None or TITLE in data else _CLUSTER.sub(_in_place, data)


def _in_place(found: re.Match[str]) -> str:
    width = cell_len(found[0])
    return f"\x1b7{' ' * width}\x1b8{found[0]}\x1b8\x1b[{width}C" if width else found[0]


class AnchoringDriver(LinuxDriver):
    """Keeps every row's cells in their columns."""

    def write(self, data: str) -> None:
        """Write ``data``."""
        super().write(anchored(data))


class AppleTerminalDriver(AnchoringDriver):
    """Does not ask whether the terminal reports its size in band: the signal is enough."""

    def _query_in_band_window_resize(self) -> None:
        """Ask nothing."""
