"""The first steps after loading, outside of any reply: they are taken, and leave no trace."""

import mlx.core as mx
import pytest

from tokamac.engine import Engine, Finished, LoadProgress, Sampling
from tokamac.engine.errors import ModelDamagedError
from tokamac.engine.generation import NO_NUMBER, Generation
from tokamac.engine.options import PromptCacheSpec

SEEDED = Sampling(temperature=1, seed=5, max_tokens=12)
PROMPT = [3 + i % 90 for i in range(60)]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What was computed: of each call, its kind and how many tokens were held before."""
    seen: list[tuple[str, int]] = []
    prefill, step = Generation.prefill, Generation._step

    def read(run: Generation, ids: list[int], chunk: int):  # type: ignore[no-untyped-def]
        seen.append(("prefill", len(run.cached_ids)))
        return prefill(run, ids, chunk)

    def decode(run: Generation, token: mx.array, sampler: object, *, checked: bool) -> mx.array:
        seen.append(("step", len(run.cached_ids)))
        return step(run, token, sampler, checked=checked)  # type: ignore[arg-type]

    monkeypatch.setattr(Generation, "prefill", read)
    monkeypatch.setattr(Generation, "_step", decode)
    return seen


def finished(engine: Engine) -> Finished:
    last = list(engine.generate(PROMPT, SEEDED))[-1]
    assert isinstance(last, Finished)
    return last


def test_loading_reads_a_few_tokens_and_decodes_two_and_says_so(steps):
    told: list[LoadProgress] = []
    with Engine.load("guide", progress=told.append):
        assert steps == [("prefill", 0), ("step", 32), ("step", 33)]
    assert told[-1].stage == "warm-up"


def test_it_leaves_no_trace(steps, monkeypatch):
    with Engine.load("guide", prompt_cache=PromptCacheSpec(disk=False)) as engine:
        warmed = list(steps)
        store = engine._runner._store
        assert store.nbytes == 0
        assert store.rates.prefill_s(1) is None
        assert engine.live() is None
        assert engine.memory().peak <= engine.memory().active + (64 << 20)
        with_it = finished(engine)
        assert with_it.metrics.cached_tokens == 0
    monkeypatch.setattr("tokamac.engine.loading.warm_up", lambda *_: None)
    with Engine.load("guide", prompt_cache=PromptCacheSpec(disk=False)) as engine:
        without = finished(engine)
    assert warmed
    assert with_it.text == without.text
    assert with_it.predicted_peak_bytes == without.predicted_peak_bytes


def test_a_model_that_fails_in_it_is_loaded_all_the_same(monkeypatch):
    monkeypatch.setattr(Generation, "_step", lambda *_, **__: mx.array([NO_NUMBER], mx.uint32))
    with Engine.load("guide") as engine, pytest.raises(ModelDamagedError, match="not numbers"):
        finished(engine)
