"""Copying without a screen: by the system's own tool, else into a file. The terminal itself is asked for nothing."""

from pathlib import Path

from tokamac.app.tui.clipboard import FILE, NotTakenError, copy_by_tool, filed, size_of


def copied(text: str, folder: Path) -> str:
    """Copy ``text``, or put it into a file in ``folder`` that the user alone can read; return a sentence that says which."""
    try:
        return f"Copied {size_of(text)} ({copy_by_tool(text)})."
    except NotTakenError as error:
        why, file = str(error), folder / FILE
    try:
        filed(file, text)
    except OSError as error:
        return f"Not copied ({why}), and {file} can't be written: {error.strerror}."
    return f"Not copied ({why}): the text, {size_of(text)}, is in {file}."
