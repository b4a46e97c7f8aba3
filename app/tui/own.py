"""What one chat has of its own, beside what holds in every chat: its sampling, system prompt and thinking. Kept with it."""

from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from tokamac.app.backend.shapes import ShapeError, build
from tokamac.app.store.values import Json
from tokamac.engine.errors import OptionError
from tokamac.engine.options import Sampling, TemplateOptions

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Own:
    """None: what holds in every chat holds in this one too. An empty system prompt is none, whatever others have."""

    sampling: Sampling | None = None
    system: str | None = None
    template: TemplateOptions | None = None


def own_of(settings: Json) -> Own:
    """Return what a stored chat has of its own. What another version wrote, and this one can't read, does not hold."""
    system = settings.get("system")
    return Own(
        _read(Sampling, settings.get("sampling"), "sampling"),
        system if isinstance(system, str) else None,
        _read(TemplateOptions, settings.get("template"), "template"),
    )


def as_settings(own: Own) -> dict[str, Any]:
    """Return the chat's settings as they are stored; None takes a key away."""
    return {
        "sampling": None if own.sampling is None else _changed(own.sampling),
        "system": own.system,
        "template": None if own.template is None else asdict(own.template),
    }


def _changed(sampling: Sampling) -> dict[str, Any]:
    """Return what differs from the defaults: a version that does not know the rest can read it, too."""
    usual = asdict(Sampling())
    return {name: value for name, value in asdict(sampling).items() if value != usual[name]}


def _read(kind: type[T], stored: object, name: str) -> T | None:
    if not isinstance(stored, dict):
        return None
    try:
        read: T = build(kind, stored, name)
    except (ShapeError, OptionError):
        return None
    return read
