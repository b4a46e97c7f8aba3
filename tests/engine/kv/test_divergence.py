"""KV settings compared: the arithmetic by hand, the recommendation case by case, and the measuring against Engine.logprobs."""

import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from tests.engine.helpers import write_tokenizer
from tests.golden.weights import write_weights
from tests.tiny import make_tiny
from tokamac.engine import ContextError, Engine, KVSpec, OptionError
from tokamac.engine.lab.scoring import (
    FASTER,
    LEAST_TOP1,
    MOST_KL,
    KVDivergence,
    Speed,
    Tally,
    Trial,
    TrialProgress,
    differences,
    fit_depths,
    recommend,
)
from tokamac.engine.model.config import read_config

GOLDEN = Path(__file__).parents[2] / "golden"
BITS = [(16, 16), (8, 8), (4, 4)]


def log(*rows: tuple[float, ...]) -> mx.array:
    return mx.array([[math.log(p) if p else -math.inf for p in row] for row in rows])


def test_kl_by_hand() -> None:
    kl, same = differences(
        log((0.5, 0.5, 0.0), (0.9, 0.1, 0.0), (0.6, 0.3, 0.1)), log((0.25, 0.7, 0.05), (0.9, 0.1, 0.0), (0.3, 0.6, 0.1))
    )
    by_hand = [0.5 * math.log(2) + 0.5 * math.log(5 / 7), 0.0, 0.6 * math.log(2) - 0.3 * math.log(2)]
    assert kl.tolist() == pytest.approx(by_hand, abs=1e-6)
    assert same.tolist()[1:] == [True, False]


def test_a_tally_is_the_mean_over_all_positions() -> None:
    tally = Tally()
    tally.add([0.1, 0.3], [True, False])
    tally.add([0.2, 0.2], [True, True])
    assert tally.quality() == KVDivergence(pytest.approx(0.2), 0.75, 4)
    tally.add([math.inf], [False])
    assert tally.quality() == KVDivergence(None, 0.6, 5)
    assert not tally.quality().good


@pytest.mark.parametrize(
    ("asked", "room", "fitted"),
    [
        ((128, 1024, 4096), None, (128, 1024, 4096)), ((4096, 128), 8192, (128, 4096)),
        ((128, 1024, 4096), 4024, (128, 1024, 4024)), ((128, 1024, 4096), 500, (128, 500)), ((128,), -3, (1,)),
    ],
)  # fmt: skip
def test_depths_over_the_context_are_less(asked: tuple[int, ...], room: int | None, fitted: tuple[int, ...]) -> None:
    assert fit_depths(asked, room) == fitted


def trial(bits: int, tps: float | None, kl: float = 0.001, top1: float = 0.99, size: int | None = None) -> Trial:
    """Return a trial of a model whose 16-bit cache takes 1,600 bytes a token, and a million at its whole context."""
    a_token = 100 * bits if size is None else size
    decode = (Speed(128, 999.0), Speed(4096, tps))
    return Trial(bits, bits, a_token, 625 * a_token, KVDivergence(0.0 if bits == 16 else kl, top1, 1000), decode)


@pytest.mark.parametrize(
    ("trials", "room", "bits", "why"),
    [
        # Memory is no issue: a tenth of ten million is what the 16-bit cache takes.
        ([trial(16, 50), trial(8, 52), trial(4, 54)], 10_000_000, 16, "exact"),
        ([trial(16, 50), trial(8, 52), trial(4, 54)], 9_999_999, 4, "smallest"),
        ([trial(16, 50), trial(8, 52), trial(4, 54)], None, 4, "smallest"),
        # A packed cache that is 10 % faster is worth having whatever the memory, and not below.
        ([trial(16, 50), trial(8, 50 * FASTER)], 10**12, 8, "smallest"),
        ([trial(16, 50), trial(8, 50 * FASTER - 0.1)], 10**12, 16, "exact"),
        # The smallest that is good enough; what is not does not count, however fast.
        ([trial(16, 50), trial(8, 50), trial(4, 90, kl=MOST_KL * 1.01)], None, 8, "smallest"),
        ([trial(16, 50), trial(8, 50), trial(4, 90, top1=LEAST_TOP1 - 0.001)], None, 8, "smallest"),
        ([trial(16, 50), trial(4, 50, kl=MOST_KL, top1=LEAST_TOP1)], None, 4, "smallest"),
        # A larger one that is 10 % faster goes before a smaller one.
        ([trial(16, 40), trial(8, 60), trial(4, 50)], None, 8, "faster"),
        ([trial(16, 60), trial(8, 50), trial(4, 50)], None, 16, "faster"),
        # Of equal bytes the one nearer to 16 bits, and unknown rates beat nobody.
        ([trial(16, 50), trial(6, 50, kl=0.004, size=600), trial(5, 50, kl=0.002, size=600)], None, 5, "smallest"),
        ([trial(16, None), trial(8, 50), trial(4, None)], None, 4, "smallest"),
        ([trial(16, 50), trial(4, 90, kl=1.0)], None, 16, "alone"),
        ([trial(16, 50), Trial(4, 4, refused="no")], 10**12, 16, "alone"),
    ],
)
def test_one_setting_is_recommended(trials: list[Trial], room: int | None, bits: int, why: str) -> None:
    for order in (trials, trials[::-1]):
        advice = recommend(order, room)
        assert (advice.pick.key_bits, advice.why) == (bits, why)


def test_the_smallest_that_is_good_enough_is_named_too() -> None:
    fast, small = trial(8, 60), trial(4, 50)
    assert recommend([trial(16, 40), fast, small], None).smallest is small
    assert replace(small, value_bits=3).bits == "4,3"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny", context=300)


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with Engine.load(tiny, prompt_cache=None) as loaded:
        yield loaded


IDS = [(7 * i * i + 3 * i) % 251 for i in range(300)]


def compare(engine: Engine, *depths: int, kv: KVSpec | None = None) -> list[Trial]:
    found = list(engine.compare_kv(IDS, BITS, kv or KVSpec(), depths=depths))
    progress = [step for step in found if isinstance(step, TrialProgress)]
    assert all(0 < step.done <= step.total for step in progress)
    assert [step.done for step in progress if not step.bits] == [256, 300]
    return [step for step in found if isinstance(step, Trial)]


@pytest.mark.parametrize("kv", [KVSpec(), KVSpec(window=48, keep=3)], ids=["growing", "window"])
def test_it_measures_what_engines_of_these_settings_compute(engine: Engine, tiny: Path, kv: KVSpec) -> None:
    trials = compare(engine, 8, kv=kv)
    assert [(each.key_bits, each.value_bits) for each in trials] == BITS
    logprobs = []
    for each in trials:
        with Engine.load(
            tiny, kv=replace(kv, key_bits=each.key_bits, value_bits=each.value_bits), prompt_cache=None
        ) as own:
            logprobs.append(own.logprobs(IDS, chunk=256))
    for each, theirs in zip(trials, logprobs, strict=True):
        kl, same = differences(logprobs[0], theirs)
        assert each.quality.kl_nats == pytest.approx(float(mx.mean(kl).item()), rel=1e-3, abs=1e-9)
        assert each.quality.top1 == pytest.approx(float(mx.mean(same).item()))
        assert each.quality.positions == len(IDS)
    kls = [each.quality.kl_nats or 0 for each in trials if each.quality]
    assert kls == sorted(kls)
    assert kls[-1] > 1e-3


def test_bytes_are_the_plans_and_depths_fit_the_context(engine: Engine) -> None:
    trials = compare(engine, 4, 100, 9999)
    # two layers, two heads, 64 numbers; a scale and a bias of four bytes in each group of 64
    assert [each.bytes_per_token for each in trials] == [
        2 * 2 * 2 * (64 * 4),
        2 * 2 * 2 * (64 + 8),
        2 * 2 * 2 * (32 + 8),
    ]
    assert [each.context_bytes for each in trials] == [300 * (each.bytes_per_token or 0) for each in trials]
    for each in trials:
        assert [speed.depth for speed in each.decode] == [4, 100, 300 - 72]
        assert all(speed.tps is not None and speed.tps > 0 for speed in each.decode)


def test_a_text_that_the_context_does_not_hold_is_one_clear_error(engine: Engine) -> None:
    with pytest.raises(ContextError, match="301 tokens, but the model's context is 300"):
        next(engine.compare_kv([*IDS, 1], BITS, depths=[4]))


def test_who_stops_reading_stops_the_work_and_the_engine_goes_on(engine: Engine) -> None:
    steps = engine.compare_kv(IDS, BITS, depths=[64])
    assert isinstance(next(steps), TrialProgress)
    steps.close()  # type: ignore[attr-defined]
    assert engine.logprobs([1, 2]).shape == (2, 260)


def test_a_setting_the_model_can_not_take_says_why(tmp_path: Path) -> None:
    with Engine.load(make_tiny(tmp_path / "odd", head_size=48), prompt_cache=None) as engine:
        trials = {each.bits: each for each in compare(engine, 4)}
    assert trials["16"].refused is None
    assert all("48 numbers per head" in (trials[bits].refused or "") for bits in ("8", "4"))
    assert recommend(list(trials.values()), None).why == "alone"


def test_a_model_whose_caches_are_not_ours_is_one_clear_error(tmp_path: Path) -> None:
    import json

    source = GOLDEN / "deepseek_v3"
    shutil.copy(source / "config.json", tmp_path)
    case = json.loads((source / "case.json").read_text())
    write_weights(tmp_path, case["seed"], case["shapes"], read_config(tmp_path))
    write_tokenizer(tmp_path)
    with Engine.load(tmp_path, prompt_cache=None) as engine:
        with pytest.raises(OptionError, match=r"nothing to compare.*latent attention"):
            list(engine.compare_kv([1, 2, 3], BITS, depths=[4]))
        with pytest.raises(OptionError, match="needs a text"):
            next(engine.compare_kv([], BITS))
