"""What one chat has of its own, beside what holds in every chat: its sampling, its system prompt. Kept with the chat."""

from dataclasses import asdict, dataclass
from typing import Any

from tokamac.app.backend.shapes import ShapeError, build
from tokamac.app.store.values import Json
from tokamac.engine.errors import OptionError
from tokamac.engine.options import Sampling


@dataclass(frozen=True, slots=True)
class Own:
    """None: what holds in every chat holds in this one too. An empty system prompt is none, whatever others have."""

    sampling: Sampling | None = None
    system: str | None = None


def own_of(settings: Json) -> Own:
    """Return what a stored chat has of its own. What another version wrote, and this one can't read, does not hold."""
    system = settings.get("system")
    return Own(_sampling(settings.get("sampling")), system if isinstance(system, str) else None)


def as_settings(own: Own) -> dict[str, Any]:
    """Return the chat's settings as they are stored; None takes a key away."""
    return {"sampling": None if own.sampling is None else _changed(own.sampling), "system": own.system}


def _changed(sampling: Sampling) -> dict[str, Any]:
    """Return what differs from the defaults: a version that does not know the rest can read it, too."""
    usual = asdict(Sampling())
    return {name: value for name, value in asdict(sampling).items() if value != usual[name]}


def _sampling(stored: object) -> Sampling | None:
    if not isinstance(stored, dict):
        return None
    try:
        read: Sampling = build(Sampling, stored, "sampling")
    except (ShapeError, OptionError):
        return None
    return read
