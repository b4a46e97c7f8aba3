"""What the app remembers between runs: one TOML file that a person can read and edit.

    model = "guide"
    theme = "tokamac-dark"
    system = ""
    unload_after_min = 0    # minutes without use until the model's memory is given back; 0 is never; left out: 30 for large ones
    memory_gb = 14.0        # what a model may take of memory, in place of the limit that the system sets
    keep_awake = true       # on a Mac: no sleep while a model works; false lets it sleep
    titles = "model"        # who gives a chat its title: the model, once the chat is idle, or "words": the first ones stay

    [sampling]          # the fields of tokamac.engine.Sampling
    temperature = 0.7

    [template]          # the fields of tokamac.engine.TemplateOptions
    thinking = "off"

    [kv]                # the fields of tokamac.engine.KVSpec
    key_bits = 16

    [system_prompts]    # the library of Ctrl+S, by name
    terse = "Answer in one sentence."

    [adapters]          # a model, as it is named, and the folder or Hugging Face id of the adapter that it is loaded with
    "mlx-community/Qwen3-4B-4bit" = "/home/me/adapters/letters"

    [keys]              # an action's id (app/chat/actions.py) and its keys; [] takes them away
    explain = "f8"
    new_chat = ["ctrl+n", "f9"]

Nothing in the file is dropped in silence: an unknown key is named and written back, a value that can't be used is named and
its default taken, and a file that is not TOML is moved aside, not overwritten. Whether keys can be had,
app/chat/actions.py says.

A change is written into the file as it is now: other windows change it too, and so does its user's editor. A lock on a file beside
it keeps two changes apart: the settings' own file is replaced whole, so that a lock on it holds nobody off.
"""

import datetime
import fcntl
import os
import re
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from tokamac.app.backend.protocol import ShapeError, build
from tokamac.engine.errors import OptionError
from tokamac.engine.files import read_text, to_disk
from tokamac.engine.options import KVSpec, Sampling, TemplateOptions
from tokamac.engine.perf import measurement_store


def toml(table: dict[str, Any], prefix: str = "") -> str:
    """Return a table as TOML: plain values first, then sub-tables, whose names begin with ``prefix``."""
    lines = [f"{_key(key)} = {_value(value)}" for key, value in table.items() if not isinstance(value, dict)]
    for key, value in table.items():
        if isinstance(value, dict) and value:
            name = f"{prefix}{_key(key)}"
            lines.append(f"\n[{name}]\n{toml(value, f'{name}.')}".rstrip())
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if key.isascii() and key.replace("_", "a").replace("-", "a").isalnum() else f'"{_escaped(key)}"'


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return repr(value)


def _string(text: str) -> str:
    """Return a text as TOML; one of several lines as a person would write it. The newline after the quotes is not part of it."""
    if "\n" not in text:
        return f'"{_escaped(text)}"'
    lines = "\n".join(_escaped(line) for line in text.split("\n"))
    return f'"""\n{lines}"""'


def _escaped(text: str) -> str:
    return _SPECIAL.sub(lambda char: _ESCAPES.get(char[0]) or f"\\u{ord(char[0]):04x}", text)


_SPECIAL = re.compile(r'["\\\x00-\x1f\x7f]')
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


FILE = "settings.toml"
MOST_ASIDE = 100
"""Damaged files that are kept beside it; after that the damaged one stays where it is."""
PLAIN = (
    "model", "theme", "system", "panel", "unload_after_min", "memory_gb", "keep_awake", "titles", "toured",
)  # fmt: skip
"""Settings that are one value, not a table."""
MOST_MEMORY_GB = 1e6
TITLES = ("model", "words")
"""Who gives a chat its title: the model that is loaded, when it has nothing else to do, or the first words of the chat."""
CHAT_KV = KVSpec(keep="system")
"""How a chat keeps keys and values unless it is told otherwise: what rolls out of sight is never the system prompt."""
OPTIONS = ("sampling", "template", "kv")
"""Tables that are a dataclass of the engine's."""
LARGEST_BYTES = 4 << 20
"""Of the file: with a library of system prompts it has some kilobytes."""
DAMAGED = (tomllib.TOMLDecodeError, UnicodeDecodeError)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user chose last. ``unknown`` holds what this version does not know, to be written back.

    unload_after_min: minutes without use until the chat gives the model's memory back; 0 is never, None leaves it to the chat
    (app/chat/session.py). memory_gb: what MLX's arrays may take, in GB of 10^9 bytes; None is the system's limit. keep_awake:
    whether a Mac may not sleep while a model works. titles: who gives a chat its title, one of ``TITLES``.
    Raises OptionError for what these can't be.
    toured: whether the tour of the first start was shown. system_prompts: texts by name. adapters: by model. keys: of actions
    by id, as they were written.
    """

    model: str = "guide"
    theme: str = ""
    system: str = ""
    panel: bool = True
    unload_after_min: int | None = None
    memory_gb: float | None = None
    keep_awake: bool = True
    titles: str = "model"
    toured: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    template: TemplateOptions = field(default_factory=TemplateOptions)
    kv: KVSpec = CHAT_KV
    system_prompts: dict[str, str] = field(default_factory=dict)
    adapters: dict[str, str] = field(default_factory=dict)
    keys: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unknown: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.unload_after_min is not None and self.unload_after_min < 0:
            raise OptionError(
                f"unload_after_min is {self.unload_after_min}, which is no number of minutes.", "Use 0 for never."
            )
        if self.memory_gb is not None and not 0 < self.memory_gb < MOST_MEMORY_GB:
            raise OptionError(f"memory_gb is {self.memory_gb:g}, which is no size of memory.", "Give GB, such as 14.")
        if self.titles not in TITLES:
            raise OptionError(f"titles is {self.titles!r:.40}, which gives no titles.", f"Use one of {TITLES}.")

    @property
    def memory_bytes(self) -> int | None:
        """What MLX's arrays may take; None is the system's limit."""
        return None if self.memory_gb is None else round(self.memory_gb * 1e9)


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings, and in plain sentences what of the file could not be used."""

    settings: Settings
    warnings: tuple[str, ...] = ()


def gigabytes_of(nbytes: int | None) -> float | None:
    """Return bytes as ``memory_gb`` has them."""
    return None if nbytes is None else nbytes / 1e9


def with_adapter(settings: Settings, model: str, adapter: str | None) -> dict[str, str]:
    """Return the adapters by model, with this one for ``model``; None is none."""
    others = {name: each for name, each in settings.adapters.items() if name != model}
    return others if adapter is None else {**others, model: adapter}


def default_path() -> Path:
    """Return where the settings are kept."""
    from platformdirs import user_config_path

    return user_config_path("tokamac") / FILE


def load(path: Path) -> LoadedSettings:
    """Read the settings; a missing file gives the defaults, and so does one that can't be used."""
    try:
        return read(path)
    except DAMAGED as error:
        return LoadedSettings(Settings(), (set_aside(path, error),))
    except OSError as error:
        return LoadedSettings(Settings(), (f"{path} can't be read ({error.strerror}); default settings are used.",))


def read(path: Path) -> LoadedSettings:
    """Read the settings; a missing file gives the defaults. Raises OSError, and ``DAMAGED`` for what is no TOML."""
    try:
        text = read_text(path, LARGEST_BYTES)
    except FileNotFoundError:
        return LoadedSettings(Settings())
    return _read(tomllib.loads(text), path)


def save(path: Path, settings: Settings) -> None:
    """Write the settings whole or not at all; raise OSError if they can't be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(dumps(settings))
            file.flush()
            to_disk(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def dumps(settings: Settings) -> str:
    """Return the settings as TOML; what is at its default is left out, so that a later default reaches everyone."""
    table: dict[str, Any] = {**settings.unknown}
    for name in PLAIN:
        if getattr(settings, name) != getattr(Settings(), name):
            table[name] = getattr(settings, name)
    for name, value, default in (
        ("sampling", settings.sampling, Sampling()),
        ("template", settings.template, TemplateOptions()),
        ("kv", settings.kv, CHAT_KV),
    ):
        changed = {
            f.name: getattr(value, f.name) for f in fields(value) if getattr(value, f.name) != getattr(default, f.name)
        }
        table[name] = {
            **settings.unknown.get(name, {}),
            **{key: item for key, item in changed.items() if item is not None},
        }
    table["system_prompts"] = {**settings.unknown.get("system_prompts", {}), **settings.system_prompts}
    table["adapters"] = {**settings.unknown.get("adapters", {}), **settings.adapters}
    keys = {action: pressed[0] if len(pressed) == 1 else pressed for action, pressed in settings.keys.items()}
    table["keys"] = {**settings.unknown.get("keys", {}), **keys}
    return "# Settings of tokamac. It rewrites this file when you change something in the app.\n" + toml(table)


def set_aside(path: Path, error: Exception) -> str:
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


def _read(table: dict[str, Any], path: Path) -> LoadedSettings:
    warnings: list[str] = []
    settings = Settings()
    unknown: dict[str, Any] = {}
    for name, value in table.items():
        if name in (*OPTIONS, *_MAPS) and not isinstance(value, dict):
            warnings.append(f"{path.name}: {name} is {value!r:.40}, which is no table; the default is used.")
        elif name in OPTIONS:
            settings, rest = _read_options(settings, name, value, warnings)
            if rest:
                unknown[name] = rest
                warnings.extend(
                    f"{path.name}: [{name}] has an unknown key {key!r}; it is kept and not used." for key in rest
                )
        elif name in _MAPS:
            settings, rest = _read_map(settings, name, value, warnings)
            if rest:
                unknown[name] = rest
        elif name in PLAIN:
            try:
                settings = _with(settings, name, value)
            except (ShapeError, OptionError) as error:
                warnings.append(f"{path.name}: {error}")
        else:
            unknown[name] = value
            warnings.append(f"{path.name}: unknown key {name!r}; it is kept and not used.")
    return LoadedSettings(replace(settings, unknown=unknown), tuple(warnings))


def _with(settings: Settings, name: str, value: object) -> Settings:
    """Return the settings with this value. Raises ShapeError, or OptionError for one that is out of range."""
    kind = get_type_hints(Settings)[name]
    try:
        changed: dict[str, Any] = {name: build(kind, value, name)}
    except ShapeError:
        wanted = getattr(kind, "__name__", str(kind).partition(" ")[0])
        raise ShapeError(f"{name} is {value!r}, which is no {wanted}.") from None
    return replace(settings, **changed)


def _read_options(
    settings: Settings, name: str, table: dict[str, Any], warnings: list[str]
) -> tuple[Settings, dict[str, Any]]:
    """Take what is valid of a [sampling], [template] or [kv] table, key by key; return the unknown rest."""
    value: Any = getattr(settings, name)
    known = {f.name for f in fields(value)}
    # A window and its sinks are only valid together: all at once first, then what can be taken alone.
    hints = get_type_hints(type(value))
    usable = {}
    for key in known & table.keys():
        try:
            usable[key] = build(hints[key], table[key], key)
        except ShapeError as error:
            warnings.append(f"[{name}] {error}; the default is used.")
    try:
        value = replace(value, **usable)
    except OptionError:
        for key, item in usable.items():
            try:
                value = replace(value, **{key: item})
            except OptionError as error:
                warnings.append(f"[{name}] {key} = {item!r}: {error}; the default is used.")
    return replace(settings, **{name: value}), {key: item for key, item in table.items() if key not in known}


def _read_map(
    settings: Settings, name: str, table: dict[str, Any], warnings: list[str]
) -> tuple[Settings, dict[str, Any]]:
    """Take what is valid of a table whose keys are the user's; return the rest."""
    values, rest = {}, {}
    for key, value in table.items():
        try:
            values[key] = _MAPS[name](value)
        except ShapeError as error:
            rest[key] = value
            warnings.append(f"[{name}] {key} is {value!r:.40}, which is {error}; it is kept and not used.")
    changed: dict[str, Any] = {name: values}
    return replace(settings, **changed), rest


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ShapeError("no text")
    return value


def _keys(value: object) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(key, str) and key for key in listed):
        raise ShapeError("no key and no list of keys")
    return tuple(listed)


_MAPS: dict[str, Callable[[object], Any]] = {"system_prompts": _text, "adapters": _text, "keys": _keys}
"""Tables whose keys are the user's, and how their values are read."""


PATIENCE_S = 2.0
"""How long another window may keep the lock; each change takes milliseconds."""
_TABLES = ("system_prompts", "adapters", "keys", "unknown")
T = TypeVar("T")


def change(path: Path, held: Settings, wanted: Settings) -> tuple[str, ...]:
    """Write what is other in ``wanted`` than in ``held`` into the file, and leave the rest of it; return what is to be said of it.

    A file that is damaged by now is moved aside, and ``wanted`` written whole. Raises OSError where nothing could be written, and
    where the damaged file can't be moved: it is not written over.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path.with_name(f".{path.name}.lock")):
        try:
            now = read(path)
        except DAMAGED as error:
            told = set_aside(path, error)
            if path.exists():
                raise OSError(None, told) from error
            save(path, wanted)
            return (told,)
        save(path, merged(now.settings, held, wanted))
        return now.warnings


def merged(now: Settings, held: Settings, wanted: Settings) -> Settings:
    """Return ``now`` with what is other in ``wanted`` than in ``held``: of tables, entry by entry."""
    changes: dict[str, Any] = {}
    for one in fields(Settings):
        was, becomes, stands = (getattr(each, one.name) for each in (held, wanted, now))
        if was == becomes:
            continue
        if one.name in _TABLES:
            becomes = _merged_map(stands, was, becomes)
        elif one.name in OPTIONS:
            becomes = _merged_options(stands, was, becomes)
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
def _alone(lock: Path) -> Iterator[None]:
    """Keep other windows from changing the settings. Raises OSError where one of them doesn't end in time."""
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        until = time.monotonic() + PATIENCE_S
        while not _locked(handle):
            if time.monotonic() > until:
                raise TimeoutError(None, "another tokamac keeps it busy")
            time.sleep(0.01)
        yield
    finally:
        os.close(handle)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


TOLD_FILE = "told.json"


def is_new(text: str) -> bool:
    """Whether this was never told, and remember that it is now. Where that can't be written, it is told again."""
    file = measurement_store.store_file(TOLD_FILE)
    if measurement_store.read(file, text) is not None:
        return False
    measurement_store.keep(file, {text: 1.0})
    return True
