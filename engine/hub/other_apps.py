"""Models that other programs keep on this disk: LM Studio's. They are read where they lie, and never written or deleted.

    <models>/<publisher>/<model>/config.json, *.safetensors    MLX and safetensors, which are loaded from there
    <models>/<publisher>/<model>/*.gguf                        GGUF, which is not read here and only counted

LM Studio's home is named by ~/.lmstudio-home-pointer, and its settings.json names a models folder that was moved.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..files import expanded, is_file, read_text

HOMES = (".lmstudio", ".cache/lm-studio")
SETTINGS = ("Library/Application Support/LM Studio/settings.json", ".config/LM Studio/settings.json")
POINTER = ".lmstudio-home-pointer"
POINTER_BYTES = 4096
MOST = 1000
"""Folders that are looked at, at most: a moved models folder may be anything."""


@dataclass(frozen=True, slots=True)
class OtherModels:
    """What another program has. folders: of models that can be loaded; gguf: of models in GGUF, which can't."""

    folders: tuple[Path, ...] = ()
    gguf: tuple[Path, ...] = ()


def lm_studio_models(home: Path | None = None) -> OtherModels:
    """Return LM Studio's models. home: the user's; None is the current one's."""
    folders: list[Path] = []
    gguf: list[Path] = []
    for root in dict.fromkeys(root.resolve() for root in _models_folders(home or Path.home())):
        for folder in _model_folders(root):
            if is_file(folder / "config.json") and any(folder.glob("*.safetensors")):
                folders.append(folder)
            elif any(folder.glob("*.gguf")):
                gguf.append(folder)
    return OtherModels(tuple(folders), tuple(gguf))


def _models_folders(home: Path) -> Iterator[Path]:
    homes = [home / name for name in HOMES]
    try:
        if named := read_text(home / POINTER, POINTER_BYTES).strip():
            homes.insert(0, expanded(named.splitlines()[0]))
    except (OSError, ValueError):
        pass  # most have none
    for settings in (*(each / "settings.json" for each in homes), *(home / name for name in SETTINGS)):
        if (moved := _moved(settings)) is not None:
            yield moved
    yield from (each / "models" for each in homes)


def _moved(settings: Path) -> Path | None:
    """Return the models folder that LM Studio's settings name."""
    try:
        found = json.loads(read_text(settings))
    except (OSError, ValueError, RecursionError):
        return None
    named = found.get("downloadsFolder") if isinstance(found, dict) else None
    return expanded(named) if isinstance(named, str) and named.strip() and "\0" not in named else None


def _model_folders(root: Path) -> Iterator[Path]:
    """Yield the folders of models: two levels below ``root``, in order."""
    try:
        publishers = sorted(each for each in root.iterdir() if each.is_dir())[:MOST]
        for publisher in publishers:
            yield from sorted(each for each in publisher.iterdir() if each.is_dir())[:MOST]
    except OSError:
        return  # not there, or not for us to read
