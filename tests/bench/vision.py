"""Section vision: what a picture takes beside the prompt that it becomes, and what was predicted of it."""

import io
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.plan import Plan
from tests.bench.report import Row, Section, plain, series
from tests.engine.inside import runtime_of
from tests.golden.vision import HERE, write_tokenizer
from tokamac.engine import Engine, Message, PromptCacheSpec, Sampling

# The golden Idefics3 grown to the sizes of SmolVLM-500M: its text model is SmolLM2-360M's, its tower SigLIP's base.
SIZES: dict[str, dict[int, int]] = {
    "text_model": {64: 960, 96: 2560, 32: 320},
    "lm_head": {64: 960},
    "vision_model": {32: 768, 48: 3072, 14: 16, 16: 1024},
    "connector": {64: 960, 128: 16 * 768},
}
TEXT: dict[str, Any] = {
    "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 40, "num_attention_heads": 15,
    "num_key_value_heads": 5, "head_dim": 64, "max_position_embeddings": 8192,
}  # fmt: skip
VISION = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 512, "patch_size": 16,
}  # fmt: skip
PICTURES = ((512, 512), (1024, 768))
QUESTION = "What is in this picture?"


def make(folder: Path) -> int:
    """Write the seeded model in half precision; return its parameters."""
    import mlx.core as mx

    stored = json.loads((HERE / "idefics3.json").read_text())
    write_tokenizer(folder, stored["marks"], stored["mark"], stored["named"])
    config = {**stored["config"], "scale_factor": 4, "dtype": "float16"}
    config["text_config"], config["vision_config"] = config["text_config"] | TEXT, config["vision_config"] | VISION
    (folder / "config.json").write_text(json.dumps(config))
    settings = stored["settings"] | {"max_image_size": {"longest_edge": 512}, "size": {"longest_edge": 1024}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    mx.random.seed(0)
    weights: dict[str, mx.array] = {}
    for name, shape in stored["shapes"].items():
        part = next(each for each in SIZES if each in name)
        count = 1 if ".layers.0." not in name else (TEXT if part == "text_model" else VISION)["num_hidden_layers"]
        grown = [SIZES[part].get(side, side) for side in shape]
        for layer in range(0 if ".layers.1." in name else count):
            made = (
                mx.random.normal(grown) * grown[-1] ** -0.5
                if len(grown) > 1
                else mx.full(grown, int("norm" in name and name.endswith("weight")))
            )
            weights[name.replace(".layers.0.", f".layers.{layer}.")] = made.astype(mx.float16)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return sum(each.size for each in weights.values())


def drawn(size: tuple[int, int], seed: int) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.effect_noise(size, 40 + seed).convert("RGB").save(out, "PNG")
    return out.getvalue()


def measure_vision(plan: Plan) -> Section:
    """Ask of pictures that are new, and again of each; compare the tower's time and memory with what was predicted."""
    with tempfile.TemporaryDirectory(prefix="tokamac-bench-") as name:
        parameters = make(Path(name) / "seeded")
        with Engine.load(Path(name) / "seeded", prompt_cache=PromptCacheSpec(), speculation=None) as engine:
            engine.ask([_asked((64, 64), 0)], Sampling(max_tokens=1))  # reads the tower
            rows = [row for size in PICTURES for row in _rows(engine, size, plan)]
    how = (
        f"A seeded model of {parameters / 1e6:,.0f} million parameters in the shapes of SmolVLM-500M, 98 million of them its "
        "tower: random weights, in half precision as stored. Each picture is new, noise as a PNG file, then asked about once "
        "more; nothing is guessed. Predicted by the speed of the picture before."
    )
    return Section("Pictures", rows, how)


def _asked(size: tuple[int, int], seed: int) -> Message:
    return Message("user", QUESTION, images=(drawn(size, seed),))


def _rows(engine: Engine, size: tuple[int, int], plan: Plan) -> list[Row]:
    seen, read, shares, again, predicted, working = [], [], [], [], [], []
    tokens = 0
    eyes, sampling = runtime_of(engine).eyes, Sampling(max_tokens=2, temperature=0.0)
    assert not isinstance(eyes, str)
    for number in range(plan.rounds):
        asked = _asked(size, 1 + number)
        price = engine.picture_price(asked.pictures[0])
        tokens = price.tokens
        first, second = (engine.ask([asked], sampling).metrics for _ in range(2))
        seen.append(first.image_s)
        read.append(first.prefill_s)
        shares.append(None if first.image_s is None or not first.ttft_s else 100 * first.image_s / first.ttft_s)
        again.append(None if second.ttft_s is None else 1e3 * second.ttft_s)
        predicted.append(None if price.see_s is None or not first.image_s else price.see_s / first.image_s)
        working.append(eyes.cost(eyes.family.plan(*size)).working / 1e6)
    what = f"{size[0]} × {size[1]}, {tokens:,} tokens"
    return [
        plain(f"{what}: seeing it", series(seen), "s"),
        plain(f"{what}: reading it", series(read), "s"),
        plain(f"{what}: seeing, of the time to the first token", series(shares), "%"),
        plain(f"{what}: the second question, first token after", series(again), "ms"),
        plain(f"{what}: seconds predicted ÷ measured", series(predicted)),
        plain(f"{what}: memory predicted for seeing it", series(working), "MB"),
    ]
