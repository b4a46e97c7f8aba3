"""The user's own editor: $VISUAL, $EDITOR, or one that is here, on a file that is gone afterwards."""

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokamac.app.backend.killed import how_ended
from tokamac.app.sanitise import sanitise
from tokamac.engine.regular_files import read_bytes, read_text

FOUND = ("nano", "vi")
"""Taken where none is set, as on a Mac."""

WAIT_FLAGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("code", "code-insiders", "codium", "cursor", "windsurf", "subl", "zed", "zeditor", "mate", "bbedit", "atom"),
        ("--wait", "-w"),
    ),
    **dict.fromkeys(("gvim", "mvim"), ("--nofork", "-f")),
    "open": ("-W", "--wait-apps"),
}
"""Programs that open a window and end at once, unless told to wait: the first of these flags is added where none is there."""


LARGEST_BYTES = 64_000_000
"""Of what an editor saved: no context holds more."""


class EditorError(Exception):
    """There is no editor, or it failed; the message says which and what to do."""


def editor_command(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the command of the user's editor, one that waits. Raises EditorError where there is none."""
    given = (environment.get("VISUAL") or environment.get("EDITOR") or "").strip()
    if not given:
        found = next((name for name in FOUND if shutil.which(name, path=environment.get("PATH"))), None)
        if found is None:
            raise EditorError("No editor is set: set EDITOR, for instance to vi or nano, and start tokamac again.")
        return [found]
    try:
        command = shlex.split(given)
    except ValueError as error:
        raise EditorError(f"EDITOR is {given!r}, which can't be read as a command: {error}.") from None
    return _waiting(command)


def _waiting(command: list[str]) -> list[str]:
    """Return ``command`` so that it ends when the file is closed."""
    flags = WAIT_FLAGS.get(Path(command[0]).name, ()) if command else ()
    if not flags or not set(flags).isdisjoint(command):
        return command
    return [command[0], flags[0], *command[1:]]


def edit_text(command: Sequence[str], text: str) -> str:
    """Run the editor on ``text`` and return what was saved, made safe.

    Raises EditorError; the text is then as it was, and what an editor that failed had saved stays in its file, which is named.
    """
    handle, name = tempfile.mkstemp(prefix="tokamac-", suffix=".md")
    file = Path(name)
    keep = False
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
        status = subprocess.run([*command, name], check=False).returncode
        keep = read_bytes(file, LARGEST_BYTES) != text.encode()
        if status:
            saved = f" What it had saved is in {name}." if keep else ""
            raise EditorError(f"{command[0]} {how_ended(status)}; the prompt is as it was.{saved}")
        written = sanitise(read_text(file, LARGEST_BYTES).rstrip("\n"))
        keep = False
        return written
    except UnicodeDecodeError:
        raise EditorError(f"What {command[0]} saved in {name} is not UTF-8; the prompt is as it was.") from None
    except OSError as error:
        raise EditorError(f"{command[0]} could not be used: {error}.") from error
    finally:
        if not keep:
            file.unlink(missing_ok=True)
