"""The settings in the chat: changed in one place, written at once.

A chat may have settings of its own, saved with it: sampling, system prompt, thinking, tools, and the profile that they came from. A
system prompt that was written but not applied stays with its chat as long as the app runs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tokamac.engine.errors import OptionError
from tokamac.engine.events import ToolCall
from tokamac.engine.options import THINKING, KVSpec, Sampling, TemplateOptions

from .. import units
from ..backend.protocol import ModelInfo
from ..profiles import Profile
from ..settings import DAMAGED, Settings, change, merged, read, with_allowed
from ..settings_form import whole_number
from ..store.values import Json, ToolResult
from ..strict_json import ShapeError, build
from .actions import keymap

if TYPE_CHECKING:
    from ..tools.toolbox import Toolbox
    from .session import Session


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ChatOverrides:
    """A chat's own settings. None: as in every chat. An empty system prompt means none, whatever other chats have.

    tools: those that are on, and MCP servers, by name; in every chat there are none. profile: the name of the one that was applied.
    """

    sampling: Sampling | None = None
    system: str | None = None
    template: TemplateOptions | None = None
    tools: tuple[str, ...] | None = None
    profile: str | None = None


def own_of(settings: Json) -> ChatOverrides:
    """Return a stored chat's own settings. What another version wrote and this one can't read is ignored."""
    system, profile = settings.get("system"), settings.get("profile")
    return ChatOverrides(
        _read(Sampling, settings.get("sampling"), "sampling"),
        system if isinstance(system, str) else None,
        _read(TemplateOptions, settings.get("template"), "template"),
        _read(tuple[str, ...], settings.get("tools"), "tools"),
        profile if isinstance(profile, str) else None,
    )


def as_settings(own: ChatOverrides) -> dict[str, Any]:
    """Return the chat's settings as they are stored; None removes a key."""
    return {
        "sampling": None if own.sampling is None else _changed(own.sampling),
        "system": own.system,
        "template": None if own.template is None else template_record(own.template),
        "tools": None if not own.tools else list(own.tools),
        "profile": own.profile,
    }


def template_record(template: TemplateOptions) -> dict[str, Any]:
    """Return what is stored of a template's options: which tools are on is stored apart."""
    return {name: value for name, value in asdict(template).items() if name != "tools"}


def _changed(sampling: Sampling) -> dict[str, Any]:
    """Return what differs from the defaults, so that a version that does not know the rest can read it, too."""
    usual = asdict(Sampling())
    return {name: value for name, value in asdict(sampling).items() if value != usual[name]}


def _read(kind: type[T], stored: object, name: str) -> T | None:
    if not isinstance(stored, dict | list):
        return None
    try:
        read: T = build(kind, stored, name)
    except (ShapeError, OptionError):
        return None
    return read


@dataclass(frozen=True, slots=True)
class Written:
    """A system prompt. own: it is for its chat alone."""

    text: str
    own: bool


class SystemDrafts:
    """Unapplied system prompts by the chat's ID; None is a new chat, which has none yet."""

    def __init__(self) -> None:
        self._drafts: dict[str | None, Written] = {}

    def of(self, chat: str | None) -> Written | None:
        """Return the draft of ``chat``, if there is one."""
        return self._drafts.get(chat)

    def keep(self, chat: str | None, draft: Written | None) -> None:
        """Set the draft of ``chat``; None removes it."""
        self._drafts.pop(chat, None)
        if draft is not None:
            self._drafts[chat] = draft

    def begun(self, chat: str) -> None:
        """The new chat is saved as ``chat`` from here on, and its draft goes with it."""
        self.keep(chat, self._drafts.pop(None, None))


class Preferences:
    """The current settings and their file. Command-line flags override them until something is chosen.

    own: the open chat's own settings. keymap: the actions with the user's keys. told: warnings about the file that were shown
    already. toolbox: the tools that a chat can have; None is none. tools_came: told, from a thread, when those of a server are
    there, or why they are not. asked_profile: by the command line; "" is none; None: it asked for nothing. Changes by other windows
    apply there only, except its system prompts and profiles, which join the others.
    """

    def __init__(
        self,
        settings: Settings,
        path: Path,
        given: ChatOverrides | None = None,
        told: Iterable[str] = (),
        asked_profile: str | None = None,
    ) -> None:
        self.settings = settings
        self.asked_profile = asked_profile
        self._profile = settings.profile if asked_profile is None else asked_profile
        self._written = settings
        self._told = set(told)
        self.own = ChatOverrides()
        self.system_drafts = SystemDrafts()
        self.keymap = keymap(settings.keys)
        self._given = given or ChatOverrides()
        self._path = path
        self.toolbox: Toolbox | None = None
        self.tools_came: Callable[[str], None] = lambda _: None

    @property
    def home(self) -> Path:
        """The folder of the settings file, which other small files share."""
        return self._path.parent

    @property
    def sampling(self) -> Sampling:
        """The sampling of the open chat."""
        return self._given.sampling or self.own.sampling or self.settings.sampling

    @property
    def system(self) -> str:
        """The system prompt of the open chat."""
        chosen = (self._given.system, self.own.system, self.settings.system)
        return next(text for text in chosen if text is not None)

    @property
    def template(self) -> TemplateOptions:
        """What the chat template is told in the open chat."""
        return self._given.template or self.own.template or self.settings.template

    def hold(self, own: ChatOverrides, session: "Session") -> None:
        """Apply another chat's own settings to ``session``."""
        self.own = own
        self.give(session)

    def give(self, session: "Session") -> None:
        """Apply the open chat's settings to ``session``, after a change."""
        session.sampling, session.system = self.sampling, self.system
        session.template = self.template
        session.profile = self._profile_label
        session.tools.allowed = set(self.settings.tools.allowed)
        session.tools.most = self.settings.tools.calls
        if self.toolbox is not None:
            on = self.tools
            self.toolbox.start_later(on, lambda said: self.tools_came(said))  # noqa: PLW0108  # the view may be set later
            session.offer(self.toolbox.specs(on))

    @property
    def tools(self) -> tuple[str, ...]:
        """The tools and MCP servers that are on in the open chat, as far as there are any of these names."""
        known = () if self.toolbox is None else self.toolbox.names
        return tuple(name for name in self._given.tools or self.own.tools or () if name in known)

    def choose_tools(self, names: Iterable[str]) -> None:
        """Turn these tools on in the open chat, and no others."""
        self._given = replace(self._given, tools=None)
        self.own = replace(self.own, tools=tuple(names))

    def run_tool(self, call: ToolCall, then: Callable[[ToolResult], None]) -> None:
        """Run a call, which may be of any chat, on a thread, and tell ``then`` from there what came of it."""
        if self.toolbox is not None:
            self.toolbox.run_later(call, then)

    def allow_tool(self, tool: str, *, always: bool) -> str:
        """Let a tool never ask, in any chat, or no longer so; return as ``keep`` does."""
        others = tuple(name for name in self.settings.tools.allowed if name != tool)
        return self.keep(with_allowed(self.settings, (*others, tool) if always else others))

    def close(self) -> None:
        """End what the tools have started."""
        if self.toolbox is not None:
            self.toolbox.close()

    def choose_sampling(self, sampling: Sampling, *, own: bool) -> str:
        """Set the sampling of this chat alone (``own``), or of every chat without its own; return as ``keep`` does."""
        self._given = replace(self._given, sampling=None)
        self.own = replace(self.own, sampling=sampling if own else None)
        return "" if own else self.keep(replace(self.settings, sampling=sampling))

    def choose_template(self, template: TemplateOptions, *, own: bool) -> str:
        """Set the template options of this chat alone (``own``), or of every chat without its own; return as ``keep`` does."""
        self._given = replace(self._given, template=None)
        self.own = replace(self.own, template=template if own else None)
        return "" if own else self.keep(replace(self.settings, template=template))

    def choose_system(self, system: str, *, own: bool) -> str:
        """Set the system prompt of this chat alone (``own``), or of every chat without its own; return as ``keep`` does."""
        self._given = replace(self._given, system=None)
        self.own = replace(self.own, system=system if own else None)
        return "" if own else self.keep(replace(self.settings, system=system))

    # Profiles -------------------------------------------------------------------------------------------------------------

    @property
    def for_new_chat(self) -> ChatOverrides:
        """What a new chat has of its own: what the profile says that was chosen last."""
        with suppress(OptionError):
            if self._profile in self.settings.profiles:
                self.kv(self._profile)
                return self.overrides(self._profile)
        return ChatOverrides()

    def overrides(self, profile: str) -> ChatOverrides:
        """Return what a chat has of its own by this profile. Raises OptionError where it does not go with the settings."""
        found, known = self.settings.profiles[profile], self.settings
        return ChatOverrides(
            found.over(known.sampling) if found.names(Sampling) else None,
            found.system,
            found.over(known.template) if found.names(TemplateOptions) else None,
            found.tools,
            profile,
        )

    def kv(self, profile: str | None) -> KVSpec:
        """Return how keys and values are kept by this profile; None: as in the settings. Raises OptionError, too."""
        found = self.settings.profiles.get(profile or "", Profile())
        return found.over(self.settings.kv)

    def names_kv(self, profile: str) -> bool:
        """Whether this profile says how keys and values are kept."""
        return self.settings.profiles.get(profile, Profile()).names(KVSpec)

    def choose_profile(self, name: str) -> str:
        """Give the open chat, and new ones, what this profile says; "" is none; return as ``keep`` does. Raises OptionError."""
        own = self.overrides(name) if name else ChatOverrides()
        kept = self.own.tools if own.tools is None else own.tools
        self.own, self._given, self._profile = replace(own, tools=kept), ChatOverrides(), name
        return self.keep(replace(self.settings, profile=name))

    def keep_profile(self, name: str, profile: Profile | None) -> str:
        """Write a profile into the settings, or remove it (None); return as ``keep`` does."""
        others = {each: known for each, known in self.profiles().items() if each != name}
        gone = profile is None and self.settings.profile == name
        chosen = "" if gone else self.settings.profile
        kept = others if profile is None else {**others, name: profile}
        if gone or (self._profile == name and profile is None):
            self._profile = ""
        return self.keep(replace(self.settings, profiles=kept, profile=chosen))

    @property
    def profile(self) -> str:
        """The profile of the open chat; "" is none."""
        return self.own.profile or ""

    @property
    def _profile_label(self) -> str:
        """The name of the open chat's profile, with a star where the chat has other settings by now."""
        name = self.profile
        try:
            as_chosen = self.overrides(name) if name in self.settings.profiles else None
        except OptionError:
            as_chosen = None
        same = as_chosen is not None and (
            (as_chosen.sampling or self.settings.sampling) == self.sampling
            and (as_chosen.template or self.settings.template) == self.template
            and (self.settings.system if as_chosen.system is None else as_chosen.system) == self.system
        )
        return name if same or not name else f"{name}*"

    def choose_keys(self, action: str, keys: tuple[str, ...] | None) -> str:
        """Set the keys of an action, None: its usual ones; return as ``keep`` does. ``keymap`` has them from here on."""
        others = {name: each for name, each in self.settings.keys.items() if name != action}
        self.keymap = keymap(others if keys is None else {**others, action: keys})
        return self.keep(replace(self.settings, keys=others if keys is None else {**others, action: keys}))

    def library(self) -> Mapping[str, str]:
        """Return the system prompts by name, with the changes of other windows."""
        self._look_again()
        return self.settings.system_prompts

    def profiles(self) -> Mapping[str, Profile]:
        """Return the profiles by name, with the changes of other windows and of an editor."""
        self._look_again()
        return self.settings.profiles

    def _look_again(self) -> None:
        """Take the system prompts and profiles that the file has now."""
        try:
            now = read(self._path).settings
        except (OSError, *DAMAGED):  # told when the next change is written
            return
        new = merged(now, self._written, self.settings)
        self.settings = replace(self.settings, system_prompts=new.system_prompts, profiles=new.profiles)
        self._written = replace(self._written, system_prompts=now.system_prompts, profiles=now.profiles)

    def keep(self, settings: Settings) -> str:
        """Apply ``settings`` and write the changes; return why they could not be written, new warnings, or ""."""
        self.settings = settings
        try:
            said = change(self._path, self._written, settings)
        except OSError as error:
            return f"The settings could not be written to {self._path}: {error.strerror}."
        self._written = settings
        new = [each for each in said if each not in self._told]
        self._told.update(new)
        return " ".join(new)


DEFAULT = "default"
"""Thinking as the chat template has it, without a budget."""
USAGE = f"Use {', '.join(THINKING)}, {DEFAULT}, or a number of tokens."


def chosen(text: str, now: TemplateOptions, info: ModelInfo | None) -> TemplateOptions:
    """Return ``now`` changed by the argument of /thinking. info: of the loaded model; None: it is not known yet.

    Raises:
        OptionError: the argument is invalid, or the model does not support it.
    """
    word = text.strip().lower()
    if word == DEFAULT:
        return replace(now, thinking=None, thinking_budget=None)
    budget = whole_number(word)
    mode = next((mode for mode in THINKING if mode == word), None)
    if budget is None and mode is None:
        raise OptionError(f"/thinking does not know {word!r:.40}", USAGE)
    other = replace(now, thinking=mode) if budget is None else replace(now, thinking_budget=budget)
    if budget is not None and other.thinking == "off":
        other = replace(other, thinking=None)  # a budget is for a model that thinks
    asked = TemplateOptions(mode, budget)
    if info is not None and (why := next(_untold(asked, info), None)) is not None:
        raise OptionError(why, _known(info))
    return other


def told(wanted: TemplateOptions, info: ModelInfo | None) -> tuple[TemplateOptions, tuple[str, ...]]:
    """Return the part of ``wanted`` that the loaded model supports, and a sentence for each part that it does not."""
    if info is None:
        return wanted, ()
    thinking = wanted.thinking if wanted.thinking in info.thinking_modes else None
    budget = wanted.thinking_budget if info.thinks else None
    values = {name: value for name, value in wanted.values.items() if name in info.template_names}
    return TemplateOptions(thinking, budget, values), tuple(_untold(wanted, info))


def _untold(wanted: TemplateOptions, info: ModelInfo) -> Iterator[str]:
    template = f"the chat template of {info.name}"
    if wanted.thinking is not None and wanted.thinking not in info.thinking_modes:
        modes = ", ".join(info.thinking_modes)
        why = f"{template} only supports {modes}" if modes else f"{template} has no switch for it"
        yield f"thinking {wanted.thinking} is not available: {why}"
    if wanted.thinking_budget is not None and not info.thinks:
        yield f"a thinking budget is not available: {info.name} does not mark its thinking"
    for name in wanted.values:
        if name not in info.template_names:
            yield f"the template option {name} is not available: {template} does not read it"


def _known(info: ModelInfo) -> str:
    return "Choose one of these." if info.thinking_modes else "Another model may support it."


def state(options: TemplateOptions) -> str:
    """Return what is set in a few words, for the status line: ``thinking off``, ``thinking ≤ 2k``; "" where nothing is."""
    if options.thinking == "off":
        return "thinking off"
    parts: list[str] = [] if options.thinking is None else [options.thinking]
    if options.thinking_budget is not None:
        parts.append(f"≤ {units.short(options.thinking_budget)}")
    thinking = f"thinking {' '.join(parts)}" if parts else ""
    others = (
        f"{len(options.keywords)} template option{'' if len(options.keywords) == 1 else 's'}"
        if options.keywords
        else ""
    )
    return ", ".join(part for part in (thinking, others) if part)


def sentences(options: TemplateOptions, info: ModelInfo | None) -> str:
    """Return what is set and what the loaded model supports, in sentences."""
    mode = "the chat template's default" if options.thinking is None else options.thinking
    budget = options.thinking_budget
    said = [f"Thinking: {mode}.", f"Budget: {'none' if budget is None else f'{units.count(budget)} tokens'}."]
    if options.keywords:
        said.append(f"Template options: {', '.join(options.keywords)}.")
    if info is not None:
        modes = ", ".join(info.thinking_modes)
        said.append(
            f"{info.name} supports: {modes}." if modes else f"The chat template of {info.name} has no switch for it."
        )
    return " ".join(said)


def budget_spent(tokens: int) -> str:
    """Return what is shown of thinking that was ended by a budget of ``tokens``."""
    return f"ended at its budget of {units.count(tokens)} tokens"
