"""Where memory is short, prefill on Metal asks for the fused kernels that MLX leaves aside, and nothing else does."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from tests.engine.seeded import write_model
from tokamac.engine import Engine, Finished, MemoryPressure, Sampling
from tokamac.engine.perf import memory
from tokamac.engine.perf.peak_memory import predict_peak

PROMPT = [5 + i * i % 250 for i in range(900)]


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Return, for each attention call, its queries and whether a fused kernel was asked for. Here there is none to run."""
    calls: list[tuple[int, bool]] = []
    attend: Any = mx.fast.scaled_dot_product_attention

    def record(queries: mx.array, *arrays: mx.array, force_fused: bool = False, **options: Any) -> mx.array:
        calls.append((queries.shape[2], force_fused))
        out: mx.array = attend(queries, *arrays, **options)
        return out

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", record)
    return calls


@pytest.mark.usefixtures("settled_memory")
def test_where_the_gpu_can_not_run_the_kernel_smaller_pieces_do(tmp_path, monkeypatch):
    attend: Any = mx.fast.scaled_dot_product_attention
    forced = 0

    def refuse(*arrays: mx.array, force_fused: bool = False, **options: Any) -> mx.array:
        nonlocal forced
        forced += force_fused
        if force_fused:
            raise RuntimeError("Maximum threads per threadgroup is 96 but requested 128 for kernel steel_attention")
        out: mx.array = attend(*arrays, **options)
        return out

    folder = write_model(tmp_path, head_dim=256, num_attention_heads=8, max_position_embeddings=2048)
    others = mx.get_active_memory()
    with Engine.load(folder, prompt_cache=None) as engine:
        sampling = Sampling(temperature=0, max_tokens=3)
        *_, plain = engine.generate(PROMPT, sampling)
        shape = engine._runner.runtime.shape
        peaks = [predict_peak(shape, held=0, new=len(PROMPT) - 1, chunk=chunk, reply=1).total for chunk in (512, 256)]
        monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", refuse)
        monkeypatch.setattr(memory, "array_budget", lambda: others + sum(peaks) // 2)
        *events, last = engine.generate(PROMPT, sampling)
    assert forced == 1
    told = [event for event in events if isinstance(event, MemoryPressure)]
    assert [each.fused_bytes > 0 for each in told] == [True, False]
    assert told[1].failed
    assert isinstance(plain, Finished)
    assert isinstance(last, Finished)
    assert last.text == plain.text


@pytest.mark.parametrize(("head_dim", "forces"), [(256, True), (112, False)])
@pytest.mark.usefixtures("settled_memory")
def test_fused_attention_is_asked_for_where_there_is_a_kernel(tmp_path, monkeypatch, forced, head_dim, forces):
    folder = write_model(tmp_path, head_dim=head_dim, num_attention_heads=8, max_position_embeddings=2048)
    others = mx.get_active_memory()
    with Engine.load(folder, prompt_cache=None) as engine:
        shape = engine._runner.runtime.shape
        peaks = [
            predict_peak(each, held=0, new=len(PROMPT) - 1, chunk=512, reply=1).total
            for each in (shape, replace(shape, force_fused=True))
        ]
        assert (peaks[1] < peaks[0]) == forces
        monkeypatch.setattr(memory, "array_budget", lambda: others + (sum(peaks) // 2 if forces else peaks[0] - 1))
        mx.clear_cache()
        forced.clear()
        *events, last = engine.generate(PROMPT, Sampling(temperature=0, max_tokens=3))
    assert isinstance(last, Finished)
    (told,) = [event for event in events if isinstance(event, MemoryPressure)]
    assert (told.fused_bytes > 0) == forces
    assert (told.chunk is None) == forces
    assert {force for queries, force in forced if queries > 1} == {forces}
    assert {force for queries, force in forced if queries == 1} == {False}
