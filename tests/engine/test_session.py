"""The engine whole, on a tiny model: reuse, cancelling, seeds, threads, limits, closing."""

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.engine.seeded import write_model
from tokamac.engine import (
    ContextError,
    DeviceError,
    Engine,
    EngineClosedError,
    Event,
    Finished,
    KVSpec,
    Message,
    OptionError,
    PrefillProgress,
    Sampling,
    TextChunk,
)

GREEDY = Sampling(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with Engine.load(tiny) as loaded:
        yield loaded


@pytest.fixture
def fresh(tiny: Path) -> Iterator[Engine]:
    with Engine.load(tiny) as loaded:
        yield loaded


def finish(events: Iterator[Event]) -> Finished:
    last = list(events)[-1]
    assert isinstance(last, Finished)
    return last


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(7, 262, count).tolist()


def test_a_reply_is_progress_then_text_then_the_end(fresh: Engine) -> None:
    events = list(fresh.generate([Message("user", "x" * 400)], GREEDY))
    kinds = [type(event) for event in events]
    assert kinds[0] is PrefillProgress
    assert kinds[-1] is Finished
    progress = [event for event in events if isinstance(event, PrefillProgress)]
    assert [event.done for event in progress] == sorted({event.done for event in progress})
    assert progress[0].cached == 0
    assert progress[-1].done == progress[-1].total - 1  # the last token is computed by the first step of decoding
    text = "".join(event.text for event in events if isinstance(event, TextChunk))
    assert text == events[-1].text  # type: ignore[union-attr]


def test_metrics_of_a_reply_add_up(fresh: Engine) -> None:
    metrics = finish(fresh.generate(ids(50), GREEDY)).metrics
    assert (metrics.prompt_tokens, metrics.cached_tokens, metrics.prefill_tokens) == (50, 0, 50)
    assert metrics.generated_tokens == 12
    assert metrics.ttft_s is not None
    assert metrics.total_s is not None
    assert 0 < metrics.ttft_s < metrics.total_s
    assert metrics.kv_bytes
    assert metrics.weight_bytes_per_token
    assert metrics.ceiling_tps is None or metrics.decode_tps is None or metrics.decode_tps < metrics.ceiling_tps


def test_one_token_has_no_decode_rate(fresh: Engine) -> None:
    metrics = finish(fresh.generate(ids(5), Sampling(temperature=0, max_tokens=1))).metrics
    assert metrics.decode_tps is None
    assert metrics.itl_ms is None
    assert metrics.ttft_s is not None


@pytest.mark.parametrize("chunk", [1, 3, 7, 64, None])
def test_chunking_does_not_change_logprobs(engine: Engine, chunk: int | None) -> None:
    prompt = ids(40)
    whole, cut = np.asarray(engine.logprobs(prompt)), np.asarray(engine.logprobs(prompt, chunk))
    assert np.abs(whole - cut).max() < 1e-4
    assert np.abs(np.exp(whole).sum(-1) - 1).max() < 1e-4


def test_prefill_and_decode_agree_with_logprobs(engine: Engine) -> None:
    prompt = ids(20)
    text = finish(engine.generate(prompt, GREEDY)).text
    follow = list(prompt)
    for _ in range(12):
        follow.append(int(mx.argmax(engine.logprobs(follow)[-1]).item()))
    assert engine.tokenizer.decode(follow[20:]).strip("\ufffd") in text + "\ufffd" or text == engine.tokenizer.decode(
        follow[20:]
    )


def test_the_next_turn_computes_only_what_is_new(fresh: Engine) -> None:
    chat = fresh.chat(system="short")
    first = finish(chat.send("hello", GREEDY)).metrics
    second = finish(chat.send("and then?", GREEDY)).metrics
    assert first.cached_tokens == 0
    assert second.cached_tokens >= first.prompt_tokens
    assert second.prefill_tokens == second.prompt_tokens - second.cached_tokens


def test_a_warm_turn_says_what_a_cold_one_says(fresh: Engine, tiny: Path) -> None:
    chat = fresh.chat()
    for question in ("one", "two", "three"):
        warm = finish(chat.send(question, GREEDY)).text
    with Engine.load(tiny, prompt_cache=None) as cold:
        events = cold.chat(messages=chat.messages[:-2]).send("three", GREEDY)
        last = finish(events)
    assert last.text == warm
    assert last.metrics.cached_tokens == 0


def test_the_same_question_again_costs_one_token(fresh: Engine) -> None:
    prompt = [Message("user", "the same question")]
    finish(fresh.generate(prompt, GREEDY))
    metrics = finish(fresh.generate(prompt, GREEDY)).metrics
    assert metrics.prefill_tokens == 1


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 9])
def test_cancelling_anywhere_leaves_the_engine_sound(fresh: Engine, steps: int) -> None:
    prompt = ids(300)
    cancelled = fresh.generate(prompt, Sampling(temperature=0, max_tokens=100))
    for _, _ in zip(range(steps), cancelled, strict=False):
        pass
    cancelled.close()
    after = finish(fresh.generate(prompt, GREEDY))
    reference = finish(fresh.generate(ids(300), GREEDY))
    assert after.text == reference.text
    assert after.reason == "length"


def test_dropping_the_iterator_cancels(fresh: Engine) -> None:
    for event in fresh.generate(ids(10), Sampling(max_tokens=400)):
        if isinstance(event, TextChunk):
            break
    gc.collect()
    assert finish(fresh.generate(ids(10), GREEDY)).reason == "length"


def test_cancel_from_another_thread_ends_with_a_finished_event(fresh: Engine) -> None:
    events = fresh.generate(ids(10), Sampling(temperature=0, max_tokens=400))
    seen = []
    for event in events:
        seen.append(event)
        if len(seen) == 4:
            threading.Thread(target=fresh.cancel).start()
    assert isinstance(seen[-1], Finished)
    assert seen[-1].reason == "cancelled"
    assert seen[-1].metrics.generated_tokens < 400


def test_a_cancelled_chat_keeps_the_partial_answer(fresh: Engine) -> None:
    chat = fresh.chat()
    reply = chat.send("tell me", Sampling(temperature=0, max_tokens=200))
    said = ""
    for event in reply:
        if isinstance(event, TextChunk):
            said += event.text
            if len(said) > 3:
                break
    reply.close()
    assert [message.role for message in chat.messages] == ["user", "assistant"]
    assert chat.messages[-1].content == said


def test_regenerate_edit_and_branch(fresh: Engine) -> None:
    chat = fresh.chat()
    first = finish(chat.send("question", GREEDY)).text
    assert finish(chat.regenerate(GREEDY)).text == first
    assert len(chat.messages) == 2
    other = chat.branch(0)
    chat.edit(0, "another question")
    assert [message.content for message in chat.messages] == ["another question"]
    assert [message.content for message in other.messages] == ["question"]
    finish(chat.regenerate(GREEDY))
    assert finish(other.regenerate(GREEDY)).text == first
    with pytest.raises(OptionError):
        chat.edit(5, "no such message")


def test_an_empty_message_is_refused_and_not_kept(engine: Engine) -> None:
    chat = engine.chat()
    with pytest.raises(OptionError, match="empty"):
        chat.send("  \n")
    assert chat.messages == ()
    with pytest.raises(OptionError, match="nothing to regenerate"):
        chat.regenerate()


@pytest.mark.parametrize("prompt", [[], [1, Message("user", "x")], [10_000], [-1]])
def test_prompts_that_can_not_be(engine: Engine, prompt: list[object]) -> None:
    with pytest.raises(OptionError):
        list(engine.generate(prompt))  # type: ignore[arg-type]


def test_a_prompt_longer_than_the_context_is_refused_with_numbers(engine: Engine) -> None:
    with pytest.raises(ContextError, match=r"600 tokens.*512"):
        list(engine.generate(ids(600)))


def test_the_context_bounds_the_reply(fresh: Engine) -> None:
    finished = finish(fresh.generate(ids(500), Sampling(temperature=0)))
    assert finished.reason in {"length", "stop"}
    assert finished.metrics.generated_tokens <= 12


def test_a_stop_text_ends_the_reply_and_is_not_shown(fresh: Engine) -> None:
    prompt = ids(30)
    whole = finish(fresh.generate(prompt, Sampling(temperature=0, max_tokens=40))).text
    stop = whole[8:11]
    cut = finish(fresh.generate(prompt, Sampling(temperature=0, max_tokens=40, stop=(stop,))))
    assert cut.reason == "stop"
    assert cut.text == whole[: whole.index(stop)]


def test_the_same_seed_gives_the_same_text(fresh: Engine) -> None:
    sampling = Sampling(temperature=1.0, seed=11, max_tokens=30, top_p=0.95, repetition_penalty=1.1)
    assert finish(fresh.generate(ids(9), sampling)).text == finish(fresh.generate(ids(9), sampling)).text


def test_requests_from_several_threads_wait_their_turn(fresh: Engine) -> None:
    texts: dict[int, str] = {}

    def ask(seed: int) -> None:
        texts[seed] = finish(fresh.generate(ids(20, seed), GREEDY)).text

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {seed: finish(fresh.generate(ids(20, seed), GREEDY)).text for seed in (1, 2, 3)}


def test_warming_spares_the_prefill(fresh: Engine) -> None:
    prompt = ids(120)
    assert all(isinstance(event, PrefillProgress) for event in fresh.warm(prompt))
    assert finish(fresh.generate(prompt, GREEDY)).metrics.prefill_tokens == 1


def test_live_tells_of_the_reply_in_progress_and_of_nothing_else(fresh: Engine) -> None:
    assert fresh.live() is None
    events = fresh.generate(ids(10), Sampling(temperature=0, max_tokens=300))
    for event in events:
        if isinstance(event, TextChunk):
            break
    live = fresh.live()
    assert live is not None
    assert live.metrics.ttft_s is not None
    assert live.context_tokens > 10
    events.close()


def test_limits_and_memory(engine: Engine) -> None:
    near, far = engine.limits(16), engine.limits(400)
    assert near.bytes_per_step is not None
    assert far.bytes_per_step is not None
    assert near.bytes_per_step < far.bytes_per_step
    assert engine.memory().active > 0
    assert engine.spec.layers == 2
    assert engine.spec.context_length == 512


@pytest.mark.parametrize("kv", [KVSpec(8, 8, 32), KVSpec(8, 4, 32), KVSpec(window=64, keep=4), KVSpec(4, 4, 32, 64, 4)])
def test_every_kv_spec_talks_and_goes_on_talking(tiny: Path, kv: KVSpec) -> None:
    with Engine.load(tiny, kv=kv) as engine:
        chat = engine.chat()
        for question in ("one", "two", "three"):
            metrics = finish(chat.send(question * 20, GREEDY)).metrics
        assert metrics.cached_tokens > 60
        assert metrics.generated_tokens >= 1
        assert len(chat.messages) == 6


def test_a_window_outlives_the_context(tiny: Path) -> None:
    with Engine.load(tiny, kv=KVSpec(window=64, keep=4)) as engine:
        finished = finish(engine.generate(ids(700), Sampling(temperature=0, max_tokens=20)))
        assert finished.metrics.prompt_tokens == 700
        assert finished.metrics.generated_tokens >= 1


def test_keep_system_pins_the_system_prompt(tiny: Path) -> None:
    with Engine.load(tiny, kv=KVSpec(window=64, keep="system")) as engine:
        assert finish(engine.chat(system="s" * 20).send("hello", GREEDY)).metrics.prompt_tokens > 20
        with pytest.raises(OptionError, match="fills a KV window"):
            finish(engine.chat(system="s" * 200).send("hello", GREEDY))


def test_keep_system_pins_sinks_where_there_is_no_system_prompt(tiny: Path) -> None:
    prompting = []
    for keep in ("system", 4):
        with Engine.load(tiny, kv=KVSpec(window=64, keep=keep), prompt_cache=None) as engine:  # type: ignore[arg-type]
            prompting.append(finish(engine.generate([Message("user", "u" * 200)], GREEDY)).text)
            assert engine._runner._prompting().pinned([Message("user", "u")]) == 4
    assert prompting[0] == prompting[1]


def test_a_closed_engine_says_so_and_closes_again(tiny: Path) -> None:
    engine = Engine.load(tiny)
    engine.close()
    engine.close()
    with pytest.raises(EngineClosedError, match="closed"):
        list(engine.generate([10]))


def test_closing_during_a_reply_ends_it(tiny: Path) -> None:
    engine = Engine.load(tiny)
    events = engine.generate([10] * 20, Sampling(max_tokens=400))
    next(events)
    engine.close()
    assert threading.active_count() < 50
    with pytest.raises(EngineClosedError):
        list(engine.generate([10]))


def test_memory_is_returned_by_close(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "wide", hidden_size=256, intermediate_size=1024, head_dim=64)
    gc.collect()
    before = mx.get_active_memory()
    engine = Engine.load(folder)
    assert mx.get_active_memory() > before + 1_000_000
    engine.close()
    gc.collect()
    assert mx.get_active_memory() < before + 100_000


def test_a_packed_model_is_unpacked_for_the_cpu_and_says_the_same(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "packed", bits=4)
    with Engine.load(folder) as engine:
        ours = np.asarray(engine.logprobs(ids(30)))
        assert engine.spec.bits_per_weight is not None
        assert 5 < engine.spec.bits_per_weight < 8  # float32 scales at group 32: 6 bits
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    logits = model(mx.array([ids(30)]))[0].astype(mx.float32)
    theirs = np.asarray(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    assert np.abs(ours - theirs).max() < 1e-3


def test_a_window_without_a_token_limit_writes_on_past_the_context(tiny: Path) -> None:
    with Engine.load(tiny, kv=KVSpec(window=64, keep=4)) as engine:
        events = engine.generate(ids(30), Sampling(temperature=0))
        text = sum(isinstance(event, TextChunk) for event, _ in zip(events, range(20), strict=False))
        events.close()
    assert text > 0


def test_two_conversations_are_both_kept(tiny: Path) -> None:
    with Engine.load(tiny) as engine:
        first, second = ids(120, 1), [ids(120, 1)[0], *ids(119, 2)]  # they begin alike
        costs = [
            finish(engine.generate(prompt, GREEDY)).metrics.prefill_tokens for prompt in (first, second, first, second)
        ]
    assert costs == [120, 119, 1, 1]


def test_cancel_reaches_replies_that_wait(fresh: Engine) -> None:
    reasons: dict[int, str] = {}

    def ask(number: int) -> None:
        reasons[number] = finish(fresh.generate(ids(20, number), Sampling(temperature=0, max_tokens=450))).reason

    threads = [threading.Thread(target=ask, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    while len(fresh._replies.open) < 2:
        time.sleep(0.001)
    fresh.cancel()
    for thread in threads:
        thread.join(30)
    assert reasons == {1: "cancelled", 2: "cancelled"}


def test_closing_tells_every_reader(tiny: Path) -> None:
    engine = Engine.load(tiny)
    running, waiting = (engine.generate([10] * 20, Sampling(max_tokens=450)) for _ in range(2))
    next(running)
    failures: list[BaseException] = []

    def read() -> None:
        try:
            list(waiting)
        except EngineClosedError as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    while len(engine._replies.open) < 2:
        time.sleep(0.001)
    engine.close()
    reader.join(30)
    with pytest.raises(EngineClosedError):
        list(running)
    assert len(failures) == 1


def test_a_failed_step_keeps_no_caches(fresh: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = ids(300)
    calls = 0
    model = fresh._runner.runtime.model

    class Failing:
        layers = model.layers

        def __call__(self, *args: object, **options: object) -> object:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise RuntimeError("no memory")
            return model(*args, **options)

    monkeypatch.setattr(fresh._runner, "_runtime", replace(fresh._runner.runtime, model=Failing()))
    with pytest.raises(DeviceError, match="no memory"):
        list(fresh.warm(prompt))
    monkeypatch.undo()
    assert finish(fresh.generate(prompt, GREEDY)).metrics.cached_tokens == 0


@pytest.mark.parametrize("prompt", ["hello", [{"role": "user"}], [10, "x"], [1.5]])
def test_prompts_of_other_kinds_are_refused(engine: Engine, prompt: object) -> None:
    with pytest.raises(OptionError):
        list(engine.generate(prompt))  # type: ignore[arg-type]


def test_numpy_ids_are_ids(engine: Engine) -> None:
    assert finish(engine.generate(np.array([10, 11, 12]), GREEDY)).metrics.prompt_tokens == 3  # type: ignore[arg-type]


def test_an_edit_during_a_reply_leaves_the_reply_out(fresh: Engine) -> None:
    chat = fresh.chat()
    reply = chat.send("one", GREEDY)
    next(reply)
    chat.edit(0, "two")
    list(reply)
    assert [message.content for message in chat.messages] == ["two"]


def test_a_question_that_was_never_answered_does_not_block_the_next(fresh: Engine) -> None:
    chat = fresh.chat()
    reply = chat.send("one", GREEDY)
    next(reply)
    reply.close()
    finish(chat.send("two", GREEDY))
    assert chat.messages[0].content == "two"


def test_an_interrupted_load_ends_cleanly(tiny: Path) -> None:
    code = f"""
import atexit
from tokamac.engine import Engine
def stop(at):
    raise KeyboardInterrupt
try:
    Engine.load({str(tiny)!r}, progress=stop)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "interrupted")
