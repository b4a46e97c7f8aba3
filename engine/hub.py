"""Where a model is: a folder, the embedded ``guide``, or a Hugging Face id, downloaded once and then used offline.

resolve("guide")                                  assets/guide/model
resolve("~/models/mine")                          that folder
resolve("mlx-community/Qwen3-4B-4bit")            its snapshot in the Hugging Face cache, downloaded unless whole
resolve("org/name@v1.0")                          a branch, a tag or a commit
"""

import re
from collections.abc import Callable
from pathlib import Path

from tokamac.engine.errors import ModelNotFoundError
from tokamac.engine.events import LoadProgress
from tokamac.engine.hub_cache import (
    ModelOnDisk,
    Repo,
    cache_folder,
    list_models,
    remove_model,
    whole_adapter,
    whole_snapshot,
)
from tokamac.engine.hub_names import GUIDE, meant

__all__ = [
    "GUIDE", "ModelOnDisk", "Repo", "find", "list_models", "pull", "remove_model", "repo_of", "resolve", "resolve_adapter",
]  # fmt: skip

Progress = Callable[[LoadProgress], None]
Cancelled = Callable[[], bool]

_ID = re.compile(r"(?P<id>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w][\w./-]*))?", re.ASCII)


def resolve(model: str | Path, *, progress: Progress | None = None, cancelled: Cancelled | None = None) -> Path:
    """Return the folder of ``model``, downloading it first when it is a Hugging Face id that is not whole on disk.

    progress: told the bytes so far and in all. cancelled: asked often; True ends the download, what arrived is kept.
    Raises ModelNotFoundError, ModelDamagedError, ModelUnsupportedError or DownloadError.
    """
    return find(model) or _download(repo_of(str(model)), progress, cancelled)


def resolve_adapter(
    adapter: str | Path, *, progress: Progress | None = None, cancelled: Cancelled | None = None
) -> Path:
    """Return the folder of an adapter, downloading it first when it is a Hugging Face id that is not whole on disk.

    Raises ModelNotFoundError, ModelDamagedError, ModelUnsupportedError or DownloadError.
    """
    path = Path(adapter).expanduser()
    if str(adapter).strip() and path.is_dir():
        return path
    if path.exists() or isinstance(adapter, Path) or _is_path(str(adapter)):
        what = "a file, not the folder of an adapter" if path.exists() else "no folder"
        raise ModelNotFoundError(f"{adapter} is {what}", "Name the folder that the adapter was saved to.")
    if _ID.fullmatch(str(adapter)) is None:
        raise ModelNotFoundError(
            f"there is no adapter {str(adapter)!r}", "Name a folder, or a Hugging Face id such as org/name."
        )
    repo = repo_of(str(adapter))
    from tokamac.engine.hub_download import download

    return whole_adapter(repo) or download(
        repo, progress or (lambda _: None), cancelled or (lambda: False), adapter=True
    )


def find(model: str | Path) -> Path | None:
    """Return the folder of ``model`` if it is whole on disk; None for a Hugging Face id that is not.

    Raises ModelNotFoundError for what is neither.
    """
    return _local(model) or whole_snapshot(repo_of(str(model)))


def pull(model: str, *, progress: Progress | None = None, cancelled: Cancelled | None = None) -> Path:
    """Return the folder of a Hugging Face id, brought up to date: the hub is asked even when the model is on disk.

    The embedded model is as new as the program. Raises like ``resolve``.
    """
    if model == GUIDE:
        return _embedded()
    return _download(repo_of(model), progress, cancelled)


def repo_of(model: str) -> Repo:
    """Return the repository that ``model`` names; raise ModelNotFoundError unless it is ``org/name[@revision]``."""
    match = _ID.fullmatch(model)
    if match is None or ".." in model or match["id"].endswith((".", "-")):
        raise _no_repository(model)
    return Repo(match["id"], match["revision"] or "main")


def _no_repository(model: str) -> ModelNotFoundError:
    if model == GUIDE:
        return ModelNotFoundError("guide is the embedded model", "It is always here, and can't be removed.")
    if not model.strip():
        return ModelNotFoundError(
            f"there is no model {model!r}", "Name a folder, a Hugging Face id such as org/name, or guide."
        )
    if Path(model).expanduser().is_dir():
        return ModelNotFoundError(
            f"{model} is a folder, and no Hugging Face id",
            "What is not from Hugging Face is yours to update and remove.",
        )
    near = meant(model, cache_folder())
    usual = "No folder has this name, and a Hugging Face id looks like org/name; guide is the embedded model."
    return ModelNotFoundError(f"there is no model {model!r}", usual if near is None else f"Did you mean {near}?")


def _local(model: str | Path) -> Path | None:
    """Return the folder that ``model`` names; None where it can only be an id."""
    if model == GUIDE:
        return _embedded()
    if not str(model).strip():
        return None
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelNotFoundError(f"{path} is a file, not a model folder", "Name the folder that holds config.json.")
    if isinstance(model, Path) or _is_path(model):
        hint = "Check the path, or name a Hugging Face id such as org/name."
        if path == Path(GUIDE):
            hint = f"The embedded model is just {GUIDE}: no slash, and no Path."
        raise ModelNotFoundError(f"there is no folder {path}", hint)
    return None


def _embedded() -> Path:
    from tokamac.assets import asset_path

    folder = asset_path("guide", "model")
    if not folder.is_dir():
        raise ModelNotFoundError("the embedded model is not installed", "Install Tokamac again, or name another model.")
    return folder


def _is_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~")) or model in (".", "..") or "\\" in model or model.endswith("/")


def _download(repo: Repo, progress: Progress | None, cancelled: Cancelled | None) -> Path:
    from tokamac.engine.hub_download import download

    return download(repo, progress or (lambda _: None), cancelled or (lambda: False))
