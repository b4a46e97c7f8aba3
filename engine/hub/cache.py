"""The Hugging Face cache on disk, as other tools share it: what is whole, what there is, and removing it.

<HF_HUB_CACHE>/models--org--name/refs/main              the commit that a branch stands for
                                 blobs/<sha256>         contents; <sha256>.incomplete while they arrive
                                 snapshots/<commit>/…   the files of a commit: links into blobs
"""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DownloadError, ModelError, ModelNotFoundError
from ..files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PEFT_WEIGHTS, TOKENIZER_FILES, expanded, is_dir, read_text
from ..model.safetensors import find_shards, read_header
from .names import EMBEDDED, ID, folder_name, id_of, nearest

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo


ALIKE = 0.75
"""Ids share much with one another, owners and endings above all, so that the usual likeness would find one for any."""


def meant(model: str, cache: Path) -> str | None:
    """Return an embedded model, one of the catalogue or one in the folder ``cache``; None where none is called nearly so."""
    names = {**{each: each for each in EMBEDDED}, **dict(_catalogued()), **dict(_in_cache(cache))}
    near = nearest(model, names, ALIKE)
    return None if near is None or names[near] == model else names[near]


def _catalogued() -> Iterator[tuple[str, str]]:
    """Yield the names that a model of the catalogue goes by, and the id of the repository that each stands for."""
    from ..perf.catalogue import catalogue

    for entry in catalogue():
        for name in (entry.name, *entry.aliases) if entry.repositories else ():
            yield name, entry.repositories[0].id
        for each in entry.repositories:
            yield each.tail, each.id
            yield each.id, each.id


def _in_cache(cache: Path) -> Iterator[tuple[str, str]]:
    for folder in cache.glob("*--*--*"):
        if model := id_of(folder.name):
            yield model, model
            yield model.rpartition("/")[2], model


_COMMIT = re.compile(r"[0-9a-f]{40}")
REFERENCE_BYTES = 4096
"""The file of a branch, which holds a commit, at most."""
_GENERATES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""How transformers ends the names of architectures that write text."""


@dataclass(frozen=True, slots=True)
class Repo:
    """A repository of the hub, at a branch, tag or commit."""

    id: str
    revision: str = "main"

    @property
    def folder(self) -> Path:
        """Its folder in the cache, there or not."""
        return cache_folder() / folder_name(self.id)

    @property
    def reference(self) -> Path:
        """The file that says which commit the revision was when it was last downloaded."""
        return self.folder / "refs" / self.revision

    def snapshot(self, commit: str) -> Path:
        """The folder with the files of a commit."""
        return self.folder / "snapshots" / commit

    def __str__(self) -> str:
        return self.id if self.revision == "main" else f"{self.id}@{self.revision}"


@dataclass(frozen=True, slots=True)
class ModelOnDisk:
    """A model in the cache. ``nbytes`` counts all its revisions; ``whole``: nothing lacks. last_used_s: a Unix time, or None."""

    id: str
    path: Path
    nbytes: int
    last_used_s: float | None
    whole: bool


def cache_folder() -> Path:
    """Return where the hub's client keeps its downloads (HF_HUB_CACHE, HF_HOME)."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def whole_snapshot(repo: Repo) -> Path | None:
    """Return the repository's folder on disk if all of it is there, else None. No network."""
    folder = _recorded(repo)
    return folder if folder is not None and is_whole(folder) else None


def whole_adapter(repo: Repo) -> Path | None:
    """Return the repository's folder on disk if it holds a whole adapter, else None. No network."""
    folder = _recorded(repo)
    if folder is None or not (folder / ADAPTER_CONFIG).is_file():
        return None
    for name in (ADAPTER_WEIGHTS, PEFT_WEIGHTS):
        try:
            if (folder / name).is_file():
                read_header(folder / name)
                return folder
        except (ModelError, OSError):
            return None
    return None


def _recorded(repo: Repo) -> Path | None:
    """Return the folder of the commit that the revision was when it was last downloaded; None where that is not known."""
    commit = repo.revision
    if not _COMMIT.fullmatch(commit):
        try:
            commit = read_text(repo.reference, REFERENCE_BYTES, "ascii").strip()
        except (OSError, ValueError):
            return None
    return repo.snapshot(commit) if commit and "/" not in commit else None


def is_whole(folder: Path) -> bool:
    """Whether a folder has a config, a tokenizer, and weights that are as long as their headers and the index say."""
    if not _config(folder) or not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return False
    try:
        find_shards(folder)
    except (ModelError, OSError):
        return False
    return True


def list_models() -> tuple[ModelOnDisk, ...]:
    """Return the models in the cache that write text, by id."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = scan_cache_dir(cache_folder()).repos
    except (CacheNotFound, ValueError):  # no cache yet; a file in its place
        return ()
    found = [_on_disk(repo) for repo in repos if repo.repo_type == "model"]
    return tuple(sorted((model for model in found if model is not None), key=lambda model: model.id.lower()))


def remove_model(model: str) -> int:
    """Delete a model, all revisions of it, from the cache, and return the bytes freed.

    Raises ModelNotFoundError where it is not there, DownloadError where it can't be deleted.
    """

    repo = repo_of(model)
    if not repo.folder.is_dir():
        raise ModelNotFoundError(f"{repo.id} is not on this disk", "`tokamac models list` shows what is.")
    freed = sum(path.lstat().st_size for path in repo.folder.rglob("*") if path.is_file() and not path.is_symlink())
    try:
        shutil.rmtree(repo.folder)
    except OSError as error:
        raise _undeletable(error) from error
    shutil.rmtree(cache_folder() / ".locks" / repo.folder.name, ignore_errors=True)  # empty files of the hub's client
    return freed


def discard_unfinished(model: str) -> int:
    """Delete what has arrived of a download that did not end, and return the bytes freed: none where nothing has arrived.

    A revision that is whole stays. Raises DownloadError where something can't be deleted.
    """

    repo = repo_of(model)
    if not repo.folder.is_dir():
        return 0  # it failed, or was given up, before its first byte
    if not any(is_whole(folder) for folder in (repo.folder / "snapshots").glob("*")):
        return remove_model(model)
    arrived = list((repo.folder / "blobs").glob("*.incomplete"))
    freed = sum(path.stat().st_size for path in arrived)
    try:
        for path in arrived:
            path.unlink()
    except OSError as error:
        raise _undeletable(error) from error
    return freed


def _undeletable(error: OSError) -> DownloadError:
    return DownloadError(f"{error.filename} can't be deleted: {error.strerror}", "Check its permissions.")


def _on_disk(repo: "CachedRepoInfo") -> ModelOnDisk | None:
    """Return a cached repository as a model; None when it does not write text."""
    revisions = sorted(repo.revisions, key=lambda revision: revision.last_modified)
    if not revisions:
        return None
    current = repo.refs.get("main", revisions[-1]).snapshot_path
    if not writes_text(current):
        return None
    arriving = list((repo.repo_path / "blobs").glob("*.incomplete"))
    if not arriving and not any(current.glob("model*.safetensors")):
        return None
    nbytes = repo.size_on_disk + sum(path.stat().st_size for path in arriving)
    return ModelOnDisk(repo.repo_id, current, nbytes, repo.last_accessed, is_whole(current))


def writes_text(folder: Path) -> bool:
    """Whether a folder has the config of a model that writes text."""
    config = _config(folder)
    architectures = config.get("architectures") or []
    if not architectures:
        return "model_type" in config
    return any(str(name).endswith(_GENERATES) for name in architectures)


def _config(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json; {} where there is none that can be read."""
    try:
        config = json.loads(read_text(folder / "config.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def repo_of(model: str) -> Repo:
    """Return the repository that ``model`` names; raise ModelNotFoundError unless it is ``org/name[@revision]``."""
    match = ID.fullmatch(model)
    if match is None or ".." in model or match["id"].endswith((".", "-")):
        raise _no_repository(model)
    return Repo(match["id"], match["revision"] or "main")


def _no_repository(model: str) -> ModelNotFoundError:
    if model in EMBEDDED:
        return ModelNotFoundError(f"{model} is embedded", "It is always here, and can't be removed.")
    if not model.strip():
        return ModelNotFoundError(
            f"there is no model {model!r}", "Name a folder, a Hugging Face id such as org/name, or guide."
        )
    if is_dir(expanded(model)):
        return ModelNotFoundError(
            f"{model} is a folder, not a Hugging Face id",
            "Your own folders are yours to update and remove.",
        )
    near = meant(model, cache_folder())
    usual = "No folder has this name, and a Hugging Face id looks like org/name; guide is the embedded model."
    return ModelNotFoundError(f"there is no model {model!r}", usual if near is None else f"Did you mean {near}?")
