"""The user's own editor: $VISUAL or $EDITOR, on a file that is gone afterwards."""

import os
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokamac.app.sanitise import sanitise


class EditorError(Exception):
    """There is no editor, or it failed; the message says which and what to do."""


def editor_command(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the command of the user's editor. Raises EditorError where none is set."""
    given = environment.get("VISUAL") or environment.get("EDITOR")
    if not given:
        raise EditorError("No editor is set: set EDITOR, for instance to vi or nano, and start tokamac again.")
    try:
        return shlex.split(given)
    except ValueError as error:
        raise EditorError(f"EDITOR is {given!r}, which can't be read as a command: {error}.") from None


def edit_text(command: Sequence[str], text: str) -> str:
    """Run the editor on ``text`` and return what was saved, made safe. Raises EditorError; the text is then as it was."""
    handle, name = tempfile.mkstemp(prefix="tokamac-", suffix=".md")
    file = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
        status = subprocess.run([*command, name], check=False).returncode
        if status:
            raise EditorError(f"{command[0]} ended with status {status}; the prompt is as it was.")
        return sanitise(file.read_text(encoding="utf-8").rstrip("\n"))
    except (OSError, UnicodeDecodeError) as error:
        raise EditorError(f"{command[0]} could not be used: {error}.") from error
    finally:
        file.unlink(missing_ok=True)
