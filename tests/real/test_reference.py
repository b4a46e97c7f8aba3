"""SmolLM2 against what others say of it: transformers' log-probabilities and reply, its tokenizer's ids, its template."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.real.models import SMOLLM2
from tokamac.engine import Engine, Message, Sampling

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text(encoding="utf-8"))


def test_log_probabilities_and_a_greedy_reply_are_those_of_transformers(hf: Path) -> None:
    with Engine.load(hf, prompt_cache=None) as engine:
        for text in GOLDEN["texts"]:
            assert engine.tokenizer.encode(text["text"]) == text["ids"]
            rows = np.array(engine.logprobs(text["ids"]))
            found = rows[np.arange(len(text["ids"]) - 1), text["ids"][1:]]
            assert np.abs(found - text["logprobs"]).max() < 5e-3
        chat = GOLDEN["chat"]
        reply = engine.ask([Message("user", chat["question"])], Sampling(temperature=0, max_tokens=60))
        assert reply.text == chat["reply"]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("a  10", ["a", "  ", "1", "0"]),  # digits are cut off first, so both spaces stay together
        ("a 2024", ["a", " ", "2", "0", "2", "4"]),
        ("  two", [" ", " two"]),
        ("tab\t\t9", ["tab", "\t\t", "9"]),
        ("we'll", ["we", "'ll"]),
        ("user\n<|im_end|>", ["user", "\n", ""]),  # a mark is one token, and no text
    ],
)
def test_text_is_split_as_the_model_was_trained(engine: Engine, text: str, tokens: list[str]) -> None:
    ids = engine.tokenizer.encode(text)
    assert [engine.tokenizer.decode([each]) for each in ids] == tokens


def test_the_template_is_the_published_one(smollm2: Path) -> None:
    from gguf import GGUFReader  # not installed where only the tests of every day run

    published = GGUFReader(SMOLLM2.gguf).get_field("tokenizer.chat_template").contents()
    assert json.loads((smollm2 / "tokenizer_config.json").read_bytes())["chat_template"] == published
