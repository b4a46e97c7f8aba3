"""Adapters: the same log-probabilities as weights that were changed by hand, over floats and over packed weights; or a refusal."""

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_map

from tests.engine.adapter_files import ALPHA, RANK, as_mlx, shapes_of, write_fused, write_peft
from tests.engine.seeded import write_model
from tokamac.engine import Engine, Finished, PromptCacheSpec, Sampling
from tokamac.engine.errors import (
    MemoryLimitError,
    ModelDamagedError,
    ModelError,
    ModelNotFoundError,
    ModelUnsupportedError,
    OptionError,
)
from tokamac.engine.model.adapters import attach, changes_of, read_adapter

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
def test_packed_weights_stay_packed_and_take_the_change_beside_them(
    tmp_path: Path, dora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokamac.engine.model.cpu.MEMORY_SHARE", 0)  # else a CPU unpacks them
    packed = write_model(tmp_path / "packed", bits=4)
    plain = write_model(tmp_path / "plain")
    peft = write_peft(tmp_path / "peft", plain, dora=dora)
    unpacked = _unpacked(tmp_path / "unpacked", packed, plain)
    with Engine.load(packed, prompt_cache=None, adapter=peft) as engine:
        module = engine.between(lambda: engine._runner.runtime.model)
        kinds = {type(each) for each in module.modules()}
        assert nn.QuantizedLinear in kinds
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
        bare = engine._runner.runtime
        assert engine.spec.adapter is None
        before, products, kernels = bare.work.weight_bytes(), bare.work.prefill_parameters, bare.work.launches
        weights = bare.shape.weights
    with Engine.load(tiny, prompt_cache=None, adapter=str(peft)) as engine:
        work = engine._runner.runtime.work
        assert engine.spec.adapter == str(peft)
        assert engine.spec.adapter_digest == read_adapter(peft, "x").digest
        assert any(f"6 matrices of rank {RANK}, trained on org/base" in note for note in engine.spec.notes)
        assert work.weight_bytes() == before + 4 * numbers
        assert work.prefill_parameters == products + numbers
        assert work.launches == kernels + 6 * 4
        assert engine._runner.runtime.shape.weights == weights + 4 * numbers


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
        assert isinstance(end, Finished)
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
        ({"r": 8}, r"lora_A\.weight has shape .*the rank is 8"),
        ({"use_dora": True}, "says DoRA"),
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"init_lora_weights": "pissa_niter_16"}, "pissa"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"alpha_pattern": {"(a+)+$": 2}}, "not tried"),
    ],
)
def test_a_config_that_says_something_else_is_refused(
    tmp_path: Path, tiny: Path, config: dict[str, Any], what: str
) -> None:
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
    monkeypatch.setattr(memory, "array_budget", lambda: room)
    check_fits(tiny, Spec(), device_kind())
    assert more > room
    with pytest.raises(MemoryLimitError):
        check_fits(tiny, Spec(), device_kind(), more=more)
    with pytest.raises(MemoryLimitError):
        Engine.load(tiny, prompt_cache=None, adapter=large)
