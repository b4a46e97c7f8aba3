"""What MLX raises becomes an error with a remedy, and a prompt is tried again in smaller pieces."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.engine.seeded import write_model
from tokamac.engine import DeviceError, Engine, Finished, MemoryLimitError, MemoryPressure, Sampling, TokamacError
from tokamac.engine.errors import computing_error, engine_error
from tokamac.engine.options import PromptCacheSpec

GREEDY = Sampling(temperature=0, max_tokens=8)
PROMPT = [5 + i * i % 250 for i in range(700)]

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
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine.load(folder, prompt_cache=request.param) as loaded:
        yield loaded


def failing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, when: Callable[[int, int], bool], error: BaseException
) -> Failing:
    model = Failing(engine._runner.runtime.model, when, error)
    monkeypatch.setattr(engine._runner, "_runtime", replace(engine._runner.runtime, model=model))
    return model


def last(events: list[Any]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


@pytest.mark.parametrize(
    "error", [RuntimeError(INSUFFICIENT), RuntimeError(TIMEOUT), MemoryError("std::bad_alloc")], ids=str
)
@pytest.mark.parametrize("step", [1, 3])
def test_a_failed_piece_is_tried_again_at_half_its_size(engine, monkeypatch, error, step):
    plain = last(list(engine.generate(PROMPT, GREEDY)))
    engine._runner._store.clear()
    model = failing(engine, monkeypatch, lambda _, number: number == step, error)
    events = list(engine.generate(PROMPT, GREEDY))
    (told,) = [event for event in events if isinstance(event, MemoryPressure)]
    half = 128  # the third piece is what is left of 700 after twice 256
    assert told.failed
    assert told.chunk == half
    prompt = [rows for rows in model.rows[step:] if rows > 1]
    assert max(prompt) <= half
    assert sum(prompt) >= len(PROMPT) - 2  # what the failed pieces left in the caches is not gone on from
    assert last(events).text == plain.text


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError(TOO_LARGE), MemoryLimitError),
        (RuntimeError(IMPACTING), DeviceError),
        (RuntimeError("?"), DeviceError),
    ],
)
def test_what_always_fails_is_an_error_with_a_remedy_and_the_engine_goes_on(engine, monkeypatch, error, kind):
    model = failing(engine, monkeypatch, lambda rows, _: rows > 1, error)
    with pytest.raises(kind) as raised:
        list(engine.generate(PROMPT, GREEDY))
    assert raised.value.hint
    assert model.rows == sorted(model.rows, reverse=True)
    assert model.rows[-1] == 32
    monkeypatch.undo()
    assert last(list(engine.generate(PROMPT, GREEDY))).metrics.cached_tokens == 0


def test_a_failure_while_decoding_ends_the_reply_and_drops_its_caches(engine, monkeypatch):
    plain = last(list(engine.generate(PROMPT, GREEDY)))
    engine._runner._store.clear()
    seen: list[int] = []

    def third_token(rows: int, _: int) -> bool:
        seen.append(rows)
        return seen.count(1) == 3

    failing(engine, monkeypatch, third_token, RuntimeError(INSUFFICIENT))
    with pytest.raises(MemoryLimitError):
        list(engine.generate(PROMPT, GREEDY))
    monkeypatch.undo()
    again = last(list(engine.generate(PROMPT, GREEDY)))
    assert (again.text, again.metrics.cached_tokens) == (plain.text, 0)


@pytest.mark.parametrize("call", ["warm", "logprobs"])
def test_no_bare_failure_reaches_a_caller(folder, monkeypatch, call):
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        failing(engine, monkeypatch, lambda *_: True, RuntimeError(INSUFFICIENT))
        calls = {"warm": lambda: list(engine.warm(PROMPT)), "logprobs": lambda: engine.logprobs(PROMPT[:50])}
        with pytest.raises(MemoryLimitError):
            calls[call]()
