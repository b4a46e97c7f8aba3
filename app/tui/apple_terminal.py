"""Textual's driver for Terminal.app, which prints the last letter of a question that it does not know.

Textual 8.2.8 leaves out the question after synchronized output there (DECRQM, ``CSI ? 2026 $ p``), and asks the one after in-band
resizing (2048) all the same: a "p" would stand on the screen until it is drawn over.
"""

import os

from textual.drivers.linux_driver import LinuxDriver


def is_apple_terminal() -> bool:
    """Whether this runs in Terminal.app itself: tmux and others in it answer by themselves, and have another name."""
    return os.environ.get("TERM_PROGRAM") == "Apple_Terminal"


class AppleTerminalDriver(LinuxDriver):
    """A terminal that is not asked whether it tells of its size: the signal of a new one is enough."""

    def _query_in_band_window_resize(self) -> None:
        """Ask nothing."""
