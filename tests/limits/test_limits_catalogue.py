"""The table of models: every row builds and costs, and what was published of it comes out of its config."""

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.limits.tables import kv_table
from tokamac.engine.options import KVSpec
from tokamac.engine.perf.catalogue import CatalogueEntry, Repository, catalogue, files_bytes, find
from tokamac.engine.perf.config_cost import Packing, cost_of_config
from tokamac.engine.perf.cost import Cost, text_config
from tokamac.engine.perf.footprint import KVTable, work_of_config

MODELS = list(csv.DictReader((Path(__file__).parent / "models.csv").read_text(encoding="utf-8").splitlines()))
KNOWN = [entry for entry in catalogue() if entry.config is not None]
REPOSITORIES = [(entry, each) for entry in KNOWN for each in entry.repositories]
PUBLISHED = [(entry, each) for entry, each in REPOSITORIES if each.published_bytes is not None]

MEASURED = (
    "Gemma 4 12B", "Gemma 4 26B A4B", "Gemma 4 31B", "Gemma 4 E2B", "Gemma 4 E4B", "Gemma-3-4B", "Gemma3-270M", "Llama-2-7B",
    "Llama-3.1-8B", "Llama-3.2-1B", "Llama-3.2-1B-Instruct-4bit", "Llama-3.2-3B", "Llama-3.2-3B-Instruct-4bit",
    "Meta-Llama-3.1-8B-Instruct", "Mistral-7B", "Qwen 3.6 27B", "Qwen 3.6 35B A3B", "Qwen2.5-1.5B-Instruct-4bit",
    "Qwen2.5-Coder-7B", "Qwen2.5-Coder-7B-Instruct-4bit", "Qwen3-0.6B", "Qwen3-0.6B-4bit", "Qwen3-0.6B-8bit", "Qwen3-30B-A3B",
    "Qwen3-30B-A3B-4bit", "Qwen3-30B-A3B-Instruct-2507", "Qwen3-4B", "Qwen3-4B-Instruct-2507", "Qwen3-8B", "Qwen3-Coder-30B-A3B",
    "Qwen3.5-35B-A3B-4bit", "Qwen3.5-4B-MLX-4bit", "Qwen3.5-9B-4bit", "Qwen3.8-27B", "Qwen3.8-27B-4bit", "gemma-3-1b", "gemma-3-4b",
    "gpt-oss-20b", "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit", "mlx-community/Qwen2.5-14B-Instruct-4bit",
    "mlx-community/Qwen3-8B-4bit", "mlx-community/gemma-3-1b-it-qat-4bit", "mlx-community/gemma-3-27b-it-qat-4bit",
    "mlx-community/phi-4-mini-instruct-4bit",
)  # fmt: skip
"""What published speeds call their models."""

TOLERANCE = 0.015
CLOSE = 0.002
"""What all but these reach; the rounding of sizes published to three digits is in it."""
NOT_CLOSE = {
    "mlx-community/gemma-3-4b-it-qat-4bit": "27 MB less was published than its text model, tower and tokenizer take"
}

AUDIO = 304_824_608
"""Parameters of Gemma 4's audio tower, counted in transformers' class."""
RMS, LAYER = 1, 2
"""Vectors of a norm: a weight, or a weight and a bias."""


def cost_of(entry: CatalogueEntry, repository: Repository) -> Cost | str:
    config = entry.config_of(repository)
    assert config is not None
    return cost_of_config(config, packing=repository.packing)


def said(cost: Cost | str) -> Cost:
    assert isinstance(cost, Cost), cost
    return cost


def named(name: str) -> CatalogueEntry:
    entry = find(name)
    assert entry is not None, name
    return entry


def name_of(value: Any) -> str:
    return value.name if isinstance(value, CatalogueEntry) else value.tail if isinstance(value, Repository) else ""


def row_name(row: dict[str, str]) -> str:
    return row["model"]


@pytest.mark.parametrize("entry", KNOWN, ids=name_of)
def test_every_config_builds_and_costs(entry: CatalogueEntry) -> None:
    assert entry.config is not None
    plain = said(cost_of_config(entry.config, packing=Packing(None)))
    packed = said(cost_of_config(entry.config, packing=Packing(4)))
    assert plain.bits_per_weight == 16
    assert plain.parameters == packed.parameters
    assert packed.active_parameters is not None
    assert 4.4 < 8 * packed.weight_bytes / packed.parameters < 4.7
    assert isinstance(kv_table(entry.config, KVSpec(), 4096, value_bytes=2), KVTable)


@pytest.mark.parametrize("entry", catalogue(), ids=name_of)
def test_every_row_says_where_it_was_read(entry: CatalogueEntry) -> None:
    assert entry.source
    assert entry.config is None or "model_type" in entry.config
    for each in entry.repositories:
        assert (each.packing is None) != (each.quantization is None)
        assert each.id.count("/") == 1


@pytest.mark.parametrize(("entry", "repository"), PUBLISHED, ids=name_of)
def test_published_sizes_come_out_of_configs(entry: CatalogueEntry, repository: Repository) -> None:
    computed = files_bytes(entry, repository, said(cost_of(entry, repository)).weight_bytes)
    assert computed is not None
    tolerance = TOLERANCE if repository.id in NOT_CLOSE else CLOSE
    assert computed == pytest.approx(repository.published_bytes, rel=tolerance)


def test_every_published_size_of_the_facts_is_in_the_table() -> None:
    published = {each.id: each.published_bytes for _, each in PUBLISHED}
    for row in MODELS:
        if row["repo_bytes_published"]:
            assert published[row["mlx_repo"]] == int(row["repo_bytes_published"])


@pytest.mark.parametrize("row", MODELS, ids=row_name)
def test_keys_and_values_of_a_token_come_out_of_configs(row: dict[str, str]) -> None:
    entry = named(row["model"].removesuffix(" (text)"))
    assert entry.config is not None
    table = kv_table(entry.config, KVSpec(), 4096, value_bytes=2)
    assert isinstance(table, KVTable)
    assert table.bytes_per_token == int(row["kv_bytes_per_token_16bit_computed"])


@pytest.mark.parametrize("row", MODELS, ids=row_name)
def test_parameters_and_bytes_come_out_of_configs(row: dict[str, str]) -> None:
    entry = named(row["model"].removesuffix(" (text)"))
    assert entry.config is not None
    cost = said(cost_of_config(entry.config, packing=Packing(4)))
    assert cost.parameters == int(row["params_total_computed"])
    if row["mlx_4bit_g64_bytes_computed"]:  # routers at 8 bits and biases are not in the facts' formula
        assert cost.weight_bytes == pytest.approx(int(row["mlx_4bit_g64_bytes_computed"]), rel=4e-4)
        assert cost.weight_bytes_per_token == pytest.approx(int(row["decode_bytes_per_token_4bit_computed"]), rel=4e-3)


@pytest.mark.parametrize("name", MEASURED)
def test_models_are_found_by_what_published_speeds_call_them(name: str) -> None:
    assert named(name) is named(name.upper())


def test_repositories_are_found_by_their_ids_and_tails() -> None:
    for entry, repository in REPOSITORIES:
        assert find(repository.id) is find(repository.tail) is entry
        assert entry.repository(repository.tail.lower()) is entry.repository(repository.id) is repository


def test_no_name_means_two_models() -> None:
    names = [
        name.casefold()
        for entry in catalogue()
        for name in (entry.name, *entry.aliases, *(each.id for each in entry.repositories))
    ]
    assert len(names) == len(set(names))


def test_what_is_not_in_the_table_is_not_found() -> None:
    assert find("Ornith-9B") is None
    assert find("") is None
    assert named("Qwen3-8B").repository("Qwen3-4B-4bit") is None


def test_a_star_stands_for_every_layer() -> None:
    entry = named("gpt-oss-20b")
    repository = entry.repositories[0]
    config = entry.config_of(repository)
    assert config is not None
    modules = [value for value in config["quantization"].values() if isinstance(value, dict)]
    assert len(modules) == 24 * 5 + 2  # four projections and a router a layer, the embedding, the head
    parts = said(cost_of(entry, repository)).parts
    biases = 24 * 32 * 3 * 2880  # of each expert's three matrices, in 16 bits
    assert parts["experts"].nbytes == (parts["experts"].parameters - biases) * 4.25 / 8 + 2 * biases
    assert parts["embedding"].bits_per_weight == parts["head"].bits_per_weight == 8.5


def test_a_head_stored_twice_takes_room_and_no_time() -> None:
    entry = named("gemma-3-1b")
    stored = said(cost_of(entry, entry.repositories[0]))
    assert entry.config is not None
    tied = said(cost_of_config(entry.config, packing=Packing(4)))
    assert stored.weight_bytes - tied.weight_bytes == 262_144 * 1152 * 4.5 / 8
    assert stored.weight_bytes_per_token == tied.weight_bytes_per_token


def test_routers_without_an_entry_are_packed_like_the_rest() -> None:
    entry = named("Qwen3.5-122B-A10B")
    cost = said(cost_of(entry, entry.repositories[0]))
    published = 69_593_314_272  # of weights alone, as a public model card has it
    as_float32 = 36 * 64 * 2  # the decay of every linear layer's heads, two bytes more each
    assert cost.weight_bytes + 2 * entry.tower_parameters + as_float32 == published


@pytest.mark.parametrize(("name", "repository", "gigabytes"), [("gemma-4-12b", 0, 6.70), ("Qwen3.8-27B", 0, 15.13)])
def test_weights_are_those_of_public_reports(name: str, repository: int, gigabytes: float) -> None:
    entry = named(name)
    assert said(cost_of(entry, entry.repositories[repository])).weight_bytes / 1e9 == pytest.approx(
        gigabytes, abs=0.005
    )


def layers_of(count: int, hidden: int, attention: int, mlp: int, vectors: int) -> int:
    return count * (attention + mlp + vectors * hidden)


def siglip(hidden: int = 1152, wide: int = 4304, layers: int = 27) -> int:
    """Patches of 14 x 14 x 3, 64 x 64 positions, biases everywhere, no pooling head."""
    attention, mlp = 4 * (hidden * hidden + hidden), 2 * hidden * wide + wide + hidden
    ends = 14 * 14 * 3 * hidden + hidden + 64 * 64 * hidden + LAYER * hidden
    return layers_of(layers, hidden, attention, mlp, 2 * LAYER) + ends


def qwen_tower(hidden: int, wide: int, layers: int, out: int) -> int:
    """Patches of 16 x 16 x 3 in pairs of frames, 48 x 48 positions; four patches are merged into one token."""
    attention, mlp = 4 * (hidden * hidden + hidden), 2 * hidden * wide + wide + hidden
    ends = 2 * 16 * 16 * 3 * hidden + hidden + 48 * 48 * hidden
    merger = LAYER * hidden + (4 * hidden) ** 2 + 4 * hidden + 4 * hidden * out + out
    return layers_of(layers, hidden, attention, mlp, 2 * LAYER) + ends + merger


def gemma4_tower(hidden: int, wide: int, layers: int, head_dim: int) -> int:
    """Patches of 16 x 16 x 3, 10,240 positions along each axis, no biases; queries and keys have norms."""
    attention, mlp = 4 * hidden * hidden + 2 * RMS * head_dim, 3 * hidden * wide
    return layers_of(layers, hidden, attention, mlp, 4 * RMS) + 16 * 16 * 3 * hidden + 2 * 10_240 * hidden


@pytest.mark.parametrize("name", ["gemma-3-4b", "gemma-3-12b", "gemma-3-27b"])
def test_gemma_3s_tower_is_siglip_and_a_projector(name: str) -> None:
    entry = named(name)
    assert entry.config is not None
    width = text_config(entry.config)["hidden_size"]
    assert entry.tower_parameters == siglip() + RMS * 1152 + 1152 * width


@pytest.mark.parametrize("name", ["Qwen3.5-4B", "Qwen3.5-9B", "Qwen3.8-27B", "Qwen3.6-35B-A3B", "Qwen3.5-122B-A10B"])
def test_qwen_3_5s_towers_are_worked_out_by_hand(name: str) -> None:
    entry = named(name)
    assert entry.config is not None
    shape = (1024, 4096, 24) if name == "Qwen3.5-4B" else (1152, 4304, 27)
    assert entry.tower_parameters == qwen_tower(*shape, out=text_config(entry.config)["hidden_size"])


@pytest.mark.parametrize(
    ("name", "small"),
    [("gemma-4-e2b", True), ("gemma-4-e4b", True), ("gemma-4-26b-a4b", False), ("gemma-4-31b", False)],
)
def test_gemma_4s_towers_are_worked_out_by_hand(name: str, small: bool) -> None:
    entry = named(name)
    assert entry.config is not None
    width = text_config(entry.config)["hidden_size"]
    if small:
        assert entry.tower_parameters == gemma4_tower(768, 3072, 16, 64) + AUDIO
        assert entry.projector_parameters == (768 + 1536) * width
    else:
        assert entry.tower_parameters == gemma4_tower(1152, 4304, 27, 72)
        assert entry.projector_parameters == 1152 * width


def test_a_mistral_without_a_window_keeps_its_whole_context() -> None:
    """Without the key, transformers assumes a window of 4,096 for this family; its config says that there is none."""
    entry = find("Mistral-7B-v0.3")
    assert entry is not None
    work = work_of_config(entry.config)
    assert not isinstance(work, str)
    assert work.kv_bytes(32_768) == 32_768 * 32 * 2 * 8 * 128 * 2


def test_reading_the_table_loads_no_mlx() -> None:
    code = "import sys; from tokamac.engine.perf.catalogue import find; find('x'); sys.exit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
