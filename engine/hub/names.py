"""Names of models: the embedded ones, Hugging Face ids, and the folders that hold these in its cache."""

import re
from collections.abc import Iterable

GUIDE = "guide"
"""The embedded model."""
GUIDE_DRAFT = "guide-draft"
"""What drafts for it, embedded too."""
EMBEDDED = {GUIDE: "model", GUIDE_DRAFT: "draft"}
"""Their folders in assets/guide."""
_PREFIX = "models--"
ID = re.compile(r"(?P<id>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w][\w./-]*))?", re.ASCII)
"""A Hugging Face id, and maybe a revision."""


def folder_name(model: str) -> str:
    """Return what the cache calls the folder of a Hugging Face id: ``models--org--name``."""
    return _PREFIX + model.replace("/", "--")


def id_of(folder: str) -> str | None:
    """Return the Hugging Face id whose folder in the cache is called so; None for what is no model's."""
    return folder.removeprefix(_PREFIX).replace("--", "/", 1) if folder.startswith(_PREFIX) else None


def nearest(written: str, known: Iterable[str], alike: float = 0.6) -> str | None:
    """Return the name in ``known`` that ``written`` is most like, whatever their case; None where none is like it.

    alike: the least likeness, where 1 is the same.
    """
    from difflib import get_close_matches

    names = {name.casefold(): name for name in known}
    near = get_close_matches(written.casefold(), names, 1, alike)
    return names[near[0]] if near else None
