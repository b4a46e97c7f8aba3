"""Golden values of models that see: ids, pixels and log-probabilities as Hugging Face transformers computes them.

    pip install -e '.[golden,vision]' torchvision && python -m tests.golden.vision [CASE…]
    python -m tests.golden.vision --published FOLDER    of ORG__NAME.json, published configs

For each case of ``vision/cases.json`` it writes ``vision/<case>.json`` (config, settings, shapes, ids) and ``<case>.npz``
(some of each picture's pixels, log-probabilities of each prompt's last tokens). Image processors are the Pillow ones.
"""

import importlib
import importlib.util
import io
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np

HERE = Path(__file__).parent / "vision"
SHOWN, ROWS = 400, 10  # numbers of a picture's pixels, last positions of a prompt that are kept
TURNS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
# What each prompt shows, and says after it; replies are in between.
PROMPTS: dict[str, list[tuple[tuple[str, ...], str]]] = {
    "none": [((), "what is it?")],
    "one": [(("photo",), "what is it?")],
    "two": [(("alpha",), "the first"), (("turned", "photo"), "and these?")],
    "odd": [(("grey", "palette", "cmyk"), "which?")],
}
SIZES = {
    "photo": (120, 80),
    "alpha": (37, 91),
    "turned": (60, 44),
    "grey": (50, 50),
    "palette": (64, 40),
    "cmyk": (90, 31),
}
# config: of the class; ids: names of tokens there; named: tokens of the tokenizer; settings: of the image processor.
CASES: dict[str, dict[str, Any]] = json.loads((HERE / "cases.json").read_text())


def picture(kind: str) -> bytes:
    """Return a file: waves and noise, the same for the same kind."""
    from PIL import Image

    width, height = SIZES[kind]
    noise = np.random.default_rng(len(kind) + width).integers(0, 40, (height, width, 4))
    y, x = np.mgrid[:height, :width]
    waves = [128 + 80 * np.sin(x / (3 + i) + i) * np.cos(y / (5 - i) + i) for i in range(4)]
    values = np.clip(np.stack(waves, -1) + noise, 0, 255).astype(np.uint8)
    out, image, exif = io.BytesIO(), Image.fromarray(values[..., :3].copy()), Image.Exif()
    exif[0x0112] = 6
    if kind in ("alpha", "cmyk"):
        Image.fromarray(values, {"alpha": "RGBA", "cmyk": "CMYK"}[kind]).save(out, "PNG" if kind == "alpha" else "JPEG")
    elif kind == "grey":
        image.convert("L").save(out, "BMP")
    elif kind == "palette":
        image.quantize(32).save(out, "GIF", save_all=True, append_images=[image.rotate(90).quantize(8)])
    else:
        image.save(out, "PNG", **({"exif": exif} if kind == "turned" else {}))
    return out.getvalue()


def template(mark: str) -> str:
    part = f"{{% if p['type'] == 'image' %}}{mark}{{% else %}}{{{{ p['text'] }}}}{{% endif %}}"
    parts = f"{{% for p in m['content'] %}}{part}{{% endfor %}}"
    content = f"{{% if m['content'] is string %}}{{{{ m['content'] }}}}{{% else %}}{parts}{{% endif %}}"
    turns = f"{{% for m in messages %}}<|{{{{ m['role'] }}}}|>{content}<|end|>{{% endfor %}}"
    return turns + "{% if add_generation_prompt %}<|assistant|>{% endif %}"


def write_tokenizer(folder: Path, marks: list[str], mark: str, named: dict[str, str]) -> None:
    """Write a byte-level tokenizer that knows a family's marks."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = [*TURNS, "Ċ", "Ġ", *map(chr, range(33, 127)), "ĊĊ", *marks]
    tokenizer = Tokenizer(models.BPE(vocab={each: i for i, each in enumerate(tokens)}, merges=[("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in [*TURNS, *marks]])
    folder.mkdir(exist_ok=True, parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    settings |= {"clean_up_tokenization_spaces": False, "chat_template": template(mark), **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def conversation(prompt: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for shown, text in PROMPTS[prompt]:
        messages += [{"role": "assistant", "content": "a wave."}] if messages else []
        parts = [{"type": "image"} for _ in shown]
        messages.append({"role": "user", "content": [*parts, {"type": "text", "text": text}]})
    return messages


def made_config(given: dict[str, Any], vocabulary: dict[str, int]) -> Any:
    import transformers

    config = json.loads(json.dumps(given["config"]))
    config["text_config"] |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "vocab_size": len(vocabulary)}
    config |= {key: vocabulary[token] for key, token in given["ids"].items()}
    return getattr(transformers, f"{given['class']}Config")(**config)


def named(path: str) -> Any:
    """Return a class of transformers; some files import torchvision, of which the Pillow processors use nothing."""
    if importlib.util.find_spec("torchvision") is None:
        for each in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
            sys.modules.setdefault(each, MagicMock())
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)


def scale_with_pillow() -> None:
    """Have processors without a Pillow form (they need torchvision) scale by Pillow; all else of them stays."""
    import torch
    from PIL import Image
    from torchvision.transforms.v2 import functional

    def resize(image: Any, size: Any, interpolation: Any = None, **_: Any) -> Any:
        filters = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}  # or as Pillow counts
        parts = image.reshape(-1, *image.shape[-3:])
        scaled = [
            np.asarray(
                Image.fromarray(each.permute(1, 2, 0).numpy()).resize(
                    size[::-1], filters.get(getattr(interpolation, "value", ""), interpolation)
                )
            )
            for each in parts
        ]
        return torch.tensor(np.stack(scaled)).permute(0, 3, 1, 2).reshape(*image.shape[:-2], *size)

    functional.resize = resize


def shown_pixels(found: Any) -> Any:
    """Return the pixels of one picture, flat and without what fills up a batch."""
    pixels = np.asarray(found["pixel_values"].float())
    if "pixel_attention_mask" in found:
        pixels = pixels[np.asarray(found["pixel_attention_mask"]) > 0]
    if "image_position_ids" in found:
        pixels = pixels[(np.asarray(found["image_position_ids"]) >= 0).all(-1)]
    return np.asarray(pixels).reshape(-1)


def made_processor(given: dict[str, Any], tokenizer: Any, settings: dict[str, Any], more: dict[str, Any]) -> Any:
    """Return a case's processor, and its image processor, with other settings."""
    import transformers

    images = named(given["image_processor"])(**settings)
    if type(images).__mro__[1].__name__ == "TorchvisionBackend":
        scale_with_pillow()
    # Some want a video processor, which needs torchvision, and look for one of that kind.
    transformers.ProcessorMixin.check_argument_for_proper_class = lambda *_: None
    made = named(given["processor"])
    parts = {"image_processor": images, "tokenizer": tokenizer, "feature_extractor": None, "video_processor": None}
    wanted = made.__init__.__code__.co_varnames
    return made(**{key: value for key, value in parts.items() if key in wanted}, **more), images


def make(case: str) -> None:
    import torch
    import transformers
    from transformers.image_utils import load_image

    from tests.golden.make import load, saved_shapes

    given = CASES[case]
    transformers.modeling_outputs.MoeCausalLMOutputWithPast.image_outputs = None  # which Llama 4's class asks for
    marks = list(dict.fromkeys([*given["named"].values(), *given["ids"].values(), given["mark"], *given["marks"]]))
    kept, ids = {}, {}
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        folder = Path(name)
        write_tokenizer(folder, marks, given["mark"], given["named"])
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), extra_special_tokens=given["named"], pad_token="<|pad|>"
        )
        shapes = saved_shapes(made_config(given, tokenizer.get_vocab()), folder)
        model = load(folder, 1, shapes)
        processor, images = made_processor(given, tokenizer, given["settings"], given["more"])
        for kind in SIZES:
            (folder / kind).write_bytes(picture(kind))
            pixels = shown_pixels(images([load_image(str(folder / kind))], return_tensors="pt"))
            kept[f"{kind} pixels"] = pixels[np.linspace(0, len(pixels) - 1, SHOWN).astype(int)].astype(np.float32)
        for prompt, turns in PROMPTS.items():
            shown = [load_image(str(folder / each)) for names, _ in turns for each in names] or None
            text = tokenizer.apply_chat_template(
                conversation(prompt), chat_template=template(given["mark"]), add_generation_prompt=True, tokenize=False
            )
            inputs = processor(images=shown, text=[text], return_tensors="pt", add_special_tokens=False)
            inputs = {key: each.float() if each.is_floating_point() else each for key, each in inputs.items()}
            kept[prompt] = torch.log_softmax(model(**inputs).logits[0, -ROWS:].double(), -1).float().numpy()
            ids[prompt] = inputs["input_ids"][0].tolist()
        config = json.loads((folder / "config.json").read_text())
    print(case, {prompt: len(each) for prompt, each in ids.items()}, float(kept["one"].min()))
    np.savez_compressed(HERE / f"{case}.npz", **kept)
    stored = {"config": config, "settings": json.loads(images.to_json_string()), "marks": marks, "mark": given["mark"]}
    stored |= {"named": given["named"], "seed": 1, "shapes": shapes, "ids": ids}
    (HERE / f"{case}.json").write_text(json.dumps(stored) + "\n")


PUBLISHED = HERE / "published.json"
SHAPES = ((37, 91), (224, 224), (640, 480), (1080, 1920), (3840, 2160), (3000, 500))
# Checkpoints whose files were not at hand: what is told of them and differs from the config classes' defaults.
KNOWN: dict[str, dict[str, Any]] = {
    "HuggingFaceTB/SmolVLM2-2.2B-Instruct": {
        "model_type": "smolvlm",
        "vision_config": {"image_size": 384, "patch_size": 14, "num_hidden_layers": 27, "intermediate_size": 4304},
        "scale_factor": 3,
    },
    "HuggingFaceTB/SmolVLM-256M-Instruct": {
        "model_type": "smolvlm",
        "vision_config": {"hidden_size": 768, "num_attention_heads": 12, "image_size": 512, "patch_size": 16},
        "scale_factor": 4,
    },
    "Qwen/Qwen2.5-VL-7B-Instruct": {"model_type": "qwen2_5_vl", "vision_config": {"hidden_size": 1280}},
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": {
        "model_type": "llama4",
        "vision_config": {"hidden_size": 1408, "image_size": 336, "vision_output_dim": 4096},
    },
    "OpenGVLab/InternVL3-1B-hf": {"model_type": "internvl", "vision_config": {"attention_bias": True}},
}
ALIKE = {"smolvlm": "idefics3", "qwen3_vl_moe": "qwen3_vl", "qwen3_5_moe": "qwen3_5", "llava": "pixtral"}


def published_settings(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the image processor's and the processor's settings of a published config."""
    kind, vision = ALIKE.get(config["model_type"], config["model_type"]), config["vision_config"]
    side, patch = vision.get("image_size"), vision.get("patch_size")
    if kind == "gemma3":
        return {"size": {"height": side, "width": side}}, {"image_seq_length": config["mm_tokens_per_image"]}
    if kind == "idefics3":
        each = (side // patch // config["scale_factor"]) ** 2
        return {"size": {"longest_edge": 4 * side}, "max_image_size": {"longest_edge": side}}, {"image_seq_len": each}
    if kind == "llama4":
        return {"size": {"height": side, "width": side}}, {"patch_size": patch}
    if kind == "internvl":
        return {"size": {"height": 448, "width": 448}, "crop_to_patches": True}, {"image_seq_length": 256}
    if kind == "qwen2_5_vl":
        return {"min_pixels": 3136, "max_pixels": 12845056}, {}
    if kind.startswith("qwen"):
        return {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "patch_size": 16}, {}
    if kind in ("mistral3", "pixtral"):
        merge = config.get("spatial_merge_size", 1)
        square = {"height": patch * merge, "width": patch * merge}
        return {"size": {"longest_edge": side}, "patch_size": square}, {
            "patch_size": patch,
            "spatial_merge_size": merge,
        }
    return {}, {}


def count_published(folder: Path) -> None:
    """Write what transformers makes of published configs (``ORG__NAME.json``): a tower's parameters, a picture's tokens."""
    import torch
    import transformers
    from PIL import Image

    given = {each.stem.replace("__", "/"): json.loads(each.read_text()) for each in sorted(folder.glob("*.json"))}
    found: dict[str, Any] = {}
    for name, config in {**given, **KNOWN}.items():
        kind = ALIKE.get(config.get("model_type", ""), config.get("model_type", ""))
        if kind not in CASES or "vision_config" not in config or name == "google/gemma-4-26b-a4b-it.prerelease":
            continue
        config["vision_config"] = {
            key: each for key, each in config["vision_config"].items() if key != "model_type" or each
        }
        if isinstance(config.get("text_config"), dict):  # null: not said
            config["text_config"] = {key: each for key, each in config["text_config"].items() if each is not None}
        if name.endswith("prerelease"):  # whose rotary settings had another form
            config["vision_config"].pop("rope_parameters", None)
        whole = transformers.AutoConfig.for_model(
            **{**config, "audio_config": None} if kind.startswith("gemma4") else config
        )
        with torch.device("meta"):
            model = transformers.AutoModelForImageTextToText.from_config(whole)
        sees = [
            each
            for key, each in model.state_dict().items()
            if not re.search(r"language_model|text_model|lm_head|\.head\.", key)
        ]
        told = whole.to_dict()
        kept = {
            key: told["text_config"].get(key) for key in ("hidden_size", "use_bidirectional_attention", "pad_token_id")
        }
        kept |= {key: told["text_config"][key] for key in ("rope_parameters",) if kind.startswith("qwen")}
        config = {
            **{key: each for key, each in told.items() if isinstance(each, int | float | str)},
            "text_config": kept,
        }
        config["vision_config"] = told["vision_config"]
        settings, more = published_settings(config)
        case = CASES[kind]
        marks = list(dict.fromkeys([*case["named"].values(), *case["ids"].values(), case["mark"], *case["marks"]]))
        with tempfile.TemporaryDirectory() as place:
            write_tokenizer(Path(place), marks, case["mark"], case["named"])
            tokenizer = transformers.PreTrainedTokenizerFast(
                tokenizer_file=f"{place}/tokenizer.json", extra_special_tokens=case["named"], pad_token="<|pad|>"
            )
        processor, images = made_processor(case, tokenizer, settings, more)
        counts = []
        for shape in SHAPES:
            ids = processor(images=[Image.new("RGB", shape)], text=[case["mark"]], add_special_tokens=False)[
                "input_ids"
            ][0]
            counts.append(list(ids).count(tokenizer.convert_tokens_to_ids(next(iter(case["ids"].values())))))
        print(name, counts, sum(each.numel() for each in sees), flush=True)
        found[name] = {"config": config, "settings": json.loads(images.to_json_string()), "counts": counts}
        found[name]["parameters"] = sum(each.numel() for each in sees)
    PUBLISHED.write_text(
        "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(each)}" for key, each in found.items()) + "\n}\n"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--published"]:
        count_published(Path(sys.argv[2]))
        sys.exit()
    for each in sys.argv[1:] or CASES:
        make(each)
