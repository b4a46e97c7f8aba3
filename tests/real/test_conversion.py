"""A conversion of SmolLM2, made now: its bits, what its card says, and that mlx-lm takes it as it is."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from tokamac.engine import Engine
from tokamac.quant import convert
from tokamac.quant.report import with_error

PARAMETERS = 134_515_008  # tied: the embedding counts once


@pytest.mark.timeout(900)
def test_a_conversion_says_what_it_is_and_is_the_same_in_mlx_lm(hf: Path, tmp_path: Path) -> None:
    made = convert(hf, tmp_path / "model")
    stored = sum(file.stat().st_size for file in made.path.glob("*.safetensors"))
    assert 0 <= stored - made.weight_bytes < 100_000  # the header
    assert abs(made.weight_bytes * 8 / PARAMETERS - made.bits_per_weight) < 0.01
    recorded = json.loads((made.path / "conversion.json").read_bytes())
    assert recorded["bits_per_weight"] == round(made.bits_per_weight, 3)
    assert made.quality is not None
    card = (made.path / "README.md").read_text(encoding="utf-8")
    quality = recorded["quality"]
    assert quality["kl"] < 0.2
    for figure in (f"{made.bits_per_weight:.2f} bits per weight", with_error(quality["kl"], quality["kl_se"])):
        assert figure in card
    import mlx_lm  # takes seconds, also where this file is only collected

    theirs, tokenizer = mlx_lm.load(str(made.path))
    theirs.set_dtype(mx.float32)  # ours computes in it on a CPU, and bfloat16 moves a model of four bits far
    ids = tokenizer.encode("The capital of France is Paris")
    with Engine.load(made.path, prompt_cache=None, cpu_exact=True) as engine:
        ours = np.array(engine.logprobs(ids))
    expected = np.array(nn.log_softmax(theirs(mx.array([ids]))[0]))
    likely = expected > -15
    assert np.abs(ours - expected)[likely].max() < 0.01
