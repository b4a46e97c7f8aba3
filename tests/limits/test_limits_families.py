"""Every family of the golden cases: headers, loaded arrays and real caches agree on what it costs."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from tests.golden.weights import write_weights
from tokamac.engine.model.config import model_classes, read_config
from tokamac.engine.options import KVSpec
from tokamac.engine.perf.config_cost import UNKNOWN, kv_bytes, kv_layers
from tokamac.engine.perf.cost import cost_of_folder, cost_of_model

GOLDEN = Path(__file__).parent.parent / "golden"
FAMILIES = sorted(path.parent.name for path in GOLDEN.glob("*/case.json"))


def keys_and_values(cache):
    """Yield the arrays of a cache that grow with the context: state-space and convolution layers have none."""
    for part in getattr(cache, "caches", (cache,)):
        if getattr(part, "keys", None) is not None:
            yield from (part.keys, part.values)


@pytest.mark.parametrize("family", FAMILIES)
def test_files_arrays_and_caches_agree(tmp_path, family):
    shutil.copy(GOLDEN / family / "config.json", tmp_path)
    case, config = json.loads((GOLDEN / family / "case.json").read_text()), read_config(tmp_path)
    write_weights(tmp_path, case["seed"], case["shapes"], config)
    model, _ = load_model(
        tmp_path, lazy=True, model_config=config, get_model_classes=lambda config: model_classes(config)
    )
    assert cost_of_folder(tmp_path, config) == cost_of_model(model, config)
    if config["model_type"] in UNKNOWN:
        assert kv_layers(config) is None
        return
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[1, 2, 3, 4]]), cache=caches))
    a_token = sum(array.nbytes // array.shape[2] for cache in caches for array in keys_and_values(cache))
    assert kv_bytes(kv_layers(config), KVSpec(), 4, value_bytes=4) == 4 * a_token
