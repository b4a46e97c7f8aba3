"""Copying: by the system's own tool where there is one, else by the terminal (OSC 52), and always saying which."""

import os
import shutil
import subprocess
from collections.abc import Sequence

from textual.app import App

TOOLS: tuple[tuple[str, ...], ...] = (("pbcopy",), ("wl-copy",))


def copy_text(app: App[object], text: str) -> str:
    """Copy ``text``; return a sentence that says what was done."""
    tool = copy_by_tool(text)
    if tool is not None:
        return f"Copied {_size(text)} ({tool})."
    app.copy_to_clipboard(text)
    return f"Copied {_size(text)} through the terminal (OSC 52), if it allows that."


def copy_by_tool(text: str) -> str | None:
    """Copy ``text`` by the system's own tool; return its name, or None where there is none here, or it failed."""
    tool = None if os.environ.get("SSH_CONNECTION") else _tool()
    if tool is None:
        return None
    quiet = subprocess.DEVNULL
    try:
        subprocess.run(tool, input=text.encode(), check=True, timeout=2, stdout=quiet, stderr=quiet)
    except (OSError, subprocess.SubprocessError):
        return None
    return tool[0]


def _size(text: str) -> str:
    return f"{len(text):,} character{'' if len(text) == 1 else 's'}"


def _tool() -> Sequence[str] | None:
    if "WAYLAND_DISPLAY" not in os.environ:
        return TOOLS[0] if shutil.which("pbcopy") else None
    return next((tool for tool in TOOLS if shutil.which(tool[0])), None)
