"""Copying: by the system's own tool where there is one, else by the terminal (OSC 52) and to a file, and always saying which."""

import base64
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from textual.app import App

TOOLS: tuple[tuple[str, ...], ...] = (("pbcopy",), ("wl-copy",))
FILE = "copied.txt"


def copy_text(app: App[object], text: str, folder: Path) -> str:
    """Copy ``text``; return a sentence that says what was done.

    A terminal does not tell whether it took what it was sent, and some never do; so the text is then also in a file in ``folder``.
    """
    tool = copy_by_tool(text)
    if tool is not None:
        return f"Copied {_size(text)} ({tool})."
    app.copy_to_clipboard(text)
    return f"Copied {_size(text)} through the terminal (OSC 52), if it allows that; {_filed(folder / FILE, text)}"


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


def through_tmux(text: str) -> str:
    """Return the sequence that has tmux hand ``text`` on to the terminal it runs in, where ``allow-passthrough`` lets it."""
    sequence = f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\a"
    return "\x1bPtmux;" + sequence.replace("\x1b", "\x1b\x1b") + "\x1b\\"


def _filed(file: Path, text: str) -> str:
    """Write ``text`` to ``file``, for the user alone, in place of what was copied before; return what to say."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Anew, so that no link is followed and no older file's rights are kept.
        file.unlink(missing_ok=True)
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as opened:
            opened.write(text)
    except OSError as error:
        return f"it could not be written to {file}: {error.strerror}."
    return f"it is also in {file}"


def _size(text: str) -> str:
    return f"{len(text):,} character{'' if len(text) == 1 else 's'}"


def _tool() -> Sequence[str] | None:
    if "WAYLAND_DISPLAY" not in os.environ:
        return TOOLS[0] if shutil.which("pbcopy") else None
    return next((tool for tool in TOOLS if shutil.which(tool[0])), None)
