"""The models on this disk.

They are the embedded model, folders that the user opened (remembered in a small JSON file beside the settings, last one first), the
models folder, LM Studio's, and the Hugging Face cache, read without the hub's library.
"""

import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tokamac.engine.errors import ModelNotFoundError
from tokamac.engine.files import atomic_write, exists, expanded, is_dir, is_file, read_text
from tokamac.engine.hub.cache import REFERENCE_BYTES
from tokamac.engine.hub.names import GUIDE, folder_name, id_of

from ..sanitise import sanitise_line
from .names import is_folder, is_id

Home = Literal["embedded", "folder", "models", "other", "cache"]
"""Where a model is, which decides what can be done with it. A folder is the user's own; models: in the models folder; other: it is
another program's, and only read."""


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A model on this disk. ``model``: what loads it. nbytes: of all its files. whole: no file is missing.

    context: tokens that it was made for; None is unknown.
    """

    model: str
    home: Home
    path: Path
    nbytes: int
    whole: bool = True
    context: int | None = None


@dataclass(frozen=True, slots=True)
class LocalModels:
    """The models on this disk. free_bytes: free space where downloads go; None is unknown. gguf: how many can't be read."""

    models: tuple[OnDisk, ...] = ()
    free_bytes: int | None = None
    gguf: int = 0


def hub_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the Hugging Face cache's folder, without importing its library."""
    if named := environment.get("HF_HUB_CACHE"):
        return Path(named)
    home = environment.get("HF_HOME") or Path(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return expanded(home) / "hub"


def names_on_disk(cache: Path) -> list[str]:
    """Return the embedded model and the IDs in the cache that have weights, whole or not. Opens no file."""
    ids = [name for folder, name in _repositories(cache).items() if any(folder.glob("snapshots/*/*.safetensors"))]
    return [GUIDE, *ids]


def models_on_disk(cache: Path, folders: Iterable[str], models_folder: Path | None = None) -> LocalModels:
    """Return the models on disk. Reads configs and the headers of weights: some milliseconds a model.

    folders: those that the user opened. models_folder: where converted models go. LM Studio's are found by themselves.
    """
    from tokamac.engine.hub.other_apps import lm_studio_models

    found = {each.path.resolve(): each for each in _models(cache, folders)}
    others = lm_studio_models()
    for home, paths in (("models", _converted(models_folder)), ("other", others.folders)):
        for path in paths:
            if path.resolve() not in found:
                nbytes = _bytes(path.glob("*.*"))
                found[path.resolve()] = OnDisk(str(path), "models" if home == "models" else "other", path, nbytes)
    gguf = len(others.gguf) + sum(any(folder.glob("snapshots/*/*.gguf")) for folder in _repositories(cache))
    models = tuple(replace(each, context=_context(each.path)) for each in found.values())
    return LocalModels(models, _free_bytes(cache), gguf)


def _converted(models_folder: Path | None) -> list[Path]:
    """Return the models in the models folder."""
    if models_folder is None or not is_dir(models_folder):
        return []
    return sorted(config.parent for config in models_folder.glob("[!.]*/config.json"))


def _context(folder: Path) -> int | None:
    """Return the tokens that the model in ``folder`` was made for."""
    from tokamac.engine.model.config import context_length, normalise

    try:
        config = json.loads(read_text(folder / "config.json"))
        return context_length(normalise(config)) if isinstance(config, dict) else None
    except Exception:  # a config may hold anything; whether it loads is asked elsewhere
        return None


def must_be_downloaded(model: str, cache: Path) -> bool:
    """Whether ``model`` is an id that is not whole in the cache."""
    return is_id(model) and not any(each.whole and each.model == model for each in _cached_as(cache, model))


def require(model: str, profile: str, pulls: str = "/pull") -> None:
    """Raise ModelNotFoundError where ``model`` is not on this disk. profile: which needs it. pulls: the command that downloads."""
    needs = f"The profile {sanitise_line(profile)} needs {sanitise_line(model)}, which is not on this disk"
    if must_be_downloaded(model, hub_cache()):
        raise ModelNotFoundError(needs, f"{pulls} {sanitise_line(model)} downloads it.")
    if model.startswith(("/", "~", ".")) and not is_folder(model):
        raise ModelNotFoundError(needs, "Load another model, then /profile save NAME changes it.")


def _models(cache: Path, folders: Iterable[str]) -> Iterator[OnDisk]:
    from tokamac.assets import asset_path

    embedded = asset_path("guide", "model")
    own = sum(path.stat().st_size for path in embedded.glob("*"))  # of links too: an editable install is made of them
    yield OnDisk(GUIDE, "embedded", embedded, own)
    for name in folders:
        path = expanded(name)
        if is_dir(path):
            yield OnDisk(name, "folder", path, _bytes(path.glob("*.*")))
    for folder, name in _repositories(cache).items():
        yield from _cached(folder, name)


def _cached_as(cache: Path, model: str) -> Iterator[OnDisk]:
    name = model.partition("@")[0]
    folder = cache / folder_name(name)
    return _cached(folder, name) if is_dir(folder) else iter(())


def _cached(folder: Path, name: str) -> Iterator[OnDisk]:
    """Yield the whole revisions of a repository; else the repository, if part of a model is there."""
    from tokamac.engine.hub.cache import is_whole, writes_text

    nbytes = _bytes(folder.rglob("*"))
    whole = [(revision, path) for revision, path in _revisions(folder) if is_whole(path) and writes_text(path)]
    for revision, path in whole:
        yield OnDisk(name if revision == "main" else f"{name}@{revision}", "cache", path, nbytes)
    if not whole:
        snapshots = [path for path in folder.glob("snapshots/*") if writes_text(path)]
        begun = any(folder.glob("blobs/*.incomplete")) or any(
            any(path.glob("model*.safetensors")) for path in snapshots
        )
        if snapshots and begun:
            yield OnDisk(name, "cache", snapshots[-1], nbytes, whole=False)


def _revisions(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the branches and tags that were downloaded, with their snapshots."""
    references = folder / "refs"
    if not is_dir(references):
        return  # rglob would raise where it may not be looked into
    for reference in sorted(path for path in references.rglob("*") if is_file(path)):
        try:
            commit = read_text(reference, REFERENCE_BYTES, "ascii").strip()
        except (OSError, ValueError):
            continue  # not a readable reference
        if commit and "/" not in commit:
            yield reference.relative_to(references).as_posix(), folder / "snapshots" / commit


def _repositories(cache: Path) -> dict[Path, str]:
    """Return the folders of repositories in the cache, in order, with their ids."""
    try:
        named = {folder: id_of(folder.name) for folder in sorted(cache.iterdir())}
    except OSError:
        return {}  # no cache, or none that may be read
    return {folder: name for folder, name in named.items() if name is not None}


def _bytes(paths: Iterable[Path]) -> int:
    """Return the bytes of files, without links: their targets are counted already. What may not be read counts nothing."""
    nbytes = 0
    for path in paths:
        with suppress(OSError):
            at = path.lstat()
            nbytes += at.st_size if stat.S_ISREG(at.st_mode) else 0
    return nbytes


def _free_bytes(cache: Path) -> int | None:
    """Return the free bytes on the disk of the cache."""
    there = next((path for path in (cache, *cache.parents) if exists(path)), None)
    return None if there is None else shutil.disk_usage(there).free


FOLDERS_FILE = "folders.json"

MOST = 30


class Folders:
    """The list of folders in the file ``path``. Losing it costs a little typing, so errors are ignored."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def all(self) -> tuple[str, ...]:
        """Return the folders, whether they still exist or not."""
        try:
            found = json.loads(read_text(self._path))
        except (OSError, ValueError, RecursionError):
            return ()
        return tuple(name for name in found if isinstance(name, str))[:MOST] if isinstance(found, list) else ()

    def remember(self, folder: str) -> None:
        """Put a folder first."""
        name = str(expanded(folder).absolute())
        known = self.all()
        if known[:1] != (name,):
            self._write([name, *(each for each in known if each != name)][:MOST])

    def forget(self, folder: str) -> None:
        """Remove a folder from the list; its files stay."""
        self._write([each for each in self.all() if each != folder])

    def _write(self, names: list[str]) -> None:
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self._path, f".{self._path.name}.") as file:
                file.write(json.dumps(names).encode())
