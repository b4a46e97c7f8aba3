"""Data that ships with Tokamac: the embedded model, chip and model tables. No code that runs at import."""

from importlib.resources import files
from pathlib import Path


def asset_path(*parts: str) -> Path:
    """Return the path of a shipped file or folder, e.g. ``asset_path("guide", "model")``.

    Tokamac is installed as plain files (pip, pipx, uv), never as a zip, so a path always exists.
    """
    return Path(str(files(__name__))).joinpath(*parts)
