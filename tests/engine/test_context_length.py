"""How many tokens a model was made for, however its config says it."""

from typing import Any

import pytest

from tokamac.engine.model.config import context_length

LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 32768}, 32768),
        ({"n_positions": 1024, "n_ctx": 1024}, 1024),
        ({"max_seq_len": 2048}, 2048),
        ({"text_config": {"max_position_embeddings": 8192}, "vision_config": {"max_position_embeddings": 64}}, 8192),
        ({"max_position_embeddings": 131072, "rope_scaling": LONGROPE}, 131072),
        ({"model_type": "cohere", "max_position_embeddings": 8192, "model_max_length": 131072}, 131072),
        ({"model_type": "llama", "max_position_embeddings": 8192, "model_max_length": 131072}, 8192),
        ({"model_type": "kimi_linear", "model_max_length": 1048576}, 1048576),
        ({"model_type": "mamba"}, None),
        ({"max_position_embeddings": "many"}, None),
    ],
)
def test_the_context_is_found_in_every_place_configs_have_for_it(config: dict[str, Any], tokens: int | None) -> None:
    assert context_length(config) == tokens
