"""Real GGUF files' vocabularies: the ids of odd texts are llama.cpp's."""

import json
from pathlib import Path

import pytest

from tests.engine.gguf.texts import differing, load, odd_texts
from tests.real.models import GEMMA3, MODELS, SMOLLM2, RealModel

GOLDEN = Path(__file__).parent / "gguf_ids.json"
SPECIAL = {
    SMOLLM2.name: ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>"),
    GEMMA3.name: ("<start_of_turn>", "<end_of_turn>", "<bos>", "<unused12>", "<h1>", "<mask>"),
}


def texts_of(model: RealModel) -> list[str]:
    """Return what its vocabulary is tried with."""
    return [*odd_texts(1_000, 3, SPECIAL[model.name])]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_ids_are_those_of_llama_cpp(model: RealModel) -> None:
    from gguf import GGUFReader

    if not model.gguf.is_file():
        pytest.skip(f"{model.gguf} is not there: python -m tests.real.fetch all")
    keys = {field.name: field.contents() for field in GGUFReader(model.gguf).fields.values()}
    tokenizer = load(keys, model.name)
    texts = texts_of(model)
    assert not differing(texts, [tokenizer.encode(text) for text in texts], json.loads(GOLDEN.read_text())[model.name])
    assert tokenizer.has_chat_template == (model is SMOLLM2)
    assert len(tokenizer.hidden_ids) < 30  # not Gemma's 6,384 spare ones
