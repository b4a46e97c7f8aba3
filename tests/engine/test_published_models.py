"""Configs of published models, as they are but with fewer layers: each makes a model, or is refused for a reason that is listed.

published_configs.json has 130 of them. Left out are layers beyond the eighth (the lists of layers are cut alike), parts that see
and hear, ids of tokens, and what says nothing of what is computed.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tokamac.engine.errors import ModelError, ModelUnsupportedError
from tokamac.engine.kv import plan_caches
from tokamac.engine.model.config import model_classes, normalise, read_config
from tokamac.engine.model.config_rules import check_config
from tokamac.engine.model.skeleton import skeleton_model
from tokamac.engine.options import KVSpec
from tokamac.engine.perf.footprint import weigh
from tokamac.engine.perf.inspection import inspect_model

CONFIGS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published_configs.json").read_text())

NO_CLASS = "no language model of the kind"
REFUSED = {
    # model: what the refusal names. Nothing else may be refused.
    "stepfun-ai/Step-3.7-Flash-FP8": "no 'text_config'",  # flat, without rotary bases and the heads of sliding layers
    "google/embeddinggemma-300m": "use_bidirectional_attention",  # it makes vectors of texts, and sees all of a text at once
}


def accept(config: dict[str, Any]) -> str:
    """Return what the loader's rule says against a config; "" where it says nothing."""
    done = normalise(config)
    try:
        check_config(done, model_classes(done)[1])
    except ModelError as error:
        return error.message
    return ""


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - set(REFUSED)))
def test_a_published_model_can_be_built_and_run(name: str) -> None:
    config = normalise(CONFIGS[name])
    # The plan runs the model's forward pass, lazily: shapes fit from the embedding to the head.
    plan = plan_caches(skeleton_model(config, 2), config, KVSpec())
    assert plan.layers


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_refused_is_refused_by_name(name: str) -> None:
    with pytest.raises(ModelUnsupportedError, match=REFUSED[name]):
        skeleton_model(normalise(CONFIGS[name]), 2)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_inspect_and_the_loader_say_the_same(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    said = accept(CONFIGS[name])
    weighed = weigh(read_config(tmp_path), "metal", 1 << 40)
    if said:
        assert weighed == said
        with pytest.raises(ModelUnsupportedError, match="can't be weighed"):
            inspect_model(tmp_path)
    elif isinstance(weighed, str):
        assert "only the files can tell" in weighed  # how much of it was packed
    else:
        assert weighed.stored.parameters > 0
