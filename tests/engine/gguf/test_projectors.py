"""A vision projector beside a GGUF file: the model sees as the one that it was made of."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map

from tests.engine.gguf import written
from tests.engine.inside import runner_of
from tests.engine.vision.test_families import build, logprobs, messages
from tests.golden.weights import tensor
from tokamac.engine import Engine, Sampling
from tokamac.engine.errors import OptionError
from tokamac.engine.metrics import Recorder

pytest.importorskip("PIL")
SEES = re.compile(r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|connector)\.")
PIXELS = {"image_min_pixels": 4096, "image_max_pixels": 20_000}
# A golden case: llama.cpp's names of its language model and projector, and keys that these alone have.
KINDS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("gemma3", "gemma3", {"rope.freq_base_swa": 10_000.0, "attention.sliding_window_pattern": 2},
               {"projector.scale_factor": 2}),
    "idefics3": ("llama", "idefics3", {}, {"projector.scale_factor": 2, "preproc_image_size": 168}),
    "internvl": ("qwen2", "internvl", {}, {"projector.scale_factor": 2, "image_size": 56, "patch_size": 14}),
    "internvl_qwen3": ("qwen3", "internvl", {}, {"projector.scale_factor": 2, "image_size": 56, "patch_size": 14}),
    "lfm2_vl": ("lfm2", "lfm2", {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3, "feed_forward_length": 256},
                {"projector.scale_factor": 2, "image_size": 256}),
    "mistral3": ("llama", "pixtral", {}, {"spatial_merge_size": 2, "image_size": 100}),
    "pixtral": ("llama", "pixtral", {}, {"image_size": 80}),
    "qwen2_5_vl": ("qwen2vl", "qwen2.5vl_merger", {"rope.dimension_sections": [2, 3, 3, 0]},
                   {"n_wa_pattern": 2, "window_size": 56, "image_size": 560, **PIXELS, "image_min_pixels": 3136}),
    "qwen3_vl": ("qwen3vl", "qwen3vl_merger", {"rope.dimension_sections": [4, 2, 2, 0]},
                 {"is_deepstack_layers": [True, False, True], "spatial_merge_size": 2, "image_size": 80, **PIXELS}),
}  # fmt: skip


def language_part(stored: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return what ``written`` writes a language model and its tokenizer of."""
    told = json.loads((folder / "tokenizer.json").read_text())
    special = {each["content"] for each in told["added_tokens"]}
    tokens = sorted(told["model"]["vocab"], key=told["model"]["vocab"].__getitem__)
    tokens += [each["content"] for each in told["added_tokens"] if each["id"] >= len(tokens)]
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    vocabulary = {"tokens": tokens, "merges": [" ".join(each) for each in told["model"]["merges"]], "eos": 1}
    vocabulary |= {"types": [3 if token in special else 1 for token in tokens], "template": template}
    shapes = {name: shape for name, shape in stored["shapes"].items() if not SEES.match(name)}
    return {"stored": (stored["config"], stored["seed"], shapes), "vocabulary": vocabulary}


def write_projector(path: Path, stored: dict[str, Any], kind: str, more: dict[str, Any]) -> None:
    """Write the part that sees as llama.cpp's converter does, by the package's table of names."""
    vision, names = stored["config"]["vision_config"], get_tensor_name_map(MODEL_ARCH.MMPROJ, 8)
    writer = GGUFWriter(path, "clip")
    qwen = kind.startswith("qwen")
    layers, heads = ("depth", "num_heads") if qwen else ("num_hidden_layers", "num_attention_heads")
    keys = {"embedding_length": vision["hidden_size"], "feed_forward_length": vision["intermediate_size"]}
    keys |= {"block_count": vision[layers], "attention.head_count": vision[heads], "patch_size": vision["patch_size"]}
    keys |= {"image_size": vision.get("image_size"), "image_mean": stored["settings"]["image_mean"]} | more
    for key, value in {**keys, "image_std": stored["settings"]["image_std"]}.items():
        written.add_key(writer, f"clip.vision.{key}", value)
    writer.add_clip_projector_type(kind)
    for name, shape in stored["shapes"].items():
        if SEES.match(name):
            values = tensor(stored["seed"], name, tuple(shape), stored["config"])
            for known, array in parts(name.removeprefix("model."), values, names, vision):
                writer.add_tensor(known, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def parts(name: str, values: Any, names: Any, vision: dict[str, Any]) -> Any:
    if "mm_input_projection_weight" in name or "soft_emb_norm" in name:
        name, values = name.replace("_weight", ".weight"), values + ("norm" in name)
    name = re.sub(r"visual\.merger\.linear_fc([12])", lambda at: f"visual.merger.mlp.{2 * int(at[1]) - 2}", name)
    name = name.replace("merger.norm", "merger.ln_q")
    if (deep := re.match(r"visual\.deepstack_merger_list\.(\d+)\.(.+)", name)) is not None:
        yield f"v.deepstack.{vision['deepstack_visual_indexes'][int(deep[1])]}.{deep[2].replace('linear_', '')}", values
        return
    name = re.sub(r"vision_tower\.(vision_model\.)?", "vision_tower.vision_model.", name)
    if "layer_scale_init_value" in vision:  # InternVL's, by its first names
        name = re.sub(r"(lambda_\d|position_embeddings)$", r"\1.weight", name)
        for number, part in ((0, "layer_norm"), (1, "linear_1"), (3, "linear_2")):
            name = name.replace(f"multi_modal_projector.{part}", f"mlp1.{number}")
        values = np.squeeze(values)
    if vision.get("model_type") == "pixtral" and re.search("[qk]_proj", name):
        heads = values.reshape(vision["num_attention_heads"], 2, -1, values.shape[1])
        values = heads.swapaxes(1, 2).reshape(values.shape)
    forms = (name, f"model.{name}", name.replace(".vision_model.", "."), "model." + name.replace(".vision_model.", "."))
    known = next(found for form in forms if (found := names.get_name(form, try_suffixes=(".weight", ".bias"))))
    if "patch_embd.weight" in known and values.ndim == 5:
        yield known, values[:, :, 0]
        yield f"{known}.1", values[:, :, 1]
    elif "patch_embd.weight" in known and values.ndim == 2:  # whose colours are last
        side = vision["patch_size"]
        yield known, np.moveaxis(values.reshape(-1, side, side, 3), -1, 1)
    elif "attn_qkv" in known and "window_size" in vision:
        for part, each in zip("qkv", np.split(values, 3), strict=True):
            yield known.replace("attn_qkv", f"attn_{part}"), each
    else:
        yield known, values


@pytest.mark.parametrize("case", KINDS)
def test_it_sees_as_the_model_that_it_was_made_of(case: str, tmp_path: Path) -> None:
    architecture, kind, keys, more = KINDS[case]
    stored = build(case, tmp_path / "original")
    if case == "gemma3":  # a file tells no scale but that of heads
        stored["config"]["text_config"]["query_pre_attn_scalar"] = stored["config"]["text_config"]["head_dim"]
        (tmp_path / "original" / "config.json").write_text(json.dumps(stored["config"]))
    if case in ("lfm2_vl", "internvl", "internvl_qwen3"):  # tiles and budgets are not told: those that all of them have
        told = ("encoder_patch_size", "image_mean", "image_std", "resample", "size")
        own = {key: stored["settings"][key] for key in told if key in stored["settings"]}
        (tmp_path / "original" / "preprocessor_config.json").write_text(json.dumps(own))
    there = tmp_path / "there"
    there.mkdir()
    written.write(
        there / "model.gguf",
        {"architecture": architecture, "keys": keys, **language_part(stored, tmp_path / "original")},
    )
    with Engine.load(there, dtype="float32") as engine, pytest.raises(OptionError, match="no vision projector"):
        engine.ask(messages("one"))
    write_projector(there / "mmproj-model.gguf", stored, kind, more)
    found = []
    for folder in (tmp_path / "original", there):
        with Engine.load(folder, dtype="float32", prompt_cache=None) as engine:
            asked = {
                prompt: runner_of(engine).request(messages(prompt), Sampling(), Recorder())
                for prompt in ("none", "one", "two")
            }
            rows = {
                prompt: engine.run(lambda _, request=request: logprobs(engine, request, 10_000))
                for prompt, request in asked.items()
            }
            found.append(({prompt: [max(each, -1) for each in request.ids] for prompt, request in asked.items()}, rows))
    assert found[0][0] == found[1][0]
    for prompt, rows in found[0][1].items():
        np.testing.assert_allclose(rows, found[1][1][prompt], atol=1e-3, err_msg=prompt)
