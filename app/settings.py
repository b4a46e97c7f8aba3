"""Settings in one TOML file that users can edit (``tokamac help settings`` shows it), profiles among them."""

import fcntl
import os
import time
import tomllib
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

from tokamac.engine.errors import OptionError
from tokamac.engine.files import atomic_write, expanded, read_text
from tokamac.engine.hub.names import nearest
from tokamac.engine.options import (
    FULL_PACE,
    PARALLEL,
    KVSpec,
    Sampling,
    TemplateOptions,
    WiredMode,
    given_pace,
    given_wired,
)
from tokamac.engine.perf import hardware

from .text.strict_json import ShapeError, build

# A profile is a table of the settings file. Its keys are ``model``, ``system``, ``tools`` and the option
# names of /settings:
#
#     [profiles.coding]
#     model = "org/name"
#     temperature = 0.2
#
# Options that a profile doesn't name follow the settings, including later changes.


T = TypeVar("T")

# How a chat keeps keys and values unless it is told otherwise: what rolls out of sight is never the system prompt.
CHAT_KV = KVSpec(keep="system")
DEFAULT = "default"  # in a profile: the default of a setting, whatever [sampling], [template] or [kv] say
# Options of the engine that no profile has: tools are named apart, a chat shows no log-probabilities and forces no
# call.
SHOWN_NOWHERE = ("tools", "must_call", "logprobs")


def defaults_of(kind: type[T]) -> T:
    return cast(T, CHAT_KV) if kind is KVSpec else kind()


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile; None and options that it doesn't name follow the settings.

    options: fields of Sampling, TemplateOptions and KVSpec by name, or ``DEFAULT``.
    """

    model: str | None = None
    system: str | None = None
    tools: tuple[str, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def table(self) -> dict[str, Any]:
        named = {"model": self.model, "system": self.system, "tools": self.tools}
        return {**{key: value for key, value in named.items() if value is not None}, **self.options}

    def names(self, kind: Hashable) -> bool:
        return any(each in self.options for each in option_hints(kind))

    def over(self, base: T) -> T:
        """Return ``base`` updated with the profile's options. Raises OptionError where they are not valid."""
        kind: Any = type(base)
        default = defaults_of(kind)
        named = {
            name: getattr(default, name) if self.options[name] == DEFAULT else self.options[name]
            for name in option_hints(kind)
            if name in self.options
        }
        return replace(base, **named) if named else base  # type: ignore[type-var]  # a dataclass, as all OPTIONS are


def differing(kept: object, everywhere: object) -> dict[str, Any]:
    kind: Any = type(kept)
    default, named = defaults_of(kind), {}
    for name in option_hints(kind):
        value, usual = getattr(kept, name), getattr(default, name)
        if value != usual:
            named[name] = value
        elif getattr(everywhere, name) != usual:
            named[name] = DEFAULT
    return named


LONGEST_NAME = 40
NO_PROFILE = "none"
VERBS = ("save", "delete", NO_PROFILE)  # what follows /profile in place of a name


def why_no_name(name: str) -> str:
    if not name or not name.isprintable() or len(name) > LONGEST_NAME:
        return f"A profile's name has 1 to {LONGEST_NAME} letters."
    first = name.partition(" ")[0].lower()
    return f"A profile can't be called {name}: /profile {first} means something else." if first in VERBS else ""


@cache
def option_hints(kind: Hashable) -> Mapping[str, Any]:
    return {name: hint for name, hint in get_type_hints(cast(type, kind)).items() if name not in SHOWN_NOWHERE}


PROFILE_KINDS = (Sampling, TemplateOptions, KVSpec)
PROFILE_VALUES = {"model": str, "system": str, "tools": tuple[str, ...]}
# All that a profile can name.
PROFILE_KEYS = (*PROFILE_VALUES, *(each.name for kind in PROFILE_KINDS for each in fields(kind)))


def read_profiles(given: dict[str, Any], text: str, file: str, warnings: list[str]) -> dict[str, Profile]:
    read = {}
    for name, table in given.items():

        def wrong(key: str, why: str, name: str = name) -> None:
            line = _line_of(text, ("profiles", name, key) if key else ("profiles", name))
            at = file if line is None else f"{file} line {line}"
            warnings.append(f"{at}: [profiles.{name:.40}] {why.rstrip('.')}; it is kept and not used.")

        if isinstance(table, dict):
            read[name] = profile_of(table, wrong)
        else:
            wrong("", f"is {table!r:.40}, which is no table")
    return read


def profile_of(given: dict[str, Any], wrong: Callable[[str, str], object]) -> Profile:
    """Build a profile from a table; ``wrong`` hears each key that can't be used, and why."""
    kinds = {key: kind for kind in PROFILE_KINDS for key in option_hints(kind)}
    values: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for key, item in given.items():
        try:
            if key in PROFILE_VALUES:
                values[key] = build(PROFILE_VALUES[key], item, key)
            elif (kind := kinds.get(key)) is None:
                meant = nearest(key, [*PROFILE_VALUES, *kinds])
                wrong(key, f"has no setting {key!r:.40}" + (f" (did you mean {meant}?)" if meant else ""))
            else:
                options[key] = DEFAULT if item == DEFAULT else build(option_hints(kind)[key], item, key)
        except ShapeError as error:
            wrong(key, str(error))
    for kind in PROFILE_KINDS:
        named = {key: value for key, value in options.items() if key in option_hints(kind) and value != DEFAULT}
        valid = _taken(defaults_of(kind), named, wrong)
        options = {key: valid.get(key, value) for key, value in options.items() if key in valid or key not in named}
    return Profile(**values, options=options)


def _taken(value: Any, named: dict[str, Any], wrong: Callable[[str, str], object]) -> dict[str, Any]:
    try:
        held = replace(value, **named)
        return {key: getattr(held, key) for key in named}
    except OptionError:
        held, taken = value, []
    for key, item in named.items():
        try:
            held = replace(held, **{key: item})
            taken.append(key)
        except OptionError as error:
            wrong(key, f"{key} = {item!r:.40}: {error.one_line()}")
    return {key: getattr(held, key) for key in taken}


def _line_of(text: str, path: tuple[str, ...]) -> int | None:
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        begun = line.strip()
        if begun.startswith("["):
            table = _path_of(begun)
            here = table
        else:
            here = (*table, *_path_of(f"{begun.partition('=')[0]} = 0"))
        if here == path:
            return number
    return None


def _path_of(toml: str) -> tuple[str, ...]:
    names: list[str] = []
    with suppress(tomllib.TOMLDecodeError):
        at: Any = tomllib.loads(toml)
        while isinstance(at, dict) and len(at) == 1:
            (name,) = at
            names.append(name)
            at = at[name]
    return tuple(names)


# Nothing is dropped silently: unknown keys are reported and kept, invalid values reported and replaced by
# defaults, and a file that isn't TOML is moved aside. Only changed values are written, into the file as it is
# now, so comments, order and others' edits survive. A separate file is locked: the settings file is replaced.


FILE = "settings.toml"
HEADER = "# Settings of tokamac (tokamac help settings). The app changes single values; comments and order stay.\n"
LARGEST_BYTES = 4 << 20  # of the file: with a library of system prompts it has some kilobytes
MOST_ASIDE = 100  # damaged files that are kept beside it; after that the damaged one stays where it is
PATIENCE_S = 2.0  # how long another window may keep the lock; each change takes milliseconds
DAMAGED = (tomllib.TOMLDecodeError, UnicodeDecodeError)

MOST_MEMORY_GB = 1e6
MOST_PARALLEL = 256
MOST_CALLS = 1000
# Who gives a chat its title: the model, when it has nothing else to do, or the first words of the chat.
TITLES = ("model", "words")
# Settings that are one value, not a table.
VALUES = (
    "model", "profile", "theme", "system", "panel", "all_figures", "unload_after_min", "memory_gb", "parallel",
    "speculation", "tint_guesses", "cpu_exact", "wired", "pace", "pace_on_battery", "models_folder", "embedding_model",
    "keep_awake", "titles", "toured",
)  # fmt: skip
OPTIONS = ("sampling", "template", "kv", "tools")  # tables that are a dataclass
MAPS = ("system_prompts", "adapters", "drafts", "keys", "mcp", "profiles")  # tables whose keys are the user's


@dataclass(frozen=True, slots=True)
class ToolSettings:
    """Tool settings of every chat. Raises OptionError.

    allowed: never ask. folders: readable besides the chat's start folder. calls: limit per prompt.
    """

    allowed: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    calls: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.calls <= MOST_CALLS:
            raise OptionError(f"calls is {self.calls}, which is not a limit.", f"Use 1 to {MOST_CALLS}.")
        for folder in self.folders:
            expanded(folder, strict=True)


@dataclass(frozen=True, slots=True)
class McpServer:
    """An MCP server: a command that speaks on stdio, or a URL. seconds: timeout of a call, and of the start."""

    command: str = ""
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    seconds: float = 30.0
    url: str = ""
    headers: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise OptionError("an MCP server has a command or a url, and one of them.", "See tokamac help tools.")
        if self.url and not self.url.lower().startswith(("http://", "https://")):
            raise OptionError(f"{self.url:.80} is no web address.", "See tokamac help tools.")


@dataclass(frozen=True, slots=True)
class Settings:
    """The user's settings. Raises OptionError for values out of range and unknown home folders.

    unload_after_min: idle minutes until the model is unloaded; 0: never, None: the chat decides
    (app/chat/session.py). memory_gb: limit of MLX's arrays in 10^9 bytes; None: the system's. parallel: replies
    in parallel. tint_guesses: tint draft tokens. cpu_exact: no rounding of what packed weights are multiplied
    with. titles: one of ``TITLES``. adapters, drafts: by model. keys: by action id, as written.
    """

    model: str = "guide"
    profile: str = ""
    theme: str = ""
    system: str = ""
    panel: bool = True
    all_figures: bool = False
    unload_after_min: int | None = None
    memory_gb: float | None = None
    parallel: int = PARALLEL
    speculation: bool = True
    tint_guesses: bool = False
    cpu_exact: bool = False
    wired: WiredMode = "auto"
    pace: int = FULL_PACE
    pace_on_battery: int | None = None
    models_folder: str = ""
    embedding_model: str = ""
    keep_awake: bool = True
    titles: str = "model"
    toured: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    template: TemplateOptions = field(default_factory=TemplateOptions)
    kv: KVSpec = CHAT_KV
    system_prompts: dict[str, str] = field(default_factory=dict)
    adapters: dict[str, str] = field(default_factory=dict)
    drafts: dict[str, str] = field(default_factory=dict)
    keys: dict[str, tuple[str, ...]] = field(default_factory=dict)
    tools: ToolSettings = field(default_factory=ToolSettings)
    mcp: dict[str, McpServer] = field(default_factory=dict)
    profiles: dict[str, Profile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.unload_after_min is not None and self.unload_after_min < 0:
            raise OptionError(
                f"unload_after_min is {self.unload_after_min}, which is not a number of minutes.", "Use 0 for never."
            )
        if self.memory_gb is not None and not 0 < self.memory_gb < MOST_MEMORY_GB:
            raise OptionError(f"memory_gb is {self.memory_gb:g}, which is not a memory size.", "Give GB, such as 14.")
        if not 1 <= self.parallel <= MOST_PARALLEL:
            raise OptionError(
                f"parallel is {self.parallel}, which is not a number of replies at once.", f"Use 1 to {MOST_PARALLEL}."
            )
        given_wired(self.wired)
        given_pace(self.pace)
        if self.pace_on_battery is not None:
            given_pace(self.pace_on_battery)
        if self.titles not in TITLES:
            raise OptionError(f"titles is {self.titles!r:.40}, which gives no titles.", f"Use one of {TITLES}.")
        expanded(self.models_folder, strict=True)

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory_gb is None else round(self.memory_gb * 1e9)

    def beside(self, model: str) -> tuple[str | None, str | None]:
        return self.adapters.get(model), self.drafts.get(model)

    @property
    def models_path(self) -> Path:
        return expanded(self.models_folder).absolute() if self.models_folder else default_models_folder()


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings, and warnings about the file. moved: the file was moved aside, so nobody else can report it."""

    settings: Settings
    warnings: tuple[str, ...] = ()
    moved: bool = False


def gigabytes_of(nbytes: int | None) -> float | None:
    return None if nbytes is None else nbytes / 1e9


def with_one(known: dict[str, str], model: str, name: str | None) -> dict[str, str]:
    others = {each: its for each, its in known.items() if each != model}
    return others if name is None else {**others, model: name}


def with_allowed(settings: Settings, allowed: tuple[str, ...]) -> Settings:
    return replace(settings, tools=replace(settings.tools, allowed=allowed))


# Reading ----------------------------------------------------------------------------------------------------------------------


def default_path() -> Path:
    from platformdirs import user_config_path

    return user_config_path("tokamac") / FILE


def default_models_folder() -> Path:
    """Return the folder of converted models, visible in the home folder or below TOKAMAC_DATA_DIR."""
    # Gigabytes in a hidden data folder would fill the disk unseen; the Finder doesn't show those on a Mac.
    given = os.environ.get("TOKAMAC_DATA_DIR")
    return expanded(given).absolute() / "models" if given else Path.home() / "Models" / "tokamac"


def load(path: Path) -> LoadedSettings:
    try:
        return read(path)
    except DAMAGED as error:
        told = _set_aside(path, error)
        return LoadedSettings(Settings(), (told,), moved=not path.exists())
    except OSError as error:
        return LoadedSettings(Settings(), (f"{path} can't be read ({error.strerror}); default settings are used.",))


def read(path: Path) -> LoadedSettings:
    """Read the settings; defaults if missing. Raises OSError, and ``DAMAGED`` for invalid TOML."""
    return loads(_text(path), path.name)


def loads(text: str, name: str = FILE) -> LoadedSettings:
    """Parse TOML settings; ``name`` is the file's, for warnings. Raises TOMLDecodeError."""
    warnings: list[str] = []
    read: dict[str, Any] = {}
    for key, value in tomllib.loads(text).items():
        if key in (*OPTIONS, *MAPS) and not isinstance(value, dict):
            warnings.append(f"{name}: {key} is {value!r:.40}, which is not a table; the default is used.")
        elif key in OPTIONS:
            read[key] = _options(getattr(Settings(), key), key, value, name, warnings)
        elif key == "profiles":
            read[key] = read_profiles(value, text, name, warnings)
        elif key in MAPS:
            read[key] = _map(key, value, warnings)
        elif key in VALUES:
            try:
                read[key] = _value(key, value)
            except (ShapeError, OptionError) as error:
                warnings.append(f"{name}: {error}")
        else:
            warnings.append(f"{name}: unknown key {key!r}; it is kept but not used.")
    chosen = read.get("profile")
    if chosen and chosen not in read.get("profiles", {}):
        warnings.append(f"{name}: profile is {chosen!r:.40}, and there is no [profiles.{chosen:.40}]; none is used.")
    return LoadedSettings(Settings(**read), tuple(warnings))


def _text(path: Path) -> str:
    try:
        return read_text(path, LARGEST_BYTES)
    except FileNotFoundError:
        return ""


# What a value is that should be one of these, in words.
NOT_A: Mapping[object, str] = {
    bool: "neither true nor false",
    int: "no whole number",
    float: "no number",
    str: "no text",
}


def _value(name: str, value: object) -> Any:
    """Return a setting's value. Raises ShapeError or, out of range, OptionError."""
    kind = get_type_hints(Settings)[name]
    try:
        built = build(kind, value, name)
    except ShapeError:
        raise ShapeError(f"{name} is {value!r}, which is {NOT_A.get(kind, 'not of its kind')}.") from None
    Settings(**{name: built})
    return built


def _options(value: T, table: str, given: dict[str, Any], file: str, warnings: list[str]) -> T:
    hints = get_type_hints(type(value))
    usable = {}
    for key, item in given.items():
        if key not in hints:
            warnings.append(f"{file}: [{table}] has an unknown key {key!r}; it is kept but not used.")
            continue
        try:
            usable[key] = build(hints[key], item, key)
        except ShapeError as error:
            warnings.append(f"[{table}] {error}; the default is used.")
    # A window and its sinks are only valid together: all at once first, then what can be taken alone.
    try:
        return replace(value, **usable)  # type: ignore[type-var]  # a dataclass, as all OPTIONS are
    except OptionError:
        for key, item in usable.items():
            try:
                value = replace(value, **{key: item})  # type: ignore[type-var]
            except OptionError as error:
                warnings.append(f"[{table}] {key} = {item!r}: {error}; the default is used.")
    return value


def _map(table: str, given: dict[str, Any], warnings: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in given.items():
        try:
            values[key] = READERS.get(table, _string)(value)
        except ShapeError as error:
            warnings.append(f"[{table}] {key} is {value!r:.40}, which is {error}; it is kept but not used.")
    return values


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise ShapeError("no text")
    return value


def _keys(value: object) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(key, str) and key for key in listed):
        raise ShapeError("no key and no list of keys")
    return tuple(listed)


def _server(value: object) -> McpServer:
    if not isinstance(value, dict):
        raise ShapeError("no table")
    given = dict(value)
    for name in ("env", "headers"):
        table = value.get(name, {})
        if not isinstance(table, dict) or not all(isinstance(each, str) for each in table.values()):
            raise ShapeError(f"no server: {name} holds texts alone")
        given[name] = [list(pair) for pair in table.items()]
    try:
        built: McpServer = build(McpServer, given, "it")
    except (ShapeError, OptionError) as error:
        raise ShapeError(f"no server ({error})") from None
    return built


# How an entry of a table is read; of the others, each is a text.
READERS: dict[str, Callable[[object], Any]] = {"keys": _keys, "mcp": _server}


def _set_aside(path: Path, error: Exception) -> str:
    names = (path.with_suffix(f".damaged{number}.toml") for number in ("", *range(2, MOST_ASIDE)))
    aside = next((name for name in names if not (name.exists() or name.is_symlink())), None)
    if aside is None:
        return f"{path} is damaged ({error}) and too many are set aside beside it already; default settings are used."
    try:
        path.replace(aside)
    except OSError as problem:
        return f"{path} is damaged ({error}) and can't be moved aside ({problem.strerror}); default settings are used."
    return f"{path} was damaged ({error}); it is now {aside.name}, and a new one takes its place."


# To another machine, and from one ---------------------------------------------------------------------------------------------


def shareable(path: Path) -> str:
    """Return the settings as shareable text: without MCP servers, which may hold keys, and tool permissions.

    Raises OSError, and ``DAMAGED`` for invalid TOML.
    """
    return _shareable(_text(path))


def _shareable(text: str) -> str:
    return dumps(replace(loads(text).settings, mcp={}, tools=ToolSettings()))


def adopt(path: Path, text: str) -> tuple[list[str], list[str]]:
    """Copy settings missing here from another file; return the copied names and those that differ.

    Raises OSError where nothing could be written, and TOMLDecodeError for invalid TOML.
    """
    import tomlkit

    held = load(path)  # moves a damaged one aside
    here, there = tomllib.loads(_text(path)), tomllib.loads(_shareable(text))
    taken: list[str] = []
    kept: list[str] = []
    for key, value in there.items():
        inside = key in (*OPTIONS, *MAPS)
        table, values = (here.setdefault(key, {}), value) if inside else (here, {key: value})
        for name, its in values.items():
            said = f"{key}.{name}" if inside else name
            if name not in table:
                table[name] = its
                taken.append(said)
            elif table[name] != its:
                kept.append(said)
    if taken:
        change(path, held.settings, loads(tomlkit.dumps(here)).settings)
    return taken, kept


# Writing ----------------------------------------------------------------------------------------------------------------------


def save(path: Path, settings: Settings) -> None:
    """Write the settings atomically. Raises OSError, and ``DAMAGED`` for a file that isn't TOML."""
    from tomlkit.exceptions import TOMLKitError

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        text = dumps(settings, _text(path))
    except TOMLKitError as error:  # what tomllib reads and tomlkit doesn't
        raise OSError(None, f"{path.name} can't be edited: {error}") from error
    with atomic_write(path, f".{path.name}.") as file:
        file.write(text.encode())


def dumps(settings: Settings, text: str = "") -> str:
    """Return the settings file ``text``, edited to hold ``settings``. Raises TOMLDecodeError."""
    # Values back at their default are removed, so that a later default reaches everyone.
    import tomlkit

    was, usual = loads(text).settings, Settings()
    document = tomlkit.parse(text or HEADER)
    for name in VALUES:
        if (value := getattr(settings, name)) != getattr(was, name):
            _set(document, name, value, getattr(usual, name))
    for name in (*OPTIONS, *MAPS):
        before, after, default = (_entries(getattr(each, name)) for each in (was, settings, usual))
        if before == after:
            continue
        table = _table_in(document, name, above=name == "profiles")
        for key in before | after:
            if name == "profiles":
                _set_profile(table, key, before.get(key), after.get(key))
            # Options that can't hold together were not all taken: of these the file may say what was never chosen.
            elif name in OPTIONS or before.get(key) != after.get(key):
                _set(table, key, after.get(key), default.get(key))
        if not table and not table.as_string().strip():
            document.remove(name)
    return tomlkit.dumps(document)


def _table_in(parent: Any, name: str, *, above: bool = False) -> Any:
    import tomlkit
    from tomlkit.items import InlineTable, Table

    table: Any = parent.get(name)
    if not isinstance(table, Table | InlineTable):  # missing, no table, or one in parts, which tomlkit can't edit
        parent.pop(name, None)
        made = tomlkit.item(table) if isinstance(table, dict) else tomlkit.table(is_super_table=above)
        parent.append(name, made)
    return parent[name]


def _set_profile(profiles: Any, name: str, before: Profile | None, after: Profile | None) -> None:
    if after is None:
        profiles.pop(name, None)
    elif before != after:
        table, keys = _table_in(profiles, name), after.table
        for key in PROFILE_KEYS:  # others are of another version, or a mistake: they stay
            if key in keys or key in table:
                _set(table, key, keys.get(key), None)


def _entries(table: Any) -> dict[str, Any]:
    return table if isinstance(table, dict) else asdict(table)


def _set(table: Any, key: str, value: Any, default: Any) -> None:
    import tomlkit
    from tomlkit.container import Container

    encoded = _encoded(value)
    if value is not None and key in table and table[key] == encoded:
        return
    lines: Any = table if isinstance(table, Container) else table.value
    comment = lines.item(key).trivia.comment if key in table else ""
    if value is None or (value == default and not comment):
        at = [each for each, _ in lines.body].index(key) if comment else 0
        table.pop(key, None)
        if comment:
            lines.body[at] = (None, tomlkit.comment(comment.lstrip("# ")))
    elif isinstance(encoded, str) and "\n" in encoded and not encoded.startswith("\n") and "\r" not in encoded:
        # As a person would write it: the newline after the quotes is not part of the text.
        table[key] = tomlkit.value('"""\n' + tomlkit.string(encoded, multiline=True).as_string()[3:])
    else:
        table[key] = encoded


def _encoded(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_encoded(each) for each in value]
    return value


def change(path: Path, held: Settings, wanted: Settings) -> tuple[str, ...]:
    """Write the difference of ``held`` and ``wanted`` into the file; return notices.

    A damaged file is moved aside and ``wanted`` written whole. Raises OSError where nothing could be written, or
    the damaged file can't be moved.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_name(f".{path.name}.lock")):
        try:
            now = read(path)
        except DAMAGED as error:
            told = _set_aside(path, error)
            if path.exists():
                raise OSError(None, told) from error
            save(path, wanted)
            return (told,)
        save(path, merged(now.settings, held, wanted))
        return now.warnings


def merged(now: Settings, held: Settings, wanted: Settings) -> Settings:
    changes: dict[str, Any] = {}
    for one in fields(Settings):
        was, becomes, current = (getattr(each, one.name) for each in (held, wanted, now))
        if was == becomes:
            continue
        if one.name in MAPS:
            becomes = _merged_map(current, was, becomes)
        elif one.name in OPTIONS:
            becomes = _merged_options(current, was, becomes)
        changes[one.name] = becomes
    return replace(now, **changes)


def _merged_map(now: Mapping[str, Any], held: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    changed = {name: value for name, value in wanted.items() if name not in held or held[name] != value}
    return {**{name: value for name, value in now.items() if name in wanted or name not in held}, **changed}


def _merged_options(now: T, held: T, wanted: T) -> T:
    names = [field.name for field in fields(wanted)]  # type: ignore[arg-type]  # a dataclass, as all OPTIONS are
    changed = {name: getattr(wanted, name) for name in names if getattr(wanted, name) != getattr(held, name)}
    try:
        return replace(now, **changed)  # type: ignore[type-var]
    except OptionError:  # together with what another window chose it is not valid: what was chosen last holds whole
        return wanted


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """Hold the settings lock. Raises OSError after a timeout."""
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError(None, "another tokamac keeps it busy") from None
                time.sleep(0.01)
        yield
    finally:
        os.close(handle)


# What is told once --------------------------------------------------------------------------------------------------------------

TOLD_FILE = "told.json"


def is_new(text: str) -> bool:
    file = hardware.store_file(TOLD_FILE)
    if hardware.read(file, text) is not None:
        return False
    hardware.keep(file, {text: 1.0})
    return True
