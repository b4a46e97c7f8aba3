"""Profiles: a model, a system prompt and options under a name, which a chat takes on together.

In the settings file each is a table. Its keys are the names that /settings has of sampling, template and KV cache, and three more:

    [profiles.coding]
    model = "org/name"
    temperature = 0.2

What a profile does not name is as in the settings; so one line makes a profile, and a later change of the settings reaches it.
"""

import tomllib
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, TypeVar, cast, get_type_hints

from tokamac.engine.errors import OptionError
from tokamac.engine.hub.names import nearest
from tokamac.engine.options import KVSpec, Sampling, TemplateOptions

from .strict_json import ShapeError, build

T = TypeVar("T")

CHAT_KV = KVSpec(keep="system")
"""How a chat keeps keys and values unless it is told otherwise: what rolls out of sight is never the system prompt."""
DEFAULT = "default"
"""In a profile: the default of a setting, whatever [sampling], [template] or [kv] say."""
SHOWN_NOWHERE = ("tools", "must_call", "logprobs")
"""Options of the engine that no profile has: tools are named apart, a chat shows no log-probabilities and forces no call."""


def defaults_of(kind: type[T]) -> T:
    """Return the options of this kind that a chat has where nobody chose any."""
    return cast(T, CHAT_KV) if kind is KVSpec else kind()


@dataclass(frozen=True, slots=True)
class Profile:
    """A model, a system prompt, tools and options under a name. None, and options that it does not name, are as in the settings.

    options: values of Sampling, TemplateOptions and KVSpec, by the names of their fields; or ``DEFAULT``.
    """

    model: str | None = None
    system: str | None = None
    tools: tuple[str, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def table(self) -> dict[str, Any]:
        """The profile as its table in the file."""
        named = {"model": self.model, "system": self.system, "tools": self.tools}
        return {**{key: value for key, value in named.items() if value is not None}, **self.options}

    def names(self, kind: Hashable) -> bool:
        """Whether it says anything of Sampling, TemplateOptions or KVSpec."""
        return any(each in self.options for each in option_hints(kind))

    def over(self, base: T) -> T:
        """Return ``base``, one of these, with what the profile names of it. Raises OptionError where that is not valid."""
        kind: Any = type(base)
        default = defaults_of(kind)
        named = {
            name: getattr(default, name) if self.options[name] == DEFAULT else self.options[name]
            for name in option_hints(kind)
            if name in self.options
        }
        return replace(base, **named) if named else base  # type: ignore[type-var]  # a dataclass, as all OPTIONS are


def differing(kept: object, everywhere: object) -> dict[str, Any]:
    """Return what a profile must name, of Sampling, TemplateOptions or KVSpec, to give ``kept`` in place of what the settings have.

    What is not the default is always named, so that a later change of the settings does not change the profile.
    """
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
VERBS = ("save", "delete", NO_PROFILE)
"""What follows /profile in place of a name."""


def why_no_name(name: str) -> str:
    """Return why no profile can have this name; "" where one can."""
    if not name or not name.isprintable() or len(name) > LONGEST_NAME:
        return f"A profile's name has 1 to {LONGEST_NAME} letters."
    first = name.partition(" ")[0].lower()
    return f"A profile can't be called {name}: /profile {first} means something else." if first in VERBS else ""


@cache
def option_hints(kind: Hashable) -> Mapping[str, Any]:
    """Return the types of the options that a profile can name, of Sampling, TemplateOptions or KVSpec."""
    return {name: hint for name, hint in get_type_hints(cast(type, kind)).items() if name not in SHOWN_NOWHERE}


PROFILE_KINDS = (Sampling, TemplateOptions, KVSpec)
PROFILE_VALUES = {"model": str, "system": str, "tools": tuple[str, ...]}
PROFILE_KEYS = (*PROFILE_VALUES, *(each.name for kind in PROFILE_KINDS for each in fields(kind)))
"""All that a profile can name."""


def read_profiles(given: dict[str, Any], text: str, file: str, warnings: list[str]) -> dict[str, Profile]:
    """Return what is valid of the tables of profiles; what is wrong is named with its line in the ``text`` of ``file``."""
    read = {}
    for name, table in given.items():

        def wrong(key: str, why: str, name: str = name) -> None:
            line = _line_of(text, ("profiles", name, key) if key else ("profiles", name))
            at = file if line is None else f"{file} line {line}"
            warnings.append(f"{at}: [profiles.{name:.40}] {why.rstrip('.')}; it is kept and not used.")

        if isinstance(table, dict):
            read[name] = _profile(table, wrong)
        else:
            wrong("", f"is {table!r:.40}, which is no table")
    return read


def _profile(given: dict[str, Any], wrong: Callable[[str, str], None]) -> Profile:
    """Return what is valid of a profile's table; ``wrong`` is told of the keys that are not, and why."""
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


def _taken(value: Any, named: dict[str, Any], wrong: Callable[[str, str], None]) -> dict[str, Any]:
    """Return the ``named`` options that ``value`` takes, as it holds them: all together, else those that are valid one by one."""
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
    """Return the line of a settings file that has the table or the key of this path; None where that can't be told."""
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
    """Return the names that a line of TOML, a header or one key, goes through."""
    names: list[str] = []
    with suppress(tomllib.TOMLDecodeError):
        at: Any = tomllib.loads(toml)
        while isinstance(at, dict) and len(at) == 1:
            (name,) = at
            names.append(name)
            at = at[name]
    return tuple(names)
