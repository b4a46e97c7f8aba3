"""The engine as a program calls it, on a tiny model: reuse, cancelling, seeds, threads, limits, closing, adapters."""

import gc
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx import nn
from mlx.utils import tree_map

from tests.engine.helpers import ALPHA, RANK, as_mlx, finish, shapes_of, write_fused, write_model, write_peft
from tests.engine.inside import replies_of, runner_of, runtime_of
from tests.waiting import PATIENCE_S
from tokamac.engine import (
    ContextError,
    DeviceError,
    Engine,
    EngineClosedError,
    Finished,
    KVSpec,
    LoopFound,
    Message,
    OptionError,
    PrefillProgress,
    PromptCacheSpec,
    Sampling,
    TextChunk,
)
from tokamac.engine.errors import (
    MemoryLimitError,
    ModelDamagedError,
    ModelError,
    ModelNotFoundError,
    ModelUnsupportedError,
)
from tokamac.engine.model.adapters import attach, changes_of, read_adapter
from tokamac.engine.reply import room_of_reply
from tokamac.engine.text.stream import ENOUGH_TOKENS

GREEDY = Sampling(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with Engine.load(tiny) as loaded:
        yield loaded


@pytest.fixture
def fresh(tiny: Path) -> Iterator[Engine]:
    with Engine.load(tiny) as loaded:
        yield loaded


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(7, 262, count).tolist()


STUCK = Sampling(temperature=0, logit_bias={65: 100}, max_tokens=ENOUGH_TOKENS + 60)  # type: ignore[arg-type]


def test_a_reply_that_repeats_itself_ends_unless_it_is_let_go_on(tiny: Path) -> None:
    with Engine.load(tiny, kv=KVSpec(window=64), prompt_cache=None) as engine:

        def ended(sampling: Sampling, *, keeps_going: bool = False) -> tuple[str, str | None, int, int]:
            reply = engine.generate(ids(5), sampling)
            if keeps_going:
                reply.keep_going()
            events = list(reply)
            end = finish(iter(events))
            told = sum(isinstance(each, LoopFound) for each in events)
            return end.reason, end.cut_by, end.metrics.generated_tokens, told

        whole = ("length", "max_tokens", ENOUGH_TOKENS + 60)
        assert ended(STUCK) == ("loop", None, ENOUGH_TOKENS, 0)
        assert ended(replace(STUCK, loop_check=False)) == (*whole, 0)
        assert ended(replace(STUCK, loop_grace=20)) == ("loop", None, ENOUGH_TOKENS + 20, 1)
        assert ended(replace(STUCK, loop_grace=20), keeps_going=True) == (*whole, 1)


def test_a_reply_leaves_room_for_the_next_turn_where_nobody_says_how_long_it_may_be(engine: Engine) -> None:
    for prompt in (5, 300, 511):
        end = finish(engine.generate(ids(prompt), replace(STUCK, max_tokens=None)))
        assert (end.reason, end.cut_by) == ("length", "context")
        assert end.metrics.generated_tokens == room_of_reply(512 - prompt, 512)
    asked = finish(engine.generate(ids(500), replace(STUCK, max_tokens=400)))
    assert (asked.cut_by, asked.metrics.generated_tokens) == ("context", 12)  # all that there is


@given(st.integers(2, 10**6).flatmap(lambda context: st.tuples(st.just(context), st.integers(1, context - 1))))
def test_the_room_that_is_kept_is_an_eighth_of_the_context_within_bounds(drawn: tuple[int, int]) -> None:
    context, prompt = drawn
    room = context - prompt
    left = room - (reply := room_of_reply(room, context))
    assert 1 <= reply <= room
    kept = min(max(512, context // 8), 4096, context // 2)
    assert left == min(kept, room // 2)


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
    assert 0 < metrics.ttft_s < metrics.total_s
    assert metrics.kv_bytes
    assert metrics.weight_bytes_per_token
    assert metrics.ceiling_tps is None or metrics.decode_tps is None or metrics.decode_tps < metrics.ceiling_tps


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


def test_a_prompt_longer_than_the_context_is_refused_with_numbers(engine: Engine) -> None:
    with pytest.raises(ContextError, match=r"600 tokens.*512"):
        list(engine.generate(ids(600)))


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
    assert live.metrics.ttft_s is not None
    assert live.context_tokens > 10
    events.close()


def test_each_of_several_replies_is_measured_by_itself_while_it_runs(fresh: Engine) -> None:
    replies = [fresh.generate(ids(length), Sampling(temperature=0, max_tokens=300)) for length in (10, 60)]
    assert [reply.live() for reply in replies] == [None, None]
    for reply in replies:
        next(event for event in reply if isinstance(event, TextChunk))
    prompts = [live.metrics.prompt_tokens for reply in replies if (live := reply.live()) is not None]
    assert prompts == [10, 60]
    replies[0].close()
    assert replies[0].live() is None
    replies[1].cancel()
    assert finish(replies[1]).reason == "cancelled"
    assert replies[1].live() is None


def test_limits_and_memory(engine: Engine) -> None:
    near, far = engine.limits(16), engine.limits(400)
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
            assert runner_of(engine).prompting().pinned([Message("user", "u")]) == 4
    assert prompting[0] == prompting[1]


def test_a_closed_engine_says_so_and_closes_again(tiny: Path) -> None:
    engine = Engine.load(tiny)
    engine.close()
    engine.close()
    with pytest.raises(EngineClosedError, match="closed"):
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


def test_a_packed_model_stays_packed_and_says_what_mlx_says(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "packed", bits=4)
    with Engine.load(folder, cpu_exact=True) as engine:
        ours = np.asarray(engine.logprobs(ids(30)))
        assert 5 < engine.spec.bits_per_weight < 8  # float32 scales at group 32: 6 bits
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    logits = model(mx.array([ids(30)]))[0].astype(mx.float32)
    theirs = np.asarray(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    assert np.abs(ours - theirs).max() < 1e-3


def test_cancel_reaches_replies_that_wait(fresh: Engine) -> None:
    reasons: dict[int, str] = {}

    def ask(number: int) -> None:
        reasons[number] = finish(fresh.generate(ids(20, number), Sampling(temperature=0, max_tokens=450))).reason

    threads = [threading.Thread(target=ask, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    while len(replies_of(fresh).open) < 2:
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
    while len(replies_of(engine).open) < 2:
        time.sleep(0.001)
    engine.close()
    reader.join(30)
    with pytest.raises(EngineClosedError):
        list(running)
    assert len(failures) == 1


def test_a_failed_step_keeps_no_caches(fresh: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = ids(300)
    calls = 0
    model = runtime_of(fresh).model

    class Failing:
        layers = model.layers

        def __call__(self, *args: object, **options: object) -> object:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise RuntimeError("no memory")
            return model(*args, **options)

    monkeypatch.setattr(runner_of(fresh), "_runtime", replace(runtime_of(fresh), model=Failing()))
    with pytest.raises(DeviceError, match="no memory"):
        list(fresh.warm(prompt))
    monkeypatch.undo()
    assert finish(fresh.generate(prompt, GREEDY)).metrics.cached_tokens == 0


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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "interrupted")


# Adapters: the same log-probabilities as weights that were changed by hand, over floats and over packed weights; or
# a refusal.

IDS = [5, 60, 7, 120, 9, 33, 250, 8, 41, 77]
LAYER = "model.layers.1.self_attn.q_proj"


def logprobs(folder: Path, adapter: Path | None = None) -> np.ndarray[Any, Any]:
    with Engine.load(folder, prompt_cache=None, adapter=adapter) as engine:
        return np.array(engine.logprobs(IDS))


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("form", ["PEFT", "mlx-lm"])
def test_an_adapter_computes_what_changed_weights_compute(tmp_path: Path, tiny: Path, form: str, dora: bool) -> None:
    peft = write_peft(tmp_path / "peft", tiny, dora=dora)
    adapter = peft if form == "PEFT" else as_mlx(tmp_path / "mlx", peft)
    expected = logprobs(write_fused(tmp_path / "fused", tiny, peft))
    assert np.abs(expected - logprobs(tiny)).max() > 0.1
    assert np.allclose(logprobs(tiny, adapter), expected, atol=2e-4)


def test_the_tied_embedding_and_all_linear_layers_take_an_adapter(tmp_path: Path, tiny: Path) -> None:
    paths = tuple(name for name, shape in shapes_of(tiny).items() if len(shape) == 2)
    assert "model.embed_tokens" in paths
    peft = write_peft(tmp_path / "peft", tiny, paths=paths, lora_alpha=ALPHA)
    assert np.allclose(logprobs(tiny, peft), logprobs(write_fused(tmp_path / "fused", tiny, peft)), atol=2e-4)


def test_ranks_alphas_and_the_root_of_the_rank_are_as_the_config_says(tmp_path: Path, tiny: Path) -> None:
    patterns = {"q_proj": 3.0, r"model\.layers\.\d+\.mlp\.down_proj": 12}
    peft = write_peft(tmp_path / "peft", tiny, use_rslora=True, alpha_pattern=patterns)
    root = math.sqrt(RANK)
    scales = {"q_proj": 3.0 / root, "down_proj": 12 / root, "v_proj": ALPHA / root}
    expected = logprobs(write_fused(tmp_path / "fused", tiny, peft, scales))
    assert np.allclose(logprobs(tiny, peft), expected, atol=2e-4)


def test_a_rank_of_its_own_is_read_from_the_pattern(tmp_path: Path, tiny: Path) -> None:
    peft = write_peft(
        tmp_path / "peft", tiny, paths=(LAYER,), rank=2, r=16, rank_pattern={"layers.1.self_attn.q_proj": 2}
    )
    expected = logprobs(write_fused(tmp_path / "fused", tiny, peft, {"q_proj": ALPHA / 2}))
    assert np.allclose(logprobs(tiny, peft), expected, atol=2e-4)


@pytest.mark.parametrize("dora", [False, True])
def test_packed_weights_stay_packed_and_take_the_change_beside_them(tmp_path: Path, dora: bool) -> None:
    packed = write_model(tmp_path / "packed", bits=4)
    plain = write_model(tmp_path / "plain")
    peft = write_peft(tmp_path / "peft", plain, dora=dora)
    unpacked = _unpacked(tmp_path / "unpacked", packed, plain)
    with Engine.load(packed, prompt_cache=None, adapter=peft, cpu_exact=True) as engine:
        module = engine.between(lambda: runtime_of(engine).model)
        assert any(isinstance(each, nn.QuantizedLinear) for each in module.modules())
        found = np.array(engine.logprobs(IDS))
    assert np.allclose(found, logprobs(write_fused(tmp_path / "fused", unpacked, peft)), atol=3e-4)


def _unpacked(folder: Path, packed: Path, plain: Path) -> Path:
    """The packed model's values as a model in floats."""
    folder.mkdir()
    for file in plain.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    arrays = mx.load(str(packed / "model.safetensors"))
    values = {}
    for name, array in arrays.items():
        stem = name.removesuffix(".weight")
        if f"{stem}.scales" in arrays and name.endswith(".weight"):
            values[name] = mx.dequantize(
                array, arrays[f"{stem}.scales"], arrays[f"{stem}.biases"], group_size=32, bits=4
            )
        elif not name.endswith((".scales", ".biases")):
            values[name] = array
    mx.save_safetensors(str(folder / "model.safetensors"), values, {"format": "mlx"})
    return folder


def test_changes_of_single_experts_become_one_of_their_stack(tmp_path: Path) -> None:
    from mlx_lm.models.mixtral import Model, ModelArgs

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 64,
    }
    heads = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = {"model_type": "mixtral", **sizes, **heads}
    mx.random.seed(1)
    model, by_hand = (Model(ModelArgs.from_dict(config)) for _ in range(2))
    by_hand.update(tree_map(lambda array: mx.array(np.array(array)), model.parameters()))
    random, tensors = np.random.default_rng(3), {}
    for expert, name, rows, columns in ((1, "w1", 48, 32), (3, "w1", 48, 32), (2, "w2", 32, 48)):
        stem = f"model.layers.0.block_sparse_moe.experts.{expert}.{name}"
        down, up = (random.standard_normal(shape).astype(np.float32) for shape in ((RANK, columns), (rows, RANK)))
        tensors |= {f"base_model.model.{stem}.lora_A.weight": down, f"base_model.model.{stem}.lora_B.weight": up}
        stack = by_hand.model.layers[0].block_sparse_moe.switch_mlp[{"w1": "gate_proj", "w2": "down_proj"}[name]]
        stack.weight[expert] += ALPHA / RANK * mx.array(up @ down)
    (tmp_path / "base").mkdir()
    mx.save_safetensors(str(tmp_path / "base" / "model.safetensors"), {"model.norm.weight": mx.ones(32)})
    adapter = read_adapter(write_peft(tmp_path / "peft", tmp_path / "base", more=tensors), "x")
    attach(model, changes_of(adapter, model, config))
    ids = mx.array([[1, 5, 9, 13, 40, 2]])
    assert np.allclose(np.array(model(ids)), np.array(by_hand(ids)), atol=1e-4)


def test_the_spec_names_the_adapter_and_its_bytes_are_counted(tmp_path: Path, tiny: Path) -> None:
    peft = write_peft(tmp_path / "peft", tiny)
    numbers = sum(
        RANK * sum(shapes_of(tiny)[path])
        for path in shapes_of(tiny)
        if path.endswith(("q_proj", "v_proj", "down_proj"))
    )
    with Engine.load(tiny, prompt_cache=None) as engine:
        bare = runtime_of(engine)
        assert engine.spec.adapter is None
        before, products, kernels = bare.work.weight_bytes(), bare.work.prefill_parameters, bare.work.launches
        weights = bare.shape.weights
    with Engine.load(tiny, prompt_cache=None, adapter=str(peft)) as engine:
        work = runtime_of(engine).work
        assert engine.spec.adapter == str(peft)
        assert engine.spec.adapter_digest == read_adapter(peft, "x").digest
        assert any(f"6 matrices of rank {RANK}, trained on org/base" in note for note in engine.spec.notes)
        assert work.weight_bytes() == before + 4 * numbers
        assert work.prefill_parameters == products + numbers
        assert work.launches == kernels + 6 * 4
        assert runtime_of(engine).shape.weights == weights + 4 * numbers


def test_every_byte_of_an_adapter_is_in_its_digest(tmp_path: Path, tiny: Path) -> None:
    digests = {read_adapter(write_peft(tmp_path / f"{seed}", tiny, seed=seed), "x").digest for seed in range(3)}
    digests.add(read_adapter(write_peft(tmp_path / "alpha", tiny, lora_alpha=7.0), "x").digest)
    assert len(digests) == 4


@pytest.mark.usefixtures("all_worth_storing")
def test_the_prompt_cache_never_serves_another_adapters_keys(tmp_path: Path, tiny: Path) -> None:
    ids = [3 + i * 7 % 250 for i in range(300)]
    one, other = (write_peft(tmp_path / name, tiny, seed=seed) for name, seed in (("one", 1), ("other", 2)))
    cache = PromptCacheSpec(folder=tmp_path / "cache")

    def ask(adapter: Path | None) -> tuple[int, str]:
        with Engine.load(tiny, prompt_cache=cache, adapter=adapter) as engine:
            *_, end = engine.generate(ids, Sampling(temperature=0, max_tokens=8))
        return end.metrics.cached_tokens, end.text

    cold = {adapter: ask(adapter) for adapter in (one, other, None)}
    assert [cached for cached, _ in cold.values()] == [0, 0, 0]
    assert len({text for _, text in cold.values()}) == 3
    for adapter, (_, text) in cold.items():
        cached, warm = ask(adapter)
        assert cached >= 256
        assert warm == text
    write_peft(one, tiny, seed=5)  # the same folder, trained on
    assert ask(one)[0] == 0


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"r": 8}, r"lora_A\.weight has shape .*the rank is 8"), ({"use_dora": True}, "says DoRA"),
        ({"peft_type": "LOHA"}, "LOHA"), ({"init_lora_weights": "pissa_niter_16"}, "pissa"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"), ({"alpha_pattern": {"(a+)+$": 2}}, "not tried"),
    ],
)  # fmt: skip
def test_a_config_of_another_is_refused(tmp_path: Path, tiny: Path, config: dict[str, Any], what: str) -> None:
    with pytest.raises(ModelUnsupportedError, match=what):
        Engine.load(tiny, prompt_cache=None, adapter=write_peft(tmp_path / "peft", tiny, **config))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (
            "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight",
            "lora_B of model.layers.7.self_attn.q_proj is missing",
        ),
        ("base_model.model.lm_head.weight", "lm_head.weight is not a low-rank matrix"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias", "lora_B.bias is not a low-rank matrix"),
    ],
)
def test_a_tensor_without_a_place_is_refused_by_name(tmp_path: Path, tiny: Path, name: str, what: str) -> None:
    more = {name: np.zeros((RANK, 64), np.float32)}
    with pytest.raises(ModelUnsupportedError, match=what):
        Engine.load(tiny, prompt_cache=None, adapter=write_peft(tmp_path / "peft", tiny, more=more))


def test_matrices_of_a_layer_that_is_not_there_are_refused_by_name(tmp_path: Path, tiny: Path) -> None:
    deeper = write_model(tmp_path / "deeper", num_hidden_layers=3)
    with pytest.raises(ModelUnsupportedError, match=r"the model has no model\.layers\.2\."):
        Engine.load(tiny, prompt_cache=None, adapter=write_peft(tmp_path / "peft", deeper))


def test_matrices_of_another_size_are_refused_in_one_line(tmp_path: Path, tiny: Path) -> None:
    wider = write_model(tmp_path / "wider", hidden_size=96)
    with pytest.raises(ModelUnsupportedError, match=r"96 by 128 where .*down_proj has 64 by 128") as caught:
        Engine.load(tiny, prompt_cache=None, adapter=write_peft(tmp_path / "peft", wider))
    assert "\n" not in caught.value.one_line()


def test_pickles_damage_and_absence_are_errors(tmp_path: Path, tiny: Path) -> None:
    folder = tmp_path / "adapter"
    with pytest.raises(ModelNotFoundError):
        Engine.load(tiny, prompt_cache=None, adapter=folder)
    folder.mkdir()
    with pytest.raises(ModelNotFoundError, match="holds no adapter"):
        Engine.load(tiny, prompt_cache=None, adapter=folder)
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelUnsupportedError, match="run code"):
        Engine.load(tiny, prompt_cache=None, adapter=folder)
    write_peft(folder, tiny)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(ModelDamagedError, match="instead of"):
        Engine.load(tiny, prompt_cache=None, adapter=folder)
    write_peft(folder, tiny)
    (folder / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match="not JSON"):
        Engine.load(tiny, prompt_cache=None, adapter=folder)
    with pytest.raises(OptionError, match="names no adapter"):
        Engine.load(tiny, adapter=3)  # type: ignore[arg-type]


def test_numbers_that_are_none_are_refused(tmp_path: Path, tiny: Path) -> None:
    bad = {
        f"base_model.model.{LAYER.replace('q_proj', 'k_proj')}.lora_A.weight": np.full((RANK, 64), np.nan, np.float32),
        f"base_model.model.{LAYER.replace('q_proj', 'k_proj')}.lora_B.weight": np.zeros((64, RANK), np.float32),
    }
    with pytest.raises(ModelDamagedError, match="k_proj"):
        Engine.load(tiny, prompt_cache=None, adapter=write_peft(tmp_path / "peft", tiny, more=bad))


def test_a_whole_fine_tune_of_mlx_lm_is_no_adapter(tmp_path: Path, tiny: Path) -> None:
    folder = as_mlx(tmp_path / "mlx", write_peft(tmp_path / "peft", tiny))
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "fine_tune_type": "full"}))
    with pytest.raises(ModelUnsupportedError, match="full"):
        Engine.load(tiny, prompt_cache=None, adapter=folder)


def test_an_adapter_that_does_not_fit_beside_the_model_is_refused_before_a_weight_is_read(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokamac.engine.device import device_kind
    from tokamac.engine.options import KVSpec as Spec
    from tokamac.engine.perf import memory
    from tokamac.engine.perf.footprint import check_fits

    large = write_peft(tmp_path / "peft", tiny, rank=4000)
    more = 4 * read_adapter(large, "x").parameters
    room = 4 * 200_000 + (8 << 20)
    monkeypatch.setattr(memory, "held", lambda: 0)  # by tests before this one
    monkeypatch.setattr(memory, "system_limit", lambda: memory.Limit(room, "machine"))
    check_fits(tiny, Spec(), device_kind())
    assert more > room
    with pytest.raises(MemoryLimitError):
        check_fits(tiny, Spec(), device_kind(), more=more)
    with pytest.raises(MemoryLimitError):
        Engine.load(tiny, prompt_cache=None, adapter=large)
