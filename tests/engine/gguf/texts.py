"""Texts that tokenizers get wrong, small vocabularies to try them with, and digests of ids."""

import hashlib
import json
import random
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokamac.assets import asset_path
from tokamac.engine.gguf.vocabulary import write_tokenizer
from tokamac.engine.text.tokenizer import Tokenizer, load_tokenizer

FOLDER = Path(__file__).parent
PARTS: dict[str, list[str]] = json.loads((FOLDER / "texts.json").read_text())
KINDS = [*PARTS.values(), PARTS["words"], PARTS["numbers"], PARTS["spaces"], PARTS["spaces"], PARTS["signs"]]
DIGITS = 4  # of a text's digest
SPECIAL = ("<s>", "<|im_end|>", "<unused7>", "<b>", "plugh")  # of the small vocabularies


def odd_texts(count: int, seed: int, tokens: Sequence[str]) -> Iterator[str]:
    """Yield ``count`` texts; some hold ``tokens``, as a user might paste them."""
    chance = random.Random(seed).random  # the one method whose numbers no version of Python changes

    def one(of: Sequence[str]) -> str:
        return of[int(chance() * len(of))]

    for _ in range(count):
        parts = int(1 + chance() * chance() * 24)
        kinds = [tokens if chance() < 0.05 else KINDS[int(chance() * len(KINDS))] for _ in range(parts)]
        yield "".join(one(kind) * (int(1 + chance() * 3) if chance() < 0.2 else 1) for kind in kinds)


def small_texts() -> list[str]:
    """Return what the small vocabularies are tried with."""
    return [*odd_texts(200, 3, SPECIAL)]


def digests(ids: Iterable[Sequence[int]]) -> str:
    """Return some digits for each text's ids."""
    return "".join(hashlib.sha256(str([*each]).encode()).hexdigest()[:DIGITS] for each in ids)


def differing(texts: Sequence[str], ids: Sequence[Sequence[int]], golden: str) -> list[tuple[str, Sequence[int]]]:
    """Return the texts whose ids are not the golden ones."""
    assert len(golden) == DIGITS * len(texts)
    found = digests(ids)
    places = range(0, len(golden), DIGITS)
    return [
        (text, each)
        for text, each, at in zip(texts, ids, places, strict=True)
        if found[at : at + DIGITS] != golden[at : at + DIGITS]
    ]


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a name and the keys of a small GGUF file, for every kind of tokenizer and every name of how text is split."""
    trained = json.loads((FOLDER / "vocabularies.json").read_text())
    with asset_path("pretokenizers.toml").open("rb") as file:
        names = [name for family in tomllib.load(file)["family"] for name in family["names"]]
    for name in names:
        yield name, _keys({**trained["gemma4" if name == "gemma4" else "gpt2"], "model": "gpt2", "pre": name})
    spaced = trained["gemma4"]
    yield "kind gemma4", _keys({**spaced, "model": "gemma4"})
    scores = [-float(at) if kind == 1 else 0.0 for at, kind in enumerate(spaced["token_type"])]
    pieces = {key: value for key, value in spaced.items() if key != "merges"} | {"model": "llama"}
    yield "kind llama", _keys({**pieces, "scores": scores})
    yield "kind llama, no prefix", _keys({**pieces, "scores": scores, "add_space_prefix": False})
    odd = [
        -float(at * 7919 % 997) for at in range(len(scores))
    ]  # no token's is another's: those are told apart by place
    yield "kind llama, scores in no order", _keys({**pieces, "scores": odd})


def load(keys: Mapping[str, Any], name: str) -> Tokenizer:
    """Return the tokenizer that a GGUF file with these keys has."""
    with TemporaryDirectory() as folder:
        write_tokenizer(keys, Path(folder), name)
        return load_tokenizer(Path(folder), {}, name)


def _keys(values: dict[str, Any]) -> dict[str, Any]:
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}
