"""A model that the rule for configs doubts: refused, or loaded at one's own risk, which every reply says."""

import json
from pathlib import Path

import pytest

from tests.engine.seeded import write_model
from tokamac.engine import Engine, Finished, Sampling
from tokamac.engine.errors import ModelUnsupportedError


@pytest.fixture
def doubtful(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", logits_scaling=2.0, embedding_multiplier=3.0)


def test_what_the_rule_doubts_is_refused_with_a_way_on(doubtful: Path) -> None:
    with pytest.raises(ModelUnsupportedError, match="embedding_multiplier") as caught:
        Engine.load(doubtful, prompt_cache=None)
    assert "--unchecked" in caught.value.hint


def test_loaded_unchecked_it_names_every_doubt_with_every_reply(doubtful: Path) -> None:
    with Engine.load(doubtful, prompt_cache=None, unchecked=True) as engine:
        assert [
            key in doubt
            for doubt, key in zip(engine.spec.doubts, ("embedding_multiplier", "logits_scaling"), strict=True)
        ]
        for _ in range(2):
            *_, end = engine.generate([5, 6, 7], Sampling(temperature=0.0, max_tokens=2))
            assert isinstance(end, Finished)
            assert end.doubts == engine.spec.doubts


def test_a_model_without_doubts_says_nothing_of_them(tmp_path: Path) -> None:
    with Engine.load(write_model(tmp_path / "model"), prompt_cache=None, unchecked=True) as engine:
        assert engine.spec.doubts == ()


@pytest.mark.parametrize(
    "changes", [{"quantization_config": {"quant_method": "bitsandbytes"}}, {"model_type": "nothing"}]
)
def test_what_makes_no_model_is_refused_unchecked_too(tmp_path: Path, changes: dict[str, object]) -> None:
    folder = write_model(tmp_path / "model")
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    with pytest.raises(ModelUnsupportedError):
        Engine.load(folder, prompt_cache=None, unchecked=True)
