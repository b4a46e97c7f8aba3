"""Local models: embedded, opened folders, models folder, LM Studio, Hugging Face cache; and short names (``qwen3:8b``)."""

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tokamac.engine.errors import ModelNotFoundError
from tokamac.engine.files import atomic_write, exists, expanded, is_dir, is_file, read_text
from tokamac.engine.hub.cache import REFERENCE_BYTES
from tokamac.engine.hub.names import EMBEDDED, GUIDE, ID, folder_name, id_of

from ..reports.verdict import poor_quality
from ..text.sanitise import sanitise_line

if TYPE_CHECKING:
    from tokamac.engine.gguf.library import KeptGguf

# Opened folders are stored, last one first, in a small JSON file next to the settings.


# What a text that should be a model names: the embedded one, an id of Hugging Face, a folder.


def is_id(model: str) -> bool:
    """Whether a text may be a Hugging Face ID ``org/name[@revision][:VARIANT]`` and isn't a folder."""
    return ID.fullmatch(model) is not None and ".." not in model and not is_dir(model)


def is_folder(model: str) -> bool:
    return model not in EMBEDDED and bool(model.strip()) and is_dir(expanded(model))


def is_short(model: str) -> bool:
    """Whether a text can only be a short name: not embedded, an ID or a path."""
    name = model.strip()
    return bool(name) and name not in EMBEDDED and not re.search(r"[/\\]|^[.~]", name) and not exists(expanded(name))


def lasting(model: str) -> str:
    """Return a name valid in any working directory: folders and files become absolute."""
    return str(expanded(model).absolute()) if is_folder(model) or is_file(expanded(model)) else model


def short_name(model: str) -> str:
    return sanitise_line(model.rstrip("/").rpartition("/")[2]) or sanitise_line(model)


def shown_name(model: str) -> str:
    """Return a Hugging Face id whole, and of a path its end: the rest would fill a line."""
    return short_name(model).removesuffix(".gguf") if model.startswith("/") else sanitise_line(model)


# Where a model is, which decides what can be done with it. A folder is the user's own; models: in the models folder;
# other: it is another program's, and only read.
Home = Literal["embedded", "folder", "models", "other", "cache"]


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A local model. model: loads it. nbytes: all files. whole: no file missing. context: trained tokens; None: unknown.

    worse: a sentence if a conversion degraded it clearly, else "". owner: the program that keeps it.
    """

    model: str
    home: Home
    path: Path
    nbytes: int
    whole: bool = True
    context: int | None = None
    worse: str = ""
    owner: str = ""

    @property
    def fingerprint(self) -> str:
        """What changes when its weights do."""
        times = [part.stat().st_mtime for part in self.path.glob("*.safetensors")]
        return f"{max(times, default=0):.0f}"


@dataclass(frozen=True, slots=True)
class LocalModels:
    """Local models. free_bytes: on the download disk; None: unknown."""

    models: tuple[OnDisk, ...] = ()
    free_bytes: int | None = None


def hub_cache(environment: Mapping[str, str] = os.environ) -> Path:
    if named := environment.get("HF_HUB_CACHE"):
        return Path(named)
    home = environment.get("HF_HOME") or Path(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return expanded(home) / "hub"


def names_on_disk(cache: Path) -> list[str]:
    """Return the embedded model and cached IDs with weights, complete or not; opens no file."""
    ids = [name for folder, name in _repositories(cache).items() if any(folder.glob("snapshots/*/*.safetensors"))]
    return [GUIDE, *ids]


def models_on_disk(cache: Path, folders: Iterable[str], models_folder: Path | None = None) -> LocalModels:
    """Return local models, reading configs and weight headers (milliseconds per model).

    folders: opened by the user. models_folder: converted models. LM Studio's are found automatically.
    """
    from tokamac.engine.gguf.library import LM_STUDIO
    from tokamac.engine.hub.cache import lm_studio_models

    found = {each.path.resolve(): each for each in _models(cache, folders)}
    others = lm_studio_models()
    for home, paths in (("models", _converted(models_folder)), ("other", others.folders)):
        for path in paths:
            if path.resolve() not in found:
                nbytes = _bytes(path.glob("*.*"))
                own = OnDisk(str(path), "models", path, nbytes)
                found[path.resolve()] = own if home == "models" else replace(own, home="other", owner=LM_STUDIO)
    models = [replace(each, context=_context(each.path), worse=poor_quality(each.path)) for each in found.values()]
    models += (OnDisk(each.name, "other", each.file, each.nbytes, owner=each.owner) for each in gguf_models(cache))
    return LocalModels(tuple(models), _free_bytes(cache))


def gguf_models(cache: Path) -> "tuple[KeptGguf, ...]":
    """Return GGUF models of other programs and of the Hugging Face cache."""
    from tokamac.engine.gguf.library import HUB, kept_models
    from tokamac.engine.hub.cache import lm_studio_models, name_of_gguf

    snapshots = (path for each in _repositories(cache) for path in each.glob("snapshots/*"))
    found = kept_models(lm_studio_models().gguf, snapshots)
    return tuple(replace(each, name=name_of_gguf(each.file)) if each.owner == HUB else each for each in found)


def embedding_models(cache: Path, folders: Iterable[str], models_folder: Path | None = None) -> list[OnDisk]:
    """Return models that make vectors of texts, smallest first."""
    from tokamac.engine.hub.cache import is_whole, lm_studio_models
    from tokamac.engine.model.config import embeds

    cached = [
        OnDisk(name if revision == "main" else f"{name}@{revision}", "cache", path, 0)
        for folder, name in _repositories(cache).items()
        for revision, path in _revisions(folder)
    ]
    places = [*map(expanded, folders), *_converted(models_folder), *lm_studio_models().folders]
    found = [*cached, *(OnDisk(str(path), "folder", path, 0) for path in dict.fromkeys(places))]
    able = [each for each in found if (embeds(each.path) or "embed" in short_name(each.model).casefold())]
    sized = [
        replace(each, nbytes=sum(part.stat().st_size for part in each.path.glob("*.safetensors")))
        for each in able
        if is_whole(each.path)
    ]
    return sorted(sized, key=lambda each: each.nbytes)


def embedding_model(wanted: str, home: Path, models_folder: Path) -> OnDisk:
    """Return the one that is wanted, else the smallest here. Raises ModelNotFoundError."""
    here = embedding_models(hub_cache(), Folders(home / FOLDERS_FILE).all(), models_folder)
    if wanted and is_folder(wanted):
        path = expanded(wanted).absolute()
        return OnDisk(str(path), "folder", path, sum(part.stat().st_size for part in path.glob("*.safetensors")))
    fitting = [each for each in here if wanted in ("", each.model)]
    if fitting:
        return fitting[0]
    missing = (
        f"the embedding model {sanitise_line(wanted)} is not on this disk" if wanted else "no embedding model is here"
    )
    raise ModelNotFoundError(missing, f"`tokamac models pull {wanted or EMBEDDING_MODEL}` brings one.")


def _converted(models_folder: Path | None) -> list[Path]:
    if models_folder is None or not is_dir(models_folder):
        return []
    return sorted(config.parent for config in models_folder.glob("[!.]*/config.json"))


def _context(folder: Path) -> int | None:
    from tokamac.engine.model.config import context_length, normalise

    try:
        config = json.loads(read_text(folder / "config.json"))
        return context_length(normalise(config)) if isinstance(config, dict) else None
    except Exception:  # a config may hold anything; whether it loads is asked elsewhere
        return None


def must_be_downloaded(model: str, cache: Path) -> bool:
    """Whether ``model`` is an ID that isn't complete in the cache."""
    return is_id(model) and not any(each.whole and each.model == model for each in _cached_as(cache, model))


def is_gone(model: str) -> bool:
    return (
        must_be_downloaded(model, hub_cache())
        if is_id(model)
        else Path(model).is_absolute() and not exists(Path(model))
    )


def require(model: str, profile: str, pulls: str = "/pull") -> None:
    """Raise ModelNotFoundError if ``model`` isn't local. profile: needs it. pulls: download command to suggest."""
    needs = f"The profile {sanitise_line(profile)} needs {sanitise_line(model)}, which is not on this disk"
    if must_be_downloaded(model, hub_cache()):
        raise ModelNotFoundError(needs, f"{pulls} {sanitise_line(model)} downloads it.")
    if model.startswith(("/", "~", ".")) and not exists(expanded(model)):
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
    """Yield a repository's complete revisions, or the repository if only part of a model is there."""
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
    try:
        named = {folder: id_of(folder.name) for folder in sorted(cache.iterdir())}
    except OSError:
        return {}  # no cache, or none that may be read
    return {folder: name for folder, name in named.items() if name is not None}


def _bytes(paths: Iterable[Path]) -> int:
    """Sum file sizes, skipping links (their targets are counted already) and unreadable files."""
    nbytes = 0
    for path in paths:
        with suppress(OSError):
            at = path.lstat()
            nbytes += at.st_size if stat.S_ISREG(at.st_mode) else 0
    return nbytes


def _free_bytes(cache: Path) -> int | None:
    there = next((path for path in (cache, *cache.parents) if exists(path)), None)
    return None if there is None else shutil.disk_usage(there).free


FOLDERS_FILE = "folders.json"
EMBEDDING_MODEL = "Qwen/Qwen3-Embedding-0.6B"  # what is offered where there is none

MOST = 30


class Folders:
    """Opened folders, stored in ``path``; errors are ignored, as losing it only costs some typing."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def all(self) -> tuple[str, ...]:
        try:
            found = json.loads(read_text(self._path))
        except (OSError, ValueError, RecursionError):
            return ()
        return tuple(name for name in found if isinstance(name, str))[:MOST] if isinstance(found, list) else ()

    def remember(self, folder: str) -> None:
        name = str(expanded(folder).absolute())
        known = self.all()
        if known[:1] != (name,):
            self._write([name, *(each for each in known if each != name)][:MOST])

    def forget(self, folder: str) -> None:
        self._write([each for each in self.all() if each != folder])

    def _write(self, names: list[str]) -> None:
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self._path, f".{self._path.name}.") as file:
                file.write(json.dumps(names).encode())


# A short name must match one catalogue row or local model, else near names are listed. A row resolves to its local copy,
# else to its first repository.


MOST_NAMED = 6
ALIKE = 0.5  # least likeness (1 is equal) of a name that is offered in place of an unknown one
EXACT, BEGINS, CONTAINS, UNLIKE = 3, 2, 1, 0
# e2b, 4bit, 3.2, llama: so llama3.2 and Llama-3.2 are the same two words.
_WORD = re.compile(r"[a-z](?=\d)\d+(?:\.\d+)*b\b|\d+(?:\.\d+)*[a-z]*|[a-z]+")
_PACKING = re.compile(r"\d+bit|instruct|it|mlx|qat|dwq")


@dataclass(frozen=True, slots=True)
class _Row:
    """A named model and what loads it: local copies or repositories."""

    name: str
    here: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()


def local_models() -> LocalModels:
    from .. import settings

    path = settings.default_path()
    folders = Folders(path.with_name(FOLDERS_FILE)).all()
    return models_on_disk(hub_cache(), folders, settings.load(path).settings.models_path)


def resolve(written: str, local: Callable[[], LocalModels] = local_models) -> str:
    """Resolve a short name; other names are returned unchanged.

    Raises ModelNotFoundError, listing names, for no match or several.
    """
    if not is_short(written):
        return written
    disk = local()
    if any(each.model == written for each in disk.models):  # Ollama's names are like that
        return written
    words, rows = _words(written), tuple(_rows(disk))
    best = max((_likeness(words, row) for row in rows), default=UNLIKE)
    if best == UNLIKE:
        raise _unknown(written, rows)
    fitting = [_narrowed(words, row) for row in rows if _likeness(words, row) == best]
    fitting = [row for row in fitting if row.here] or fitting
    if len(fitting) > 1:
        names = [row.name if _alike(words, row.name) else short_name((*row.here, *row.elsewhere)[0]) for row in fitting]
    elif len(names := list(fitting[0].here or fitting[0].elsewhere[:1])) == 1:
        return names[0]
    raise ModelNotFoundError(f"{written!r} matches several models: {_listed(names)}", "Name one of them.")


def _rows(disk: LocalModels) -> Iterator[_Row]:
    from tokamac.engine.perf.catalogue import catalogue

    local: dict[tuple[str, ...], list[str]] = {}
    for each in disk.models:
        if each.whole and each.home != "embedded":
            local.setdefault(_model_words(each.model), []).append(each.model)
    for entry in catalogue():
        ids = [each.id for each in entry.repositories]
        here = [model for key in dict.fromkeys(map(_model_words, (entry.name, *ids))) for model in local.pop(key, ())]
        if here or ids:
            yield _Row(entry.name, tuple(here), tuple(name for name in ids if name not in here))
    yield from (_Row(model, (model,)) for models in local.values() for model in models)


def _model_words(name: str) -> tuple[str, ...]:
    return tuple(word for word in _words(short_name(name).partition("@")[0]) if not _PACKING.fullmatch(word))


def _words(name: str) -> tuple[str, ...]:
    return tuple(word for word in _WORD.findall(name.casefold()) if word != "latest")


def _alike(wanted: Sequence[str], name: str) -> int:
    """Score a match: all words, a prefix, or a subsequence starting with the first word."""
    words = _words(short_name(name))
    if not wanted or not words or words[0] != wanted[0]:
        return UNLIKE
    if words[: len(wanted)] == tuple(wanted):
        return EXACT if len(words) == len(wanted) else BEGINS
    left = iter(words)
    return CONTAINS if all(word in left for word in wanted) else UNLIKE


def _likeness(wanted: Sequence[str], row: _Row) -> int:
    return max(_alike(wanted, name) for name in (row.name, *row.here, *row.elsewhere))


def _narrowed(wanted: Sequence[str], row: _Row) -> _Row:
    """Keep a row's best matching models; all of them if only the row's name matches."""
    best = max(_alike(wanted, model) for model in (*row.here, *row.elsewhere))
    here, elsewhere = (
        tuple(model for model in models if best == UNLIKE or _alike(wanted, model) == best)
        for models in (row.here, row.elsewhere)
    )
    return _Row(row.name, here, elsewhere)


def _unknown(written: str, rows: Sequence[_Row]) -> ModelNotFoundError:
    from difflib import get_close_matches

    known = [GUIDE, *(short_name(name) for row in rows for name in (row.name, *row.here, *row.elsewhere))]
    names = {name.casefold(): name for name in known}
    near = [names[each] for each in get_close_matches(written.casefold(), names, 3, ALIKE)]
    said = f"there is no model {written!r}{f'; the nearest are {_listed(near)}' if near else ''}"
    return ModelNotFoundError(said, "Name a folder, a Hugging Face ID, or one that `tokamac models suggest` lists.")


def _listed(names: Sequence[str]) -> str:
    shown, more = names[:MOST_NAMED], len(names) - MOST_NAMED
    return f"{', '.join(shown)}{f' and {more} more' if more > 0 else ''}"
