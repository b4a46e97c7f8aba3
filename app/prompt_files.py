"""Prompts as files: ``prompts/review.md`` beside the settings is ``/review ARGS`` and ``ask --prompt review ARGS``."""

#     ---                           front matter: a line a key, its value JSON, [a, b], or plain text
#     description: Review a diff
#     temperature: 0.2
#     tools: [read_file]
#     schema: review.json           a file beside it
#     ---
#     Review this: $ARGUMENTS       without that word, what is written after the command follows the text

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tokamac.engine.errors import TokamacError
from tokamac.engine.files import read_text
from tokamac.engine.hub.names import nearest
from tokamac.engine.options import Sampling, TemplateOptions

from . import own_files
from .own_files import LARGEST_BYTES, OwnFileError
from .settings import Profile, option_hints, profile_of
from .text.sanitise import sanitise_line

T = TypeVar("T")

MOST_FILES = 500
ARGUMENTS = "$ARGUMENTS"
KEYS = ("description", "model", "tools", "schema", *option_hints(Sampling), *option_hints(TemplateOptions))
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,39}")
_FENCE = "---"


class PromptFileError(OwnFileError):
    """There is no such prompt, or it can't be used; the message names the file."""


@dataclass(frozen=True, slots=True)
class PromptFile:
    """A prompt: ``text`` with the settings that its reply has."""

    name: str
    text: str
    about: str = ""
    profile: Profile = Profile()  # noqa: RUF009  # frozen

    def filled(self, arguments: str) -> str:
        if ARGUMENTS in self.text:
            return self.text.replace(ARGUMENTS, arguments).strip()
        return "\n\n".join(filter(None, (self.text, arguments.strip())))


def folder_in(home: Path) -> Path:
    return home / "prompts"


def path_of(folder: Path, name: str) -> Path:
    """Raises PromptFileError for a name that no command can have."""
    if not _NAME.fullmatch(name):
        raise PromptFileError(
            f"{sanitise_line(name)!r:.60} is no name of a prompt", "Use small letters, digits, - and _: review."
        )
    return folder / f"{name}.md"


def names(folder: Path) -> list[str]:
    try:
        found = [file.stem for file in folder.iterdir() if file.suffix == ".md" and _NAME.fullmatch(file.stem)]
    except OSError:
        return []
    return sorted(found)[:MOST_FILES]


def read(folder: Path, name: str) -> PromptFile:
    """Raises OwnFileError."""
    file = path_of(folder, name)
    if (written := own_files.read(file)) is None:
        near = nearest(name, names(folder))
        hint = f"Did you mean {near}?" if near is not None else f"/prompts edit {name} makes it."
        raise PromptFileError(f"there is no prompt {name}", hint)
    return _parse(written, name, folder)


def write(folder: Path, name: str, text: str) -> Path:
    """Raises OwnFileError."""
    return own_files.write(path_of(folder, name), text)


def _parse(written: str, name: str, folder: Path) -> PromptFile:
    first, *lines = written.lstrip("\ufeff").split("\n")
    if first.rstrip() != _FENCE:
        return PromptFile(name, written.strip())
    end = next((at for at, line in enumerate(lines) if line.rstrip() == _FENCE), None)
    if end is None:
        raise PromptFileError(f"{name}.md: its front matter has no end", f"Close it with a line of {_FENCE}.")
    given: dict[str, Any] = {}
    at: dict[str, int] = {}

    def wrong(key: str, why: str) -> NoReturn:
        raise PromptFileError(f"{name}.md line {at[key]}: {sanitise_line(why).rstrip('.')}", "Correct that line.")

    for key, number, value in _lines(lines[:end], name):
        twice = key in at
        at[key] = number
        if twice:
            wrong(key, f"{key} is given twice")
        if key not in KEYS:
            meant = nearest(key, KEYS)
            wrong(key, f"a prompt has no {key!r:.40}" + (f" (did you mean {meant}?)" if meant else ""))
        given[key] = value
    about, schema = given.pop("description", ""), given.pop("schema", None)
    if not isinstance(about, str):
        wrong("description", "description is not a text")
    if isinstance(given.get("tools"), str):
        given["tools"] = [each.strip() for each in given["tools"].split(",")]
    if schema is not None:
        at["json_schema"] = at["schema"]
        given["json_schema"] = schema if isinstance(schema, str) else json.dumps(schema)
        if not given["json_schema"].lstrip().startswith("{"):
            try:
                given["json_schema"] = read_text(folder / schema, LARGEST_BYTES)
            except (OSError, UnicodeDecodeError, TypeError) as error:
                wrong("schema", f"the schema {schema!r:.60} can't be read: {error}")
    return PromptFile(name, "\n".join(lines[end + 1 :]).strip(), about, profile_of(given, wrong))


def _lines(lines: list[str], name: str) -> Iterator[tuple[str, int, Any]]:
    for number, line in enumerate(lines, 2):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key, colon, value = line.partition(":")
        if not colon or key != key.strip() or not key:
            shown = sanitise_line(line.strip())
            raise PromptFileError(
                f"{name}.md line {number}: {shown:.60} is no setting", "Write one as temperature: 0.2."
            )
        yield key, number, _value(value.strip())


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    if text.startswith("[") and text.endswith("]"):
        return [_value(each.strip()) for each in text[1:-1].split(",")]
    return text


def over(prompt: PromptFile, base: T) -> T:
    """Return ``base`` with the prompt's options. Raises PromptFileError."""
    try:
        return prompt.profile.over(base)
    except TokamacError as error:
        raise PromptFileError(f"{prompt.name}.md: {error.message}", error.hint) from error
