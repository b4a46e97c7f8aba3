"""Perplexity in windows: each token once, with what the formula says of its window, from the engine's own log-probabilities."""

import math
from pathlib import Path

import numpy as np
import pytest

from tests.engine.seeded import write_model
from tokamac.engine import ContextError, Engine, KVSpec
from tokamac.engine.errors import OptionError
from tokamac.engine.scoring import windows

IDS = [3 + (i * i) % 250 for i in range(700)]


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
def test_each_token_counts_once_in_the_first_window_that_holds_it(
    engine: Engine, window: int, stride: int | None
) -> None:
    nats, tokens, count = by_hand(engine, IDS, window, stride or window // 2)
    told: list[tuple[int, int]] = []
    found = engine.perplexity(
        IDS, window=window, stride=stride, progress=lambda done, total: told.append((done, total))
    )
    assert found.nats == pytest.approx(nats, rel=1e-5)
    assert found.value == pytest.approx(math.exp(nats), rel=1e-5)
    assert (found.tokens, found.windows) == (tokens, count)
    assert told[-1] == (700, 700)
    assert found.tokens >= len(IDS) - 1 - (found.windows - 1 if stride == window else 0)


def test_a_text_is_longer_than_the_context_and_the_default_window_is_no_longer_than_that(engine: Engine) -> None:
    text = "The river had risen in the night. " * 40
    found = engine.perplexity(text)
    assert found.window == 512
    assert found.tokens == len(engine.tokenizer.encode(text)) - 1
    assert found.se is not None
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
        engine.perplexity(IDS, window=600)
    with pytest.raises(OptionError, match="stride of 301"):
        engine.perplexity(IDS, window=300, stride=301)
    with pytest.raises(OptionError, match="fewer than two"):
        engine.perplexity("a")
    with pytest.raises(OptionError, match="not in the vocabulary"):
        engine.perplexity([1, 9999])


def test_it_is_measured_through_the_engines_own_caches(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    found = []
    for kv in (KVSpec(), KVSpec(2, 2, group_size=32)):
        with Engine.load(folder, kv=kv, prompt_cache=None) as engine:
            found.append(engine.perplexity(IDS, window=256).nats)
    assert abs(found[0] - found[1]) > 1e-3
