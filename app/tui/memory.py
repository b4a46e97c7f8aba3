"""The settings as the screen holds them: changed in one place, written at once. A chat may have some of its own."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tokamac.app.settings import DAMAGED, Settings, read
from tokamac.app.settings_change import change, merged
from tokamac.app.tui.keymap import keymap
from tokamac.app.tui.own import Own
from tokamac.app.tui.system_drafts import SystemDrafts
from tokamac.engine.options import Sampling, TemplateOptions

if TYPE_CHECKING:
    from tokamac.app.tui.session import Session


class Memory:
    """The current settings and the file they live in. What the command line gave goes before them, until something is chosen.

    own: what the chat that is held has of its own. keymap: the actions with the user's keys, as they were at the start.
    told: what was said of the file already, and need not be said again. What another window changes holds there: only its system
    prompts are taken over, into the library.
    """

    def __init__(self, settings: Settings, path: Path, given: Own | None = None, told: Iterable[str] = ()) -> None:
        self.settings = settings
        self._written = settings
        self._told = set(told)
        self.own = Own()
        self.system_drafts = SystemDrafts()
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

    @property
    def template(self) -> TemplateOptions:
        """What the chat template is told in the chat that is held."""
        return self._given.template or self.own.template or self.settings.template

    def hold(self, own: Own, session: "Session") -> None:
        """Let what a chat has of its own hold in ``session`` from here on, and else what holds in every chat."""
        self.own = own
        self.give(session)

    def give(self, session: "Session") -> None:
        """Let what holds in the chat that is held hold in ``session``, after a change."""
        session.sampling, session.system = self.sampling, self.system
        session.template = self.template

    def choose_sampling(self, sampling: Sampling, *, own: bool) -> str:
        """Hold ``sampling`` in this chat alone, or in every chat without its own; return as ``keep`` does."""
        self._given = replace(self._given, sampling=None)
        self.own = replace(self.own, sampling=sampling if own else None)
        return "" if own else self.keep(replace(self.settings, sampling=sampling))

    def choose_template(self, template: TemplateOptions, *, own: bool) -> str:
        """Tell the chat template this in this chat alone, or in every chat without its own; return as ``keep`` does."""
        self._given = replace(self._given, template=None)
        self.own = replace(self.own, template=template if own else None)
        return "" if own else self.keep(replace(self.settings, template=template))

    def choose_system(self, system: str, *, own: bool) -> str:
        """Hold ``system`` in this chat alone, or in every chat without its own; return as ``keep`` does."""
        self._given = replace(self._given, system=None)
        self.own = replace(self.own, system=system if own else None)
        return "" if own else self.keep(replace(self.settings, system=system))

    def library(self) -> Mapping[str, str]:
        """Return the system prompts by name, with what other windows made of them since."""
        try:
            now = read(self._path).settings
        except (OSError, *DAMAGED):  # that is said when the next change is written
            return self.settings.system_prompts
        prompts = merged(now, self._written, self.settings).system_prompts
        self.settings = replace(self.settings, system_prompts=prompts)
        self._written = replace(self._written, system_prompts=now.system_prompts)
        return prompts

    def keep(self, settings: Settings) -> str:
        """Hold ``settings``, and write what is changed in them; return why they could not be written, what else to say, or ""."""
        self.settings = settings
        try:
            said = change(self._path, self._written, settings)
        except OSError as error:
            return f"The settings could not be written to {self._path}: {error.strerror}."
        self._written = settings
        new = [each for each in said if each not in self._told]
        self._told.update(new)
        return " ".join(new)
