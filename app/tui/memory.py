"""The settings as the screen holds them: changed in one place, written at once. A chat may have some of its own."""

from dataclasses import replace
from pathlib import Path

from tokamac.app import settings as store
from tokamac.app.settings import Settings
from tokamac.app.tui.keymap import keymap
from tokamac.app.tui.own import Own
from tokamac.engine.options import Sampling


class Memory:
    """The current settings and the file they live in. What the command line gave goes before them, until something is chosen.

    own: what the chat that is held has of its own. keymap: the actions with the user's keys, as they were at the start.
    """

    def __init__(self, settings: Settings, path: Path, given: Own | None = None) -> None:
        self.settings = settings
        self.own = Own()
        self.keymap = keymap(settings.keys)
        self._given = given or Own()
        self._path = path

    @property
    def home(self) -> Path:
        """The folder that the settings are in; what else is remembered stands beside them."""
        return self._path.parent

    @property
    def sampling(self) -> Sampling:
        """The sampling that holds in the chat that is held."""
        return self._given.sampling or self.own.sampling or self.settings.sampling

    @property
    def system(self) -> str:
        """The system prompt that holds in the chat that is held."""
        chosen = (self._given.system, self.own.system, self.settings.system)
        return next(text for text in chosen if text is not None)

    def choose_sampling(self, sampling: Sampling, *, own: bool) -> str:
        """Hold ``sampling`` in this chat alone, or in every chat without its own; return as ``keep`` does."""
        self._given = replace(self._given, sampling=None)
        self.own = replace(self.own, sampling=sampling if own else None)
        return "" if own else self.keep(replace(self.settings, sampling=sampling))

    def choose_system(self, system: str, *, own: bool) -> str:
        """Hold ``system`` in this chat alone, or in every chat without its own; return as ``keep`` does."""
        self._given = replace(self._given, system=None)
        self.own = replace(self.own, system=system if own else None)
        return "" if own else self.keep(replace(self.settings, system=system))

    def keep(self, settings: Settings) -> str:
        """Hold and write ``settings``; return why they could not be written, or nothing."""
        self.settings = settings
        try:
            store.save(self._path, settings)
        except OSError as error:
            return f"The settings could not be written to {self._path}: {error.strerror}."
        return ""
