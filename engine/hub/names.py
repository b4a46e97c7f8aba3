"""Model names: embedded ones, Hugging Face ids, and their folder names in the cache."""

import re
from collections.abc import Iterable

GUIDE = "guide"  # the embedded model
GUIDE_DRAFT = "guide-draft"  # what drafts for it, embedded too
EMBEDDED = {GUIDE: "model", GUIDE_DRAFT: "draft"}  # their folders in assets/guide
_PREFIX = "models--"
# A Hugging Face id, and maybe a revision, and which of its GGUF files.
ID = re.compile(r"(?P<id>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w][\w./-]*))?(:(?P<variant>[\w][\w.-]*))?", re.ASCII)


def folder_name(model: str) -> str:
    return _PREFIX + model.replace("/", "--")


def id_of(folder: str) -> str | None:
    return folder.removeprefix(_PREFIX).replace("--", "/", 1) if folder.startswith(_PREFIX) else None


def nearest(written: str, known: Iterable[str], alike: float = 0.6) -> str | None:
    """Return the name most similar to ``written``, ignoring case, with similarity ≥ ``alike`` (0…1), or None."""
    from difflib import get_close_matches

    names = {name.casefold(): name for name in known}
    near = get_close_matches(written.casefold(), names, 1, alike)
    return names[near[0]] if near else None
