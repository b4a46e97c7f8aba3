"""The model catalogue (assets/models.json): configs, sizes, packed repositories."""

# Configs keep only cost-relevant fields; every row cites sources, unknown is null. Weighed sizes are in the
# table, so ``standings`` is immediate.

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, Literal, get_args

from tokamac.assets import asset_path

from ..hub.names import EMBEDDED, GUIDE, GUIDE_DRAFT
from ..model.weights import text_config
from .config_cost import Packing


@dataclass(frozen=True, slots=True)
class Repository:
    """A packed hub copy.

    packing: None where ``quantization`` lists modules. stores_head: duplicates a tied head. published_bytes: of all
    files. weight_bytes: text model. memory_gb: recommended sizes. released: year and month, "2026-04".
    """

    id: str
    packing: Packing | None
    quantization: Mapping[str, Any] | None
    stores_head: bool
    published_bytes: int | None
    memory_gb: tuple[int, ...]
    context: int | None
    good_for: str
    weight_bytes: int = 0
    released: str = ""

    @property
    def tail(self) -> str:
        return self.id.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A catalogue model. config: normalised, unpacked, or None.

    tokenizer_bytes: non-weight files. tower_parameters: unloaded 16-bit vision/audio weights; projector_parameters:
    packed ones. tokens: equal for equal tokenizers. parameters, active_parameters: 0 if unlisted.
    """

    name: str
    aliases: tuple[str, ...]
    config: Mapping[str, Any] | None
    repositories: tuple[Repository, ...]
    tokenizer_bytes: int | None
    tower_parameters: int
    projector_parameters: int
    source: str
    note: str
    licence: str | None = None
    facts_source: str = ""
    tokens: str = ""
    parameters: int = 0
    active_parameters: int = 0

    def config_of(self, repository: Repository) -> dict[str, Any] | None:
        if self.config is None:
            return None
        config = dict(self.config)
        if repository.quantization is not None:
            config["quantization"] = _per_layer(repository.quantization, text_config(config)["num_hidden_layers"])
        return _untied(config) if repository.stores_head else config

    def repository(self, name: str) -> Repository | None:
        wanted = name.casefold()
        return next((each for each in self.repositories if wanted in (each.id.casefold(), each.tail.casefold())), None)


@cache
def catalogue() -> tuple[CatalogueEntry, ...]:
    text = resources.files("tokamac.assets").joinpath("models.json").read_text(encoding="utf-8")
    return tuple(_entry(row) for row in json.loads(text))


def find(name: str) -> CatalogueEntry | None:
    return _by_name().get(name.casefold())


# What a model is listed under, best first. recommended: it leaves room in memory, and is quick on this chip.
Group = Literal["recommended", "slow", "tight", "fit unknown", "does not fit"]

# Tokens a second that keep up with a reader: adults read some 238 words a minute silently (Brysbaert 2019,
# doi:10.1016/j.jml.2019.104047), about 5 tokens a second; twice that leaves room for skimming.
READABLE_TPS = 10.0

# What a recommended model reaches, at least: three times as fast as people read, and a prompt of 2,048 tokens in 5 s.
QUICK_TPS = 15.0
QUICK_PROMPT, QUICK_TTFT_S = 2048, 5.0
ROOMY = 0.7  # share of the budget that its weights may take: a long context and other programs have the rest
FULL = 0.8  # the same of all memory, beyond which it does not fit
REACHED = 0.65  # share of the bandwidth that is left for weights, beside a long context and what kernels lose
# The share of the peak arithmetic that prompts reach in published measurements: of dense models 0.6 to 0.8, of mixtures,
# whose experts get few tokens each, 0.5 to 0.6 of the shaders', which neural accelerators hardly raise.
COMPUTED, COMPUTED_MIXTURE = 0.65, 0.5
MIXTURE = 4  # times as many weights as a token reads has a mixture; per-layer embeddings make it 2

# Quality: the weights of an equal dense model, √(all × those of a token), doubled for each DOUBLING_MONTHS by which it
# is younger: what models of a size can do doubles in 3.5 months (Xiao et al. 2025, doi:10.1038/s42256-025-01137-0).
DOUBLING_MONTHS = 3.5


@dataclass(frozen=True, slots=True)
class Nominal:
    """A machine by its make, independent of measurements.

    budget_bytes: certain; most_bytes: possible. tflops, shader_tflops: peak.
    """

    budget_bytes: int | None
    most_bytes: int | None
    bandwidth_gbs: float
    tflops: float | None = None
    shader_tflops: float | None = None


@dataclass(frozen=True, slots=True)
class Standing:
    """A repository's rank on a machine. tps, ttft_s: expected; None is unknown. start: the one to start with."""

    entry: CatalogueEntry
    repository: Repository
    group: Group
    tps: float
    ttft_s: float | None
    start: bool = False

    @property
    def quality(self) -> float:
        year, month = map(int, self.repository.released.split("-"))
        size = math.sqrt(self.entry.parameters * self.entry.active_parameters)
        return size * float(2 ** ((12 * (year - 2024) + month) / DOUBLING_MONTHS))


def standings(machine: Nominal) -> tuple[Standing, ...]:
    found = [_standing(entry, each, machine) for entry in catalogue() for each in entry.repositories]
    ranked = sorted(found, key=_rank)
    return tuple(replace(each, start=at == 0 and each.group == "recommended") for at, each in enumerate(ranked))


def _standing(entry: CatalogueEntry, repository: Repository, machine: Nominal) -> Standing:
    read = repository.weight_bytes * entry.active_parameters / entry.parameters
    tps = REACHED * machine.bandwidth_gbs * 1e9 / read
    ttft_s = None
    mixture = entry.parameters > MIXTURE * entry.active_parameters
    reached, peak = (COMPUTED_MIXTURE, machine.shader_tflops) if mixture else (COMPUTED, machine.tflops)
    if peak is not None and entry.config is not None:
        shape = text_config(entry.config)
        computed = entry.active_parameters - shape["vocab_size"] * shape["hidden_size"]  # its head reads the last token
        ttft_s = 2 * computed * QUICK_PROMPT / (reached * peak * 1e12)
    quick = tps >= QUICK_TPS and (ttft_s is None or ttft_s <= QUICK_TTFT_S)
    return Standing(entry, repository, _group(repository.weight_bytes, machine, quick=quick), tps, ttft_s)


def _group(weight_bytes: int, machine: Nominal, *, quick: bool) -> Group:
    if machine.most_bytes is not None and weight_bytes > max(FULL * machine.most_bytes, machine.budget_bytes or 0):
        return "does not fit"
    if machine.budget_bytes is None or weight_bytes > machine.budget_bytes:
        return "fit unknown"
    if weight_bytes > ROOMY * machine.budget_bytes:
        return "tight"
    return "recommended" if quick else "slow"


def _rank(each: Standing) -> tuple[int, float, int, str]:
    """Sort key: group, then quality, or speed if slow, or size if it may not fit."""
    weights = each.repository.weight_bytes
    quality = -each.quality
    worth = {"recommended": quality, "tight": quality, "slow": -each.tps}.get(each.group, float(weights))
    return get_args(Group).index(each.group), worth, -weights, each.repository.id


DRAFT_SHARE = 0.5  # of a model's bytes, what one that drafts for it has at most


def draft_for(name: str) -> Repository | None:
    """Return the smallest same-tokenizer repository of at most half the size, or None."""
    if name == GUIDE:
        return _guide_draft()
    entry = find(name)
    if entry is None or not entry.tokens:
        return None
    others = (other for other in catalogue() if other.tokens == entry.tokens and other is not entry)
    sizes = [(each.published_bytes, each) for other in others for each in other.repositories if each.published_bytes]
    own = entry.repository(name) or next(iter(entry.repositories), None)
    if own is None or not sizes:
        return None
    nbytes, draft = min(sizes, key=lambda pair: pair[0])
    whole = own.published_bytes  # None: of the largest alone
    return draft if whole is None or nbytes <= DRAFT_SHARE * whole else None


@cache
def _guide_draft() -> Repository:
    files = asset_path("guide", EMBEDDED[GUIDE_DRAFT]).glob("*")
    return Repository(GUIDE_DRAFT, Packing(4), None, False, sum(each.stat().st_size for each in files), (), None, "")


def files_bytes(entry: CatalogueEntry, repository: Repository, weight_bytes: int) -> int:
    # Without the tokenizer's where they are not known: at most 0.04 GB.
    projector = 0.0
    if entry.projector_parameters and repository.packing and repository.packing.bits:
        # Only affine repositories have towers here: each group adds a scale and a bias of two bytes.
        projector = entry.projector_parameters * (repository.packing.bits / 8 + 4 / repository.packing.group_size)
    return weight_bytes + 2 * entry.tower_parameters + round(projector) + (entry.tokenizer_bytes or 0)


@cache
def _by_name() -> dict[str, CatalogueEntry]:
    names: dict[str, CatalogueEntry] = {}
    for entry in catalogue():
        repositories = (name for each in entry.repositories for name in (each.id, each.tail))
        for name in (entry.name, *entry.aliases, *repositories):
            names[name.casefold()] = entry
    return names


def _entry(row: Mapping[str, Any]) -> CatalogueEntry:
    from ..model.config import normalise  # the chat's first frame doesn't wait for it

    config = row["config"]
    shared = {"context": row.get("context"), "good_for": row.get("good_for", ""), "released": row.get("released", "")}
    return CatalogueEntry(
        name=row["name"],
        aliases=tuple(row["aliases"]),
        config=normalise(config) if config is not None else None,
        repositories=tuple(_repository({**shared, **each}) for each in row["repositories"]),
        tokenizer_bytes=row.get("tokenizer_bytes"),
        tower_parameters=row.get("tower_parameters", 0),
        projector_parameters=row.get("projector_parameters", 0),
        source=row["source"],
        note=row.get("note", ""),
        licence=row.get("licence"),
        facts_source=row.get("facts_source", ""),
        tokens=row.get("tokens", ""),
        parameters=row.get("parameters", 0),
        active_parameters=row.get("active_parameters", 0),
    )


def _repository(row: Mapping[str, Any]) -> Repository:
    packing = row.get("packing")
    return Repository(
        id=row["id"],
        packing=Packing(**packing) if packing is not None else None,
        quantization=row.get("quantization"),
        stores_head=row.get("stores_head", False),
        published_bytes=row.get("bytes"),
        memory_gb=tuple(row.get("memory_gb", ())),
        context=row["context"],
        good_for=row["good_for"],
        weight_bytes=row["weights"],
        released=row["released"],
    )


def _per_layer(quantization: Mapping[str, Any], layers: int) -> dict[str, Any]:
    return {
        key.replace("*", str(layer)): entry
        for key, entry in quantization.items()
        for layer in range(layers if "*" in key else 1)
    }


def _untied(config: dict[str, Any]) -> dict[str, Any]:
    nested = config.get("text_config")
    if isinstance(nested, dict):
        return {**config, "text_config": {**nested, "tie_word_embeddings": False}}
    return {**config, "tie_word_embeddings": False}
