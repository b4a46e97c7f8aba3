"""Copying: by the system's own tool where there is one, else by the terminal (OSC 52) and to a file, and always saying which."""

import base64
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from textual.app import App

TOOLS: tuple[tuple[str, ...], ...] = (("pbcopy",), ("wl-copy",))
FILE = "copied.txt"
UTF8 = {"LC_ALL": "", "LC_CTYPE": "UTF-8"}
"""What pbcopy must find: it reads its input in the encoding of the locale, and without one in MacRoman."""
PATIENCE_S = 2.0
"""A tool that takes longer hangs."""


class NotTakenError(Exception):
    """No tool of the system's took the text; ``str(error)`` is why, a part of a sentence."""


def copy_text(app: "App[object]", text: str, folder: Path) -> str:
    """Copy ``text``; return a sentence that says what was done.

    A terminal does not tell whether it took what it was sent, and some never do; so the text is then also in a file in ``folder``.
    """
    try:
        return f"Copied {size_of(text)} ({copy_by_tool(text)})."
    except NotTakenError:
        app.copy_to_clipboard(text)
    kept = _also_filed(folder / FILE, text)
    return f"Copied {size_of(text)} through the terminal (OSC 52), if it allows that; {kept}"


def copy_by_tool(text: str) -> str:
    """Copy ``text`` by the system's own tool; return its name. Raises NotTakenError."""
    if os.environ.get("SSH_CONNECTION"):
        raise NotTakenError("over SSH a tool would copy on the machine that this runs on")
    tool = _tool()
    if tool is None:
        raise NotTakenError("there is no pbcopy here, nor wl-copy under Wayland")
    quiet = subprocess.DEVNULL
    environment = {**os.environ, **UTF8} if tool[0] == "pbcopy" else None
    try:
        subprocess.run(
            tool, input=text.encode(), check=True, timeout=PATIENCE_S, stdout=quiet, stderr=quiet, env=environment
        )
    except subprocess.TimeoutExpired:
        raise NotTakenError(f"{tool[0]} did not end within {PATIENCE_S:g} s") from None
    except subprocess.CalledProcessError as error:
        raise NotTakenError(f"{tool[0]} failed with exit status {error.returncode}") from None
    except OSError as error:
        raise NotTakenError(f"{tool[0]} can't be run: {error.strerror}") from None
    return tool[0]


def filed(file: Path, text: str) -> None:
    """Write ``text`` to ``file``, for the user alone, in place of what was copied before. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # Anew, so that no link is followed and no older file's rights are kept.
    file.unlink(missing_ok=True)
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8", newline="") as opened:
        opened.write(text)


def size_of(text: str) -> str:
    """Return how long ``text`` is, in words."""
    return f"{len(text):,} character{'' if len(text) == 1 else 's'}"


def through_tmux(text: str) -> str:
    """Return the sequence that has tmux hand ``text`` on to the terminal it runs in, where ``allow-passthrough`` lets it."""
    sequence = f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\a"
    return "\x1bPtmux;" + sequence.replace("\x1b", "\x1b\x1b") + "\x1b\\"


def _also_filed(file: Path, text: str) -> str:
    try:
        filed(file, text)
    except OSError as error:
        return f"it could not be written to {file}: {error.strerror}."
    return f"it is also in {file}"


def _tool() -> Sequence[str] | None:
    if "WAYLAND_DISPLAY" not in os.environ:
        return TOOLS[0] if shutil.which("pbcopy") else None
    return next((tool for tool in TOOLS if shutil.which(tool[0])), None)
