"""What inspect says of each layer's cache: as the engine plans it, with nothing computed, and as the config's arithmetic has it."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.kv.models import seeded
from tests.limits.tables import kv_table
from tests.limits.test_limits_cost import CONFIGS, LLAMA, build, save
from tokamac.engine.errors import OptionError
from tokamac.engine.kv.plan import plan_caches, spare_slots
from tokamac.engine.model.config import model_classes, normalise, read_config
from tokamac.engine.options import KVSpec
from tokamac.engine.perf import inspection
from tokamac.engine.perf.config_cost import kv_bytes, kv_bytes_per_token, kv_layers, pinned_bytes
from tokamac.engine.perf.footprint import KVRow, KVTable, runs, weigh
from tokamac.engine.perf.hardware import Chip
from tokamac.engine.perf.inspection import inspect_model
from tokamac.engine.perf.machine import Machine

GOLDEN = Path(__file__).parent.parent / "golden"
GPU = Machine(Chip("Test", 10, 100.0, 4.0, "table", "made up"), None, None, None, "metal")
SPECS = {
    "plain": KVSpec(),
    "packed": KVSpec(8, 4, 32),
    "window": KVSpec(window=32, keep=4),
    "both": KVSpec(8, 16, 32, window=100, keep=4),
}
FAMILIES = ("llama", "gemma3", "gemma2", "mistral", "phi3", "qwen3_next", "falcon_h1", "minicpm3", "qwen3_moe", "lfm2")
CONTEXT = 200


def table(config: dict[str, Any], spec: KVSpec, context: int = CONTEXT) -> KVTable:
    found = kv_table(config, spec, context, value_bytes=4)
    assert isinstance(found, KVTable), found
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loaded_models_plan_and_the_configs_arithmetic_agree(family: str) -> None:
    config = read_config(GOLDEN / family)
    make, arguments = model_classes(config)
    loaded = seeded(make(arguments.from_dict(config)))
    layers = kv_layers(config)
    assert layers is not None
    for name, spec in SPECS.items():
        try:
            plan = plan_caches(loaded, config, spec)
        except OptionError as error:
            with pytest.raises(OptionError, match="can't be packed"):
                table(config, spec)
            with pytest.raises(OptionError, match="can't be packed"):
                kv_bytes_per_token(layers, spec, value_bytes=4)
            assert "can't be packed" in str(error)  # noqa: PT017  # the tiny heads fit no group
            continue
        found = table(config, spec)
        state = sum(row.bytes_at_context or 0 for row in found.rows if row.kind == "state")
        assert (found.bytes_per_token, found.bytes_at_context) == (plan.bytes_per_token, plan.bytes_at(CONTEXT)), name
        assert sum(len(row.layers) for row in found.rows) == len(plan.layers)
        assert kv_bytes_per_token(layers, spec, value_bytes=4) == plan.bytes_per_token, name
        counted = kv_bytes(layers, spec, CONTEXT, value_bytes=4, spare=spare_slots)
        counted += pinned_bytes(layers, spec, CONTEXT, value_bytes=4)
        assert counted + state == plan.bytes_at(CONTEXT), name


def test_like_layers_are_one_row() -> None:
    config = read_config(GOLDEN / "gemma3")  # two layers slide over 64 tokens, one head pair of 32 numbers
    found = table(config, KVSpec(8, 4, 32, window=100, keep=4))
    packed = 2 * (32 + 8) + 2 * (16 + 8)
    held, pinned = (64 + 64, 100 + 64), 4 * 2 * 32 * 4  # four keys beside the slots, as the model makes them
    assert found.rows == (
        KVRow((0, 1), "window", 8, 4, 64, 0, True, 2 * packed, 2 * packed * held[0]),
        KVRow((2,), "window", 8, 4, 100, 4, True, packed, packed * held[1] + pinned),
    )
    assert found.bytes_at_context == sum(row.bytes_at_context or 0 for row in found.rows)
    assert "a window of 64 tokens holds 64 more" in " ".join(found.notes)


def test_notes_say_what_is_done_otherwise() -> None:
    wide = {**LLAMA, "head_dim": 96}
    notes = " ".join(table(normalise(wide), KVSpec(4, 4)).notes)
    assert "groups of 32, not 64" in notes
    assert "keys of 2 layers are rotated" in notes
    hybrid = table(read_config(GOLDEN / "qwen3_next"), KVSpec(8, 8, 32))
    assert [(row.layers, row.kind, row.key_bits, row.free) for row in hybrid.rows] == [
        ((0, 1), "state", None, False),
        ((2,), "full", 8, True),
    ]
    assert "recurrent state stays" in hybrid.notes[0]


@pytest.mark.usefixtures("settled_memory")
def test_a_model_of_any_size_is_planned_without_computing_it() -> None:
    config = normalise({**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 40, "vocab_size": 128256,
                        "num_attention_heads": 64, "num_key_value_heads": 8})  # fmt: skip
    table(config, KVSpec())  # what importing the class takes is not counted
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    found = table(config, KVSpec(8, 4, window=1024), context=4096)
    assert mx.get_peak_memory() - before < 1_000_000
    assert found.rows[0].layers == tuple(range(40))
    assert found.bytes_per_token == 40 * 8 * (128 + 2 * 8 + 64 + 2 * 8)


def test_flags_that_can_not_be_honoured_are_errors_here_too(tmp_path: Path) -> None:
    latent = read_config(GOLDEN / "deepseek_v3")
    for spec in (KVSpec(8, 8, 32), KVSpec(window=32)):
        with pytest.raises(OptionError, match="latent attention"):
            kv_table(latent, spec, CONTEXT, value_bytes=4)
    assert table(latent, KVSpec()).rows[0].kind == "latent"


def test_inspect_has_the_table_and_its_sums(tmp_path: Path) -> None:
    model, config = build(CONFIGS["gemma"])
    save(tmp_path, model, {**config, "sliding_window": 48})
    seen = inspect_model(tmp_path, 1000, KVSpec(8, 8, 32), place=GPU)
    assert seen.kv_table is not None
    assert seen.kv_reason is None
    assert seen.memory.kv == seen.kv_table.bytes_at_context
    assert seen.kv_bytes_per_token == seen.kv_table.bytes_per_token == 2 * 2 * (64 + 2 * 2 * 2)
    assert [row.window for row in seen.kv_table.rows] == [48, None]


def test_without_a_class_the_config_alone_is_counted_and_that_is_said(tmp_path: Path) -> None:
    model, config = build(CONFIGS["llama"])
    save(tmp_path, model, {**config, "model_type": "unheard_of"})
    spec = KVSpec(8, 8, 32, window=100)
    seen = inspect_model(tmp_path, 1000, spec, place=GPU)
    assert seen.kv_table is None
    assert "unheard_of" in (seen.kv_reason or "")
    assert seen.kv_bytes_per_token == 2 * 2 * 2 * (32 + 2 * 2)
    pinned = 4 * 2 * 2 * 32 * 2  # of four tokens: two layers, two heads, 16 bits
    assert seen.memory.kv == (100 + spare_slots(100)) * seen.kv_bytes_per_token + pinned
    assert asdict(seen.memory)["kv"] == seen.memory.kv


def test_flags_that_the_config_alone_rules_out_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "weigh", lambda *_, **__: "no class")
    model, config = build(CONFIGS["llama"])
    latent = {"model_type": "deepseek_v3", "kv_lora_rank": 16, "qk_rope_head_dim": 16}
    save(tmp_path, model, {**config, **latent})
    assert inspect_model(tmp_path, 10, KVSpec(), place=GPU).memory.kv == 10 * 2 * 32 * 2
    with pytest.raises(OptionError, match="neither packed nor bounded"):
        inspect_model(tmp_path, 10, KVSpec(window=8), place=GPU)


def test_a_config_of_unknown_layers_is_not_planned() -> None:
    reason = weigh({**LLAMA, "layer_types": ["something_new"] * 2}, "metal", None)
    assert reason == "its config names kinds of layers that Tokamac does not know"


@pytest.mark.parametrize(
    ("layers", "found"), [((), []), ((3,), [(3, 3)]), ((0, 1, 2, 5, 7, 8), [(0, 2), (5, 5), (7, 8)])]
)
def test_runs(layers: tuple[int, ...], found: list[tuple[int, int]]) -> None:
    assert runs(layers) == found
