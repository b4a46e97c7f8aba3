"""``tokamac.quant.quality``: the figures of two models on a text, in one window and in several."""

import math
from pathlib import Path

import numpy as np
import pytest

from tests.engine.seeded import write_model
from tokamac.engine import Engine
from tokamac.engine.errors import OptionError
from tokamac.quant import Quality, convert, quality

TEXT = "To read is one thing, and to write is another. " * 30


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and a conversion of it."""
    folder = tmp_path_factory.mktemp("pair")
    source = write_model(folder / "source")
    convert(source, folder / "packed", bits=4, group_size=32, method="round", verify=False)
    return source, folder / "packed"


def test_a_model_is_no_distance_from_itself_and_its_conversion_is_some(pair: tuple[Path, Path]) -> None:
    source, packed = pair
    same, other = quality(source, source, TEXT, tokens=100), quality(packed, source, TEXT, tokens=100)
    assert isinstance(same, Quality)
    assert (same.kl, same.top1, same.perplexity_ratio) == (0.0, 1.0, 1.0)
    assert other.kl is not None
    assert other.kl > 0
    assert other.reference_perplexity == same.perplexity
    assert other.positions == 100


@pytest.mark.parametrize(("window", "stride"), [(64, None), (64, 64), (100, 30)])
def test_in_windows_every_token_of_a_long_text_counts_once(
    pair: tuple[Path, Path], window: int, stride: int | None
) -> None:
    source, packed = pair
    found = quality(packed, source, TEXT, tokens=900, window=window, stride=stride)
    assert found.positions == 900
    with Engine.load(source, prompt_cache=None) as engine:
        ids = engine.tokenizer.encode(TEXT)[:900]
        alone = engine.perplexity(ids, window=window, stride=stride)
        first = np.array(engine.logprobs(ids[:window]))
    assert found.reference_perplexity == pytest.approx(alone.value, rel=1e-4)
    assert found.reference_perplexity_se == pytest.approx(alone.se, rel=1e-3)
    with Engine.load(packed, prompt_cache=None) as engine:
        second = np.array(engine.logprobs(ids[:window]))
    kl = (np.exp(first) * (first - second)).sum(-1).mean()
    short = quality(packed, source, TEXT, tokens=window)
    assert short.kl == pytest.approx(kl, rel=1e-3)


def test_progress_comes_to_its_end_and_arguments_that_make_no_sense_are_refused(pair: tuple[Path, Path]) -> None:
    told: list[tuple[int, int]] = []
    quality(*pair, TEXT, tokens=128, window=64, stride=32, progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] == len(told) == 2 * 2 * 3
    with pytest.raises(OptionError, match="more than the context"):
        quality(*pair, TEXT, window=5000)
    with pytest.raises(OptionError, match="stride"):
        quality(*pair, TEXT, tokens=200, window=64, stride=65)
    with pytest.raises(OptionError, match="2 tokens"):
        quality(*pair, TEXT, tokens=1)
    assert math.isfinite(quality(*pair).kl or math.nan)
