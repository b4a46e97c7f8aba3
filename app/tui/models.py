"""Models to offer: the embedded one, those on disk, and a few good ones to download. Names only; nothing is opened or fetched."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

RECOMMENDED = (
    ("mlx-community/Qwen3-4B-Instruct-2507-4bit", "2.3 GB, quick and able"),
    ("mlx-community/gemma-3-4b-it-4bit", "3.4 GB, many languages"),
    ("mlx-community/Qwen3-8B-4bit", "4.6 GB, thinks before it answers"),
    ("mlx-community/Llama-3.2-1B-Instruct-4bit", "0.7 GB, for small machines"),
)
LONGEST_LIST = 30


@dataclass(frozen=True, slots=True)
class Choice:
    """A model to choose: what to load, and what to say of it."""

    model: str
    note: str


def hub_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the Hugging Face cache's folder, without importing its library."""
    if named := environment.get("HF_HUB_CACHE"):
        return Path(named)
    home = environment.get("HF_HOME") or Path(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"


def choices(cache: Path) -> list[Choice]:
    """Return what to offer, the models on disk first."""
    found = _downloaded(cache)
    ready = [
        Choice("guide", "embedded: answers about tokamac and inference"),
        *(Choice(model, "on disk") for model in found),
    ]
    return [*ready, *(Choice(model, f"download: {note}") for model, note in RECOMMENDED if model not in found)]


def _downloaded(cache: Path) -> list[str]:
    """Return the ids in the cache that have weights in at least one snapshot."""
    try:
        folders = sorted(folder for folder in cache.iterdir() if folder.name.startswith("models--"))
    except OSError:
        return []  # no cache, or none that may be read: nothing to offer
    ids = [
        folder.name.removeprefix("models--").replace("--", "/", 1)
        for folder in folders
        if next(folder.glob("snapshots/*/*.safetensors"), None) is not None
    ]
    return ids[:LONGEST_LIST]
