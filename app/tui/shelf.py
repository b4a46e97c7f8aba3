"""What the picker lists: models on disk, downloads, the catalogue and what is typed, as rows in sections. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tokamac.app.backend.whatif import ModelLine
from tokamac.app.tui.downloads import Download, Stage
from tokamac.app.tui.estimates import Estimates
from tokamac.app.tui.models import Disk, Home, OnDisk, is_folder, is_id

Section = Literal["typed", "downloads", "embedded", "disk", "recommended"]
MOST_RECOMMENDED = 12
HOPELESS = "does not fit"


@dataclass(frozen=True, slots=True)
class Offer:
    """A model of the catalogue before it is weighed. nbytes: to download; None is unknown."""

    model: str
    nbytes: int | None


@dataclass(frozen=True, slots=True)
class Row:
    """A model to choose. nbytes: on disk, or to download; None is unknown. home: where it is; None: not here, or not whole.

    removable: what removing would free is nbytes. line: what this machine makes of it; None where that is not known yet, and
    ``pending`` where it is being asked.
    """

    model: str
    section: Section
    nbytes: int | None = None
    home: Home | None = None
    on_disk: bool = False
    line: ModelLine | None = None
    pending: bool = False
    download: Download | None = None

    @property
    def id(self) -> str:
        """What tells it from all other rows."""
        return f"{self.section}:{self.model}"


def rows(
    text: str,
    disk: Disk,
    offers: Sequence[Offer],
    estimates: Estimates,
    downloads: Sequence[Download],
) -> list[Row]:
    """Return the rows that fit ``text``, in order; without a text, of the catalogue only the best."""
    wanted = text.casefold().split()
    going = {each.model: each for each in downloads}
    found = [*_downloads(disk, estimates, going), *_here(disk, estimates, going)]
    known = {row.model for row in found}
    found += _recommended([offer for offer in offers if offer.model not in known], estimates, everything=bool(wanted))
    fitting = [row for row in found if all(word in row.model.casefold() for word in wanted)]
    return [*_typed(text.strip(), fitting), *fitting]


def best_guess(offers: Sequence[Offer], memory_bytes: int | None) -> list[Offer]:
    """Return what to show first while nothing is weighed: the largest that leave half of the memory free; then the rest."""
    if memory_bytes is None:
        return list(offers)
    half = memory_bytes / 2
    return sorted(offers, key=lambda each: -each.nbytes if each.nbytes and each.nbytes <= half else 0)


def _typed(text: str, fitting: Sequence[Row]) -> Iterator[Row]:
    """Yield what is typed as a model of its own, where it may be one and is not listed."""
    listed = any(row.model == text for row in fitting)
    if text and not listed and (not fitting or is_id(text) or is_folder(text)):
        yield Row(text, "typed", home="folder" if is_folder(text) else None)


def _downloads(disk: Disk, estimates: Estimates, going: Mapping[str, Download]) -> Iterator[Row]:
    parts = {each.model: each for each in disk.models if not each.whole}
    for model in dict.fromkeys([*going, *parts]):
        known = estimates.catalogue.get(model)
        yield Row(
            model,
            "downloads",
            nbytes=parts[model].nbytes if model in parts else None,
            on_disk=model in parts,
            line=known,
            download=going.get(model) or Download(model, Stage.PAUSED, parts[model].nbytes, _total(known)),
        )


def _total(line: ModelLine | None) -> int | None:
    return None if line is None else line.download_bytes


def _here(disk: Disk, estimates: Estimates, going: Mapping[str, Download]) -> Iterator[Row]:
    whole = [each for each in disk.models if each.whole and each.model not in going]
    for each in sorted(whole, key=lambda each: (each.home != "embedded", each.model.casefold())):
        yield _row_of(each, estimates)


def _row_of(each: OnDisk, estimates: Estimates) -> Row:
    line = estimates.disk.get(each.model)
    section: Section = "embedded" if each.home == "embedded" else "disk"
    return Row(each.model, section, each.nbytes, each.home, on_disk=True, line=line, pending=line is None)


def _recommended(offers: Sequence[Offer], estimates: Estimates, *, everything: bool) -> Iterator[Row]:
    """Yield the catalogue, best first once that is known; ``everything``: also what does not fit, and what comes late."""
    if estimates.best:
        place = {model: index for index, model in enumerate(estimates.best)}
        offers = sorted(offers, key=lambda each: place.get(each.model, len(place)))
        lines = estimates.catalogue
        if not everything:
            offers = [each for each in offers if each.model in lines and lines[each.model].verdict != HOPELESS]
    for offer in offers if everything else offers[:MOST_RECOMMENDED]:
        line = estimates.catalogue.get(offer.model)
        nbytes = offer.nbytes if line is None or line.download_bytes is None else line.download_bytes
        yield Row(offer.model, "recommended", nbytes, line=line, pending=line is None and not estimates.best)
