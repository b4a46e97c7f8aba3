"""What stored segments are called: names that only the same model, settings and tokens can lead to. No MLX here."""

import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import blake2b
from importlib import metadata
from pathlib import Path

from tokamac.engine.options import KVSpec
from tokamac.engine.regular_files import TOKENIZER_BYTES, read_bytes

FORMAT = 1
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


def fingerprint(folder: Path, kv: KVSpec, weights: str, **more: object) -> str:
    """Return 32 hexadecimal digits that tell a model with its settings apart from any other.

    Goes by content: config, tokenizer and template; weights: a digest of theirs (weights.py). more: whatever else decides what keys
    and values look like (number type, device). So do the versions of this package and of the libraries that compute them.
    Raises OSError where a file can't be read.
    """
    digest = blake2b(digest_size=16)
    spec = {name: value for name, value in asdict(kv).items() if name != "on_full"}
    versions = {name: metadata.version(name) for name in ("tokamac", "mlx", "mlx-lm")}
    digest.update(json.dumps([FORMAT, spec, versions, weights, more], sort_keys=True, default=str).encode())
    for name in TEXT_FILES:
        path = folder / name
        if path.is_file():
            _add(digest, name, read_bytes(path, TOKENIZER_BYTES))
    return digest.hexdigest()


def root_name(model: str, keep: int | None) -> str:
    """Return the name of the empty prefix: of a model's fingerprint, and the number of tokens that its caches pin."""
    return blake2b(f"{model} {keep}".encode(), digest_size=16).hexdigest()


def child_name(parent: str, tokens: Sequence[int]) -> str:
    """Return the name of a prefix: of its parent's name, and the tokens that follow it."""
    return blake2b(bytes.fromhex(parent) + array("i", tokens).tobytes(), digest_size=16).hexdigest()


def _add(digest: "blake2b", name: str, data: bytes) -> None:
    digest.update(f"{name} {len(data)} ".encode())
    digest.update(data)
