"""Sampling: filters against plain NumPy, seeds, penalties, and what options refuse."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokamac.engine import KVSpec, OptionError, PromptCacheSpec, Sampling
from tokamac.engine.core import recommended_sampling
from tokamac.engine.sampling import TIES, Sampler, keep_min_p, keep_top_p, penalise_repeats, take_top_k

# Hundredths: nearer values would be ties in float32 once they are probabilities.
LOGITS = st.lists(st.integers(-800, 800), min_size=2, max_size=30, unique=True).map(lambda n: [i / 100 for i in n])


def kept(filtered: mx.array) -> set[int]:
    return set(np.flatnonzero(np.isfinite(np.asarray(filtered[0]))).tolist())


def probabilities(logits: list[float]) -> np.ndarray:
    exponentials = np.exp(np.array(logits) - max(logits))
    return exponentials / exponentials.sum()


@given(LOGITS, st.integers(1, 30))
def test_top_k_takes_the_k_likeliest(logits: list[float], k: int) -> None:
    k = min(k, len(logits))
    taken, ids = take_top_k(mx.array([logits]), k)
    assert {int(ids[0, place].item()) for place in kept(taken)} == set(np.argsort(logits)[-k:].tolist())


@given(st.integers(1, 40), st.integers(0, TIES), st.integers(0, 9))
def test_top_k_takes_few_of_a_large_vocabulary_in_the_order_of_their_ids(k: int, ties: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    values = np.concatenate([[3.0] * (k - 1), [2.0] * (1 + ties), [1.0] * 1000]).astype(np.float32)
    values = values[random.permutation(len(values))]
    taken, ids = take_top_k(mx.array(values[None]), k)
    assert taken.shape == ids.shape == (1, k + TIES)
    places = np.asarray(ids[0])
    assert (np.diff(places.astype(np.int64)) > 0).all()
    stay = places[sorted(kept(taken))]
    assert stay.tolist() == np.flatnonzero(values >= 2).tolist()  # those tied with the k-th are among them
    assert np.asarray(taken[0])[sorted(kept(taken))].tolist() == values[stay].tolist()


def drawn_from_the_whole(logits: mx.array, sampling: Sampling, seen: list[int], count: int) -> list[int]:
    """What a sampler should draw, from filters over the whole vocabulary, each written out plainly."""
    key, tokens = mx.random.key(sampling.seed or 0), []
    for _ in range(count):
        row = np.asarray(logits.astype(mx.float32))[0].copy()
        penalty = np.float32(sampling.repetition_penalty)
        for token in set(seen):
            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
        if 0 < (sampling.top_k or 0) < row.size:  # before the temperature, whose rounding makes ties of its own
            row[row < np.sort(row)[-sampling.top_k]] = -np.inf
        row *= np.float32(1 / (sampling.temperature or 1))
        if sampling.top_p is not None and sampling.top_p < 1:
            chances = np.exp(row.astype(np.float64) - row.max())
            chances /= chances.sum()
            order = np.argsort(-row, kind="stable")
            beyond = np.cumsum(chances[order]) - chances[order] >= sampling.top_p
            row[order[beyond]] = -np.inf
        if sampling.min_p:
            row[row < row.max() + np.log(np.float32(sampling.min_p))] = -np.inf
        key, own = mx.random.split(key)
        tokens.append(int(mx.random.categorical(mx.array(row[None]), key=own).item()))
        seen.append(tokens[-1])
    return tokens


@given(
    seed=st.integers(0, 999),
    temperature=st.sampled_from((0.3, 1.0, 1.7)),
    top_k=st.sampled_from((0, 1, 2, 20, 64, 500, 2000)),
    top_p=st.sampled_from((1.0, 0.2, 0.83, 0.95)),
    min_p=st.sampled_from((0.0, 0.07)),
    penalty=st.sampled_from((1.0, 1.3)),
    dtype=st.sampled_from((mx.float32, mx.bfloat16)),
)
@settings(max_examples=60, deadline=None)
def test_a_seed_draws_the_tokens_that_filters_over_the_whole_vocabulary_give(  # noqa: PLR0917
    seed: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    penalty: float,
    dtype: mx.Dtype,
) -> None:
    asked = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty, seed=seed
    )
    logits = (3 * mx.random.normal((1, 1500), key=mx.random.key(seed))).astype(dtype)  # bfloat16: with ties
    sampler = Sampler(asked.resolved(Sampling()), [5, 6, 7])
    drawn = [int(sampler(logits).item()) for _ in range(12)]
    assert drawn == drawn_from_the_whole(logits, asked, [5, 6, 7], 12)


@pytest.mark.parametrize(
    ("asked", "searches"),
    [
        (Sampling(top_k=20, top_p=0.9, min_p=0.05), 1),
        (Sampling(top_k=20), 1),
        (Sampling(top_p=0.9), 1),
        (Sampling(min_p=0.05), 0),
        (Sampling(temperature=0, top_k=20, top_p=0.9), 0),
    ],
)
def test_a_token_searches_the_vocabulary_once_at_most(
    asked: Sampling, searches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def counted(name: str) -> None:
        own = getattr(mx, name)

        def call(array: mx.array, *args: object, **kwargs: object) -> object:
            sizes.append(array.shape[-1])
            return own(array, *args, **kwargs)

        monkeypatch.setattr(mx, name, call)

    for name in ("sort", "argsort", "partition", "argpartition", "topk"):
        counted(name)
    sampler = Sampler(asked.resolved(Sampling()), [])
    sampler(mx.random.normal((1, 5000), key=mx.random.key(1)))
    assert len([size for size in sizes if size == 5000]) == searches
    assert all(size in (5000, 20 + TIES) for size in sizes)


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
    recommended = recommended_sampling({"temperature": 0.6, "top_k": 20, "top_p": 7, "repetition_penalty": 1.05})
    assert Sampling().resolved(recommended).repetition_penalty == 1.05
    assert Sampling(repetition_penalty=1.0).resolved(recommended).repetition_penalty == 1.0
    assert Sampling().resolved(Sampling()).repetition_penalty == 1.0
    assert (recommended.temperature, recommended.top_k, recommended.top_p) == (0.6, 20, None)  # 7 is nonsense
    resolved = Sampling(temperature=0.1).resolved(recommended)
    assert (resolved.temperature, resolved.top_k, resolved.top_p, resolved.min_p) == (0.1, 20, 1.0, 0.0)
    assert recommended_sampling({"do_sample": False, "temperature": 0.9}).temperature == 0.0


def test_a_stop_text_alone_is_one_stop() -> None:
    assert Sampling(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert Sampling(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert draw(Sampling(temperature=1e-40)) == draw(Sampling(temperature=0))
