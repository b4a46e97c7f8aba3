"""DRY: cases worked by hand, and the incremental device form against a plain search through the context for every token."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokamac.engine import Sampling
from tokamac.engine.sampling import GROWS_BY, Breakers, Dry, Sampler, TokenSets, find_breakers, match_lengths

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


def test_what_would_repeat_a_sequence_is_penalised_by_its_length() -> None:
    # 1 2 3 4 … 1 2 3: a 4 would be the fourth. Three tokens match, one more than is allowed: 0.5 × 2^(3 − 2).
    assert penalties(Dry(HOW, [1, 2, 3, 4, 0, 1, 2, 3], NONE, VOCABULARY)) == [0, 0, 0, 0, 1.0, 0]
    # Two match: 0.5 × 2^0. One does not count.
    assert penalties(Dry(HOW, [2, 3, 4, 0, 1, 2, 3], NONE, VOCABULARY)) == [0, 0, 0, 0, 0.5, 0]
    assert penalties(Dry(HOW, [3, 4, 0, 1, 2, 3], NONE, VOCABULARY)) == [0.0] * VOCABULARY


def test_a_run_of_one_token_repeats_itself() -> None:
    # 5 5 5 5: the first three, but for the last place, are followed by a 5.
    assert penalties(Dry(HOW, [5, 5, 5, 5], NONE, VOCABULARY)) == [0, 0, 0, 0, 0, 1.0]


def test_no_sequence_reaches_across_a_breaker_and_none_is_penalised() -> None:
    prompt = [1, 0, 2, 3, 4, 5, 1, 0, 2, 3]
    assert penalties(Dry(HOW, prompt, NONE, VOCABULARY)) == [0, 0, 0, 0, 2.0, 0]
    assert penalties(Dry(HOW, prompt, Breakers(frozenset({0})), VOCABULARY)) == [0, 0, 0, 0, 0.5, 0]
    assert penalties(Dry(HOW, prompt, Breakers(frozenset({4})), VOCABULARY)) == [0.0] * VOCABULARY


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
    ids: list[int],
    cut: int,
    allowed: int,
    single: frozenset[int],
    sequence: tuple[frozenset[int], list[int]] | None,
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
    asked = Sampling(temperature=0, dry_multiplier=0.8, dry_allowed_length=2).resolved(Sampling())
    sampler, last, said = Sampler(asked, [0], TokenSets(ends=frozenset({3}))), 0, [0]
    while last != 3 and len(said) < 30:
        last = int(sampler(mx.array(rows[last][None])).item())
        said.append(last)
    # After 0 1 2 0 1 two tokens match, and 0.8 is too little; after 0 1 2 0 1 2 three do: 0.8 × 1.75 = 1.4 is enough.
    assert said == [0, 1, 2, 0, 1, 2, 3]
