"""Sampling: filters against plain NumPy, seeds, penalties, DRY; and perplexity."""

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.helpers import write_model
from tokamac.engine import ContextError, Engine, KVSpec, OptionError, PromptCacheSpec, Sampling
from tokamac.engine.lab.scoring import windows
from tokamac.engine.loading import recommended_sampling
from tokamac.engine.options import STAGES
from tokamac.engine.sampling import (
    GROWS_BY,
    TIES,
    Breakers,
    Dry,
    Sampler,
    TokenSets,
    exclude_top,
    find_breakers,
    keep_min_p,
    keep_top_p,
    mask_top_k,
    match_lengths,
    penalise_presence,
    penalise_repeats,
    take_top_k,
)

# Hundredths: nearer values would be ties in float32 once they are probabilities.
PLAIN = Sampling(min_p=0, repetition_penalty=1)  # a model whose files say that nothing is to be done
LOGITS = st.lists(st.integers(-800, 800), min_size=2, max_size=30, unique=True).map(lambda n: [i / 100 for i in n])


def kept(filtered: mx.array) -> set[int]:
    return set(np.flatnonzero(np.isfinite(np.asarray(filtered[0]))).tolist())


def probabilities(logits: list[float]) -> np.ndarray:
    exponentials = np.exp(np.array(logits) - max(logits))
    return exponentials / exponentials.sum()


@given(st.lists(st.lists(st.integers(-3, 3), min_size=4, max_size=9), min_size=1, max_size=5), st.integers(0, 3))
@settings(deadline=None)
def test_the_host_chooses_what_mlx_does_where_only_the_largest_logit_counts(rows: list[list[int]], least: int) -> None:
    """Of several that are largest, the first."""
    width = min(map(len, rows))
    logits = np.array([row[:width] for row in rows], np.float32)
    own = Sampling(temperature=0, min_tokens=least)
    here, there = (Sampler(own, [1, 2], TokenSets(ends=frozenset({0}))) for _ in range(2))
    for row in range(least):  # an end may be the largest, and not be chosen
        assert not here.takes_likeliest
        assert here(mx.array(logits[:1])).item() == there(mx.array(logits[:1])).item() != 0, row
    assert here.takes_likeliest
    chosen, states = there.choose_rows(mx.array(logits))
    tokens, own_states = here.take_likeliest_rows(logits)
    assert tokens == chosen.tolist() == [int(np.flatnonzero(row == row.max())[0]) for row in logits]
    assert [state.made for state in own_states] == [state.made for state in states]


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.5}, {"logprobs": 2}, {"repetition_penalty": 1.1}, {"presence_penalty": 0.5}, {"min_tokens": 1},
        {"dry_multiplier": 0.8}, {"logit_bias": ((3, 5.0),)},
    ],
    ids=str,
)  # fmt: skip
def test_where_more_counts_than_the_largest_logit_the_host_does_not_choose(more: dict[str, Any]) -> None:
    assert Sampler(Sampling(temperature=0), [1, 2]).takes_likeliest
    assert not Sampler(Sampling(**{"temperature": 0, **more}), [1, 2]).takes_likeliest


@given(st.integers(1, 40), st.integers(0, TIES), st.integers(0, 9))
@settings(deadline=None)
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
    tokens: list[int] = []
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
        key = mx.random.key(xxhash.xxh3_64_intdigest(f"{sampling.seed or 0} {len(seen)} token".encode()))
        tokens.append(int(mx.random.categorical(mx.array(row[None]), key=key).item()))
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
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float, dtype: mx.Dtype
) -> None:
    asked = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty, seed=seed
    )
    logits = (3 * mx.random.normal((1, 1500), key=mx.random.key(seed))).astype(dtype)  # bfloat16: with ties
    sampler = Sampler(asked.resolved(PLAIN), [5, 6, 7])
    drawn = [int(sampler(logits).item()) for _ in range(12)]
    assert drawn == drawn_from_the_whole(logits, asked, [5, 6, 7], 12)


@pytest.mark.parametrize(
    ("asked", "searches"),
    [
        (Sampling(top_k=20, top_p=0.9, min_p=0.05), 1), (Sampling(top_k=20), 1), (Sampling(top_p=0.9), 1),
        (Sampling(min_p=0.05), 0), (Sampling(temperature=0, top_k=20, top_p=0.9), 0),
    ],
)  # fmt: skip
def test_a_token_searches_the_words_once(asked: Sampling, searches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def counted(name: str) -> None:
        own = getattr(mx, name)

        def call(array: mx.array, *args: object, **kwargs: object) -> object:
            sizes.append(array.shape[-1])
            return own(array, *args, **kwargs)

        monkeypatch.setattr(mx, name, call)

    for name in ("sort", "argsort", "partition", "argpartition", "topk"):
        counted(name)
    sampler = Sampler(asked.resolved(PLAIN), [])
    sampler(mx.random.normal((1, 5000), key=mx.random.key(1)))
    assert len([size for size in sizes if size == 5000]) == searches
    assert all(size in (5000, 20 + TIES) for size in sizes)


@given(LOGITS, st.floats(0.05, 0.99))
@settings(deadline=None)
def test_top_p_keeps_the_smallest_set_that_reaches_p(logits: list[float], p: float) -> None:
    chosen = kept(keep_top_p(mx.array([logits]), p))
    chances = probabilities(logits)
    order = np.argsort(chances)[::-1]
    assert chosen == set(order[: len(chosen)].tolist())  # the likeliest ones
    assert chances[order[: len(chosen)]].sum() >= p - 1e-5
    assert chances[order[: len(chosen) - 1]].sum() < p + 1e-5


@given(LOGITS, st.floats(0.01, 0.9))
@settings(deadline=None)
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
    sampler = Sampler(sampling.resolved(PLAIN), [1, 2, 3])
    return [int(sampler(logits).item()) for _ in range(count)]


def test_the_same_seed_gives_the_same_tokens_and_another_does_not() -> None:
    assert draw(Sampling(seed=3)) == draw(Sampling(seed=3))
    assert draw(Sampling(seed=3)) != draw(Sampling(seed=4))
    assert draw(Sampling()) != draw(Sampling())  # no seed: a fresh one


def test_temperature_zero_is_greedy() -> None:
    assert len(set(draw(Sampling(temperature=0)))) == 1


def test_sampled_shares_follow_the_softmax() -> None:
    logits = mx.log(mx.array([[0.5, 0.3, 0.2]]))
    sampler = Sampler(Sampling(temperature=1, seed=0).resolved(PLAIN), [])
    counts = np.bincount([int(sampler(logits).item()) for _ in range(3000)], minlength=3) / 3000
    assert np.abs(counts - [0.5, 0.3, 0.2]).max() < 0.04


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": -0.1}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}, {"min_p": 1}, {"repetition_penalty": 0},
        {"seed": -1}, {"max_tokens": 0}, {"stop": ("",)}, {"stop_token_ids": (-1,)}, {"min_tokens": -1},
        {"min_tokens": 5, "max_tokens": 4}, {"logit_bias": {3: 101}}, {"logit_bias": {-3: 1}},
        {"logit_bias": ((3, 1), (3, 2))}, {"logit_bias": (3, 1)}, {"logit_bias": "3=1"}, {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1}, {"xtc_probability": 1.1}, {"xtc_threshold": 0.6}, {"dry_multiplier": -1},
        {"dry_base": 0.9}, {"dry_allowed_length": 0}, {"dry_sequence_breakers": ("",)}, {"order": ("top_k", "xtc")},
        {"order": (*STAGES, "dry")}, {"order": ("typical_p", *STAGES[1:])}, {"order": "top_k"}, {"logprobs": 101},
        {"logprobs": -1},
    ],
)  # fmt: skip
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
    assert Sampling().resolved(PLAIN).repetition_penalty == 1.0
    assert (recommended.temperature, recommended.top_k, recommended.top_p) == (0.6, 20, None)  # 7 is nonsense
    resolved = Sampling(temperature=0.1).resolved(recommended)
    assert (resolved.temperature, resolved.top_k, resolved.top_p, resolved.min_p) == (0.1, 20, 1.0, 0.0)
    assert recommended_sampling({"do_sample": False, "temperature": 0.9}).temperature == 0.0
    for nonsense in (float("inf"), float("nan"), -float("inf"), 10**400):
        assert recommended_sampling({"temperature": nonsense, "top_k": nonsense, "min_p": nonsense}) == Sampling()


def test_what_neither_model_nor_user_names_is_a_mild_penalty_but_where_the_user_is_greedy() -> None:
    named = Sampling().resolved(Sampling())
    assert (named.temperature, named.min_p, named.repetition_penalty) == (0.7, 0.05, 1.1)
    own = Sampling(min_p=0, repetition_penalty=1.3).resolved(Sampling())
    assert (own.min_p, own.repetition_penalty) == (0, 1.3)
    greedy = Sampling(temperature=0).resolved(Sampling())
    assert (greedy.min_p, greedy.repetition_penalty) == (0.0, 1.0)
    assert Sampler(greedy, []).takes_likeliest


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert draw(Sampling(temperature=1e-40)) == draw(Sampling(temperature=0))


def tokens_of(sampling: Sampling, logits: mx.array, count: int, sets: TokenSets | None = None) -> list[int]:
    sampler = Sampler(sampling.resolved(PLAIN), [0], sets or TokenSets())
    return [int(sampler(logits).item()) for _ in range(count)]


DRAWN = {  # since random numbers are those of a position
    Sampling(seed=7): [520, 565, 847, 103, 307, 277, 408, 614, 868, 130, 596, 376],
    Sampling(temperature=1.5, seed=8): [783, 85, 758, 799, 311, 131, 629, 8, 862, 890, 28, 756],
    Sampling(temperature=1.0, top_p=0.9, seed=9): [721, 868, 539, 277, 728, 570, 223, 435, 103, 232, 746, 500],
    Sampling(temperature=1.2, top_p=0.95, top_k=40, min_p=0.02, repetition_penalty=1.2, seed=10): [
        868, 147, 614, 340, 408, 475, 8, 540, 130, 697, 274, 22,
    ],
    Sampling(temperature=0, repetition_penalty=1.3, seed=1): [868, 408, 697, 362, 204, 540, 868, 868, 868, 868, 868, 868],
}  # fmt: skip


@pytest.mark.skipif(
    mx.default_device() != mx.Device(mx.cpu), reason="recorded on a CPU; sums are rounded otherwise on a GPU"
)
@pytest.mark.parametrize("asked", DRAWN)
def test_a_seed_draws_what_it_drew_before(asked: Sampling) -> None:
    sampler = Sampler(asked.resolved(PLAIN), [4, 5, 6])
    logits = 2 * mx.random.normal((1, 900), key=mx.random.key(3))
    assert [int(sampler(logits).item()) for _ in range(12)] == DRAWN[asked]


@given(seed=st.integers(0, 999), cut=st.integers(1, 11), xtc=st.sampled_from((0.0, 0.5)))
@settings(max_examples=20, deadline=None)
def test_a_continued_reply_draws_what_the_whole_one_would(seed: int, cut: int, xtc: float) -> None:
    asked = Sampling(temperature=1.3, seed=seed, xtc_probability=xtc, xtc_threshold=0.05).resolved(PLAIN)
    logits = [2 * mx.random.normal((1, 200), key=mx.random.key(at)) for at in range(12)]
    whole, prompt = Sampler(asked, [4, 5]), [4, 5]
    said = [int(whole(each).item()) for each in logits]
    rest = Sampler(asked, [*prompt, *said[:cut]])
    assert [int(rest(each).item()) for each in logits[cut:]] == said[cut:]


def test_a_bias_is_added_before_all_else() -> None:
    logits = mx.array([[1.0, 2.0, 3.0, 0.0]])
    assert tokens_of(Sampling(temperature=0, logit_bias={3: 4.0}), logits, 1) == [3]
    assert tokens_of(Sampling(temperature=0, logit_bias={2: -100, 1: -100}), logits, 1) == [0]
    # The one that top-k keeps is found among biased logits.
    assert set(tokens_of(Sampling(temperature=5, top_k=1, seed=1, logit_bias={0: 50}), logits, 20)) == {0}


def test_presence_and_frequency_by_hand() -> None:
    logits, counts = mx.array([[1.0, 1.0, 1.0]]), mx.array([[0.0, 1.0, 3.0]])
    assert penalise_presence(logits, counts, 0.5, 0.25).tolist() == [[1.0, 0.25, -0.25]]


def test_presence_is_of_the_reply_alone_and_frequency_grows() -> None:
    logits = mx.array([[3.0, 2.5, 1.0]])
    # Token 0 stands in the prompt, which does not count. Then 0: 2, 1: 2.5; then 0: 2, 1: 1.5; both have been there: 0 stays.
    assert tokens_of(Sampling(temperature=0, presence_penalty=1.0), logits, 4) == [0, 1, 0, 0]
    # 3 → 2 → 1 → 0 and 2.5 → 1.5 → 0.5, against 1.
    assert tokens_of(Sampling(temperature=0, frequency_penalty=1.0), logits, 6) == [0, 1, 0, 1, 0, 2]


@given(LOGITS, st.floats(0.001, 0.5))
@settings(deadline=None)
def test_xtc_leaves_the_least_likely_of_those_above_the_threshold(logits: list[float], threshold: float) -> None:
    chosen = kept(exclude_top(mx.array([logits]), threshold, mx.arange(len(logits))[None] == 0))  # token 0 is protected
    chances = probabilities(logits)
    above = [token for token in np.argsort(-chances).tolist() if chances[token] >= threshold]
    if any(abs(chance / threshold - 1) < 1e-5 for chance in chances):
        return  # on the threshold: rounding decides
    assert chosen == set(range(len(logits))) - set(above[:-1]) | {0}


def test_xtc_strikes_as_often_as_it_is_asked_to() -> None:
    logits = mx.log(mx.array([[0.6, 0.3, 0.1]]))
    how = Sampling(temperature=1, xtc_probability=0.5, xtc_threshold=0.2, seed=3)
    shares = np.bincount(tokens_of(how, logits, 2000), minlength=3) / 2000
    # Half of the draws are as ever; the other half are of 0.3 and 0.1 alone.
    assert np.abs(shares - [0.3, 0.15 + 0.375, 0.05 + 0.125]).max() < 0.05
    ends = TokenSets(kept=frozenset({0}))
    shares = np.bincount(tokens_of(how, logits, 2000, ends), minlength=3) / 2000
    assert np.abs(shares - [0.6, 0.3, 0.1]).max() < 0.05  # what ends a reply is never excluded
    always = Sampling(temperature=1, xtc_probability=1, xtc_threshold=0.2, seed=3)
    assert 0 not in tokens_of(always, logits, 200)


def test_xtc_before_the_temperature_holds_for_the_likeliest_too() -> None:
    logits = mx.log(mx.array([[0.5, 0.3, 0.2]]))
    order = ("penalties", "dry", "top_k", "top_p", "min_p", "xtc", "temperature")
    assert tokens_of(Sampling(temperature=0, xtc_probability=1, order=order), logits, 3) == [2, 2, 2]
    with pytest.raises(OptionError, match="temperature 0"):
        Sampling(temperature=0, xtc_probability=1)
    with pytest.raises(OptionError, match="temperature 0"):  # the model's makers want the likeliest
        Sampling(xtc_probability=1).resolved(Sampling(temperature=0))


def staged(row: np.ndarray, asked: Sampling, seen: list[int]) -> np.ndarray:
    """The stages in plain NumPy, over the whole vocabulary; XTC always strikes."""
    row = row.astype(np.float64)

    def chances() -> np.ndarray:
        powers = np.exp(row - row.max())
        return np.asarray(powers / powers.sum())

    for stage in asked.order:
        if stage == "penalties":
            for token in set(seen):
                row[token] -= asked.presence_penalty + asked.frequency_penalty * seen.count(token)
        elif stage == "top_k" and asked.top_k:
            row[row < np.sort(row)[-asked.top_k]] = -np.inf
        elif stage == "temperature":
            row = row / (asked.temperature or 1)
        elif stage == "top_p":
            order = np.argsort(-row, kind="stable")
            sizes = chances()[order]
            row[order[np.cumsum(sizes) - sizes >= (asked.top_p or 1)]] = -np.inf
        elif stage == "min_p":
            row[row < row.max() + np.log(asked.min_p or 1e-9)] = -np.inf
        elif stage == "xtc":
            sizes = chances()
            above = sizes >= asked.xtc_threshold
            if above.any():
                row[above & (sizes > sizes[above].min())] = -np.inf
    return row


@given(order=st.permutations(STAGES), seed=st.integers(0, 99), top_k=st.sampled_from((0, 3, 12)))
@settings(max_examples=80, deadline=None)
def test_stages_apply_in_the_order_that_is_asked_for(order: list[str], seed: int, top_k: int) -> None:
    asked = Sampling(
        temperature=0.6, top_k=top_k, top_p=0.93, min_p=0.01, xtc_probability=1, xtc_threshold=0.08, order=order,
        presence_penalty=0.7, frequency_penalty=0.4, seed=seed,
    )  # fmt: skip
    logits = 1.5 * mx.random.normal((1, 200), key=mx.random.key(seed))  # more than top-k searches
    sampler, seen = Sampler(asked.resolved(PLAIN), [0]), []
    for _ in range(6):
        allowed = set(np.flatnonzero(np.isfinite(staged(np.asarray(logits[0]), asked, seen))).tolist())
        token = int(sampler(logits).item())
        assert token in allowed
        seen.append(token)


@given(st.integers(1, 60), st.integers(0, 9))
@settings(deadline=None)
def test_top_k_in_place_is_top_k(k: int, seed: int) -> None:
    logits = mx.random.normal((1, 200), key=mx.random.key(seed)).astype(mx.bfloat16).astype(mx.float32)
    taken, places = take_top_k(logits, k)
    assert kept(mask_top_k(logits, k)) == {int(places[0, place].item()) for place in kept(taken)}


def test_nothing_ends_a_reply_before_the_least_number_of_tokens() -> None:
    logits = mx.array([[1.0, 0.5, 3.0, 2.0]])
    ends = TokenSets(ends=frozenset({2, 3}))
    assert tokens_of(Sampling(temperature=0, min_tokens=3), logits, 5, ends) == [0, 0, 0, 2, 2]
    assert tokens_of(Sampling(temperature=0), logits, 1, ends) == [2]


@given(seed=st.integers(0, 99), count=st.integers(0, 40))
@settings(max_examples=30, deadline=None)
def test_scores_are_the_models_own_whatever_is_done_to_its_logits(seed: int, count: int) -> None:
    asked = Sampling(temperature=2, top_k=5, presence_penalty=2, logit_bias={1: 9}, seed=seed, logprobs=count)
    logits = 3 * mx.random.normal((1, 30), key=mx.random.key(seed))
    sampler = Sampler(asked.resolved(PLAIN), [0])
    row = np.asarray(logits[0], dtype=np.float64)
    expected = row - row.max() - np.log(np.exp(row - row.max()).sum())
    drawn = [int(sampler(logits).item()) for _ in range(3)]  # launched ahead: read later, in order
    for token in drawn:
        score = sampler.take_score()
        assert score.logprob == pytest.approx(expected[token], abs=1e-4)
        assert [each for each, _ in score.top] == np.argsort(-expected)[: min(count, 30)].tolist()
        assert [value for _, value in score.top] == pytest.approx(sorted(expected, reverse=True)[:count], abs=1e-4)
    assert sampler.take_score() is None


def test_without_being_asked_for_nothing_is_scored() -> None:
    sampler = Sampler(Sampling(temperature=0).resolved(PLAIN), [0])
    sampler(mx.zeros((1, 5)))
    assert sampler.newest_score() == ()
    assert sampler.take_score() is None


def test_a_token_that_is_put_in_place_of_the_chosen_one_counts_and_is_scored_in_its_place() -> None:
    logits = mx.array([[3.0, 2.5, 1.0]])
    sampler = Sampler(Sampling(temperature=0, presence_penalty=1.0, logprobs=0).resolved(PLAIN), [0])
    assert int(sampler(logits).item()) == 0
    sampler.replace_last(mx.array([2], mx.uint32))
    assert int(sampler(logits).item()) == 0  # it was not used, so it has no penalty
    assert int(sampler(logits).item()) == 1
    total = np.log(np.exp([3.0, 2.5, 1.0]).sum())
    scores = [sampler.take_score() for _ in range(3)]
    assert [score.logprob for score in scores if score] == pytest.approx([1 - total, 3 - total, 2.5 - total], abs=1e-5)


# DRY: cases worked by hand, and the incremental device form against a plain search through the context for every
# token.

VOCABULARY = 6
IDS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40)
HOW = Sampling(dry_multiplier=0.5, dry_base=2.0, dry_allowed_length=2)
NONE = Breakers()


def penalties(dry: Dry, vocabulary: int = VOCABULARY) -> list[float]:
    return [-value for value in dry.penalise(mx.zeros((1, vocabulary))).tolist()[0]]  # type: ignore[index,union-attr,operator]


def searched(ids: list[int], how: Sampling, breakers: Breakers, vocabulary: int = VOCABULARY) -> list[float]:
    """Look for what each place repeats of the end, a token at a time, as the definition has it."""
    since = breakers.last(ids)
    longest = dict.fromkeys(range(vocabulary), 0)
    for place in range(len(ids) - 1):
        length = 0
        while length < min(since, place + 1) and ids[place - length] == ids[-1 - length]:
            length += 1
        following = ids[place + 1]
        longest[following] = max(longest[following], length)
    powers = {token: how.dry_base ** (length - how.dry_allowed_length) for token, length in longest.items()}
    spared = {token for token in longest if longest[token] < how.dry_allowed_length or token in breakers.single}
    return [0.0 if token in spared else how.dry_multiplier * powers[token] for token in longest]


def test_a_breaker_of_several_tokens_breaks_where_it_ends() -> None:
    breakers = Breakers(sequences=((frozenset({1}), (0,)),))
    prompt = [5, 1, 0, 2, 3, 4, 5, 1, 0, 2, 3]
    assert penalties(Dry(HOW, prompt, breakers, VOCABULARY)) == [0, 0, 0, 0, 0.5, 0]
    dry = Dry(HOW, prompt[:7], breakers, VOCABULARY)
    for token in prompt[7:]:
        dry.add(mx.array([token], dtype=mx.uint32))
    assert penalties(dry) == [0, 0, 0, 0, 0.5, 0]


@given(
    ids=IDS,
    cut=st.integers(1, 40),
    allowed=st.integers(1, 4),
    single=st.frozensets(st.integers(0, VOCABULARY - 1), max_size=1),
    sequence=st.one_of(
        st.none(),
        st.tuples(
            st.frozensets(st.integers(0, 5), min_size=1, max_size=2),
            st.lists(st.integers(0, 5), min_size=1, max_size=2),
        ),
    ),
)
@settings(max_examples=150, deadline=None)
def test_token_by_token_it_is_what_a_search_finds(
    ids: list[int], cut: int, allowed: int, single: frozenset[int], sequence: tuple[frozenset[int], list[int]] | None
) -> None:
    how = Sampling(dry_multiplier=0.8, dry_base=1.75, dry_allowed_length=allowed)
    breakers = Breakers(single, () if sequence is None else ((sequence[0], tuple(sequence[1])),))
    dry = Dry(how, ids[:cut], breakers, VOCABULARY)
    np.testing.assert_allclose(penalties(dry), searched(ids[:cut], how, breakers), rtol=1e-5)
    for end in range(cut, len(ids)):
        dry.add(mx.array([ids[end]]))
        np.testing.assert_allclose(penalties(dry), searched(ids[: end + 1], how, breakers), rtol=1e-5)


@given(ids=IDS, most=st.integers(1, 50))
@settings(deadline=None)
def test_lengths_of_a_prompt_are_those_found_one_by_one(ids: list[int], most: int) -> None:
    expected = [
        next(
            (size for size in range(min(most, place + 1)) if ids[place - size] != ids[-1 - size]), min(most, place + 1)
        )
        for place in range(len(ids) - 1)
    ]
    assert match_lengths(ids, most).tolist() == [*expected, 0]


def test_a_reply_longer_than_the_room_that_was_made_is_searched_whole() -> None:
    ids = np.random.default_rng(1).integers(0, VOCABULARY, GROWS_BY + 40).tolist()
    dry = Dry(HOW, ids[:3], NONE, VOCABULARY)
    for token in ids[3:]:
        dry.add(mx.array([token]))
    assert penalties(dry) == pytest.approx(searched(ids, HOW, NONE), rel=1e-5)


@pytest.mark.parametrize("base", [1.0, 1.0001, 1.75, 10.0])
def test_a_long_repetition_leaves_numbers(base: float) -> None:
    how = Sampling(dry_multiplier=1.0, dry_base=base)
    dry = Dry(how, [1, 2] * 1000, NONE, VOCABULARY)
    dry.add(mx.array([1]))
    found = penalties(dry)
    assert np.isfinite(found).all()
    assert found[2] >= 1
    assert [found[each] for each in (0, 1, 3, 4, 5)] == [0] * 5


def test_breakers_are_found_in_tokens_and_across_them() -> None:
    vocabulary = ["a", "b", "\n", "x\n", "ab", "<end>", "cab", "c"]
    spelled = {"b": [1]}
    found = find_breakers(["\n", "ab"], vocabulary, lambda text: spelled[text], frozenset({5}))
    assert found.single == {2, 3, 4, 5, 6}  # those that hold one, and the mark
    assert found.sequences == ((frozenset({0}), (1,)),)  # "a", then "b"
    assert find_breakers([], vocabulary, lambda text: spelled[text], frozenset({5})) == Breakers(frozenset({5}))
    assert found.last([4, 7, 0, 1, 7]) == 1
    assert found.last([7, 0, 7]) == 3


def test_a_sampler_is_kept_from_a_loop() -> None:
    # The likeliest token always follows the last: 0 1 2 0 1 2 …; a token of the end is always the second choice.
    rows = np.full((4, 4), -9.0, dtype=np.float32)
    for token in range(3):
        rows[token, (token + 1) % 3], rows[token, 3] = 2.0, 1.0
    asked = Sampling(temperature=0, dry_multiplier=0.8, dry_allowed_length=2).resolved(PLAIN)
    sampler, last, said = Sampler(asked, [0], TokenSets(ends=frozenset({3}))), 0, [0]
    while last != 3 and len(said) < 30:
        last = int(sampler(mx.array(rows[last][None])).item())
        said.append(last)
    # After 0 1 2 0 1 two tokens match, and 0.8 is too little; after 0 1 2 0 1 2 three do: 0.8 × 1.75 = 1.4 is enough.
    assert said == [0, 1, 2, 0, 1, 2, 3]


# Perplexity in windows: each token once, with what the formula says of its window, from the engine's own log-
# probabilities.

PERPLEXITY_IDS = [3 + (i * i) % 250 for i in range(700)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    with Engine.load(write_model(tmp_path_factory.mktemp("perplexity")), prompt_cache=None) as loaded:
        yield loaded  # type: ignore[misc]


def by_hand(engine: Engine, ids: list[int], window: int, stride: int) -> tuple[float, int, int]:
    """The mean of −ln p, how many tokens it is of, and how many windows."""
    surprises, done, count = [], 0, 0
    for begin in range(0, len(ids), stride):
        if done == len(ids):
            break
        part = ids[begin : begin + window]
        rows = np.array(engine.logprobs(part))
        for at in range(max(1, done - begin), len(part)):
            surprises.append(-rows[at - 1, part[at]])
        done, count = begin + len(part), count + 1
    return float(np.mean(surprises)), len(surprises), count


@pytest.mark.parametrize(("window", "stride"), [(300, 300), (300, 150), (300, 7), (512, 511), (64, None)])
def test_each_token_counts_once_in_its_first_window(engine: Engine, window: int, stride: int | None) -> None:
    nats, tokens, count = by_hand(engine, PERPLEXITY_IDS, window, stride or window // 2)
    told: list[tuple[int, int]] = []
    found = engine.perplexity(
        PERPLEXITY_IDS, window=window, stride=stride, progress=lambda done, total: told.append((done, total))
    )
    assert found.nats == pytest.approx(nats, rel=1e-5)
    assert found.value == pytest.approx(math.exp(nats), rel=1e-5)
    assert (found.tokens, found.windows) == (tokens, count)
    assert told[-1] == (700, 700)
    assert found.tokens >= len(PERPLEXITY_IDS) - 1 - (found.windows - 1 if stride == window else 0)


def test_a_text_is_longer_than_the_context_and_the_default_window_is_no_longer_than_that(engine: Engine) -> None:
    text = "The river had risen in the night. " * 40
    found = engine.perplexity(text)
    assert found.window == 512
    assert found.tokens == len(engine.tokenizer.encode(text)) - 1
    assert 0 < found.se < (found.value or 0)


def test_windows_cover_all_of_a_text() -> None:
    for tokens in (1, 5, 10, 11, 37):
        for stride in (1, 3, 10):
            spans = list(windows(tokens, 10, stride))
            counted = [token for begin, end, done in spans for token in range(done, end)]
            assert counted == list(range(tokens))
            assert all(begin <= done < end <= begin + 10 for begin, end, done in spans)


def test_what_can_not_be_measured_is_refused(engine: Engine) -> None:
    with pytest.raises(ContextError, match="600"):
        engine.perplexity(PERPLEXITY_IDS, window=600)
    with pytest.raises(OptionError, match="stride of 301"):
        engine.perplexity(PERPLEXITY_IDS, window=300, stride=301)
    with pytest.raises(OptionError, match="fewer than two"):
        engine.perplexity("a")
    with pytest.raises(OptionError, match="not in the vocabulary"):
        engine.perplexity([1, 9999])


def test_it_is_measured_through_the_engines_own_caches(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    found = []
    for kv in (KVSpec(), KVSpec(2, 2, group_size=32)):
        with Engine.load(folder, kv=kv, prompt_cache=None) as engine:
            found.append(engine.perplexity(PERPLEXITY_IDS, window=256).nats)
    assert abs(found[0] - found[1]) > 1e-3
