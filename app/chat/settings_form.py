"""Settings as a form of texts, for the screen and for lines: grouped fields, parsing, validation."""

# Order: this chat, the model, the app; groups the loaded model can't use come last. A sheet holds all values.

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

from tokamac.engine.errors import OptionError, TokamacError
from tokamac.engine.events import ModelSpec
from tokamac.engine.files import exists, expanded, is_dir
from tokamac.engine.options import (
    GROUP_SIZES,
    KV_BITS,
    ON_FULL,
    STAGES,
    THINKING,
    WIRED_MODES,
    KVSpec,
    Sampling,
    TemplateOptions,
)

from ..settings import DEFAULT, TITLES, Profile, Settings, defaults_of
from ..text.sanitise import sanitise_line

T = TypeVar("T")
MOST_DIGITS = 9  # no number here has more, and Python refuses to parse thousands of digits


def whole_number(text: str) -> int | None:
    """Parse digits; None for anything else or more than ``MOST_DIGITS``."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS else None


AUTO = "auto"  # the text of a number that the app chooses


@dataclass(frozen=True, slots=True)
class Field:
    """A form line. ``read`` raises ValueError; empty text means ``empty`` if allowed.

    show: value to display text; None: ``write``. choices: allowed values, where few.
    """

    name: str
    label: str
    note: str
    read: Callable[[str], object]
    empty: object = ValueError
    show: Callable[[Any], str] | None = None
    choices: tuple[str, ...] = ()


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


def _minutes(text: str) -> int | None:
    if text.strip().lower() == AUTO:
        return None
    if (minutes := whole_number(text.strip())) is None:
        raise ValueError
    return minutes


def _folder(text: str) -> str:
    path = expanded(text.strip())
    if not path.is_absolute() or (exists(path) and not is_dir(path)):
        raise ValueError
    return text.strip()


NOT_SET = "not set"
SWITCH = ("on", "off")


def _switch(text: str) -> bool:
    return SWITCH.index(text.strip().lower()) == 0


def _show_switch(value: bool) -> str:  # a value of the settings
    return SWITCH[not value]


_BITS = tuple(str(bits) for bits in sorted(KV_BITS, reverse=True))

THINKING_FIELDS = (
    Field("thinking", "Thinking", "on, off, low, medium, high; or empty", _word, None, choices=("", *THINKING)),
    Field("thinking_budget", "Thinking budget", "tokens; empty: no limit", int, None),
)
KEYWORDS = Field("keywords", "Template options", "KEY=VALUE, split by ' | '", _parts, ())
BY_MODEL = "model default"
USUAL_FIELDS = (
    Field("temperature", "Temperature", f"0 is greedy; empty: {BY_MODEL}", float, None),
    Field("top_p", "Top-p", f"1 is off; empty: {BY_MODEL}", float, None),
    Field("top_k", "Top-k", f"0 is off; empty: {BY_MODEL}", int, None),
    Field("min_p", "Min-p", f"0 is off; empty: {BY_MODEL}", float, None),
    Field("repetition_penalty", "Repetition penalty", f"1 is off; empty: {BY_MODEL}", float, None),
    Field("seed", "Seed", "empty: random", int, None),
    Field("max_tokens", "Max tokens", "empty: leaves room for the next turn", int, None),
    Field("stop", "Stop texts", "split by ' | '; \\n: new line", _stop, ()),
)
RARE_FIELDS = (
    Field("loop_check", "End repetition", "on or off", _switch, True, _show_switch, choices=SWITCH),
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
# The fields of Sampling in the chat. It shows no log-probabilities, so it has no field for them.
SAMPLING_FIELDS = (*USUAL_FIELDS, *RARE_FIELDS)
KV_FIELDS = (
    Field("key_bits", "Key bits", "16, 8, 6, 5, 4, 3 or 2", int, choices=_BITS),
    Field("value_bits", "Value bits", "16, 8, 6, 5, 4, 3 or 2", int, choices=_BITS),
    Field("group_size", "Group size", "32, 64 or 128", int, choices=tuple(map(str, GROUP_SIZES))),
    Field("window", "Window", "tokens kept; empty keeps all", int, None),
    Field("keep", "Keep", "pinned first tokens, or: system", _keep),
    Field(
        "on_full", "When full", "roll, stop, compact, truncate-middle, error", str.strip, None, choices=("", *ON_FULL)
    ),
)
MEMORY_FIELDS = (
    Field("memory_gb", "Memory limit", "GB; empty: system limit", float, None),
    Field("parallel", "Replies at once", "1 to 256; more memory each", int),
    Field("unload_after_min", "Unload after", "minutes; 0 never, auto 30 if large", _minutes),
    Field("wired", "Wire on a Mac", "auto: while it works; on, off", _word, choices=WIRED_MODES),
)
SPEED_FIELDS = (
    Field("pace", "Pace", "% of the time that the GPU works", int),
    Field("pace_on_battery", "Pace on battery", "the same; empty: as above", int, None),
    Field("speculation", "Guess ahead", "on or off; the text is the same", _switch, show=_show_switch, choices=SWITCH),
    Field(
        "cpu_exact",
        "Exact on a CPU",
        "off rounds what costs little; faster",
        _switch,
        show=_show_switch,
        choices=SWITCH,
    ),
)
APP_FIELDS = (
    Field("models_folder", "Models folder", "whole path; empty: ~/Models/tokamac", _folder, ""),
    Field("embedding_model", "Search by meaning", "model for it; empty: the smallest here", str.strip, ""),
    Field("panel", "Side panel", "on or off", _switch, show=_show_switch, choices=SWITCH),
    Field("all_figures", "All figures in it", "on or off", _switch, show=_show_switch, choices=SWITCH),
    Field(
        "tint_guesses", "Tint guesses", "on or off, from the next reply on", _switch, show=_show_switch, choices=SWITCH
    ),
    Field("titles", "Titles of chats", "model writes them, or first words", _word, choices=TITLES),
    Field(
        "keep_awake", "Keep a Mac awake", "on or off, while a model works", _switch, show=_show_switch, choices=SWITCH
    ),
)

Part = Literal["template", "sampling", "kv", "settings"]


@dataclass(frozen=True, slots=True)
class FieldGroup:
    """Fields under a heading. part: the Sheet attribute with their values. scope: what they apply to."""

    scope: str
    title: str
    part: Part
    fields: tuple[Field, ...]


THIS_CHAT, THE_MODEL, THE_APP = "This chat", "Model (a change reloads it)", "App"
GROUPS = (
    FieldGroup(THIS_CHAT, "Sampling", "sampling", USUAL_FIELDS),
    FieldGroup(THIS_CHAT, "Thinking", "template", THINKING_FIELDS),
    FieldGroup(THIS_CHAT, "Chat template", "template", (KEYWORDS,)),
    FieldGroup(THIS_CHAT, "More about sampling", "sampling", RARE_FIELDS),
    FieldGroup(THE_MODEL, "KV cache", "kv", KV_FIELDS),
    FieldGroup(THE_MODEL, "Memory", "settings", MEMORY_FIELDS),
    FieldGroup(THE_MODEL, "Speed", "settings", SPEED_FIELDS),
    FieldGroup(THE_APP, "", "settings", APP_FIELDS),
)


@dataclass(frozen=True, slots=True)
class Sheet:
    """The form's values. own: template and sampling are this chat's only. settings: memory and app fields."""

    template: TemplateOptions = TemplateOptions()  # noqa: RUF009  # frozen
    sampling: Sampling = Sampling()  # noqa: RUF009
    kv: KVSpec = defaults_of(KVSpec)  # noqa: RUF009
    settings: Settings = Settings()  # noqa: RUF009
    own: bool = False


class FieldError(TokamacError):
    """An invalid field, given by ``name``."""

    def __init__(self, name: str, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.name = name


OPTION_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{,40}")
OPTION = "option:"  # begins the name of a field that stands for one option of the chat template


def _option_fields(info: ModelSpec | None) -> tuple[Field, ...]:
    """Return fields for the chat template's own options, without thinking and those the app sets."""
    from tokamac.engine.text.template import KNOWN  # loads Jinja, which the first screen needs nothing of

    names = () if info is None else info.template_names
    listed = sorted(
        name for name in names if OPTION_NAME.fullmatch(name) and name not in (*KNOWN, "tools", "documents")
    )
    return tuple(
        Field(f"{OPTION}{name}", sanitise_line(name), "JSON value or word; empty: not set", str.strip, "")
        for name in listed[:MOST_OPTIONS]
    )


MOST_OPTIONS = 12  # options of a template that have a field of their own; `keywords` has the others


class Form:
    """The form for one model, or for any if none is loaded; texts are keyed by field name."""

    def __init__(self, info: ModelSpec | None = None) -> None:
        self._info = info
        self._options = _option_fields(info)
        groups = [replace(each, fields=self._here(each)) for each in GROUPS]
        scopes = [each.scope for each in groups]
        self.groups = tuple(sorted(groups, key=lambda each: (scopes.index(each.scope), self._is_idle(each))))

    def _is_idle(self, group: FieldGroup) -> bool:
        info = self._info
        if info is None or group.part != "template":
            return False
        return not (info.thinks or info.thinking_modes if group.title == "Thinking" else info.template_names)

    def _here(self, group: FieldGroup) -> tuple[Field, ...]:
        if group.fields == (KEYWORDS,) and self._options:
            return (*self._options, replace(KEYWORDS, label="Other options"))
        if group.fields == THINKING_FIELDS and self._info is not None and self._info.thinking_modes:
            modes = self._info.thinking_modes
            thinking = replace(THINKING_FIELDS[0], note=f"{', '.join(modes)}; or empty", choices=("", *modes))
            return (thinking, *THINKING_FIELDS[1:])
        if group.fields == USUAL_FIELDS and self._info is not None and not self._info.recommended.names_any:
            unnamed = Sampling().resolved(self._info.recommended)
            return tuple(
                replace(each, note=each.note.replace(BY_MODEL, f"{getattr(unnamed, each.name)}, named by nobody"))
                for each in USUAL_FIELDS
            )
        return group.fields

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        return {field.name: field for group in self.groups for field in group.fields}

    @cached_property
    def defaults(self) -> Mapping[str, str]:
        return self.texts(Sheet())

    def texts(self, sheet: Sheet) -> dict[str, str]:
        texts = {
            field.name: write(field, getattr(sheet, group.part))
            for group in self.groups
            for field in group.fields
            if field not in self._options
        }
        own = {name.removeprefix(OPTION): "" for name in (each.name for each in self._options)}
        others = []
        for keyword in sheet.template.keywords:
            name, _, value = keyword.partition("=")
            if name in own:
                own[name] = value
            else:
                others.append(keyword)
        return {**texts, **{f"{OPTION}{name}": value for name, value in own.items()}, "keywords": " | ".join(others)}

    def read(self, texts: Mapping[str, str], *, own: bool = False) -> Sheet:
        """Parse the texts. Raises FieldError for the first bad field."""
        values = {name: _read(field, texts[name]) for name, field in self.fields.items()}
        options = [
            f"{each.name.removeprefix(OPTION)}={texts[each.name].strip()}"
            for each in self._options
            if texts[each.name].strip()
        ]
        parts: dict[str, Any] = {part: {} for part in ("template", "sampling", "kv", "settings")}
        for group in self.groups:
            parts[group.part] |= {each.name: values[each.name] for each in group.fields if each not in self._options}
        for each in options:  # alone first: all of them together would not tell which one is wrong
            name, _, _ = each.partition("=")
            _made(TemplateOptions(), {"keywords": (each,)}, f"{OPTION}{name}")
        parts["template"]["keywords"] = (*options, *parts["template"]["keywords"])
        return Sheet(
            _made(TemplateOptions(), parts["template"]),
            _made(Sampling(), parts["sampling"]),
            _made(defaults_of(KVSpec), parts["kv"]),
            _made(Settings(), parts["settings"]),
            own=own,
        )

    def problems(self, texts: Mapping[str, str]) -> dict[str, str]:
        found: dict[str, str] = {}
        while len(found) < len(texts):
            try:
                self.read({name: self.defaults[name] if name in found else text for name, text in texts.items()})
            except FieldError as error:
                found[error.name] = error.one_line()
            else:
                break
        return found

    def cautions(self, texts: Mapping[str, str]) -> dict[str, str]:
        """Return by field what the loaded model doesn't support, and why; not an error, another model may."""
        info = self._info
        if info is None:
            return {}
        name, found = sanitise_line(info.name), {}
        mode = texts["thinking"].strip().lower()
        if not info.thinking_modes:
            found["thinking"] = f"{name} has no switch for it"
        elif mode and mode not in info.thinking_modes:
            found["thinking"] = f"{name} only takes {', '.join(info.thinking_modes)}"
        if not info.thinks:
            found["thinking_budget"] = f"{name} does not mark its thinking"
        written = [part.partition("=")[0].strip() for part in texts["keywords"].split(" | ") if part.strip()]
        unread = [each for each in written if each not in info.template_names]
        if unread:
            found["keywords"] = f"{name} does not read {', '.join(unread)}"
        elif not info.template_names:
            found["keywords"] = "its template reads none"
        return found


def write(field: Field, options: object) -> str:
    return _shown(field, getattr(options, field.name))


def _shown(field: Field, value: Any) -> str:
    if field.show is not None:
        return field.show(value)
    if value is None and field.empty is ValueError:
        return AUTO
    if isinstance(value, tuple):
        return " | ".join(part.replace("\n", "\\n") for part in value)
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _read(field: Field, text: str) -> object:
    """Raises FieldError."""
    if not text.strip() and field.empty is not ValueError:
        return field.empty
    try:
        return field.read(text)
    except ValueError as error:
        raise FieldError(
            field.name, f"{field.label}: {text.strip() or 'nothing'!r:.60} is not valid ({field.note})."
        ) from error


def with_field(base: T, field: Field, text: str) -> T:
    """Return options with one field parsed from ``text``. Raises FieldError."""
    changed: T = _made(base, {field.name: _read(field, text)})
    return changed


def _made(base: Any, values: Mapping[str, Any], at: str = "") -> Any:
    """Raises FieldError naming ``at``, or the field at fault."""
    try:
        return replace(base, **values)
    except OptionError as error:
        raise FieldError(at or _culprit(base, values), error.message, error.hint) from error


def _culprit(base: Any, values: Mapping[str, Any]) -> str:
    """Return the field that is invalid alone, else the first whose removal makes the rest valid."""

    def is_valid(tried: Mapping[str, Any]) -> bool:
        try:
            replace(base, **tried)
        except OptionError:
            return False
        return True

    alone = next((name for name, value in values.items() if not is_valid({name: value})), None)
    rest = (name for name in values if is_valid({other: value for other, value in values.items() if other != name}))
    return alone or next(rest, next(iter(values)))


# What a profile holds, in words -------------------------------------------------------------------------------------------------


def described(profile: Profile) -> list[tuple[str, str]]:
    """Return a profile as sanitized (label, text) pairs."""
    said = [("Model", profile.model or "the one that is loaded")]
    if profile.system is not None:
        said.append(("System prompt", profile.system or "none"))
    if profile.tools is not None:
        said.append(("Tools", ", ".join(profile.tools) or "none"))
    for group in GROUPS:
        for each in group.fields:
            if (value := profile.options.get(each.name)) is not None:
                text = DEFAULT if value == DEFAULT else _shown(each, value)
                said.append((each.label, text or DEFAULT))
    return [(label, sanitise_line(text)) for label, text in said]


def summary(profile: Profile) -> str:
    model, *others = described(profile)
    parts = [f"{label.lower()} {text if len(text) <= LONGEST else f'{text[: LONGEST - 1]}…'}" for label, text in others]
    return " · ".join([model[1].rstrip("/").rpartition("/")[2], *parts])


LONGEST = 40  # characters of a value in a summary
