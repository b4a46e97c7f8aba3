"""Copying: by the system's own tool where there is one, else by the terminal (OSC 52), and always saying which."""

import os
import shutil
import subprocess
from collections.abc import Sequence

from textual.app import App

TOOLS: tuple[tuple[str, ...], ...] = (("pbcopy",), ("wl-copy",))


def copy_text(app: App[object], text: str) -> str:
    """Copy ``text``; return a sentence that says what was done."""
    size = f"{len(text):,} character{'' if len(text) == 1 else 's'}"
    tool = None if os.environ.get("SSH_CONNECTION") else _tool()
    if tool is not None:
        try:
            subprocess.run(
                tool, input=text.encode(), check=True, timeout=2, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            return f"Copied {size} ({tool[0]})."
        except (OSError, subprocess.SubprocessError) as error:
            app.log.warning(f"{tool[0]}: {error}")
    app.copy_to_clipboard(text)
    return f"Copied {size} through the terminal (OSC 52), if it allows that."


def _tool() -> Sequence[str] | None:
    if "WAYLAND_DISPLAY" not in os.environ:
        return TOOLS[0] if shutil.which("pbcopy") else None
    return next((tool for tool in TOOLS if shutil.which(tool[0])), None)
