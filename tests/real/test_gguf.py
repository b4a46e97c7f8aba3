"""SmolLM2's GGUF file as it is: what it computes, and what its prompt cache knows it by."""

import shutil
from pathlib import Path

from tests.real.models import SMOLLM2
from tokamac.engine import Engine, Message, Sampling
from tokamac.quant import quality

QUESTION = [
    Message("user", "Explain in one sentence why the sky looks blue to somebody who stands on the ground. " * 20)
]


def test_it_is_within_0_002_nats_of_its_unpacked_form(hf: Path) -> None:
    found = quality(SMOLLM2.gguf, hf, tokens=256)
    assert found.kl < 0.002


def test_a_renamed_copy_goes_on_from_the_prompts_of_the_file(smollm2: Path, tmp_path: Path) -> None:
    del smollm2  # it is here
    cached = []
    for place in (SMOLLM2.gguf, shutil.copy(SMOLLM2.gguf, tmp_path / "renamed.gguf")):
        with Engine.load(place) as engine:
            cached.append(engine.ask(QUESTION, Sampling(temperature=0, max_tokens=4)).metrics.cached_tokens)
    assert cached[0] == 0
    assert cached[1] > 256
