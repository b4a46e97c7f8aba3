"""How prompts are cut: by model, chip and depth, with hardly a loss beside mlx-lm's chunks, on every chip of the table."""

import functools
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokamac.engine.options import KVSpec
from tokamac.engine.perf.catalogue import catalogue, find
from tokamac.engine.perf.config_cost import Packing
from tokamac.engine.perf.footprint import Footprint, weigh, work_of_config
from tokamac.engine.perf.hardware import lookup, table
from tokamac.engine.perf.mitigation import (
    DEEP,
    DENSE_S,
    LARGEST,
    LEAST,
    MIXTURE_S,
    PROMPT,
    Chunking,
    prompt_peak,
    whole_chunks,
)
from tokamac.engine.perf.peak_memory import predict_peak
from tokamac.engine.perf.roofline import fitted
from tokamac.engine.perf.workload import Workload

CHIPS = [lookup(row["chip"], row["gpu_cores"]) for row in table()]
APPLE = [chip for chip in CHIPS if chip.name.startswith("Apple")]
MODELS = [entry.name for entry in catalogue() if entry.config is not None]
LENT = 1.1
"""What the prefill of a prompt may take of its time in chunks of 2,048, mlx-lm's."""


@functools.cache
def work_named(name: str) -> Workload:
    entry = find(name)
    assert entry is not None
    work = work_of_config(entry.config, packing=Packing(4))
    assert isinstance(work, Workload), work
    return work


def chunking(name: str, chip_name: str, cores: int | None = None) -> Chunking:
    return Chunking(work_named(name), "metal", fitted(lookup(chip_name, cores)))


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_takes_hardly_longer_than_in_chunks_of_2048_on_any_chip(name: str) -> None:
    work, slow = work_named(name), []
    for chip in APPLE:
        pace = fitted(chip)
        assert pace is not None
        chunk = Chunking(work, "metal", pace).at(0)
        ours, theirs = (pace.prefill_s(work, 8192, 0, size) for size in (chunk, 2048))
        if ours is not None and theirs is not None and ours > LENT * theirs:
            slow.append((chip.name, chip.gpu_cores, chunk, ours / theirs))
    assert not slow


@pytest.mark.parametrize("name", ["Qwen3-8B", "gpt-oss-20b", "Llama-3.3-70B"])
def test_a_chunk_is_halved_while_it_takes_too_long_and_that_costs_little(name: str) -> None:
    work = work_named(name)
    longest_s = MIXTURE_S if work.expert_bytes else DENSE_S
    for chip in APPLE:
        pace = fitted(chip)
        chunk = Chunking(work, "metal", pace).at(0)
        seconds = pace.prefill_s(work, PROMPT, 0, chunk)
        if seconds is None or seconds * chunk / PROMPT <= longest_s:
            continue
        half = pace.prefill_s(work, PROMPT, 0, chunk // 2)
        assert chunk == LEAST or half > LENT * pace.prefill_s(work, PROMPT, 0, 2048), chip


def test_dense_models_keep_512_where_that_is_quick_and_mixtures_take_more():
    assert chunking("Qwen3-8B", "Apple M4 Max", 40).at(0) == 512
    assert chunking("Qwen3-8B", "Apple M1", 8).at(0) < 512
    assert chunking("Qwen3-30B-A3B", "Apple M4 Max", 40).at(0) > 512
    assert chunking("Qwen3-Next-80B-A3B", "Apple M4 Max", 40).at(0) > 512


def test_without_a_published_pace_a_mixture_gets_rows_for_its_experts():
    assert Chunking(work_named("Qwen3-8B"), "metal", None).at(0) == 512
    assert Chunking(work_named("Qwen3-30B-A3B"), "metal", None).at(0) == 1024  # 8 of 128 experts
    assert Chunking(work_named("Qwen3-Next-80B-A3B"), "cuda", None).at(0) == LARGEST  # 10 of 512
    assert Chunking(work_named("Qwen3-8B"), "cuda", None).at(0) == 2048


@given(
    st.sampled_from(["Qwen3-30B-A3B", "gpt-oss-120b", "gemma-3-1b"]), st.sampled_from(APPLE), st.integers(0, 1 << 20)
)
def test_chunks_never_grow_with_depth_and_are_small_deep_down(name, chip, depth):
    cut = Chunking(work_named(name), "metal", fitted(chip))
    sizes = [cut.at(at) for at in (depth, depth + 1, 2 * depth, 4 * depth)]
    assert sizes == sorted(sizes, reverse=True)
    assert all(LEAST <= size <= LARGEST and size & (size - 1) == 0 for size in sizes)
    if depth >= DEEP:
        assert sizes[0] <= 512


def test_on_a_cpu_the_model_alone_decides():
    small, large = work_named("gemma-3-270m"), work_named("Qwen3-8B")
    unused = fitted(lookup("Apple M1", 8))
    for pace in (None, unused):
        assert Chunking(small, "cpu", pace).at(0) == 256
        assert Chunking(large, "cpu", pace).at(200_000) == LEAST


@given(st.integers(0, 300_000), st.integers(0, 300_000))
def test_bands_cover_a_prompt_in_order(start, more):
    cut = chunking("Qwen3-30B-A3B", "Apple M2 Pro", 19)
    bands = list(cut.bands(start, start + more))
    assert [begin for begin, _, _ in bands] == [start, *(end for _, end, _ in bands)][: len(bands)]
    assert sum(end - begin for begin, end, _ in bands) == more
    assert all(cut.at(begin) == cut.at(end - 1) == size for begin, end, size in bands)
    assert all(one[2] > two[2] for one, two in itertools.pairwise(bands))


def test_whole_chunks_end_at_the_last_cut():
    cut = Chunking(work_named("Qwen3-8B"), "metal", None)
    assert [whole_chunks(cut, tokens) for tokens in (0, 511, 512, 1500, 70_000)] == [0, 0, 512, 1024, 69_632]


def test_the_peak_of_a_deep_prompt_is_that_of_its_small_chunks_or_of_the_large_ones_before():
    entry = find("Qwen3-30B-A3B")
    assert entry is not None
    weighed = weigh(entry.config, "metal", None, packing=Packing(4))
    assert isinstance(weighed, Footprint)
    shape = weighed.shape(weighed.plan(KVSpec()), "metal")
    cut = chunking("Qwen3-30B-A3B", "Apple M4 Max", 40)
    assert cut.at(0) > cut.at(DEEP)
    peak = prompt_peak(shape, cut, held=0, new=2 * DEEP)
    small = predict_peak(shape, held=DEEP, new=DEEP, chunk=cut.at(DEEP))
    large = predict_peak(shape, held=0, new=DEEP, chunk=cut.at(0))
    assert peak.total == max(small.total, large.total)
    assert peak.working < predict_peak(shape, held=0, new=2 * DEEP, chunk=cut.at(0)).working
    assert prompt_peak(shape, cut, held=100, new=0, reply=1).total > 0
