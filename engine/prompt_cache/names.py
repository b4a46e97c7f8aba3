"""What stored segments are called: names that only the same model, settings and tokens can lead to. No MLX here."""

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any

from tokamac.engine.options import KVSpec
from tokamac.engine.regular_files import TOKENIZER_BYTES, read_bytes

FORMAT = 2
"""Of the stored files. Another number is another fingerprint, so what an older version wrote is never found."""

TEXT_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
)


@dataclass(frozen=True, slots=True)
class Identity:
    """What keys and values are computed by. fingerprint: 32 hexadecimal digits; facts: what they were made of, part by part."""

    fingerprint: str
    facts: Mapping[str, Any]


def identity(folder: Path, kv: KVSpec, weights: str, **more: object) -> Identity:
    """Return what tells a model with its settings apart, and in which part two of them differ. Takes what ``fingerprint`` takes."""
    digest = blake2b(digest_size=16)
    for name in TEXT_FILES:
        if (folder / name).is_file():
            _add(digest, name, (folder / name).read_bytes())
    facts = {
        "weights": weights,
        "text": digest.hexdigest(),
        "kv": _without_on_full(kv),
        "versions": _versions(),
        "more": {name: str(value) for name, value in more.items()},
    }
    return Identity(fingerprint(folder, kv, weights, **more), facts)


def fingerprint(folder: Path, kv: KVSpec, weights: str, **more: object) -> str:
    """Return 32 hexadecimal digits that tell a model with its settings apart from any other.

    Goes by content: config, tokenizer and template; weights: a digest of theirs (weights.py). more: whatever else decides what keys
    and values look like (number type, device). So do the versions of this package and of the libraries that compute them.
    Raises OSError where a file can't be read.
    """
    digest = blake2b(digest_size=16)
    spec = _without_on_full(kv)
    digest.update(json.dumps([FORMAT, spec, _versions(), weights, more], sort_keys=True, default=str).encode())
    for name in TEXT_FILES:
        path = folder / name
        if path.is_file():
            _add(digest, name, read_bytes(path, TOKENIZER_BYTES))
    return digest.hexdigest()


def _without_on_full(kv: KVSpec) -> dict[str, Any]:
    return {name: value for name, value in asdict(kv).items() if name != "on_full"}


def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("tokamac", "mlx", "mlx-lm")}


def root_name(model: str, keep: int | None) -> str:
    """Return the name of the empty prefix: of a model's fingerprint, and the number of tokens that its caches pin."""
    return blake2b(f"{model} {keep}".encode(), digest_size=16).hexdigest()


def child_name(parent: str, tokens: Sequence[int]) -> str:
    """Return the name of a prefix: of its parent's name, and the tokens that follow it."""
    return blake2b(bytes.fromhex(parent) + array("i", tokens).tobytes(), digest_size=16).hexdigest()


def _add(digest: "blake2b", name: str, data: bytes) -> None:
    digest.update(f"{name} {len(data)} ".encode())
    digest.update(data)
