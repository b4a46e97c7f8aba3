"""Memory on a Mac: what macOS recommends is the limit, what others must give way for is told, and a loaded model always answers."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from tests.engine.seeded import write_model
from tests.mac import CAPTURES, GIB, MetalDevice, RecordedMac, as_captured
from tokamac.engine import Engine, Finished, KVSpec, MemoryLimitError, MemoryPressure, Sampling
from tokamac.engine.options import PromptCacheSpec
from tokamac.engine.perf import macos, memory
from tokamac.engine.perf.catalogue import find
from tokamac.engine.perf.footprint import check_fits, module_of
from tokamac.engine.perf.machine import here
from tokamac.engine.perf.what_if import Suggestion, WhatIfCase, rank, suggestion

EIGHTS = ("Meta-Llama-3.1-8B-Instruct-4bit", "Qwen3-8B-4bit")
PAGE = 16384
GREEDY = Sampling(temperature=0, max_tokens=4)
PROMPT = [5 + i * i % 250 for i in range(600)]


@pytest.fixture(autouse=True)
def nothing_else_is_held(settled_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests of this process hold does not count as this Mac's."""
    before = memory.held()
    monkeypatch.setattr(memory, "held", lambda: max(0, mx.get_active_memory() + mx.get_cache_memory() - before))


def suggested(name: str, tokens: int = 4096) -> Suggestion:
    """Return a model of the catalogue on this Mac."""
    entry = find(name)
    assert entry is not None
    repository = entry.repository(name)
    assert repository is not None
    return suggestion(entry, repository, WhatIfCase(context=tokens, prompt=tokens), here())


def write_headers(folder: Path, name: str) -> Path:
    """Write a model of the catalogue whose file has every header and holds no weight: gigabytes that take no disk."""
    entry = find(name)
    assert entry is not None
    repository = entry.repository(name)
    assert repository is not None
    config = entry.config_of(repository)
    assert config is not None
    packing = repository.packing
    assert packing is not None
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


@pytest.mark.parametrize("gib", CAPTURES)
@pytest.mark.parametrize("name", EIGHTS)
def test_no_8b_model_is_refused_on_a_mac_in_use(
    mac: RecordedMac, metal: MetalDevice, tmp_path: Path, gib: int, name: str
) -> None:
    as_captured(mac, metal, gib)
    folder = write_headers(tmp_path, name)
    for level in (1, 2, 4):
        mac.sysctl[memory.PRESSURE] = level
        check_fits(folder, KVSpec(), "metal")
        found = suggested(name)
        assert found.outcome.memory is not None
        assert found.outcome.memory.fits
        assert found.verdict == ("runs well" if gib == 48 and level < 4 else "tight")


@pytest.mark.parametrize(("gib", "said"), [(8, 3.6), (16, 2.5), (24, 3.8), (48, 0)])
def test_what_other_programs_give_way_for_is_told_before_loading(
    mac: RecordedMac, metal: MetalDevice, tmp_path: Path, gib: int, said: float
) -> None:
    as_captured(mac, metal, gib)
    notes = check_fits(write_headers(tmp_path, "Meta-Llama-3.1-8B-Instruct-4bit"), KVSpec(), "metal")
    amount = f"to make room for this model, macOS would have to compress about {said} GB of other programs"
    assert notes == ((amount,) if said else ())


def test_what_is_free_changes_a_word_of_the_list_and_not_the_list(mac: RecordedMac, metal: MetalDevice) -> None:
    names = (*EIGHTS, "Qwen3-0.6B-4bit", "Qwen3-14B-4bit")
    as_captured(mac, metal, 24)
    busy = sorted(map(suggested, names), key=rank)
    pages = CAPTURES[24]
    mac.counted = macos.Pages(PAGE, pages.free + pages.active, 0, 0, pages.wired, 0, 0, 0, 0, 0)
    quiet = sorted(map(suggested, names), key=rank)
    assert [each.id for each in busy] == [each.id for each in quiet]
    words = {each.id: (each.verdict, found.verdict) for each, found in zip(busy, quiet, strict=True)}
    assert words["mlx-community/Qwen3-8B-4bit"] == ("tight", "runs well")
    assert {pair for pair in words.values() if pair[0] != pair[1]} <= {("tight", "runs well")}
    (told,) = [each.reason for each in busy if each.id.endswith("Qwen3-8B-4bit")]
    assert "macOS would have to compress about " in told


def test_the_limit_is_what_macos_recommends(mac: RecordedMac, metal: MetalDevice) -> None:
    for level in (1, 2, 4):
        mac.sysctl[memory.PRESSURE] = level
        assert memory.system_limit() == memory.Limit(int(11.84e9), "recommended")
    metal.info["max_recommended_working_set_size"] = 15 * GIB  # as iogpu.wired_limit_mb has it
    left = 16 * GIB - CAPTURES[16].wired * PAGE
    assert memory.system_limit() == memory.Limit(left, "wired elsewhere")


def test_our_own_wired_arrays_are_not_held_against_us(mac: RecordedMac, monkeypatch: pytest.MonkeyPatch) -> None:
    before = CAPTURES[16]
    ours = 8 * GIB
    wired = macos.Pages(PAGE, 0, 0, 0, before.wired + ours // PAGE, 0, 0, 0, 0, 0)
    mac.counted = wired
    assert memory.array_budget() == 16 * GIB - wired.wired * PAGE
    monkeypatch.setattr(memory, "held", lambda: ours)
    assert memory.array_budget() == int(11.84e9)


def test_what_is_allocated_is_never_above_the_limit(mac: RecordedMac, monkeypatch: pytest.MonkeyPatch) -> None:
    mac.counted = macos.Pages(PAGE, 0, 0, 0, 16 * GIB // PAGE, 0, 0, 0, 0, 0)  # others wired all there is
    monkeypatch.setattr(memory, "held", lambda: 5 * GIB)
    assert memory.array_budget() == 5 * GIB + memory.ALLOWANCE


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


def test_a_loaded_model_answers_at_critical_pressure(folder: Path, mac: RecordedMac) -> None:
    other = [260 - token for token in PROMPT]
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        mac.sysctl[memory.PRESSURE] = 2
        assert not events(engine, other)[0]
        quiet, plain = events(engine, PROMPT)
        assert not quiet
        events(engine, other)
        kept = engine._runner._store.aside
        assert kept > 0
        mac.sysctl[memory.PRESSURE] = 4
        mac.counted = macos.Pages(PAGE, 0, 0, 0, 16 * GIB // PAGE, 0, 0, 0, 0, 0)
        longer = [9 + i * i % 240 for i in range(1900)]  # nothing of it is known
        (told,), answered = events(engine, longer)
        assert told.critical
        assert told.chunk == 32
        assert told.cache_bytes > 0
        assert answered.text
        mac.sysctl[memory.PRESSURE] = 1
        assert events(engine, PROMPT)[1].text == plain.text


def test_a_limit_that_is_set_holds_below_and_above_the_recommended_one(folder: Path, metal: MetalDevice) -> None:
    metal.info["max_recommended_working_set_size"] = 1 * GIB
    with Engine.load(folder, prompt_cache=None, memory=3 * GIB) as engine:
        found = engine.memory()
        assert (found.budget, found.budget_source) == (3 * GIB, "asked")
        assert metal.wired[-1] <= 1 * GIB
    with pytest.raises(MemoryLimitError, match=r"0\.1 MB may be used") as told:
        Engine.load(folder, memory=100_000)
    assert "--memory " in told.value.hint
    needed = float(told.value.hint.split("--memory ")[1].split()[0])
    with Engine.load(folder, prompt_cache=None, memory=round(needed * 1e9)) as engine:
        assert engine.memory().budget == round(needed * 1e9)


def test_the_prompt_cache_follows_the_limit(folder: Path, metal: MetalDevice) -> None:
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        budget = engine._runner._store._budget  # type: ignore[attr-defined]
        assert budget() == int(11.84e9) // 10
        metal.info["max_recommended_working_set_size"] = 8 * GIB
        assert budget() == 8 * GIB // 10


def test_a_prompt_that_others_give_way_for_is_computed_and_told(
    folder: Path, mac: RecordedMac, monkeypatch: pytest.MonkeyPatch
) -> None:
    mac.counted = macos.Pages(PAGE, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    monkeypatch.setattr(memory, "WORTH_SAYING", 1 << 20)
    with Engine.load(folder, prompt_cache=None) as engine:
        (note,) = engine.spec.memory_notes
        assert note.startswith("to make room for this model, macOS would have to compress about ")
        (told,), answered = events(engine, PROMPT)
        assert told.from_others >= 1 << 20
        assert (told.chunk, told.critical) == (None, False)
        assert answered.text


def test_no_process_is_started_by_anything_that_reads_memory(
    folder: Path, mac: RecordedMac, metal: MetalDevice
) -> None:
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
