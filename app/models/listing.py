"""The list of models to choose from: typed, on disk, downloading, in the catalogue, found on the hub."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

from tokamac.engine.hub.search import good_for

from ..backend.protocol import Group, ModelLine
from ..backend.puller import HubModelLine
from .advice import Estimates, StartHere
from .downloads import Download, DownloadStage
from .local import Home, LocalModels, OnDisk
from .names import is_folder, is_id

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
