"""Sampling: filters against plain NumPy, seeds, penalties, and what options refuse."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokamac.engine import KVSpec, OptionError, PromptCacheSpec, Sampling
from tokamac.engine.core import recommended_sampling
from tokamac.engine.sampling import Sampler, keep_min_p, keep_top_k, keep_top_p, penalise_repeats

# Hundredths: nearer values would be ties in float32 once they are probabilities.
LOGITS = st.lists(st.integers(-800, 800), min_size=2, max_size=30, unique=True).map(lambda n: [i / 100 for i in n])


def kept(filtered: mx.array) -> set[int]:
    return set(np.flatnonzero(np.isfinite(np.asarray(filtered[0]))).tolist())


def probabilities(logits: list[float]) -> np.ndarray:
    exponentials = np.exp(np.array(logits) - max(logits))
    return exponentials / exponentials.sum()


@given(LOGITS, st.integers(1, 40))
def test_top_k_keeps_the_k_likeliest(logits: list[float], k: int) -> None:
    assert kept(keep_top_k(mx.array([logits]), k)) == set(np.argsort(logits)[-k:].tolist())


@given(LOGITS, st.floats(0.05, 0.99))
def test_top_p_keeps_the_smallest_set_that_reaches_p(logits: list[float], p: float) -> None:
    chosen = kept(keep_top_p(mx.array([logits]), p))
    chances = probabilities(logits)
    order = np.argsort(chances)[::-1]
    assert chosen == set(order[: len(chosen)].tolist())  # the likeliest ones
    assert chances[order[: len(chosen)]].sum() >= p - 1e-5
    assert chances[order[: len(chosen) - 1]].sum() < p + 1e-5


@given(LOGITS, st.floats(0.01, 0.9))
def test_min_p_keeps_what_is_near_the_likeliest(logits: list[float], share: float) -> None:
    chances = probabilities(logits)
    chosen = kept(keep_min_p(mx.array([logits]), share))
    assert all(chances[i] >= share * chances.max() * (1 - 1e-4) for i in chosen)
    assert all(chances[i] <= share * chances.max() * (1 + 1e-4) for i in set(range(len(logits))) - chosen)


def test_the_repetition_penalty_by_hand() -> None:
    logits = mx.array([[2.0, -2.0, 1.0, 0.0]])
    penalised = penalise_repeats(logits, mx.array([0, 1, 1]), 2.0)
    assert penalised.tolist() == [[1.0, -4.0, 1.0, 0.0]]


def draw(sampling: Sampling, count: int = 40, vocabulary: int = 50) -> list[int]:
    logits = mx.random.normal((1, vocabulary), key=mx.random.key(5)) * 2
    sampler = Sampler(sampling.resolved(Sampling()), [1, 2, 3])
    return [int(sampler(logits).item()) for _ in range(count)]


def test_the_same_seed_gives_the_same_tokens_and_another_does_not() -> None:
    assert draw(Sampling(seed=3)) == draw(Sampling(seed=3))
    assert draw(Sampling(seed=3)) != draw(Sampling(seed=4))
    assert draw(Sampling()) != draw(Sampling())  # no seed: a fresh one


def test_temperature_zero_is_greedy() -> None:
    assert len(set(draw(Sampling(temperature=0)))) == 1


def test_top_k_one_is_greedy_at_any_temperature() -> None:
    assert set(draw(Sampling(temperature=2.0, top_k=1))) == set(draw(Sampling(temperature=0)))


def test_sampled_shares_follow_the_softmax() -> None:
    logits = mx.log(mx.array([[0.5, 0.3, 0.2]]))
    sampler = Sampler(Sampling(temperature=1, seed=0).resolved(Sampling()), [])
    counts = np.bincount([int(sampler(logits).item()) for _ in range(3000)], minlength=3) / 3000
    assert np.abs(counts - [0.5, 0.3, 0.2]).max() < 0.04


def test_a_strong_penalty_ends_repetition() -> None:
    logits = mx.array([[3.0, 2.9, 2.8, 0.0]])
    sampler = Sampler(Sampling(temperature=0, repetition_penalty=2.0).resolved(Sampling()), [])
    assert [int(sampler(logits).item()) for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": -0.1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 1},
        {"repetition_penalty": 0},
        {"seed": -1},
        {"max_tokens": 0},
        {"stop": ("",)},
    ],
)
def test_sampling_out_of_range_is_refused_with_a_remedy(change: dict[str, object]) -> None:
    with pytest.raises(OptionError) as caught:
        Sampling(**change)  # type: ignore[arg-type]
    assert caught.value.hint


@pytest.mark.parametrize(
    "change",
    [{"key_bits": 7}, {"value_bits": 1}, {"group_size": 48}, {"window": 1}, {"keep": -1}, {"window": 8, "keep": 8}],
)
def test_kv_specs_out_of_range_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        KVSpec(**change)  # type: ignore[arg-type]


def test_a_prompt_cache_has_no_negative_size() -> None:
    with pytest.raises(OptionError):
        PromptCacheSpec(memory_bytes=-1)


def test_what_is_not_asked_for_comes_from_the_model_then_from_the_defaults() -> None:
    recommended = recommended_sampling({"temperature": 0.6, "top_k": 20, "top_p": 7})
    assert (recommended.temperature, recommended.top_k, recommended.top_p) == (0.6, 20, None)  # 7 is nonsense
    resolved = Sampling(temperature=0.1).resolved(recommended)
    assert (resolved.temperature, resolved.top_k, resolved.top_p, resolved.min_p) == (0.1, 20, 1.0, 0.0)
    assert recommended_sampling({"do_sample": False, "temperature": 0.9}).temperature == 0.0


def test_a_stop_text_alone_is_one_stop() -> None:
    assert Sampling(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert Sampling(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert draw(Sampling(temperature=1e-40)) == draw(Sampling(temperature=0))
