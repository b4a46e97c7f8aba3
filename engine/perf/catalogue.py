"""The models people run, by name: their shapes, and the repositories that hold them packed for MLX.

The table is assets/models.json. A config there has the fields that decide what a model costs and what its caches keep, no others;
every row names the sources, and what was in none is null. So a model can be weighed before it is downloaded.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from tokamac.assets import asset_path

from ..hub.names import EMBEDDED, GUIDE, GUIDE_DRAFT
from .config_cost import Packing
from .cost import text_config


@dataclass(frozen=True, slots=True)
class Repository:
    """A packed copy of a model on the hub.

    packing: as mlx-lm's conversion packs; None where ``quantization`` says it module by module, as config.json does.
    stores_head: it holds a tied output head a second time. published_bytes: of all its files, to three digits or better.
    memory_gb: the sizes of memory it is recommended for. context: tokens that its config allows. good_for: a short
    phrase after its maker's card; "" is unknown. Both are the model's, unless the copy is of a later release.
    """

    id: str
    packing: Packing | None
    quantization: Mapping[str, Any] | None
    stores_head: bool
    published_bytes: int | None
    memory_gb: tuple[int, ...]
    context: int | None
    good_for: str

    @property
    def tail(self) -> str:
        """The id without its owner."""
        return self.id.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model. config: normalised, not packed; None where no source gives it.

    tokenizer_bytes: of the files beside the weights. tower_parameters: vision and audio weights that repositories hold in 16 bits
    and the engine does not load; projector_parameters: more of those, packed like the rest. source: where the config was read.
    licence: as Hugging Face abbreviates it; facts_source: where that, the contexts and the purposes were read.
    tokens: the same word for models whose tokenizers are documented to be equal; "" is unknown.
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

    def config_of(self, repository: Repository) -> dict[str, Any] | None:
        """Return the config of a repository: the model's, with its packing where modules differ and the head it stores."""
        if self.config is None:
            return None
        config = dict(self.config)
        if repository.quantization is not None:
            config["quantization"] = _per_layer(repository.quantization, text_config(config)["num_hidden_layers"])
        return _untied(config) if repository.stores_head else config

    def repository(self, name: str) -> Repository | None:
        """Return the repository with this id, or with this id less its owner."""
        wanted = name.casefold()
        return next((each for each in self.repositories if wanted in (each.id.casefold(), each.tail.casefold())), None)


@cache
def catalogue() -> tuple[CatalogueEntry, ...]:
    """Return the whole table."""
    text = resources.files("tokamac.assets").joinpath("models.json").read_text(encoding="utf-8")
    return tuple(_entry(row) for row in json.loads(text))


def find(name: str) -> CatalogueEntry | None:
    """Return the model of this name, alias or repository id, with or without its owner; case does not matter."""
    return _by_name().get(name.casefold())


DRAFT_SHARE = 0.5
"""Of a model's bytes, what one that drafts for it has at most."""


def draft_for(name: str) -> Repository | None:
    """Return the smallest repository that can draft for a model: with the same tokenizer, and at most half of its size.

    None where none is known.
    """
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
    """What drafts for the embedded model, as if it were on the hub."""
    files = asset_path("guide", EMBEDDED[GUIDE_DRAFT]).glob("*")
    return Repository(GUIDE_DRAFT, Packing(4), None, False, sum(each.stat().st_size for each in files), (), None, "")


def files_bytes(entry: CatalogueEntry, repository: Repository, weight_bytes: int) -> int | None:
    """Return the bytes of a repository's files: weights, towers, tokenizer; None where any of them is unknown.

    weight_bytes: of the text model, computed.
    """
    if entry.tokenizer_bytes is None:
        return None
    projector = 0.0
    if entry.projector_parameters and repository.packing and repository.packing.bits:
        # Only affine repositories have towers here: each group adds a scale and a bias of two bytes.
        projector = entry.projector_parameters * (repository.packing.bits / 8 + 4 / repository.packing.group_size)
    return weight_bytes + 2 * entry.tower_parameters + round(projector) + entry.tokenizer_bytes


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
    context, good_for = row.get("context"), row.get("good_for", "")
    return CatalogueEntry(
        name=row["name"],
        aliases=tuple(row["aliases"]),
        config=normalise(config) if config is not None else None,
        repositories=tuple(
            _repository({"context": context, "good_for": good_for, **each}) for each in row["repositories"]
        ),
        tokenizer_bytes=row.get("tokenizer_bytes"),
        tower_parameters=row.get("tower_parameters", 0),
        projector_parameters=row.get("projector_parameters", 0),
        source=row["source"],
        note=row.get("note", ""),
        licence=row.get("licence"),
        facts_source=row.get("facts_source", ""),
        tokens=row.get("tokens", ""),
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
    )


def _per_layer(quantization: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return config.json's entries, one a module: a star in the table stands for every layer's number."""
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
