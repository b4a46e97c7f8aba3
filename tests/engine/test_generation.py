"""Prefill in chunks that depend on no clock, and what happens when MLX raises."""

import itertools
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.engine.helpers import finish, write_model
from tests.engine.inside import idle_of, runner_of, runtime_of, store_of
from tests.engine.kv.models import built, tiny_llama, tokens
from tokamac.engine import (
    DeviceError,
    Engine,
    Finished,
    KVSpec,
    MemoryLimitError,
    MemoryPressure,
    Message,
    PrefillProgress,
    Sampling,
    TokamacError,
)
from tokamac.engine.errors import DeviceLostError, computing_error, engine_error
from tokamac.engine.generation import Generation, PrefillChunker
from tokamac.engine.kv.attention import install_seam, leaves
from tokamac.engine.kv.plan import plan_caches
from tokamac.engine.metrics import Recorder
from tokamac.engine.options import PromptCacheSpec, TemplateOptions
from tokamac.engine.prompt_cache import memory
from tokamac.engine.runner import Runner, cacheable, compute_prompt, stable_prompt, warm_stable
from tokamac.engine.sampling import Sampler
from tokamac.engine.schedule.decoding import Decoder
from tokamac.engine.schedule.schedule import Pace

# Where a prompt is cut: at multiples of the chunk, whatever a clock says, so its logits do not depend on the
# machine's load.

PROMPT = [7 + i % 200 for i in range(401)]
CHUNK = 64


@dataclass
class FixedChunking:
    """Chunks of one size; smaller ones from ``deep`` on."""

    size: int
    deep: int = 1 << 30
    whole: bool = False
    piece: int | None = None

    def tokens_at(self, depth: int) -> int:
        return self.size // 2 if depth >= self.deep else self.size

    def token_s(self, depth: int) -> float | None:
        """Not known, as on a CPU."""

    @property
    def first(self) -> int:
        return self.tokens_at(0)

    @property
    def first_token_s(self) -> float | None:
        return self.token_s(0)


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

    def see(self, count: int) -> Iterator[None]:  # no pictures
        return iter(())


def outcome(stages: Generator[None, None, bool]) -> bool:
    """Compute all stages; return whether they were whole."""
    while True:
        try:
            next(stages)
        except StopIteration as end:
            return bool(end.value)


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
    assert sizes(4096, 1500, deep=5120) == [512, 512, 256, 220]


def test_however_a_prompt_is_interrupted_its_cuts_are_the_same():
    whole = list(itertools.accumulate(sizes(0, 1500)))
    for at, held in enumerate(whole[:-1], 1):
        assert [held + done for done in itertools.accumulate(sizes(held, 1500 - held))] == whole[at:]


# Caches that grow, packed ones, rings alone; rings among caches that grow; recurrent states among them; a model's own,
# in lists; recurrent states alone.
STAGED = {
    "llama": (KVSpec(), KVSpec(key_bits=8, value_bits=4), KVSpec(window=48)),
    "gemma3_text": (KVSpec(),),
    "qwen3_next": (KVSpec(),),
    "deepseek_v32": (KVSpec(),),
    "mamba2": (KVSpec(),),
}


@pytest.mark.parametrize("stops_after", [1, 2, None])
@pytest.mark.parametrize(("name", "spec"), [(name, spec) for name, specs in STAGED.items() for spec in specs])
def test_a_piece_in_stages_is_the_same_and_a_stopped_one_is_gone(name: str, spec: KVSpec, stops_after: int | None):
    install_seam()
    model, config = built(name)
    plan = plan_caches(model, config, spec)
    ids: list[int] = tokens(120)[0].tolist()  # type: ignore[assignment]
    ends: list[mx.array] = []
    for staged in (False, True):
        caches = plan.make(None)
        run = Generation(model, caches, [])
        assert all(run.prefill(ids[:50], 50))
        if staged:
            asked = iter(range(1, 99))
            stopped = lambda asked=asked: next(asked) == stops_after  # type: ignore[misc]  # noqa: E731
            whole = outcome(run.prefill_in_stages(ids[50:119], 99, stopped))
            assert whole == (stops_after is None or stops_after >= sum(1 for _ in leaves(caches)))
            assert len(run.cached_ids) == (119 if whole else 50)
        rest = ids[len(run.cached_ids) : 119]
        assert not rest or all(run.prefill(rest, len(rest)))
        assert run.cached_ids == ids[:119]
        ends.append(model(mx.array([ids[119:]]), cache=caches))
    assert mx.array_equal(*ends)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("llama", KVSpec(key_bits=8, value_bits=4)),
        *((name, KVSpec()) for name in ("gemma3_text", "qwen3_next", "mamba2")),
    ],
)
def test_a_piece_that_was_let_go_of_between_its_stages_never_was(name: str, spec: KVSpec):
    install_seam()
    model, config = built(name, num_hidden_layers=6)
    plan = plan_caches(model, config, spec)
    ids: list[int] = tokens(120)[0].tolist()  # type: ignore[assignment]
    ends: list[mx.array] = []
    for staged in (False, True):
        caches = plan.make(None)
        run = Generation(model, caches, [])
        assert all(run.prefill(ids[:50], 50))
        if staged:
            computing = run.prefill_in_stages(ids[50:119], 2, lambda: False)
            next(computing)
            computing.close()
            assert run.cached_ids == ids[:50]
        assert all(run.prefill(ids[50:119], 69))
        ends.append(model(mx.array([ids[119:]]), cache=caches))
    assert mx.array_equal(*ends)


def test_a_piece_that_was_stopped_still_shares_what_another_began_with_meanwhile(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "WORTH_SHARING", 16)
    install_seam()
    model, config = built("llama", num_hidden_layers=6)
    plan = plan_caches(model, config, KVSpec())
    store = memory.CacheStore(plan.make, lambda: 1 << 40, all_grow=True)
    ids: list[int] = tokens(120)[0].tolist()  # type: ignore[assignment]

    def after(lease: memory.CacheLease, wanted: list[int]) -> mx.array:
        run, rest = Generation(model, lease.caches, lease.ids), wanted[len(lease.ids) : -1]
        assert all(run.prefill(rest, len(rest)))
        return model(mx.array([wanted[-1:]]), cache=[cache.copy() for cache in lease.caches])

    def cold(wanted: list[int]) -> mx.array:
        return after(memory.CacheLease([], plan.make(None), None), wanted)

    def check_another(begins: int, *, shares: int) -> None:
        other = [*ids[:begins], 5, 7, 9]
        with store.acquire(other, None) as lease:
            assert {cache.offset for cache in lease.caches} == {len(lease.ids)} == {begins}
            assert {sum(each.tokens for each in cache.prefix) for cache in lease.caches} == {shares}
            assert mx.allclose(after(lease, other), cold(other), atol=1e-4)

    with store.acquire(ids, None) as first:
        run = Generation(model, first.caches, first.ids)
        assert all(run.prefill(ids[:50], 50))
        stages = run.prefill_in_stages(ids[50:119], 3, lambda: True)
        next(stages)
        check_another(40, shares=40)
        assert not outcome(stages)
        assert first.ids == ids[:50]
        with store.acquire([1, 2, 3], None):  # what is not in use is of another beginning
            check_another(30, shares=0)  # less than is held once already: in each layer alike
        assert mx.allclose(after(first, ids), cold(ids), atol=1e-4)


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are cut after so many tokens wherever they are."""
    monkeypatch.setattr("tokamac.engine.chunking.Chunking.tokens_at", lambda *_: CHUNK)


@pytest.mark.parametrize("what", ["reply", "warm"])
def test_what_is_closed_within_a_chunk_gives_back_caches_that_hold_the_chunks_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch, chunks: None, what: str
):
    monkeypatch.setattr(PrefillChunker, "_stages", lambda *_: 2)
    generators: list[object] = []  # all are referred to: it is not enough to let go of one

    def kept(make: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            generators.append(make(*args))
            return generators[-1]

        return call

    monkeypatch.setattr(PrefillChunker, "compute", kept(PrefillChunker.compute))
    monkeypatch.setattr(Generation, "prefill_in_stages", kept(Generation.prefill_in_stages))
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False), speculation=None) as engine:
        core: Runner = runner_of(engine)
        chunking = replace(core.runtime.chunking, piece=None)
        monkeypatch.setattr(core, "_runtime", replace(core.runtime, chunking=chunking))

        def closed() -> tuple[list[int], set[int]]:
            if what == "reply":
                events = core.reply(core.request(PROMPT, GREEDY, Recorder()), lambda: False).events()
            else:
                events = compute_prompt(core, cacheable(core, PROMPT), Pace(), cancelled=lambda: False)
            for _ in range(2):  # within the second chunk
                while next(events) is not None:
                    pass
            events.close()
            store: Any = core.store
            live = idle_of(store).lease
            return list(live.ids), {cache.offset for _, cache in leaves(live.caches)}

        assert engine.between(closed) == (PROMPT[:CHUNK], {CHUNK})


def test_stages_take_no_more_memory():
    install_seam()
    model = tiny_llama(layers=6, kv_heads=4)
    plan = plan_caches(model, {"model_type": "llama", "num_attention_heads": 4}, KVSpec())
    ids: list[int] = tokens(4096)[0].tolist()  # type: ignore[assignment]
    peaks = []
    for stages in (1, 6):
        run = Generation(model, plan.make(None), [])
        assert all(run.prefill(ids[:4000], 500))
        mx.clear_cache()
        mx.reset_peak_memory()
        assert outcome(run.prefill_in_stages(ids[4000:4032], stages, lambda: False))
        peaks.append(mx.get_peak_memory())
    assert peaks[1] <= peaks[0] + 4096 * 4 * 32 * 4 // 2  # less than half of one layer's keys


def test_a_slow_piece_is_stopped_between_its_layers_and_a_quick_one_is_not_asked():
    asked: list[int] = []

    class Slow(Computed):
        def prefill_in_stages(self, ids: list[int], stages: int, stopped: object) -> Generator[None, None, bool]:
            asked.append(stages)
            yield
            return False

    run, now = Slow(), itertools.count(0, 3)  # each piece takes three seconds
    pieces = PrefillChunker(FixedChunking(64), 64, 0, clock=lambda: next(now))  # type: ignore[arg-type]
    assert list(pieces.compute(run, list(range(500)))) == [True, False, True]  # type: ignore[arg-type]
    assert (run.cached_ids, asked) == (list(range(64)), [3])


def test_where_pieces_of_any_size_are_the_same_a_slow_chunk_is_cut_by_tokens_and_what_was_computed_stays():
    read: list[int] = []
    run, now = Generation(lambda ids, cache: read.append(ids.shape[1]), [], []), itertools.count(0, 3)
    stops = iter([False, True])
    pieces = PrefillChunker(
        FixedChunking(512, piece=64), 512, 0, clock=lambda: next(now), stopped=lambda: next(stops)  # type: ignore[arg-type]
    )  # fmt: skip
    found = list(pieces.compute(run, list(range(1024))))
    # The first chunk is computed at once, its speed not being known; of the second, three pieces of 192, 192 and 128.
    assert read == [512, 192, 192]
    assert found == [True, False, False, True]
    assert run.cached_ids == list(range(512 + 2 * 192))
    assert run.chunk == 192


@pytest.fixture(params=[(16, 16), (8, 4), (4, 4)], ids=str)
def engine(tiny: Path, request: pytest.FixtureRequest, chunks: None) -> Iterator[Engine]:
    """A model whose keys and values have so many bits, with prompts cut after 64 tokens."""
    kv = KVSpec(key_bits=request.param[0], value_bits=request.param[1])
    with Engine.load(tiny, kv=kv, prompt_cache=PromptCacheSpec(disk=False), speculation=None) as loaded:
        yield loaded


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The logits from which a token was chosen, of all steps of all replies."""
    seen: list[object] = []
    choose = Sampler.__call__

    def recorded(sampler: Sampler, given: mx.array, allowed: object = None) -> mx.array:
        seen.append(given.tolist())
        return choose(sampler, given, allowed)

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
    store_of(engine).clear()
    store_of(engine).rates.prefill_tps = prefill_tps
    again, second = answer(engine, PROMPT)
    assert (again, second.text) == (cuts, first.text)
    assert logits == before


@pytest.mark.parametrize("looks", [2, 4, 1000])
def test_what_idle_time_was_enough_for_moves_no_logit(engine: Engine, logits: list[object], looks: int):
    said = [Message("user", "How does it go on, and why? " * 12)]
    _, cold = answer(engine, said)
    before, logits[:] = list(logits), []
    core: Runner = runner_of(engine)
    core.store.clear()
    asked = itertools.count(1)
    stable = stable_prompt(core, said, TemplateOptions())
    engine.between(lambda: [*warm_stable(core, stable, Pace(), cancelled=lambda: next(asked) > looks)])
    cuts, warm = answer(engine, said)
    assert cuts[0] >= CHUNK
    assert warm.text == cold.text
    if core.runtime.kv.quantized:
        assert cuts[0] % CHUNK == 0
        assert logits == before


# What MLX raises becomes an error with a remedy, and a prompt is tried again in smaller pieces.

GREEDY = Sampling(temperature=0, max_tokens=8)
LONG_PROMPT = [5 + i * i % 250 for i in range(700)]

IGNORED = (
    "[METAL] Command buffer execution failed: Ignored (for causing prior/excessive GPU errors) "
    "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)"
)
INSUFFICIENT = "[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
TOO_LARGE = (
    "[metal::malloc] Attempting to allocate 9663676416 bytes which is greater than the maximum allowed buffer size of "
    "8589934592 bytes."
)
IMPACTING = (
    "[METAL] Command buffer execution failed: Impacting Interactivity "
    "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)"
)
TIMEOUT = "[METAL] Command buffer execution failed: Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)"


@pytest.mark.parametrize(
    ("raised", "kind", "says"),
    [
        (RuntimeError(INSUFFICIENT), MemoryLimitError, "not enough memory"),
        (RuntimeError(TOO_LARGE), MemoryLimitError, "not enough memory"),
        (RuntimeError("[metal::malloc] Resource limit (499000) exceeded."), MemoryLimitError, "Resource limit"),
        (RuntimeError("[malloc] Unable to allocate 1099511627776 bytes."), MemoryLimitError, "not enough memory"),
        (RuntimeError("cudaMallocAsync(&data, size, s) failed: out of memory"), MemoryLimitError, "out of memory"),
        (RuntimeError("std::bad_alloc"), MemoryLimitError, "not enough memory"),
        (MemoryError("std::bad_alloc"), MemoryLimitError, "not enough memory"),
        (MemoryError(), MemoryLimitError, "allocation failed"),
        (RuntimeError(IMPACTING), DeviceError, "took too long"),
        (RuntimeError(IGNORED), DeviceLostError, "no more GPU work"),
        (RuntimeError(TIMEOUT), DeviceError, "took too long"),
        (RuntimeError("[METAL] Command buffer execution failed: Invalid Resource"), DeviceError, "the GPU failed"),
        (RuntimeError("CUDA error: an illegal memory access"), DeviceError, "the GPU failed"),
    ],
)
def test_what_mlx_raises_is_understood(raised: BaseException, kind: type[TokamacError], says: str) -> None:
    error = engine_error(raised)
    assert type(error) is kind
    assert says in error.message
    assert error.hint


@pytest.mark.parametrize(
    "raised", [ValueError("bad shapes"), KeyError("x"), MemoryLimitError("too large", "Shrink it.")]
)
def test_other_errors_stay(raised: BaseException) -> None:
    assert computing_error(raised) is None


def test_a_failure_that_is_not_known_is_the_devices_only_while_computing() -> None:
    assert engine_error(RuntimeError("something new")) is None
    assert isinstance(computing_error(RuntimeError("something new")), DeviceError)


class Failing:
    """A model whose step fails, as MLX's do, whenever ``when`` says so of the tokens computed at once and the step's number.

    The caches are written to before it fails, as they are when a GPU's work fails after it was handed over.
    """

    def __init__(self, model: Any, when: Callable[[int, int], bool], error: BaseException) -> None:
        self.layers = model.layers
        self.rows: list[int] = []
        self._model, self._when, self._error = model, when, error

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        self.rows.append(ids.shape[1])
        out: mx.array = self._model(ids, cache=cache)
        if self._when(ids.shape[1], len(self.rows)):
            for each in cache:
                each.state = [*[tuple(x * 0 for x in part) for part in each.state[:2]], *each.state[2:]]
            raise self._error
        return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("failing"), max_position_embeddings=2048)


@pytest.fixture(params=[PromptCacheSpec(disk=False), None], ids=["prompt cache", "no prompt cache"])
def either_engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine.load(folder, prompt_cache=request.param, speculation=None) as loaded:
        yield loaded


def failing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, when: Callable[[int, int], bool], error: BaseException
) -> Failing:
    runtime = runtime_of(engine)
    model = Failing(runtime.model, when, error)
    monkeypatch.setattr(runner_of(engine), "_runtime", replace(runtime, model=model))
    monkeypatch.setattr(runner_of(engine), "_decoder", Decoder(model, ahead=runtime.ahead))
    return model


@pytest.mark.parametrize(
    "error", [RuntimeError(INSUFFICIENT), RuntimeError(TIMEOUT), MemoryError("std::bad_alloc")], ids=str
)
@pytest.mark.parametrize("step", [1, 3])
def test_a_failed_piece_is_tried_again_at_half_its_size(either_engine, monkeypatch, error, step):
    plain = finish(list(either_engine.generate(LONG_PROMPT, GREEDY)))
    store_of(either_engine).clear()
    model = failing(either_engine, monkeypatch, lambda _, number: number == step, error)
    events = list(either_engine.generate(LONG_PROMPT, GREEDY))
    (told,) = [event for event in events if isinstance(event, MemoryPressure)]
    half = 128  # the third piece is what is left of 700 after twice 256
    assert told.failed
    assert told.chunk == half
    prompt = [rows for rows in model.rows[step:] if rows > 1]
    assert max(prompt) <= half
    assert sum(prompt) >= len(LONG_PROMPT) - 2  # what the failed pieces left in the caches is not gone on from
    assert finish(events).text == plain.text


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError(TOO_LARGE), MemoryLimitError),
        (RuntimeError(IMPACTING), DeviceError),
        (RuntimeError("?"), DeviceError),
    ],
)
def test_what_always_fails_is_an_error_with_a_remedy_and_the_engine_goes_on(either_engine, monkeypatch, error, kind):
    model = failing(either_engine, monkeypatch, lambda rows, _: rows > 1, error)
    with pytest.raises(kind) as raised:
        list(either_engine.generate(LONG_PROMPT, GREEDY))
    assert raised.value.hint
    assert model.rows == sorted(model.rows, reverse=True)
    assert model.rows[-1] == 32
    monkeypatch.undo()
    assert finish(list(either_engine.generate(LONG_PROMPT, GREEDY))).metrics.cached_tokens == 0


def test_a_failure_while_decoding_ends_the_reply_and_drops_its_caches(either_engine, monkeypatch):
    plain = finish(list(either_engine.generate(LONG_PROMPT, GREEDY)))
    store_of(either_engine).clear()
    seen: list[int] = []

    def third_token(rows: int, _: int) -> bool:
        seen.append(rows)
        return seen.count(1) == 3

    failing(either_engine, monkeypatch, third_token, RuntimeError(INSUFFICIENT))
    with pytest.raises(MemoryLimitError):
        list(either_engine.generate(LONG_PROMPT, GREEDY))
    monkeypatch.undo()
    again = finish(list(either_engine.generate(LONG_PROMPT, GREEDY)))
    assert (again.text, again.metrics.cached_tokens) == (plain.text, 0)


@pytest.mark.parametrize("call", ["warm", "logprobs"])
def test_no_bare_failure_reaches_a_caller(folder, monkeypatch, call):
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        failing(engine, monkeypatch, lambda *_: True, RuntimeError(INSUFFICIENT))
        calls = {"warm": lambda: list(engine.warm(LONG_PROMPT)), "logprobs": lambda: engine.logprobs(LONG_PROMPT[:50])}
        with pytest.raises(MemoryLimitError):
            calls[call]()
