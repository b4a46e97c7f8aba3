"""The model picker's list: typed, local, downloading, catalogue and hub models; how they would run here."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from tokamac.engine.hub.download import good_for
from tokamac.engine.options import KVSpec
from tokamac.engine.perf.catalogue import Group

from ..backend.processes import HubModelLine
from ..backend.protocol import ModelLine, Question, WhatIf
from ..text import units
from .jobs import Download, DownloadStage
from .local import Home, LocalModels, OnDisk, is_folder, is_id

# Estimates: the engine process answers one model at a time. A question displaced by what-if, or lost with its process, is asked
# again on the next ``want``.


ASSUMED_BPS = 100e6 / 8  # bytes a second of a connection of 100 Mbit/s, where no download was measured here

NO_START = "No model of the catalogue is both small and quick enough for this machine to start with."


@dataclass(frozen=True, slots=True)
class StartHere:
    """The recommended first model. download_bps: bytes/s of the last download; None is unknown."""

    model: str
    download_bytes: int | None
    download_bps: float | None = None

    @property
    def download_s(self) -> float | None:
        """Seconds to download at ``download_bps``, else at 100 Mbit/s."""
        return None if self.download_bytes is None else self.download_bytes / (self.download_bps or ASSUMED_BPS)

    @property
    def wait(self) -> str:
        if self.download_s is None:
            return "download time unknown"
        takes = f"about {units.minutes(self.download_s)} to download".replace("about under", "under")
        return takes if self.download_bps else f"at 100 Mbit/s {takes}"


CONTEXT = 8192  # tokens of context that estimates are for: a long conversation, or a long file


class Estimates:
    """Collects estimates; ``ask`` sends a question and returns its id.

    Attributes:
        disk, catalogue: estimates by model.
        place, rule: the machine, and the source of its memory budget.
        progress: (estimated, total) of the catalogue. done: all of them.
        problem: why there is no answer.
    """

    def __init__(self, ask: Callable[[Question], int]) -> None:
        self._ask = ask
        self._asked: dict[str, int] = {}
        self._kv: KVSpec | None = None
        self._limit: int | None = None
        self.disk: dict[str, ModelLine] = {}
        self.catalogue: dict[str, ModelLine] = {}
        self.done = False
        self.place = ""
        self.rule = ""
        self.progress = (0, 0)
        self.problem = ""

    def want(self, names: Sequence[str], kv: KVSpec, limit: int | None = None) -> None:
        """Ask for missing estimates of the catalogue and the local ``names``. limit: the user's byte limit."""
        if limit != self._limit:
            self._limit, self.done = limit, False
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
        if not self.done and "models" not in self._asked:
            self._asked["models"] = self._ask(Question("models", "", context=CONTEXT, prompt=CONTEXT))

    def again(self) -> None:
        """Forget pending questions: the process was replaced or asked for something else."""
        self._asked.clear()

    def forget(self, model: str) -> None:
        self.disk.pop(model, None)

    def receive(self, event: WhatIf) -> bool:
        """Add an answer or part; return whether it was asked for here."""
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
            self.done = event.answer is not None
        return True


# What rows stand under. hub: what a search found.
Section = Literal["typed", "start", "converting", "downloads", "embedded", "disk", "hub"] | Group

# Rows of each group without a search.
MOST_LISTED: dict[Group, int] = {"recommended": 12, "slow": 4, "tight": 4, "fit unknown": 12, "does not fit": 0}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Machine-independent facts; None and "" are unknown. context: trained tokens. downloads: last month."""

    context: int | None = None
    licence: str = ""
    good_for: str = ""
    downloads: int | None = None


@dataclass(frozen=True, slots=True)
class CatalogueOffer:
    """A catalogue model in the packing for this machine. nbytes: download size. start: set for the recommended first model."""

    model: str
    nbytes: int | None
    facts: ModelFacts = ModelFacts()  # frozen
    group: Group = "fit unknown"
    start: StartHere | None = None


@dataclass(frozen=True, slots=True)
class HubModels:
    """Hub search results. state: progress or why there are none, on one line; "" if not searched."""

    models: tuple[HubModelLine, ...] = ()
    state: str = ""


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A row of the picker.

    Attributes:
        nbytes: on disk, or to download; None is unknown.
        home: where it is; None: absent or incomplete.
        converting: conversion progress.
        line: estimate; None if not known yet, ``pending`` if asked.
        start: set for the recommended first model.
        path: on disk; None where uninformative.
        worse: a sentence if a conversion degraded it clearly, else "".
        owner: the other program that keeps it.
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
    worse: str = ""
    owner: str = ""

    @property
    def id(self) -> str:
        """A key unique among rows."""
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
) -> list[ModelRow]:
    """Return the rows matching ``text``; without text, only the best of each catalogue group.

    The order is that of ``offers``, so nothing moves while estimates arrive.

    Args:
        text: words that a name must contain.
        offers: catalogue, best first.
        conversions: progress by model.
        hub: search results, in the hub's order.
    """
    wanted = text.casefold().replace(":", " ").split()
    going = {each.model: each for each in downloads}
    facts = {offer.model: offer.facts for offer in offers}
    under_way = [ModelRow(model, "converting", converting=progress) for model, progress in conversions.items()]
    here = [*under_way, *_downloads(disk, estimates, going), *_here(disk, estimates, going, facts)]
    known = {row.model for row in here if not row.converting}
    lacking = [offer for offer in offers if offer.model not in known]
    offered = list(_offered(lacking, estimates, everything=bool(wanted)))
    first = [row for row in offered if row.section == "start"]
    found = [*first, *here, *(row for row in offered if row.section != "start")]
    fitting = [row for row in found if _has_words(row.model, wanted)]
    listed = {row.model for row in fitting}
    fitting += (row for row in _of_hub(hub, estimates) if row.model not in listed)
    return [*_typed(text.strip(), fitting), *fitting]


def _has_words(model: str, words: Sequence[str]) -> bool:
    """Whether a name has all words, hyphens optional: llama3.2 finds Llama-3.2-3B."""
    name = model.casefold()
    return all(word in name or word in name.replace("-", "") for word in words)


def _of_hub(hub: HubModels, estimates: Estimates) -> Iterator[ModelRow]:
    for each in hub.models:
        line = None if each.config_folder is None else estimates.disk.get(each.config_folder)
        nbytes = each.nbytes or (None if line is None else line.download_bytes)
        facts = ModelFacts(each.context, each.licence or "", each.good_for, each.downloads)
        yield ModelRow(
            each.id, "hub", nbytes, line=line, pending=line is None and bool(each.config_folder), facts=facts
        )


def _typed(text: str, fitting: Sequence[ModelRow]) -> Iterator[ModelRow]:
    """Yield the typed text as a model if it could be one and isn't listed."""
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
        worse=each.worse,
        owner=each.owner,
    )


def _offered(offers: Sequence[CatalogueOffer], estimates: Estimates, *, everything: bool) -> Iterator[ModelRow]:
    """Yield the catalogue, recommended model first. everything: include non-fitting and low-ranked ones."""
    listed = dict.fromkeys(MOST_LISTED, 0)
    for offer in sorted(offers, key=lambda offer: offer.start is None):
        section: Section = offer.group if offer.start is None else "start"
        if offer.start is None:
            listed[offer.group] += 1
            if not everything and listed[offer.group] > MOST_LISTED[offer.group]:
                continue
        line = estimates.catalogue.get(offer.model)
        pending, nbytes = line is None and not estimates.done, _download(line, offer.nbytes)
        yield ModelRow(offer.model, section, nbytes, line=line, pending=pending, start=offer.start, facts=offer.facts)


def _download(line: ModelLine | None, nbytes: int | None) -> int | None:
    return nbytes if line is None or line.download_bytes is None else line.download_bytes


def section_title(section: Section, estimates: Estimates, start: StartHere | None = None) -> str:
    place = estimates.place or "this machine"
    match section:
        case "start":
            return "Start here" if start is None else f"Start here · {start.wait}"
        case "hub":
            return "On Hugging Face"
        case "recommended":
            return f"Recommended for {place}, best first"
        case "slow":
            return f"Slow on {place}"
        case "tight":
            return f"Leave little memory on {place}"
        case "does not fit":
            return f"Too large for {place}"
        case _:
            return "Fit unknown"


class Removal:
    """A removal awaiting confirmation, until another row is selected."""

    def __init__(self) -> None:
        self.asked = ""

    def ask(self, row: ModelRow) -> None:
        self.asked = row.id

    def forget(self) -> None:
        self.asked = ""

    def is_for(self, row: ModelRow | None) -> bool:
        return row is not None and row.id == self.asked

    @staticmethod
    def refusal(row: ModelRow, loaded: str) -> str:
        """Return why ``row`` can't be removed, or "". loaded: the loaded model."""
        if row.model == loaded:
            return "It is loaded. Press Ctrl+E to unload it first."
        if row.converting:
            return "It is being converted. Press Ctrl+K to stop that."
        if row.download is not None:
            return "It is downloading. Press Ctrl+K to cancel and delete the download."
        if row.home == "embedded":
            return "It is part of the program."
        if row.home == "other":
            return f"It belongs to {row.owner}: remove it there."
        if row.home == "models":
            return f"It is yours, in {row.path}. Delete that folder to remove it."
        return "" if row.on_disk else "It is not on this disk."
