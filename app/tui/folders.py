"""Folders with models that the user opened, the last one first: a small JSON file beside the settings."""

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from tokamac.engine.regular_files import read_text

FILE = "folders.json"
MOST = 30


class Folders:
    """The list, kept in the file ``path``. Losing it costs a little typing, so that what can't be read or written is let go of."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def all(self) -> tuple[str, ...]:
        """Return the folders, there or not."""
        try:
            found = json.loads(read_text(self._path))
        except (OSError, ValueError, RecursionError):
            return ()
        return tuple(name for name in found if isinstance(name, str))[:MOST] if isinstance(found, list) else ()

    def remember(self, folder: str) -> None:
        """Put a folder first."""
        name = str(Path(folder).expanduser().absolute())
        known = self.all()
        if known[:1] != (name,):
            self._write([name, *(each for each in known if each != name)][:MOST])

    def forget(self, folder: str) -> None:
        """Take a folder off the list; its files stay."""
        self._write([each for each in self.all() if each != folder])

    def _write(self, names: list[str]) -> None:
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(names, file)
            Path(temporary).replace(self._path)
