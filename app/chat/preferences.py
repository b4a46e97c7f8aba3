"""The chat's settings: changed in one place, written immediately."""

# A chat may override sampling, system prompt, thinking and tools, and name a profile; stored with it. An
# unapplied system prompt stays with its chat while the app runs.

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tokamac.engine.errors import OptionError, TokamacError
from tokamac.engine.events import ModelSpec, ToolCall
from tokamac.engine.options import THINKING, KVSpec, Sampling, TemplateOptions

from .. import system_files
from ..settings import DAMAGED, Profile, Settings, change, merged, read, with_allowed
from ..store.values import Json, ToolResult
from ..system_files import SystemPart
from ..text import units
from ..text.strict_json import ShapeError, build
from .actions import keymap
from .settings_form import whole_number

if TYPE_CHECKING:
    from ..tools.calls import Furthest, Preview
    from ..tools.changes import Keep
    from ..tools.toolbox import Toolbox
    from .session import Session


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ChatOverrides:
    """A chat's own settings; None: the general ones. An empty system prompt means none.

    tools: names of enabled tools and MCP servers (in general none). profile: the applied one. project: its file.
    """

    sampling: Sampling | None = None
    system: str | None = None
    template: TemplateOptions | None = None
    tools: tuple[str, ...] | None = None
    profile: str | None = None
    project: str | None = None


def own_of(settings: Json) -> ChatOverrides:
    """Parse a stored chat's settings; unreadable ones (other versions) are ignored."""
    system, profile, project = (settings.get(name) for name in ("system", "profile", "project"))
    return ChatOverrides(
        _read(Sampling, settings.get("sampling"), "sampling"),
        system if isinstance(system, str) else None,
        _read(TemplateOptions, settings.get("template"), "template"),
        _read(tuple[str, ...], settings.get("tools"), "tools"),
        profile if isinstance(profile, str) else None,
        project if isinstance(project, str) else None,
    )


def as_settings(own: ChatOverrides) -> dict[str, Any]:
    """Return the stored form; None removes a key."""
    return {
        "sampling": None if own.sampling is None else _changed(own.sampling),
        "system": own.system,
        "template": None if own.template is None else template_record(own.template),
        "tools": None if not own.tools else list(own.tools),
        "profile": own.profile,
        "project": own.project,
    }


def template_record(template: TemplateOptions) -> dict[str, Any]:
    """Return the stored template options; enabled tools are stored apart."""
    return {name: value for name, value in asdict(template).items() if name != "tools"}


def _changed(sampling: Sampling) -> dict[str, Any]:
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
    text: str
    own: bool


class SystemDrafts:
    """Unapplied system prompts by chat ID; None is a new chat."""

    def __init__(self) -> None:
        self._drafts: dict[str | None, Written] = {}

    def get(self, chat: str | None) -> Written | None:
        return self._drafts.get(chat)

    def keep(self, chat: str | None, draft: Written | None) -> None:
        self._drafts.pop(chat, None)
        if draft is not None:
            self._drafts[chat] = draft

    def begun(self, chat: str) -> None:
        self.keep(chat, self._drafts.pop(None, None))


class Preferences:
    """Current settings and their file; command-line flags override them until something is chosen.

    toolbox: available tools. tools_came: called from a thread when a server's tools arrive or fail. asked_profile: by
    the command line; "" is none, None: not asked. asked_model: likewise, saved once loaded. Other windows' changes
    don't apply here, except system prompts, profiles and MCP servers, which are merged.
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
        self.asked_model: str | None = None
        self._profile = settings.profile if asked_profile is None else asked_profile
        self._written = settings
        self._told = set(told)
        self.own = ChatOverrides()
        self._project: str | None = None  # of new chats
        self._beside: tuple[SystemPart, ...] = ()
        self.system_drafts = SystemDrafts()
        self.keymap = keymap(settings.keys)
        self._given = given or ChatOverrides()
        self._path = path
        self.toolbox: Toolbox | None = None
        self.tools_came: Callable[[str], None] = lambda _: None

    @property
    def home(self) -> Path:
        return self._path.parent

    @property
    def sampling(self) -> Sampling:
        return self._given.sampling or self.own.sampling or self.settings.sampling

    @property
    def system(self) -> str:
        chosen = (self._given.system, self.own.system, self.settings.system)
        return next(text for text in chosen if text is not None)

    @property
    def template(self) -> TemplateOptions:
        return self._given.template or self.own.template or self.settings.template

    def hold(self, own: ChatOverrides, session: "Session") -> str:
        """Use a chat's settings; return what can't be read of its files, or ""."""
        self.own = own
        problem = self.read_files()
        self.give(session)
        return problem

    def read_files(self) -> str:
        """Read the files of the system prompt again; return what can't be read, or ""."""
        found: list[SystemPart] = []
        problems: list[str] = []
        memory = partial(system_files.memory, self.home, self.profile)
        for parts in (partial(system_files.project, self.own.project), memory):
            try:
                found += parts()
            except TokamacError as error:
                problems.append(error.one_line())
        self._beside = tuple(found)
        return " ".join(problems)

    def choose_project(self, file: str | None) -> str:
        """Let ``file`` be part of the system prompt of this chat, and of new ones; returns as ``read_files``."""
        self._project = file
        self.own = replace(self.own, project=file)
        return self.read_files()

    def give(self, session: "Session") -> None:
        session.sampling, session.system, session.beside = self.sampling, self.system, self._beside
        session.template = self.template
        session.profile = self._profile_label
        session.tools.allowed = set(self.settings.tools.allowed)
        session.tools.most = self.settings.tools.calls
        session.tools.furthest = self.furthest
        if self.toolbox is not None:
            on = self.tools
            self.toolbox.start_later(on, lambda said: self.tools_came(said))  # noqa: PLW0108  # the view may be set later
            session.offer(self.toolbox.specs(on))

    @property
    def tools(self) -> tuple[str, ...]:
        known = () if self.toolbox is None else self.toolbox.names
        return tuple(name for name in self._given.tools or self.own.tools or () if name in known)

    def choose_tools(self, names: Iterable[str]) -> None:
        self._given = replace(self._given, tools=None)
        self.own = replace(self.own, tools=tuple(names))

    def run_tool(self, call: ToolCall, then: Callable[[ToolResult], None], keep: "Keep | None" = None) -> None:
        """Run a call of any chat on a thread; ``then`` and ``keep`` run there too."""
        if self.toolbox is not None:
            self.toolbox.run_later(call, then, keep)

    def furthest(self, tool: str) -> "Furthest":
        return "always" if self.toolbox is None else self.toolbox.furthest(tool)

    def preview(self, call: ToolCall) -> "Preview | None":
        """Raises ToolError."""
        return None if self.toolbox is None else self.toolbox.preview(call)

    def stop_tools(self) -> None:
        if self.toolbox is not None:
            self.toolbox.stop()

    def allow_tool(self, tool: str, *, always: bool) -> str:
        """Allow a tool in all chats, or revoke that; returns as ``keep``."""
        others = tuple(name for name in self.settings.tools.allowed if name != tool)
        return self.keep(with_allowed(self.settings, (*others, tool) if always else others))

    def close(self) -> None:
        if self.toolbox is not None:
            self.toolbox.close()

    def choose_sampling(self, sampling: Sampling, *, own: bool) -> str:
        """Set this chat's (``own``) or the general sampling; returns as ``keep``."""
        self._given = replace(self._given, sampling=None)
        self.own = replace(self.own, sampling=sampling if own else None)
        return "" if own else self.keep(replace(self.settings, sampling=sampling))

    def choose_template(self, template: TemplateOptions, *, own: bool) -> str:
        """Set this chat's (``own``) or the general template options; returns as ``keep``."""
        self._given = replace(self._given, template=None)
        self.own = replace(self.own, template=template if own else None)
        return "" if own else self.keep(replace(self.settings, template=template))

    def choose_system(self, system: str, *, own: bool) -> str:
        """Set this chat's (``own``) or the general system prompt; returns as ``keep``."""
        self._given = replace(self._given, system=None)
        self.own = replace(self.own, system=system if own else None)
        return "" if own else self.keep(replace(self.settings, system=system))

    # Profiles -------------------------------------------------------------------------------------------------------------

    @property
    def for_new_chat(self) -> ChatOverrides:
        with suppress(OptionError):
            if self._profile in self.settings.profiles:
                self.kv(self._profile)
                return replace(self.overrides(self._profile), project=self._project)
        return ChatOverrides(project=self._project)

    def overrides(self, profile: str) -> ChatOverrides:
        """Return a profile's overrides. Raises OptionError if it conflicts with the settings."""
        found, known = self.settings.profiles[profile], self.settings
        return ChatOverrides(
            found.over(known.sampling) if found.names(Sampling) else None,
            found.system,
            found.over(known.template) if found.names(TemplateOptions) else None,
            found.tools,
            profile,
        )

    def kv(self, profile: str | None) -> KVSpec:
        """Return a profile's KV settings; None: the general ones. Raises OptionError."""
        found = self.settings.profiles.get(profile or "", Profile())
        return found.over(self.settings.kv)

    def names_kv(self, profile: str) -> bool:
        return self.settings.profiles.get(profile, Profile()).names(KVSpec)

    def choose_profile(self, name: str) -> str:
        """Apply a profile to this and new chats; "" is none. Returns as ``keep``. Raises OptionError."""
        own = self.overrides(name) if name else ChatOverrides()
        kept = self.own.tools if own.tools is None else own.tools
        self.own = replace(own, tools=kept, project=self.own.project)
        self._given, self._profile = ChatOverrides(), name
        return " ".join(filter(None, (self.read_files(), self.keep(replace(self.settings, profile=name)))))

    def keep_profile(self, name: str, profile: Profile | None) -> str:
        """Save a profile, or delete it (None); returns as ``keep``."""
        others = {each: known for each, known in self.profiles().items() if each != name}
        gone = profile is None and self.settings.profile == name
        chosen = "" if gone else self.settings.profile
        kept = others if profile is None else {**others, name: profile}
        if gone or (self._profile == name and profile is None):
            self._profile = ""
        return self.keep(replace(self.settings, profiles=kept, profile=chosen))

    @property
    def profile(self) -> str:
        return self.own.profile or ""

    @property
    def _profile_label(self) -> str:
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
        """Set an action's keys, None: the default; returns as ``keep``."""
        others = {name: each for name, each in self.settings.keys.items() if name != action}
        self.keymap = keymap(others if keys is None else {**others, action: keys})
        return self.keep(replace(self.settings, keys=others if keys is None else {**others, action: keys}))

    def library(self) -> Mapping[str, str]:
        self._look_again()
        return self.settings.system_prompts

    def profiles(self) -> Mapping[str, Profile]:
        self._look_again()
        return self.settings.profiles

    def look_again(self) -> str:
        """Reload system prompts, profiles and MCP servers from the file; return new warnings, or ""."""
        return self._new(self._look_again())

    def _look_again(self) -> tuple[str, ...]:
        try:
            found = read(self._path)
        except (OSError, *DAMAGED):  # told when the next change is written
            return ()
        now = found.settings
        new = merged(now, self._written, self.settings)
        self.settings = replace(self.settings, system_prompts=new.system_prompts, profiles=new.profiles, mcp=new.mcp)
        self._written = replace(self._written, system_prompts=now.system_prompts, profiles=now.profiles, mcp=now.mcp)
        if self.toolbox is not None:
            self.toolbox.update(new.mcp)
        return found.warnings

    def _new(self, warnings: Iterable[str]) -> str:
        new = [each for each in warnings if each not in self._told]
        self._told.update(new)
        return " ".join(new)

    def keep(self, settings: Settings) -> str:
        """Apply and write ``settings``; return a write problem, new warnings, or ""."""
        self.settings = settings
        try:
            said = change(self._path, self._written, settings)
        except OSError as error:
            return f"The settings could not be written to {self._path}: {error.strerror}."
        self._written = settings
        return self._new(said)


DEFAULT = "default"  # thinking as the chat template has it, without a budget
USAGE = f"Use {', '.join(THINKING)}, {DEFAULT}, or a number of tokens."


def chosen(text: str, now: TemplateOptions, info: ModelSpec | None) -> TemplateOptions:
    """Apply the argument of /thinking to ``now``. info: None: not known yet.

    Raises:
        OptionError: invalid, or unsupported by the model.
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
    if info is not None and (why := next(_unsupported(asked, info), None)) is not None:
        raise OptionError(why, _known(info))
    return other


def supported(wanted: TemplateOptions, info: ModelSpec | None) -> tuple[TemplateOptions, tuple[str, ...]]:
    """Return what the loaded model supports, and a sentence per unsupported part."""
    if info is None:
        return wanted, ()
    thinking = wanted.thinking if wanted.thinking in info.thinking_modes else None
    budget = wanted.thinking_budget if info.thinks else None
    values = {name: value for name, value in wanted.values.items() if name in info.template_names}
    return TemplateOptions(thinking, budget, values), tuple(_unsupported(wanted, info))


def _unsupported(wanted: TemplateOptions, info: ModelSpec) -> Iterator[str]:
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


def _known(info: ModelSpec) -> str:
    return "Choose one of these." if info.thinking_modes else "Another model may support it."


def state(options: TemplateOptions) -> str:
    """Return a status: ``thinking off``, ``thinking ≤ 2k``; "" for the default."""
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


def sentences(options: TemplateOptions, info: ModelSpec | None) -> str:
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
    return f"ended at its budget of {units.count(tokens)} tokens"
