"""The settings in the chat: changed in one place, written at once.

A chat may have settings of its own, saved with it: sampling, system prompt, thinking. The settings form is data here: fields of
Sampling, TemplateOptions and KVSpec, how each is read from text, and its note. A system prompt that was written but not applied
stays with its chat as long as the app runs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tokamac.engine.errors import OptionError, TokamacError
from tokamac.engine.events import ToolCall
from tokamac.engine.options import STAGES, THINKING, KVSpec, Sampling, TemplateOptions

from .. import units
from ..backend.protocol import ModelInfo, ShapeError, build
from ..settings import DAMAGED, Settings, change, merged, read
from ..store.values import Json, ToolResult
from .actions import keymap

if TYPE_CHECKING:
    from ..tools.toolbox import Toolbox
    from .session import Session


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ChatOverrides:
    """A chat's own settings. None: as in every chat. An empty system prompt means none, whatever other chats have.

    tools: those that are on, and MCP servers, by name; in every chat there are none.
    """

    sampling: Sampling | None = None
    system: str | None = None
    template: TemplateOptions | None = None
    tools: tuple[str, ...] | None = None


def own_of(settings: Json) -> ChatOverrides:
    """Return a stored chat's own settings. What another version wrote and this one can't read is ignored."""
    system = settings.get("system")
    return ChatOverrides(
        _read(Sampling, settings.get("sampling"), "sampling"),
        system if isinstance(system, str) else None,
        _read(TemplateOptions, settings.get("template"), "template"),
        _read(tuple[str, ...], settings.get("tools"), "tools"),
    )


def as_settings(own: ChatOverrides) -> dict[str, Any]:
    """Return the chat's settings as they are stored; None removes a key."""
    return {
        "sampling": None if own.sampling is None else _changed(own.sampling),
        "system": own.system,
        "template": None if own.template is None else template_record(own.template),
        "tools": None if not own.tools else list(own.tools),
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
    there, or why they are not. Changes by another window apply there only, except its system prompts, which join the library.
    """

    def __init__(
        self, settings: Settings, path: Path, given: ChatOverrides | None = None, told: Iterable[str] = ()
    ) -> None:
        self.settings = settings
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
        session.tools.allowed = set(self.settings.tools.allowed)
        self.give(session)

    def give(self, session: "Session") -> None:
        """Apply the open chat's settings to ``session``, after a change."""
        session.sampling, session.system = self.sampling, self.system
        session.template = self.template
        session.tools.allowed |= set(self.settings.tools.allowed)
        session.tools.most = self.settings.tools.calls
        if self.toolbox is not None:
            on = self.tools
            self.toolbox.start_later(on, lambda _, said: self.tools_came(said))
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
        """Run a call on a thread, and tell ``then`` from there what came of it."""
        if self.toolbox is not None:
            self.toolbox.run_later(call, self.tools, then)

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

    def choose_keys(self, action: str, keys: tuple[str, ...] | None) -> str:
        """Set the keys of an action, None: its usual ones; return as ``keep`` does. ``keymap`` has them from here on."""
        others = {name: each for name, each in self.settings.keys.items() if name != action}
        self.keymap = keymap(others if keys is None else {**others, action: keys})
        return self.keep(replace(self.settings, keys=others if keys is None else {**others, action: keys}))

    def library(self) -> Mapping[str, str]:
        """Return the system prompts by name, with the changes of other windows."""
        try:
            now = read(self._path).settings
        except (OSError, *DAMAGED):  # told when the next change is written
            return self.settings.system_prompts
        prompts = merged(now, self._written, self.settings).system_prompts
        self.settings = replace(self.settings, system_prompts=prompts)
        self._written = replace(self._written, system_prompts=now.system_prompts)
        return prompts

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


MOST_DIGITS = 9
"""No number here has more, and Python refuses to parse thousands of digits."""


def whole_number(text: str) -> int | None:
    """Return ``text`` as a number; None where it is not digits alone, or more than ``MOST_DIGITS`` of them."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS else None


AUTO = "auto"
"""The text of a number that the app chooses."""


@dataclass(frozen=True, slots=True)
class Field:
    """One line of the form. ``read`` raises ValueError; an empty text means ``empty`` where that is allowed.

    show: writes a value as text; None: as ``write`` does.
    """

    name: str
    label: str
    note: str
    read: Callable[[str], object]
    empty: object = ValueError
    show: Callable[[Any], str] | None = None


def _keep(text: str) -> object:
    return "system" if text.strip().lower() == "system" else int(text)


def _stop(text: str) -> object:
    return tuple(part.replace("\\n", "\n") for part in text.split(" | ") if part)


def _ids(text: str) -> object:
    return tuple(int(part) for part in text.split(","))


def _show_ids(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids))


def _biases(text: str) -> object:
    pairs = [part.partition("=") for part in text.split(",")]
    return tuple((int(token), float(bias)) for token, _, bias in pairs)


def _show_biases(pairs: tuple[tuple[int, float], ...]) -> str:
    return ", ".join(f"{token}={bias:g}" for token, bias in pairs)


def _order(text: str) -> object:
    return tuple(part.strip() for part in text.split(","))


def _show_order(order: tuple[str, ...]) -> str:
    return "" if order == STAGES else ",".join(order)


def _word(text: str) -> object:
    return text.strip().lower()


def _parts(text: str) -> object:
    return tuple(part.strip() for part in text.split(" | ") if part.strip())


USUAL_FIELDS = (
    Field("temperature", "Temperature", "0 is greedy; empty: model default", float, None),
    Field("top_p", "Top-p", "1 is off; empty: model default", float, None),
    Field("top_k", "Top-k", "0 is off; empty: model default", int, None),
    Field("min_p", "Min-p", "0 is off; empty: model default", float, None),
    Field("repetition_penalty", "Repetition penalty", "1 is off; empty: model default", float, None),
    Field("seed", "Seed", "empty: random", int, None),
    Field("max_tokens", "Max tokens", "empty: up to the context", int, None),
    Field("stop", "Stop texts", "split by ' | '; \\n: new line", _stop, ()),
)
RARE_FIELDS = (
    Field("stop_token_ids", "Stop tokens", "ids, split by commas", _ids, (), _show_ids),
    Field("min_tokens", "Min tokens", "least reply length; 0 is off", int, 0),
    Field("presence_penalty", "Presence penalty", "-2 to 2; 0 is off", float, 0.0),
    Field("frequency_penalty", "Frequency penalty", "-2 to 2; 0 is off", float, 0.0),
    Field("logit_bias", "Logit bias", "ID=BIAS, split by commas", _biases, (), _show_biases),
    Field("xtc_probability", "XTC probability", "0 is off", float, 0.0),
    Field("xtc_threshold", "XTC threshold", "0 to 0.5", float, 0.1),
    Field("dry_multiplier", "DRY multiplier", "0 is off; 0.8 is usual", float, 0.0),
    Field("dry_base", "DRY base", "1 or more", float, 1.75),
    Field("dry_allowed_length", "DRY allowed length", "repeated tokens", int, 2),
    Field("dry_sequence_breakers", "DRY breakers", "split by ' | '; \\n: new line", _stop, ()),
    Field("order", "Order of stages", "split by commas; empty: default", _order, STAGES, _show_order),
)
SAMPLING_FIELDS = (*USUAL_FIELDS, *RARE_FIELDS)
"""The fields of Sampling in the chat. It shows no log-probabilities, so it has no field for them."""
TEMPLATE_FIELDS = (
    Field("thinking", "Thinking", "on, off, low, medium, high; or empty", _word, None),
    Field("thinking_budget", "Thinking budget", "tokens; empty: no limit", int, None),
    Field("keywords", "Template options", "KEY=VALUE, split by ' | '", _parts, ()),
)
KV_FIELDS = (
    Field("key_bits", "Key bits", "16, 8, 6, 5, 4, 3 or 2", int),
    Field("value_bits", "Value bits", "16, 8, 6, 5, 4, 3 or 2", int),
    Field("group_size", "Group size", "32, 64 or 128", int),
    Field("window", "Window", "tokens kept; empty keeps all", int, None),
    Field("keep", "Keep", "pinned first tokens, or: system", _keep),
    Field("on_full", "When full", "roll, stop, truncate-middle, error", str.strip, None),
)


def _minutes(text: str) -> int | None:
    if text.strip().lower() == AUTO:
        return None
    if (minutes := whole_number(text.strip())) is None:
        raise ValueError
    return minutes


MEMORY_FIELDS = (
    Field("memory_gb", "Memory limit", "GB; empty: system limit", float, None),
    Field("unload_after_min", "Unload after", "minutes; 0 never, auto 30 if large", _minutes),
)


class FieldError(TokamacError):
    """A field's text can't be read; ``name`` says which."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


def write(field: Field, options: object) -> str:
    """Return ``field`` of ``options`` as text."""
    value = getattr(options, field.name)
    if field.show is not None:
        return field.show(value)
    if value is None and field.empty is ValueError:
        return AUTO
    if isinstance(value, tuple):
        return " | ".join(part.replace("\n", "\\n") for part in value)
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def read_sampling(texts: Mapping[str, str]) -> Sampling:
    """Return what the form says; raise FieldError, or OptionError where a value is out of range."""
    return Sampling(**_read_option(SAMPLING_FIELDS, texts))


def read_template(texts: Mapping[str, str]) -> TemplateOptions:
    """Return what the form says; raise FieldError, or OptionError where a value is out of range."""
    return TemplateOptions(**_read_option(TEMPLATE_FIELDS, texts))


def read_kv(texts: Mapping[str, str]) -> KVSpec:
    """Return what the form says; raise FieldError, or OptionError where a value is out of range."""
    return KVSpec(**_read_option(KV_FIELDS, texts))


def read_memory(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return what the form says of ``Settings.memory_gb`` and ``unload_after_min``; raise FieldError, or OptionError."""
    values = _read_option(MEMORY_FIELDS, texts)
    Settings(**values)
    return values


def _read_option(fields: tuple[Field, ...], texts: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in fields:
        text = texts[field.name]
        if not text.strip() and field.empty is not ValueError:
            values[field.name] = field.empty
            continue
        try:
            values[field.name] = field.read(text)
        except ValueError as error:
            raise FieldError(
                field.name, f"{field.label}: {text.strip() or 'nothing'!r:.60} is not valid ({field.note})."
            ) from error
    return values


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
