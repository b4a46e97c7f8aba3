"""Models on this disk: the embedded one, folders the user opened, the Hugging Face cache. Only read, without the hub's library."""

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokamac.engine.hub_cache import REFERENCE_BYTES
from tokamac.engine.hub_names import GUIDE, folder_name, id_of
from tokamac.engine.regular_files import read_text

Home = Literal["embedded", "folder", "cache"]
"""Where a model is: what may be done with it follows from that. A folder is the user's own."""

_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*(@[\w][\w./-]*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A model on this disk. ``model``: what loads it. nbytes: of all its files. whole: nothing lacks."""

    model: str
    home: Home
    path: Path
    nbytes: int
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Disk:
    """What is on this disk. free_bytes: room where downloads go; None is unknown."""

    models: tuple[OnDisk, ...] = ()
    free_bytes: int | None = None


def hub_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the Hugging Face cache's folder, without importing its library."""
    if named := environment.get("HF_HUB_CACHE"):
        return Path(named)
    home = environment.get("HF_HOME") or Path(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"


def names_on_disk(cache: Path) -> list[str]:
    """Return the ids in the cache that have weights, whole or not, and the embedded model first. Opens no file."""
    ids = [name for folder, name in _repositories(cache).items() if any(folder.glob("snapshots/*/*.safetensors"))]
    return [GUIDE, *ids]


def look(cache: Path, folders: Iterable[str]) -> Disk:
    """Return what is on disk. Reads configs and the headers of weights: some milliseconds a model."""
    return Disk(tuple(_models(cache, folders)), _free_bytes(cache))


def is_id(model: str) -> bool:
    """Whether a text can be a Hugging Face id, ``org/name[@revision]``, and no folder is called so."""
    return _ID.fullmatch(model) is not None and ".." not in model and not Path(model).is_dir()


def is_folder(model: str) -> bool:
    """Whether a text names a folder, and not the embedded model."""
    return model != GUIDE and bool(model.strip()) and Path(model).expanduser().is_dir()


def lasting(model: str) -> str:
    """Return what names the same model from every working directory: of a folder its whole path, all else as it is."""
    return str(Path(model).expanduser().absolute()) if is_folder(model) else model


def must_be_downloaded(model: str, cache: Path) -> bool:
    """Whether ``model`` is an id that is not whole in the cache."""
    return is_id(model) and not any(each.whole and each.model == model for each in _cached_as(cache, model))


def _models(cache: Path, folders: Iterable[str]) -> Iterator[OnDisk]:
    from tokamac.assets import asset_path

    embedded = asset_path("guide", "model")
    own = sum(path.stat().st_size for path in embedded.glob("*"))  # of links too: an editable install is made of them
    yield OnDisk(GUIDE, "embedded", embedded, own)
    for name in folders:
        path = Path(name).expanduser()
        if path.is_dir():
            yield OnDisk(name, "folder", path, _bytes(path.glob("*.*")))
    for folder, name in _repositories(cache).items():
        yield from _cached(folder, name)


def _cached_as(cache: Path, model: str) -> Iterator[OnDisk]:
    name = model.partition("@")[0]
    folder = cache / folder_name(name)
    return _cached(folder, name) if folder.is_dir() else iter(())


def _cached(folder: Path, name: str) -> Iterator[OnDisk]:
    """Yield the revisions of a repository that are whole, or the repository if none is but something of a model is there."""
    from tokamac.engine.hub_cache import is_whole, writes_text

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
    for reference in sorted(path for path in references.rglob("*") if path.is_file()):
        try:
            commit = read_text(reference, REFERENCE_BYTES, "ascii").strip()
        except (OSError, ValueError):
            continue  # not a reference: what it stands for can't be known
        if commit and "/" not in commit:
            yield reference.relative_to(references).as_posix(), folder / "snapshots" / commit


def _repositories(cache: Path) -> dict[Path, str]:
    """Return the folders of repositories in the cache, in order, with their ids."""
    try:
        named = {folder: id_of(folder.name) for folder in sorted(cache.iterdir())}
    except OSError:
        return {}  # no cache, or none that may be read: nothing to offer
    return {folder: name for folder, name in named.items() if name is not None}


def _bytes(paths: Iterable[Path]) -> int:
    """Return the bytes of files, links left out: they lead to files that are counted already."""
    return sum(path.lstat().st_size for path in paths if path.is_file() and not path.is_symlink())


def _free_bytes(cache: Path) -> int | None:
    """Return the free bytes of the disk where the cache is, or will be."""
    there = next((path for path in (cache, *cache.parents) if path.exists()), None)
    return None if there is None else shutil.disk_usage(there).free
