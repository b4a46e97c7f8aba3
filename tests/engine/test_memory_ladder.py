"""Memory that is short: the ladder on a real engine, refusals before anything is computed, and what the user is told."""

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from tests.engine.seeded import write_model
from tokamac.app.cli import main
from tokamac.engine import Engine, Event, Finished, KVSpec, MemoryLimitError, MemoryPressure, Message, Sampling
from tokamac.engine.options import PromptCacheSpec
from tokamac.engine.perf import memory
from tokamac.engine.perf.peak_memory import predict_peak

GREEDY = Sampling(temperature=0, max_tokens=6)
PROMPT = [5 + i * i % 250 for i in range(1500)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose keys and values weigh more than its temporaries: 8 layers of 4 heads, 16 kB a token."""
    shape = {"num_hidden_layers": 8, "num_key_value_heads": 4, "head_dim": 64}
    return write_model(tmp_path_factory.mktemp("ladder"), max_position_embeddings=2048, **shape)


@pytest.fixture
def others(settled_memory: None) -> int:
    """Bytes that other tests of this process hold: they take from an engine's budget as another engine does."""
    return mx.get_active_memory()


@pytest.fixture
def allow(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Set what MLX's arrays may take."""
    return lambda budget: monkeypatch.setattr(memory, "array_budget", lambda: budget)


@pytest.fixture
def engine(folder: Path, others: int) -> Iterator[Engine]:
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as loaded:
        yield loaded


def finished(events: list[Event]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


def squeezed(events: list[Event]) -> list[MemoryPressure]:
    return [event for event in events if isinstance(event, MemoryPressure)]


def total(engine: Engine, chunk: int, tokens: int = len(PROMPT), kv: tuple[int, int] = (16, 16)) -> int:
    """Return the predicted peak of a prompt."""
    shape = engine._runner.runtime.shape.packed(*kv)
    return predict_peak(shape, held=0, new=tokens - 1, chunk=chunk, reply=1).total


def between(engine: Engine, chunk: int, tokens: int = len(PROMPT)) -> int:
    """Return a budget that chunks of this size fit, and twice as large ones do not."""
    return (total(engine, chunk, tokens) + total(engine, 2 * chunk, tokens)) // 2


def test_nothing_is_done_where_the_budget_is_unknown(engine, allow):
    allow(None)
    assert not squeezed(list(engine.generate(PROMPT, GREEDY)))


def test_smaller_chunks_give_the_same_reply(folder, allow, others):
    with Engine.load(folder, prompt_cache=None) as engine:
        plain = finished(list(engine.generate(PROMPT, GREEDY)))
        allow(others + between(engine, 64))
        events = list(engine.generate(PROMPT, GREEDY))
        (told,) = squeezed(events)
        assert told.chunk == 64
        assert told.predicted_bytes == total(engine, 64)
        assert told.predicted_bytes <= told.budget_bytes
    assert finished(events).text == plain.text
    assert (finished(events).metrics.peak_memory_bytes or 0) < (plain.metrics.peak_memory_bytes or 0)


def test_other_prompts_are_let_go_of_and_the_reply_is_the_same(engine, allow, others):
    allow(None)
    other = [260 - token for token in PROMPT]
    first = finished(list(engine.generate(other, GREEDY)))
    plain = finished(list(engine.generate(PROMPT, GREEDY)))
    list(engine.generate(other, GREEDY))
    store = engine._runner._store
    kept = store.aside
    assert kept > 0
    allow(others + total(engine, 32) + kept // 2)
    events = list(engine.generate([*PROMPT[:-1], 9], GREEDY))  # differs from its first token on from what is live
    (told,) = squeezed(events)
    assert told.cache_bytes > 0
    allow(None)
    assert finished(list(engine.generate(PROMPT, GREEDY))).text == plain.text
    assert finished(list(engine.generate(other, GREEDY))).text == first.text


def test_a_prompt_that_can_not_fit_is_refused_with_numbers_and_an_offer(engine, allow, others):
    allow(others + total(engine, 256, kv=(8, 8)) + 10**5)
    numbers = r"1,500 tokens needs .* MB of memory \(weights .*, KV cache .*, temporaries .*\), and .* MB may be used"
    with pytest.raises(MemoryLimitError, match=numbers) as told:
        list(engine.generate(PROMPT, GREEDY))
    assert "--kv-bits 8 (" in told.value.hint
    assert "--kv-window " in told.value.hint
    assert not engine._runner._store.nbytes  # nothing was computed
    allow(None)
    assert finished(list(engine.generate(PROMPT, GREEDY))).text


def test_what_is_offered_works(folder, allow, others):
    with Engine.load(folder, prompt_cache=None) as engine:
        budget = total(engine, 256, kv=(8, 8)) + 10**6
    allow(others + budget)
    with Engine.load(folder, kv=KVSpec(key_bits=8, value_bits=8), prompt_cache=None) as smaller:
        events = list(smaller.generate(PROMPT, GREEDY))
    assert not [event for event in squeezed(events) if event.chunk]
    peak = finished(events).metrics.peak_memory_bytes
    assert peak is not None
    assert peak - others <= 1.1 * budget


def test_warming_is_refused_as_well_but_not_in_idle_time(engine, allow):
    allow(engine._runner.runtime.shape.weights)
    with pytest.raises(MemoryLimitError, match="may be used"):
        list(engine.warm(PROMPT))
    engine.warm_ahead([Message("user", "x" * 900)])  # says nothing: it is said when the prompt is sent
    assert engine.memory().active > 0


def test_a_model_that_can_not_fit_is_refused_before_a_weight_is_read(folder, allow, monkeypatch):
    allow(10_000)
    monkeypatch.setattr("tokamac.engine.loading.load_model", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(MemoryLimitError, match=r"this model, with 32 tokens, needs .* and 0\.0 MB may be used"):
        Engine.load(folder)


def test_a_context_that_does_not_fit_is_told_and_left_as_it_is(folder, engine, allow):
    allow(total(engine, 256, tokens=1200))  # between 1,024 tokens and 1,280
    with Engine.load(folder, prompt_cache=None) as loaded:
        assert loaded.spec.capacity == 2048
        (note,) = [note for note in loaded.spec.notes if "context" in note]
    assert note.startswith("of the context of 2,048 tokens, about 1,024 fit into the ")
    assert "with --kv-bits 8,8 about 2,048" in note


def test_a_reply_ends_with_what_it_has_where_its_caches_would_not_fit(folder, allow, others):
    long = Sampling(temperature=0, max_tokens=700)
    prompt = PROMPT[:200]
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        whole = finished(list(engine.generate(prompt, long)))
        assert whole.metrics.generated_tokens > 600
        engine._runner._store.clear()
        shape, slots = engine._runner.runtime.shape, 768  # caches may grow to these from 512, and no further
        budget = predict_peak(shape, held=512, new=0, chunk=1, slots=512, reply=1).total + 100_000
        allow(others + budget)
        events = list(engine.generate(prompt, long))
        ended = finished(events)
        (told,) = squeezed(events)
        assert (told.ended, ended.reason) == (True, "length")
        assert len(prompt) + ended.metrics.generated_tokens == slots + 1  # the last token's keys need no room
        assert whole.text.startswith(ended.text)
        assert (ended.metrics.peak_memory_bytes or 0) <= 1.1 * (others + budget)
        allow(None)
        again = finished(list(engine.generate(prompt, long)))
        assert again.metrics.cached_tokens == len(prompt) - 1
        assert again.text == whole.text


def test_other_prompts_go_before_a_reply_ends(folder, allow, others):
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        prompt, other = PROMPT[:200], [260 - token for token in PROMPT[:500]]
        list(engine.generate(other, GREEDY))
        long = Sampling(temperature=0, max_tokens=100)
        plain = finished(list(engine.generate(prompt, long)))
        list(engine.generate(other, GREEDY))
        kept = engine._runner._store.aside
        shape = engine._runner.runtime.shape
        needed = predict_peak(shape, held=256, new=0, chunk=1, slots=256, reply=1).total
        allow(others + needed + kept // 2)
        events = list(engine.generate([*prompt[:-1], 9], long))
        told = squeezed(events)
        assert sum(each.cache_bytes for each in told) > 0
        assert not any(each.ended for each in told)
        assert finished(events).metrics.generated_tokens == 100
        allow(None)
        assert finished(list(engine.generate(prompt, long))).text == plain.text


@pytest.fixture
def no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))


@pytest.mark.usefixtures("no_input")
def test_ask_refuses_with_exit_status_1(folder, allow, capsys):
    allow(10_000)
    assert main(["ask", "hello", "-m", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "needs" in err
    assert "may be used" in err


@pytest.mark.usefixtures("no_input")
def test_ask_says_what_was_done(folder, allow, others, capsys):
    with Engine.load(folder, prompt_cache=None) as engine:
        ids = engine.tokenizer.encode(engine.tokenizer.render([Message("user", "a b " * 300)]))
        budget = between(engine, 64, len(ids))
    allow(others + budget)
    flags = ["-m", str(folder), "--max-tokens", "3", "--temp", "0", "--no-prompt-cache"]
    assert main(["ask", "a b " * 300, *flags]) == 0
    assert "memory is short" in capsys.readouterr().err
    assert main(["ask", "a b " * 300, *flags, "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (told,) = [event for event in events if event["event"] == "squeezed"]
    assert told["chunk"] == 64
