"""GGUF models that other programs keep: Ollama's, LM Studio's, the Hugging Face cache's. They are read, and never changed."""

# Ollama's models folder has manifests/HOST/SPACE/NAME/TAG: JSON with layers, of which one is the model, in blobs/ by digest.

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ..errors import ModelDamagedError
from ..files import expanded, read_text
from .places import is_gguf, variants

OLLAMA, LM_STUDIO, HUB = "Ollama", "LM Studio", "the Hugging Face cache"
OLLAMA_FOLDERS = ("~/.ollama/models", "/usr/share/ollama/.ollama/models")  # the second is its Linux service's
STANDARD = ("registry.ollama.ai", "library")  # beginnings of a name that Ollama leaves out
MODEL_LAYER = "application/vnd.ollama.image.model"
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
MANIFEST_BYTES = 1 << 20
MOST_MODELS = 1_000  # of a program that are looked at


@dataclass(frozen=True, slots=True)
class KeptGguf:
    """A GGUF model of another program. name: loads it. file: its first, if split. nbytes: of all its files."""

    name: str
    owner: str
    file: Path
    nbytes: int


def kept_models(studio: Iterable[Path], snapshots: Iterable[Path]) -> tuple[KeptGguf, ...]:
    """Return what is there. studio, snapshots: folders of LM Studio and of the Hugging Face cache that hold GGUF files."""
    found = list(_ollama_models())
    for owner, folders in ((LM_STUDIO, studio), (HUB, snapshots)):
        found += (each for folder in folders for each in _in_folder(folder, owner))
    return tuple(found)


def ollama_file(name: str) -> Path | None:
    """Return the file of a model by Ollama's name for it, tag included (``smollm2:135m``); None if it has none."""
    if ":" not in name:
        return None
    return next((each.file for each in _ollama_models() if each.name == name), None)


def owner_of(name: str, models: Iterable[KeptGguf]) -> KeptGguf | None:
    """Return the model that a name or a path means."""
    path = os.path.realpath(expanded(name))
    return next((each for each in models if each.name == name or os.path.realpath(each.file) == path), None)


def _ollama_models() -> Iterator[KeptGguf]:
    given = os.environ.get("OLLAMA_MODELS", "").strip()
    for root in map(expanded, (given,) if given else OLLAMA_FOLDERS):
        manifests = root / "manifests"
        for manifest in islice(sorted(_glob(manifests, "*/*/*/*")), MOST_MODELS):
            *place, tag = manifest.relative_to(manifests).parts
            while len(place) > 1 and place[0] in STANDARD:
                place = place[1:]
            file = _model_of(manifest, root)
            with suppress(OSError):
                if file is not None and is_gguf(file):
                    yield KeptGguf(f"{'/'.join(place)}:{tag}", OLLAMA, file, file.stat().st_size)


def _glob(folder: Path, pattern: str) -> list[Path]:
    with suppress(OSError):
        return list(folder.glob(pattern))
    return []  # not there, or not for us to read


def _model_of(manifest: Path, root: Path) -> Path | None:
    try:
        layers = json.loads(read_text(manifest, MANIFEST_BYTES))["layers"]
        (digest,) = {layer["digest"] for layer in layers if layer["mediaType"] == MODEL_LAYER}
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ModelDamagedError):
        return None  # another program's, or half written
    if not isinstance(digest, str) or DIGEST.fullmatch(digest) is None:
        return None  # it could name any file
    return root / "blobs" / digest.replace(":", "-")


def _in_folder(folder: Path, owner: str) -> Iterator[KeptGguf]:
    sizes = dict[str, int]()
    for file in _glob(folder, "**/*.gguf"):
        with suppress(OSError):
            sizes[str(file.relative_to(folder))] = file.stat().st_size
    for each in sorted(variants(sizes), key=lambda variant: variant.files):
        file = folder / each.files[0]
        yield KeptGguf(str(file), owner, file, each.nbytes)
