"""The settings as the screen holds them: changed in one place, written at once."""

from pathlib import Path

from tokamac.app import settings as store
from tokamac.app.settings import Settings


class Memory:
    """The current settings and the file they live in."""

    def __init__(self, settings: Settings, path: Path) -> None:
        self.settings = settings
        self._path = path

    def keep(self, settings: Settings) -> str:
        """Hold and write ``settings``; return why they could not be written, or nothing."""
        self.settings = settings
        try:
            store.save(self._path, settings)
        except OSError as error:
            return f"The settings could not be written to {self._path}: {error.strerror}."
        return ""
