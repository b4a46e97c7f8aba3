"""What is found stood there; what is guessed is what followed; how far a match goes is counted; and little is kept a token."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokamac.engine.speculation.drafters import COMPARED, NEAR, RUN, Branches, Follower, Lookup, MatchIndex
from tokamac.engine.speculation.speculator import BEFORE, KEPT_TOKENS, Conversations

tokens = st.lists(st.integers(0, 3), max_size=120)


def proposed(text: Sequence[int], k: int) -> list[tuple[int, tuple[int, ...], int] | None]:
    """Return what is guessed after each token of a text."""
    lookup = Lookup()
    found = [lookup.propose(text[:end], k) for end in range(1, len(text) + 1)]
    return [None if each is None else (end, each.tokens, each.match) for end, each in enumerate(found, 1)]


@given(tokens, tokens)
def test_what_is_found_stood_there_and_is_as_long_as_it_says(text: list[int], query: list[int]) -> None:
    index = MatchIndex(text)
    at, length = index.find(query, len(query))
    if at < 0:
        assert length == 0
        return
    assert RUN <= length <= COMPARED
    assert text[at - length : at] == query[len(query) - length :]
    longer = at - length - 1 >= 0 and len(query) > length and text[at - length - 1] == query[-length - 1]
    assert length == COMPARED or not longer


@given(tokens, tokens)
def test_an_index_that_grows_is_one_that_was_built(text: list[int], query: list[int]) -> None:
    built, grown = MatchIndex(text), MatchIndex()
    for token in text:
        grown.extend([token])
    assert built.ids == grown.ids
    assert built.find(query, len(query)) == grown.find(query, len(query))


@given(tokens)
def test_a_guess_is_what_followed_equal_tokens(text: list[int]) -> None:
    for each in proposed(text, 4):
        if each is None or each[2] < RUN:
            continue
        end, guess, match = each
        before = text[end - match : end]
        places = [at for at in range(match, end) if text[at - match : at] == before]
        assert any(text[at : min(at + 1, end)] == list(guess[:1]) for at in places)


def test_a_text_that_repeats_is_followed_to_its_end_and_on() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    lookup = Lookup()
    assert lookup.propose(text, 4) is None
    twice = [*text, 1, 2, 3]
    guess = lookup.propose(twice, 4)
    assert (guess.tokens, guess.match, guess.source) == ((4, 5, 6, 7), 3, "lookup")
    whole = lookup.propose([*text, *text], 4)
    assert (whole.tokens, whole.match) == ((1, 2, 3, 4), 9)  # a list goes on as it began
    again = lookup.propose([*text, *text, 1], 20)
    assert again.tokens == (*text[1:], *text, *text[:3])


def test_where_a_long_match_breaks_it_is_found_again_at_once() -> None:
    old = list(range(10, 50))
    index = MatchIndex(old)
    changed = [*old[:20], 99, *old[21:24]]
    following = Follower(index)
    expected = []
    for end in range(1, len(changed) + 1):
        following.index(changed, end)
        expected.append(following.at)
    assert expected[19:24] == [20, 21, 22, 23, 24]  # one token stood in place of another
    dropped = Follower(index)
    shorter = [*old[:20], *old[23:30]]
    for end in range(1, len(shorter) + 1):
        dropped.index(shorter, end)
        assert end <= 21 or dropped.at == end + 3
    lost = Follower(index)
    other = [*old[:20], *range(100, 100 + NEAR)]
    for end in range(1, len(other) + 1):
        lost.index(other, end)
    assert lost.at == -1


def test_versions_of_a_reply_are_guessed_from_and_not_across_their_ends() -> None:
    prompt, reply = list(range(100)), [7, 8, 9, 200, 201]
    kept = Conversations()
    kept.keep([*prompt, *reply])
    assert kept.versions(prompt) == []  # too short to be worth it
    reply = [200, *range(300, 320)]
    kept.keep([*prompt, *reply])
    versions = kept.versions(prompt)
    assert [list(each) for each in versions] == [[*prompt[-BEFORE:], *reply]]
    branches = Branches(versions)
    guess = branches.propose(prompt, 4)
    assert (guess.tokens, guess.source) == ((200, 300, 301, 302), "branches")
    end = branches.propose([*prompt, *reply], 4)
    assert end is None


def test_an_edited_prompt_finds_the_reply_that_stood_there() -> None:
    question, reply = list(range(60)), list(range(500, 540))
    kept = Conversations()
    kept.keep([*question, *reply])
    edited = [*question[:20], 999, *question[21:]]
    guess = Branches(kept.versions(edited)).propose(edited, 8)
    assert guess.tokens == tuple(reply[:8])


def test_what_a_conversation_continues_makes_room_and_so_do_the_oldest() -> None:
    kept = Conversations()
    kept.keep(range(50))
    kept.keep(range(80))
    assert len(kept.versions([0, 1])) == 1
    for number in range(20):
        kept.keep([number, *range(KEPT_TOKENS // 10)])
    assert sum(map(len, kept._kept)) <= KEPT_TOKENS
    assert kept.versions([19, 0, 1])[-1][0] == 19


def test_an_index_takes_less_than_its_bound() -> None:
    ids = (np.random.default_rng(0).zipf(1.3, 50_000) % 30_000).tolist()
    lookup = Lookup()
    lookup.propose(ids, 1)
    assert lookup.nbytes <= 40 * len(ids)
