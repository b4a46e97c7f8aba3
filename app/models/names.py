"""What a text that should be a model names: the embedded one, an id of Hugging Face, a folder."""

import re

from tokamac.engine.files import expanded, is_dir
from tokamac.engine.hub.names import EMBEDDED

from ..sanitise import sanitise_line

_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*(@[\w][\w./-]*)?", re.ASCII)


def is_id(model: str) -> bool:
    """Whether a text can be a Hugging Face ID, ``org/name[@revision]``, and is not the name of a folder."""
    return _ID.fullmatch(model) is not None and ".." not in model and not is_dir(model)


def is_folder(model: str) -> bool:
    """Whether a text names a folder, and not an embedded model."""
    return model not in EMBEDDED and bool(model.strip()) and is_dir(expanded(model))


def lasting(model: str) -> str:
    """Return a name of the model for every working directory: of a folder its absolute path."""
    return str(expanded(model).absolute()) if is_folder(model) else model


def short_name(model: str) -> str:
    """Return the last part of an id or a path, made safe."""
    return sanitise_line(model.rstrip("/").rpartition("/")[2]) or sanitise_line(model)
