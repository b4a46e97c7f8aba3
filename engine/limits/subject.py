"""The model that is asked about, wherever it is: its files here, only its config here, or only its row in the catalogue."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokamac.engine.adapters import Adapter
from tokamac.engine.config import read_config
from tokamac.engine.errors import ModelNotFoundError, ModelUnsupportedError
from tokamac.engine.limits.catalogue import Entry, Repository, find
from tokamac.engine.limits.config_cost import Packing
from tokamac.engine.shards import INDEX, PICKLES

Known = Literal["files", "config", "catalogue"]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to weigh. name: as the user knows it; of the catalogue, the repository. config: normalised.

    known: by what it is known. packing: how it is packed, where the config does not say. folder: of its weights, if they are here.
    adapter: added to it.
    """

    name: str
    config: Mapping[str, Any]
    known: Known
    packing: Packing | None = None
    folder: Path | None = None
    adapter: Adapter | None = None


def subject_of(model: str | Path) -> Subject:
    """Return the model that a folder, "guide", a Hugging Face id or a name of the catalogue stands for. Downloads nothing.

    Raises ModelNotFoundError, ModelDamagedError, ModelUnsupportedError.
    """
    from tokamac.engine import hub

    entry = find(str(model))
    try:
        folder = hub.find(model)
    except ModelNotFoundError:
        if entry is None:
            raise
        folder = None
    if folder is not None:
        return subject_of_folder(folder, str(model))
    if entry is None:
        raise ModelNotFoundError(
            f"{model} is neither whole on this disk nor in the catalogue", f"Download it: tokamac models pull {model}."
        )
    return subject_of_entry(entry, entry.repository(str(model)) or next(iter(entry.repositories), None))


def subject_of_folder(folder: Path, name: str | None = None) -> Subject:
    """Return the model in a folder, with its weights or without any.

    Raises ModelNotFoundError for no folder, ModelDamagedError for one without a config. Whether weights are whole is seen when they
    are weighed.
    """
    if not folder.is_dir():
        raise ModelNotFoundError(f"{folder} is not a folder", "Name a model folder, a Hugging Face id, or `guide`.")
    config = read_config(folder)
    weights = any(True for pattern in ("model*.safetensors", INDEX, *PICKLES) for _ in folder.glob(pattern))
    return Subject(name or str(folder), config, "files" if weights else "config", folder=folder if weights else None)


def subject_of_entry(entry: Entry, repository: Repository | None) -> Subject:
    """Return a model of the catalogue, as a repository packs it, or in 16 bits.

    Raises ModelUnsupportedError where its config is not known.
    """
    config = entry.config if repository is None else entry.config_of(repository)
    if config is None:
        raise ModelUnsupportedError(
            f"the config of {entry.name} is not known here",
            f"Download it first: tokamac models pull {repository.id if repository else entry.name}.",
        )
    packing = None if repository is None else repository.packing
    return Subject(entry.name if repository is None else repository.id, config, "catalogue", packing)
