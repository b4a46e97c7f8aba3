"""The engine's small parts alone: worker, stream, recorder, dense layers."""

import threading

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from tokamac.engine import EngineClosedError, PrefillProgress, TextChunk
from tokamac.engine.metrics import Recorder, StepCost
from tokamac.engine.model.cpu import LAZY_WEIGHTS, DenseEmbedding, DenseLinear, unpack
from tokamac.engine.worker import HAND_OVER_S, LOOK_AHEAD, EventStream, Worker


def test_a_worker_runs_in_order_passes_errors_and_closes_once() -> None:
    ended = threading.Event()
    worker = Worker("test", at_end=ended.set)
    order: list[int] = []
    futures = [worker.submit(lambda i=i: order.append(i)) for i in range(20)]  # type: ignore[misc]
    for future in futures:
        future.result()
    assert order == list(range(20))
    with pytest.raises(ZeroDivisionError):
        worker.call(lambda: 1 // 0)
    worker.close()
    worker.close()
    assert ended.is_set()
    with pytest.raises(EngineClosedError):
        worker.submit(lambda: None)


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_stream_is_ahead_of_a_slow_reader_and_not_of_one_that_left() -> None:
    clock = FakeClock()
    stream = EventStream(clock)
    for _ in range(LOOK_AHEAD):
        assert not stream.is_ahead
        clock.now += 1  # a slow model: each token is a batch of its own
        stream.put(TextChunk("x"))
    assert stream.is_ahead
    next(stream.read())
    assert not stream.is_ahead
    clock.now += 1
    stream.put(TextChunk("x"))
    assert stream.is_ahead
    stream.abandon()
    assert not stream.is_ahead


def test_text_that_follows_at_once_is_handed_over_together_and_in_order() -> None:
    clock = FakeClock()
    stream = EventStream(clock)
    reader = stream.read()
    stream.put(TextChunk("a"))
    assert next(reader) == TextChunk("a")  # the first is not kept waiting
    stream.put(TextChunk("b"))
    assert stream._batches.empty()
    clock.now += 2 * HAND_OVER_S
    stream.put(TextChunk("c"))
    assert [next(reader), next(reader)] == [TextChunk("b"), TextChunk("c")]
    stream.put(TextChunk("d"))
    stream.put(PrefillProgress(1, 2, 0))  # whatever is no text goes at once, after the text before it
    assert [next(reader), next(reader)] == [TextChunk("d"), PrefillProgress(1, 2, 0)]
    stream.put(TextChunk("e"))
    stream.end()
    assert list(reader) == [TextChunk("e")]


def test_a_failure_in_the_engine_is_raised_in_the_reader() -> None:
    stream = EventStream()
    stream.put(TextChunk("x"))
    stream.end(ValueError("no"))
    events = stream.read()
    next(events)
    with pytest.raises(ValueError, match="no"):
        next(events)


@pytest.mark.parametrize("tokens", [2, 5, 20])
def test_fifty_millisecond_steps_read_twenty_tokens_a_second(tokens: int) -> None:
    clock = FakeClock()
    recorder = Recorder(clock)
    recorder.accept()
    clock.now += 0.2  # tokenizing, waiting
    recorder.begin_prefill(prompt_tokens=120, cached_tokens=20)
    clock.now += 0.5
    for index in range(tokens):
        clock.now += 0.05 if index else 0
        recorder.token()
    metrics = recorder.metrics(StepCost(1_000_000_000, 0, 100.0), kv_bytes=7, peak_memory_bytes=None)
    assert metrics.decode_tps == pytest.approx(20.0)
    assert metrics.ttft_s == pytest.approx(0.7)
    assert metrics.prefill_s == pytest.approx(0.5)
    assert metrics.prefill_tps == pytest.approx(200.0)  # the 20 cached tokens don't count
    assert metrics.total_s == pytest.approx(0.7 + 0.05 * (tokens - 1))
    assert metrics.itl_ms is not None
    assert metrics.itl_ms.p50 == pytest.approx(50)
    assert metrics.achieved_gbs == pytest.approx(20.0)
    assert metrics.ceiling_tps == pytest.approx(100.0)


@pytest.mark.parametrize("tokens", [0, 1])
def test_what_is_not_known_is_none(tokens: int) -> None:
    recorder = Recorder(FakeClock())
    recorder.begin_prefill(10, 0)
    for _ in range(tokens):
        recorder.token()
    metrics = recorder.metrics(StepCost(None, None, None), kv_bytes=None, peak_memory_bytes=None)
    unknown = (metrics.decode_tps, metrics.itl_ms, metrics.ceiling_tps, metrics.achieved_gbs, metrics.expected_tps)
    assert unknown == (None,) * 5


class Toy(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.layers = [nn.Linear(64, wide), nn.Linear(wide, 64, bias=False)]

    def __call__(self, ids: mx.array) -> mx.array:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.embed.as_linear(x)


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("wide", [64, 2 * LAZY_WEIGHTS // 64])
def test_dense_layers_say_what_the_packed_ones_say(bits: int | None, rows: int, wide: int) -> None:
    mx.random.seed(1)
    toy = Toy(wide)
    if bits is not None:
        nn.quantize(toy, 64, bits)
    ids = mx.arange(rows)[None]
    before = np.asarray(toy(ids))
    assert unpack(toy) is (wide > 64)
    after = np.asarray(toy(ids))
    assert isinstance(toy.layers[0], DenseLinear)
    assert isinstance(toy.embed, DenseEmbedding)
    assert np.abs(before - after).max() < 2e-3 * np.abs(before).max()


def test_weights_that_do_not_fit_stay_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokamac.engine.model.cpu.machine_total", lambda: 1000)
    toy = Toy(64)
    assert unpack(toy) is False
    assert type(toy.layers[0]) is nn.Linear
