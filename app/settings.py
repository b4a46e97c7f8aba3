"""What the app remembers between runs: one TOML file that a person can read and edit (``tokamac help settings`` shows it).

Nothing in the file is dropped in silence. An unknown key is named and stays, a value that can't be used is named and its default
taken, and a file that is not TOML is moved aside, not overwritten. A change touches only the values that differ, so comments and
order survive. It is applied to the file as it is now, since other windows and the user's editor change it too; the lock is on a
file beside it, because the settings' own file is replaced whole.
"""

import fcntl
import os
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from tokamac.engine.errors import OptionError
from tokamac.engine.files import atomic_write, expanded, read_text
from tokamac.engine.options import PARALLEL, KVSpec, Sampling, TemplateOptions
from tokamac.engine.perf import measurement_store

from .profiles import CHAT_KV, PROFILE_KEYS, Profile, read_profiles
from .strict_json import ShapeError, build

T = TypeVar("T")

FILE = "settings.toml"
HEADER = "# Settings of tokamac (tokamac help settings). The app changes single values; comments and order stay.\n"
LARGEST_BYTES = 4 << 20
"""Of the file: with a library of system prompts it has some kilobytes."""
MOST_ASIDE = 100
"""Damaged files that are kept beside it; after that the damaged one stays where it is."""
PATIENCE_S = 2.0
"""How long another window may keep the lock; each change takes milliseconds."""
DAMAGED = (tomllib.TOMLDecodeError, UnicodeDecodeError)

MOST_MEMORY_GB = 1e6
MOST_PARALLEL = 256
MOST_CALLS = 1000
TITLES = ("model", "words")
"""Who gives a chat its title: the model, when it has nothing else to do, or the first words of the chat."""
VALUES = (
    "model", "profile", "theme", "system", "panel", "all_figures", "unload_after_min", "memory_gb", "parallel",
    "speculation", "tint_guesses", "cpu_exact", "models_folder", "keep_awake", "titles", "toured",
)  # fmt: skip
"""Settings that are one value, not a table."""
OPTIONS = ("sampling", "template", "kv", "tools")
"""Tables that are a dataclass."""
MAPS = ("system_prompts", "adapters", "drafts", "keys", "mcp", "profiles")
"""Tables whose keys are the user's."""


@dataclass(frozen=True, slots=True)
class ToolSettings:
    """What holds for tools in every chat.

    allowed: the tools that need not ask, ever. folders: what may be read beside the folder a chat was started from. calls: for one
    prompt, at most. Raises OptionError for a number of calls that is none, and a folder in a home that nobody has.
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
    """A program that offers tools over its standard input and output. seconds: how long a call, or its start, may take."""

    command: str
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user chose last.

    profile: the one that new chats begin with; "" is none. profiles: by name.
    unload_after_min: minutes without use until the chat gives the model's memory back; 0 is never, None leaves it to the chat
    (app/chat/session.py). memory_gb: what MLX's arrays may take, in GB of 10^9 bytes; None is the system's limit. parallel: replies
    that an engine makes at once, at most. speculation: whether tokens are guessed, and several verified at once. tint_guesses:
    whether text that was guessed is tinted in the chat. cpu_exact: whether a CPU rounds nothing that packed weights are multiplied
    with. keep_awake: whether a Mac may not sleep while a model works.
    models_folder: where the chat puts models that it converts; empty is ``default_models_folder``. titles: who gives a chat its
    title, one of ``TITLES``.
    panel, all_figures: whether the side panel is shown, and with every figure. toured: whether the tour of the first start was
    shown. system_prompts: texts by name. adapters, drafts: adapters and draft models, by model. keys: of actions by id, as they
    were written. tools: what they may do. mcp: programs that offer tools.
    Raises OptionError for values out of range, and for a folder in a home that nobody has.
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
    models_folder: str = ""
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
        if self.titles not in TITLES:
            raise OptionError(f"titles is {self.titles!r:.40}, which gives no titles.", f"Use one of {TITLES}.")
        expanded(self.models_folder, strict=True)

    @property
    def memory_bytes(self) -> int | None:
        """What MLX's arrays may take; None is the system's limit."""
        return None if self.memory_gb is None else round(self.memory_gb * 1e9)

    def beside(self, model: str) -> tuple[str | None, str | None]:
        """Return the adapter and the draft model that ``model`` is loaded with; None is none."""
        return self.adapters.get(model), self.drafts.get(model)

    @property
    def models_path(self) -> Path:
        """Where the chat puts models that it converts: an absolute path, there or not."""
        return expanded(self.models_folder).absolute() if self.models_folder else default_models_folder()


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings, and in plain sentences what of the file could not be used. moved: it is gone, so nobody else will find out."""

    settings: Settings
    warnings: tuple[str, ...] = ()
    moved: bool = False


def gigabytes_of(nbytes: int | None) -> float | None:
    """Return bytes as ``memory_gb`` has them."""
    return None if nbytes is None else nbytes / 1e9


def with_one(known: dict[str, str], model: str, name: str | None) -> dict[str, str]:
    """Return adapters or draft models by model, with this one for ``model``; None is none."""
    others = {each: its for each, its in known.items() if each != model}
    return others if name is None else {**others, model: name}


def with_allowed(settings: Settings, allowed: tuple[str, ...]) -> Settings:
    """Return the settings with these tools that never ask."""
    return replace(settings, tools=replace(settings.tools, allowed=allowed))


# Reading ----------------------------------------------------------------------------------------------------------------------


def default_path() -> Path:
    """Return where the settings are kept."""
    from platformdirs import user_config_path

    return user_config_path("tokamac") / FILE


def default_models_folder() -> Path:
    """Return where converted models go: in plain sight in the home folder, or below TOKAMAC_DATA_DIR where that is set.

    They take gigabytes. A hidden data folder would fill the disk unseen, and on a Mac the Finder does not show it.
    """
    given = os.environ.get("TOKAMAC_DATA_DIR")
    return expanded(given).absolute() / "models" if given else Path.home() / "Models" / "tokamac"


def load(path: Path) -> LoadedSettings:
    """Read the settings; a missing file gives the defaults, and so does one that can't be used."""
    try:
        return read(path)
    except DAMAGED as error:
        told = _set_aside(path, error)
        return LoadedSettings(Settings(), (told,), moved=not path.exists())
    except OSError as error:
        return LoadedSettings(Settings(), (f"{path} can't be read ({error.strerror}); default settings are used.",))


def read(path: Path) -> LoadedSettings:
    """Read the settings; a missing file gives the defaults. Raises OSError, and ``DAMAGED`` for what is no TOML."""
    return loads(_text(path), path.name)


def loads(text: str, name: str = FILE) -> LoadedSettings:
    """Read settings from TOML; ``name`` is the file's, for the warnings. Raises TOMLDecodeError."""
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


NOT_A: Mapping[object, str] = {
    bool: "neither true nor false",
    int: "no whole number",
    float: "no number",
    str: "no text",
}
"""What a value is that should be one of these, in words."""


def _value(name: str, value: object) -> Any:
    """Return the value of a setting. Raises ShapeError, or OptionError for one that is out of range."""
    kind = get_type_hints(Settings)[name]
    try:
        built = build(kind, value, name)
    except ShapeError:
        raise ShapeError(f"{name} is {value!r}, which is {NOT_A.get(kind, 'not of its kind')}.") from None
    Settings(**{name: built})
    return built


def _options(value: T, table: str, given: dict[str, Any], file: str, warnings: list[str]) -> T:
    """Return ``value`` with what is valid of a [sampling], [template] or [kv] table."""
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
    """Return what is valid of a table whose keys are the user's."""
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
    """Return a table of [mcp]; its env is a table of texts."""
    if not isinstance(value, dict):
        raise ShapeError("no table")
    env = value.get("env", {})
    if not isinstance(env, dict) or not all(isinstance(each, str) for each in env.values()):
        raise ShapeError("no server: env holds texts alone")
    given = {**value, "env": [list(pair) for pair in env.items()]}
    try:
        built: McpServer = build(McpServer, given, "it")
    except ShapeError as error:
        raise ShapeError(f"no server ({error})") from None
    return built


READERS: dict[str, Callable[[object], Any]] = {"keys": _keys, "mcp": _server}
"""How an entry of a table is read; of the others, each is a text."""


def _set_aside(path: Path, error: Exception) -> str:
    """Move a damaged file out of the way, to a name that is free; return what to say of it."""
    names = (path.with_suffix(f".damaged{number}.toml") for number in ("", *range(2, MOST_ASIDE)))
    aside = next((name for name in names if not (name.exists() or name.is_symlink())), None)
    if aside is None:
        return f"{path} is damaged ({error}) and too many are set aside beside it already; default settings are used."
    try:
        path.replace(aside)
    except OSError as problem:
        return f"{path} is damaged ({error}) and can't be moved aside ({problem.strerror}); default settings are used."
    return f"{path} was damaged ({error}); it is now {aside.name}, and a new one takes its place."


# Writing ----------------------------------------------------------------------------------------------------------------------


def save(path: Path, settings: Settings) -> None:
    """Make the file say these settings, whole or not at all. Raises OSError, and ``DAMAGED`` for a file that is no TOML."""
    from tomlkit.exceptions import TOMLKitError

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        text = dumps(settings, _text(path))
    except TOMLKitError as error:  # what tomllib reads and tomlkit doesn't
        raise OSError(None, f"{path.name} can't be edited: {error}") from error
    with atomic_write(path, f".{path.name}.") as file:
        file.write(text.encode())


def dumps(settings: Settings, text: str = "") -> str:
    """Return ``text``, a settings file, changed so that it says ``settings``. What does not differ stays as it was written.

    What returns to its default is left out, so that a later default reaches everyone. Raises TOMLDecodeError.
    """
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
    """Return a table that tomlkit can edit, made where there is none. above: it holds tables alone, and needs no header."""
    import tomlkit
    from tomlkit.items import InlineTable, Table

    table: Any = parent.get(name)
    if not isinstance(table, Table | InlineTable):  # missing, no table, or one in parts, which tomlkit can't edit
        parent.pop(name, None)
        made = tomlkit.item(table) if isinstance(table, dict) else tomlkit.table(is_super_table=above)
        parent.append(name, made)
    return parent[name]


def _set_profile(profiles: Any, name: str, before: Profile | None, after: Profile | None) -> None:
    """Make the table of all profiles say this one, key by key; None removes it."""
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
    """Make a table of the document say ``value``, where None and the default are left out. A comment in that line stays."""
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
    """Return a value as TOML has it. A key of an action alone is no list."""
    if isinstance(value, tuple):
        return [_encoded(each) for each in value]
    return value


def change(path: Path, held: Settings, wanted: Settings) -> tuple[str, ...]:
    """Write what differs between ``held`` and ``wanted`` into the file, and leave the rest of it; return what to say of the file.

    A file that is damaged by now is moved aside, and ``wanted`` written whole. Raises OSError where nothing could be written, and
    where the damaged file can't be moved: it is not written over.
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
    """Return ``now`` with what differs between ``held`` and ``wanted``: of tables, entry by entry."""
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
    """Keep other windows from changing the settings. Raises OSError where one of them doesn't end in time."""
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
    """Whether this was never told, and remember that it is now. Where that can't be written, it is told again."""
    file = measurement_store.store_file(TOLD_FILE)
    if measurement_store.read(file, text) is not None:
        return False
    measurement_store.keep(file, {text: 1.0})
    return True
