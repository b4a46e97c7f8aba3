"""Conversion: what comes out is what MLX's quantizer gives; as a program calls it; and adapters."""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_overloads, get_type_hints

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm import load as mlx_lm_load
from mlx_lm.utils import load_model as mlx_lm_load_model

from tests.engine.helpers import write_fused, write_model, write_peft
from tests.families import crossed
from tests.quant.models import CONFIGS, QUICKLY, arrays_of, build, difference, make_source, names_in, run
from tokamac.engine import Engine
from tokamac.engine.errors import ConversionError, ModelNotFoundError, ModelUnsupportedError, OptionError
from tokamac.engine.model.config import read_config
from tokamac.engine.model.loader import load_model as engine_load
from tokamac.engine.perf.config_cost import Packing
from tokamac.engine.perf.cost import bits_per_weight, cost_of_folder
from tokamac.engine.text.tokenizer import load_tokenizer
from tokamac.quant import Conversion, Plan, convert, streaming
from tokamac.quant import plan as plan_module
from tokamac.quant.conversion import FINISHED, UNWEIGHED, conversion_key, default_target, settled
from tokamac.quant.options import Options
from tokamac.quant.packing import choose
from tokamac.quant.plan import SEQUENCES, lay_out, make_plan
from tokamac.quant.report import RECORD
from tokamac.quant.search import search
from tokamac.quant.source import fresh, open_adapter, open_source
from tokamac.quant.streaming import Streamed, activation_statistics, calibration_text, streamable_source

TOKENS = mx.array([[5, 4, 3, 2, 1, 7, 7, 9]])


def reference(kind, **options):
    """The same weights through mlx's own quantizer."""
    model, _ = build(kind)
    nn.quantize(model, **options)
    return model


@pytest.mark.parametrize(("kind", "bits"), crossed(CONFIGS, [4, 3, 8]))
def test_logits_equal_those_of_mlx_quantize_through_mlx_lm_and_the_engine(tmp_path, kind, bits):
    source = make_source(tmp_path, kind)
    report = convert(source, tmp_path / "out", bits=bits, method="round")
    expected = reference(kind, group_size=64, bits=bits)(TOKENS)
    loaded, _ = mlx_lm_load(str(tmp_path / "out"))
    assert difference(loaded(TOKENS), expected) == 0
    ours = engine_load(tmp_path / "out", dtype="bfloat16", device="cpu", progress=lambda *_: None).module
    assert difference(ours(TOKENS), expected) == 0
    assert report.quality.quality.top1 > 0


def test_a_rule_of_the_model_holds_where_the_groups_fit(tmp_path):
    source = make_source(tmp_path, "granite")
    plan = convert(source, dry_run=True)
    bits = {tensor.name.split(".")[-2]: tensor.packing.bits for tensor in plan.tensors if tensor.packing}
    assert (bits["o_proj"], bits["down_proj"], bits["q_proj"]) == (8, 8, 4)


@pytest.mark.parametrize("kind", ["llama", "tied"])
@pytest.mark.parametrize("embed_bits", [8, 6, 16])
def test_the_embedding_and_the_head_may_keep_more_bits(tmp_path, kind, embed_bits):
    source = make_source(tmp_path, kind)
    convert(source, tmp_path / "out", embed_bits=embed_bits, method="round")
    quantization = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    entry = False if embed_bits == 16 else {"group_size": 64, "bits": embed_bits, "mode": "affine"}
    assert quantization["model.embed_tokens"] == entry
    assert ("lm_head" in quantization) == (kind == "llama")
    model, _ = build(kind)
    outer = {"group_size": 64, "bits": embed_bits} if embed_bits < 16 else False
    nn.quantize(
        model,
        class_predicate=lambda path, module: (
            hasattr(module, "to_quantized")
            and (outer if path.endswith(("embed_tokens", "lm_head")) else {"group_size": 64, "bits": 4})
        ),
    )
    back, _ = mlx_lm_load_model(tmp_path / "out")
    assert difference(back(TOKENS), model(TOKENS)) == 0


def test_what_the_groups_do_not_divide_stays_whole_and_says_so(tmp_path):
    source = make_source(tmp_path, "llama", intermediate_size=96)
    plan = convert(source, dry_run=True)
    by_name = {tensor.name: tensor for tensor in plan.tensors}
    assert by_name["model.layers.0.mlp.down_proj.weight"].packing is None
    assert plan.config["quantization"]["model.layers.0.mlp.down_proj"] is False
    convert(source, tmp_path / "out", **QUICKLY)
    back, _ = mlx_lm_load_model(tmp_path / "out")
    assert back.model.layers[0].mlp.down_proj.weight.dtype == mx.bfloat16


@pytest.mark.parametrize(
    ("dtype", "scale_bytes", "mlx_type"),
    [(None, 2, mx.bfloat16), ("float16", 2, mx.float16), ("float32", 4, mx.float32)],
)
def test_formula_and_counted_bits_agree(tmp_path, dtype, scale_bytes, mlx_type):
    source = make_source(tmp_path, "tied")
    report = convert(source, tmp_path / "out", dtype=dtype, embed_bits=4, **QUICKLY)
    config = read_config(tmp_path / "out")
    parts = cost_of_folder(tmp_path / "out", config).parts
    for name in ("embedding", "attention", "mlp"):
        assert parts[name].bits_per_weight == bits_per_weight(4, 64, scale_bytes)
    arrays = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert sum(array.nbytes for array in arrays.values()) == report.weight_bytes
    assert {array.dtype for name, array in arrays.items() if not name.endswith("weight")} == {mlx_type}
    assert arrays["model.norm.weight"].dtype == mlx_type
    if dtype:
        assert (config["dtype"], config["torch_dtype"]) == (dtype, dtype)


def test_a_dry_run_tells_the_exact_size_and_writes_nothing(tmp_path):
    source = make_source(tmp_path, "llama")
    plan = convert(source, tmp_path / "out", dry_run=True)
    assert names_in(tmp_path) == {"source"}
    report = convert(source, tmp_path / "out")
    planned = [file for file in (tmp_path / "out").iterdir() if file.name not in ("README.md", "conversion.json")]
    assert sum(file.stat().st_size for file in planned) == plan.output_bytes
    assert (report.weight_bytes, report.bits_per_weight) == (plan.weight_bytes, plan.bits_per_weight)
    assert report.source_bytes == plan.source_bytes == sum(file.stat().st_size for file in source.glob("*.safetensors"))


def test_shards_are_split_indexed_and_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_module, "lay_out", lambda groups: lay_out(groups, limit=50_000))
    source = make_source(tmp_path, "llama")
    plan = convert(source, tmp_path / "out", dry_run=True, method="round")
    convert(source, tmp_path / "out", method="round")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == len(plan.shards) > 2
    assert [file.stat().st_size for file in files] == [shard.file_bytes for shard in plan.shards]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    for file in files:
        assert {name for name, place in index["weight_map"].items() if place == file.name} == set(mx.load(str(file)))
    assert index["metadata"]["total_size"] == plan.weight_bytes
    back, _ = mlx_lm_load_model(tmp_path / "out")
    assert difference(back(TOKENS), reference("llama", group_size=64, bits=4)(TOKENS)) == 0


def test_a_sharded_source_is_read_whole(tmp_path):
    source = make_source(tmp_path, "llama", shards=3)
    convert(source, tmp_path / "out", method="round")
    back, _ = mlx_lm_load_model(tmp_path / "out")
    assert difference(back(TOKENS), reference("llama", group_size=64, bits=4)(TOKENS)) == 0


def test_tokenizer_files_come_along_and_nothing_that_could_run(tmp_path):
    source = make_source(tmp_path, "llama")
    for name in ("modeling_evil.py", "pytorch_model.bin", "training_args.bin", "notes.txt", "optimizer.pt"):
        (source / name).write_text("x")
    for name in ("generation_config.json", "chat_template.jinja", "LICENSE"):
        (source / name).write_text("{}")
    report = convert(source, tmp_path / "out")
    assert names_in(tmp_path / "out") == {
        *(
            "config.json",
            "model.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ),
        *("generation_config.json", "chat_template.jinja", "LICENSE", "README.md", "conversion.json"),
    }
    assert report.notes == ()


def test_a_source_without_a_tokenizer_is_told(tmp_path):
    source = make_source(tmp_path, "llama", tokenizer=False)
    told = convert(source, tmp_path / "out").notes
    assert told == (UNWEIGHED, "the source has no tokenizer files")


def test_by_default_a_text_weighs_errors_and_a_tied_head_counts_as_a_head(tmp_path):
    source = make_source(tmp_path, "tied")
    model = Streamed(streamable_source(open_source(source)))
    ids = streaming.calibration_sequences(
        load_tokenizer(source, read_config(source), ""), calibration_text(None), SEQUENCES
    )
    importance = activation_statistics(model, ids)
    weights = mx.load(str(source / "model.safetensors"))
    convert(source, tmp_path / "out", embed_bits=4)
    found = mx.load(str(tmp_path / "out" / "model.safetensors"))
    for path in ("model.embed_tokens", "model.layers.1.mlp.down_proj"):
        expected = search(weights[f"{path}.weight"], Packing(4, 64, "affine"), importance[path])
        for part, array in zip(("weight", "scales", "biases"), expected, strict=True):
            assert mx.array_equal(found[f"{path}.{part}"], array)
    recorded = json.loads((tmp_path / "out" / RECORD).read_text())["options"]
    assert (recorded["calibration"], recorded["embed_bits"]) == ("shipped", 4)


@pytest.mark.parametrize(
    ("kind", "changes", "options", "bits"),
    [
        ("tied", {"vocab_size": 512}, {}, 8),  # 66k of 393k weights
        ("tied", {"vocab_size": 1024}, {}, 6),
        ("tied", {"vocab_size": 4096}, {}, 5),
        ("llama", {"vocab_size": 65536}, {}, None),  # nearly all of it
        ("tied", {"vocab_size": 1024}, {"bits": 8}, None),
        ("tied", {"vocab_size": 1024}, {"mode": "mxfp4"}, 6),
        ("tied", {"vocab_size": 1024}, {"method": "round"}, None),
        ("tied", {"vocab_size": 1024}, {"embed_bits": 3}, 3),
    ],
)
def test_embedding_and_head_get_more_bits_while_they_cost_a_fifth_at_most(tmp_path, kind, changes, options, bits):
    source = open_source(make_source(tmp_path, kind, **changes))
    given = Options(**options)
    assert settled(source, given)[0].embed_bits == bits
    if bits is not None and given.embed_bits is None:
        sizes = [
            make_plan(source, each, choose(source, each)).weight_bytes
            for each in (replace(given, embed_bits=each) for each in (given.packed_bits, bits))
        ]
        assert sizes[0] < sizes[1] <= 1.2 * sizes[0]


def test_the_source_is_never_written(tmp_path):
    source = make_source(tmp_path, "llama")

    def state():
        return {
            file.name: (hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_mtime_ns)
            for file in source.iterdir()
        }

    before = state()
    convert(source, tmp_path / "out")
    assert state() == before


def test_code_references_and_private_names_leave_the_config(tmp_path):
    source = make_source(tmp_path, "llama", auto_map={"AutoModel": "evil.Model"}, _name_or_path="/home/someone")
    convert(source, tmp_path / "out", **QUICKLY)
    assert not {"auto_map", "_name_or_path", "model_file"} & set(
        json.loads((tmp_path / "out" / "config.json").read_text())
    )


def test_two_conversions_give_the_same_bytes(tmp_path):
    source = make_source(tmp_path, "gemma3")
    for name in ("a", "b"):
        convert(source, tmp_path / name)
    assert names_in(tmp_path / "a") == names_in(tmp_path / "b")
    for name in names_in(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(
    ("layers", "asked"),
    [
        (12, {"method": "round", "verify": False}), (12, {"method": "round"}), (2, {}),
        (2, {"mode": "nvfp4", "verify": False}), (1, {"calibration": "shipped", "verify": False}),
    ],
    ids=str,
)  # fmt: skip
def test_memory_stays_within_the_plan_and_that_of_a_few_tensors(tmp_path, layers, asked):
    source = make_source(tmp_path, "llama", num_hidden_layers=layers, hidden_size=256, intermediate_size=512)
    plan = convert(source, dry_run=True, **asked)
    report = convert(source, tmp_path / "out", **asked)
    assert report.peak_memory_bytes <= plan.peak_memory_bytes
    if asked == {"method": "round", "verify": False}:
        assert report.peak_memory_bytes < 0.25 * report.source_bytes


def test_progress_names_every_tensor_in_order(tmp_path):
    source, seen = make_source(tmp_path, "llama"), []
    report = convert(source, tmp_path / "out", progress=seen.append, verify=False, calibration="none")
    names = [name for name, _ in tree_flatten(build("llama")[0].parameters())]
    assert [step.name for step in seen] == names
    assert [step.done for step in seen] == list(range(1, len(names) + 1))
    assert {step.total for step in seen} == {len(names)}
    assert seen[-1].done_bytes == seen[-1].total_bytes
    assert report.seconds > 0


@pytest.mark.parametrize(
    "wrong",
    [{"bits": 7}, {"bits": 1}, {"group_size": 48}, {"dtype": "int8"}, {"embed_bits": 7}],
    ids=lambda wrong: str(wrong),
)
def test_options_that_make_no_sense_are_refused_first(tmp_path, wrong):
    with pytest.raises(OptionError):
        convert(tmp_path / "nowhere", **wrong)


def test_default_names(tmp_path):
    (tmp_path / "Tiny").mkdir()
    assert default_target(tmp_path / "Tiny", Options()) == Path("Tiny-4bit")
    assert default_target("someone/Tiny", Options(bits=8, group_size=32)) == Path("Tiny-8bit-g32")


def test_the_report_has_every_field_of_the_contract(tmp_path):
    plain = json.loads(json.dumps(convert(make_source(tmp_path, "tied"), tmp_path / "out").to_json()))
    assert {
        "path",
        "weight_bytes",
        "bits_per_weight",
        "source_bytes",
        "seconds",
        "peak_memory_bytes",
        "quality",
    } <= set(plain)


def test_importing_the_package_loads_no_mlx():
    code = "import sys, tokamac.quant, tokamac.quant.options; sys.exit('mlx.core' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Conversion as a program calls it: beside other MLX work, with options of any kind, and typed.


def test_the_peak_is_the_conversions_own(tmp_path: Any, settled_memory: None) -> None:
    source = make_source(tmp_path, "llama")
    alone = run(source, tmp_path / "alone").peak_memory_bytes
    held = mx.zeros((64 << 20,), dtype=mx.uint8)  # as an engine's weights would be
    mx.eval(held)
    beside = run(source, tmp_path / "beside").peak_memory_bytes
    assert held.nbytes == 64 << 20
    assert 0 < alone < 16 << 20
    assert abs(beside - alone) < 1 << 20


@pytest.mark.parametrize("fails", [False, True])
def test_the_pool_of_freed_buffers_is_as_it_was_afterwards(tmp_path: Any, fails: bool) -> None:
    source = make_source(tmp_path, "llama")
    before = mx.set_cache_limit(12_345_678)
    seen = []

    def progress(_: object) -> None:
        seen.append(mx.set_cache_limit(0))
        if fails:
            raise KeyboardInterrupt

    try:
        if fails:
            with pytest.raises(KeyboardInterrupt):
                convert(source, tmp_path / "out", method="round", verify=False, progress=progress)
        else:
            convert(source, tmp_path / "out", method="round", verify=False, progress=progress)
        assert set(seen) == {0}
        assert mx.set_cache_limit(before) == 12_345_678
    finally:
        mx.set_cache_limit(before)


@pytest.mark.parametrize(
    "asked", [{"bits": 4.0}, {"bits": "4"}, {"mode": None}, {"target_bpw": "4"}, {"group_size": 64.0}], ids=str
)
def test_options_of_the_wrong_kind_are_refused_before_any_work(tmp_path: Any, asked: dict[str, Any]) -> None:
    source = make_source(tmp_path, "llama")
    with pytest.raises(OptionError) as caught:
        convert(source, tmp_path / "out", **asked)
    assert caught.value.hint
    assert names_in(tmp_path) == {"source"}


@pytest.mark.parametrize(
    ("written", "meant"),
    [("bit", "bits"), ("groupsize", "group_size"), ("over_write", "overwrite"), ("Recipe", "recipe")],
)
def test_an_option_that_there_is_not_names_the_one_that_was_meant(tmp_path: Any, written: str, meant: str) -> None:
    with pytest.raises(OptionError, match=f"convert has no option '{written}'") as caught:
        convert(tmp_path / "nowhere", **{written: 4})
    assert caught.value.hint == f"Did you mean {meant}?"
    with pytest.raises(OptionError) as caught:
        convert(tmp_path / "nowhere", zzz=4)  # type: ignore[call-overload]
    assert "target_bpw" in caught.value.hint


def test_the_folder_that_was_made_is_a_path_and_in_json_a_text(tmp_path: Any) -> None:
    made = run(make_source(tmp_path, "llama"), tmp_path / "out")
    assert (made.path / "config.json").is_file()
    assert json.loads(json.dumps(made.to_json()))["path"] == str(tmp_path / "out") == os.fspath(made.path)


def test_what_stands_there_is_replaced_by_a_flag_or_an_argument(tmp_path: Any) -> None:
    source = make_source(tmp_path, "llama")
    run(source, tmp_path / "out")
    with pytest.raises(ConversionError) as caught:
        convert(source, tmp_path / "out")
    assert "overwrite=True" in caught.value.hint
    assert "--overwrite" in caught.value.hint


def test_paths_that_can_not_be_are_refused(tmp_path: Any) -> None:
    source = make_source(tmp_path, "llama")
    with pytest.raises(OptionError, match=r"the target .* holds a NUL character"):
        convert(source, "a\0b")
    with pytest.raises(OptionError, match=r"the source .* holds a NUL character"):
        convert("a\0b", tmp_path / "out")
    with pytest.raises(OptionError, match="the source is a NoneType"):
        convert(None, tmp_path / "out")  # type: ignore[call-overload]
    with pytest.raises(OptionError, match="the target is a int"):
        convert(source, 5)  # type: ignore[call-overload]
    with pytest.raises(ModelNotFoundError):
        convert(tmp_path / "nothing", tmp_path / "out")


def test_a_plan_may_be_asked_for_by_a_variable() -> None:
    by_type = {get_type_hints(each)["dry_run"]: get_type_hints(each)["return"] for each in get_overloads(convert)}
    assert by_type[bool] == Conversion | Plan
    assert len(by_type) == 3


@pytest.mark.parametrize(
    "asked",
    [{"mode": "mxfp4", "bits": 8}, {"mode": "mxfp8", "method": "search"}, {"bits": 4, "target_bpw": 4.5}],
    ids=str,
)
def test_hints_name_no_flag_alone(tmp_path: Any, asked: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as caught:
        convert(tmp_path, tmp_path / "out", **asked)
    assert "--" not in caught.value.one_line()


# An adapter that a conversion adds to the weights is as if it stood beside them; and models that are converted
# unchecked.

IDS = [5, 60, 7, 120, 9, 33, 250, 8, 41, 77]


def logprobs(folder: Path, adapter: Path | None = None) -> np.ndarray:
    with Engine.load(folder, prompt_cache=None, adapter=adapter, cpu_exact=True) as engine:
        return np.array(engine.logprobs(IDS))


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("bits", [None, 4])
def test_unpacked_it_computes_what_the_adapter_beside_does(tmp_path: Path, bits: int | None, dora: bool) -> None:
    source = write_model(tmp_path / "source", bits=bits)
    adapter = write_peft(tmp_path / "adapter", write_model(tmp_path / "plain"), dora=dora)
    convert(source, tmp_path / "out", dequantize=True, dtype="float32", adapter=adapter, verify=False)
    beside = logprobs(source, adapter)
    assert np.abs(beside - logprobs(source)).max() > 0.1
    assert np.allclose(logprobs(tmp_path / "out"), beside, atol=3e-4)


def test_packed_it_is_what_the_changed_weights_are_packed_to(tmp_path: Path) -> None:
    plain = write_model(tmp_path / "plain")
    adapter = write_peft(tmp_path / "adapter", plain)
    by_hand = write_fused(tmp_path / "by_hand", plain, adapter)
    how = {"bits": 4, "group_size": 32, "method": "round", "verify": False}
    convert(plain, tmp_path / "ours", adapter=adapter, **how)
    convert(by_hand, tmp_path / "theirs", **how)
    ours, theirs = arrays_of(tmp_path / "ours"), arrays_of(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name, words in ours.items():
        if words.dtype != mx.uint32:
            assert np.allclose(np.array(words), np.array(theirs[name]), atol=1e-5), name


def test_what_was_packed_and_is_not_changed_is_taken_over_and_the_rest_packed_again(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", bits=4)
    adapter = write_peft(tmp_path / "adapter", write_model(tmp_path / "plain"))
    convert(source, tmp_path / "out", bits=4, group_size=32, method="round", adapter=adapter, verify=False)
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    again = {row["name"] for row in record["tensors"] if row["packing"] and not row["taken_over"]}
    assert again == {
        f"model.layers.{layer}.{name}.weight"
        for layer in (0, 1)
        for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    }


def test_it_is_compared_with_its_source_with_the_adapter_and_says_what_was_added(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source")
    adapter = write_peft(tmp_path / "letters", source)
    report = convert(source, tmp_path / "out", bits=8, group_size=32, adapter=adapter)
    assert report.quality.quality.kl < 0.01
    assert any("adapter letters: 6 matrices of rank 4" in note for note in report.notes)
    text = (tmp_path / "out" / "conversion.json").read_text()
    assert json.loads(text)["options"]["adapter"] == {"name": "letters", "digest": open_adapter(adapter).digest}
    assert str(tmp_path) not in text
    assert "`letters`" in (tmp_path / "out" / "README.md").read_text()


def test_an_unfinished_conversion_with_another_adapter_is_another(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source")
    one, other = (open_adapter(write_peft(tmp_path / f"{seed}", source, seed=seed)) for seed in (1, 2))
    keys = {conversion_key(source, Options(), adapter) for adapter in (one, other, None)}
    assert len(keys) == 3


def test_a_finished_conversion_is_another_with_an_adapter_and_the_same_with_the_same(tmp_path: Path) -> None:
    source, out = write_model(tmp_path / "source"), tmp_path / "out"
    one, other = (write_peft(tmp_path / f"{seed}", source, seed=seed) for seed in (1, 2))
    convert(source, out, **QUICKLY)
    with pytest.raises(ConversionError, match=r"there already|not empty|exists"):
        convert(source, out, adapter=one, **QUICKLY)
    convert(source, out, adapter=one, **QUICKLY, overwrite=True)
    assert FINISHED in convert(source, out, adapter=one, **QUICKLY).notes
    for adapter in (None, other):
        with pytest.raises(ConversionError):
            convert(source, out, adapter=adapter, **QUICKLY)


def test_weights_read_anew_have_the_adapter_too(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source")
    opened = open_source(source, adapter=open_adapter(write_peft(tmp_path / "adapter", source)))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert mx.array_equal(fresh(opened)[name], opened.weights[name])
    assert not mx.array_equal(fresh(opened)[name], fresh(open_source(source))[name])


def test_a_doubtful_model_is_converted_unchecked_and_the_notes_say_what_is_doubted(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", logits_scaling=2.0)
    with pytest.raises(ModelUnsupportedError, match="logits_scaling") as caught:
        convert(source, tmp_path / "out")
    assert "--unchecked" in caught.value.hint
    report = convert(source, tmp_path / "out", bits=8, group_size=32, unchecked=True)
    assert any(note.startswith("unchecked: config.json sets logits_scaling") for note in report.notes)
    assert report.quality.quality is not None
    with pytest.raises(ModelUnsupportedError, match="logits_scaling"):
        Engine.load(tmp_path / "out", prompt_cache=None)
