"""Copying without a screen: by the system's own tool, else into a file. The terminal itself is asked for nothing."""

from pathlib import Path

from tokamac.app.store.errors import StoreError
from tokamac.app.store.export import write
from tokamac.app.tui.clipboard import FILE, copy_by_tool


def copied(text: str, folder: Path) -> str:
    """Copy ``text``, or put it into a file in ``folder`` that the user alone can read; return a sentence that says which."""
    size = f"{len(text):,} character{'' if len(text) == 1 else 's'}"
    tool = copy_by_tool(text)
    if tool is not None:
        return f"Copied {size} ({tool})."
    file = folder / FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)  # anew, so that no link is followed and no older file's rights are kept
        write(file, text)
    except OSError as error:
        return f"No tool for copying is here (pbcopy, wl-copy), and {file} can't be written: {error.strerror}."
    except StoreError as error:
        return f"No tool for copying is here (pbcopy, wl-copy). {error.one_line()}"
    return f"No tool for copying is here (pbcopy, wl-copy): the text, {size}, is in {file}."
