"""The Hugging Face cache on disk, as other tools share it, and the model folders of other applications."""

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DownloadError, ModelError, ModelNotFoundError
from ..files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PEFT_WEIGHTS, TOKENIZER_FILES, expanded, is_dir, is_file, read_text
from ..gguf.places import parts_of, variants
from ..model.safetensors import find_shards, read_header
from .names import EMBEDDED, ID, folder_name, id_of, nearest

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

# <HF_HUB_CACHE>/models--org--name/refs/main              the commit of a branch
#                                  blobs/<sha256>         contents; <sha256>.incomplete during download
#                                  snapshots/<commit>/…   the files of a commit: links into blobs


# Ids share much with one another, owners and endings above all, so that the usual likeness would find one for any.
ALIKE = 0.75


def meant(model: str, cache: Path) -> str | None:
    """Return the embedded, catalogued or cached model with the closest name, or None."""
    names = {**{each: each for each in EMBEDDED}, **dict(_catalogued()), **dict(_in_cache(cache))}
    near = nearest(model, names, ALIKE)
    return None if near is None or names[near] == model else names[near]


def _catalogued() -> Iterator[tuple[str, str]]:
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
REFERENCE_BYTES = 4096  # the file of a branch, which holds a commit, at most
# How transformers ends the names of architectures that write text.
_GENERATES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


@dataclass(frozen=True, slots=True)
class Repo:
    """A repository of the hub. variant: which of its GGUF models."""

    id: str
    revision: str = "main"
    variant: str | None = None

    @property
    def folder(self) -> Path:
        return cache_folder() / folder_name(self.id)

    @property
    def reference(self) -> Path:
        return self.folder / "refs" / self.revision

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def __str__(self) -> str:
        variant = f":{self.variant}" if self.variant else ""
        return f"{self.id if self.revision == 'main' else f'{self.id}@{self.revision}'}{variant}"


@dataclass(frozen=True, slots=True)
class ModelOnDisk:
    """A model in the cache. ``nbytes`` covers all revisions; ``last_used_s`` is a Unix time or None."""

    id: str
    path: Path
    nbytes: int
    last_used_s: float | None
    whole: bool


def cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def whole_snapshot(repo: Repo) -> Path | None:
    folder = _recorded(repo)
    return folder if folder is not None and repo.variant is None and is_whole(folder) else None


def gguf_here(repo: Repo) -> Path | None:
    """Return a whole GGUF model's first file; None without one, or if several are meant."""
    folder = _recorded(repo)
    if folder is None:
        return None
    found = variants({str(file.relative_to(folder)): 0 for file in folder.rglob("*.gguf") if file.exists()})
    named = [each for each in found if repo.variant is None or each.is_called(repo.variant)]
    try:
        return parts_of(folder / named[0].files[0])[0] if len(named) == 1 else None
    except ModelError:  # a part has not arrived
        return None


def name_of_gguf(file: Path) -> str:
    """Return ``org/name:VARIANT`` of a cached file, or its path."""
    snapshot = next((folder for folder in file.parents if folder.parent.name == "snapshots"), file)
    name = f"{id_of(snapshot.parent.parent.name)}:{variants({file.name: 0})[0].name}"
    try:
        return name if gguf_here(repo_of(name)) == file else str(file)
    except ModelNotFoundError:  # a name that the hub does not have
        return str(file)


def whole_adapter(repo: Repo) -> Path | None:
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
    commit = repo.revision
    if not _COMMIT.fullmatch(commit):
        try:
            commit = read_text(repo.reference, REFERENCE_BYTES, "ascii").strip()
        except (OSError, ValueError):
            return None
    return repo.snapshot(commit) if commit and "/" not in commit else None


def is_whole(folder: Path) -> bool:
    if not _config(folder) or not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return False
    try:
        find_shards(folder)
    except (ModelError, OSError):
        return False
    return True


def list_models() -> tuple[ModelOnDisk, ...]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = scan_cache_dir(cache_folder()).repos
    except (CacheNotFound, ValueError):  # no cache yet; a file in its place
        return ()
    found = [_on_disk(repo) for repo in repos if repo.repo_type == "model"]
    return tuple(sorted((model for model in found if model is not None), key=lambda model: model.id.lower()))


def remove_model(model: str) -> int:
    """Delete all revisions, or one GGUF model; return the bytes freed. Raises ModelNotFoundError, DownloadError."""
    repo = repo_of(model)
    file = None if repo.variant is None else gguf_here(repo)
    if not repo.folder.is_dir() or (repo.variant is not None and file is None):
        raise ModelNotFoundError(f"{repo} is not on this disk", "`tokamac models list` shows what is.")
    if file is not None:
        return _remove_files(parts_of(file))
    freed = sum(path.lstat().st_size for path in repo.folder.rglob("*") if path.is_file() and not path.is_symlink())
    try:
        shutil.rmtree(repo.folder)
    except OSError as error:
        raise _undeletable(error) from error
    shutil.rmtree(cache_folder() / ".locks" / repo.folder.name, ignore_errors=True)  # empty files of the hub's client
    return freed


def _remove_files(links: Iterable[Path]) -> int:
    freed = 0
    try:
        for link in links:
            blob = link.resolve()
            freed += blob.stat().st_size
            blob.unlink()
            link.unlink(missing_ok=True)  # where the cache has no links, it was the file itself
    except OSError as error:
        raise _undeletable(error) from error
    return freed


def discard_unfinished(model: str) -> int:
    """Delete the parts of an unfinished download; return the bytes freed. Raises DownloadError."""

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
    config = _config(folder)
    architectures = config.get("architectures") or []
    if not architectures:
        return "model_type" in config
    return any(str(name).endswith(_GENERATES) for name in architectures)


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_text(folder / "config.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def repo_of(model: str) -> Repo:
    """Return the named repository. Raises ModelNotFoundError unless ``org/name[@revision][:VARIANT]``."""
    match = ID.fullmatch(model)
    if match is None or ".." in model or match["id"].endswith((".", "-")):
        raise _no_repository(model)
    return Repo(match["id"], match["revision"] or "main", match["variant"])


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


# <models>/<publisher>/<model>/config.json, *.safetensors    MLX and safetensors, loadable
# <models>/<publisher>/<model>/*.gguf                        GGUF, only counted

# ~/.lmstudio-home-pointer names LM Studio's home; its settings.json names a moved models folder.


HOMES = (".lmstudio", ".cache/lm-studio")
SETTINGS = ("Library/Application Support/LM Studio/settings.json", ".config/LM Studio/settings.json")
POINTER = ".lmstudio-home-pointer"
POINTER_BYTES = 4096
MOST = 1000  # folders that are looked at, at most: a moved models folder may be anything


@dataclass(frozen=True, slots=True)
class OtherModels:
    folders: tuple[Path, ...] = ()
    gguf: tuple[Path, ...] = ()


def lm_studio_models() -> OtherModels:
    folders: list[Path] = []
    gguf: list[Path] = []
    for root in dict.fromkeys(root.resolve() for root in _models_folders(Path.home())):
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
    try:
        found = json.loads(read_text(settings))
    except (OSError, ValueError, RecursionError):
        return None
    named = found.get("downloadsFolder") if isinstance(found, dict) else None
    return expanded(named) if isinstance(named, str) and named.strip() and "\0" not in named else None


def _model_folders(root: Path) -> Iterator[Path]:
    try:
        publishers = sorted(each for each in root.iterdir() if each.is_dir())[:MOST]
        for publisher in publishers:
            yield from sorted(each for each in publisher.iterdir() if each.is_dir())[:MOST]
    except OSError:
        return  # not there, or not for us to read
