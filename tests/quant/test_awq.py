"""AWQ: a model that computes the same once scaled, what it packs, what it refuses."""

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.quant.models import BASE, CONFIGS, logits_calibrated_models, relative, same_bytes, seeded_ids, source_of
from tokamac.engine.errors import OptionError
from tokamac.quant import awq, gptq, streaming
from tokamac.quant.options import Options
from tokamac.quant.packing import choose
from tokamac.quant.report import StageDone
from tokamac.quant.source import Source, clone, fresh, open_source

IDS = seeded_ids(2, 40)
QWEN2 = {**BASE, "model_type": "qwen2", "tie_word_embeddings": False, "rope_theta": 10000.0}
DEEPSEEK = {
    **BASE, "model_type": "deepseek_v2", "moe_intermediate_size": 64, "n_shared_experts": 1, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1, "kv_lora_rank": 64, "q_lora_rank": None,
    "qk_rope_head_dim": 32, "v_head_dim": 32, "qk_nope_head_dim": 32, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 1.0, "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512, "mscale": 1.0, "mscale_all_dim": 1.0,
        "beta_fast": 32, "beta_slow": 1,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _more_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, config in {"qwen2": QWEN2, "deepseek_v2": DEEPSEEK}.items():
        monkeypatch.setitem(CONFIGS, kind, config)


def packed(source: Source, options: Options, ids: list[list[int]] = IDS) -> Source:
    awq.check(source.config, source.module, options)
    return awq.pack(source, options, choose(source, options), ids, lambda _: None)


def uneven(folder: Path, kind: str) -> Source:
    """A float32 source whose norms make some channels twenty times larger than others, so that scaling has something to gain."""
    source = source_of(folder, kind, dtype="float32")
    file = str(source.folder / "model.safetensors")
    arrays: Any = mx.load(file)
    for name in arrays:
        if "layernorm" in name:
            arrays[name] = arrays[name] * mx.where(mx.arange(arrays[name].size) % 16 == 0, 20.0, 1.0)
    mx.save_safetensors(file, arrays)
    return open_source(source.folder)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen2", "deepseek_v2"])
def test_what_was_scaled_and_what_was_packed_belong_together(tmp_path: Path, kind: str) -> None:
    source = uneven(tmp_path, kind)
    found = packed(source, Options(bits=8, group_size=32, method="awq", embed_bits=16))
    changed = [name for name in found.weights if found.weights[name] is not source.weights[name]]
    norms = [name for name in changed if name.endswith("input_layernorm.weight")]
    assert len(norms) == 2
    assert any(relative(found.weights[name], source.weights[name]) > 0.05 for name in norms), "something was scaled"
    expected = logits_calibrated_models(source, IDS)
    error = relative(logits_calibrated_models(source, IDS, found.weights), expected)
    assert error < 0.02, "the same function, but for 8 bits"
    half = {**found.weights, **{name: source.weights[name] for name in norms}}
    assert relative(logits_calibrated_models(source, IDS, half), expected) > 2 * error, (
        "packed weights alone are another function"
    )


def test_logits_are_nearer_than_rounding_gets_them(tmp_path: Path) -> None:
    source = uneven(tmp_path, "llama")
    found = packed(source, Options(bits=3, group_size=64, method="awq"))
    rounded = dict(fresh(source))
    for path in found.packed:
        words, scales, biases = mx.quantize(rounded[f"{path}.weight"], bits=3, group_size=64)
        rounded[f"{path}.weight"] = mx.dequantize(words, scales, biases, bits=3, group_size=64)
    expected = logits_calibrated_models(source, IDS)
    errors = [
        relative(logits_calibrated_models(source, IDS, weights), expected) for weights in (found.weights, rounded)
    ]
    assert errors[0] < 0.8 * errors[1], errors


def test_arrays_have_the_layout_of_mx_quantize_and_weights_show_them_unpacked(tmp_path: Path) -> None:
    source = source_of(tmp_path, "llama")
    found = packed(source, Options(bits=4, group_size=32, method="awq"))
    for path, each in found.packed.items():
        weight = source.weights[f"{path}.weight"]
        like = mx.quantize(weight, bits=4, group_size=32)
        assert [(a.shape, a.dtype) for a in each.arrays] == [(a.shape, a.dtype) for a in like]
        words, scales, biases = each.arrays
        assert mx.array_equal(
            found.weights[f"{path}.weight"], mx.dequantize(words, scales, biases, bits=4, group_size=32)
        ).item()
    assert all(found.weights[name].dtype == mx.bfloat16 for name in source.weights)


def test_the_blocks_and_the_head_are_packed_and_the_rest_is_untouched(tmp_path: Path) -> None:
    source = source_of(tmp_path, "llama")
    found = packed(source, Options(bits=4, method="awq"))
    assert len(found.packed) == 15
    assert found.packed["lm_head"].error is not None  # by search, weighed by what it was given
    assert list(found.weights) == list(source.weights)
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert found.weights[name] is source.weights[name]
    assert source.packed == {}


def test_what_is_to_be_packed_otherwise_is_scaled_and_left(tmp_path: Path) -> None:
    source = uneven(tmp_path, "llama")
    options = Options(bits=8, group_size=32, method="awq")
    kept = "model.layers.0.mlp.down_proj"
    chosen = {**choose(source, options), kept: None}
    found = awq.pack(source, options, chosen, IDS, lambda _: None)
    assert kept not in found.packed
    assert len(found.packed) == 14
    assert relative(logits_calibrated_models(source, IDS, found.weights), logits_calibrated_models(source, IDS)) < 0.05


@pytest.mark.parametrize("method", [awq, gptq])
def test_progress_is_told_layer_by_layer_nothing_is_printed_and_bytes_are_the_same(tmp_path: Path, method: Any) -> None:
    source, options = source_of(tmp_path, "llama"), Options(bits=4)
    steps: list[StageDone] = []
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        made = [method.pack(source, options, choose(source, options), IDS, steps.append) for _ in range(2)]
    assert steps == [StageDone(method.STAGE, 1, 2), StageDone(method.STAGE, 2, 2)] * 2
    assert (out.getvalue(), err.getvalue()) == ("", "")
    assert same_bytes(*made)


def test_an_architecture_without_rules_is_refused_with_those_that_have_them(tmp_path: Path) -> None:
    source = source_of(tmp_path, "mixtral")
    with pytest.raises(OptionError, match=r"mixtral.*it knows deepseek_v2.*qwen3"):
        awq.check(source.config, source.module, Options(method="awq"))


def test_rows_that_groups_do_not_divide_are_refused(tmp_path: Path) -> None:
    source = source_of(tmp_path, "llama", intermediate_size=192)
    with pytest.raises(OptionError, match=r"mlp\.down_proj has rows of 192 weights"):
        awq.check(source.config, source.module, Options(group_size=128, method="awq"))


def test_rules_that_do_not_fit_the_layers_are_refused(tmp_path: Path) -> None:
    source = source_of(tmp_path, "llama")
    module: Any = clone(source.module)
    del module.layers[0]["input_layernorm"]
    with pytest.raises(OptionError, match="do not fit"):
        awq.check(source.config, module, Options(method="awq"))


@pytest.mark.parametrize("method", [awq, gptq])
def test_tokens_that_the_model_does_not_know_are_refused(tmp_path: Path, method: Any) -> None:
    source, options = source_of(tmp_path, "llama"), Options(bits=4, method="awq")
    with pytest.raises(OptionError, match="tokens that the model does not know"):
        method.pack(source, options, choose(source, options), [[5, 320]], lambda _: None)


@pytest.mark.parametrize(("method", "sequences"), [(awq, 2), (gptq, 8)])
def test_memory_is_predicted_from_above(
    tmp_path: Path, settled_memory: None, monkeypatch: pytest.MonkeyPatch, method: Any, sequences: int
) -> None:
    monkeypatch.setattr(method, "SEQUENCES", sequences)
    source, options = source_of(tmp_path, "llama"), Options(bits=4)
    chosen = choose(source, options)
    predicted = method.peak_bytes(source, options, chosen)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    method.pack(source, options, chosen, seeded_ids(sequences, streaming.LENGTH), lambda _: None)
    taken = mx.get_peak_memory() - before
    assert taken < predicted < 4 * taken


def test_what_the_source_packed_elsewhere_stays_known(tmp_path: Path) -> None:
    source = source_of(tmp_path, "llama")
    before = packed(source, Options(bits=4, method="awq")).packed["model.layers.0.mlp.up_proj"]
    known = replace(source, packed={"lm_head": before})
    assert packed(known, Options(bits=4, method="awq")).packed["lm_head"] is before
