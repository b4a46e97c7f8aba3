"""Names of models: what the cache calls their folders, and which was probably meant by one under which there is none."""

from collections.abc import Iterator
from pathlib import Path

from tokamac.engine.spelling import nearest

GUIDE = "guide"
"""The embedded model."""
_PREFIX = "models--"
ALIKE = 0.75
"""Ids share much with one another, owners and endings above all, so that the usual likeness would find one for any."""


def folder_name(model: str) -> str:
    """Return what the cache calls the folder of a Hugging Face id: ``models--org--name``."""
    return _PREFIX + model.replace("/", "--")


def id_of(folder: str) -> str | None:
    """Return the Hugging Face id whose folder in the cache is called so; None for what is no model's."""
    return folder.removeprefix(_PREFIX).replace("--", "/", 1) if folder.startswith(_PREFIX) else None


def meant(model: str, cache: Path) -> str | None:
    """Return the embedded model, one of the catalogue or one in the folder ``cache``; None where none is called nearly so."""
    names = {GUIDE: GUIDE, **dict(_catalogued()), **dict(_in_cache(cache))}
    near = nearest(model, names, ALIKE)
    return None if near is None or names[near] == model else names[near]


def _catalogued() -> Iterator[tuple[str, str]]:
    """Yield the names that a model of the catalogue goes by, and the id of the repository that each stands for."""
    from tokamac.engine.limits.catalogue import catalogue

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
