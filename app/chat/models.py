"""The models to choose from: on disk, downloading, in the catalogue, or typed; and how each would run on this machine.

On disk are the embedded model, folders that the user opened (remembered in a small JSON file beside the settings, last one first)
and the Hugging Face cache, read without the hub's library. How fast a model would be here is asked of the engine's process; the
answers come one model at a time. A question that another of its kind displaced (what-if asks for the catalogue too), or whose
process is gone, is asked again when the estimates are next wanted.
"""

import json
import math
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

from tokamac.engine.errors import ModelNotFoundError
from tokamac.engine.files import atomic_write, exists, expanded, is_dir, is_file, read_text
from tokamac.engine.hub.cache import REFERENCE_BYTES
from tokamac.engine.hub.names import EMBEDDED, GUIDE, folder_name, id_of
from tokamac.engine.hub.search import good_for
from tokamac.engine.options import KVSpec

from .. import units
from ..backend.command_process import HubModelLine
from ..backend.protocol import Group, ModelLine, Question, WhatIf
from ..sanitise import sanitise_line
from .jobs import Download, DownloadStage

Home = Literal["embedded", "folder", "models", "other", "cache"]
"""Where a model is, which decides what can be done with it. A folder is the user's own; models: in the models folder; other: it is
another program's, and only read."""

_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*(@[\w][\w./-]*)?", re.ASCII)


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


def is_id(model: str) -> bool:
    """Whether a text can be a Hugging Face ID, ``org/name[@revision]``, and is not the name of a folder."""
    return _ID.fullmatch(model) is not None and ".." not in model and not is_dir(model)


def is_folder(model: str) -> bool:
    """Whether a text names a folder, and not an embedded model."""
    return model not in EMBEDDED and bool(model.strip()) and is_dir(expanded(model))


def lasting(model: str) -> str:
    """Return a name of the model for every working directory: of a folder its absolute path."""
    return str(expanded(model).absolute()) if is_folder(model) else model


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


FILE = "folders.json"
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


START_TPS = 15.0
"""Tokens a second that the model to start with is expected to reach, at least: three times as fast as people read."""

ASSUMED_BPS = 100e6 / 8
"""Bytes a second of a connection of 100 Mbit/s, where no download was measured here."""

Grounds = Literal["expected speed", "limit", "size"]
"""What a choice rests on: the expected speed; the hardware limit, where no speed is expected; the size, where neither is known."""


@dataclass(frozen=True, slots=True)
class StartHere:
    """The one model to start with on a machine. None is unknown.

    Attributes:
        ceiling_tps: what the hardware allows, at most.
        download_s: seconds to download it at ``download_bps``, else at 100 Mbit/s.
        download_bps: bytes a second of the last download here.
    """

    model: str
    download_bytes: int | None
    expected_tps: float | None
    ceiling_tps: float | None
    download_s: float | None
    download_bps: float | None
    grounds: Grounds

    @property
    def facts(self) -> str:
        """Size, speed and time in one line: ``2.28 GB · about 62 tok/s · at 100 Mbit/s about 3 min to download``."""
        return " · ".join((units.size(self.download_bytes), self.speed, self.wait))

    @property
    def speed(self) -> str:
        """How fast it is here, in words."""
        if self.expected_tps is not None:
            return f"about {self.expected_tps:.0f} tok/s"
        unmeasured = "speed not measured yet"
        return unmeasured if self.ceiling_tps is None else f"{unmeasured}, at most {units.rate(self.ceiling_tps)}"

    @property
    def wait(self) -> str:
        """How long the download takes, in words."""
        if self.download_s is None:
            return "download time unknown"
        takes = f"about {units.minutes(self.download_s)} to download".replace("about under", "under")
        return takes if self.download_bps else f"at 100 Mbit/s {takes}"


@dataclass(frozen=True, slots=True)
class ModelAdvice:
    """Models of one machine in their groups, each group best first.

    Attributes:
        start: the one to start with; it leads its group, too.
        lines: all of them, group after group.
        note: what the choice rests on, or why there is none; "" where there is nothing to add.
    """

    start: StartHere | None
    lines: tuple[ModelLine, ...]
    note: str = ""

    def of(self, group: Group) -> tuple[ModelLine, ...]:
        """Return the models of a group."""
        return tuple(line for line in self.lines if line.group == group)


def advise(lines: Iterable[ModelLine], download_bps: float | None = None) -> ModelAdvice:
    """Return models in groups, and the one to start with.

    Only a speed that is expected here recommends a model. Where none is expected of any, the choice rests on the hardware limit,
    or on the size alone, and ``note`` says so.

    Args:
        lines: models to download, as they would run on one machine, ranked (``rank`` in engine/perf/what_if.py).
        download_bps: bytes a second of the last download here; None is unknown.
    """
    ranked = sorted(lines, key=lambda line: get_args(Group).index(line.group))
    chosen, grounds, note = _first_choice(ranked)
    if chosen is None:
        return ModelAdvice(None, tuple(ranked), note)
    nbytes, figures = chosen.download_bytes, chosen.figures
    wait_s = None if nbytes is None else nbytes / (download_bps or ASSUMED_BPS)
    start = StartHere(chosen.model, nbytes, figures.expected_tps, figures.ceiling_tps, wait_s, download_bps, grounds)
    return ModelAdvice(start, tuple(ranked), note)


def _first_choice(ranked: Sequence[ModelLine]) -> tuple[ModelLine | None, Grounds, str]:
    """Return the model to start with, what it was chosen by, and a note on that."""
    recommended = [line for line in ranked if line.group == "recommended"]
    if recommended:
        quick = [line for line in recommended if (line.figures.expected_tps or 0.0) >= START_TPS]
        if quick:
            return quick[0], "expected speed", ""
        fastest = max(recommended, key=lambda line: line.figures.expected_tps or 0.0).figures.expected_tps
        note = f"No model is expected to reach {START_TPS:.0f} tok/s here; the fastest manages {units.rate(fastest)}."
        return None, "expected speed", note
    untimed = [line for line in ranked if line.group == "speed unknown"]
    if not untimed:
        unsure = any(line.group == "fit unknown" for line in ranked)
        note = "whether it fits is not known" if unsure else "none that fits is fast enough here"
        return None, "size", f"No model is recommended: {note}."
    bounded = [line for line in untimed if line.figures.ceiling_tps is not None]
    if not bounded:
        return untimed[0], "size", "This machine's speed has not been measured yet, so the smallest models come first."
    able = [line for line in bounded if (line.figures.ceiling_tps or 0.0) >= 2 * START_TPS]
    if not able:
        note = f"By this machine's memory speed no model here is sure to reach {START_TPS:.0f} tok/s; the smallest come nearest."
        return None, "limit", note
    return able[0], "limit", "Speeds have not been measured here yet; this one is chosen by what the hardware allows."


CONTEXT = 8192
"""Tokens of context that estimates are for: a long conversation, or a long file."""


class Estimates:
    """Asks by ``ask``, which returns the number that the answers will have. Attributes are for reading.

    download_bps: returns the bytes a second of the last download.

    Attributes:
        disk, catalogue: what is known, by model.
        advice: the catalogue in groups, and the model to start with; None while it is being estimated.
        place, rule: the machine, and where its memory budget comes from.
        progress: how many of how many of the catalogue are estimated.
        problem: why there is no answer.
    """

    def __init__(self, ask: Callable[[Question], int], download_bps: Callable[[], float | None] = lambda: None) -> None:
        self._ask = ask
        self._download_bps = download_bps
        self._asked: dict[str, int] = {}
        self._kv: KVSpec | None = None
        self._limit: int | None = None
        self.disk: dict[str, ModelLine] = {}
        self.catalogue: dict[str, ModelLine] = {}
        self.advice: ModelAdvice | None = None
        self.place = ""
        self.rule = ""
        self.progress = (0, 0)
        self.problem = ""

    def want(self, names: Sequence[str], kv: KVSpec, limit: int | None = None) -> None:
        """Ask for what is not known yet of the catalogue, and of the models on disk ``names``, with these KV settings.

        limit: bytes that a model may take, where the user set them.
        """
        if limit != self._limit:
            self._limit, self.advice = limit, None
            for known in (self.disk, self.catalogue, self._asked):
                known.clear()
        if kv != self._kv:
            self._kv = kv
            self.disk.clear()
            self._asked.pop("disk", None)
        unknown = tuple(name for name in names if name not in self.disk)
        if unknown and "disk" not in self._asked:
            question = Question("disk", "", kv=kv, context=CONTEXT, prompt=CONTEXT, names=unknown)
            self._asked["disk"] = self._ask(question)
        if self.advice is None and "models" not in self._asked:
            self._asked["models"] = self._ask(Question("models", "", context=CONTEXT, prompt=CONTEXT))

    def again(self) -> None:
        """Forget what was asked: the process is another, or was asked for something else."""
        self._asked.clear()

    def forget(self, model: str) -> None:
        """Forget the estimate of ``model``, whose files have changed."""
        self.disk.pop(model, None)

    def take(self, event: WhatIf) -> bool:
        """Take an answer, or part of one; return whether it was asked for here."""
        wanted = next((wanted for wanted, number in self._asked.items() if number == event.id), None)
        if wanted is None:
            return False
        if event.line is not None:
            (self.disk if wanted == "disk" else self.catalogue)[event.line.model] = event.line
        if event.answer is not None or event.error:
            del self._asked[wanted]
            self.problem = event.error
        if event.answer is not None:
            self.place, self.rule = event.answer.place, event.answer.rule
        if wanted == "models":
            self.progress = (event.done, event.total)
            if event.answer is not None:
                self.advice = advise(event.answer.models, self._download_bps())
        return True


Section = Literal["typed", "start", "converting", "downloads", "embedded", "disk", "catalogue", "hub"] | Group
"""What rows stand under. catalogue: what was not estimated yet, in no order that means anything. hub: what a search found."""

MOST_LISTED: dict[Group, int] = {
    "recommended": 12,
    "speed unknown": 12,
    "slow": 4,
    "fit unknown": 12,
    "does not fit": 0,
}
"""Rows of each group without a search. What is no better than unknown is left out where something is recommended."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of a model whatever machine it runs on. context: tokens it was made for; None and "" are unknown.

    downloads: of the last month.
    """

    context: int | None = None
    licence: str = ""
    good_for: str = ""
    downloads: int | None = None


@dataclass(frozen=True, slots=True)
class CatalogueOffer:
    """A model of the catalogue before it is estimated. nbytes: to download; None is unknown."""

    model: str
    nbytes: int | None
    facts: ModelFacts = ModelFacts()  # frozen


@dataclass(frozen=True, slots=True)
class HubModels:
    """What a search of the hub found. state: how it goes, or why there is nothing, in a line; "" where nothing was searched."""

    models: tuple[HubModelLine, ...] = ()
    state: str = ""


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model to choose.

    Attributes:
        nbytes: on disk, or to download; None is unknown.
        home: where it is; None: not here, or not whole.
        converting: the progress of its conversion.
        line: how it would run here; None where that is not known yet, ``pending`` where it was asked.
        start: it is the model to start with.
        path: where it is on the disk; None where that says nothing.
        facts: what holds on every machine.
    """

    model: str
    section: Section
    nbytes: int | None = None
    home: Home | None = None
    on_disk: bool = False
    line: ModelLine | None = None
    pending: bool = False
    download: Download | None = None
    converting: str = ""
    start: StartHere | None = None
    path: Path | None = None
    facts: ModelFacts = ModelFacts()  # frozen

    @property
    def id(self) -> str:
        """A key that no other row has."""
        return f"{self.section}:{self.model}"


def rows(
    text: str,
    disk: LocalModels,
    offers: Sequence[CatalogueOffer],
    estimates: Estimates,
    downloads: Sequence[Download],
    *,
    conversions: Mapping[str, str] = MappingProxyType({}),
    hub: HubModels = HubModels(),  # frozen
    ungrouped: bool = False,
) -> list[ModelRow]:
    """Return the rows that match ``text``, in order; without a text, only the best of each group of the catalogue.

    Nothing moves while estimates come in: without a text the catalogue is left out until its order is known.

    Args:
        text: words that the names must have.
        disk: what is here.
        offers: the catalogue.
        estimates: how models would run.
        downloads: those that have begun.
        conversions: the models that are being converted, with their progress.
        hub: what a search found, which is listed as the hub has it.
        ungrouped: the catalogue is listed in the order of ``offers``, whatever is known by now.
    """
    wanted = text.casefold().split()
    going = {each.model: each for each in downloads}
    facts = {offer.model: offer.facts for offer in offers}
    under_way = [ModelRow(model, "converting", converting=progress) for model, progress in conversions.items()]
    here = [*under_way, *_downloads(disk, estimates, going), *_here(disk, estimates, going, facts)]
    known = {row.model for row in here if not row.converting}
    lacking = [offer for offer in offers if offer.model not in known]
    if estimates.advice is None or ungrouped:
        offered = list(_ungrouped(lacking, estimates)) if wanted else []
    else:
        offered = list(_offered(lacking, estimates, everything=bool(wanted)))
    first = [row for row in offered if row.section == "start"]
    found = [*first, *here, *(row for row in offered if row.section != "start")]
    fitting = [row for row in found if all(word in row.model.casefold() for word in wanted)]
    listed = {row.model for row in fitting}
    fitting += (row for row in _of_hub(hub, estimates) if row.model not in listed)
    return [*_typed(text.strip(), fitting), *fitting]


def _of_hub(hub: HubModels, estimates: Estimates) -> Iterator[ModelRow]:
    for each in hub.models:
        line = None if each.config_folder is None else estimates.disk.get(each.config_folder)
        nbytes = each.nbytes or (None if line is None else line.download_bytes)
        facts = ModelFacts(each.context, each.licence or "", each.good_for, each.downloads)
        yield ModelRow(
            each.id, "hub", nbytes, line=line, pending=line is None and bool(each.config_folder), facts=facts
        )


def best_guess(offers: Sequence[CatalogueOffer], memory_bytes: int | None) -> list[CatalogueOffer]:
    """Return the order before anything is estimated: the smallest first, and what takes over half of the memory after the rest."""
    half = math.inf if memory_bytes is None else memory_bytes / 2
    sizes = {each.model: math.inf if each.nbytes is None else each.nbytes for each in offers}
    return sorted(offers, key=lambda each: (sizes[each.model] > half, sizes[each.model]))


def _typed(text: str, fitting: Sequence[ModelRow]) -> Iterator[ModelRow]:
    """Yield the typed text as a model, where it may be one and is not listed."""
    listed = any(row.model == text for row in fitting)
    if text and not listed and (not fitting or is_id(text) or is_folder(text)):
        yield ModelRow(text, "typed", home="folder" if is_folder(text) else None)


def _downloads(disk: LocalModels, estimates: Estimates, going: Mapping[str, Download]) -> Iterator[ModelRow]:
    parts = {each.model: each for each in disk.models if not each.whole}
    for model in dict.fromkeys([*going, *parts]):
        known = estimates.catalogue.get(model)
        yield ModelRow(
            model,
            "downloads",
            nbytes=parts[model].nbytes if model in parts else None,
            on_disk=model in parts,
            line=known,
            download=going.get(model) or Download(model, DownloadStage.PAUSED, parts[model].nbytes, _total(known)),
        )


def _total(line: ModelLine | None) -> int | None:
    return None if line is None else line.download_bytes


def _here(
    disk: LocalModels, estimates: Estimates, going: Mapping[str, Download], facts: Mapping[str, ModelFacts]
) -> Iterator[ModelRow]:
    whole = [each for each in disk.models if each.whole and each.model not in going]
    for each in sorted(whole, key=lambda each: (each.home != "embedded", each.model.casefold())):
        yield _row_of(each, estimates, facts.get(each.model, ModelFacts()))


GUIDE_FACTS = ModelFacts(good_for="questions about Tokamac")


def _row_of(each: OnDisk, estimates: Estimates, known: ModelFacts) -> ModelRow:
    line = estimates.disk.get(each.model)
    section: Section = "embedded" if each.home == "embedded" else "disk"
    if each.home == "embedded":
        known = GUIDE_FACTS
    facts = replace(known, context=each.context or known.context, good_for=known.good_for or good_for(each.path.name))
    path = each.path if each.home in ("folder", "models", "other") else None
    return ModelRow(
        each.model,
        section,
        each.nbytes,
        each.home,
        on_disk=True,
        line=line,
        pending=line is None,
        path=path,
        facts=facts,
    )


def _ungrouped(offers: Sequence[CatalogueOffer], estimates: Estimates) -> Iterator[ModelRow]:
    """Yield the catalogue in the order of ``offers``, with what is known by now."""
    for offer in offers:
        line, pending = estimates.catalogue.get(offer.model), estimates.advice is None
        nbytes = _download(line, offer.nbytes)
        yield ModelRow(offer.model, "catalogue", nbytes, line=line, pending=line is None and pending, facts=offer.facts)


def _offered(offers: Sequence[CatalogueOffer], estimates: Estimates, *, everything: bool) -> Iterator[ModelRow]:
    """Yield the catalogue in its groups, which are known. everything: also what does not fit or ranks low."""
    advice, sizes = estimates.advice, {offer.model: offer.nbytes for offer in offers}
    facts = {offer.model: offer.facts for offer in offers}
    if advice is None:
        return
    start = advice.start
    if start is not None and start.model in sizes:
        line = next(line for line in advice.lines if line.model == start.model)
        yield ModelRow(start.model, "start", start.download_bytes, line=line, start=start, facts=facts[start.model])
    for group in get_args(Group):
        if group == "speed unknown" and not everything and advice.of("recommended"):
            continue
        lines = [
            line for line in advice.of(group) if line.model in sizes and (start is None or line.model != start.model)
        ]
        for line in lines if everything else lines[: MOST_LISTED[group]]:
            yield ModelRow(line.model, group, _download(line, sizes[line.model]), line=line, facts=facts[line.model])
    known = {line.model for line in advice.lines}
    for offer in offers:
        if everything and offer.model not in known:
            yield ModelRow(offer.model, "catalogue", offer.nbytes, facts=offer.facts)


def _download(line: ModelLine | None, nbytes: int | None) -> int | None:
    return nbytes if line is None or line.download_bytes is None else line.download_bytes


def section_title(section: Section, estimates: Estimates) -> str:
    """Return the heading of what is to download: what the section is, and on what it rests."""
    match section:
        case "start":
            start = None if estimates.advice is None else estimates.advice.start
            if start is None:
                return "Start here"
            speed = (
                "" if start.expected_tps is not None else f" · {start.speed}"
            )  # else its row has it, as it has its size
            return f"Start here{speed} · {start.wait}"
        case "hub":
            return "On Hugging Face"
        case "recommended":
            return f"Recommended for {estimates.place}, best first"
        case "speed unknown":
            return f"They fit {estimates.place}; their speed here is not known yet"
        case "slow":
            return f"Slow on {estimates.place}, the fastest first"
        case "fit unknown":
            return "Whether they fit is not known"
        case "does not fit":
            return f"Too large for {estimates.place}"
        case _:
            done, total = estimates.progress
            told = estimates.problem or (f"estimating {done} of {total} …" if total else "")
            return f"To download · {told}" if told else "To download"


def short_name(model: str) -> str:
    """Return the last part of an id or a path, made safe."""
    return sanitise_line(model.rstrip("/").rpartition("/")[2]) or sanitise_line(model)


class Removal:
    """The row whose removal waits for confirmation, until another one is selected."""

    def __init__(self) -> None:
        self.asked = ""

    def ask(self, row: ModelRow) -> None:
        """Ask about ``row``."""
        self.asked = row.id

    def forget(self) -> None:
        """Ask no more."""
        self.asked = ""

    def is_for(self, row: ModelRow | None) -> bool:
        """Whether it is ``row`` that was asked about."""
        return row is not None and row.id == self.asked

    @staticmethod
    def refusal(row: ModelRow, loaded: str) -> str:
        """Return why ``row`` can't be removed; "" where it can. loaded: the model that is loaded."""
        if row.model == loaded:
            return "It is loaded. Press Ctrl+E to unload it first."
        if row.converting:
            return "It is being converted. Press Ctrl+K to stop that."
        if row.download is not None:
            return "It is downloading. Press Ctrl+K to cancel and delete the download."
        if row.home == "embedded":
            return "It is part of the program."
        if row.home == "other":
            return "It belongs to LM Studio: remove it there."
        if row.home == "models":
            return f"It is yours, in {row.path}. Delete that folder to remove it."
        return "" if row.on_disk else "It is not on this disk."
