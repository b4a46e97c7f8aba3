"""What a model costs: both ways of counting agree, and equal what is known of published models."""

import csv
import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from tokamac.engine.model.cpu import unpack
from tokamac.engine.perf.cost import Tensor, bits_per_weight, cost_of_folder, cost_of_model, cost_of_tensors

LLAMA = {
    "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 320, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA = {
    "model_type": "gemma3_text", "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256, "num_attention_heads": 4,
    "head_dim": 64, "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "vocab_size": 320, "query_pre_attn_scalar": 64,
    "sliding_window_pattern": 2,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "vocab_size": 320,
}  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "rms_norm_eps": 1e-5, "vocab_size": 320, "tie_word_embeddings": True,
    "rope_theta": 10000.0, "max_position_embeddings": 512, "norm_topk_prob": True,
}  # fmt: skip
CONFIGS = {
    "llama": LLAMA,
    "tied": {**LLAMA, "tie_word_embeddings": True},
    "gemma": GEMMA,
    "mixtral": {**MIXTRAL, "tie_word_embeddings": False},
    "qwen3_moe": QWEN3_MOE,
}


def build(config, *, quantized=None, dtype=mx.bfloat16):
    model_class, args_class = _get_classes(config)
    mx.random.seed(0)
    model = model_class(args_class.from_dict(config))
    model.set_dtype(dtype)
    config = dict(config)
    if quantized:
        nn.quantize(model, class_predicate=lambda path, module: quantized if hasattr(module, "to_quantized") else False)
        config["quantization"] = quantized
    return model, config


def save(folder: Path, model, config):
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))


@pytest.mark.parametrize("quantized", [None, {"group_size": 64, "bits": 4}, {"group_size": 32, "bits": 3}], ids=str)
@pytest.mark.parametrize("kind", CONFIGS)
def test_headers_and_loaded_arrays_agree(tmp_path, kind, quantized):
    model, config = build(CONFIGS[kind], quantized=quantized)
    save(tmp_path, model, config)
    assert cost_of_folder(tmp_path, config) == cost_of_model(model, config)


@pytest.mark.parametrize("kind", CONFIGS)
def test_parameters_do_not_depend_on_packing(kind):
    dense, config = build(CONFIGS[kind])
    packed, packed_config = build(CONFIGS[kind], quantized={"group_size": 64, "bits": 4})
    counted = sum(array.size for _, array in tree_flatten(dense.parameters()))
    assert cost_of_model(dense, config).parameters == counted
    assert cost_of_model(packed, packed_config).parameters == counted


@pytest.mark.parametrize("kind", CONFIGS)
def test_files_predict_what_a_plain_cpu_holds(tmp_path, kind):
    model, config = build(CONFIGS[kind], quantized={"group_size": 64, "bits": 4})
    save(tmp_path, model, config)
    model.set_dtype(mx.float32)
    assert cost_of_folder(tmp_path, config, form="float32") == cost_of_model(model, config)
    unpack(model)
    assert cost_of_folder(tmp_path, config, form="unpacked") == cost_of_model(model, config)


def test_an_untied_embedding_is_not_read_and_a_tied_one_is_read_once():
    untied, config = build(CONFIGS["llama"])
    cost = cost_of_model(untied, config)
    table = 320 * 128 * 2
    assert cost.weight_bytes_per_token == cost.weight_bytes - table
    assert cost.parts["head"].nbytes == cost.parts["embedding"].nbytes == table
    tied, config = build(CONFIGS["tied"])
    cost = cost_of_model(tied, config)
    assert cost.weight_bytes_per_token == cost.weight_bytes
    assert cost.parts["head"].nbytes == 0


def test_only_the_active_experts_are_read():
    model, config = build(CONFIGS["mixtral"])
    cost = cost_of_model(model, config)
    experts = 2 * 4 * 3 * 128 * 64 * 2  # layers, experts, matrices, weights, bytes
    assert cost.parts["experts"].nbytes == experts
    assert cost.weight_bytes_per_token == cost.weight_bytes - cost.parts["embedding"].nbytes - experts // 2


def test_a_mixture_that_does_not_say_how_many_experts_are_active_stays_unknown():
    model, config = build(CONFIGS["mixtral"])
    del config["num_experts_per_tok"]
    cost = cost_of_model(model, config)
    assert cost.weight_bytes_per_token is None
    assert cost.active_parameters is None
    assert cost.weight_bytes > 0


def test_expert_names_of_the_hub_count_like_stacked_ones(tmp_path):
    model, config = build(CONFIGS["mixtral"])
    tensors = {}
    for name, array in tree_flatten(model.parameters()):
        if ".switch_mlp." not in name:
            tensors[name] = array
            continue
        for old, new in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
            for expert in range(4):
                if old in name:
                    tensors[name.replace(f"switch_mlp.{old}", f"experts.{expert}.{new}")] = array[expert]
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    assert cost_of_folder(tmp_path, config) == cost_of_model(model, config)


def test_a_tied_checkpoint_that_stores_its_head_too_counts_it_once(tmp_path):
    model, config = build(CONFIGS["tied"])
    tensors = dict(tree_flatten(model.parameters()))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    assert cost_of_folder(tmp_path, config) == cost_of_model(model, config)


@pytest.mark.parametrize(
    ("bits", "group", "scale_bytes", "answer"), [(4, 64, 2, 4.5), (4, 32, 2, 5.0), (4, 64, 4, 5.0), (4, 32, 4, 6.0)]
)
def test_bits_per_weight_of_affine_groups(bits, group, scale_bytes, answer):
    assert bits_per_weight(bits, group, scale_bytes) == answer


def test_formula_equals_counted_bits(tmp_path):
    model, config = build(LLAMA, quantized={"group_size": 64, "bits": 4})
    parts = cost_of_model(model, config).parts
    assert {parts[name].bits_per_weight for name in ("embedding", "attention", "mlp", "head")} == {
        bits_per_weight(4, 64)
    }
    assert parts["norms and other"].bits_per_weight == 16


@pytest.mark.parametrize(("parameters", "bits", "gigabytes"), [(7e9, 16, 14), (7e9, 8, 7), (7e9, 4, 3.5)])
def test_weights_of_a_7b(parameters, bits, gigabytes):
    tensor = Tensor("model.layers.0.mlp.up_proj.weight", "U8", (int(parameters),), int(parameters * bits / 8))
    assert cost_of_tensors([tensor], {}).weight_bytes / 1e9 == gigabytes


def published(row):
    """Yield the tensors of a published dense model, or of a mixture, as an MLX 4-bit group-64 checkpoint has them."""
    number = {
        key: int(row[key]) for key in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "intermediate")
    }
    hidden, heads, kv = number["hidden"], number["heads"] * number["head_dim"], number["kv_heads"] * number["head_dim"]

    def packed(name, *shape):
        yield Tensor(f"{name}.weight", "U32", (*shape[:-1], shape[-1] // 8), _product(shape) // 2)
        for leaf in ("scales", "biases"):
            yield Tensor(f"{name}.{leaf}", "BF16", (*shape[:-1], shape[-1] // 64), _product(shape) // 32)

    def plain(name, *shape):
        yield Tensor(name, "BF16", shape, 2 * _product(shape))

    yield from packed("model.embed_tokens", number["vocab"], hidden)
    if row["tied_embeddings"] == "no":
        yield from packed("lm_head", number["vocab"], hidden)
    yield from plain("model.norm.weight", hidden)
    for layer in range(number["layers"]):
        prefix = f"model.layers.{layer}"
        for name, size in (("q", heads), ("k", kv), ("v", kv)):
            yield from packed(f"{prefix}.self_attn.{name}_proj", size, hidden)
            if row["model"].startswith("Qwen2.5"):
                yield from plain(f"{prefix}.self_attn.{name}_proj.bias", size)
        yield from packed(f"{prefix}.self_attn.o_proj", hidden, heads)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield from plain(f"{prefix}.{name}.weight", hidden)
        if row["model"].startswith("Qwen3"):
            for name in ("q_norm", "k_norm"):
                yield from plain(f"{prefix}.self_attn.{name}.weight", number["head_dim"])
        if "experts" not in row["moe"]:
            for name, shape in (("gate", (0, 1)), ("up", (0, 1)), ("down", (1, 0))):
                sizes = (number["intermediate"], hidden)
                yield from packed(f"{prefix}.mlp.{name}_proj", *(sizes[i] for i in shape))
        else:
            yield from packed(f"{prefix}.mlp.gate", 128, hidden)
            for name, shape in (("gate", (768, hidden)), ("up", (768, hidden)), ("down", (hidden, 768))):
                yield from packed(f"{prefix}.mlp.switch_mlp.{name}_proj", 128, *shape)


def _product(shape):
    product = 1
    for size in shape:
        product *= size
    return product


MODELS = list(csv.DictReader((Path(__file__).parent / "models.csv").read_text(encoding="utf-8").splitlines()))
COVERED = [row for row in MODELS if row["model"].startswith(("Llama", "Qwen", "Mistral"))]


@pytest.mark.parametrize("row", COVERED, ids=lambda row: row["model"])
def test_published_shapes_cost_what_is_known(row):
    config = {"num_experts": 128, "num_experts_per_tok": 8} if "experts" in row["moe"] else {}
    cost = cost_of_tensors(published(row), config)
    assert cost.parameters == int(row["params_total_computed"])
    assert cost.weight_bytes == pytest.approx(int(row["mlx_4bit_g64_bytes_computed"]), rel=2e-3)
    assert cost.weight_bytes_per_token == pytest.approx(int(row["decode_bytes_per_token_4bit_computed"]), rel=2e-3)
    if row["repo_bytes_published"]:  # the repository holds the tokenizer too
        assert cost.weight_bytes == pytest.approx(int(row["repo_bytes_published"]), rel=0.05)
