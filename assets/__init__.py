"""Data that ships with Tokamac: the embedded model, chip and model tables. No import-time code."""

from importlib.resources import files
from pathlib import Path


def asset_path(*parts: str) -> Path:
    """Return a shipped file's path; Tokamac is never installed as a zip, so it exists."""
    return Path(str(files(__name__))).joinpath(*parts)
