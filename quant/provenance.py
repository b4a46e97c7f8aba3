"""Where a converted model comes from, as far as its folder and this installation tell: names, hashes, versions, the licence.

What the source's card says was written by others: only values of a known shape are taken over, everything else is left out.
"""

import hashlib
import itertools
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tokamac.engine.device import device_kind, may_use_tf32
from tokamac.engine.files import CONFIG_BYTES, open_regular, read_bytes
from tokamac.engine.hub.names import id_of
from tokamac.engine.model.adapters import Adapter
from tokamac.engine.model.safetensors import find_shards

from .options import Options

PACKAGES = ("tokamac", "mlx", "mlx-lm")

CARD = "README.md"
CARD_LIMIT = 1 << 20
"""Bytes of a source's card that are looked at: front matter comes first, and cards are some ten thousand bytes."""

LONGEST_NAME = 96

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_WORD = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)
_LINK = re.compile(r"https://[\w./%#~-]{1,200}|LICENSE[\w.-]{0,32}", re.ASCII)

_TAKEN: Mapping[str, re.Pattern[str]] = {
    "license": _WORD,
    "license_name": _WORD,
    "license_link": _LINK,
    "pipeline_tag": _WORD,
    "base_model": _ID,
}
"""Keys of a source's front matter that go along, and what their values must look like, whole."""


@dataclass(frozen=True, slots=True)
class ShardMark:
    """A file of the source: its bytes, and the hash of its safetensors header, which lists every tensor's type, shape and place."""

    file: str
    bytes: int
    header_sha256: str


@dataclass(frozen=True, slots=True)
class Provenance:
    """What made a conversion, and of what.

    name: the source's Hugging Face id, else the name of its folder, made safe to print. id: the former, where it is known.
    card: of the source's front matter, what goes along. calibration_sha256: of the user's text, where one was given.
    tf32: products of float32 were rounded to TF32 where the GPU does that. adapter: the name and the digest of what was added.
    """

    name: str
    id: str | None
    config_sha256: str
    shards: tuple[ShardMark, ...]
    versions: Mapping[str, str | None]
    card: Mapping[str, str] = field(default_factory=dict)
    calibration_sha256: str | None = None
    tf32: bool = False
    adapter: Mapping[str, str] | None = None


def provenance(source: Path, options: Options, adapter: Adapter | None = None) -> Provenance:
    """Return the provenance of what is made of the model folder ``source``. Reads headers and small files.

    Raises ModelError for shards that are not whole, OSError for a file that can't be read.
    """
    found = source_id(source)
    text = options.calibration
    return Provenance(
        name=found or safe_name(source.resolve().name),
        id=found,
        config_sha256=_sha256(read_bytes(source / "config.json", CONFIG_BYTES)),
        shards=tuple(_mark(shard) for shard in find_shards(source)),
        versions={package: version_of(package) for package in PACKAGES},
        card=front_matter(source / CARD),
        calibration_sha256=_sha256(text.read_bytes()) if isinstance(text, Path) else None,
        tf32=may_use_tf32(device_kind()),
        adapter=None if adapter is None else {"name": adapter_name(adapter), "digest": adapter.digest},
    )


def adapter_name(adapter: Adapter) -> str:
    """Return what an adapter is called in files that are given away: its id or folder's name, never its path."""
    named = adapter.name if _ID.fullmatch(adapter.name) else source_id(adapter.folder)
    return named or safe_name(adapter.folder.resolve().name)


def source_id(folder: Path) -> str | None:
    """Return the Hugging Face id whose snapshot ``folder`` is: ``…/models--org--name/snapshots/<commit>``; None for any other."""
    parts = folder.absolute().parts
    found = id_of(parts[-3]) if len(parts) >= 3 and parts[-2] == "snapshots" else None
    return found if found is not None and _ID.fullmatch(found) else None


def safe_name(name: str) -> str:
    """Return a folder's name without what Markdown, a terminal or YAML would obey."""
    return re.sub(r"[^\w.\- ]", "_", name)[:LONGEST_NAME].strip() or "model"


def front_matter(card: Path) -> dict[str, str]:
    """Return what is taken over from a card's YAML front matter: plain ``key: value`` lines of the expected shape, no more.

    A card that is missing or can't be read has none; lists and nested values are left out.
    """
    try:
        with open_regular(card) as file:
            first, *lines = file.read(CARD_LIMIT).decode("utf-8", "replace").splitlines() or [""]
    except OSError:
        return {}
    if first.strip("\ufeff \t") != "---":
        return {}
    found = {}
    for line in itertools.takewhile(lambda line: line.strip() != "---", lines):
        key, _, value = line.partition(":")
        plain = value.strip().strip("\"'")
        if key in _TAKEN and _TAKEN[key].fullmatch(plain):
            found[key] = plain
    return found


def _mark(shard: Path) -> ShardMark:
    with open_regular(shard) as file:
        prefix = file.read(8)
        header = file.read(struct.unpack("<Q", prefix)[0])
    return ShardMark(shard.name, shard.stat().st_size, _sha256(prefix + header))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None where it runs without having been installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
