"""Tokenizers that multiply a text: refused before they are loaded, since nothing can interrupt them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_tiny
from tokamac.engine import Engine, ModelDamagedError
from tokamac.engine.text.encoder import check_growth

GUIDE = Path(__file__).parents[2] / "assets" / "guide" / "model"
GOLDEN = Path(__file__).parents[1] / "golden"


def replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [*steps]}


def write(folder: Path, **parts: Any) -> Path:
    file = make_tiny(folder) / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **parts}))
    return folder


MULTIPLYING = [
    (sequence(*[replace("a", "aaaaaaaaaa")] * 12), "1,000,000,000,000 times"),
    (sequence(*[sequence(replace("a", "a" * 100))] * 400), "endless times"),
    (replace("a", "b" * 1_000_000), "1,000,000 times"),
    ({"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * 1000}, "1,001 times"),
]


@pytest.mark.parametrize(("normalizer", "said"), MULTIPLYING, ids=[said for _, said in MULTIPLYING])
def test_a_normalizer_that_multiplies_is_refused_before_it_is_loaded(
    tmp_path: Path, normalizer: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelDamagedError, match=f"the normalizer in .* {said} as long"):
        Engine.load(write(tmp_path, normalizer=normalizer))


def test_a_decoder_that_multiplies_is_refused(tmp_path: Path) -> None:
    steps = {"type": "Sequence", "decoders": [replace("a", "a" * 30)] * 4}
    with pytest.raises(ModelDamagedError, match="the decoder in"):
        check_growth(write(tmp_path, decoder=steps) / "tokenizer.json")


@pytest.mark.parametrize(
    "normalizer",
    [
        None,
        sequence({"type": "Prepend", "prepend": "\u2581"}, replace(" ", "\u2581")),
        sequence({"type": "NFKC"}, {"type": "Lowercase"}, replace("``", "x")),
        sequence({"type": "NFKD"}, {"type": "Lowercase"}, {"type": "Precompiled", "precompiled_charsmap": ""}),
        {"type": "Unknown"},
        {"no": "type"},
        "nothing",
    ],
    ids=str,
)
def test_what_published_tokenizers_do_passes(tmp_path: Path, normalizer: Any) -> None:
    check_growth(write(tmp_path, normalizer=normalizer) / "tokenizer.json")


def test_real_tokenizers_pass_and_what_is_none_is_left_to_the_loader(tmp_path: Path) -> None:
    check_growth(GUIDE / "tokenizer.json")
    check_growth(GOLDEN / "tokenizer" / "tokenizer.json")
    check_growth(tmp_path / "nothing.json")
    (tmp_path / "list.json").write_text("[1]")
    check_growth(tmp_path / "list.json")
