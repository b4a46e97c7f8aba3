"""Where a prompt is cut: at multiples of the chunk, whatever a clock says, so its logits do not depend on the machine's load."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import pytest

from tests.kv.models import tiny_llama, tokens
from tests.kv.test_families import built
from tokamac.engine import Engine, Finished, KVSpec, Message, PrefillProgress, Sampling
from tokamac.engine.generation import Generation, PrefillChunker
from tokamac.engine.kv import install_seam, plan_caches
from tokamac.engine.kv.probe import leaves
from tokamac.engine.kv.snapshot import grows
from tokamac.engine.options import PromptCacheSpec, TemplateOptions
from tokamac.engine.runner import Runner
from tokamac.engine.sampling import Sampler

PROMPT = [7 + i % 200 for i in range(401)]
CHUNK = 64


@dataclass
class FixedChunking:
    """Chunks of one size; smaller ones from ``deep`` on."""

    size: int
    deep: int = 1 << 30

    def at(self, depth: int) -> int:
        return self.size // 2 if depth >= self.deep else self.size

    def token_s(self, depth: int) -> float | None:
        """Not known, as on a CPU."""


@dataclass
class Computed:
    """A run that computes nothing, and notes its pieces."""

    cached_ids: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def prefill(self, ids: list[int], chunk: int) -> Iterator[int]:
        assert len(ids) == chunk
        self.sizes.append(len(ids))
        self.cached_ids.extend(ids)
        yield len(self.cached_ids)


def sizes(held: int, tokens: int, *, size: int = 512, most: int = 512, deep: int = 1 << 30) -> list[int]:
    """Return the pieces of so many tokens after those held."""
    run = Computed(list(range(held)))
    pieces = PrefillChunker(FixedChunking(size, deep), most, held)  # type: ignore[arg-type]
    list(pieces.compute(run, list(range(held, held + tokens))))  # type: ignore[arg-type]
    assert run.cached_ids == list(range(held + tokens))
    return run.sizes


def test_pieces_end_at_multiples_of_the_chunk():
    assert sizes(0, 1100) == [512, 512, 76]
    assert sizes(300, 400) == [212, 188]
    assert sizes(512, 5) == [5]


def test_a_piece_is_never_larger_than_what_there_is_room_for():
    assert sizes(0, 200, most=64) == [64, 64, 64, 8]


def test_deep_down_pieces_are_smaller_and_still_end_at_multiples():
    assert sizes(0, 1500, deep=1024) == [512, 512, 256, 220]


def test_however_a_prompt_is_interrupted_its_cuts_are_the_same():
    whole = list(itertools.accumulate(sizes(0, 1500)))
    for held in whole[:-1]:
        assert [held + done for done in itertools.accumulate(sizes(held, 1500 - held))] == whole[
            whole.index(held) + 1 :
        ]


STAGED = {
    "llama": (KVSpec(), KVSpec(key_bits=8, value_bits=4), KVSpec(window=48)),
    "gemma3_text": (KVSpec(),),
    "qwen3_next": (KVSpec(),),
}
"""Caches that grow, packed ones, rings; rings among caches that grow; recurrent states among them."""


@pytest.mark.parametrize("stops_after", [1, 2, None])
@pytest.mark.parametrize(("name", "spec"), [(name, spec) for name, specs in STAGED.items() for spec in specs])
def test_a_piece_in_stages_is_the_same_and_one_that_was_stopped_never_was(
    name: str, spec: KVSpec, stops_after: int | None
):
    install_seam()
    model, config = built(name)
    plan = plan_caches(model, config, spec)
    ids: list[int] = tokens(120)[0].tolist()  # type: ignore[assignment]
    ends: list[mx.array] = []
    for staged in (False, True):
        caches = plan.make(None)
        run = Generation(model, caches, [], ahead=False)
        assert all(run.prefill(ids[:50], 50))
        if staged:
            asked = iter(range(1, 99))
            whole = run.prefill_in_stages(ids[50:119], 99, lambda asked=asked: next(asked) == stops_after)  # type: ignore[misc]
            growing = sum(grows(cache) for _, cache in leaves(caches))
            assert whole == (stops_after is None or stops_after >= growing)
            assert len(run.cached_ids) == (119 if whole else 50)
        rest = ids[len(run.cached_ids) : 119]
        assert not rest or all(run.prefill(rest, len(rest)))
        assert run.cached_ids == ids[:119]
        ends.append(model(mx.array([ids[119:]]), cache=caches))
    assert mx.array_equal(*ends)


def test_stages_take_no_more_memory():
    install_seam()
    model = tiny_llama(layers=6, kv_heads=4)
    plan = plan_caches(model, {"model_type": "llama", "num_attention_heads": 4}, KVSpec())
    ids: list[int] = tokens(4096)[0].tolist()  # type: ignore[assignment]
    peaks = []
    for stages in (1, 6):
        run = Generation(model, plan.make(None), [], ahead=False)
        assert all(run.prefill(ids[:4000], 500))
        mx.clear_cache()
        mx.reset_peak_memory()
        assert run.prefill_in_stages(ids[4000:4032], stages, lambda: False)
        peaks.append(mx.get_peak_memory())
    assert peaks[1] <= peaks[0] + 4096 * 4 * 32 * 4 // 2  # less than half of one layer's keys


def test_a_slow_piece_is_stopped_between_its_layers_and_a_quick_one_is_not_asked():
    asked: list[int] = []

    class Slow(Computed):
        def prefill_in_stages(self, ids: list[int], stages: int, stopped: object) -> bool:
            asked.append(stages)
            return False

    run, now = Slow(), itertools.count(0, 3)  # each piece takes three seconds
    pieces = PrefillChunker(FixedChunking(64), 64, 0, clock=lambda: next(now))  # type: ignore[arg-type]
    assert len(list(pieces.compute(run, list(range(500))))) == 2  # type: ignore[arg-type]
    assert (run.cached_ids, asked) == (list(range(64)), [3])


@pytest.fixture(params=[(16, 16), (8, 4), (4, 4)], ids=str)
def engine(tiny: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """A model whose keys and values have so many bits, with prompts cut after 64 tokens."""
    monkeypatch.setattr("tokamac.engine.perf.mitigation.Chunking.at", lambda *_: CHUNK)
    kv = KVSpec(key_bits=request.param[0], value_bits=request.param[1])
    with Engine.load(tiny, kv=kv, prompt_cache=PromptCacheSpec(disk=False)) as loaded:
        yield loaded


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The logits from which a token was chosen, of all steps of all replies."""
    seen: list[object] = []
    choose = Sampler.__call__

    def recorded(sampler: Sampler, given: mx.array) -> mx.array:
        seen.append(given.tolist())
        return choose(sampler, given)

    monkeypatch.setattr(Sampler, "__call__", recorded)
    return seen


def answer(engine: Engine, prompt: list[int] | list[Message]) -> tuple[list[int], Finished]:
    """Return where the pieces of the prompt ended, and the end."""
    events = list(engine.generate(prompt, Sampling(temperature=1, seed=3, max_tokens=8)))
    done = [event.done for event in events if isinstance(event, PrefillProgress)]
    assert isinstance(events[-1], Finished)
    return done, events[-1]


@pytest.mark.parametrize("prefill_tps", [1e6, 70.0])
def test_the_pace_of_the_machine_moves_no_cut_and_no_logit(engine: Engine, logits: list[object], prefill_tps: float):
    cuts, first = answer(engine, PROMPT)
    assert cuts == [0, 64, 128, 192, 256, 320, 384, 400]
    before, logits[:] = list(logits), []
    engine._runner._store.clear()
    engine._runner._store.rates.prefill_tps = prefill_tps
    again, second = answer(engine, PROMPT)
    assert (again, second.text) == (cuts, first.text)
    assert logits == before


@pytest.mark.parametrize("looks", [1, 3, 1000])
def test_what_idle_time_was_enough_for_moves_no_logit(engine: Engine, logits: list[object], looks: int):
    said = [Message("user", "How does it go on, and why? " * 12)]
    _, cold = answer(engine, said)
    before, logits[:] = list(logits), []
    core: Runner = engine._runner
    core._store.clear()
    asked = itertools.count(1)
    engine.between(lambda: core.warm_stable(said, lambda: next(asked) > looks, TemplateOptions()))
    cuts, warm = answer(engine, said)
    assert cuts[0] >= CHUNK
    assert warm.text == cold.text
    if core.runtime.kv.quantized:
        assert cuts[0] % CHUNK == 0
        assert logits == before
