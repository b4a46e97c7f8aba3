"""The user's own editor: $VISUAL or $EDITOR, on a file that is gone afterwards."""

import os
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokamac.app.backend.killed import how_ended
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
        keep = file.read_bytes() != text.encode()
        if status:
            saved = f" What it had saved is in {name}." if keep else ""
            raise EditorError(f"{command[0]} {how_ended(status)}; the prompt is as it was.{saved}")
        written = sanitise(file.read_text(encoding="utf-8").rstrip("\n"))
        keep = False
        return written
    except UnicodeDecodeError:
        raise EditorError(f"What {command[0]} saved in {name} is not UTF-8; the prompt is as it was.") from None
    except OSError as error:
        raise EditorError(f"{command[0]} could not be used: {error}.") from error
    finally:
        if not keep:
            file.unlink(missing_ok=True)
