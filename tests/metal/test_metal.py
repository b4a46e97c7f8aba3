"""Metal's paths on the CPU device: memory and its limits, fused kernels, whole replies, conversion, and the wheel."""

import gc
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from tests.app.commands.conftest import Run, tokamac  # noqa: F401
from tests.engine.helpers import write_model
from tests.engine.inside import runtime_of, store_of
from tests.families import crossed
from tests.mac import CAPTURES, GIB, MetalDevice, RecordedMac, as_captured
from tokamac.engine import Engine, Finished, KVSpec, LoadProgress, MemoryLimitError, MemoryPressure, Message, Sampling
from tokamac.engine.errors import ModelDamagedError
from tokamac.engine.events import PrefillProgress
from tokamac.engine.generation import Generation
from tokamac.engine.options import PromptCacheSpec
from tokamac.engine.perf import hardware, memory
from tokamac.engine.perf.catalogue import find
from tokamac.engine.perf.footprint import check_fits, module_of
from tokamac.engine.perf.hardware import EVERY_S
from tokamac.engine.perf.peak_memory import predict_peak
from tokamac.engine.perf.roofline import HostLimited
from tokamac.engine.perf.what_if import Suggestion, WhatIfCase, here, suggestion
from tokamac.engine.sampling import Sampler
from tokamac.engine.schedule.decoding import NO_NUMBER, Decoder, Lane
from tokamac.quant import convert
from tokamac.quant.search import implementation

# Memory on a Mac: what macOS recommends is the limit, what others must give way for is told, and a loaded model
# always answers.

EIGHTS = ("Meta-Llama-3.1-8B-Instruct-4bit", "Qwen3-8B-4bit")
PAGE = 16384
GREEDY = Sampling(temperature=0, max_tokens=4)
PROMPT = [5 + i * i % 250 for i in range(300)]


@pytest.fixture
def held(settled_memory: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What other tests of this process hold does not count as this Mac's; it holds ``ours``, or what it does."""
    before, told = memory.held(), {"ours": 0}

    def held() -> int:
        return told["ours"] or max(0, mx.get_active_memory() + mx.get_cache_memory() - before)

    monkeypatch.setattr(memory, "held", held)
    return told


def suggested(name: str, tokens: int = 4096) -> Suggestion:
    """Return a model of the catalogue on this Mac."""
    entry = find(name)
    repository = entry.repository(name)
    assert repository is not None
    return suggestion(entry, repository, WhatIfCase(context=tokens, prompt=tokens), here())


def write_headers(folder: Path, name: str) -> Path:
    """Write a model of the catalogue whose file has every header and holds no weight: gigabytes that take no disk."""
    entry = find(name)
    repository = entry.repository(name)
    config = entry.config_of(repository)
    assert config is not None
    packing = repository.packing
    packed = {"group_size": packing.group_size, "bits": packing.bits}
    (folder / "config.json").write_text(json.dumps({**config, "quantization": packed}))
    header: dict[str, Any] = {}
    end = 0
    kinds = {mx.bfloat16: "BF16", mx.float16: "F16", mx.float32: "F32", mx.uint32: "U32"}
    for path, array in tree_flatten(module_of(config, packing=packing).parameters()):
        header[path] = {
            "dtype": kinds[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("gib", CAPTURES)
@pytest.mark.parametrize("name", EIGHTS)
def test_a_mac_in_use_takes_8b(mac: RecordedMac, metal: MetalDevice, tmp_path: Path, gib: int, name: str) -> None:
    as_captured(mac, metal, gib)
    folder = write_headers(tmp_path, name)
    for level in (1, 2, 4):
        mac.sysctl[memory.PRESSURE] = level
        check_fits(folder, KVSpec(), "metal")
        found = suggested(name)
        assert found.outcome.memory.fits
        assert found.verdict == ("runs well" if gib == 48 and level < 4 else "tight")


@pytest.mark.usefixtures("held")
def test_a_refusal_names_what_moves_the_limit(mac: RecordedMac, metal: MetalDevice, tmp_path: Path) -> None:
    as_captured(mac, metal, 8)
    with pytest.raises(MemoryLimitError) as refused:
        check_fits(write_headers(tmp_path, "Qwen3-14B-4bit"), KVSpec(), "metal")
    assert "sudo sysctl iogpu.wired_limit_mb=MB" in refused.value.hint
    assert "close other programs" not in refused.value.hint


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize(("gib", "said"), [(8, 3.6), (16, 2.5), (24, 3.8), (48, 0)])
def test_what_others_give_way_for_is_told(
    mac: RecordedMac, metal: MetalDevice, tmp_path: Path, gib: int, said: float
) -> None:
    as_captured(mac, metal, gib)
    notes = check_fits(write_headers(tmp_path, "Meta-Llama-3.1-8B-Instruct-4bit"), KVSpec(), "metal")
    amount = f"to make room for this model, macOS would have to compress about {said} GB of other programs"
    assert notes == ((amount,) if said else ())


@pytest.mark.usefixtures("held")
def test_what_is_free_changes_a_word_of_the_list(mac: RecordedMac, metal: MetalDevice) -> None:
    names = (*EIGHTS, "Qwen3-0.6B-4bit", "Qwen3-14B-4bit")
    as_captured(mac, metal, 24)
    busy = [*map(suggested, names)]
    pages = CAPTURES[24]
    mac.counted = hardware.Pages(PAGE, pages.free + pages.active, 0, 0, pages.wired, 0, 0, 0, 0, 0)
    quiet = [*map(suggested, names)]
    words = {each.id: (each.verdict, found.verdict) for each, found in zip(busy, quiet, strict=True)}
    assert words["mlx-community/Qwen3-8B-4bit"] == ("tight", "runs well")
    assert {pair for pair in words.values() if pair[0] != pair[1]} <= {("tight", "runs well")}
    (told,) = [each.reason for each in busy if each.id.endswith("Qwen3-8B-4bit")]
    assert "macOS would have to compress about " in told


@pytest.mark.usefixtures("held")
def test_the_limit_is_what_macos_recommends(mac: RecordedMac, metal: MetalDevice) -> None:
    for level in (1, 2, 4):
        mac.sysctl[memory.PRESSURE] = level
        assert memory.system_limit() == memory.Limit(int(11.84e9), "recommended")
    metal.info["max_recommended_working_set_size"] = 15 * GIB  # as iogpu.wired_limit_mb has it
    left = 16 * GIB - CAPTURES[16].wired * PAGE
    assert memory.system_limit() == memory.Limit(left, "wired elsewhere")


def test_our_own_wired_arrays_are_not_held_against_us(mac: RecordedMac, held: dict[str, int]) -> None:
    before = CAPTURES[16]
    ours = 8 * GIB
    wired = hardware.Pages(PAGE, 0, 0, 0, before.wired + ours // PAGE, 0, 0, 0, 0, 0)
    mac.counted = wired
    assert memory.array_budget() == 16 * GIB - wired.wired * PAGE
    held["ours"] = ours
    assert memory.array_budget() == int(11.84e9)


def test_what_is_allocated_is_never_above_the_limit(mac: RecordedMac, held: dict[str, int]) -> None:
    mac.counted = hardware.Pages(PAGE, 0, 0, 0, 16 * GIB // PAGE, 0, 0, 0, 0, 0)  # others wired all there is
    held["ours"] = 5 * GIB
    assert memory.array_budget() == 5 * GIB + memory.ALLOWANCE


@pytest.mark.usefixtures("held")
def test_files_and_purgeable_pages_are_available_until_pressure_is_critical(mac: RecordedMac) -> None:
    pages = CAPTURES[16]
    assert memory.available() == (pages.free - pages.speculative + pages.file_backed + pages.purgeable) * PAGE
    mac.sysctl[memory.PRESSURE] = 4
    assert memory.available() == pages.free * PAGE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose keys and values weigh more than its temporaries: 16 kB a token."""
    shape = {"num_hidden_layers": 8, "num_key_value_heads": 4, "head_dim": 64}
    return write_model(tmp_path_factory.mktemp("metal"), max_position_embeddings=2048, **shape)


def events(engine: Engine, prompt: list[int]) -> tuple[list[MemoryPressure], Finished]:
    """Return what was said of memory, and the end."""
    found = list(engine.generate(prompt, GREEDY))
    assert isinstance(found[-1], Finished)
    return [each for each in found if isinstance(each, MemoryPressure)], found[-1]


@pytest.mark.usefixtures("held")
def test_a_loaded_model_answers_at_critical_pressure(folder: Path, mac: RecordedMac) -> None:
    other = [260 - token for token in PROMPT]
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        mac.sysctl[memory.PRESSURE] = 2
        assert not events(engine, other)[0]
        quiet, plain = events(engine, PROMPT)
        assert not quiet
        events(engine, other)
        kept = store_of(engine).aside
        assert kept > 0
        mac.sysctl[memory.PRESSURE] = 4
        mac.counted = hardware.Pages(PAGE, 0, 0, 0, 16 * GIB // PAGE, 0, 0, 0, 0, 0)
        longer = [9 + i * i % 240 for i in range(1900)]  # nothing of it is known
        (told,), answered = events(engine, longer)
        assert told.critical
        assert told.chunk == 32
        assert told.cache_bytes > 0
        assert answered.text
        mac.sysctl[memory.PRESSURE] = 1
        assert events(engine, PROMPT)[1].text == plain.text


@pytest.mark.usefixtures("held")
def test_a_limit_that_is_set_holds_below_and_above_the_recommended_one(folder: Path, metal: MetalDevice) -> None:
    metal.info["max_recommended_working_set_size"] = 1 * GIB
    with Engine.load(folder, prompt_cache=None, memory=3 * GIB) as engine:
        found = engine.memory()
        assert (found.budget, found.budget_source) == (3 * GIB, "asked")
        assert metal.wired[-1] <= 1 * GIB
    with pytest.raises(MemoryLimitError, match=r"100 kB may be used") as told:
        Engine.load(folder, memory=100_000)
    assert "--memory " in told.value.hint
    needed = float(told.value.hint.split("--memory ")[1].split()[0])
    with Engine.load(folder, prompt_cache=None, memory=round(needed * 1e9)) as engine:
        assert engine.memory().budget == round(needed * 1e9)


@pytest.mark.usefixtures("held")
def test_the_prompt_cache_follows_the_limit(folder: Path, metal: MetalDevice) -> None:
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        budget = store_of(engine)._budget  # type: ignore[attr-defined]
        assert budget() == int(11.84e9) // 10
        metal.info["max_recommended_working_set_size"] = 8 * GIB
        assert budget() == 8 * GIB // 10


@pytest.mark.usefixtures("held")
def test_a_prompt_others_give_way_for_is_told(folder: Path, mac: RecordedMac, monkeypatch: pytest.MonkeyPatch) -> None:
    mac.counted = hardware.Pages(PAGE, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    monkeypatch.setattr(memory, "WORTH_SAYING", 1 << 20)
    with Engine.load(folder, prompt_cache=None) as engine:
        (note,) = engine.spec.memory_notes
        assert note.startswith("to make room for this model, macOS would have to compress about ")
        (told,), answered = events(engine, PROMPT)
        assert told.from_others >= 1 << 20
        assert (told.chunk, told.critical) == (None, False)
        assert answered.text


@pytest.mark.usefixtures("held")
def test_nothing_that_reads_memory_starts_a_process(folder: Path, mac: RecordedMac, metal: MetalDevice) -> None:
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        started, asked = len(metal.processes), mac.asked["output"]
        for level in (1, 2, 4):
            mac.sysctl[memory.PRESSURE] = level
            for event in engine.generate(PROMPT, GREEDY):
                engine.live()
                assert event
            engine.memory()
        assert (len(metal.processes), mac.asked["output"]) == (started, asked)
    assert metal.processes == []
    with Engine.load(folder, prompt_cache=None):
        assert metal.processes == []  # the chip's cores were counted once, through the seam


# Where memory is short, prefill on Metal asks for the fused kernels that MLX leaves aside, and nothing else does.

FUSED_PROMPT = [5 + i * i % 250 for i in range(900)]


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Return, for each attention call, its queries and whether a fused kernel was asked for. Here there is none to run."""
    calls: list[tuple[int, bool]] = []
    attend: Any = mx.fast.scaled_dot_product_attention

    def record(queries: mx.array, *arrays: mx.array, force_fused: bool = False, **options: Any) -> mx.array:
        calls.append((queries.shape[2], force_fused))
        out: mx.array = attend(queries, *arrays, **options)
        return out

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", record)
    return calls


@pytest.mark.usefixtures("settled_memory")
def test_where_the_gpu_can_not_run_the_kernel_smaller_pieces_do(tmp_path, monkeypatch):
    attend: Any = mx.fast.scaled_dot_product_attention
    forced = 0

    def refuse(*arrays: mx.array, force_fused: bool = False, **options: Any) -> mx.array:
        nonlocal forced
        forced += force_fused
        if force_fused:
            raise RuntimeError("Maximum threads per threadgroup is 96 but requested 128 for kernel steel_attention")
        out: mx.array = attend(*arrays, **options)
        return out

    folder = write_model(tmp_path, head_dim=256, num_attention_heads=8, max_position_embeddings=2048)
    others = mx.get_active_memory()
    with Engine.load(folder, prompt_cache=None) as engine:
        sampling = Sampling(temperature=0, max_tokens=3)
        *_, plain = engine.generate(FUSED_PROMPT, sampling)
        shape = runtime_of(engine).shape
        peaks = [
            predict_peak(shape, held=0, new=len(FUSED_PROMPT) - 1, chunk=chunk, reply=1).total for chunk in (512, 256)
        ]
        monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", refuse)
        monkeypatch.setattr(memory, "array_budget", lambda: others + sum(peaks) // 2)
        *events, last = engine.generate(FUSED_PROMPT, sampling)
    assert forced == 1
    told = [event for event in events if isinstance(event, MemoryPressure)]
    assert [each.fused_bytes > 0 for each in told] == [True, False]
    assert told[1].failed
    assert last.text == plain.text


@pytest.mark.parametrize(("head_dim", "forces"), [(256, True), (112, False)])
@pytest.mark.usefixtures("settled_memory")
def test_fused_attention_is_asked_for_where_there_is_a_kernel(tmp_path, monkeypatch, forced, head_dim, forces):
    folder = write_model(tmp_path, head_dim=head_dim, num_attention_heads=8, max_position_embeddings=2048)
    others = mx.get_active_memory()
    with Engine.load(folder, prompt_cache=None) as engine:
        shape = runtime_of(engine).shape
        peaks = [
            predict_peak(each, held=0, new=len(FUSED_PROMPT) - 1, chunk=512, reply=1).total
            for each in (shape, replace(shape, force_fused=True))
        ]
        assert (peaks[1] < peaks[0]) == forces
        monkeypatch.setattr(memory, "array_budget", lambda: others + (sum(peaks) // 2 if forces else peaks[0] - 1))
        mx.clear_cache()
        forced.clear()
        *events, last = engine.generate(FUSED_PROMPT, Sampling(temperature=0, max_tokens=3))
    assert isinstance(last, Finished)
    (told,) = [event for event in events if isinstance(event, MemoryPressure)]
    assert (told.fused_bytes > 0) == forces
    assert (told.chunk is None) == forces
    assert {force for queries, force in forced if queries > 1} == {forces}
    assert {force for queries, force in forced if queries == 1} == {False}


# Whole replies on Metal's paths: keys and values packed or not, chunks, sampling, and what is left when a model
# goes.

REPLIES_PROMPT = [5 + i * i % 250 for i in range(1300)]
CONTEXT = {"max_position_embeddings": 4096}
SPECS = (KVSpec(), KVSpec(8, 4, 32), KVSpec(4, 4, 32), KVSpec(8, 8, 32, window=256))
MOST_ROWS = 3  # of a product with packed values, above which Metal takes one threadgroup for all tokens


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each product of weights with packed values."""
    seen: list[int] = []
    multiply = mx.quantized_matmul

    def recorded(x: mx.array, *words: Any, transpose: bool = True, **how: Any) -> mx.array:
        if not transpose:
            seen.append(x.shape[-2])
        return multiply(x, *words, transpose=transpose, **how)

    monkeypatch.setattr(mx, "quantized_matmul", recorded)
    return seen


@pytest.mark.parametrize(("kv", "heads"), crossed(SPECS, [4, 10]), ids=str)
def test_a_reply_is_the_same_whatever_its_prompt_was_cut_into(tmp_path, rows, kv, heads):
    model = write_model(tmp_path, num_attention_heads=heads, num_key_value_heads=2, hidden_size=heads * 32, **CONTEXT)
    how = Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=7, max_tokens=12)
    with Engine.load(model, kv=kv, prompt_cache=None, dtype="float32") as engine:
        texts = []
        for _ in range(2):
            *events, last = engine.generate(REPLIES_PROMPT, how)
            texts.append(last.text)
        done, chunk = (
            [event.done for event in events if isinstance(event, PrefillProgress)],
            runtime_of(engine).prefill_chunk,
        )
        assert chunk >= 512
        assert done == [*range(0, len(REPLIES_PROMPT) - 1, chunk), len(REPLIES_PROMPT) - 1]
    assert texts[0] == texts[1]
    assert max(rows, default=0) <= MOST_ROWS
    assert bool(rows) == (kv.value_bits < 16)


def test_a_model_that_goes_gives_all_back(tmp_path, mac: RecordedMac, metal: MetalDevice, settled_memory: None):
    folder = write_model(tmp_path)
    gc.collect()  # what wrote it refers to itself
    before = mx.get_active_memory()
    engine = Engine.load(folder, prompt_cache=None)
    list(engine.generate(REPLIES_PROMPT[:100], Sampling(max_tokens=4)))
    assert mx.get_active_memory() > before
    assert metal.wired[-1] > 0
    ends_s = engine.run(lambda runner: runner.wiring.idle())  # type: ignore[attr-defined]
    assert 0 < ends_s <= 60
    mac.sysctl[memory.PRESSURE] = memory.CRITICAL
    assert engine.run(lambda runner: runner.wiring.idle()) is None  # type: ignore[attr-defined]
    assert metal.wired[-1] == 0
    engine.close()
    assert metal.wired[-1] == 0
    assert mx.get_active_memory() <= before + 4096  # random's own state
    assert mx.get_cache_memory() <= 4096


def test_a_mac_that_went_down_with_a_model_loaded_is_told_once(tmp_path: Path, mac: RecordedMac) -> None:
    folder, file, notes = write_model(tmp_path), hardware.store_file("loaded.json"), []
    for boot in ("one", "one", "two", "two"):
        mac.sysctl[memory.BOOT] = boot
        with Engine.load(folder, prompt_cache=None) as engine:
            notes.append([note for note in engine.spec.memory_notes if f"went down while {folder} was" in note])
            left = file.read_bytes()
        assert not file.exists()
        file.write_bytes(left)  # as after a kill, or a panic
    file.unlink()
    assert [len(each) for each in notes] == [0, 0, 1, 0]


# The embedded model from end to end on Metal's paths.


def reply(engine: Engine, text: str) -> Finished:
    last = list(engine.generate([Message("user", text)], Sampling(temperature=0, max_tokens=40)))[-1]
    assert isinstance(last, Finished)
    return last


def test_the_guide_answers_and_no_process_is_started_in_a_reply(metal, mac):
    with Engine.load("guide") as engine:
        assert engine.spec.device == "metal"
        assert max(metal.wired) > engine.spec.weight_bytes
        started = len(metal.processes)
        mac.asked.clear()
        last = reply(engine, "Why is decode memory-bound?")
        assert "memory" in last.text
        assert last.metrics.ceiling_tps is None  # its 4 MB stay in the caches of an M4
        assert mac.asked["output"] == 0
        assert metal.processes[started:] == []
    assert metal.wired[-1] == 0


def test_what_macos_slows_the_chip_down_for_is_in_the_diagnosis(mac, folder: Path):
    with Engine.load(folder) as engine:
        assert reply(engine, "What is the ceiling?").diagnosis.throttles == ()
        mac.asked.clear()
        mac.states[hardware.THERMAL_PRESSURE] = 2
        mac.low_power_mode = True
        last = reply(engine, "What is prefill?")
        assert last.diagnosis.throttles == ("thermal", "low power")
        assert mac.asked["low_power"] == mac.asked["notified"] <= 2 + last.metrics.total_s / EVERY_S
        assert all("thermal" in outlier.causes and "low power" not in outlier.causes for outlier in last.outliers)


# The first steps after loading, outside of any reply: they are taken, and leave no trace.

SEEDED = Sampling(temperature=1, seed=5, max_tokens=12)
WARM_UP_PROMPT = [3 + i % 90 for i in range(60)]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What was computed: of each call, its kind and how many tokens were held before."""
    seen: list[tuple[str, int]] = []
    prefill, launch, launch_alone = Generation.prefill, Decoder._launch, Decoder._launch_alone

    def read(run: Generation, ids: list[int], chunk: int):  # type: ignore[no-untyped-def]
        seen.append(("prefill", len(run.cached_ids)))
        return prefill(run, ids, chunk)

    def decode(decoder: Decoder, lanes: list[Lane]) -> None:
        seen.extend(("step", len(lane.cached_ids)) for lane in lanes)
        launch(decoder, lanes)

    def decode_alone(decoder: Decoder, lane: Lane) -> None:
        seen.append(("step", len(lane.cached_ids)))
        launch_alone(decoder, lane)

    monkeypatch.setattr(Generation, "prefill", read)
    for name, launched in (("_launch", decode), ("_launch_alone", decode_alone)):
        monkeypatch.setattr(Decoder, name, launched)
    return seen


def finished(engine: Engine) -> Finished:
    last = list(engine.generate(WARM_UP_PROMPT, SEEDED))[-1]
    assert isinstance(last, Finished)
    return last


def test_loading_reads_a_few_tokens_and_decodes_two_and_says_so(steps, folder: Path):
    told: list[LoadProgress] = []
    with Engine.load(folder, progress=told.append):
        assert steps == [("prefill", 0), ("step", 32), ("step", 33)]
    assert told[-1].stage == "warm-up"


def test_it_leaves_no_trace(steps, folder: Path, monkeypatch):
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        warmed = list(steps)
        store = store_of(engine)
        assert store.nbytes == 0
        assert store.rates.prefill_s(1) is None
        assert engine.live() is None
        assert engine.memory().peak <= engine.memory().active + (64 << 20)
        with_it = finished(engine)
        assert with_it.metrics.cached_tokens == 0
    monkeypatch.setattr("tokamac.engine.loading.warm_up", lambda *_: None)
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        without = finished(engine)
    assert warmed
    assert with_it.text == without.text
    assert with_it.predicted_peak_bytes == without.predicted_peak_bytes


def test_a_model_that_fails_in_it_is_loaded_all_the_same(folder: Path, monkeypatch):
    monkeypatch.setattr(Sampler, "__call__", lambda *_: mx.array([NO_NUMBER], mx.uint32))
    with Engine.load(folder) as engine, pytest.raises(ModelDamagedError, match="not numbers"):
        finished(engine)


# The first reply of a Mac, and what its speed is held against.


def test_the_guide_is_expected_to_be_no_faster_than_the_host_builds_its_steps():
    with Engine.load("guide") as engine:
        latency = runtime_of(engine).machine.latency
        assert isinstance(latency, HostLimited)
        assert engine.predict(100, 200).decode.expected_s >= latency.host.step_s
        last = list(engine.generate([Message("user", "What is prefill?")], Sampling(temperature=0, max_tokens=20)))[-1]
    assert last.metrics.expected_tps <= 1.001 / latency.host.step_s
    assert all(remedy.name != "quiet machine" for remedy in last.diagnosis.remedies)


# What a decoded token sends to the device and reads from it, beside mlx-lm's own loop over the same weights and caches.


class Sent:
    """Counts evaluations, the operations in them, and reads by the host."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        for owner, name in ((mx, "eval"), (mx, "async_eval"), (mx.array, "tolist"), (mx.array, "item")):
            patch.setattr(owner, name, self._counted(getattr(owner, name), evaluates=owner is mx))

    def _counted(self, call: Callable[..., Any], *, evaluates: bool) -> Callable[..., Any]:
        def counted(*arrays: Any) -> Any:
            self.counts["evaluations" if evaluates else "reads"] += 1
            if evaluates:
                known = [each for _, each in tree_flatten(arrays) if isinstance(each, mx.array)]
                mx.export_to_dot(graph := StringIO(), *known)
                self.counts["operations"] += graph.getvalue().count("shape=rectangle")
            return call(*arrays)

        return counted


def sent_a_token(decode: Callable[[int], object]) -> dict[str, float]:
    """Return what each of 24 tokens sent, past the first eight."""
    found, _ = [], decode(1)  # what the prompt sends is not asked of the second more than of the first
    for tokens in (8, 32):
        with pytest.MonkeyPatch.context() as patch:
            sent = Sent(patch)
            decode(tokens)
        found.append(sent.counts)
    return {kind: (found[1][kind] - found[0][kind]) / 24 for kind in ("evaluations", "operations", "reads")}


# More: a token that is no number is seen on the device; a window's slot is computed in each layer.
@pytest.mark.parametrize(
    ("kv", "theirs", "more"),
    [
        (KVSpec(), {}, 2),
        (KVSpec(key_bits=8, value_bits=8), {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}, 2),
        (KVSpec(window=32, keep=0), {"max_kv_size": 32}, 8),
    ],
    ids=["whole", "packed", "window"],
)
def test_a_token_sends_no_more_than_in_mlx_lms_loop(
    tmp_path: Path, kv: KVSpec, theirs: dict[str, int], more: int
) -> None:
    folder = write_model(tmp_path, dtype=mx.float16, vocab_size=512, eos_token_id=511)
    model, _ = load_model(folder)
    with Engine.load(folder, kv=kv, speculation=None) as engine:
        ours = sent_a_token(lambda n: [*engine.generate(PROMPT[:16], Sampling(temperature=0, max_tokens=n))])
    peer = sent_a_token(lambda n: [*generate_step(mx.array(PROMPT[:16]), model, max_tokens=n, **theirs)])
    assert ours["evaluations"] == peer["evaluations"] == 1
    assert ours["reads"] == peer["reads"] == 1
    assert ours["operations"] <= peer["operations"] + more


# Conversion by the path a GPU takes: the search in MLX's own operations, beside the CPU's.


@pytest.fixture
def source(tmp_path):
    return write_model(tmp_path / "source", hidden_size=128, intermediate_size=256, num_hidden_layers=1)


def test_the_search_of_a_gpu_finds_what_the_cpus_finds(tmp_path, source):
    assert implementation().name == "mlx"
    on_gpu = convert(source, tmp_path / "gpu", bits=4, group_size=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokamac.engine.device._device_kind", lambda: "cpu")
        pytest.importorskip("numba")
        assert implementation().name == "numba"
        on_cpu = convert(source, tmp_path / "cpu", bits=4, group_size=64)
    assert on_gpu.weight_bytes == on_cpu.weight_bytes
    assert on_gpu.bits_per_weight == on_cpu.bits_per_weight
    assert on_gpu.quality.relative_error == pytest.approx(on_cpu.quality.relative_error, rel=0.005)


@pytest.mark.parametrize("method", ["round", "search"])
def test_what_a_gpu_converted_answers(tmp_path, source, method):
    convert(source, tmp_path / "out", bits=8, group_size=64, method=method)
    with Engine.load(tmp_path / "out") as engine:
        *_, last = engine.generate([5, 6, 7, 8], Sampling(temperature=0, max_tokens=5))
        assert last.metrics.generated_tokens == 5


# A Mac whose MLX leaves its neural accelerators unused: what the commands and the chat say of it.


@pytest.fixture
def old_wheel(mac, metal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An M5 with the wheel for macOS 15, whose user was told nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mac.sysctl["machdep.cpu.brand_string"] = "Apple M5"
    metal.info["architecture"] = "applegpu_g17g"
    monkeypatch.setattr(hardware, "wheel_tags", lambda: ("py3-none-macosx_15_0_arm64",))


def test_inspect_says_it_each_time_and_ask_once(old_wheel, tokamac: Run):  # noqa: F811
    for _ in range(2):
        assert hardware.REINSTALL in tokamac("inspect", "guide").err
    first, second = (tokamac("ask", "--max-tokens", "1", "What is decode?") for _ in range(2))
    assert hardware.REINSTALL in first.err
    assert hardware.REINSTALL not in second.err


def test_a_chip_that_is_only_named_is_taken_to_have_them_and_that_is_said(tokamac: Run):  # noqa: F811
    assert "macOS 26.2 or later" in tokamac("inspect", "guide", "--chip", "M5", "--gpu-cores", "10").err
    assert "macOS 26.2" not in tokamac("inspect", "guide", "--chip", "M4", "--gpu-cores", "10").err
