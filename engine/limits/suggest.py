"""Which models of the catalogue would run well at a place, best first, and why.

Best is the most capable that fits with room to spare and is quicker than reading. How capable a model is, its weights tell only
roughly: the square root of all weights times those that a token uses, which is a dense model's weights, and for a mixture lies
between the two. Where the speed is not known, what fits is sorted by that size alone.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from tokamac.engine.limits.catalogue import Entry, Repository, catalogue, files_bytes
from tokamac.engine.limits.cost import Cost
from tokamac.engine.limits.family import Trait, traits_of
from tokamac.engine.limits.memory import giving_way
from tokamac.engine.limits.outcomes import Case, Outcome, outcome_of
from tokamac.engine.limits.places import Place
from tokamac.engine.limits.weighing import Weighed, weigh
from tokamac.engine.options import KVSpec

MARGIN = 0.9
"""Share of the budget that leaves room for the system, a longer context and other programs."""

READABLE_TPS = 10.0
"""Tokens a second that nobody waits for: adults read some 238 words a minute silently (Brysbaert 2019,
doi:10.1016/j.jml.2019.104047), about 5 tokens a second; twice that leaves room for skimming."""

Verdict = Literal["runs well", "fits, speed unknown", "tight", "slow", "unknown whether it fits", "does not fit"]
VERDICTS: tuple[Verdict, ...] = (
    "runs well", "fits, speed unknown", "tight", "slow", "unknown whether it fits", "does not fit",
)  # fmt: skip
"""Best first. tight: it fits, with less than a tenth to spare, or other programs have to give way for it now. slow: slower than
twice reading."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One repository of the catalogue at a place. Bytes; None is unknown. traits: what kind of model it is.

    download_bytes: of all its files. parameters: all weights; active_parameters: those that a token uses. reason: one sentence.
    """

    id: str
    name: str
    download_bytes: int | None
    parameters: int | None
    active_parameters: int | None
    traits: tuple[Trait, ...]
    outcome: Outcome
    verdict: Verdict
    reason: str

    @property
    def size(self) -> float:
        """Roughly how capable it is, in weights of a dense model; 0 where they are not known."""
        return math.sqrt((self.parameters or 0) * (self.active_parameters or 0))


def suggestions(
    place: Place, context: int = 8192, *, progress: Callable[[int, int], None] | None = None
) -> tuple[Suggestion, ...]:
    """Return every repository of the catalogue, best first, as it would run with a prompt that fills ``context``.

    Takes a tenth or two of a second for each. progress: told how many are done, and of how many.
    """
    case, asked = Case(None, 64, KVSpec(), context, context), list(repositories())
    found: list[Suggestion] = []
    for entry, repository in asked:
        found.append(suggestion(entry, repository, case, place))
        if progress is not None:
            progress(len(found), len(asked))
    return tuple(sorted(found, key=rank))


def suggestion(entry: Entry, repository: Repository, case: Case, place: Place) -> Suggestion:
    """Return one repository at a place."""
    weighed = _weigh(entry, repository, place)
    known = weighed.stored if isinstance(weighed, Weighed) else None
    found = outcome_of(weighed, case, place)
    verdict = verdict_of(found)
    return Suggestion(
        id=repository.id,
        name=entry.name,
        download_bytes=_download(entry, repository, known),
        parameters=None if known is None else known.parameters,
        active_parameters=None if known is None else known.active_parameters,
        traits=() if entry.config is None else traits_of(entry.config),
        outcome=found,
        verdict=verdict,
        reason=reason_of(found, verdict),
    )


def verdict_of(found: Outcome) -> Verdict:
    """Return how well it would run, beside the other programs that run now."""
    alone, memory = verdict_alone(found), found.memory
    gives_way = memory is not None and memory.from_others > 0
    return "tight" if gives_way and alone in ("runs well", "fits, speed unknown") else alone


def verdict_alone(found: Outcome) -> Verdict:
    """Return how well it would run whatever else does."""
    memory = found.memory
    if memory is None or memory.fits is None or memory.budget is None:
        return "unknown whether it fits"
    if not memory.fits:
        return "does not fit"
    fastest = found.ceiling_tps if found.expected_tps is None else found.expected_tps
    if fastest is not None and fastest < READABLE_TPS:
        return "slow"
    if memory.total > MARGIN * memory.budget:
        return "tight"
    return "fits, speed unknown" if found.expected_tps is None else "runs well"


def _download(entry: Entry, repository: Repository, known: Cost | None) -> int | None:
    if repository.published_bytes is not None or known is None:
        return repository.published_bytes
    return files_bytes(entry, repository, known.weight_bytes)


def _weigh(entry: Entry, repository: Repository, place: Place) -> Weighed | str:
    config = entry.config_of(repository)
    if config is None:
        return f"the config of {entry.name} is not known here"
    return weigh(config, place.device, place.memory_bytes, packing=repository.packing)


def repositories() -> Iterator[tuple[Entry, Repository]]:
    """Yield every repository of the catalogue, with the model it holds."""
    for entry in catalogue():
        for repository in entry.repositories:
            yield entry, repository


def rank(each: Suggestion) -> tuple[int, float, float]:
    """Return what sorts best first: the verdict, then the size, then more bits of the same model.

    What other programs take at the moment changes a word, and not the order.
    """
    place = VERDICTS.index(verdict_alone(each.outcome))
    if each.verdict == "does not fit":  # the one that lacks least comes first
        return place, float(each.outcome.memory.total) if each.outcome.memory else math.inf, 0.0
    return place, -each.size, -float(each.outcome.weight_bytes or 0)


def reason_of(found: Outcome, verdict: Verdict) -> str:
    """Return why, in one sentence."""
    memory = found.memory
    if memory is None:
        return found.reason or "its memory is not known"
    need = f"needs {_size(memory.total)}"
    if memory.budget is None:
        return f"{need}; how much may be used is not known"
    of = f"{need} of {_size(memory.budget)}"
    most = f"{need}; the machine has {_size(found.place.memory_bytes or memory.budget)} in all"
    spoken: dict[Verdict, str] = {
        "runs well": of,
        "fits, speed unknown": f"{of}; {found.reason or 'its speed is not known'}",
        "tight": f"{of}: {giving_way(memory.from_others)}"
        if memory.from_others
        else f"{of}: little is left for a longer context",
        "slow": f"{of}, but stays below {READABLE_TPS:.0f} tok/s",
        "unknown whether it fits": f"{need}; {found.place.budget_rule or 'how much may be used is not known'}",
        "does not fit": of if found.place.local else most,
    }
    return spoken[verdict]


def _size(nbytes: int) -> str:
    """Return bytes in three figures or more, as the screen writes them: 50.4 MB, 9.57 GB, 1,024 GB."""
    value, unit = (nbytes / 1e9, "GB") if nbytes >= 10**9 else (nbytes / 1e6, "MB")
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f} {unit}"
