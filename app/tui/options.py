"""The settings form as data: the fields of Sampling and KVSpec, how it is read from text, and what to say of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokamac.app.settings import Settings
from tokamac.app.tui.digits import whole_number
from tokamac.engine.options import STAGES, KVSpec, Sampling

AUTO = "auto"
"""A number that is chosen where the user gives none, and that is not nothing."""


@dataclass(frozen=True, slots=True)
class Field:
    """One line of the form. ``read`` raises ValueError; an empty text means ``empty`` where that is allowed.

    show: a value as text; None as ``write`` does.
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


USUAL_FIELDS = (
    Field("temperature", "Temperature", "0 is greedy; empty: the model's own", float, None),
    Field("top_p", "Top-p", "1 is off; empty: the model's own", float, None),
    Field("top_k", "Top-k", "0 is off; empty: the model's own", int, None),
    Field("min_p", "Min-p", "0 is off; empty: the model's own", float, None),
    Field("repetition_penalty", "Repetition penalty", "1 is off; empty: the model's own", float, None),
    Field("seed", "Seed", "empty: another each time", int, None),
    Field("max_tokens", "Max tokens", "empty: up to the context", int, None),
    Field("stop", "Stop texts", "split by ' | '; \\n: new line", _stop, ()),
)
RARE_FIELDS = (
    Field("stop_token_ids", "Stop tokens", "ids, split by commas", _ids, (), _show_ids),
    Field("min_tokens", "Min tokens", "no end before so many; 0 is off", int, 0),
    Field("presence_penalty", "Presence penalty", "-2 to 2; 0 is off", float, 0.0),
    Field("frequency_penalty", "Frequency penalty", "-2 to 2; 0 is off", float, 0.0),
    Field("logit_bias", "Logit bias", "ID=BIAS, split by commas", _biases, (), _show_biases),
    Field("xtc_probability", "XTC probability", "0 is off", float, 0.0),
    Field("xtc_threshold", "XTC threshold", "0 to 0.5", float, 0.1),
    Field("dry_multiplier", "DRY multiplier", "0 is off; 0.8 is usual", float, 0.0),
    Field("dry_base", "DRY base", "1 and more", float, 1.75),
    Field("dry_allowed_length", "DRY allowed length", "repeated tokens", int, 2),
    Field("dry_sequence_breakers", "DRY breakers", "split by ' | '; \\n: new line", _stop, ()),
    Field("order", "Order of stages", "split by commas; empty: the usual", _order, STAGES, _show_order),
)
SAMPLING_FIELDS = (*USUAL_FIELDS, *RARE_FIELDS)
"""What of Sampling the chat has. It shows no log-probabilities, so it has no field for them."""
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
    Field("memory_gb", "Memory limit", "GB; empty: the system's limit", float, None),
    Field("unload_after_min", "Unload after", "minutes; 0 never, auto 30 if large", _minutes),
)


class FieldError(Exception):
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
    return Sampling(**_read(SAMPLING_FIELDS, texts))


def read_kv(texts: Mapping[str, str]) -> KVSpec:
    """Return what the form says; raise FieldError, or OptionError where a value is out of range."""
    return KVSpec(**_read(KV_FIELDS, texts))


def read_memory(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return what the form says of ``Settings.memory_gb`` and ``unload_after_min``; raise FieldError, or OptionError."""
    values = _read(MEMORY_FIELDS, texts)
    Settings(**values)
    return values


def _read(fields: tuple[Field, ...], texts: Mapping[str, str]) -> dict[str, Any]:
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
                field.name, f"{field.label}: {text.strip() or 'nothing'!r:.60} is no number ({field.note})."
            ) from error
    return values
