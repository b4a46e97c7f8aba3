"""Whole replies on Metal's paths: keys and values packed or not, chunks, sampling, and what is left when a model goes."""

import gc
from typing import Any

import mlx.core as mx
import pytest

from tests.engine.seeded import write_model
from tests.mac import MetalDevice
from tokamac.engine import Engine, Finished, KVSpec, Sampling
from tokamac.engine.events import PrefillProgress

PROMPT = [5 + i * i % 250 for i in range(1300)]
CONTEXT = {"max_position_embeddings": 4096}
SPECS = (KVSpec(), KVSpec(8, 4, 32), KVSpec(4, 4, 32), KVSpec(8, 8, 32, window=256))
MOST_ROWS = 3
"""Of a product with packed values, above which Metal takes one threadgroup for all tokens."""


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each product of weights with packed values."""
    seen: list[int] = []
    multiply = mx.quantized_matmul

    def recorded(x: mx.array, *words: Any, transpose: bool = True, **how: Any) -> mx.array:
        if not transpose:
            seen.append(x.shape[-2])
        return multiply(x, *words, transpose=transpose, **how)

    monkeypatch.setattr(mx, "quantized_matmul", recorded)
    return seen


@pytest.mark.parametrize("kv", SPECS, ids=str)
@pytest.mark.parametrize("heads", [4, 10])
def test_a_reply_is_the_same_whatever_its_prompt_was_cut_into(tmp_path, rows, kv, heads):
    model = write_model(tmp_path, num_attention_heads=heads, num_key_value_heads=2, hidden_size=heads * 32, **CONTEXT)
    how = Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=7, max_tokens=12)
    with Engine.load(model, kv=kv, prompt_cache=None, dtype="float32") as engine:
        texts = []
        for _ in range(2):
            *events, last = engine.generate(PROMPT, how)
            assert isinstance(last, Finished)
            texts.append(last.text)
        done, chunk = (
            [event.done for event in events if isinstance(event, PrefillProgress)],
            engine._runner.runtime.prefill_chunk,
        )
        assert chunk >= 512
        assert done == [*range(0, len(PROMPT) - 1, chunk), len(PROMPT) - 1]
    assert texts[0] == texts[1]
    assert max(rows, default=0) <= MOST_ROWS
    assert bool(rows) == (kv.value_bits < 16)


def test_a_model_that_goes_gives_all_back(tmp_path, metal: MetalDevice, settled_memory: None):
    folder = write_model(tmp_path)
    gc.collect()  # what wrote it refers to itself
    before = mx.get_active_memory()
    engine = Engine.load(folder, prompt_cache=None)
    list(engine.generate(PROMPT[:100], Sampling(max_tokens=4)))
    assert mx.get_active_memory() > before
    assert metal.wired[-1] > 0
    engine.close()
    assert metal.wired[-1] == 0
    assert mx.get_active_memory() <= before + 4096  # random's own state
    assert mx.get_cache_memory() <= 4096
